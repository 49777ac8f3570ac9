"""Parts of `communication_on_ranks`: averages in two phases, and DDP's hook."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from qsync_opt.errors import KernelError, ParameterError, TrainError
from qsync_opt.runtime import two_phase
from qsync_opt.runtime.bucket_codec import exempt_parameters
from qsync_opt.runtime.communication import (
    Coding,
    Communication,
    all_reduce_bytes,
    layout_of,
    parse_communication,
    ring_bytes,
)
from qsync_opt.runtime.host_reduction import HostReduction, Reduction
from qsync_opt.runtime.quantized_comm import GradientHook, compress_gradients
from qsync_opt.runtime.shared_reduction import (
    SharedReduction,
    adds_up,
    reduce_beside,
    reduction_for,
    tell,
)
from qsync_opt.runtime.two_phase import Averaging, Exchange, Memory
from tests.distributed.communication_on_ranks import WORLDS, Part, all_equal, counted
from tests.low_precision import TinyGpt, language_loss, tokens


def _values(rank: int, count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(100 * seed + rank))


def _decoded(message: bytes, bits: int, buckets: int, bucket: int) -> Tensor:
    """The values of a message in float64, read bit by bit, apart from the library."""
    ranges = torch.frombuffer(bytearray(message[: 8 * buckets]), dtype=torch.float32)
    low, step = ranges.double().view(-1, 2, 1).unbind(1)
    number = int.from_bytes(message[8 * buckets :], "little")
    mask = (1 << bits) - 1
    codes = [(number >> (bits * place)) & mask for place in range(buckets * bucket)]
    return (low + step * torch.tensor(codes, dtype=torch.float64).view(-1, bucket)).flatten()


class _Recorder(Exchange):
    """Keeps what was received."""

    def __init__(self) -> None:
        super().__init__()
        self.first: Any = None
        self.second: Any = None

    def all_to_all(self, messages: Tensor) -> tuple[Tensor, Any]:
        self.first = super().all_to_all(messages)
        found: tuple[Tensor, Any] = self.first
        return found

    def all_gather(self, message: Tensor, output: Tensor | None = None) -> tuple[Tensor, Any]:
        self.second = super().all_gather(message, output)
        found: tuple[Tensor, Any] = self.second
        return found


class _ByHost(Exchange):
    """Sends everything by way of the host, as gloo has to on a GPU."""

    def _goes_by_host(self, tensor: Tensor) -> bool:
        return True


def oracle(rank: int, world: int, folder: Path) -> None:
    """Both phases are what float64 makes of the same codes; nothing is lost beside rounding."""
    for count, bits in ((1, 4), (13, 8), (100, 5), (1024, 2), (3000, 4), (3000, 8)):
        exchange = _Recorder()
        averaging = Averaging(exchange=exchange, coding=Coding(bits=bits), bucket_size=64, seed=3)
        values, exact = _values(rank, count), _values(rank, 11, seed=1)
        layout = layout_of(count, world, bits, 64)
        assert averaging.layout(count) == layout
        for work in averaging.run(values, exact, Memory(), 0, 7):
            work.wait()
        size, cut = layout.message_bytes, layout.chunk
        sent = [
            _decoded(bytes(row[:size].tolist()), bits, layout.buckets, layout.bucket)
            for row in exchange.first[0]
        ]
        own = min(max(count - rank * cut, 0), cut)
        mean = torch.stack(sent).mean(0)[:own]
        for source, found in enumerate(sent):
            # What a rank was sent is the source's chunk, to a step of its bucket.
            theirs = _values(source, count).double()[rank * cut : rank * cut + own]
            for start in range(0, own, layout.bucket):
                part = theirs[start : start + layout.bucket]
                step = float(part.max() - part.min()) / (2**bits - 1)
                error = (found[start : start + len(part)] - part).abs().max()
                assert float(error) <= step * (1 + 1e-5) + 1e-7
        rows = [
            _decoded(bytes(row[:size].tolist()), bits, layout.buckets, layout.bucket)
            for row in exchange.second[0]
        ]
        assert torch.allclose(values.double(), torch.cat(rows)[:count], rtol=1e-6, atol=1e-6)
        for start in range(0, own, layout.bucket):
            part = mean[start : start + layout.bucket]
            step = float(part.max() - part.min()) / (2**bits - 1)
            error = (rows[rank][start : start + len(part)] - part).abs().max()
            assert float(error) <= step * (1 + 1e-5) + 1e-6
        assert all_equal(values)
        expected = torch.stack([_values(r, 11, seed=1).double() for r in range(world)]).mean(0)
        assert torch.allclose(exact.double(), expected, rtol=1e-6, atol=1e-7)
        staged = replace(averaging, exchange=_ByHost())
        again, rest = _values(rank, count), _values(rank, 11, seed=1)
        for work in staged.run(again, rest, Memory(), 0, 7):
            work.wait()
        assert torch.equal(again, values)
        assert torch.equal(rest, exact)


def unbiased(rank: int, world: int, folder: Path) -> None:
    """Over many steps the average is right, with the variance of both phases."""
    count, draws = 96, 150
    for learned in (False, True):
        coding = Coding(bits=4, learned=learned)
        averaging = Averaging(exchange=Exchange(), coding=coding, bucket_size=1024, seed=1)
        memory = Memory()
        found = []
        for step in range(draws):
            values = _values(rank, count)
            for work in averaging.run(values, torch.empty(0), memory, 0, 5 + step):
                work.wait()
            found.append(values)
        own = torch.stack([_values(r, count) for r in range(world)])
        mean = own.mean(0)
        draws_of = torch.stack(found).double()
        # At most a whole step apart in either phase; the first phase is averaged over ranks.
        step_first = float(own.amax() - own.amin()) / 15
        step_second = float(mean.amax() - mean.amin() + step_first) / 15
        most = (step_first**2 / world + step_second**2) / 4 * (9 if learned else 1)
        error = draws_of.mean(0) - mean
        assert float(error.abs().max()) < 5 * (most / draws) ** 0.5
        assert float(draws_of.var(0).mean()) < most


def bytes_on_the_wire(rank: int, world: int, folder: Path) -> None:
    """Counted at the collectives: the formula, 1.76 bytes a value at 8 ranks."""
    count, exact = (2**17, 0) if world == 8 else (10_000, 50)
    exchange = Exchange()
    averaging = Averaging(exchange=exchange, coding=Coding(bits=8), bucket_size=1024, seed=0)
    with counted() as sent:
        for work in averaging.run(_values(rank, count), _values(rank, exact), Memory(), 0, 0):
            work.wait()
    assert sent[0] == exchange.sent_bytes == all_reduce_bytes(count, world, 8, 1024, exact)
    if world == 8:
        assert round(sent[0] / count, 2) == 1.76


def _models(width: int = 40, **options: Any) -> tuple[TinyGpt, DistributedDataParallel]:
    torch.manual_seed(0)
    model = TinyGpt(width=width)
    # Several buckets, none of them a multiple of a quantisation bucket.
    return model, DistributedDataParallel(model, bucket_cap_mb=0.02, **options)


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def _expected(world: int, scale: int = 1) -> dict[str, Tensor]:
    """Mean gradients over the ranks' batches, computed on this rank alone."""
    total: dict[str, Tensor] = {}
    for rank in range(world):
        torch.manual_seed(0)
        model = TinyGpt(width=40)
        for part in range(scale):
            language_loss(model(_batch(rank, part)), _batch(rank, part)).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            total[name] = total.get(name, torch.tensor(0.0)) + parameter.grad.double() / world
    return total


