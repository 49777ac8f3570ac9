"""Every plan of a tiny problem: the oracle for the other methods.

All assignments of the independent choices are evaluated at once with arrays (A plans at a
time), in the order of their precision columns. Nothing is pruned, and the formulas are those
of `evaluate`, written a second time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from qsync_opt.errors import ParameterError
from qsync_opt.optimize.arrays import BoolArray, FloatArray, IntArray
from qsync_opt.optimize.choices import TIE_TOLERANCE, Choice, movable
from qsync_opt.optimize.evaluate import (
    TIME_TOLERANCE,
    allowed_columns,
    first_operators,
    tails_s,
)
from qsync_opt.optimize.problem import AllocationProblem, DeviceKind
from qsync_opt.optimize.rows import first_savers, transient_bytes
from qsync_opt.precision import HANDED_ON, PROMOTED

#: Entries of the largest array (plans x operators) made at a time.
_CHUNK_ENTRIES = 400_000


def brute_force_columns(
    problem: AllocationProblem, device: DeviceKind, deadline_s: float, limit: int = 2_000_000
) -> IntArray | None:
    """The best plan of one kind by trying all: least perturbation, then time, then columns.

    Perturbations, and then times, count as equal within `choices.TIE_TOLERANCE`.

    Args:
        problem: the problem.
        device: one of its device kinds.
        deadline_s: iteration time to keep; infinity for none.
        limit: most plans to try.

    Returns:
        Precision columns, [N]; None if no plan is feasible.

    Raises:
        ParameterError: there are more plans than `limit`, or the deadline is not > 0.
    """
    if not deadline_s > 0:
        raise ParameterError("deadline_s", "must be a number > 0", deadline_s)
    plans = _Plans.of(problem, device, limit)
    feasible = plans.fits & (plans.time_s <= deadline_s * (1 + TIME_TOLERANCE))
    return plans.first(np.flatnonzero(feasible), plans.perturbation, plans.time_s)


def brute_force_fastest(
    problem: AllocationProblem, device: DeviceKind, limit: int = 2_000_000
) -> IntArray | None:
    """The fastest plan of one kind within its memory by trying all: time, perturbation, columns.

    See `brute_force_columns`; the least iteration time is that of the plan returned.
    """
    plans = _Plans.of(problem, device, limit)
    return plans.first(np.flatnonzero(plans.fits), plans.time_s, plans.perturbation)


@dataclass(frozen=True, kw_only=True)
class _Plans:
    """What each of the A plans of a device kind costs, in the order of their columns.

    Attributes:
        fits: within the memory, and pins, groups and followers agree, [A].
        time_s: iteration time, [A].
        perturbation: sum of perturbations, [A].
    """

    enumerator: _Enumerator
    fits: BoolArray
    time_s: FloatArray
    perturbation: FloatArray

    @staticmethod
    def of(problem: AllocationProblem, device: DeviceKind, limit: int) -> _Plans:
        enumerator = _Enumerator(problem, device)
        if enumerator.count > limit:
            raise ParameterError(
                "limit",
                f"must be at least the number of plans on {device.name} ({enumerator.count})",
                limit,
                "Use method 'exact' for problems of this size",
            )
        parts = [enumerator.evaluate(columns) for columns in enumerator.chunks()]
        fits, time_s, perturbation = (np.concatenate(part) for part in zip(*parts, strict=True))
        return _Plans(enumerator=enumerator, fits=fits, time_s=time_s, perturbation=perturbation)

    def first(self, rows: IntArray, *costs: FloatArray) -> IntArray | None:
        """Of the given plans, the least by the costs in turn, then the first; None of none."""
        if not rows.size:
            return None
        for cost in costs:
            values = cost[rows]
            rows = rows[values <= values.min() * (1 + TIE_TOLERANCE)]
        best: IntArray = self.enumerator.columns(rows[:1])[0]
        return best


class _Enumerator:
    """The plans of one device kind by number: the first choice varies slowest."""

    def __init__(self, problem: AllocationProblem, device: DeviceKind) -> None:
        self._problem, self._device = problem, device
        self._choices: tuple[Choice, ...] = movable(problem, device)
        self.count = math.prod(len(choice.columns) for choice in self._choices)
        self._rows = np.arange(len(problem.operators))
        column_of = {precision: index for index, precision in enumerate(problem.precisions)}
        self._dtype = np.array([HANDED_ON.index(dtype) for dtype in problem.output])
        self._follower_column = np.array([column_of.get(dtype, 0) for dtype in HANDED_ON])
        self._promoted = column_of.get(PROMOTED, 0)
        self._transient = transient_bytes(device)
        self._first_savers = first_savers(device)
        self._first_operators, self._tails_s = first_operators(problem), tails_s(problem)
        self._allowed = allowed_columns(problem, device)
        self._groups = [
            [problem.operator_index[name] for name in group] for group in problem.groups
        ]
        # A set of precisions is the sum of 2^column; entry m of the last axis costs set m.
        tensors, saved = device.tensors, device.saved
        members = _members(len(problem.precisions))
        self._cast_forward = tensors.forward_s @ members if len(tensors) else None
        self._cast_backward = tensors.backward_s @ members if len(tensors) else None
        dtypes = saved.dtypes
        self._storage = np.array(
            [dtypes.index(dtype) if dtype in dtypes else 0 for dtype in problem.storage]
        )
        self._copies = np.maximum(saved.size_bytes, 0) @ _members(len(dtypes)).astype(np.int64)

    def chunks(self) -> Iterator[IntArray]:
        """Precision columns of all plans in order, some plans at a time, [A, N]."""
        size = max(1, _CHUNK_ENTRIES // len(self._rows))
        for start in range(0, self.count, size):
            yield self.columns(np.arange(start, min(start + size, self.count)))

    def columns(self, numbers: IntArray) -> IntArray:
        """Precision columns of the plans with the given numbers, [A, N]."""
        result = np.zeros((len(numbers), len(self._rows)), dtype=np.int64)
        for choice in reversed(self._choices):
            numbers, option = np.divmod(numbers, len(choice.columns))
            picked = np.array(choice.columns)[option]
            result[:, list(choice.operators)] = picked[:, None]
        for index, operator in enumerate(self._problem.operators):
            if operator.follows:
                handed = self._dtype[result[:, list(operator.follows)]]
                equal = (handed == handed[:, :1]).all(axis=1)
                followed = self._follower_column[handed[:, 0]]
                result[:, index] = np.where(equal, followed, self._promoted)
        return result

    def evaluate(self, column: IntArray) -> tuple[BoolArray, FloatArray, FloatArray]:
        """Whether memory and rules hold, iteration time and perturbation of plans, each [A]."""
        device, rows = self._device, self._rows
        forward = device.forward_s[rows, column].sum(axis=1)
        backward = device.backward_s[rows, column]
        tensors = device.tensors
        if self._cast_forward is not None and self._cast_backward is not None:
            targets = _sets(column[:, tensors.consumers], tensors.consumer_start)
            source = column[:, tensors.producer]
            index = np.arange(len(tensors))
            forward += self._cast_forward[index, source, targets].sum(axis=1)
            casts = self._cast_backward[index, source, targets]
            for tensor, producer in enumerate(tensors.producer.tolist()):
                backward[:, producer] += casts[:, tensor]
        backward_from = np.zeros((len(column), len(rows) + 1))
        backward_from[:, :-1] = np.cumsum(backward[:, ::-1], axis=1)[:, ::-1]
        longest = backward_from[:, 0]
        if len(self._tails_s):
            ends = backward_from[:, self._first_operators] + self._tails_s
            longest = np.maximum(longest, ends.max(axis=1))
        time_s = device.optimizer_s + forward + longest
        perturbation = device.perturbation[rows, column].sum(axis=1)
        return self._fits(column), time_s, perturbation

    def _fits(self, column: IntArray) -> BoolArray:
        device, rows, saved = self._device, self._rows, self._device.saved
        held = np.zeros(column.shape, dtype=np.int64)
        if len(saved):
            dtypes = _sets(self._storage[column[:, saved.savers]], saved.saver_start)
            copies = self._copies[np.arange(len(saved)), dtypes]
            for tensor, first in enumerate(self._first_savers.tolist()):
                held[:, first] += copies[:, tensor]
        held = np.cumsum(held, axis=1) + self._transient[rows, column]
        fits: BoolArray = device.fixed_bytes + held.max(axis=1) <= device.memory_bytes
        fits &= self._allowed[rows, column].all(axis=1)
        for group in self._groups:
            fits &= (column[:, group] == column[:, group[:1]]).all(axis=1)
        return fits


def _members(columns: int) -> FloatArray:
    """Entry (q, m) is 1 where column q belongs to set m, [columns, 2^columns]."""
    return ((np.arange(2**columns) >> np.arange(columns)[:, None]) & 1).astype(np.float64)


def _sets(columns: IntArray, start: IntArray) -> IntArray:
    """The set of columns in each stretch `start[t]:start[t + 1]`, [A, T]."""
    return np.bitwise_or.reduceat(np.left_shift(1, columns), start[:-1], axis=1)
