"""`Incumbent`: the best plan of one device kind so far, each judged by `evaluate_device`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from qsync_opt.optimize.arrays import IntArray
from qsync_opt.optimize.evaluate import (
    TIME_TOLERANCE,
    DeviceEvaluation,
    broken_rules,
    evaluate_device,
)
from qsync_opt.optimize.problem import AllocationProblem, DeviceKind


@dataclass(kw_only=True)
class Incumbent:
    """The best plan so far; less perturbation first, then less time.

    Attributes:
        problem: the problem.
        device: one of its device kinds.
        deadline_s: iteration time to keep; None where the iteration time is the objective.
        distrusted: whether plans that break a rule (pins, groups, followers) may be offered.
        column: precision column of every operator, [N]; None before the first plan.
        objective: of that plan; infinite before the first.
    """

    problem: AllocationProblem
    device: DeviceKind
    deadline_s: float | None
    distrusted: bool = False
    column: IntArray | None = field(default=None, repr=False)
    objective: float = math.inf
    _time_s: float = math.inf

    def offer(self, column: IntArray) -> bool:
        """Take a plan if it is feasible and better; says whether it was."""
        if self.distrusted and broken_rules(self.problem, self.device, column):
            return False
        part = evaluate_device(self.problem, self.device, column)
        if not self._within(part):
            return False
        objective = part.iteration_time_s if self.deadline_s is None else part.perturbation
        if (objective, part.iteration_time_s) >= (self.objective, self._time_s):
            return False
        self.column, self.objective, self._time_s = column, objective, part.iteration_time_s
        return True

    def keeps(self, column: IntArray) -> bool:
        """Whether a plan keeps every budget (it may be no better than the incumbent)."""
        return self._within(evaluate_device(self.problem, self.device, column))

    def _within(self, part: DeviceEvaluation) -> bool:
        if part.peak_memory_bytes > self.device.memory_bytes:
            return False
        if self.deadline_s is None:
            return True
        return part.iteration_time_s <= self.deadline_s * (1 + TIME_TOLERANCE)