def _batch(rank: int, part: int = 0) -> Tensor:
    return tokens(16)[2 * (rank + 4 * part) : 2 * (rank + 4 * part) + 2]


def hook(rank: int, world: int, folder: Path) -> None:
    """Gradients are close, exempt ones exact, replicas equal to the bit, bytes as computed."""
    expected = _expected(world)
    words = [("g8", 0.03)]
    if world < 4:
        words += [("g4l", 0.35), ("g4e", 0.35)]
    if world == 2:
        words += [("g4", 0.45), ("g3le", 0.6)]
    for word, most in words:
        model, wrapped = _models(gradient_as_bucket_view=word == "g8")
        found = compress_gradients(wrapped, parse_communication(word), seed=5)
        assert found is not None
        exempt = {id(p) for p in exempt_parameters(model)}
        for step in range(3):
            model.zero_grad(set_to_none=True)
            with counted() as sent:
                before = found.exchange.sent_bytes
                language_loss(wrapped(_batch(rank)), _batch(rank)).backward()
            assert found.step == step + 1
            assert all_equal(_flat(model))
            assert sent[0] == found.exchange.sent_bytes - before
            assert (sent[0] > 0) == (world > 1)
            error = whole = 0.0
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                gradient = parameter.grad.double()
                if id(parameter) in exempt or world == 1:
                    assert torch.allclose(gradient, expected[name], rtol=1e-5, atol=1e-8), name
                elif step == 0 or not word.endswith("e"):
                    error += float((gradient - expected[name]).square().sum())
                    whole += float(expected[name].square().sum())
            assert (error / max(whole, 1e-30)) ** 0.5 < most, word
        assert world == 1 or len(found._buckets) > 2  # formed anew after the first backward


