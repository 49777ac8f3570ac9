"""Solving a `LinearProgram` with HiGHS, SCIP or CP-SAT (through MathOpt) or CBC (through PuLP).

This module is the only one that talks to solvers. Facts about ortools 9.15.6755 that it
works around (measured): every refused model or option surfaces as an AttributeError about
`canonical_code` with the true cause on `__context__`; HiGHS refuses `threads`; SCIP at its
default tolerance returns plans over budget; CP-SAT can be wrong beyond 2^31; importing PuLP or
highspy before MathOpt's HiGHS crashes the process. A solver's answer is therefore only a
proposal: callers round the choices and verify them with `evaluate`.
"""

from __future__ import annotations

import datetime
import math
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from qsync_opt.errors import SolverUnavailableError
from qsync_opt.optimize.arrays import FloatArray
from qsync_opt.optimize.interrupter import Interrupter
from qsync_opt.optimize.linear import LinearProgram, ProgramSolution
from qsync_opt.optimize.workers import run_side_by_side

#: CP-SAT gets whole numbers whose sums stay below this (google/or-tools#5293: 2^31 is unsafe).
_CP_SAT_LARGEST_SUM = 2**30

#: SCIP's feasibility tolerance: at its default of 1e-6 it returned plans 7e-7 over budget.
_SCIP_TOLERANCE = 1e-9

#: HiGHS's tolerance for whole numbers; its default of 1e-6 times a coefficient of 2^20 is
#: more than one unit.
_HIGHS_INTEGRALITY = 1e-9


def solve_program(
    program: LinearProgram,
    *,
    solver: str = "highs",
    time_limit_s: float | None = None,
    relative_gap: float = 1e-4,
    absolute_gap: float = 0.0,
    threads: int = 1,
    seed: int = 0,
    interrupter: Interrupter | None = None,
) -> ProgramSolution:
    """Solve a mixed-integer program.

    Args:
        program: the program.
        solver: `highs`, `scip`, `cp_sat` or `cbc`.
        time_limit_s: wall-clock limit; None for none.
        relative_gap: stop when (objective - bound) / |objective| is at most this, or
        absolute_gap: stop when objective - bound is at most this.
        threads: for solvers that take it (SCIP and CP-SAT are run with one thread, because
            more make their answer depend on chance; HiGHS through MathOpt refuses it).
        seed: for solvers that take one.
        interrupter: stops CP-SAT and CBC. HiGHS takes no notice of MathOpt's interrupter, and
            SCIP writes an error to the terminal where it is given one (both measured).

    Raises:
        SolverUnavailableError: the solver is missing, refuses the program, or crashed.
    """
    largest = float(np.abs(program.objective).max(initial=0.0))
    # An exact power of two brings the objective to a size that solvers' tolerances suit.
    unit = 2.0 ** (math.floor(math.log2(largest)) - 13) if largest > 0 else 1.0
    gaps = (relative_gap, absolute_gap / unit)
    if solver == "cbc":
        from qsync_opt.optimize.cbc import solve_with_cbc

        return solve_with_cbc(program, unit, time_limit_s, gaps, seed, interrupter)
    return _solve_math_opt(program, unit, solver, time_limit_s, gaps, seed, interrupter)


def _proto(program: LinearProgram, objective: FloatArray, integer: np.ndarray) -> Any:
    from ortools.math_opt import model_pb2

    rows, columns = program.shape
    model = model_pb2.ModelProto()
    model.variables.ids.extend(range(columns))
    model.variables.lower_bounds.extend(program.lower.tolist())
    model.variables.upper_bounds.extend(program.upper.tolist())
    model.variables.integers.extend(integer.tolist())
    priced = np.flatnonzero(objective)
    model.objective.linear_coefficients.ids.extend(priced.tolist())
    model.objective.linear_coefficients.values.extend(objective[priced].tolist())
    model.linear_constraints.ids.extend(range(rows))
    model.linear_constraints.lower_bounds.extend(program.row_lower.tolist())
    model.linear_constraints.upper_bounds.extend(program.row_upper.tolist())
    matrix = model.linear_constraint_matrix
    matrix.row_ids.extend(np.repeat(np.arange(rows), np.diff(program.row_start)).tolist())
    matrix.column_ids.extend(program.columns.tolist())
    matrix.coefficients.extend(program.values.tolist())
    return model


