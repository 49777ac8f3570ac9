"""`solve_replayed`: the plan of least perturbation whose *replayed* step keeps the deadline.

`replayed_run` says how. Where buckets have codes, their bits are those of the plan that `solve`
finds with all hosts left out, and the run goes on at these bits. The bound is that of the solve
over all bits: paths through hosts only lengthen a step, whatever the bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from qsync_opt.errors import ParameterError
from qsync_opt.optimize.evaluate import evaluate_columns, plan_columns, plan_from_columns
from qsync_opt.optimize.problem import AllocationProblem
from qsync_opt.optimize.result import SolveParameters, SolveResult, SolveStatus, relative_gap
from qsync_opt.optimize.solve import solve
from qsync_opt.plan import PrecisionPlan, sending_text
from qsync_opt.replayed_kind import Budget
from qsync_opt.replayed_run import ReplayedRun
from qsync_opt.simulate.tasks import HostCosts

METHODS = ("auto", "exact")


def solve_replayed(
    problem: AllocationProblem,
    hosts: Mapping[str, HostCosts],
    *,
    method: str = "auto",
    parameters: SolveParameters = SolveParameters(),  # noqa: B008  # frozen
    hint: PrecisionPlan | None = None,
) -> SolveResult:
    """Find the plan of least perturbation whose replayed step keeps the deadline.

    Args:
        problem: the problem; a slack is taken of the fastest plan by replay.
        hosts: device kind -> what its host takes; kinds left out launch in no time.
        method: `exact`, or `auto`, which is the same here.
        parameters: see `SolveParameters`.
        hint: a plan of the same problem to start from.

    Returns:
        As `solve`, with the bits of buckets chosen before (see the module, and the notes);
        `replayed` says how long the step is by replay and by `evaluate`, and how
        many cuts were made. The status is HEURISTIC where overlap slows a device whose host
        waits and the plan found is not proven: there the rows are only needed, not enough.

    Raises:
        ParameterError: another method, or hosts of unknown kinds or of another size.
        PlanError: the hint is for another problem.
        SolverUnavailableError: the back end failed.
    """
    if method not in METHODS:
        rule = "must be one of " + ", ".join(METHODS) + " where hosts are given"
        raise ParameterError("method", rule, method, "Other methods take no account of hosts")
    for name in hosts:
        if name not in problem.device_index:
            known = ", ".join(problem.device_index)
            raise ParameterError("hosts", f"must name device kinds of the problem ({known})", name)
    if problem.has_codes:
        return _with_bits(problem, hosts, method, parameters, hint)
    return ReplayedRun(problem, hosts, method, parameters, hint).run()


def _with_bits(
    problem: AllocationProblem,
    hosts: Mapping[str, HostCosts],
    method: str,
    parameters: SolveParameters,
    hint: PrecisionPlan | None,
) -> SolveResult:
    """The bits of the plan without hosts, and the best plan with hosts at these bits."""
    deadline_s = problem.deadline_s
    budget = Budget(parameters)
    if deadline_s is None:
        soonest = problem.at_bits(problem.fastest_bits)
        found = ReplayedRun(soonest, hosts, method, parameters, None).find_deadline()
        if isinstance(found, SolveResult):
            return found
        deadline_s, fastest_s = found
    else:
        fastest_s = None
    held = replace(problem, deadline_s=deadline_s, slack=0.0)
    free = solve(held, method=method, parameters=budget.left(), hint=hint)
    if free.plan is None:
        return free
    if free.status is SolveStatus.INTERRUPTED:  # its plan is not known to be in time
        return replace(free, plan=None, evaluation=None, objective=None, gap=None, notes=())
    columns = plan_columns(held, free.plan)
    # Where hosts leave no plan at the bits chosen, those that are reduced soonest may have one.
    for bits in dict.fromkeys((free.plan.communication, problem.fastest_bits)):
        fixed = held.at_bits(bits)
        start = plan_from_columns(fixed, columns)
        result = ReplayedRun(fixed, hosts, method, budget.left(), start).run()
        if result.plan is not None or result.status is not SolveStatus.INFEASIBLE:
            break
    return _at_these_bits(held, bits, result, free, fastest_s)


def _at_these_bits(
    problem: AllocationProblem,
    bits: tuple[int, ...],
    result: SolveResult,
    free: SolveResult,
    fastest_s: float | None,
) -> SolveResult:
    """A result at some bits as one of the problem that leaves them open."""
    plan = evaluation = objective = None
    status = result.status
    if result.plan is not None:
        columns = plan_columns(problem.at_bits(bits), result.plan)
        plan = plan_from_columns(problem, columns, bits)
        evaluation = evaluate_columns(problem, columns, result.deadline_s, bits)
        objective = evaluation.perturbation
    bound = free.bound if objective is None or free.bound is None else min(free.bound, objective)
    gap = relative_gap(objective, bound)
    proven = gap is not None and gap <= result.parameters.relative_gap
    if status is SolveStatus.OPTIMAL and not proven:
        status = SolveStatus.HEURISTIC
    note = f"{sending_text(bits)}, chosen without hosts"
    return replace(
        result,
        status=status,
        plan=plan,
        evaluation=evaluation,
        objective=objective,
        bound=bound,
        gap=gap,
        fastest_time_s=fastest_s,
        notes=(*result.notes, note),
    )