def accumulation(rank: int, world: int, folder: Path) -> None:
    """Gradients of several micro-batches are sent once, as their sum."""
    expected = _expected(world, scale=2)
    model, wrapped = _models()
    found = compress_gradients(wrapped, parse_communication("g8"))
    assert found is not None
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        before = found.exchange.sent_bytes
        with wrapped.no_sync():
            language_loss(wrapped(_batch(rank, 0)), _batch(rank, 0)).backward()
        assert found.exchange.sent_bytes == before
        language_loss(wrapped(_batch(rank, 1)), _batch(rank, 1)).backward()
        assert (found.exchange.sent_bytes > before) == (world > 1)
        assert all_equal(_flat(model))
        whole = torch.cat([expected[name].flatten() for name, _p in model.named_parameters()])
        assert float((_flat(model) - whole).norm() / whole.norm()) < 0.03


def broken_gradients(rank: int, world: int, folder: Path) -> None:
    """A NaN or an infinity of one rank reaches all, and feedback forgets the step."""
    for word in ("g8", "g4l", "g4e"):
        for bad in (float("nan"), float("inf"), -float("inf")):
            model, wrapped = _models()
            compress_gradients(wrapped, parse_communication(word))
            for step in range(3):
                model.zero_grad(set_to_none=True)
                loss = language_loss(wrapped(_batch(rank)), _batch(rank))
                if step == 1 and rank == world - 1:
                    loss = loss * bad
                loss.backward()
                finite = torch.isfinite(_flat(model))
                assert all_equal(finite)
                assert bool(finite.all()) == (step != 1), (word, bad, step)


class Mixed(nn.Module):
    """Parameters of three dtypes, and one too small for a bucket."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.single_one = nn.Parameter(torch.randn(40, 60))
        self.half_one = nn.Parameter(torch.randn(50, 50).to(torch.bfloat16))
        self.double_one = nn.Parameter(torch.randn(40, 40, dtype=torch.float64))
        self.small_one = nn.Parameter(torch.randn(3, 3))
        self.frozen_one = nn.Parameter(torch.randn(40, 40), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = (self.single_one, self.half_one, self.double_one, self.small_one, self.frozen_one)
        return sum((part.double() ** 2).sum() * x for part in parts)  # type: ignore[return-value]


def mixed_dtypes(rank: int, world: int, folder: Path) -> None:
    """Buckets of every dtype: coded where kernels read it, else sent as they are."""
    model = Mixed()
    wrapped = DistributedDataParallel(model)
    compress_gradients(wrapped, parse_communication("g8"))
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        wrapped(torch.tensor(float(rank + 1))).backward()
        mean = (world + 1) / 2
        for name, parameter in model.named_parameters():
            values = parameter.detach().double()
            if name == "frozen_one":
                continue
            assert parameter.grad is not None
            assert all_equal(parameter.grad)
            error = (parameter.grad.double() - 2 * mean * values).abs().max()
            span = float(2 * mean * (values.max() - values.min()))
            exact = name in ("double_one", "small_one")
            assert float(error) <= (1e-6 if exact else 2 * span / 255 + span / 128), name


def small_buckets(rank: int, world: int, folder: Path) -> None:
    """A model that does not fill one quantisation bucket, and buckets of any size."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    wrapped = DistributedDataParallel(model)
    communication = Communication(gradients=Coding(bits=8), bucket_size=8)
    found = compress_gradients(wrapped, communication)
    assert found is not None
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        wrapped(torch.ones(2, 5) * (rank + 1)).square().sum().backward()
        assert all_equal(_flat(model))
        assert bool(torch.isfinite(_flat(model)).all())
    coarse = DistributedDataParallel(nn.Linear(5, 7))
    exact = compress_gradients(coarse, parse_communication("g2"))
    assert exact is not None
    coarse(torch.ones(2, 5) * (rank + 1)).sum().backward()
    assert coarse.module.weight.grad is not None
    assert torch.allclose(coarse.module.weight.grad, torch.tensor(world + 1.0))


