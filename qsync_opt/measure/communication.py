"""What DDP reduces, read from a live object, and how long that takes at any bits.

Buckets are read through a communication hook, the documented way, after the rebuild that
DDP does at its second iteration: before it, one bucket holds everything. Times start aligned:
every round begins with a barrier, so that no rank's time contains waiting for another's work.
Below 32 bits it is training's own hook that is timed, on a bucket with a single parameter.
"""

from __future__ import annotations

import copy
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.distributed import FileStore, GradBucket, HashStore  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from qsync_opt.costs_network import AllReduceCosts, CodedTimes, GradientBucket
from qsync_opt.errors import ParameterError
from qsync_opt.measure.clock import spread_of
from qsync_opt.measure.step import Loss, call_model, loss_of, split_batch
from qsync_opt.plan import FULL_BITS
from qsync_opt.runtime.bucket_bits import Uniform
from qsync_opt.runtime.communication import communication_at
from qsync_opt.runtime.host_reduction import Reduction, goes_by_host
from qsync_opt.runtime.quantized_comm import GradientHook
from qsync_opt.runtime.shared_reduction import reduction_for
from qsync_opt.runtime.two_phase import Exchange

_FLOAT_BYTES = 4
_ROUNDS, _WARM_UP = 9, 3
_SMALLEST_BYTES = 2**12

#: Steps until the buckets are those that stay: DDP rebuilds them before the second one.
_STEPS_BEFORE = 2


