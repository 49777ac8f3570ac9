"""Ranges of gradients against loops over values, and against gradients by autograd alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from qsync_opt.gradient_noise import coded_variance
from qsync_opt.graph import OperatorGraph
from qsync_opt.kernels.rounding import RandomKey
from qsync_opt.measure.capture import capture
from qsync_opt.measure.gradients import cast_power, gradient_ranges, range_power
from qsync_opt.measure.sensitivity import perturbations
from qsync_opt.precision import Precision
from qsync_opt.runtime.bucket_codec import decode, encode
from qsync_opt.runtime.communication import layout_of

Batch = tuple[Tensor, Tensor]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(40, 64), nn.LayerNorm(64), nn.Tanh(), nn.Linear(64, 10)]
    return nn.Sequential(*layers)


def batches(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(6, 40, generator=generator),
            torch.randint(10, (6,), generator=generator),
        )
        for _ in range(count)
    ]


@pytest.fixture(scope="module")
def graph() -> OperatorGraph:
    return capture(net(), batches(1)[0], functional.cross_entropy, least_coverage=0.0)


def oracle(values: list[float], bucket: int) -> float:
    total = 0.0
    for start in range(0, len(values), bucket):
        part = values[start : start + bucket]
        total += max(len(part) - 2, 0) * (max(part) - min(part)) ** 2
    return total


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 100, 1024, 1025, 3000])
def test_ranges_are_taken_bucket_by_bucket(count: int) -> None:
    values = torch.randn(count, generator=torch.Generator().manual_seed(count))
    for bucket in (8, 64, 1024):
        expected = oracle(values.double().tolist(), bucket)
        assert range_power(values, bucket) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_code_loses_what_ranges_say(bits: int) -> None:
    """One coding, over many draws; the ends of a bucket lose nothing."""
    values = torch.randn(8192, generator=torch.Generator().manual_seed(bits))
    layout = layout_of(values.numel(), 1, bits)
    lost = []
    for step in range(40):
        messages = encode(values, layout, "stochastic", RandomKey(seed=1, step=step))
        found = decode(messages, layout).flatten()
        lost.append(float((found - values).double().square().sum()))
    draws = torch.tensor(lost, dtype=torch.float64)
    law = coded_variance(bits, range_power(values), 0.0)
    # Besides the draws, places between levels: variance 1/180 of each value around 1/6.
    places = law * 6 * (1 / 180 / values.numel()) ** 0.5
    assert abs(float(draws.mean()) - law) < 5 * (float(draws.std()) / 40**0.5 + places)


def test_casts_lose_what_rounding_takes() -> None:
    values = torch.randn(500, generator=torch.Generator().manual_seed(0))
    expected = sum(float(v - v.bfloat16().float()) ** 2 for v in values)
    assert cast_power(values) == pytest.approx(expected, rel=1e-6)
    assert cast_power(values.bfloat16()) == 0.0


def test_gradients_of_every_batch_and_their_mean(graph: OperatorGraph) -> None:
    model, given = net(), batches(3)
    before = copy.deepcopy(model.state_dict())
    found = gradient_ranges(model, given, graph, loss=functional.cross_entropy)
    names = [name for name, _ in model.named_parameters()]
    assert sorted(found.parameters) == sorted(names)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    gradients: list[list[Tensor]] = []
    for inputs, target in given:
        value = functional.cross_entropy(model(inputs), target)
        gradients.append(list(torch.autograd.grad(value, list(model.parameters()))))
    for name, *own in zip(names, *gradients, strict=True):
        row = found.parameters.index(name)
        mean = torch.stack(own).double().mean(0)
        coded = name == "0.weight"  # the others are vectors, or do not fill a bucket
        ranges = [oracle(g.flatten().double().tolist(), 1024) for g in [*own, mean]]
        expected = sum(ranges[:-1]) / 3 if coded else 0.0
        assert found.own_ranges[row] == pytest.approx(expected, rel=1e-4)
        assert found.mean_ranges[row] == pytest.approx(ranges[-1] if coded else 0.0, rel=1e-4)
        casts = [cast_power(g) for g in own]
        assert found.own_casts[row] == pytest.approx(sum(casts) / 3, rel=1e-2)
        assert found.mean_casts[row] > 0


def test_a_table_holds_ranges_where_they_are_asked_for(graph: OperatorGraph) -> None:
    first, *others = batches(2)
    options = {"method": "random", "batches": others, "loss": functional.cross_entropy}
    precisions = (Precision.FP32, Precision.BF16)
    plain = perturbations(net(), first, graph, precisions=precisions, **options)  # type: ignore[arg-type]
    assert plain.gradients is None
    table = perturbations(
        net(),
        first,
        graph,
        precisions=precisions,
        gradients=True,
        **options,  # type: ignore[arg-type]
    )
    expected = gradient_ranges(net(), [first, *others], graph, loss=functional.cross_entropy)
    assert table.gradients == expected
