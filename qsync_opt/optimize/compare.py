"""`compare` and `pareto`: the methods side by side at one pace, and over a range of paces.

Every method is held to the same deadline, found once, and judged by the same `evaluate`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from qsync_opt.errors import InfeasibleError, ParameterError, SolverUnavailableError
from qsync_opt.optimize.evaluate import Evaluation, evaluate
from qsync_opt.optimize.problem import AllocationProblem
from qsync_opt.optimize.result import (
    METHODS,
    SolveParameters,
    SolveResult,
    SolveStatus,
    relative_gap,
)
from qsync_opt.optimize.solve import find_deadline, solve
from qsync_opt.plan import PrecisionPlan

#: Methods that start from a plan given to them and promise the best one: their front never
#: gets worse as the deadline loosens.
_EXACT = ("exact", "auto")

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


def compare(
    problem: AllocationProblem,
    *,
    methods: Sequence[str] = ("uniform", "greedy", "exact"),
    parameters: SolveParameters = SolveParameters(),  # noqa: B008  # frozen
) -> Comparison:
    """Solve one problem with several methods, all held to the same deadline.

    A method that finds nothing, or whose solver fails, gives a row that says so.

    Args:
        problem: the problem; where it gives a slack, the deadline is found once.
        methods: names as in `solve`.
        parameters: options of every solve; the time limit holds for each method.

    Raises:
        ParameterError: no method, an unknown one, or one twice.
    """
    _check_methods(methods)
    try:
        deadline_s = find_deadline(problem, parameters=parameters)
    except InfeasibleError as error:
        return _nothing(problem, methods, parameters, None, SolveStatus.INFEASIBLE, str(error))
    except SolverUnavailableError as error:
        return _nothing(problem, methods, parameters, None, SolveStatus.SOLVER_ERROR, str(error))
    return _compare_at(problem, deadline_s, methods, parameters, {})


def pareto(
    problem: AllocationProblem,
    *,
    slacks: Sequence[float] = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0),
    methods: Sequence[str] = ("uniform", "greedy", "exact"),
    parameters: SolveParameters = SolveParameters(),  # noqa: B008  # frozen
) -> ParetoCurve:
    """Perturbation against iteration time, over slacks relative to the fastest feasible time.

    An exact method starts each slack from its plan at the tighter one, and keeps that plan
    where the new solve, stopped by a gap or a limit, found none better: its front never
    rises.

    Args:
        problem: the problem; its own `deadline_s` and `slack` are not used.
        slacks: each finite and >= 0; sorted before use.
        methods: names as in `solve`.
        parameters: options of every solve; the time limit holds for each method and slack.

    Raises:
        ParameterError: no slack, a bad or repeated one; no method, a bad or repeated one.
    """
    _check_methods(methods)
    ordered = _checked_slacks(slacks)
    free = replace(problem, deadline_s=None, slack=0.0)
    fastest: float | None = None
    status, reason = SolveStatus.INFEASIBLE, ""
    try:
        fastest = find_deadline(free, parameters=parameters)
    except InfeasibleError as error:
        reason = str(error)
    except SolverUnavailableError as error:
        status, reason = SolveStatus.SOLVER_ERROR, str(error)
    points = []
    previous: dict[str, ComparisonRow] = {}
    for slack in ordered:
        deadline_s = None if fastest is None else (1.0 + slack) * fastest
        if deadline_s is None:
            comparison = _nothing(free, methods, parameters, None, status, reason)
        else:
            comparison = _compare_at(free, deadline_s, methods, parameters, previous)
        previous = {row.method: row for row in comparison.rows}
        points.append(ParetoPoint(slack=slack, deadline_s=deadline_s, comparison=comparison))
    return ParetoCurve(problem=problem.name, fastest_time_s=fastest, points=tuple(points))


def _check_methods(methods: Sequence[str]) -> None:
    if isinstance(methods, str) or not methods:
        raise ParameterError("methods", "must be a list of at least one method", methods)
    for method in methods:
        if method not in METHODS:
            raise ParameterError("methods", "must be among " + ", ".join(METHODS), method)
    if len(set(methods)) < len(methods):
        raise ParameterError("methods", "must be unique", list(methods))


def _checked_slacks(slacks: Sequence[float]) -> list[float]:
    if isinstance(slacks, str) or len(slacks) == 0:
        raise ParameterError("slacks", "must be a list of at least one slack", slacks)
    for slack in slacks:
        number = isinstance(slack, (int, float)) and not isinstance(slack, bool)
        if not (number and math.isfinite(slack) and slack >= 0):
            raise ParameterError("slacks", "must be finite numbers >= 0", slack)
    if len(set(slacks)) < len(slacks):
        raise ParameterError("slacks", "must be unique", list(slacks))
    return sorted(float(slack) for slack in slacks)


def _compare_at(
    problem: AllocationProblem,
    deadline_s: float,
    methods: Sequence[str],
    parameters: SolveParameters,
    previous: dict[str, ComparisonRow],
) -> Comparison:
    """The comparison at a deadline; `previous` holds the rows of a tighter one."""
    # A plan's hash leaves out the deadline, so the plans stay plans of the problem given.
    held = replace(problem, deadline_s=deadline_s, slack=0.0)
    rows = []
    for method in methods:
        before = previous.get(method) if method in _EXACT else None
        hint = None if before is None else before.plan
        try:
            row = _row(method, solve(held, method=method, parameters=parameters, hint=hint))
        except InfeasibleError as error:
            row = _empty_row(method, SolveStatus.INFEASIBLE, str(error))
        except SolverUnavailableError as error:
            row = _empty_row(method, SolveStatus.SOLVER_ERROR, str(error))
        rows.append(row if before is None else _better(held, before, row, parameters))
    return _comparison(held, deadline_s, rows, parameters)


def _row(method: str, result: SolveResult) -> ComparisonRow:
    evaluation = result.evaluation
    return ComparisonRow(
        method=method,
        status=result.status,
        reason=result.fallback_reason or "",
        objective=result.objective,
        bound=result.bound,
        gap=result.gap,
        ratio=None,
        iteration_time_s=None if evaluation is None else evaluation.iteration_time_s,
        peak_memory_bytes=None if evaluation is None else evaluation.peak_memory_bytes,
        solve_s=result.solve_s,
        plan=result.plan,
        evaluation=evaluation,
    )


def _empty_row(method: str, status: SolveStatus, reason: str) -> ComparisonRow:
    return ComparisonRow(
        method=method,
        status=status,
        reason=reason,
        objective=None,
        bound=None,
        gap=None,
        ratio=None,
        iteration_time_s=None,
        peak_memory_bytes=None,
        solve_s=0.0,
        plan=None,
        evaluation=None,
    )


def _better(
    problem: AllocationProblem,
    before: ComparisonRow,
    row: ComparisonRow,
    parameters: SolveParameters,
) -> ComparisonRow:
    """`row`, with the plan of the tighter deadline where that is better."""
    if before.plan is None or before.objective is None:
        return row
    if row.objective is not None and row.objective <= before.objective:
        return row
    evaluation = evaluate(problem, before.plan)
    gap = relative_gap(before.objective, row.bound)
    proven = gap is not None and gap <= parameters.relative_gap
    status = row.status
    if proven:
        status = SolveStatus.OPTIMAL
    elif row.plan is None and status is SolveStatus.INFEASIBLE:
        status = SolveStatus.NO_PLAN_FOUND  # the plan of the tighter deadline refutes it
    return replace(
        row,
        status=status,
        reason="; ".join(filter(None, [row.reason, "plan of the next tighter slack kept"])),
        objective=before.objective,
        gap=gap,
        iteration_time_s=evaluation.iteration_time_s,
        peak_memory_bytes=evaluation.peak_memory_bytes,
        plan=before.plan,
        evaluation=evaluation,
    )


def _nothing(
    problem: AllocationProblem,
    methods: Sequence[str],
    parameters: SolveParameters,
    deadline_s: float | None,
    status: SolveStatus,
    reason: str,
) -> Comparison:
    rows = [_empty_row(method, status, reason) for method in methods]
    return _comparison(problem, deadline_s, rows, parameters)


def _comparison(
    problem: AllocationProblem,
    deadline_s: float | None,
    rows: Sequence[ComparisonRow],
    parameters: SolveParameters,
) -> Comparison:
    best = min((row.objective for row in rows if row.objective is not None), default=None)
    bounds = [row.bound for row in rows if row.bound is not None]
    return Comparison(
        problem=problem.name,
        deadline_s=deadline_s,
        rows=tuple(replace(row, ratio=_ratio(row.objective, best)) for row in rows),
        bound=max(bounds, default=None),
        parameters=parameters,
    )


def _ratio(objective: float | None, best: float | None) -> float | None:
    if objective is None or best is None:
        return None
    if objective == best:
        return 1.0
    return objective / best if best else math.inf


def _objective(row: ComparisonRow) -> float:
    return math.inf if row.objective is None else row.objective
