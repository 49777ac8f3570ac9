"""Parts of `communication_on_ranks`: buckets of DDP at bits of their own, and what codes add."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from qsync_opt.errors import TrainError
from qsync_opt.gradient_noise import cast_variance, coded_variance
from qsync_opt.measure.communication import averaging_at, measure_all_reduce
from qsync_opt.measure.gradients import cast_power, range_power
from qsync_opt.runtime.bucket_bits import PlannedBits
from qsync_opt.runtime.bucket_codec import exempt_parameters
from qsync_opt.runtime.communication import Coding, all_reduce_bytes, communication_at
from qsync_opt.runtime.quantized_comm import send_at_bits
from qsync_opt.runtime.two_phase import Averaging, Exchange, Memory
from tests.distributed.communication_on_ranks import Part, all_equal, counted
from tests.low_precision import TinyGpt, language_loss, tokens

#: How far from the expected value the mean of draws may be, in standard errors.
SIGMAS = 5


def values(rank: int, count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(100 * seed + rank))


def batch(rank: int) -> Tensor:
    return tokens(16)[2 * rank : 2 * rank + 2]


class Buckets:
    """DDP's buckets after its rebuild, as a problem would have them."""

    def __init__(self) -> None:
        self.size_bytes: list[int] = []
        self.names: list[list[str]] = []

    def note(self, model: nn.Module, bucket: Any) -> None:
        if bucket.index() == 0:
            self.size_bytes, self.names = [], []
        of = {id(p): name for name, p in model.named_parameters()}
        self.size_bytes.append(4 * bucket.buffer().numel())
        self.names.append([of[id(p)] for p in bucket.parameters()])


def models(cap_mb: float = 0.02) -> tuple[TinyGpt, DistributedDataParallel]:
    torch.manual_seed(0)
    model = TinyGpt(width=40)
    return model, DistributedDataParallel(model, bucket_cap_mb=cap_mb)


def backward(model: nn.Module, wrapped: Any, rank: int) -> Tensor:
    model.zero_grad(set_to_none=True)
    language_loss(wrapped(batch(rank)), batch(rank)).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def read_buckets(rank: int) -> Buckets:
    found = Buckets()
    model, wrapped = models()

    def hook(state: object, bucket: Any) -> Any:
        found.note(model, bucket)
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    hook.__annotations__.clear()
    wrapped.register_comm_hook(None, hook)
    for _ in range(2):
        backward(model, wrapped, rank)
    return found


def planned(buckets: Buckets, cycle: Sequence[int]) -> PlannedBits:
    bits = [cycle[k % len(cycle)] for k in range(len(buckets.size_bytes))]
    owners = {name: k for k, names in enumerate(buckets.names) for name in names}
    return PlannedBits(bits=tuple(bits), size_bytes=tuple(buckets.size_bytes), bucket_of=owners)


def expected_bytes(model: nn.Module, buckets: Buckets, bits: Sequence[int], world: int) -> int:
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    exempt = {id(p) for p in exempt_parameters(model)}
    free = {name for name, p in model.named_parameters() if id(p) in exempt}
    total = 0
    for names, wanted in zip(buckets.names, bits, strict=True):
        exact = sum(sizes[name] for name in names if name in free)
        coded = sum(sizes[name] for name in names) - exact
        total += all_reduce_bytes(coded, world, wanted, exact=exact)
    return total


