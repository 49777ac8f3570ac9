"""What `compare` and `pareto` give: rows, comparisons and curves, as objects and plain tuples."""

from __future__ import annotations

import math
from dataclasses import dataclass

from qsync_opt.errors import ParameterError
from qsync_opt.optimize.evaluate import Evaluation
from qsync_opt.optimize.result import SolveParameters, SolveStatus
from qsync_opt.plan import PrecisionPlan

#: The quantities of a row, as `Comparison.table` and `ParetoCurve.rows` give them.
ROW_COLUMNS = (
    "method",
    "status",
    "objective",
    "bound",
    "gap",
    "ratio",
    "iteration_time_s",
    "peak_memory_bytes",
    "solve_s",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparisonRow:
    """What one method found; the numbers of a plan are None where it found none.

    Attributes:
        method: the method.
        status: why it stopped.
        reason: what went wrong or which fallback was taken, in words; empty otherwise.
        objective: objective (0) of its plan.
        bound: lower bound of the objective that the method itself proved.
        gap: (objective - bound) / objective.
        ratio: objective / best objective of any row; 1 for the best.
        iteration_time_s: iteration time of the plan.
        peak_memory_bytes: largest peak memory over the device kinds.
        solve_s: wall-clock time of the method.
        plan: the plan.
        evaluation: what the plan costs, at the common deadline.
    """

    method: str
    status: SolveStatus
    reason: str
    objective: float | None
    bound: float | None
    gap: float | None
    ratio: float | None
    iteration_time_s: float | None
    peak_memory_bytes: int | None
    solve_s: float
    plan: PrecisionPlan | None
    evaluation: Evaluation | None

    def values(self) -> tuple[object, ...]:
        """The row in the order of `ROW_COLUMNS`; the status by its name."""
        picked = [getattr(self, name) for name in ROW_COLUMNS]
        picked[ROW_COLUMNS.index("status")] = self.status.name
        return tuple(picked)


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The methods side by side.

    Attributes:
        problem: name of the problem.
        deadline_s: the iteration time all were held to; None if no plan fits the memory.
        rows: one per method, in the order asked.
        bound: the best lower bound that any method proved; None without one.
        parameters: the options used.
    """

    problem: str
    deadline_s: float | None
    rows: tuple[ComparisonRow, ...]
    bound: float | None
    parameters: SolveParameters

    @property
    def best(self) -> ComparisonRow | None:
        """The row of smallest objective, the first among equals; None without any plan."""
        found = [row for row in self.rows if row.objective is not None]
        return min(found, key=_objective) if found else None

    def table(self) -> list[tuple[object, ...]]:
        """The rows as plain tuples, in the order of `ROW_COLUMNS`."""
        return [row.values() for row in self.rows]


@dataclass(frozen=True, kw_only=True, slots=True)
class ParetoPoint:
    """The comparison at one slack.

    Attributes:
        slack: the deadline is (1 + slack) x the fastest feasible iteration time.
        deadline_s: that deadline; None if no plan fits the memory.
        comparison: the methods held to it.
    """

    slack: float
    deadline_s: float | None
    comparison: Comparison


@dataclass(frozen=True, kw_only=True, slots=True)
class ParetoCurve:
    """Perturbation against iteration time.

    Attributes:
        problem: name of the problem.
        fastest_time_s: iteration time of the fastest plan that fits the memory; None if none.
        points: by rising slack.
    """

    problem: str
    fastest_time_s: float | None
    points: tuple[ParetoPoint, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of what `rows` gives."""
        return ("slack", "deadline_s", *ROW_COLUMNS)

    def rows(self) -> list[tuple[object, ...]]:
        """One plain tuple per point and method, in the order of `columns`."""
        return [
            (point.slack, point.deadline_s, *row)
            for point in self.points
            for row in point.comparison.table()
        ]

    def front(self, method: str) -> list[tuple[float, float]]:
        """(iteration time, objective) of one method's plans, by rising slack.

        Raises:
            ParameterError: the curve has no such method.
        """
        rows = [row for point in self.points for row in point.comparison.rows]
        if method not in {row.method for row in rows}:
            known = ", ".join(dict.fromkeys(row.method for row in rows))
            raise ParameterError("method", f"must be one of {known}", method)
        return [
            (row.iteration_time_s, row.objective)
            for row in rows
            if row.method == method
            and row.iteration_time_s is not None
            and row.objective is not None
        ]


def _objective(row: ComparisonRow) -> float:
    return math.inf if row.objective is None else row.objective
