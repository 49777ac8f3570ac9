"""`Run`: one solve whose buckets have constant times, device kind by device kind.

Because iteration time is a maximum over device kinds, T(x) = max_r T_r(x_r), "T <= deadline"
splits into one program per kind (design, section 4, item 6); identical kinds are solved once.
A problem with a slack asks for (1 + slack) x the iteration time of its fastest feasible plan,
which is the largest over the kinds of their least times.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from qsync_opt.errors import QsyncError
from qsync_opt.optimize.arrays import IntArray
from qsync_opt.optimize.canonical import kind_sha256
from qsync_opt.optimize.crew import Crew, make_crew
from qsync_opt.optimize.evaluate import Evaluation, evaluate_columns, plan_from_columns
from qsync_opt.optimize.interrupter import Interrupter
from qsync_opt.optimize.kind import KindJob, Limits
from qsync_opt.optimize.problem import AllocationProblem
from qsync_opt.optimize.proof import KindSolution
from qsync_opt.optimize.result import (
    SEVERITY,
    DeviceResult,
    SolveParameters,
    SolveResult,
    SolveStatus,
    relative_gap,
)

#: Operators from which on device kinds are worth processes of their own: a fork takes as long
#: as solving a kind of about fifty.
_LARGE = 200


class Run:
    """One solve; see the module.

    Args:
        problem: the problem, without codes.
        method: see `solve`.
        parameters: see `SolveParameters`.
        hints: a plan to start from, precision columns [N] per device kind.

    Attributes:
        interrupted: whether Ctrl-C came.
        deadline_s: the iteration time to keep; None before it is found.
        fastest_s: iteration time of the fastest plan, where the deadline follows from it.
    """

    def __init__(
        self,
        problem: AllocationProblem,
        method: str,
        parameters: SolveParameters,
        hints: Sequence[IntArray] | None = None,
    ) -> None:
        self._problem, self._method, self._parameters = problem, method, parameters
        self._began = time.perf_counter()
        limits = Limits(
            began=self._began,
            time_limit_s=parameters.time_limit_s,
            interrupter=Interrupter(),
        )
        self.interrupted = False
        self._kinds = [
            KindJob(
                problem,
                problem.devices[members[0]],
                members,
                method=method,
                parameters=parameters,
                hints=() if hints is None else [hints[index] for index in members],
                limits=limits,
            )
            for members in distinct_kinds(problem)
        ]
        self.deadline_s: float | None = problem.deadline_s
        self.fastest_s: float | None = None

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
        return self.result()

    def find_deadline(self) -> None:
        """Set the deadline: the problem's own, or from the fastest feasible plan."""
        with self._crew() as crew:
            self._find_deadline(crew)

    def find_fastest(self) -> list[KindSolution] | None:
        """The fastest plan of every device kind, and the deadline; None where one has none."""
        with self._crew() as crew:
            self._find_deadline(crew)
            if self._problem.deadline_s is not None:
                self._each(crew, None)
        fastest: dict[int, KindSolution] = {}
        for kind in self._kinds:
            if kind.fastest is None or kind.fastest.column is None:
                return None
            fastest |= dict.fromkeys(kind.members, kind.fastest)
        return [fastest[index] for index in range(len(self._problem.devices))]

    def _find_deadline(self, crew: Crew) -> None:
        if self.deadline_s is not None:
            return
        self._each(crew, None)
        times = [None if k.fastest is None else k.fastest.objective for k in self._kinds]
        if any(value is None for value in times):
            return
        self.fastest_s = max(value for value in times if value is not None)
        self.deadline_s = (1.0 + self._problem.slack) * self.fastest_s

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

    def result(self) -> SolveResult:
        """What was found, judged by `evaluate`."""
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
            fastest_time_s=self.fastest_s,
            fallback_reason=reason,
            notes=() if plan is None else self._notes(),
            devices=MappingProxyType(self._device_results()),
            solve_s=time.perf_counter() - self._began,
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


def distinct_kinds(problem: AllocationProblem) -> list[list[int]]:
    """Indices of the device kinds, those together that cost the same and may do the same."""
    kinds: dict[str, list[int]] = {}
    for index, device in enumerate(problem.devices):
        kinds.setdefault(kind_sha256(device), []).append(index)
    return list(kinds.values())
