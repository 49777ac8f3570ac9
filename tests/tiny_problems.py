"""Random allocation problems, small enough to try every plan, with all that the format allows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from qsync_opt.errors import ProblemError
from qsync_opt.optimize.arrays import BoolArray, FloatArray, IntArray
from qsync_opt.optimize.evaluate import evaluate_device, follower_columns
from qsync_opt.optimize.problem import (
    NOT_GIVEN,
    AllocationProblem,
    Bucket,
    CastTensors,
    DeviceKind,
    Operator,
    SavedTensors,
)
from qsync_opt.precision import HANDED_ON, Precision

#: A memory budget that never binds.
UNLIMITED = 2**53


def tiny_problem(seed: int, *, whole: bool = False, kinds: int | None = None) -> AllocationProblem:
    """One to three kinds, two to seven operators; budgets that sometimes bind.

    Several workers and unequal shares, followers, groups, pins, missing precisions, several
    tensors from one producer, casts that cost even from a precision to itself, tensors
    saved by several operators, buckets without operators and out of order.

    Args:
        seed: the same problem for the same seed.
        whole: whole numbers of seconds and perturbation, whose sums are exact in any order.
        kinds: number of device kinds; drawn if None.
    """
    rng = np.random.default_rng(seed)
    while True:
        try:
            return _drawn(rng, whole, kinds)
        except ProblemError:
            continue  # a pin contradicts a group, or a group has no precision in common


def random_column(
    problem: AllocationProblem, device: DeviceKind, rng: np.random.Generator
) -> IntArray:
    """A precision that each operator has, drawn at random; followers follow, [N]."""
    picks = [int(rng.choice(np.flatnonzero(row))) for row in device.available]
    return follower_columns(problem, np.array(picks, dtype=np.int64))


def _drawn(rng: np.random.Generator, whole: bool, kinds: int | None) -> AllocationProblem:
    count = int(rng.integers(2, 8))
    pool = [Precision.BF16, Precision.INT8, Precision.FP16, Precision.TF32]
    if rng.random() < 0.3:
        pool = [Precision.INT8, Precision.TF32]
    names = [Precision.FP32, *pool[: int(rng.integers(1, 3))]]
    names = [names[index] for index in rng.permutation(len(names))]
    buckets = int(rng.integers(0, 4))
    operators = []
    for index in range(count):
        follows: tuple[int, ...] = ()
        if index and rng.random() < 0.3:
            inputs = rng.choice(index, size=min(index, int(rng.integers(1, 4))), replace=False)
            follows = tuple(inputs.tolist())
        bucket = int(rng.integers(buckets)) if buckets and rng.random() < 0.7 else None
        operators.append(Operator(name=f"op{index}", kind="any", bucket=bucket, follows=follows))
    groups: list[tuple[str, ...]] = []
    if rng.random() < 0.4:
        members = rng.choice(count, size=min(count, int(rng.integers(2, 4))), replace=False)
        groups.append(tuple(f"op{index}" for index in members.tolist()))
    devices = int(rng.integers(1, 4)) if kinds is None else kinds
    workers = rng.integers(1, 4, size=devices)
    shares = rng.uniform(0.5, 2.0, size=devices)
    shares = shares / (workers * shares).sum()
    parts = [
        _kind(rng, operators, names, f"kind{r}", int(workers[r]), float(shares[r]), whole)
        for r in range(devices)
    ]
    problem = AllocationProblem(
        name="tiny",
        provenance="random",
        precisions=tuple(names),
        storage=tuple(p.storage for p in names),
        output=tuple(p.output if p.output in names else Precision.FP32 for p in names),
        operators=tuple(operators),
        buckets=tuple(
            Bucket(all_reduce_s=float(_numbers(rng, whole, 5)), size_bytes=1)
            for _ in range(buckets)
        ),
        devices=tuple(parts),
        groups=tuple(groups),
    )
    return _with_budgets(problem, rng)


def _numbers(rng: np.random.Generator, whole: bool, limit: int, *shape: int) -> FloatArray:
    drawn = rng.integers(0, limit, size=shape).astype(np.float64)
    return drawn if whole else drawn * rng.random(shape)


def _kind(
    rng: np.random.Generator,
    operators: list[Operator],
    names: list[Precision],
    name: str,
    workers: int,
    share: float,
    whole: bool,
) -> DeviceKind:
    count, columns = len(operators), len(names)
    available: BoolArray = rng.random((count, columns)) < 0.7
    available[np.arange(count), rng.integers(columns, size=count)] = True
    for index, operator in enumerate(operators):
        if operator.follows:
            available[index] |= [p in HANDED_ON for p in names]
    # Some kinds in single bytes, some beyond 100 GB, where one byte is 1e-11 of the budget.
    unit, odd = (1, 0) if rng.random() < 0.5 else (2**33, 1)

    def some_bytes(*shape: int) -> IntArray:
        return rng.integers(0, 9, size=shape) * unit + odd * rng.integers(0, 9, size=shape)

    def some_of(candidates: IntArray, most: int) -> list[int]:
        size = int(rng.integers(1, min(most, len(candidates)) + 1))
        return rng.choice(candidates, size=size, replace=False).tolist()  # type: ignore[no-any-return]

    producers = [index for index in range(count - 1) for _ in range(int(rng.integers(0, 3)))]
    consumers = [some_of(np.arange(index + 1, count), 3) for index in producers]
    casts = _numbers(rng, whole, 4, 2, len(producers), columns, columns)
    savers = [some_of(np.arange(count), 3) for _ in range(int(rng.integers(0, 5)))]
    dtypes = tuple(dict.fromkeys(p.storage for p in names))
    sizes = some_bytes(len(savers), len(dtypes))
    for tensor, rows in enumerate(savers):
        for position, dtype in enumerate(dtypes):
            stored_so = [p.storage is dtype for p in names]
            if not available[rows][:, stored_so].any():
                sizes[tensor, position] = NOT_GIVEN
    pins = {
        operator.name: names[int(rng.choice(np.flatnonzero(available[index])))]
        for index, operator in enumerate(operators)
        if rng.random() < 0.1
    }
    perturbation = _numbers(rng, whole, 6, count, columns)
    if rng.random() < 0.2:
        perturbation[:] = 1.0  # nothing but ties
    return DeviceKind(
        name=name,
        workers=workers,
        batch_share=share,
        memory_bytes=UNLIMITED,
        fixed_bytes=int(some_bytes(1)[0]),
        optimizer_s=float(_numbers(rng, whole, 3)),
        available=available,
        forward_s=_numbers(rng, whole, 9, count, columns),
        backward_s=_numbers(rng, whole, 9, count, columns),
        perturbation=perturbation,
        forward_transient_bytes=some_bytes(count, columns),
        backward_transient_bytes=some_bytes(count, columns),
        tensors=CastTensors.from_rows(
            producer=producers, consumers=consumers, forward_s=casts[0], backward_s=casts[1]
        ),
        saved=SavedTensors.from_rows(savers=savers, size_bytes=sizes, dtypes=dtypes),
        pins=pins,
    )


def _with_budgets(problem: AllocationProblem, rng: np.random.Generator) -> AllocationProblem:
    """Memory and a deadline taken from random plans, so that they cut the plans in two."""
    devices, deadline_s = [], 0.0
    for device in problem.devices:
        part = evaluate_device(problem, device, random_column(problem, device, rng))
        deadline_s = max(deadline_s, part.iteration_time_s)
        binds = rng.random() < 0.7
        memory = part.peak_memory_bytes if binds else UNLIMITED
        devices.append(replace(device, memory_bytes=memory))
    return replace(problem, devices=tuple(devices), deadline_s=max(deadline_s, 1e-3))
