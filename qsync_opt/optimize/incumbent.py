"""`Incumbent`: the best plan of one device kind so far, each judged by `evaluate_device`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

from qsync_opt.optimize.arrays import IntArray
from qsync_opt.optimize.cuts import TimeCut, lengths_s
from qsync_opt.optimize.evaluate import (
    TIME_TOLERANCE,
    DeviceEvaluation,
    broken_rules,
    evaluate_device,
)
from qsync_opt.optimize.problem import AllocationProblem, DeviceKind


class Best(Protocol):
    """What a search offers its plans to, and asks for the best of them.

    Attributes:
        deadline_s: iteration time to keep; None where the iteration time is the objective.
        column: the best plan, an array of which only the incumbent knows the meaning.
        objective: of that plan; infinite before the first.
    """

    deadline_s: float | None
    column: IntArray | None
    objective: float

    @property
    def name(self) -> str:
        """Of what is solved, for messages."""

    def offer(self, column: IntArray) -> bool:
        """Take a plan if it is feasible and better; says whether it was."""

    def keeps(self, column: IntArray) -> bool:
        """Whether a plan keeps every budget."""


@dataclass(kw_only=True)
class Incumbent:
    """The best plan so far; less perturbation first, then less time.

    Attributes:
        problem: the problem.
        device: one of its device kinds.
        deadline_s: iteration time to keep; None where the iteration time is the objective.
        cuts: paths that must not be longer than the iteration time either.
        distrusted: whether plans that break a rule (pins, groups, followers) may be offered.
        column: precision column of every operator, [N]; None before the first plan.
        objective: of that plan; infinite before the first.
    """

    problem: AllocationProblem
    device: DeviceKind
    deadline_s: float | None
    cuts: tuple[TimeCut, ...] = ()
    distrusted: bool = False
    column: IntArray | None = field(default=None, repr=False)
    objective: float = math.inf
    _time_s: float = math.inf

    @property
    def name(self) -> str:
        """Of the kind, for messages."""
        return self.device.name

    def offer(self, column: IntArray) -> bool:
        """Take a plan if it is feasible and better; says whether it was."""
        if self.distrusted and broken_rules(self.problem, self.device, column):
            return False
        part = evaluate_device(self.problem, self.device, column)
        time_s = self._time_of(part, column)
        if not self._within(part, time_s):
            return False
        objective = time_s if self.deadline_s is None else part.perturbation
        if (objective, time_s) >= (self.objective, self._time_s):
            return False
        self.column, self.objective, self._time_s = column, objective, time_s
        return True

    def keeps(self, column: IntArray) -> bool:
        """Whether a plan keeps every budget (it may be no better than the incumbent)."""
        part = evaluate_device(self.problem, self.device, column)
        return self._within(part, self._time_of(part, column))

    def _time_of(self, part: DeviceEvaluation, column: IntArray) -> float:
        if not self.cuts:
            return part.iteration_time_s
        longest = lengths_s(self.cuts, self.device, column).max()
        return max(part.iteration_time_s, float(longest))

    def _within(self, part: DeviceEvaluation, time_s: float) -> bool:
        if part.peak_memory_bytes > self.device.memory_bytes:
            return False
        if self.deadline_s is None:
            return True
        return time_s <= self.deadline_s * (1 + TIME_TOLERANCE)
