"""`improve_columns`: a feasible plan polished by single changes and exchanges of two."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from qsync_opt.optimize.arrays import BoolArray, IntArray
from qsync_opt.optimize.choices import equal_cost
from qsync_opt.optimize.ladders import Ladder, Workspace
from qsync_opt.optimize.problem import AllocationProblem, DeviceKind
from qsync_opt.optimize.state import PlanState
from qsync_opt.optimize.ticks import equal_ticks

#: Passes over all choices before it stops; it is nearly always done after 3.
_MOST_PASSES = 20
#: Counterparts that are tried for each choice that it would like to raise.
_COUNTERPARTS = 8
#: Choices looked at between two questions to `should_stop`.
_STOP_EVERY = 64

#: `choices.TIE_TOLERANCE` as a number of decimal digits.
_TIE_DIGITS = 12

ShouldStop = Callable[[], bool]


def improve_columns(
    problem: AllocationProblem,
    device: DeviceKind,
    deadline_s: float,
    column: IntArray,
    should_stop: ShouldStop | None = None,
    exchanges: int = 2_000,
    only: BoolArray | None = None,
    workspace: Workspace | None = None,
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
        only: the single changes to try, where the caller knows that no other helps: columns
            of every operator, [N, P].
        workspace: of this kind, where the caller has one.

    Returns:
        A feasible plan, never worse than `column`; None if `column` is not feasible.
    """
    workspace = workspace or Workspace(problem, device)
    state = workspace.state(column)
    if not state.feasible(deadline_s):
        return None
    polish = _Polish(
        problem, device, deadline_s, state, workspace.ladders, should_stop or (lambda: False), only
    )
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
        ladders: Sequence[Ladder],
        should_stop: ShouldStop,
        only: BoolArray | None,
    ) -> None:
        self._ladders = ladders
        self._only = None if only is None else only.tolist()
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

    def _change(self, ladder: Ladder) -> bool:
        """Move one choice to the first better option, least perturbation first."""
        state, operators = self._state, ladder.choice.operators
        now = state.column_of(operators[0])
        own = ladder.perturbation[now]
        for column in reversed(ladder.columns):
            other = ladder.perturbation[column]
            if self._own_is_all and other > own and not equal_cost(other, own):
                break
            if column == now or not (self._only is None or self._only[operators[0]][column]):
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
