"""`solve`: the front door. One run where all times are constant, else a search over bits too."""

from __future__ import annotations

from qsync_opt.errors import InfeasibleError, ParameterError, SolverUnavailableError
from qsync_opt.optimize.bits_run import BitsRun
from qsync_opt.optimize.evaluate import plan_columns
from qsync_opt.optimize.problem import AllocationProblem
from qsync_opt.optimize.result import METHODS, SolveParameters, SolveResult, SolveStatus
from qsync_opt.optimize.run import Run
from qsync_opt.plan import PrecisionPlan


def solve(
    problem: AllocationProblem,
    *,
    method: str = "auto",
    parameters: SolveParameters = SolveParameters(),  # noqa: B008  # frozen
    hint: PrecisionPlan | None = None,
) -> SolveResult:
    """Find a precision plan.

    Args:
        problem: the problem.
        method: `exact` (proven within the gap), `greedy` (QSync's recovery), `uniform` (best
            single precision), `fastest` (least iteration time), `random`, `brute_force` (all
            plans of a tiny problem), or `auto` (exact within the time limit; greedy if that
            gives no plan, with the reason in the result). Where buckets have codes, each
            chooses their bits too (`bits`, `joint`).
        parameters: see `SolveParameters`.
        hint: a plan of the same problem to start from; never made worse.

    Returns:
        The plan with its proof, or why there is none. Ctrl-C returns what was found so far.

    Raises:
        ParameterError: unknown method, or a problem too large for `brute_force`.
        PlanError: the hint is for another problem.
    """
    if method not in METHODS:
        raise ParameterError("method", "must be one of " + ", ".join(METHODS), method)
    if problem.has_codes:
        return BitsRun(problem, method, parameters, hint).run()
    hints = None if hint is None else plan_columns(problem, hint)
    return Run(problem, method, parameters, hints).run()


def find_deadline(
    problem: AllocationProblem,
    *,
    parameters: SolveParameters = SolveParameters(),  # noqa: B008  # frozen
) -> float:
    """The iteration time that plans are held to: given, or (1 + slack) x the fastest, seconds.

    Raises:
        InfeasibleError: no plan fits the memory, or none was found in time.
        SolverUnavailableError: the back end failed.
        KeyboardInterrupt: Ctrl-C came first.
    """
    run = Run(problem.at_bits(problem.fastest_bits), "fastest", parameters)
    run.find_deadline()
    if run.interrupted:
        raise KeyboardInterrupt
    trouble = run.trouble()
    if trouble is not None:  # a plan that was found is not known to be the fastest
        raise SolverUnavailableError(parameters.solver, trouble)
    if run.deadline_s is None:
        status = run.status()
        raise InfeasibleError(
            f"no plan of {problem.name} fits the memory ({status.value})."
            " qsync_opt.explain(problem) says which budget is too small",
            proven=status is SolveStatus.INFEASIBLE,
        )
    return run.deadline_s