def _import_math_opt(solver: str) -> Any:
    clash = [name for name in ("pulp", "highspy") if name in sys.modules]
    if clash and "ortools.math_opt.python.mathopt" not in sys.modules:
        raise SolverUnavailableError(
            solver,
            f"{clash[0]} was imported before OR-Tools, and the two crash in that order",
            "Import ortools.math_opt.python.mathopt first",
        )
    try:
        from ortools.math_opt.python import mathopt
    except ImportError as error:
        raise SolverUnavailableError(solver, str(error), "Install ortools") from error
    return mathopt


def _call(
    solver: str,
    mathopt: Any,
    model: Any,
    kind: Any,
    params: Any,
    interrupter: Interrupter | None = None,
) -> Any:
    """`mathopt.solve` behind the one place that turns its failures into our error."""
    from ortools.util.python.solve_interrupter import SolveInterrupter

    def solve() -> Any:
        made = mathopt.Model.from_model_proto(model)
        if interrupter is None:
            return mathopt.solve(made, kind, params=params)
        own = SolveInterrupter()
        with interrupter.calling(own.interrupt):
            return mathopt.solve(made, kind, params=params, interrupter=own)

    try:
        return _heeding_ctrl_c(solve, interrupter)
    except Exception as error:  # noqa: BLE001  # every refusal comes out as another type
        cause = error.__context__ if isinstance(error, AttributeError) else error
        reason = getattr(cause, "message", None) or str(cause or error)
        raise SolverUnavailableError(
            solver, reason, "Choose another with SolveParameters(solver=...)"
        ) from error


def _heeding_ctrl_c(solve: Callable[[], Any], interrupter: Interrupter | None) -> Any:
    """What a call of MathOpt returns, in a thread of its own where this is the main one.

    Ctrl-C while MathOpt runs is raised as its answer is converted, where protobuf drops it.

    Raises:
        KeyboardInterrupt: Ctrl-C came first.
    """
    if threading.current_thread() is not threading.main_thread():
        return solve()
    stop = Interrupter() if interrupter is None else interrupter
    (outcome,), interrupted = run_side_by_side([solve], 1, stop.interrupt)
    if interrupted:
        raise KeyboardInterrupt
    if outcome.error is not None:
        raise outcome.error
    return outcome.value


def _solve_math_opt(
    program: LinearProgram,
    unit: float,
    solver: str,
    time_limit_s: float | None,
    gaps: tuple[float, float],
    seed: int,
    interrupter: Interrupter | None,
) -> ProgramSolution:
    mathopt = _import_math_opt(solver)
    from ortools.math_opt.solvers import highs_pb2

    objective, integer = program.objective / unit, program.integer
    options: dict[str, Any] = {
        "relative_gap_tolerance": gaps[0],
        "absolute_gap_tolerance": gaps[1],
        "random_seed": seed,
    }
    if time_limit_s is not None:
        options["time_limit"] = datetime.timedelta(seconds=max(time_limit_s, 0.0))
    if solver == "highs":
        kind = mathopt.SolverType.HIGHS
        options["highs"] = highs_pb2.HighsOptionsProto(
            double_options={"mip_feasibility_tolerance": _HIGHS_INTEGRALITY}
        )
    elif solver == "scip":
        kind = mathopt.SolverType.GSCIP
        from ortools.math_opt.python.parameters import gscip_pb2

        options["threads"] = 1
        options["gscip"] = gscip_pb2.GScipParameters(
            real_params={"numerics/feastol": _SCIP_TOLERANCE}
        )
    else:
        kind = mathopt.SolverType.CP_SAT
        options["threads"] = 1
        program, objective, unit = _whole_numbers(program, unit)
        integer = np.ones(len(objective), dtype=np.bool_)
    model = _proto(program, objective, integer)
    heeded = interrupter if solver == "cp_sat" else None
    result = _call(solver, mathopt, model, kind, mathopt.SolveParameters(**options), heeded)
    return _read(mathopt, result, unit, len(objective))