def mixed_bits(rank: int, world: int, folder: Path) -> None:
    """Bytes are the formula's, replicas equal to the bit, buckets of 32 bits exact."""
    buckets = read_buckets(rank)
    assert len(buckets.size_bytes) > 3
    exact_model, exact_wrapped = models()
    exact_wrapped.register_comm_hook(None, default_hooks.allreduce_hook)
    for _ in range(2):
        exact = backward(exact_model, exact_wrapped, rank)
    model, wrapped = models()
    plan = planned(buckets, (32, 8, 16, 4))
    hook = send_at_bits(wrapped, plan, seed=3)
    backward(model, wrapped, rank)  # DDP forms its buckets
    before = hook.sent_bytes
    with counted() as sent:
        found = backward(model, wrapped, rank)
    assert all_equal(found)
    ring = sum(
        all_reduce_bytes(size // 4, world, bits)
        for size, bits in zip(plan.size_bytes, plan.bits, strict=True)
        if bits >= 16
    )
    assert sent[0] + ring == hook.sent_bytes - before
    assert hook.sent_bytes - before == expected_bytes(model, buckets, plan.bits, world)
    whole = {name: p.grad for name, p in exact_model.named_parameters()}
    free = {id(p) for p in exempt_parameters(model)}
    for names, bits in zip(buckets.names, plan.bits, strict=True):
        for name in names:
            gradient, right = model.get_parameter(name).grad, whole[name]
            assert gradient is not None
            assert right is not None
            if bits == 32:
                assert torch.equal(gradient, right), name
            elif id(model.get_parameter(name)) in free and bits < 16:
                assert torch.allclose(gradient, right, rtol=1e-5, atol=1e-8), name
            else:
                most = {16: 0.02, 8: 0.05, 4: 0.6}[bits]
                assert float((gradient - right).norm()) <= most * float(right.norm()), name
    error = float((found - exact).norm() / exact.norm())
    assert 0 < error < 0.4


def other_buckets(rank: int, world: int, folder: Path) -> None:
    """Where DDP's buckets are not the problem's, they take the most bits of their parameters."""
    buckets = read_buckets(rank)
    plan = planned(buckets, (4,))
    model, wrapped = models(cap_mb=25.0)  # one bucket holds everything
    hook = send_at_bits(wrapped, plan)
    for _ in range(2):
        backward(model, wrapped, rank)
    assert hook._buckets[0].averaging is not None
    assert hook._buckets[0].averaging.coding == Coding(bits=4)
    first = plan.at((8, *plan.bits[1:]))
    for sending, cast, coding in (
        (first, None, Coding(bits=8)),
        (plan.at((16, *plan.bits[1:])), "bf16", None),
        (plan.at(()), None, None),
    ):
        hook.change(sending)
        found = backward(model, wrapped, rank)
        assert all_equal(found)
        known = hook._buckets[0]
        assert known.cast == cast
        assert (None if known.averaging is None else known.averaging.coding) == coding
    if world > 1:
        _, wrapped = models()
        with pytest.raises(TrainError, match="do not agree on how gradients are sent"):
            send_at_bits(wrapped, plan.at((4 + rank, *plan.bits[1:])))


def changed_bits(rank: int, world: int, folder: Path) -> None:
    """After a change of bits, gradients are those of a hook that had these bits all along."""
    buckets = read_buckets(rank)
    plan, other = planned(buckets, (8, 32, 4)), planned(buckets, (16, 4, 32))
    found = []
    for first in (plan, other):
        model, wrapped = models()
        hook = send_at_bits(wrapped, first, seed=1)
        for _ in range(2):
            backward(model, wrapped, rank)
        hook.change(other)
        hook.begin(7)
        found.append(backward(model, wrapped, rank))
    assert torch.equal(*found)


def broken_gradients(rank: int, world: int, folder: Path) -> None:
    """A NaN or an infinity on one rank is one on all, in a bucket of any bits."""
    buckets = read_buckets(rank)
    for bad in (float("nan"), float("inf")):
        for shift in range(4):
            cycle = (32, 8, 16, 4)
            model, wrapped = models()
            send_at_bits(wrapped, planned(buckets, cycle[shift:] + cycle[:shift]))
            backward(model, wrapped, rank)
            handle: Any = None
            if rank == world - 1:
                spoiled: Any = model.get_parameter(buckets.names[0][0])
                handle = spoiled.register_hook(partial(torch.mul, torch.tensor(bad)))
            finite = torch.isfinite(backward(model, wrapped, rank))
            assert all_equal(finite)
            assert not bool(finite.all()), (bad, cycle[shift])
            if handle is not None:
                handle.remove()
            assert bool(torch.isfinite(backward(model, wrapped, rank)).all())


class MixedDtypes(nn.Module):
    """Parameters of three dtypes, and one too small for a quantisation bucket."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.single_one = nn.Parameter(torch.randn(40, 60))
        self.half_one = nn.Parameter(torch.randn(50, 50).to(torch.bfloat16))
        self.double_one = nn.Parameter(torch.randn(40, 40, dtype=torch.float64))
        self.small_one = nn.Parameter(torch.randn(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.parameters()
        return sum((part.double() ** 2).sum() * x for part in parts)  # type: ignore[return-value]


def mixed_dtypes(rank: int, world: int, folder: Path) -> None:
    """Only fp32 is cast, only what kernels read is coded; what is left is exact."""
    names = [name for name, _ in MixedDtypes().named_parameters()]
    for bits in (32, 16, 8):
        model = MixedDtypes()
        wrapped = DistributedDataParallel(model)
        owners = dict.fromkeys(names, 0)
        send_at_bits(wrapped, PlannedBits(bits=(bits,), size_bytes=(1,), bucket_of=owners))
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            wrapped(torch.tensor(float(rank + 1))).backward()
            for name in names:
                parameter = model.get_parameter(name)
                gradient = parameter.grad
                assert gradient is not None
                assert all_equal(gradient)
                right = (world + 1) * parameter.detach().double()
                error = (gradient.double() - right).abs().max()
                span = float(right.max() - right.min())
                exact = name == "double_one" or (name == "small_one" and bits != 16)
                exact |= name == "single_one" and bits == 32
                most = 1e-6 if exact else span / 40
                assert float(error) <= most, (name, bits)


def small_model(rank: int, world: int, folder: Path) -> None:
    """A model that fills no quantisation bucket is sent exactly, whatever its bits."""
    torch.manual_seed(0)
    model = nn.Linear(5, 7)
    wrapped = DistributedDataParallel(model)
    owners = {"weight": 0, "bias": 0}
    hook = send_at_bits(wrapped, PlannedBits(bits=(2,), size_bytes=(4 * 42,), bucket_of=owners))
    before = hook.sent_bytes
    wrapped(torch.ones(2, 5) * (rank + 1)).sum().backward()
    assert model.weight.grad is not None
    assert torch.allclose(model.weight.grad, torch.tensor(world + 1.0))
    assert hook.sent_bytes - before == all_reduce_bytes(0, world, 2, exact=42)


def _draws(averaging: Averaging, own: Tensor, number: int) -> Tensor:
    """Averages of the same values with other random bits: [number, count]."""
    found = []
    for step in range(number):
        sent = own.clone()
        for work in averaging.run(sent, torch.empty(0), Memory(), 0, step):
            work.wait()
        found.append(sent)
    return torch.stack(found).double()


def law_of_codes(rank: int, world: int, folder: Path) -> None:
    """What two phases add to the variance is what `gradient_noise` says, with uneven shares."""
    count, number = world * 4096, 60
    shares = torch.arange(1, world + 1) / (world * (world + 1) / 2)
    gradients = [values(r, count, seed=2) * (1 + r) for r in range(world)]
    mean = sum(float(a) * g.double() for a, g in zip(shares, gradients, strict=True))
    assert isinstance(mean, Tensor)
    own = sum(float(a) ** 2 * range_power(g) for a, g in zip(shares, gradients, strict=True))
    for bits in (8, 6, 4):
        averaging = Averaging(
            exchange=Exchange(), coding=Coding(bits=bits), bucket_size=1024, seed=bits
        )
        sent = gradients[rank] * float(shares[rank]) * world
        found = _draws(averaging, sent, number)
        lost = (found - mean).square().sum(1)
        law = coded_variance(bits, own, range_power(mean))
        # Where values lie between levels makes u (1 - u) 1/6 only in the mean: its standard
        # deviation is sqrt(1/180), and there are `count` of them in either phase.
        places = law * 6 * (1 / 180) ** 0.5 * (2 / count) ** 0.5
        bound = SIGMAS * (float(lost.std()) / number**0.5 + places)
        # The first phase moves the ends of the second one's ranges by no more than one of its
        # own steps; to first order the ends of a range of r grow its square by 2 (2 step) r.
        step = max(float(a * (g.max() - g.min())) for a, g in zip(shares, gradients, strict=True))
        span = float(mean.max() - mean.min())
        wider = 4 * world * step / (2**bits - 1) / span
        second = coded_variance(bits, 0.0, range_power(mean))
        assert law - bound < float(lost.mean()) < law + bound + wider * second, bits


def law_of_casts(rank: int, world: int, folder: Path) -> None:
    """What bf16 adds is what `gradient_noise` says: roundings of casts, and of a ring's sums."""
    count = 2**15
    gradients = [values(r, count, seed=4) for r in range(world)]
    mean = torch.stack(gradients).double().mean(0)
    own = sum(cast_power(g) for g in gradients) / world**2
    law = cast_variance(world, own, cast_power(mean.float()))
    found = gradients[rank].clone().view(1, -1)
    with averaging_at(found, 16) as average:
        average()
    lost = float((found.double() - mean).square().sum())
    # The square of a rounding error varies by less than twice its mean, over `count` values.
    # Sums of few bits tie more often: up to a third more, as `gradient_noise` says.
    bound = SIGMAS * 2 / count**0.5
    assert 1 - bound < lost / law < 4 / 3 + bound


def timed(rank: int, world: int, folder: Path) -> None:
    """Averages at other bits are timed as well as all-reduces, the same on all ranks."""
    found = measure_all_reduce([4096, 2**16], torch.device("cpu"), codes=(4, 16))
    assert found.bits == (32, 16, 4)
    for times in (found.time_s, *(row.time_s for row in found.codes)):
        assert (times > 0).all()
        assert all_equal(torch.from_numpy(times.copy()))
    assert all((row.spread >= 0).all() for row in found.codes)
    assert found.time(4096, 16) == found.codes[0].time_s[0]
    assert communication_at(16).cast == "bf16"


PARTS: dict[str, tuple[Part, tuple[int, ...]]] = {
    "mixed bits": (mixed_bits, (2, 3)),
    "other buckets": (other_buckets, (2, 3)),
    "changed bits": (changed_bits, (2,)),
    "broken gradients at bits": (broken_gradients, (2,)),
    "mixed dtypes at bits": (mixed_dtypes, (2, 3)),
    "small model at bits": (small_model, (2, 3)),
    "law of codes": (law_of_codes, (2, 3)),
    "law of casts": (law_of_casts, (2, 3, 4)),
    "timed": (timed, (2,)),
}
