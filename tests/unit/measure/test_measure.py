"""Measuring on a CPU: what is measured, what is left out and why, and that nothing is lost."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from qsync_opt.build import build_problem
from qsync_opt.costs import Cluster, ClusterKind, DeviceCosts
from qsync_opt.errors import MeasureError, ParameterError
from qsync_opt.graph import Operand, OperatorGraph, Origin, Role
from qsync_opt.measure.calls import tensors_in
from qsync_opt.measure.capture import capture
from qsync_opt.measure.clock import Clock, Effort, spread_of
from qsync_opt.measure.communication import (
    measure_local_all_reduce,
    read_buckets,
    sizes_to_measure,
)
from qsync_opt.measure.execution import Execution, RecordingCache
from qsync_opt.measure.measuring import MeasureProgress, TrainedModel, measure
from qsync_opt.measure.memory import metered, saved_storages
from qsync_opt.measure.notebook import Notebook
from qsync_opt.measure.operands import gradient_like, make_operand, storage_size
from qsync_opt.measure.operators import OperatorMeasurement, OperatorMeter
from qsync_opt.measure.uniform import converted, run_loss, uniform_plan
from qsync_opt.optimize.evaluate import evaluate_device, follower_columns
from qsync_opt.precision import HANDED_ON, Precision
from qsync_opt.runtime.availability import supported_precisions
from tests.cost_cases import PRECISIONS, made_up_table
from tests.unit.measure.nets import Chain, Mixed, capture_chain, chain_batch, mixed_batch

CPU = torch.device("cpu")
QUICK = Effort(warm_up=1, samples=2, budget_s=0.0, sample_s=0.0, retries=0)


def quick_clock() -> Clock:
    return Clock(CPU, QUICK)


@pytest.fixture(scope="module")
def mixed() -> tuple[OperatorGraph, TrainedModel, DeviceCosts]:
    torch.manual_seed(0)
    trained = TrainedModel(model=Mixed(), batch=mixed_batch(), loss=functional.cross_entropy)
    graph = capture(trained.model, trained.batch, trained.loss, least_coverage=0.0)
    return graph, trained, measure(graph, trained=trained, clock=quick_clock())


def test_every_operator_has_costs_where_it_has_a_form(
    mixed: tuple[OperatorGraph, TrainedModel, DeviceCosts],
) -> None:
    graph, _, costs = mixed
    assert costs.precisions == PRECISIONS
    for row in graph.operators:
        for column, precision in enumerate(PRECISIONS):
            has = {
                Role.ADJUSTABLE: precision in supported_precisions(row.kind),
                Role.FOLLOWER: precision in HANDED_ON,
                Role.FIXED: precision is Precision.FP32,
            }[row.role]
            if has:
                assert costs.operators.forward_s[row.signature, column] >= 0, row.name
    reasons = {(row.signature, row.precision): row.reason for row in costs.unavailable}
    assert reasons[None, Precision.FP8] == "cpu does not have it"
    attention = next(r for r in graph.operators if r.kind == "scaled_dot_product_attention")
    assert "no form at int8" in reasons[attention.signature, Precision.INT8]


def test_a_layer_that_casts_is_charged_on_the_edge_and_free_without_a_cast(
    mixed: tuple[OperatorGraph, TrainedModel, DeviceCosts],
) -> None:
    graph, _, costs = mixed
    row = next(r for r in graph.operators if r.name == "qkv")
    table = costs.operators.input_cast_s[row.signature]
    fp32, bf16 = (HANDED_ON.index(p) for p in (Precision.FP32, Precision.BF16))
    assert table[0, fp32] == 0.0
    assert table[1, bf16] == 0.0
    assert table[0, bf16] > 0.0
    assert table[1, fp32] > 0.0
    assert table[2, fp32] > 0.0  # quantised whatever it arrives in
    assert table[2, bf16] > 0.0
    attention = next(r for r in graph.operators if r.kind == "scaled_dot_product_attention")
    assert np.isnan(costs.operators.input_cast_s[attention.signature]).all()


@pytest.mark.parametrize("seed", range(6))
def test_saved_memory_is_predicted_exactly(
    mixed: tuple[OperatorGraph, TrainedModel, DeviceCosts], seed: int
) -> None:
    graph, trained, costs = mixed
    problem = build_problem(
        graph, {"one": costs}, made_up_table(graph), Cluster(kinds=(ClusterKind(name="one"),))
    )
    generator = random.Random(seed)
    plan = {}
    for index in graph.adjustable:
        row = graph.operators[index]
        has = [p for p in PRECISIONS if p in supported_precisions(row.kind)]
        plan[row.name] = generator.choice(has) if seed else Precision.FP32
    inner = "encoder.self_attn"
    for name, source in (
        ("matmul", "qkv"),
        ("matmul.1", "qkv"),
        (f"{inner}.scaled_dot_product_attention", f"{inner}.linear"),
    ):  # a cast would copy the part that is read, where the whole storage is kept uncast
        plan[name] = costs.handed_on(plan[source])
    columns = [PRECISIONS.index(plan.get(r.name, Precision.FP32)) for r in graph.operators]
    chosen = follower_columns(problem, np.array(columns))
    told = evaluate_device(problem, problem.devices[0], chosen)
    assert told.saved_bytes == kept_bytes(graph, trained, plan)


def kept_bytes(graph: OperatorGraph, trained: TrainedModel, plan: Mapping[str, Precision]) -> int:
    inputs, target = trained.batch
    with converted(trained.model, graph, plan):
        _, saved = saved_storages(lambda: run_loss(trained.model, inputs, target, trained.loss))
    model = trained.model
    given = (*model.parameters(), *model.buffers(), *tensors_in(trained.batch))
    there = {tensor.untyped_storage().data_ptr() for tensor in given}
    return sum(size for key, size in saved.items() if key not in there)


def test_buckets_hold_every_gradient_once_in_the_order_of_a_second_step(
    mixed: tuple[OperatorGraph, TrainedModel, DeviceCosts],
) -> None:
    _, trained, costs = mixed
    parameters = dict(trained.model.named_parameters())
    names = [name for bucket in costs.buckets for name in bucket.parameters]
    assert sorted(names) == sorted(parameters)
    for bucket in costs.buckets:
        assert bucket.size_bytes == 4 * sum(parameters[n].numel() for n in bucket.parameters)
    many = read_buckets(trained.model, trained.batch, trained.loss, bucket_cap_mb=1e-3)
    assert len(many) > len(costs.buckets)
    assert many[0].parameters[0].startswith("fc")  # last layers are ready first
    assert not torch.distributed.is_initialized()


def test_an_interrupted_measurement_goes_on_where_it_was() -> None:
    graph = capture_chain()
    kept: dict[str, Any] = {}

    def interrupt(progress: MeasureProgress) -> None:
        if progress.done == 5:
            raise KeyboardInterrupt

    notebook = Notebook(keep=kept.update)
    with pytest.raises(KeyboardInterrupt):
        measure(graph, clock=quick_clock(), notebook=notebook, progress=interrupt)
    assert len(kept) == 5
    marked = {name: [7.0] + [0.0] * (len(row) - 1) for name, row in kept.items()}
    costs = measure(graph, clock=quick_clock(), notebook=Notebook(marked))
    found = costs.operators.forward_s == 7.0
    assert found.sum() == 5
    assert np.nanmax(costs.operators.forward_s[~found]) < 1.0


def test_out_of_memory_leaves_one_precision_out(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = capture_chain()
    real = OperatorMeter.measure

    def short(self: OperatorMeter, operator: int, precision: Precision) -> OperatorMeasurement:
        if precision is Precision.INT8:
            raise torch.OutOfMemoryError("tried to allocate 80 GiB\nand a long table")
        return real(self, operator, precision)

    monkeypatch.setattr(OperatorMeter, "measure", short)
    costs = measure(graph, clock=quick_clock())
    assert np.isnan(costs.operators.forward_s[:, 2]).all()
    assert not np.isnan(costs.operators.forward_s[:, 0]).any()
    reasons = {r.reason for r in costs.unavailable if r.precision is Precision.INT8}
    assert reasons == {"out of memory: tried to allocate 80 GiB"}


def test_an_operator_that_cannot_run_at_all_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: OperatorMeter, operator: int, precision: Precision) -> OperatorMeasurement:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(OperatorMeter, "measure", refuse)
    with pytest.raises(MeasureError, match="cannot be run in fp32: no kernel"):
        measure(capture_chain(), clock=quick_clock())


def test_a_busy_device_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    real = OperatorMeter.measure

    def shaky(self: OperatorMeter, operator: int, precision: Precision) -> OperatorMeasurement:
        row = real(self, operator, precision).to_list()
        row[2] = 0.5  # the spread of the forward
        return OperatorMeasurement.from_list(row)

    monkeypatch.setattr(OperatorMeter, "measure", shaky)
    costs = measure(capture_chain(), clock=quick_clock(), precisions=[Precision.FP32])
    (warning,) = costs.warnings
    assert "spread by more than 20%" in warning
    assert "50%" in warning


def test_a_precision_that_overflows_is_told() -> None:
    """3.4e38 is a number in fp32 and infinite in bf16."""
    model = nn.Sequential(nn.Linear(1, 1))
    batch = (torch.full((2, 1), 3.4e38), torch.zeros(2))

    def loss(out: Tensor, target: Tensor) -> Tensor:
        return (out[:, 0] * 1e-38 - target).sum()

    costs = measure(
        capture(model, batch, loss, least_coverage=0.0),
        trained=TrainedModel(model=model, batch=batch, loss=loss),
        clock=quick_clock(),
        precisions=[Precision.FP32, Precision.BF16],
    )
    told = [warning for warning in costs.warnings if "not finite" in warning]
    assert told == ["bf16: the gradient of 0.weight is not finite in a step of it throughout"]


def test_options_are_checked() -> None:
    graph = capture_chain()
    with pytest.raises(ParameterError, match=r"precisions.*fp32, bf16, int8"):
        measure(graph, precisions=[Precision.FP8])
    with pytest.raises(ParameterError, match="optimizer.*adamw"):
        measure(graph, optimizer="lion", clock=quick_clock(), precisions=[Precision.FP32])
    with pytest.raises(MeasureError, match="captured on cpu"):
        measure(graph, device="cuda")


def test_measurements_survive_being_written_as_numbers() -> None:
    row = OperatorMeter(capture_chain(), quick_clock(), (Precision.FP32,)).measure(
        0, Precision.FP32
    )
    back = OperatorMeasurement.from_list(row.to_list())
    np.testing.assert_equal(back.to_list(), row.to_list())
    assert np.isnan(back.input_cast_s).tolist() == np.isnan(row.input_cast_s).tolist()


# --- the parts --------------------------------------------------------------------------


def test_a_clock_gives_medians_of_its_timer() -> None:
    ticks = iter(np.cumsum([0.0, *([1.0] * 100)]))
    clock = Clock(CPU, Effort(warm_up=0, samples=5, budget_s=0.0, retries=0), lambda: next(ticks))
    timing = clock.time(lambda: None)
    assert timing.time_s == 1.0
    assert timing.spread == 0.0
    assert timing.host_s == 0.0


def test_the_spread_is_that_of_the_quartiles() -> None:
    assert spread_of([1.0]) == 0.0
    assert spread_of([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2.0 / 3.0)
    times = [1.0, 3.0, 2.0, 7.0]
    assert spread_of([5 * t for t in times]) == pytest.approx(spread_of(times))


def test_results_are_held_and_let_go_together() -> None:
    alive: set[int] = set()

    class Result:
        def __init__(self) -> None:
            alive.add(id(self))

        def __del__(self) -> None:
            alive.discard(id(self))

    most = 0

    def call() -> Result:
        nonlocal most
        most = max(most, len(alive))
        return Result()

    Clock(CPU, Effort(samples=20, budget_s=0.0, retries=0)).time(call, results=8)
    assert 0 < most <= 8
    assert not alive


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_layer_runs_as_in_the_converted_model(precision: Precision) -> None:
    graph = capture_chain()
    cache = RecordingCache()
    index = graph.operator_index["last"]
    execution = Execution(graph, index, precision, CPU, torch.float32, cache)
    (out,) = tensors_in(execution.forward())
    model = Chain()
    weight, bias = execution.parameters
    with torch.no_grad():
        model.last.weight.copy_(weight)
        model.last.bias.copy_(bias)
    plan = {graph.operators[i].name: precision for i in graph.adjustable}
    with converted(model, graph, plan):
        expected = model.last(execution.operands[0].detach())
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    assert len(cache.requests) == (precision is not Precision.FP32)


def test_in_place_calls_have_a_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = capture_chain(lambda net, h: net.block(h))
    index = next(i for i, row in enumerate(graph.operators) if row.kind == "relu")
    execution = Execution(graph, index, Precision.BF16, CPU)
    before = execution.operands[0].detach().clone()
    assert execution.prepare_backward()
    found: list[tuple[torch.Tensor, ...]] = []
    grad = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *a, **k: found.append(grad(*a, **k)))
    execution.backward()
    execution.backward()
    (gradient,) = execution.gradients
    for (result,) in found:  # that of the input, for which something is computed
        assert torch.equal(result, torch.where(before > 0, gradient, 0.0))
    assert (before < 0).any()


def test_what_is_added_in_place_comes_in_the_dtype_of_the_rest() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            out: torch.Tensor = self.second(x)
            out += x
            return out

    batch = (torch.randn(4, 8), torch.randint(8, (4,)))
    graph = capture(Residual(), batch, nn.functional.cross_entropy, least_coverage=0.0)
    (index,) = (i for i, row in enumerate(graph.operators) if row.kind in ("add_", "iadd"))
    execution = Execution(graph, index, Precision.BF16, CPU)
    assert [operand.dtype for operand in execution.operands] == [torch.bfloat16] * 2


def operand(
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: str = "float32",
    origin: Origin = Origin.OPERATOR,
    bounds: tuple[int, int] | None = None,
) -> Operand:
    return Operand(
        shape=shape, stride=stride, dtype=dtype, origin=origin, requires_grad=True, bounds=bounds
    )


def test_made_up_operands_are_as_the_signature_says() -> None:
    for shape, stride in (((2, 3), (1, 2)), ((4, 5), (0, 1)), ((0, 3), (3, 1)), ((), ())):
        made = make_operand(operand(shape, stride), torch.float32, CPU)
        assert (made.shape, made.stride()) == (shape, stride)
        assert made.untyped_storage().nbytes() == 4 * storage_size(shape, stride)
    whole = operand((1000,), (1,), dtype="int64", bounds=(3, 9))
    made = make_operand(whole, torch.int64, CPU)
    assert (int(made.min()), int(made.max())) == (3, 9)
    marked = operand((1000,), (1,), dtype="int64", bounds=(-100, 9))
    assert set(make_operand(marked, torch.int64, CPU).tolist()) == {-100, 9}
    variance = operand((100,), (1,), origin=Origin.BUFFER)
    assert float(make_operand(variance, torch.float32, CPU).min()) > 0


def test_a_gradient_is_laid_out_as_its_reader_hands_it_back() -> None:
    base = torch.randn(2, 3, 4, requires_grad=True)
    out = base * 1
    seen = out.permute(1, 0, 2)
    found: list[Tensor] = []
    out.register_hook(found.append)  # type: ignore[no-untyped-call]
    (seen.contiguous() * torch.randn(3, 2, 4)).sum().backward()  # type: ignore[no-untyped-call]
    made = gradient_like(out, operand(tuple(seen.shape), tuple(seen.stride())))
    assert made.stride() == found[0].stride() != out.stride()
    assert gradient_like(out, None).stride() == out.stride()


def test_memory_is_counted_at_its_peak_and_at_the_end() -> None:
    with metered(CPU) as use:
        kept = torch.ones(100)
        double = torch.ones(50).double()
        del double
    assert use.left_bytes == 400
    assert use.peak_bytes == 400 + 200 + 400
    del kept


def test_uniform_plans_take_the_nearest_precision(
    mixed: tuple[OperatorGraph, TrainedModel, DeviceCosts],
) -> None:
    graph, _, _ = mixed
    plan = uniform_plan(graph, Precision.INT8, frozenset(PRECISIONS))
    kinds = {graph.operators[i].name: graph.operators[i].kind for i in graph.adjustable}
    assert set(plan) == set(kinds)
    for name, precision in plan.items():
        eight = Precision.INT8 in supported_precisions(kinds[name])
        assert precision is (Precision.INT8 if eight else Precision.BF16)


@pytest.mark.slow
def test_all_reduces_between_processes_are_timed() -> None:
    graph, trained = capture_chain(), Chain()
    options = {"find_unused_parameters": True}  # half of the chain is for other tests
    buckets = read_buckets(trained, chain_batch(), functional.cross_entropy, **options)
    sizes = sizes_to_measure(buckets)
    costs = measure_local_all_reduce(sizes, 2, codes=(4, 16))
    assert costs.ranks == 2
    assert costs.bits == (32, 16, 4)
    assert all((row.time_s > 0).all() for row in costs.codes)
    assert costs.backend == "gloo"
    assert (costs.time_s > 0).all()
    assert {bucket.size_bytes for bucket in buckets} <= set(costs.size_bytes.tolist())
    total = sum(4 * parameter.elements for parameter in graph.parameters)
    assert sum(bucket.size_bytes for bucket in buckets) == total
