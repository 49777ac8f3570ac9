"""`Proof`: how far the search on one device kind is: incumbent, bound, and the gap asked."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from qsync_opt.optimize.arrays import IntArray
from qsync_opt.optimize.incumbent import Best
from qsync_opt.optimize.result import SolveStatus

#: Rounding of sums of floats, relative: bounds this close count as equal.
ROUNDING = 1e-11


@dataclass(frozen=True, kw_only=True, eq=False)
class KindSolution:
    """What was found for one device kind.

    Attributes:
        status: why it stopped.
        column: precision column of every operator, [N]; None without a plan.
        objective: perturbation (not weighted), or iteration time; None without a plan.
        bound: proven lower bound; infinite where no plan exists.
        statistics: counts and times of the steps.
    """

    status: SolveStatus
    column: IntArray | None
    objective: float | None
    bound: float
    statistics: dict[str, float] = field(default_factory=dict)


B = TypeVar("B", bound=Best)


class Proof(Generic[B]):
    """What is known of one device kind (or of all together), and whether that is enough.

    Args:
        incumbent: takes the plans.
        relative_gap: gap to prove.
        time_left: seconds left, or None for no limit.
        stop: whether to give up now.

    Attributes:
        incumbent: the best plan so far.
        gap: the gap to prove, a little less than asked, so that rounding cannot push the
            proven one above it.
        bound: no plan is below it.
        statistics: counts and times of the steps.
    """

    def __init__(
        self,
        incumbent: B,
        *,
        relative_gap: float,
        time_left: Callable[[], float | None],
        stop: Callable[[], bool],
    ) -> None:
        self.incumbent = incumbent
        self.gap = relative_gap - min(0.4 * relative_gap, 8 * ROUNDING)
        self.bound = 0.0  # neither a perturbation nor a time is negative
        self.statistics: dict[str, float] = {}
        self._time_left, self._stop = time_left, stop

    @property
    def deadline_s(self) -> float | None:
        """Iteration time to keep; None where the iteration time is the objective."""
        return self.incumbent.deadline_s

    @property
    def objective(self) -> float | None:
        """Of the incumbent; None before the first plan."""
        return None if self.incumbent.column is None else self.incumbent.objective

    @property
    def target(self) -> float:
        """Only plans below this are wanted: U (1 - gap)."""
        upper = self.incumbent.objective
        return upper - max(self.gap, ROUNDING) * abs(upper) if math.isfinite(upper) else math.inf

    @property
    def is_closed(self) -> bool:
        """Whether the gap is proven."""
        return self.closes(self.bound)

    def closes(self, bound: float) -> bool:
        """Whether this lower bound of every plan would prove the gap."""
        return bound + 6 * ROUNDING * abs(bound) >= self.target

    def raise_bound(self, value: float) -> None:
        """Take a lower bound of every plan."""
        self.bound = max(self.bound, value)

    def out_of_time(self) -> bool:
        """Whether to give up now."""
        left = self._time_left()
        return self._stop() or (left is not None and left <= 0)

    def is_over(self) -> bool:
        """Whether nothing is left to do, or no time to do it."""
        return self.is_closed or self.out_of_time()

    def count(self, name: str, amount: float = 1.0) -> None:
        """Add to a statistic."""
        self.statistics[name] = self.statistics.get(name, 0.0) + amount

    def solution(self, status: SolveStatus | None = None) -> KindSolution:
        """The state as it is; `status` where the caller knows it."""
        column, upper = self.incumbent.column, self.incumbent.objective
        if status is None:
            if column is not None and self.is_closed:
                status = SolveStatus.OPTIMAL
            elif column is None and math.isinf(self.bound) and self.bound > 0:
                status = SolveStatus.INFEASIBLE
            elif self._stop():
                status = SolveStatus.INTERRUPTED
            else:
                status = SolveStatus.TIME_LIMIT
        if status is SolveStatus.INFEASIBLE and column is not None:
            # A verified plan contradicts the proof: believe the plan, claim nothing.
            status, self.bound = SolveStatus.TIME_LIMIT, 0.0
        bound = math.inf if status is SolveStatus.INFEASIBLE else min(self.bound, upper)
        if upper - bound <= 10 * ROUNDING * abs(upper):
            bound = upper  # equal but for rounding
        return KindSolution(
            status=status,
            column=column,
            objective=self.objective,
            bound=bound,
            statistics=dict(self.statistics),
        )
