"""`solve_replayed`: the plan of least perturbation whose *replayed* step keeps the deadline.

`replayed_run` says how where buckets are sent in one way, and `replayed_bits` where their bits
are a decision too.
"""

from __future__ import annotations

from collections.abc import Mapping

from qsync_opt.errors import ParameterError
from qsync_opt.optimize.problem import AllocationProblem
from qsync_opt.optimize.result import SolveParameters, SolveResult
from qsync_opt.plan import PrecisionPlan
from qsync_opt.replayed_bits import ReplayedBits
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
        As `solve`; `replayed` says how long the step is by replay and by `evaluate`, and how
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
        return ReplayedBits(problem, hosts, method, parameters, hint).run()
    return ReplayedRun(problem, hosts, method, parameters, hint).run()