@contextmanager
def process_group(backend: str = "gloo") -> Iterator[None]:
    """The default process group, or where there is none one of this process alone."""
    if distributed.is_initialized():
        yield
        return
    store = HashStore()
    distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def read_buckets(
    model: nn.Module, batch: Any, loss: Loss | None, **options: Any
) -> tuple[GradientBucket, ...]:
    """The buckets of DDP for a model, in launch order; the model is left as it is.

    Args:
        model: not wrapped.
        batch: see `step`.
        loss: see `step`; None if the model returns it.
        **options: of DistributedDataParallel, for example `bucket_cap_mb`.
    """
    model = copy.deepcopy(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    inputs, target = split_batch(batch, loss)
    found: list[GradientBucket] = []
    with process_group():
        wrapped = DistributedDataParallel(model, **options)
        recording = [False]

        def hook(state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
            if recording[0]:
                parameters = tuple(names[id(parameter)] for parameter in bucket.parameters())
                size = bucket.buffer().numel() * bucket.buffer().element_size()
                found.append(GradientBucket(size_bytes=size, parameters=parameters))
            gradients = bucket.buffer()
            devices: Any = [gradients.device] if gradients.is_cuda else None
            done: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
            done.set_result(gradients)
            return done

        hook.__annotations__ = {"bucket": GradBucket}  # DDP takes no text for it
        wrapped.register_comm_hook(None, hook)
        for step in range(_STEPS_BEFORE + 1):
            recording[0] = step == _STEPS_BEFORE
            for parameter in model.parameters():
                parameter.grad = None
            loss_of(call_model(wrapped, inputs), target, loss).backward()  # type: ignore[no-untyped-call]
    return tuple(found)


def measure_all_reduce(
    size_bytes: Sequence[int],
    device: torch.device,
    group: Any = None,
    codes: Sequence[int] = (),
) -> AllReduceCosts:
    """Time all-reduces of fp32 on a process group; every rank of it must call this.

    Args:
        size_bytes: sizes to measure.
        device: of the tensors on this rank.
        group: None for the default group.
        codes: bits at which averages are timed too.

    Returns:
        The same on every rank: the slowest rank's time of each round, the median of rounds.

    Raises:
        ParameterError: bits that are not fewer than 32, or that nothing is sent at.
    """
    wanted = code_bits(codes)
    sizes = sorted({max(_FLOAT_BYTES, size // _FLOAT_BYTES * _FLOAT_BYTES) for size in size_bytes})
    rows: dict[int, list[tuple[float, float]]] = {bits: [] for bits in (FULL_BITS, *wanted)}
    backend, whole = str(distributed.get_backend(group)), None
    with ExitStack() as stack:
        if goes_by_host(torch.empty(0, device=device), group):
            whole = stack.enter_context(closing(reduction_for(group, device)))
            backend = whole.backend
        for size in sizes:
            tensor = torch.ones(1, size // _FLOAT_BYTES, device=device)
            for bits, found in rows.items():
                with averaging_at(tensor, bits, group, whole) as run:
                    found.append(_time(run, device, group))
    times = {bits: np.array(found).T for bits, found in rows.items()}
    return AllReduceCosts(
        ranks=distributed.get_world_size(group),
        backend=backend,
        size_bytes=np.array(sizes),
        time_s=times[FULL_BITS][0],
        spread=times[FULL_BITS][1],
        codes=tuple(
            CodedTimes(bits=bits, time_s=times[bits][0], spread=times[bits][1]) for bits in wanted
        ),
    )


def code_bits(codes: Sequence[int]) -> tuple[int, ...]:
    """Bits of codes, each once, descending.

    Raises:
        ParameterError: bits that are not fewer than 32, or that nothing is sent at.
    """
    if FULL_BITS in codes:
        rule = f"must be fewer than {FULL_BITS}, which are always timed"
        raise ParameterError("codes", rule, FULL_BITS)
    for bits in codes:
        try:
            communication_at(bits)
        except ParameterError as error:
            raise ParameterError("codes", error.rule, error.value) from None
    return tuple(sorted(set(codes), reverse=True))


def measure_local_all_reduce(
    size_bytes: Sequence[int], ranks: int, device_type: str = "cpu", codes: Sequence[int] = ()
) -> AllReduceCosts:
    """Time all-reduces between processes that are started on this machine for it.

    Args:
        size_bytes: sizes to measure.
        ranks: how many processes.
        device_type: `cpu` for gloo, `cuda` for NCCL with one GPU for each rank.
        codes: bits at which averages are timed too.

    Raises:
        ParameterError: there are fewer GPUs than ranks, or bits that nothing is sent at.
    """
    wanted = code_bits(codes)
    if device_type == "cuda" and ranks > torch.cuda.device_count():
        rule = f"must be at most {torch.cuda.device_count()}, the GPUs here"
        remedy = "NCCL takes one GPU for each rank; measure on the machines of the job, by torchrun"
        raise ParameterError("ranks", rule, ranks, remedy)
    with tempfile.TemporaryDirectory() as folder:
        spawn(  # type: ignore[no-untyped-call]
            _local_rank, args=(list(size_bytes), ranks, device_type, folder, wanted), nprocs=ranks
        )
        rows = json.loads((Path(folder) / "result.json").read_text())
    timed = tuple(CodedTimes(**row) for row in rows.pop("codes"))
    return AllReduceCosts(ranks=ranks, **rows, codes=timed)


def _local_rank(
    rank: int,
    sizes: list[int],
    ranks: int,
    device_type: str,
    folder: str,
    codes: tuple[int, ...],
) -> None:
    torch.set_num_threads(1)
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    if device_type == "cuda":
        torch.cuda.set_device(device)
    store = FileStore(str(Path(folder) / "store"), ranks)
    backend = "nccl" if device_type == "cuda" else "gloo"
    distributed.init_process_group(backend, store=store, rank=rank, world_size=ranks)
    try:
        found = measure_all_reduce(sizes, device, codes=codes)
    finally:
        distributed.destroy_process_group()
    if rank == 0:
        rows = {
            "backend": found.backend,
            "size_bytes": found.size_bytes.tolist(),
            "time_s": found.time_s.tolist(),
            "spread": found.spread.tolist(),
            "codes": [
                {"bits": r.bits, "time_s": r.time_s.tolist(), "spread": r.spread.tolist()}
                for r in found.codes
            ],
        }
        (Path(folder) / "result.json").write_text(json.dumps(rows))


def sizes_to_measure(buckets: Sequence[GradientBucket]) -> list[int]:
    """The buckets' sizes, and powers of four around them, so that other buckets can be priced."""
    sizes = sorted({bucket.size_bytes for bucket in buckets}) or [2**20]
    low = int(math.log2(min(_SMALLEST_BYTES, sizes[0])))
    high = math.ceil(math.log2(sizes[-1]))
    return sorted({*sizes, *(2**power for power in range(low, high + 1, 2))})


class _OnlyBucket:
    """A bucket of DDP that holds one parameter and is all that a backward gives."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = parameter

    def buffer(self) -> Tensor:
        return self._parameter.detach().view(-1)

    def parameters(self) -> list[nn.Parameter]:
        return [self._parameter]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


@contextmanager
def averaging_at(
    tensor: Tensor, bits: int, group: Any = None, whole: Reduction | None = None
) -> Iterator[Callable[[], object]]:
    """What averages a gradient in place, as training does at so many bits.

    All ranks of the group enter and leave together.

    Args:
        tensor: fp32, [1, n]; at 32 bits it is added up, as by the all-reduce alone.
        bits: at which it is sent.
        group: None for the default group.
        whole: what averages at 32 bits where the group's backend does not reach the tensor.
    """
    if bits == FULL_BITS and whole is not None:
        yield lambda: whole.average(tensor).wait()
    elif bits == FULL_BITS:
        yield lambda: distributed.all_reduce(tensor, group=group)
    else:
        holder = nn.ParameterList([nn.Parameter(tensor)])
        sending = Uniform(communication=communication_at(bits))
        bucket = _OnlyBucket(holder[0])
        with closing(GradientHook(holder, sending, Exchange(group), seed=0)) as hook:
            yield lambda: hook.reduce(bucket).wait()


def _time(run: Callable[[], object], device: torch.device, group: Any) -> tuple[float, float]:
    """Median over rounds of the slowest rank's time, and its spread."""
    rounds = [_one_round(run, device, group) for _ in range(_WARM_UP + _ROUNDS)][_WARM_UP:]
    slowest = torch.tensor(rounds, dtype=torch.float64, device=_control_device(device, group))
    distributed.all_reduce(slowest, op=distributed.ReduceOp.MAX, group=group)
    values = slowest.tolist()
    return statistics.median(values), spread_of(values)


def _one_round(run: Callable[[], object], device: torch.device, group: Any) -> float:
    distributed.barrier(group=group)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def _control_device(device: torch.device, group: Any) -> torch.device:
    """NCCL reduces on the GPU only."""
    return device if distributed.get_backend(group) == "nccl" else torch.device("cpu")
