"""What can be asked of `solve`, and what it answers: parameters, status, results."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from qsync_opt.errors import InfeasibleError, ParameterError
from qsync_opt.optimize.evaluate import Evaluation
from qsync_opt.plan import PrecisionPlan

#: Names accepted by `solve(method=...)`.
METHODS = ("auto", "exact", "greedy", "uniform", "fastest", "random", "brute_force")

#: Names accepted by `SolveParameters.solver`.
SOLVERS = ("highs", "scip", "cp_sat", "cbc")


class SolveStatus(str, Enum):
    """Why a solve stopped, apart from what it found; the value is the sentence shown."""

    OPTIMAL = "proven optimal within the requested gap, and verified by evaluate"
    HEURISTIC = "the method gives a plan without a proof"
    TIME_LIMIT = "stopped by the time limit before the proof was complete"
    INTERRUPTED = "interrupted before the proof was complete"
    INFEASIBLE = "no plan meets the memory and the deadline"
    NO_PLAN_FOUND = "the method found no plan; one may exist"
    SOLVER_ERROR = "the solver failed; the reason is in fallback_reason"


#: From the worst that a part can stop with to the best: the whole stops with its worst part's.
SEVERITY = (
    SolveStatus.INFEASIBLE,
    SolveStatus.INTERRUPTED,
    SolveStatus.SOLVER_ERROR,
    SolveStatus.TIME_LIMIT,
    SolveStatus.NO_PLAN_FOUND,
    SolveStatus.HEURISTIC,
    SolveStatus.OPTIMAL,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """A report during a solve.

    Attributes:
        device: the device kind, or empty for the whole problem.
        phase: what is being done, a short phrase.
        objective: best objective found so far for this kind, None without a plan.
        bound: best proven lower bound so far, None before the first.
        elapsed_s: since the solve began.
    """

    device: str
    phase: str
    objective: float | None
    bound: float | None
    elapsed_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SolveParameters:
    """Options of `solve`; every duration in seconds.

    Attributes:
        time_limit_s: wall-clock limit of the whole solve; None for none.
        relative_gap: stop when (objective - bound) / objective is at most this.
        threads: device kinds solved side by side, and threads of a solver that takes them.
            The plan does not depend on it.
        seed: of the `random` method and of solvers that take one.
        solver: back end for the programs: `highs`, `scip`, `cp_sat` or `cbc`.
        plain: give the whole program to the back end as it is, without the bounds,
            reductions and heuristics of this library (for comparison and cross-checks).
        progress: called with `Progress` reports from the calling thread or a worker thread.

    Raises:
        ParameterError: an option is out of range.
    """

    time_limit_s: float | None = 60.0
    relative_gap: float = 1e-4
    threads: int = 2
    seed: int = 0
    solver: str = "highs"
    plain: bool = False
    progress: Callable[[Progress], None] | None = None

    def __post_init__(self) -> None:
        limit = self.time_limit_s
        if limit is not None and not (_is_number(limit) and limit >= 0 and math.isfinite(limit)):
            raise ParameterError("time_limit_s", "must be a finite number >= 0, or None", limit)
        if not (_is_number(self.relative_gap) and 0 <= self.relative_gap < 1):
            raise ParameterError("relative_gap", "must be in [0, 1)", self.relative_gap)
        for name, least in (("threads", 1), ("seed", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
                raise ParameterError(name, f"must be a whole number from {least} to 2^31-1", value)
        if self.solver not in SOLVERS:
            raise ParameterError("solver", "must be one of " + ", ".join(SOLVERS), self.solver)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceResult:
    """The part of a solve that belongs to one device kind.

    Attributes:
        status: why this part stopped.
        objective: sum of perturbations of the plan on this kind, not weighted.
        bound: proven lower bound of `objective`; None where the method proves none.
        gap: (objective - bound) / objective; 0 where both are 0.
        same_as: the identical kind whose solution was taken over, if any.
        solve_s: wall-clock time of this part.
        statistics: counts of what the solver did (columns, rounds, nodes, ...).
    """

    status: SolveStatus
    objective: float | None
    bound: float | None
    gap: float | None
    same_as: str | None
    solve_s: float
    statistics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayedTime:
    """What replaying added to a solve, see `replayed.solve_replayed`.

    Attributes:
        iteration_time_s: of the plan as `replay` tells it, which the deadline was held to.
        additive_time_s: of the plan as `evaluate` sums it up, without hosts and overlap.
        cuts: paths through hosts that were added as rows, over all device kinds.
    """

    iteration_time_s: float
    additive_time_s: float
    cuts: int

    @property
    def additive_error(self) -> float:
        """By what fraction of the replayed time the additive one is off; never above 0."""
        if not self.iteration_time_s:
            return 0.0
        return self.additive_time_s / self.iteration_time_s - 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SolveResult:
    """What `solve` found and why it stopped.

    Attributes:
        method: the method that made the plan (for `auto`, the one that won).
        status: why it stopped.
        plan: the best plan found, verified by `evaluate`; None without one.
        evaluation: what the plan costs; None without one.
        objective: objective (0) of the plan, sum over kinds of n_r a_r^2 perturbation.
        bound: proven lower bound of the objective; None where the method proves none.
        gap: (objective - bound) / objective, the achieved gap; None without both.
        deadline_s: the iteration time every kind was held to; None if none could be found.
        fastest_time_s: iteration time of the fastest feasible plan, where it was needed.
        fallback_reason: why another method or solver was used than asked for; else None.
        notes: things worth knowing about the plan, one sentence each.
        devices: the parts, by device kind.
        solve_s: wall-clock time of the whole solve.
        parameters: the options used.
        replayed: what replaying says of the plan; None where it was not asked.
    """

    method: str
    status: SolveStatus
    plan: PrecisionPlan | None
    evaluation: Evaluation | None
    objective: float | None
    bound: float | None
    gap: float | None
    deadline_s: float | None
    fastest_time_s: float | None
    fallback_reason: str | None
    notes: tuple[str, ...]
    devices: Mapping[str, DeviceResult]
    solve_s: float
    parameters: SolveParameters
    replayed: ReplayedTime | None = None

    def require_plan(self) -> PrecisionPlan:
        """The plan.

        Raises:
            InfeasibleError: there is none; the message says why.
        """
        if self.plan is None:
            reason = f": {self.fallback_reason}" if self.fallback_reason else ""
            raise InfeasibleError(
                f"method {self.method} has no plan ({self.status.value}{reason})."
                " qsync_opt.explain(problem) says which budget is too small",
                proven=self.status is SolveStatus.INFEASIBLE,
            )
        return self.plan


def relative_gap(objective: float | None, bound: float | None) -> float | None:
    """(objective - bound) / objective; 0 where the bound reaches the objective; None if unknown."""
    if objective is None or bound is None:
        return None
    if bound >= objective:
        return 0.0
    return (objective - bound) / abs(objective) if objective else math.inf
