"""`compare` and `pareto`: the methods side by side at one pace, and over a range of paces.

Every method is held to the same deadline, found once, and judged by the same `evaluate`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from qsync_opt.errors import InfeasibleError, ParameterError, SolverUnavailableError
from qsync_opt.optimize.comparison import Comparison, ComparisonRow, ParetoCurve, ParetoPoint
from qsync_opt.optimize.evaluate import evaluate
from qsync_opt.optimize.problem import AllocationProblem
from qsync_opt.optimize.result import (
    METHODS,
    SolveParameters,
    SolveResult,
    SolveStatus,
    relative_gap,
)
from qsync_opt.optimize.solve import find_deadline, solve
from qsync_opt.optimize.validation import LARGEST_SLACK

#: Methods that start from a plan given to them and promise the best one: their front never
#: gets worse as the deadline loosens.
_EXACT = ("exact", "auto")

_NOT_RUN = "not run: interrupted"


def compare(
    problem: AllocationProblem,
    *,
    methods: Sequence[str] = ("uniform", "greedy", "exact"),
    parameters: SolveParameters = SolveParameters(),  # noqa: B008  # frozen
) -> Comparison:
    """Solve one problem with several methods, all held to the same deadline.

    A method that finds nothing, or whose solver fails, gives a row that says so. After
    Ctrl-C no further method is run: the rows of those have the status INTERRUPTED.

    Args:
        problem: the problem; where it gives a slack, the deadline is found once.
        methods: names as in `solve`.
        parameters: options of every solve; the time limit holds for each method.

    Raises:
        ParameterError: no method, an unknown one, or one twice.
    """
    _check_methods(methods)
    deadline_s, status, reason = _deadline(problem, parameters)
    if deadline_s is None:
        return _nothing(problem, methods, parameters, status, reason)
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
    rises. After Ctrl-C the points of the remaining slacks are left out.

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
    fastest, status, reason = _deadline(free, parameters)
    points = []
    previous: dict[str, ComparisonRow] = {}
    for slack in ordered:
        deadline_s = None if fastest is None else (1.0 + slack) * fastest
        if deadline_s is None:
            comparison = _nothing(free, methods, parameters, status, reason)
        else:
            comparison = _compare_at(free, deadline_s, methods, parameters, previous)
        previous = {row.method: row for row in comparison.rows}
        points.append(ParetoPoint(slack=slack, deadline_s=deadline_s, comparison=comparison))
        if any(row.status is SolveStatus.INTERRUPTED for row in comparison.rows):
            break
    return ParetoCurve(problem=problem.name, fastest_time_s=fastest, points=tuple(points))


def _check_methods(methods: Sequence[str]) -> None:
    if isinstance(methods, str) or not isinstance(methods, Sequence) or not methods:
        raise ParameterError("methods", "must be a list of at least one method", methods)
    for method in methods:
        if method not in METHODS:
            raise ParameterError("methods", "must be among " + ", ".join(METHODS), method)
    if len(set(methods)) < len(methods):
        raise ParameterError("methods", "must be unique", list(methods))


def _checked_slacks(slacks: Sequence[float]) -> list[float]:
    if isinstance(slacks, str) or not isinstance(slacks, Sequence) or not slacks:
        raise ParameterError("slacks", "must be a list of at least one slack", slacks)
    for slack in slacks:
        number = isinstance(slack, (int, float)) and not isinstance(slack, bool)
        if not (number and 0 <= slack <= LARGEST_SLACK):
            raise ParameterError("slacks", f"must be numbers from 0 to {LARGEST_SLACK:g}", slack)
    if len(set(slacks)) < len(slacks):
        raise ParameterError("slacks", "must be unique", list(slacks))
    return sorted(float(slack) for slack in slacks)


def _deadline(
    problem: AllocationProblem, parameters: SolveParameters
) -> tuple[float | None, SolveStatus, str]:
    """The common deadline; without one, the status of every row and the reason."""
    try:
        return find_deadline(problem, parameters=parameters), SolveStatus.OPTIMAL, ""
    except KeyboardInterrupt:
        return None, SolveStatus.INTERRUPTED, _NOT_RUN
    except (InfeasibleError, SolverUnavailableError) as error:
        return None, _failure(error), str(error)


def _failure(error: InfeasibleError | SolverUnavailableError) -> SolveStatus:
    if isinstance(error, SolverUnavailableError):
        return SolveStatus.SOLVER_ERROR
    return SolveStatus.INFEASIBLE if error.proven else SolveStatus.NO_PLAN_FOUND


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
    rows: list[ComparisonRow] = []
    for method in methods:
        if any(row.status is SolveStatus.INTERRUPTED for row in rows):
            rows.append(_empty_row(method, SolveStatus.INTERRUPTED, _NOT_RUN))
            continue
        before = previous.get(method) if method in _EXACT else None
        hint = None if before is None else before.plan
        try:
            row = _row(method, solve(held, method=method, parameters=parameters, hint=hint))
        except KeyboardInterrupt:
            row = _empty_row(method, SolveStatus.INTERRUPTED, "")
        except (InfeasibleError, SolverUnavailableError) as error:
            row = _empty_row(method, _failure(error), str(error))
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
    if proven and status is not SolveStatus.INTERRUPTED:
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
    status: SolveStatus,
    reason: str,
) -> Comparison:
    rows = [_empty_row(method, status, reason) for method in methods]
    return _comparison(problem, None, rows, parameters)


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
