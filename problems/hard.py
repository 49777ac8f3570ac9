"""Instances that break solvers: tight to the byte, all ties, sixty decades, and infeasible.

Each comes with the arithmetic that says what the right answer is, so that a wrong optimum is
seen without trusting any solver.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np

from qsync_opt.optimize.arrays import FloatArray
from qsync_opt.optimize.problem import (
    AllocationProblem,
    CastTensors,
    DeviceKind,
    Operator,
    SavedTensors,
)
from qsync_opt.precision import Precision

_FP32, _BF16, _INT8 = Precision.FP32, Precision.BF16, Precision.INT8
_TICK_S = 2.0**-20  # sums of whole ticks are exact in floats

TIGHT_BUDGET_BYTES = 80 * 10**9
#: bf16 bytes of the two tensors that differ by one byte; 8,590,025,500 bytes in fp32.
_TWIN_BYTES = (4_295_012_750, 4_295_012_751)
_TIGHT_OPERATORS = 26
_TIGHT_ROOM_BYTES = 20 * 10**9

TIES_OPERATORS = 60
DECADES = 41


def _chain(
    *,
    name: str,
    provenance: str,
    precisions: Sequence[Precision],
    time_s: FloatArray,
    perturbation: FloatArray,
    saved_bytes: Sequence[Sequence[int]],
    fixed_bytes: int,
    memory_bytes: int,
    cast_s: FloatArray,
    deadline_s: float,
) -> AllocationProblem:
    """Linear layers in a row on one device; a third of the time is forward."""
    count = len(time_s)
    tables = np.repeat(cast_s[None, :, :], count - 1, axis=0)
    device = DeviceKind(
        name="weak",
        workers=1,
        batch_share=1.0,
        memory_bytes=memory_bytes,
        fixed_bytes=fixed_bytes,
        optimizer_s=0.0,
        available=np.ones(time_s.shape, dtype=np.bool_),
        forward_s=time_s,
        backward_s=2 * time_s,
        perturbation=perturbation,
        tensors=CastTensors.from_rows(
            producer=list(range(count - 1)),
            consumers=[[index + 1] for index in range(count - 1)],
            forward_s=tables,
            backward_s=tables,
        ),
        saved=SavedTensors.from_rows(
            savers=[[index] for index in range(count)],
            size_bytes=saved_bytes,
            dtypes=tuple(p.storage for p in precisions),
        ),
    )
    return AllocationProblem(
        name=name,
        provenance=provenance,
        precisions=tuple(precisions),
        storage=tuple(p.storage for p in precisions),
        output=tuple(p.output for p in precisions),
        operators=tuple(Operator(name=f"linear_{i}", kind="linear") for i in range(count)),
        buckets=(),
        devices=(device,),
        deadline_s=deadline_s,
    )


def least_use_bytes(sizes: Sequence[int], values: Sequence[int]) -> list[int | None]:
    """Per total value v, the least bytes of a subset of exactly that value, by integer DP."""
    best: list[int | None] = [0] + [None] * sum(values)
    for size, value in zip(sizes, values, strict=True):
        for total in range(len(best) - 1, value - 1, -1):
            before = best[total - value]
            if before is not None:
                use, now = before + size, best[total]
                best[total] = use if now is None else min(now, use)
    return best


def tight_memory() -> AllocationProblem:
    """A budget of 80 GB that the optimum meets exactly; one byte more would change it.

    Keeping operator i in fp32 costs s_i bytes more than bf16 and avoids its perturbation, a
    whole number. Two operators differ by one byte and one unit of perturbation; the budget is
    such that the optimum keeps the smaller one and uses every byte. At one byte more it keeps
    the larger one instead; a relative tolerance of 1e-6 is 80,000 bytes here.
    """
    source = random.Random(2407)
    sizes = [*_TWIN_BYTES]
    while len(sizes) < _TIGHT_OPERATORS:
        sizes.append(int(2e8 + 2.2e9 * source.random()) | 1)
    values = [round(size / 10**7) for size in sizes]
    values[1] += 1
    room = _tight_room(sizes, values)
    fixed = TIGHT_BUDGET_BYTES - sum(sizes) - room
    order = sorted(range(len(sizes)), key=lambda i: (i * 11) % len(sizes))
    sizes = [sizes[i] for i in order]
    values = [values[i] for i in order]
    ticks = np.array([[2.0, 1.0]] * len(sizes)) * _TICK_S
    return _chain(
        name="tight-80gb",
        provenance=(
            "Constructed: a knapsack over saved tensors whose optimum uses the 80 GB budget to"
            " the byte and changes with one byte more; twin tensors of 8,590,025,500 and"
            " 8,590,025,502 bytes in fp32. The deadline does not bind. See problems/hard.py"
        ),
        precisions=(_FP32, _BF16),
        time_s=ticks,
        perturbation=np.array([[0.0, float(value)] for value in values]),
        saved_bytes=[[2 * size, size] for size in sizes],
        fixed_bytes=fixed,
        memory_bytes=TIGHT_BUDGET_BYTES,
        cast_s=np.zeros((2, 2)),
        deadline_s=1.0,
    )


def _tight_room(sizes: Sequence[int], values: Sequence[int]) -> int:
    """The largest room under the target that an optimum with only the smaller twin fills."""
    everything = least_use_bytes(sizes, values)
    others = least_use_bytes(sizes[2:], values[2:])
    for total in reversed(range(len(everything))):
        use = everything[total]
        if use is None or use > _TIGHT_ROOM_BYTES or total < values[0]:
            continue
        rest = others[total - values[0]] if total - values[0] < len(others) else None
        small_only = rest is not None and rest + sizes[0] == use
        greater = [other for other in everything[total + 1 :] if other is not None]
        if small_only and min(greater) == use + 1:
            return use
    raise ArithmeticError("no room that the smaller twin alone fills; change the seed")


def equal_sensitivities() -> AllocationProblem:
    """Sixty operators whose every lowered precision costs exactly 1: ties everywhere.

    The objective counts the lowered operators, so the relaxation's bound must be rounded up,
    and any run of neighbours is as good as its shifted copy.
    """
    ticks = 1024.0 + 16.0 * (np.arange(TIES_OPERATORS) * 7 % 3)
    time_s = ticks[:, None] * np.array([1.0, 0.5, 0.375]) * _TICK_S
    cast = np.array([[0.0, 16.0, 24.0], [16.0, 0.0, 20.0], [16.0, 0.0, 20.0]]) * _TICK_S
    return _chain(
        name="equal-sensitivities",
        provenance=(
            "Constructed: a chain of 60 operators, every lowered precision has perturbation 1;"
            " the objective is the number of lowered operators. See problems/hard.py"
        ),
        precisions=(_FP32, _BF16, _INT8),
        time_s=time_s,
        perturbation=np.array([[0.0, 1.0, 1.0]] * TIES_OPERATORS),
        saved_bytes=[[4 << 20, 2 << 20, 1 << 20]] * TIES_OPERATORS,
        fixed_bytes=1 << 30,
        memory_bytes=(1 << 30) + TIES_OPERATORS * (4 << 20),
        cast_s=cast,
        deadline_s=float(3 * time_s[:, 0].sum() * 0.75),
    )


def wide_sensitivities() -> AllocationProblem:
    """Sensitivities from 1e-30 to 1e30 in steps of 1.5 decades, in mixed order.

    Each outweighs all smaller ones together, so the optimum is lexicographic: from the largest
    down, keep fp32 wherever the deadline still allows it (`lexicographic_kept`).
    """
    digits = ("1", "3.1622776601683795")
    steps = [float(f"{digits[k % 2]}e{-30 + 3 * k // 2}") for k in range(DECADES)]
    noise = [steps[index * 17 % DECADES] for index in range(DECADES)]
    ticks = np.array([1000.0 + (index * index * 37) % 811 for index in range(DECADES)])
    time_s = ticks[:, None] * np.array([2.0, 1.0]) * _TICK_S
    return _chain(
        name="sixty-decades",
        provenance=(
            "Constructed: 41 operators with perturbations from 1e-30 to 1e30; the optimum is"
            " lexicographic. See problems/hard.py"
        ),
        precisions=(_FP32, _BF16),
        time_s=time_s,
        perturbation=np.array([[0.0, value] for value in noise]),
        saved_bytes=[[4 << 20, 2 << 20]] * DECADES,
        fixed_bytes=1 << 30,
        memory_bytes=(1 << 30) + DECADES * (4 << 20),
        cast_s=np.zeros((2, 2)),
        deadline_s=float(3 * time_s[:, 1].sum() * 1.55),
    )


def lexicographic_kept(problem: AllocationProblem) -> list[bool]:
    """Which operators of `wide_sensitivities` keep fp32, from the largest perturbation down."""
    device = problem.devices[0]
    total = [
        [Fraction(f) + Fraction(b) for f, b in zip(forward, backward, strict=True)]
        for forward, backward in zip(
            device.forward_s.tolist(), device.backward_s.tolist(), strict=True
        )
    ]
    if problem.deadline_s is None:
        raise ArithmeticError("the instance must give a deadline")
    left = Fraction(problem.deadline_s) - sum(row[1] for row in total)
    kept = [False] * len(total)
    for index in np.argsort(-device.perturbation[:, 1], kind="stable").tolist():
        extra = total[index][0] - total[index][1]
        if extra <= left:
            kept[index] = True
            left -= extra
    return kept


def least_peak_bytes(problem: AllocationProblem, device: DeviceKind) -> int:
    """A lower bound of the peak memory on a kind: every tensor and transient at its smallest.

    A saved tensor takes at least, for its most demanding saver, that saver's smallest dtype.
    """
    saved = device.saved
    column_of = [saved.dtypes.index(dtype) for dtype in problem.storage]
    growth = np.zeros(len(problem.operators), dtype=np.int64)
    for tensor in range(len(saved)):
        savers = saved.savers_of(tensor)
        sizes = saved.size_bytes[tensor, column_of]
        smallest = np.where(device.available[savers], sizes, np.iinfo(np.int64).max).min(axis=1)
        growth[savers.min()] += smallest.max()
    held = np.maximum(device.forward_transient_bytes, device.backward_transient_bytes)  # type: ignore[arg-type]
    least = np.where(device.available, held, np.iinfo(np.int64).max).min(axis=1)
    return int((device.fixed_bytes + np.cumsum(growth) + least).max())


def short_of_memory(problem: AllocationProblem, kind: str, missing_bytes: int) -> AllocationProblem:
    """`problem` with a kind's memory `missing_bytes` below the least it can do with."""
    devices = tuple(
        replace(device, memory_bytes=least_peak_bytes(problem, device) - missing_bytes)
        if device.name == kind
        else device
        for device in problem.devices
    )
    return replace(
        problem,
        name=f"{problem.name}-short",
        provenance=(
            f"{problem.provenance} Infeasible: {kind} has {missing_bytes} bytes less than the"
            " least peak memory of any plan."
        ),
        devices=devices,
    )