def feedback(rank: int, world: int, folder: Path) -> None:
    """What rounding takes away comes back: the sum over steps stays within one step's error."""
    sums = {}
    for word in ("g2", "g2e"):
        model, wrapped = _models()
        found = compress_gradients(wrapped, parse_communication(word))
        assert found is not None
        total = torch.zeros_like(torch.cat([p.detach().flatten() for p in model.parameters()]))
        for step in range(12):
            model.zero_grad(set_to_none=True)
            # The scale of the loss may change meanwhile.
            scale = 2.0 if step % 3 == 1 else 1.0
            found.begin(step, scale)
            (language_loss(wrapped(_batch(rank)), _batch(rank)) * scale).backward()
            if step > 1:  # buckets are formed anew after the first
                total += _flat(model) / scale
        whole = torch.cat([g.flatten() for g in _expected(world).values()])
        sums[word] = float((total / 10 - whole).norm() / whole.norm())
    if world > 1:
        assert sums["g2e"] < 0.2 < sums["g2"]


def feedback_beside_steps_that_are_left_out(rank: int, world: int, folder: Path) -> None:
    """A step that overflows in one bucket takes nothing from what the others give back."""
    sums = {}
    for word in ("g2", "g2e"):
        torch.manual_seed(0)
        last = nn.Linear(2000, 8)
        model = nn.Sequential(nn.Linear(40, 2000), last)
        wrapped = DistributedDataParallel(model, bucket_cap_mb=0.1)
        found = compress_gradients(wrapped, parse_communication(word))
        assert found is not None
        x = torch.randn(6, 40, generator=torch.Generator().manual_seed(rank))
        total = torch.zeros(sum(p.numel() for p in model.parameters()))
        for step in range(26):
            model.zero_grad(set_to_none=True)
            found.begin(step)
            is_lost = step % 2 == 1
            loss = wrapped(x).square().mean()
            loss = loss + last.bias.sum() * float("inf") if is_lost else loss
            loss.backward()
            if is_lost:
                assert not bool(torch.isfinite(_flat(model)).all())
                found.leave_out()
            elif step > 1:  # buckets are formed anew after the first
                total += _flat(model)
        model.zero_grad(set_to_none=True)
        torch.autograd.backward(model(x).square().mean())
        whole = _flat(model).clone()
        distributed.all_reduce(whole)
        whole /= world
        sums[word] = float((total / 12 - whole).norm() / whole.norm())
    assert sums["g2e"] < 0.4 * sums["g2"], sums


def restart(rank: int, world: int, folder: Path) -> None:
    """A hook that goes on from a state gives the bits of one that went on by itself."""

    def gradients(found: GradientHook, model: nn.Module, wrapped: Any, steps: range) -> Tensor:
        for step in steps:
            model.zero_grad(set_to_none=True)
            found.begin(step)
            language_loss(wrapped(_batch(rank)), _batch(rank)).backward()
        return _flat(model).clone()

    for word in ("g4", "g4e", "g3le"):
        model, wrapped = _models()
        first = compress_gradients(wrapped, parse_communication(word), seed=2)
        assert first is not None
        gradients(first, model, wrapped, range(5))
        state = first.state()
        expected = gradients(first, model, wrapped, range(5, 8))
        model, wrapped = _models()
        second = compress_gradients(wrapped, parse_communication(word), seed=2)
        assert second is not None
        gradients(second, model, wrapped, range(5, 6))  # DDP forms its buckets
        second.load_state(state)
        assert torch.equal(gradients(second, model, wrapped, range(5, 8)), expected), word
        second.load_state(state)
        again = second.state()
        assert world == 1 or all(torch.equal(again[name], state[name]) for name in state)


