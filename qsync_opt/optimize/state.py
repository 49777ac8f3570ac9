"""`PlanState`: one device kind's plan under change, re-evaluated move by move.

`evaluate_device` costs a pass over every operator; a search that tries tens of thousands of
single changes needs the cost of one change. `PlanState` keeps what each part of the
evaluation is summed from and updates only what a move touches:

    casts           consumers per (tensor, precision): a cast is paid while its count is > 0;
    saved copies    savers per (tensor, dtype), likewise;
    backward time   one sum per stretch of operators between two ready rows, the backward
                    cast of a tensor counted with its producer;
    peak memory     a segment tree over the program points: a node holds the bytes saved in
                    its range and the highest point of the range.

Times and perturbations are held in ticks (`ticks`), so adding and taking back is exact:
nothing drifts, however many moves are made and undone. A time tick is at most 2^-59 of the
least time that any plan can take, so rounding the tables to ticks moves the sum of 10,000
operators by less than 1e-13 of itself; perturbations are not rounded at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np

from qsync_opt.errors import ParameterError, PlanError
from qsync_opt.optimize.arrays import FloatArray, IntArray
from qsync_opt.optimize.choices import TIE_TOLERANCE
from qsync_opt.optimize.evaluate import TIME_TOLERANCE, allowed_columns, follower_columns
from qsync_opt.optimize.problem import AllocationProblem, DeviceKind
from qsync_opt.optimize.rows import first_savers, time_rows, transient_bytes
from qsync_opt.optimize.ticks import (
    exact_exponent,
    fine_exponent,
    from_ticks,
    ticks_down,
    to_ticks,
)
from qsync_opt.precision import PROMOTED

_TIME_BITS = 60  # a plan's time is at least 2^59 ticks

#: What `PlanState.move` returns: (operator, its column before), in the order of the changes.
Undo = list[tuple[int, int]]


class PlanState:
    """A plan on one device kind, with its costs kept up to date under single moves.

    Args:
        problem: the problem.
        device: one of its device kinds.
        column: precision column per operator, [N]; followers are derived, whatever it says.

    Raises:
        PlanError: an operator does not have its precision here.
    """

    def __init__(self, problem: AllocationProblem, device: DeviceKind, column: IntArray) -> None:
        self._problem = problem
        self._device = device
        self._build_operators()
        self._build_rules()
        self._build_times()
        self._build_memory()
        self.load(column)

    # -- tables that no move changes -----------------------------------------------------

    def _build_operators(self) -> None:
        problem = self._problem
        column_of = {precision: index for index, precision in enumerate(problem.precisions)}
        self._output = list(problem.output)
        self._follower_column = [column_of.get(dtype, 0) for dtype in problem.output]
        self._promoted_column = column_of.get(PROMOTED, 0)
        self._inputs = [operator.follows for operator in problem.operators]
        self._followers: list[list[int]] = [[] for _ in problem.operators]
        for index, operator in enumerate(problem.operators):
            for source in operator.follows:
                self._followers[source].append(index)

    def _build_rules(self) -> None:
        """For each operator, whose pin or group rule to check again when it changes."""
        problem, device = self._problem, self._device
        self._allowed = {}
        self._leader: dict[int, int] = {}
        self._recheck: dict[int, list[int]] = {}
        allowed = allowed_columns(problem, device)
        for name in device.pins:
            row = problem.operator_index[name]
            self._leader[row] = row
        for group in problem.groups:
            rows = [problem.operator_index[name] for name in group]
            self._leader.update(dict.fromkeys(rows, rows[0]))
        for row, leader in self._leader.items():
            self._allowed[row] = allowed[row].tolist()
            for changed in {row, leader}:
                self._recheck.setdefault(changed, []).append(row)

    def _build_times(self) -> None:
        problem, device = self._problem, self._device
        tensors = device.tensors
        rows = time_rows(problem)
        tails = np.array([row.tail_s for row in rows])
        tables = (device.forward_s, device.backward_s, tensors.forward_s, tensors.backward_s)
        self._tick = fine_exponent(_least_time_s(device, tails), _TIME_BITS)
        forward, backward, cast_forward, cast_backward = (to_ticks(t, self._tick) for t in tables)
        self._forward: list[list[int]] = forward
        self._backward: list[list[int]] = backward
        self._cast_forward: list[list[list[int]]] = cast_forward
        self._cast_backward: list[list[list[int]]] = cast_backward
        self._tails: list[int] = to_ticks(tails, self._tick)
        self._optimizer: int = to_ticks(np.array([device.optimizer_s]), self._tick)[0]
        # Rows come by falling first operator: stretch j lies between row j and row j - 1.
        starts = np.array([-row.first_operator for row in rows])
        count = len(problem.operators)
        self._stretch: list[int] = np.searchsorted(starts, -np.arange(count)).tolist()
        self._perturbation_tick = exact_exponent(device.perturbation)
        self._perturbation: list[list[int]] = to_ticks(device.perturbation, self._perturbation_tick)
        self._producer: list[int] = tensors.producer.tolist()
        self._produced = _rows_by_operator(tensors.producer, np.arange(len(tensors)), count)
        self._owner = np.repeat(np.arange(len(tensors)), np.diff(tensors.consumer_start))
        self._consumed = _rows_by_operator(tensors.consumers, self._owner, count)
        self._limit: tuple[float, float] = (math.inf, math.inf)

    def _build_memory(self) -> None:
        problem, device = self._problem, self._device
        saved = device.saved
        count = len(problem.operators)
        self._memory_bytes = device.memory_bytes
        self._fixed_bytes = device.fixed_bytes
        transient = transient_bytes(device)
        self._transient: list[list[int]] = transient.tolist()
        self._most_transient = int(np.where(device.available, transient, 0).max(initial=0))
        self._first_saver: list[int] = first_savers(device).tolist()
        # A dtype that no saver of any tensor can ask for has no column; 0 stands for it.
        self._dtype = [
            saved.dtypes.index(dtype) if dtype in saved.dtypes else 0 for dtype in problem.storage
        ]
        self._copy_bytes: list[list[int]] = np.maximum(saved.size_bytes, 0).tolist()
        self._saved_owner = np.repeat(np.arange(len(saved)), np.diff(saved.saver_start))
        self._saves = _rows_by_operator(saved.savers, self._saved_owner, count)
        self._leaves = 1 << (count - 1).bit_length()

    # -- the plan ---------------------------------------------------------------------------

    def load(self, column: IntArray) -> None:
        """Take up another plan, [N]; followers are derived.

        Raises:
            PlanError: an operator does not have its precision here.
        """
        problem, device = self._problem, self._device
        tensors, saved = device.tensors, device.saved
        column = follower_columns(problem, column)
        missing = np.flatnonzero(~device.available[np.arange(len(column)), column])
        if missing.size:
            row = int(missing[0])
            raise PlanError(
                f"devices.{device.name}.{problem.operators[row].name}",
                "must be a precision that the operator has on this kind",
                problem.precisions[int(column[row])].value,
            )
        picks: list[int] = column.tolist()
        self._column = picks
        self._perturbation_sum = sum(t[p] for t, p in zip(self._perturbation, picks, strict=True))
        self._forward_sum = sum(t[p] for t, p in zip(self._forward, picks, strict=True))
        self._stretches = [0] * len(self._tails)
        for stretch, times, pick in zip(self._stretch, self._backward, picks, strict=True):
            self._stretches[stretch] += times[pick]
        self._consumers = _counts(
            self._owner, column[tensors.consumers], len(tensors), len(problem.precisions)
        )
        for tensor, counts in enumerate(self._consumers):
            producer = self._producer[tensor]
            source = picks[producer]
            for target, consumers in enumerate(counts):
                if consumers:
                    self._forward_sum += self._cast_forward[tensor][source][target]
                    cast = self._cast_backward[tensor][source][target]
                    self._stretches[self._stretch[producer]] += cast
        dtypes = np.array(self._dtype)[column[saved.savers]]
        self._savers = _counts(self._saved_owner, dtypes, len(saved), len(saved.dtypes))
        self._saved_at = [0] * len(picks)
        for first, sizes, counts in zip(
            self._first_saver, self._copy_bytes, self._savers, strict=True
        ):
            kept = sum(size for size, savers in zip(sizes, counts, strict=True) if savers)
            self._saved_at[first] += kept
        self._saved_sum = sum(self._saved_at)
        self._plant(column)
        self._broken = {row for row in self._leader if self._breaks_rule(row)}

    def columns(self) -> IntArray:
        """The precision column of every operator, [N]."""
        return np.array(self._column, dtype=np.int64)

    def column_of(self, operator: int) -> int:
        """The precision column of one operator."""
        return self._column[operator]

    def move(self, operators: Sequence[int], column: int) -> Undo:
        """Give operators a precision column; followers follow.

        Args:
            operators: operators that follow no other; all members of a group together.
            column: a precision that each of them has.

        Returns:
            What `undo` needs. Moves are undone in the reverse order of being made.
        """
        moved: Undo = []
        pending: list[int] = []
        for operator in operators:
            before = self._column[operator]
            if before != column:
                moved.append((operator, before))
                self._set(operator, column)
                for follower in self._followers[operator]:
                    heappush(pending, follower)
        # Followers come after their inputs, so the lowest index is always ready.
        while pending:
            follower = heappop(pending)
            before, after = self._column[follower], self._followed(follower)
            if before != after:
                moved.append((follower, before))
                self._set(follower, after)
                for later in self._followers[follower]:
                    heappush(pending, later)
        return moved

    def undo(self, moved: Undo) -> None:
        """Take back the latest move that has not been taken back."""
        for operator, before in reversed(moved):
            self._set(operator, before)

    def _followed(self, follower: int) -> int:
        inputs, column, output = self._inputs[follower], self._column, self._output
        first = column[inputs[0]]
        for source in inputs:
            if output[column[source]] is not output[first]:
                return self._promoted_column
        return self._follower_column[first]

    def _set(self, operator: int, after: int) -> None:
        column = self._column
        before = column[operator]
        column[operator] = after
        costs = self._perturbation[operator]
        self._perturbation_sum += costs[after] - costs[before]
        costs = self._forward[operator]
        forward = costs[after] - costs[before]
        costs = self._backward[operator]
        backward = costs[after] - costs[before]
        for tensor in self._produced[operator]:
            table = self._cast_forward[tensor]
            old, new = table[before], table[after]
            table = self._cast_backward[tensor]
            old_backward, new_backward = table[before], table[after]
            for target, consumers in enumerate(self._consumers[tensor]):
                if consumers:
                    forward += new[target] - old[target]
                    backward += new_backward[target] - old_backward[target]
        stretch, stretches = self._stretch, self._stretches
        stretches[stretch[operator]] += backward
        for tensor in self._consumed[operator]:
            counts = self._consumers[tensor]
            producer = self._producer[tensor]
            source = column[producer]
            counts[before] -= 1
            cast = 0
            if not counts[before]:
                forward -= self._cast_forward[tensor][source][before]
                cast = -self._cast_backward[tensor][source][before]
            if not counts[after]:
                forward += self._cast_forward[tensor][source][after]
                cast += self._cast_backward[tensor][source][after]
            counts[after] += 1
            if cast:
                stretches[stretch[producer]] += cast
        self._forward_sum += forward
        self._set_memory(operator, before, after)
        if operator in self._recheck:
            for row in self._recheck[operator]:
                if self._breaks_rule(row):
                    self._broken.add(row)
                else:
                    self._broken.discard(row)

    def _set_memory(self, operator: int, before: int, after: int) -> None:
        transient = self._transient[operator]
        if transient[before] != transient[after]:
            self._stale.add(operator)
        old, new = self._dtype[before], self._dtype[after]
        if old == new:
            return
        for tensor in self._saves[operator]:
            counts, sizes = self._savers[tensor], self._copy_bytes[tensor]
            counts[old] -= 1
            change = 0 if counts[old] else -sizes[old]
            if not counts[new]:
                change += sizes[new]
            counts[new] += 1
            if change:
                first = self._first_saver[tensor]
                self._saved_sum += change
                self._saved_at[first] += change
                self._stale.add(first)

    def _breaks_rule(self, row: int) -> bool:
        column = self._column[row]
        return not self._allowed[row][column] or column != self._column[self._leader[row]]

    # -- what it costs ---------------------------------------------------------------------

    @property
    def perturbation_ticks(self) -> int:
        """Sum of the perturbations, exact, in units that one device kind's states share."""
        return self._perturbation_sum

    @property
    def perturbation(self) -> float:
        """Sum of the perturbations, not weighted."""
        return from_ticks(self._perturbation_sum, self._perturbation_tick)

    @property
    def time_ticks(self) -> int:
        """The iteration time in units that one device kind's states share."""
        longest = backward = 0
        for stretch, tail in zip(self._stretches, self._tails, strict=True):
            backward += stretch
            if backward + tail > longest:
                longest = backward + tail
        return self._optimizer + self._forward_sum + longest

    @property
    def iteration_time_s(self) -> float:
        """The step if every other kind were at least as fast, seconds."""
        return from_ticks(self.time_ticks, self._tick)

    @property
    def peak_memory_bytes(self) -> int:
        """Largest over all program points, fixed memory included."""
        sums, peaks = self._sums, self._peaks
        for operator in self._stale:
            node = self._leaves + operator
            kept = self._saved_at[operator]
            sums[node] = kept
            peaks[node] = kept + self._transient[operator][self._column[operator]]
            while node > 1:
                node >>= 1
                left, right = 2 * node, 2 * node + 1
                kept, peak = sums[left] + sums[right], sums[left] + peaks[right]
                if peaks[left] > peak:
                    peak = peaks[left]
                if kept == sums[node] and peak == peaks[node]:
                    break
                sums[node], peaks[node] = kept, peak
        self._stale.clear()
        return self._fixed_bytes + peaks[1]

    def _plant(self, column: IntArray) -> None:
        """Build the segment tree: node i has the children 2i and 2i + 1, leaves come last."""
        rows = np.arange(len(column))
        sums = np.zeros(self._leaves, dtype=np.int64)
        sums[: len(rows)] = self._saved_at
        # A leaf without an operator adds nothing, and its point is no higher than the last.
        peaks = sums.copy()
        peaks[: len(rows)] += transient_bytes(self._device)[rows, column]
        levels = [(sums, peaks)]
        while len(sums) > 1:
            peaks = np.maximum(peaks[::2], sums[::2] + peaks[1::2])
            sums = sums[::2] + sums[1::2]
            levels.append((sums, peaks))
        levels.append((np.zeros(1, dtype=np.int64),) * 2)  # node 0 is not used
        self._sums: list[int] = np.concatenate([level[0] for level in reversed(levels)]).tolist()
        self._peaks: list[int] = np.concatenate([level[1] for level in reversed(levels)]).tolist()
        self._stale: set[int] = set()

    def feasible(self, deadline_s: float) -> bool:
        """Whether rules, memory and deadline hold (`evaluate.TIME_TOLERANCE` on the deadline).

        Raises:
            ParameterError: the deadline is not a number > 0 (infinity means none).
        """
        return (
            not self._broken
            and self.time_ticks <= self.limit_ticks(deadline_s)
            and self.fits_memory()
        )

    def fits_memory(self) -> bool:
        """Whether the peak is within the kind's memory, to the byte."""
        bound = self._fixed_bytes + self._saved_sum + self._most_transient
        return bound <= self._memory_bytes or self.peak_memory_bytes <= self._memory_bytes

    def limit_ticks(self, deadline_s: float) -> float:
        """The largest `time_ticks` that meets a deadline; see `feasible` for errors."""
        if deadline_s != self._limit[0]:
            if not deadline_s > 0:
                raise ParameterError("deadline_s", "must be a number > 0", deadline_s)
            # A hair below the oracle's own tolerance, so that its other rounding never
            # refuses what is accepted here.
            limit_s = deadline_s * (1 + TIME_TOLERANCE) * (1 - TIE_TOLERANCE)
            self._limit = (deadline_s, ticks_down(limit_s, self._tick))
        return self._limit[1]

    def excess(self, deadline_s: float) -> float:
        """By how much the plan breaks its limits, as fractions of them; 0 where it is feasible."""
        limit, memory = self.limit_ticks(deadline_s), self._memory_bytes
        late = max(0.0, (self.time_ticks - limit) / max(limit, 1)) if limit < math.inf else 0.0
        over = 0.0 if self.fits_memory() else (self.peak_memory_bytes - memory) / max(memory, 1)
        return late + over + len(self._broken)


def _rows_by_operator(operators: IntArray, rows: IntArray, count: int) -> list[list[int]]:
    result: list[list[int]] = [[] for _ in range(count)]
    for operator, row in zip(operators.tolist(), rows.tolist(), strict=True):
        result[operator].append(row)
    return result


def _counts(owner: IntArray, column: IntArray, rows: int, columns: int) -> list[list[int]]:
    counted = np.bincount(owner * columns + column, minlength=rows * columns)
    result: list[list[int]] = counted.reshape(rows, columns).tolist()
    return result


def _least_time_s(device: DeviceKind, tails_s: FloatArray) -> float:
    """A time > 0 that no positive iteration time undercuts by much: the unit of rounding."""
    least = device.optimizer_s
    for table in (device.forward_s, device.backward_s):
        least += float(np.where(device.available, table, np.inf).min(axis=1).sum())
    if least > 0:
        return least
    tensors = device.tensors
    tables = [device.forward_s, device.backward_s, tails_s, tensors.forward_s, tensors.backward_s]
    return min(
        (float(table[table > 0].min()) for table in tables if (table > 0).any()), default=1.0
    )
