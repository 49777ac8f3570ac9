"""`write_mps` and `read_mps_solution`: an allocation problem out to any solver, a plan back."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np

from qsync_opt.errors import FormatError, ParameterError, PlanError
from qsync_opt.optimize.arrays import FloatArray, IntArray
from qsync_opt.optimize.bit_columns import BitColumns
from qsync_opt.optimize.evaluate import plan_columns, plan_from_columns
from qsync_opt.optimize.formulation import Formulation, formulate, refuse_alone
from qsync_opt.optimize.mps import write_linear_program
from qsync_opt.optimize.mps_names import MpsNames, ProgramOrigin, generic_name, names_of, read_text
from qsync_opt.optimize.mps_solution import read_solution
from qsync_opt.optimize.problem import AllocationProblem
from qsync_opt.optimize.result import SolveParameters
from qsync_opt.plan import PrecisionPlan

#: How far from 0 or 1 a solver may leave a binary: ten times the usual integer tolerance.
INTEGER_TOLERANCE = 1e-5


def write_mps(
    problem: AllocationProblem,
    path: str | os.PathLike[str],
    device: str | None = None,
    deadline_s: float | None = None,
) -> None:
    """Write the allocation problem as MPS, with `name.names.json` beside it.

    The objective is objective (0), sum_r n_r a_r^2 sum_o w[r, o, p] x[r, o, p]; with `device`
    it is that kind's perturbation, not weighted. Every kind is held to the deadline. Where
    buckets have codes, their bits are columns too, which all kinds share. Where
    perturbations are small, a solver's absolute tolerances hide part of them: HiGHS at 1e-6
    was seen 3e-4 above an optimum of 0.001. The comments in the file name the options to set.

    Args:
        problem: the problem.
        path: ends in `.mps` or `.mps.gz`.
        device: a device kind to write alone; None writes all kinds jointly. Where buckets have
            codes, fix the bits first (`AllocationProblem.at_bits`).
        deadline_s: iteration time to hold every kind to. By default the problem's own; where
            that gives a slack instead, the fastest feasible time is solved for first.

    Raises:
        ParameterError: unknown device, one kind alone where buckets have codes, a deadline
            that is not a positive number, or another suffix.
        InfeasibleError: the deadline had to be found, and no plan fits the memory.
        FormatError: the path cannot be written.
    """
    if device is not None and problem.has_codes:
        refuse_alone(device)
    deadline = problem.deadline_s if deadline_s is None else deadline_s
    if deadline is None:
        # Solving needs OR-Tools; a problem that states its deadline is exported without it.
        from qsync_opt.optimize.solve import find_deadline

        deadline = find_deadline(problem, parameters=SolveParameters())
    number = isinstance(deadline, (int, float)) and not isinstance(deadline, bool)
    if not (number and math.isfinite(deadline) and deadline > 0):
        raise ParameterError(
            "deadline_s",
            "must be a finite number > 0",
            deadline,
            "Pass SolveResult.deadline_s of qsync_opt.solve(problem)",
        )
    deadline = float(deadline)
    formulation = formulate(problem, deadline_s=deadline, device=device)
    comments = (
        f"Precision allocation {problem.name!r}: " + (device or "all device kinds, jointly"),
        f"problem {problem.sha256}",
        f"deadline {deadline!r} s; minimise the perturbation",
        "A row R and S of the same number are the lower and upper side of one row.",
        "Solvers drop improvements below absolute tolerances of 1e-6, so tighten them:",
        "HiGHS mip_feasibility_tolerance = primal_feasibility_tolerance = 1e-9, SCIP",
        "numerics/feastol = 1e-9, CBC -primalTolerance 1e-9 -ratioGap 0 -allowableGap 0.",
    )
    write_linear_program(
        formulation.program,
        path,
        comments=comments,
        origin=ProgramOrigin(problem=problem.sha256, deadline_s=deadline, device=device),
    )


def read_mps_solution(
    problem: AllocationProblem,
    path: str | os.PathLike[str],
    solution_path: str | os.PathLike[str],
    *,
    base_plan: PrecisionPlan | None = None,
) -> PrecisionPlan:
    """The plan in a solution file of HiGHS, SCIP or CBC.

    Solvers keep to tolerances of their own; `evaluate(problem, plan, deadline_s=...)` says
    whether the plan keeps the budgets to the byte.

    Args:
        problem: the problem that was exported.
        path: the MPS file. Only its name map is needed: beside it, or in its comment lines.
        solution_path: what the solver wrote.
        base_plan: for a file of one kind, the plan whose other kinds to keep.

    Raises:
        FormatError: a file is malformed, holds no solution, or leaves an operator undecided.
        PlanError: the files, or `base_plan`, are for another problem.
        ParameterError: a file of one kind without `base_plan`, where there are more kinds.
    """
    target = Path(path)
    names = names_of(target, read_text(target, "MPS") if target.exists() else None)
    origin = names.origin
    if origin.problem != problem.sha256:
        rule = f"must be exported from this problem ({problem.sha256[:12]}...)"
        raise PlanError(f"{target}: problem", rule, origin.problem, "Export this problem again")
    alone = origin.device is not None and len(problem.devices) > 1
    if alone and base_plan is None:
        raise ParameterError(
            "base_plan",
            f"must be given: {target} decides device kind {origin.device!r} only",
            None,
            "Pass a plan for the other kinds, or export all kinds (device=None)",
        )
    columns = [np.zeros(0, dtype=np.int64)] * len(problem.devices)
    if base_plan is not None:
        columns = plan_columns(problem, base_plan)
    values = read_solution(solution_path, columns=len(names.columns), rows=len(names.rows)).values
    formulation = _exported(problem, names, str(target))
    for index, choices in formulation.choices:
        columns[index] = _decided(problem, index, choices, values, str(solution_path))
    bits: tuple[int, ...] = () if base_plan is None else base_plan.communication
    if formulation.sent is not None:
        bits = _decided_bits(formulation.sent, values, str(solution_path))
    return plan_from_columns(problem, columns, bits)


def _exported(problem: AllocationProblem, names: MpsNames, where: str) -> Formulation:
    """The exported program, after checking that it is still the same one."""
    origin = names.origin
    formulation = formulate(problem, deadline_s=origin.deadline_s, device=origin.device)
    if formulation.program.column_names != names.columns:
        raise FormatError(
            f"{where}: columns",
            "must be those of the program that this release formulates",
            f"{len(names.columns)} columns",
            "Export the problem again with this release",
        )
    return formulation


def _decided_bits(sent: BitColumns, values: FloatArray, where: str) -> tuple[int, ...]:
    """The bits of every bucket, one column of which is at 1, [K]."""
    bits = []
    for bucket, columns in enumerate(sent.columns):
        x = values[columns]
        at_one = np.eye(len(x))[x.argmax()]
        if np.abs(x - at_one).max() > INTEGER_TOLERANCE:
            raise FormatError(
                f"{where}: bits of bucket {bucket}",
                f"must have exactly one column at 1, all within {INTEGER_TOLERANCE} of 0 or 1",
                x.tolist(),
                "The file may be cut short, or be of a relaxation",
            )
        bits.append(sent.bits[bucket][int(x.argmax())])
    return tuple(bits)


def _decided(
    problem: AllocationProblem, device: int, choices: IntArray, values: FloatArray, where: str
) -> IntArray:
    """The one precision column that each operator has at 1, [N]."""
    exists = choices >= 0
    x = np.where(exists, values[np.maximum(choices, 0)], 0.0)
    whole = np.rint(x)
    odd = np.argwhere((np.abs(x - whole) > INTEGER_TOLERANCE) | ((whole != 0) & (whole != 1)))
    if len(odd):
        operator, position = (int(i) for i in odd[0])
        raise FormatError(
            f"{where}: {generic_name('C', int(choices[operator, position]))}"
            f" ({problem.operators[operator].name} at {problem.precisions[position]})",
            f"must be within {INTEGER_TOLERANCE} of 0 or 1",
            float(x[operator, position]),
            "Solve as an integer program, not its relaxation",
        )
    chosen = whole.sum(axis=1)
    wrong = np.flatnonzero(chosen != 1)
    if wrong.size:
        name = problem.operators[int(wrong[0])].name
        raise FormatError(
            f"{where}: {problem.devices[device].name}.{name}",
            "must have exactly one precision at 1",
            f"{int(chosen[wrong[0]])} at 1",
            "The file may be cut short, or belong to another MPS file",
        )
    column: IntArray = whole.argmax(axis=1)
    return column