def casts_and_mistakes(rank: int, world: int, folder: Path) -> None:
    """Casts are close, and counted; what cannot be done is said."""
    expected = _expected(world)
    whole = torch.cat([g.flatten() for g in expected.values()])
    for word, most in (("fp16", 1e-3), ("bf16", 1e-2), ("fp32", 1e-6)):
        model, wrapped = _models()
        found = compress_gradients(wrapped, parse_communication(word))
        assert (found is None) == (word == "fp32")
        before = 0 if found is None else found.sent_bytes
        language_loss(wrapped(_batch(rank)), _batch(rank)).backward()
        if found is not None and world > 1:
            assert found.sent_bytes - before == ring_bytes(2 * len(whole), world)
        assert float((_flat(model) - whole).norm() / whole.norm()) < most
    _, wrapped = _models()
    with pytest.raises(ParameterError, match="must leave weights alone"):
        compress_gradients(wrapped, parse_communication("w8g8"))
    if world > 1:
        with pytest.raises(TrainError, match="ranks do not agree on how gradients are sent"):
            compress_gradients(wrapped, parse_communication("g8" if rank else "g4"))
        with pytest.raises(TrainError, match="ranks do not agree on how gradients are sent"):
            compress_gradients(wrapped, parse_communication("g8" if rank else "fp32"))
    assert compress_gradients(wrapped, parse_communication("fp32")) is None
    sparse = DistributedDataParallel(nn.Embedding(50, 40, sparse=True))
    assert compress_gradients(sparse, parse_communication("g8")) is not None
    with pytest.raises(ParameterError, match="must be dense"):
        sparse(torch.tensor([1, 2])).sum().backward()


def agreement(rank: int, world: int, folder: Path) -> None:
    """Different numbers of facts are told apart too."""
    exchange = Exchange()
    exchange.require_equal([1, 2], torch.device("cpu"), "this")
    for facts in ([1, 2 + rank], [1] * (1 + rank)):
        with pytest.raises(TrainError, match="do not agree on this"):
            exchange.require_equal(facts, torch.device("cpu"), "this")
    counts = two_phase.learn(exchange, torch.arange(2048) * (rank + 1), 4, stochastic=True)
    assert all_equal(counts)
    distributed.barrier()


_SOME = (1, 2, 4)


def by_the_host(rank: int, world: int, folder: Path) -> None:
    """Averages beside the backward are those of torch's own hooks, in every dtype on the wire."""
    with closing(HostReduction(None, torch.device("cpu"))) as reduction:
        _averages(reduction, rank, world, [1000], distributed.all_reduce)
    models = [_models(), _models()]
    models[0][1].register_comm_hook(None, default_hooks.allreduce_hook)
    with closing(reduce_beside(models[1][1], torch.device("cpu"))):
        for _ in range(3):
            for model, wrapped in models:
                model.zero_grad(set_to_none=True)
                torch.autograd.backward(language_loss(wrapped(_batch(rank)), _batch(rank)))
            assert torch.equal(_flat(models[0][0]), _flat(models[1][0]))


def _averages(
    reduction: Reduction, rank: int, world: int, sizes: list[int], add_up: Callable[[Tensor], Any]
) -> None:
    """Several at once, of which none waits for the one before, are to the bit what they are."""
    for wire in (None, torch.bfloat16, torch.float16):
        given = [_values(rank, size) * (1 + number) for number, size in enumerate(sizes * 3)]
        futures = [reduction.average(values.clone(), wire) for values in given]
        for values, future in zip(given, futures, strict=True):
            expected = values.to(wire or torch.float32).div_(world)
            add_up(expected)
            found = future.wait()
            assert all_equal(found)
            assert torch.equal(found, expected.float())


def _in_order(values: Tensor) -> None:
    """The sum over ranks, one after the other."""
    rows = [torch.empty_like(values) for _ in range(distributed.get_world_size())]
    distributed.all_gather(rows, values)
    values.copy_(rows[0])
    for row in rows[1:]:
        values.add_(row)


class FileBoard:
    """Places in files that all ranks map, as a GPU's memory is shared; without its streams."""

    def __init__(self, folder: Path, rank: int, group: object, size_bytes: int) -> None:
        self._rank, self._group = rank, group
        names = [folder / f"{size_bytes}-{r}" for r in range(distributed.get_world_size())]
        self._places = [
            [
                torch.from_file(f"{name}-{place}", True, size_bytes, dtype=torch.uint8)
                for place in range(2)
            ]
            for name in names
        ]
        self.reading = 0

    def write(self, place: int, values: Tensor) -> None:
        assert self.reading == 0
        self._at(self._rank, place, values).copy_(values)

    def read(self, place: int, like: Tensor) -> list[Tensor]:
        self.reading += 1
        time.sleep(0.003 * self._rank)  # the others are ahead, and write the next place
        return [self._at(rank, place, like) for rank in range(len(self._places))]

    def done(self, place: int) -> None:
        self.reading -= 1

    def close(self) -> None:
        tell(self._group)

    def _at(self, rank: int, place: int, like: Tensor) -> Tensor:
        size = like.numel() * like.element_size()
        return self._places[rank][place][:size].view(like.dtype).view(like.shape)


