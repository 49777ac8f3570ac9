"""Plans without a solver: uniform precision, QSync's greedy recovery, local polish, random.

Every function works on one device kind and on precision columns, is held to a deadline in
seconds (infinity for none), and returns feasible columns [N] or None. Each step is judged by
`PlanState`, which agrees with `evaluate`; ties are broken the same way everywhere: less
perturbation, then the smaller iteration time of the kind, then lower columns.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np

from qsync_opt.errors import ParameterError
from qsync_opt.optimize.arrays import IntArray
from qsync_opt.optimize.brute_force import brute_force_columns, brute_force_fastest
from qsync_opt.optimize.choices import (
    Choice,
    better_cost,
    equal_cost,
    movable,
    picked_columns,
)
from qsync_opt.optimize.evaluate import (
    TIME_TOLERANCE,
    DeviceEvaluation,
    broken_rules,
    evaluate_device,
)
from qsync_opt.optimize.problem import AllocationProblem, DeviceKind
from qsync_opt.optimize.state import PlanState
from qsync_opt.optimize.ticks import equal_ticks
from qsync_opt.precision import Precision

__all__ = [
    "UniformCandidate",
    "best_uniform",
    "brute_force_columns",
    "brute_force_fastest",
    "greedy_columns",
    "improve_columns",
    "movable",
    "random_columns",
    "uniform_candidates",
    "uniform_columns",
]

#: Passes over all choices before `improve_columns` stops; it is nearly always done after 3.
_MOST_PASSES = 20
#: Counterparts that `improve_columns` tries for each choice it would like to raise.
_COUNTERPARTS = 8
#: Choices looked at between two questions to `should_stop`.
_STOP_EVERY = 64

#: `choices.TIE_TOLERANCE` as a number of decimal digits.
_TIE_DIGITS = 12

ShouldStop = Callable[[], bool]


@dataclass(frozen=True, kw_only=True)
class UniformCandidate:
    """The plan that runs one precision wherever it can.

    Attributes:
        precision: the precision asked of every operator.
        column: precision column per operator, [N].
        evaluation: what it costs.
        feasible: whether memory, deadline, pins, groups and followers hold.
    """

    precision: Precision
    column: IntArray
    evaluation: DeviceEvaluation
    feasible: bool


def uniform_candidates(
    problem: AllocationProblem, device: DeviceKind, deadline_s: float
) -> tuple[UniformCandidate, ...]:
    """One plan per precision p of the problem, in the order of its columns.

    Every choice runs at p where it may. Elsewhere (the device lacks p there, or a pin
    forbids it) it takes the nearest wider precision it may run at, and only where there is
    none the nearest narrower one; `Precision` lists them from the widest to the narrowest.
    So uniform bf16 leaves an operator without bf16 in tf32 or fp32, as autocast does.
    """
    choices = movable(problem, device)
    options = {choice.columns for choice in choices}
    result = []
    for target, precision in enumerate(problem.precisions):
        nearest = {columns: _nearest(problem, columns, target) for columns in options}
        picks = [nearest[choice.columns] for choice in choices]
        column = picked_columns(problem, choices, picks)
        evaluation = evaluate_device(problem, device, column)
        feasible = (
            evaluation.peak_memory_bytes <= device.memory_bytes
            and evaluation.iteration_time_s <= deadline_s * (1 + TIME_TOLERANCE)
            and not broken_rules(problem, device, column)
        )
        result.append(
            UniformCandidate(
                precision=precision, column=column, evaluation=evaluation, feasible=feasible
            )
        )
    return tuple(result)


def _nearest(problem: AllocationProblem, columns: Sequence[int], target: int) -> int:
    """The column that stands in for `target`; see `uniform_candidates`."""
    widest_first = list(Precision)
    rank = {column: widest_first.index(problem.precisions[column]) for column in columns}
    limit = widest_first.index(problem.precisions[target])
    wider = [column for column in columns if rank[column] <= limit]
    return max(wider, key=rank.__getitem__) if wider else min(columns, key=rank.__getitem__)


def uniform_columns(
    problem: AllocationProblem, device: DeviceKind, deadline_s: float
) -> IntArray | None:
    """The best feasible plan of `uniform_candidates`; None if none is feasible."""
    best = best_uniform([c for c in uniform_candidates(problem, device, deadline_s) if c.feasible])
    return None if best is None else best.column


def best_uniform(candidates: Sequence[UniformCandidate]) -> UniformCandidate | None:
    """The candidate of least perturbation, then of least time, then the first; None of none."""
    best: UniformCandidate | None = None
    for candidate in candidates:
        if best is None or better_cost(_cost(candidate.evaluation), _cost(best.evaluation)):
            best = candidate
    return best


def _cost(evaluation: DeviceEvaluation) -> tuple[float, float]:
    return evaluation.perturbation, evaluation.iteration_time_s


def greedy_columns(
    problem: AllocationProblem,
    device: DeviceKind,
    deadline_s: float,
    start: IntArray,
    should_stop: ShouldStop | None = None,
) -> IntArray | None:
    """QSync's recovery (arXiv 2407.02327): from a fast plan, raise what gains most, if it fits.

    A heap holds, for every choice, the perturbation gained by raising it from its option to
    the next one (options by falling perturbation). The largest gain is tried by true
    evaluation and kept if deadline and memory hold and the perturbation falls; either way
    the next increment of that choice is pushed. Equal gains come in the order of pushing.

    The published code (bytedance/QSync) reads the gain of a step from the step before, wraps
    round at the first option, and gives a choice up for good once one of its increments is
    refused; here a refused increment is dropped alone, and the option after it is still tried.

    Args:
        problem: the problem.
        device: one of its device kinds.
        deadline_s: iteration time to keep; infinity for none.
        start: a feasible plan, usually the fastest, [N].
        should_stop: asked now and then; the plan so far is returned once it says True.

    Returns:
        A feasible plan, never worse than `start`; None if `start` is not feasible.
    """
    state = PlanState(problem, device, start)
    if not state.feasible(deadline_s):
        return None
    ladders = _ladders(problem, device)
    heap: list[tuple[float, int, int, int]] = []
    for number, ladder in enumerate(ladders):
        step = ladder.next_below(state.column_of(ladder.choice.operators[0]), 0)
        if step is not None:
            gain = ladder.gain(state.column_of(ladder.choice.operators[0]), step)
            heap.append((-gain, number, number, step))
    heapify(heap)
    sequence = len(ladders)
    tried = 0
    while heap:
        tried += 1
        if should_stop is not None and tried % _STOP_EVERY == 0 and should_stop():
            break
        _, _, number, step = heappop(heap)
        ladder = ladders[number]
        before = state.perturbation_ticks
        moved = state.move(ladder.choice.operators, ladder.columns[step])
        if state.perturbation_ticks >= before or not state.feasible(deadline_s):
            state.undo(moved)
        now = state.column_of(ladder.choice.operators[0])
        following = ladder.next_below(now, step + 1)
        if following is not None:
            heappush(heap, (-ladder.gain(now, following), sequence, number, following))
            sequence += 1
    return state.columns()


@dataclass(frozen=True)
class _Ladder:
    """The options of a choice by falling perturbation, then rising time, then column.

    Attributes:
        choice: the choice.
        columns: its columns in that order.
        perturbation: of the whole choice, by column.
        time_s: forward and backward of the whole choice, casts left out, by column.
    """

    choice: Choice
    columns: tuple[int, ...]
    perturbation: dict[int, float]
    time_s: dict[int, float]

    def gain(self, column: int, step: int) -> float:
        """Perturbation gained by going from a column to a step of the ladder."""
        return self.perturbation[column] - self.perturbation[self.columns[step]]

    def next_below(self, column: int, step: int) -> int | None:
        """The first step from `step` on that perturbs less than a column; None without one."""
        now = self.perturbation[column]
        for index in range(step, len(self.columns)):
            other = self.perturbation[self.columns[index]]
            if other < now and not equal_cost(other, now):
                return index
        return None


def _ladders(problem: AllocationProblem, device: DeviceKind) -> list[_Ladder]:
    perturbations = device.perturbation.tolist()
    totals_s = (device.forward_s + device.backward_s).tolist()
    result = []
    for choice in movable(problem, device):
        if len(choice.columns) == 1:
            continue
        perturbation = choice.summed(perturbations)
        time_s = choice.summed(totals_s)
        order = sorted(choice.columns, key=lambda q: (-perturbation[q], time_s[q], q))  # noqa: B023
        result.append(
            _Ladder(
                choice=choice,
                columns=tuple(order),
                perturbation={q: perturbation[q] for q in order},
                time_s={q: time_s[q] for q in order},
            )
        )
    return result


def improve_columns(
    problem: AllocationProblem,
    device: DeviceKind,
    deadline_s: float,
    column: IntArray,
    should_stop: ShouldStop | None = None,
    exchanges: int = 2_000,
) -> IntArray | None:
    """Polish a feasible plan by single changes, and by exchanges of two, to a fixed point.

    A change of one choice is made if the plan stays feasible and its perturbation falls, or
    stays equal while the iteration time falls, or both stay and the column falls. Where no
    such change is left, exchanges are tried: raise one choice beyond the limits, lower
    another that costs less perturbation so that the limits hold again.

    Args:
        problem: the problem.
        device: one of its device kinds.
        deadline_s: iteration time to keep; infinity for none.
        column: a feasible plan, [N].
        should_stop: asked now and then; the plan so far is returned once it says True.
        exchanges: evaluations that exchanges may cost; a count, so that the plan does not
            depend on the machine's speed. 0 leaves them out.

    Returns:
        A feasible plan, never worse than `column`; None if `column` is not feasible.
    """
    state = PlanState(problem, device, column)
    if not state.feasible(deadline_s):
        return None
    polish = _Polish(problem, device, deadline_s, state, should_stop or (lambda: False))
    polish.settle()
    while exchanges > 0 and not polish.stopped:
        made, used = polish.exchange(exchanges)
        exchanges -= used
        if not made:
            break
        polish.settle()
    return state.columns()


class _Polish:
    """The moves of `improve_columns` on one state."""

    def __init__(
        self,
        problem: AllocationProblem,
        device: DeviceKind,
        deadline_s: float,
        state: PlanState,
        should_stop: ShouldStop,
    ) -> None:
        self._ladders = _ladders(problem, device)
        self._deadline_s = deadline_s
        self._state = state
        self._should_stop = should_stop
        followers = [bool(operator.follows) for operator in problem.operators]
        # Followers seldom perturb; then a choice's own table says what a change gains.
        self._own_is_all = not device.perturbation[followers].any()
        self.stopped = False

    def settle(self) -> None:
        """Single changes until none helps."""
        for _ in range(_MOST_PASSES):
            changed = False
            for number, ladder in enumerate(self._ladders):
                if number % _STOP_EVERY == 0 and self._should_stop():
                    self.stopped = True
                    return
                changed |= self._change(ladder)
            if not changed:
                return

    def _change(self, ladder: _Ladder) -> bool:
        """Move one choice to the first better option, least perturbation first."""
        state, operators = self._state, ladder.choice.operators
        now = state.column_of(operators[0])
        own = ladder.perturbation[now]
        for column in reversed(ladder.columns):
            other = ladder.perturbation[column]
            if self._own_is_all and other > own and not equal_cost(other, own):
                break
            if column == now:
                continue
            before, time_before = state.perturbation_ticks, state.time_ticks
            moved = state.move(operators, column)
            if self._better(before, time_before, column < now) and state.feasible(self._deadline_s):
                return True
            state.undo(moved)
        return False

    def _better(self, before: int, time_before: int, lower_column: bool) -> bool:
        after = self._state.perturbation_ticks
        if not equal_ticks(after, before, _TIE_DIGITS):
            return after < before
        # Ticks are exact: what is only nearly equal may not rise, so no rise can add up.
        time_after = self._state.time_ticks
        if after <= before and not equal_ticks(time_after, time_before, _TIE_DIGITS):
            return time_after < time_before
        return after <= before and time_after <= time_before and lower_column

    def exchange(self, budget: int) -> tuple[bool, int]:
        """One round of exchanges: whether any was made, and the evaluations it took."""
        state, deadline_s = self._state, self._deadline_s
        used, made = 0, False
        lowerings = self._lowerings()
        for gain, number, column in self._raisings():
            if used >= budget or self.stopped:
                break
            self.stopped = self._should_stop()
            ladder = self._ladders[number]
            before = state.perturbation_ticks
            raised = state.move(ladder.choice.operators, column)
            used += 1
            late_s = state.iteration_time_s - deadline_s
            for other in lowerings.against(gain, late_s, number):
                counterpart = self._ladders[lowerings.number[other]]
                if state.column_of(counterpart.choice.operators[0]) != lowerings.origin[other]:
                    continue
                lowered = state.move(counterpart.choice.operators, lowerings.column[other])
                used += 1
                after = state.perturbation_ticks
                better = after < before and not equal_ticks(after, before, _TIE_DIGITS)
                if better and state.feasible(deadline_s):
                    made = True
                    break
                state.undo(lowered)
            else:
                state.undo(raised)
        return made, used

    def _raisings(self) -> list[tuple[float, int, int]]:
        """(gain, number of the ladder, column) of every raise, largest gain first."""
        result = []
        for number, ladder in enumerate(self._ladders):
            now = self._state.column_of(ladder.choice.operators[0])
            step = ladder.next_below(now, 0)
            if step is not None:
                for index in range(step, len(ladder.columns)):
                    result.append((ladder.gain(now, index), number, ladder.columns[index]))
        return sorted(result, key=lambda entry: (-entry[0], entry[1], entry[2]))

    def _lowerings(self) -> _Lowerings:
        rows = []
        for number, ladder in enumerate(self._ladders):
            now = self._state.column_of(ladder.choice.operators[0])
            for column in ladder.columns:
                loss = ladder.perturbation[column] - ladder.perturbation[now]
                if column != now and loss >= 0:
                    saved_s = ladder.time_s[now] - ladder.time_s[column]
                    rows.append((loss, number, column, saved_s, now))
        rows.sort()
        return _Lowerings(rows)


class _Lowerings:
    """Every change of one choice that perturbs more, by rising loss."""

    def __init__(self, rows: Sequence[tuple[float, int, int, float, int]]) -> None:
        self._loss = np.array([row[0] for row in rows], dtype=np.float64)
        self._saved_s = np.array([row[3] for row in rows], dtype=np.float64)
        self._numbers = np.array([row[1] for row in rows], dtype=np.int64)
        self.number = [row[1] for row in rows]
        self.column = [row[2] for row in rows]
        self.origin = [row[4] for row in rows]

    def against(self, gain: float, late_s: float, number: int) -> list[int]:
        """The cheapest few that cost less than a gain and save the time that is missing."""
        cheaper = int(np.searchsorted(self._loss, gain))
        fits = (self._saved_s[:cheaper] >= late_s) & (self._numbers[:cheaper] != number)
        found: list[int] = np.flatnonzero(fits)[:_COUNTERPARTS].tolist()
        return found


def random_columns(
    problem: AllocationProblem, device: DeviceKind, deadline_s: float, seed: int, tries: int = 8
) -> IntArray | None:
    """The best of some random plans, each repaired until it is feasible.

    The random numbers depend on the seed and the kind's name alone, so adding, removing or
    reordering other kinds changes nothing. A repair visits the choices in random order and
    keeps every change that brings the plan nearer to its limits.

    Args:
        problem: the problem.
        device: one of its device kinds.
        deadline_s: iteration time to keep; infinity for none.
        seed: whole number >= 0.
        tries: plans to draw, at least 1.

    Returns:
        A feasible plan; None if no repair succeeded (one may exist all the same).

    Raises:
        ParameterError: `tries` or `seed` is out of range.
    """
    for name, value, least in (("seed", seed, 0), ("tries", tries, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ParameterError(name, f"must be a whole number >= {least}", value)
    digest = hashlib.sha256(device.name.encode()).digest()
    rng = np.random.default_rng([seed, int.from_bytes(digest[:8], "big")])
    choices = movable(problem, device)
    state: PlanState | None = None
    best: IntArray | None = None
    best_cost = (0.0, 0.0)
    for _ in range(tries):
        picks = [choice.columns[int(rng.integers(len(choice.columns)))] for choice in choices]
        column = picked_columns(problem, choices, picks)
        if state is None:
            state = PlanState(problem, device, column)
        else:
            state.load(column)
        if not _repair(state, choices, deadline_s, rng):
            continue
        cost = (state.perturbation, state.iteration_time_s)
        if best is None or better_cost(cost, best_cost):
            best, best_cost = state.columns(), cost
    return best


def _repair(
    state: PlanState, choices: Sequence[Choice], deadline_s: float, rng: np.random.Generator
) -> bool:
    """Change choices in random order until the plan is feasible; False if that fails."""
    for number in rng.permutation(len(choices)).tolist():
        excess = state.excess(deadline_s)
        if not excess:
            return True
        operators = choices[number].operators
        kept = state.column_of(operators[0])
        for column in choices[number].columns:
            if column == kept:
                continue
            moved = state.move(operators, column)
            after = state.excess(deadline_s)
            if after < excess:
                excess = after
            else:
                state.undo(moved)
    return not state.excess(deadline_s)