def _read(mathopt: Any, result: Any, unit: float, columns: int) -> ProgramSolution:
    reason = mathopt.TerminationReason
    termination = result.termination
    values = objective = None
    if result.has_primal_feasible_solution():
        solution = result.solutions[0].primal_solution
        values = np.zeros(columns)
        ids = np.array([variable.id for variable in solution.variable_values], dtype=np.int64)
        values[ids] = np.fromiter(solution.variable_values.values(), dtype=np.float64)
        objective = float(solution.objective_value) * unit
    names = {
        reason.OPTIMAL: "optimal",
        reason.FEASIBLE: "feasible",
        reason.INFEASIBLE: "infeasible",
        # Every column is bounded or priced, so the program cannot be unbounded.
        reason.INFEASIBLE_OR_UNBOUNDED: "infeasible",
    }
    status = names.get(termination.reason, "feasible" if values is not None else "unknown")
    bound = float(termination.objective_bounds.dual_bound) * unit
    return ProgramSolution(
        status=status,
        values=values,
        objective=objective,
        bound=bound if math.isfinite(bound) else -math.inf,
        message=f"{termination.reason.name} {termination.detail}".strip(),
    )


def _whole_numbers(program: LinearProgram, unit: float) -> tuple[LinearProgram, FloatArray, float]:
    """The program with whole coefficients that relax it, for CP-SAT.

    Columns are >= 0, so rounding coefficients down on the left of <= (and the right side
    down) keeps every solution; what it lets in too much is caught by `evaluate`. Rounding
    the objective down keeps its minimum a lower bound.
    """
    upper = np.where(np.isfinite(program.upper), program.upper, 2.0**24)
    start = program.row_start
    owner = np.repeat(np.arange(len(program.row_lower)), np.diff(start))
    sums = np.bincount(
        owner, weights=np.abs(program.values) * upper[program.columns], minlength=len(start) - 1
    )
    bounded = np.where(np.isfinite(program.row_upper), program.row_upper, program.row_lower)
    sums = np.maximum(sums, np.abs(np.where(np.isfinite(bounded), bounded, 0.0)))
    whole = np.ones(len(start) - 1, dtype=np.bool_)
    np.logical_and.at(whole, owner, program.values == np.floor(program.values))
    factor = np.where(
        whole & (sums < _CP_SAT_LARGEST_SUM), 1.0, _CP_SAT_LARGEST_SUM / np.maximum(sums, 1e-290)
    )
    # Rows with a lower side only (>=) round up, those with an upper side round down.
    at_least = np.isinf(program.row_upper)
    scaled = program.values * factor[owner]
    values = np.where(at_least[owner], np.ceil(scaled), np.floor(scaled))
    total = float((np.abs(program.objective) * upper).sum())
    step = total / _CP_SAT_LARGEST_SUM if total > 0 else 1.0
    objective = np.floor(program.objective / step)
    relaxed = replace(
        program,
        upper=upper,
        row_lower=np.ceil(program.row_lower * factor),
        row_upper=np.floor(program.row_upper * factor),
        values=values,
    )
    return relaxed, objective, step


def solve_linear(program: LinearProgram) -> FloatArray:
    """The minimiser of a small linear program (Glop; HiGHS where Glop calls it imprecise).

    Raises:
        SolverUnavailableError: OR-Tools is missing, or neither solves it.
    """
    mathopt = _import_math_opt("glop")
    model = _proto(program, program.objective, program.integer)
    messages = []
    for kind in (mathopt.SolverType.GLOP, mathopt.SolverType.HIGHS):
        result = _call(kind.name.lower(), mathopt, model, kind, None)
        answer = _read(mathopt, result, 1.0, len(program.objective))
        if answer.values is not None:
            return answer.values
        messages.append(f"{kind.name} {answer.message}")
    raise SolverUnavailableError("glop", f"no solution of {program.name}: {'; '.join(messages)}")
