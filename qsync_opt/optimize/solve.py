"""`solve`: the front door. Deadline, one job per distinct device kind, verification, result.

Because iteration time is a maximum over device kinds, T(x) = max_r T_r(x_r), "T <= deadline"
splits into one program per kind (design, section 4, item 6); identical kinds are solved once.
A problem with a slack asks for (1 + slack) x the iteration time of its fastest feasible plan,
which is the largest over the kinds of their least times.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from types import MappingProxyType

from qsync_opt.errors import InfeasibleError, ParameterError, QsyncError, SolverUnavailableError
from qsync_opt.optimize.arrays import IntArray
from qsync_opt.optimize.canonical import kind_sha256
from qsync_opt.optimize.crew import Crew, make_crew
from qsync_opt.optimize.evaluate import (
    Evaluation,
    evaluate_columns,
    plan_columns,
    plan_from_columns,
)
from qsync_opt.optimize.interrupter import Interrupter
from qsync_opt.optimize.kind import KindJob, Limits
from qsync_opt.optimize.problem import AllocationProblem
from qsync_opt.optimize.result import (
    METHODS,
    SEVERITY,
    DeviceResult,
    SolveParameters,
    SolveResult,
    SolveStatus,
    relative_gap,
)
from qsync_opt.plan import PrecisionPlan

#: Operators from which on device kinds are worth processes of their own: a fork takes as long
#: as solving a kind of about fifty.
_LARGE = 200


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
            gives no plan, with the reason in the result).
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
    return _Run(problem, method, parameters, hint).run()


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
    run = _Run(problem, "fastest", parameters, None)
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


class _Run:
    """One call of `solve`."""

    def __init__(
        self,
        problem: AllocationProblem,
        method: str,
        parameters: SolveParameters,
        hint: PrecisionPlan | None,
    ) -> None:
        self._problem, self._method, self._parameters = problem, method, parameters
        self._limits = Limits(
            began=time.perf_counter(),
            time_limit_s=parameters.time_limit_s,
            interrupter=Interrupter(),
        )
        self.interrupted = False
        hints = None if hint is None else plan_columns(problem, hint)
        self._kinds = [
            KindJob(
                problem,
                problem.devices[members[0]],
                members,
                method=method,
                parameters=parameters,
                hints=() if hints is None else [hints[index] for index in members],
                limits=self._limits,
            )
            for members in _distinct(problem)
        ]
        self.deadline_s: float | None = problem.deadline_s
        self._fastest_s: float | None = None

    # -- the whole -------------------------------------------------------------------------

    def run(self) -> SolveResult:
        """Deadline, then every kind, then the result."""
        with self._crew() as crew:
            self._find_deadline(crew)
            if self.deadline_s is not None and not self.interrupted:
                if self._method == "fastest":
                    if self._problem.deadline_s is not None:
                        self._each(crew, None)
                    for kind in self._kinds:
                        kind.solution = kind.fastest
                else:
                    self._each(crew, self.deadline_s)
        return self._result()

    def find_deadline(self) -> None:
        """Set the deadline: the problem's own, or from the fastest feasible plan."""
        with self._crew() as crew:
            self._find_deadline(crew)

    def _find_deadline(self, crew: Crew) -> None:
        if self.deadline_s is not None:
            return
        self._each(crew, None)
        times = [None if k.fastest is None else k.fastest.objective for k in self._kinds]
        if any(value is None for value in times):
            return
        self._fastest_s = max(value for value in times if value is not None)
        self.deadline_s = (1.0 + self._problem.slack) * self._fastest_s

    def _crew(self) -> Crew:
        heavy = self._method in ("auto", "exact", "greedy", "fastest")
        return make_crew(
            self._kinds, self._parameters, apart=heavy and len(self._problem.operators) >= _LARGE
        )

    def _each(self, crew: Crew, deadline_s: float | None) -> None:
        self.interrupted |= crew.perform(deadline_s)

    # -- the result ------------------------------------------------------------------------

    def status(self) -> SolveStatus:
        """Why the whole stopped: the worst of the kinds."""
        parts = [kind.solution or kind.fastest for kind in self._kinds]
        found = {None if part is None else part.status for part in parts}
        # Greedy's plan stands, whatever the search for a start met with.
        done = found <= {SolveStatus.OPTIMAL, SolveStatus.HEURISTIC}
        if any(kind.trouble for kind in self._kinds) and not done:
            return SolveStatus.SOLVER_ERROR
        for status in SEVERITY:
            if status in found and status is not SolveStatus.OPTIMAL:
                return status
        if None in found:
            return SolveStatus.INTERRUPTED if self.interrupted else SolveStatus.TIME_LIMIT
        return SolveStatus.OPTIMAL

    def trouble(self) -> str | None:
        """What went wrong with the back end, if anything did."""
        troubles = (kind.trouble for kind in self._kinds if kind.trouble)
        return "; ".join(dict.fromkeys(troubles)) or None

    def _columns(self) -> list[IntArray] | None:
        columns: list[IntArray | None] = [None] * len(self._problem.devices)
        for kind in self._kinds:
            for index in kind.members:
                columns[index] = None if kind.solution is None else kind.solution.column
        complete = [column for column in columns if column is not None]
        return complete if len(complete) == len(columns) else None

    def _result(self) -> SolveResult:
        problem, method = self._problem, self._method
        status, columns = self.status(), self._columns()
        reason = self.trouble()
        if method == "auto":
            method = "exact"
            if columns is None and status is not SolveStatus.INFEASIBLE:
                columns = self._fall_back()
                if columns is not None:
                    reason = f"exact found no plan ({reason or status.value}); this is greedy's"
                    method = "greedy"
                    if status is not SolveStatus.INTERRUPTED:
                        status = SolveStatus.HEURISTIC
        evaluation: Evaluation | None = None
        plan = None
        if columns is not None and self.deadline_s is not None:
            evaluation = evaluate_columns(problem, columns, self.deadline_s)
            if evaluation.feasible or method == "fastest":
                plan = plan_from_columns(problem, columns)
            else:
                reason = f"the plan breaks a rule: {evaluation.violations[0]}"
                evaluation, status = None, SolveStatus.SOLVER_ERROR
        objective = evaluation.perturbation if evaluation else None
        bound = None if method == "fastest" or status is SolveStatus.INFEASIBLE else self._bound()
        if bound is not None and objective is not None:
            bound = min(bound, objective)
        return SolveResult(
            method=method,
            status=status,
            plan=plan,
            evaluation=evaluation,
            objective=objective,
            bound=bound,
            gap=relative_gap(objective, bound),
            deadline_s=self.deadline_s,
            fastest_time_s=self._fastest_s,
            fallback_reason=reason,
            notes=() if plan is None else self._notes(),
            devices=MappingProxyType(self._device_results()),
            solve_s=time.perf_counter() - self._limits.began,
            parameters=self._parameters,
        )

    def _fall_back(self) -> list[IntArray] | None:
        if self.deadline_s is None:
            return None
        for kind in self._kinds:
            try:
                kind.fall_back(self.deadline_s)
            except QsyncError as error:
                kind.trouble = str(error)
        return self._columns()

    def _bound(self) -> float | None:
        total = 0.0
        for kind in self._kinds:
            if kind.solution is None or not math.isfinite(kind.solution.bound):
                return None
            for index in kind.members:
                total += self._problem.weight(self._problem.devices[index]) * kind.solution.bound
        return total

    def _device_results(self) -> Mapping[str, DeviceResult]:
        results = {}
        for kind in self._kinds:
            found = kind.solution or kind.fastest
            first = self._problem.devices[kind.members[0]].name
            for index in kind.members:
                name = self._problem.devices[index].name
                objective = None if found is None else found.objective
                bound = found.bound if found and math.isfinite(found.bound) else None
                results[name] = DeviceResult(
                    status=found.status if found else SolveStatus.TIME_LIMIT,
                    objective=objective,
                    bound=bound,
                    gap=relative_gap(objective, bound),
                    same_as=None if name == first else first,
                    solve_s=kind.solve_s,
                    statistics=MappingProxyType(dict(found.statistics) if found else {}),
                )
        return {device.name: results[device.name] for device in self._problem.devices}

    def _notes(self) -> tuple[str, ...]:
        return tuple(
            f"{kind.device.name}: the plan is uniform {kind.uniform}"
            for kind in self._kinds
            if kind.uniform is not None
        )


def _distinct(problem: AllocationProblem) -> list[list[int]]:
    """Indices of the device kinds, those together that cost the same and may do the same."""
    kinds: dict[str, list[int]] = {}
    for index, device in enumerate(problem.devices):
        kinds.setdefault(kind_sha256(device), []).append(index)
    return list(kinds.values())