def by_a_board(rank: int, world: int, folder: Path) -> None:
    """Ranks that read each other's memory never read what is not there yet, or not any more."""
    made: list[int] = []

    def make_board(group: object, size_bytes: int) -> FileBoard:
        made.append(size_bytes)
        return FileBoard(folder, rank, group, size_bytes)

    with closing(SharedReduction(None, torch.device("cpu"), make_board)) as reduction:
        _averages(reduction, rank, world, [1000, 7, 300_000, 1], _in_order)
        assert made == [2**20, 1_200_000]  # the first that does not fit makes a larger one
        _averages(reduction, rank, world, [64], _in_order)


class StaleBoard(FileBoard):
    """Shows what the others wrote before."""

    def read(self, place: int, like: Tensor) -> list[Tensor]:
        rows = super().read(place, like)
        before = [self._at(r, 1 - place, like) for r in range(len(self._places))]
        return [row if r == self._rank else before[r] for r, row in enumerate(rows)]


def a_board_is_checked(rank: int, world: int, folder: Path) -> None:
    """Before gradients are entrusted to it: what is late or lost is seen on all ranks."""
    cpu = torch.device("cpu")
    for kind, expected in ((FileBoard, True), (StaleBoard, False)):
        place = folder / f"checked{world}-{kind.__name__}"
        place.mkdir(exist_ok=True)
        with closing(SharedReduction(None, cpu, partial(kind, place, rank))) as reduction:
            assert adds_up(reduction, cpu, None) is expected
    with closing(HostReduction(None, cpu)) as reduction:
        assert adds_up(reduction, cpu, None)
        distributed.barrier()


def by_no_board(rank: int, world: int, folder: Path) -> None:
    """Where memory cannot be shared, all ranks are told, and each goes by the host."""

    def make_board(group: object, size_bytes: int) -> FileBoard:
        raise KernelError("shared memory", "not here")

    with pytest.raises(KernelError, match="not here"):
        SharedReduction(None, torch.device("cpu"), make_board)
    with closing(reduction_for(None, torch.device("cpu"))) as reduction:
        assert isinstance(reduction, HostReduction)
        distributed.barrier()


def by_the_host_in_vain(rank: int, world: int, folder: Path) -> None:
    """What the network says comes out of the backward that waits for it."""
    model, wrapped = _models()
    real = distributed.all_reduce
    with closing(reduce_beside(wrapped, torch.device("cpu"))):

        def broken(*_: object, **__: object) -> None:
            raise RuntimeError("gloo: connection closed by peer")

        distributed.all_reduce = broken
        try:
            with pytest.raises(RuntimeError, match="gloo: connection closed by peer"):
                torch.autograd.backward(language_loss(wrapped(_batch(rank)), _batch(rank)))
        finally:
            distributed.all_reduce = real


PARTS: dict[str, tuple[Part, tuple[int, ...]]] = {
    "oracle": (oracle, WORLDS),
    "unbiased": (unbiased, (3,)),
    "bytes on the wire": (bytes_on_the_wire, (2, 3, 8)),
    "hook": (hook, WORLDS),
    "accumulation": (accumulation, (1, 3)),
    "broken gradients": (broken_gradients, (3,)),
    "mixed dtypes": (mixed_dtypes, _SOME),
    "small buckets": (small_buckets, WORLDS),
    "feedback": (feedback, (2,)),
    "feedback, steps left out": (feedback_beside_steps_that_are_left_out, (2,)),
    "restart": (restart, (1, 2)),
    "casts and mistakes": (casts_and_mistakes, (1, 2)),
    "agreement": (agreement, (2, 4)),
    "by the host": (by_the_host, (2, 3)),
    "by the host, in vain": (by_the_host_in_vain, (2,)),
    "by a board": (by_a_board, (2, 3)),
    "a board is checked": (a_board_is_checked, (2, 3)),
    "by no board": (by_no_board, (2,)),
}
