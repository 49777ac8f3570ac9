"""`solve`: the front door. Deadline, one job per distinct device kind, verification, result.

Because iteration time is a maximum over device kinds, T(x) = max_r T_r(x_r), "T <= deadline"
splits into one program per kind (design, section 4, item 6); identical kinds are solved once.
A problem with a slack asks for (1 + slack) x the iteration time of its fastest feasible plan,
which is the largest over the kinds of their least times.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np

from qsync_opt.errors import InfeasibleError, ParameterError, QsyncError, SolverUnavailableError
from qsync_opt.optimize.arrays import IntArray
from qsync_opt.optimize.baselines import (
    UniformCandidate,
    best_uniform,
    greedy_columns,
    improve_columns,
    random_columns,
    uniform_candidates,
)
from qsync_opt.optimize.brute_force import brute_force_columns, brute_force_fastest
from qsync_opt.optimize.canonical import kind_sha256
from qsync_opt.optimize.evaluate import (
    Evaluation,
    allowed_columns,
    broken_rules,
    evaluate_columns,
    evaluate_device,
    plan_columns,
    plan_from_columns,
)
from qsync_opt.optimize.exact import KindSolution, KindSolver
from qsync_opt.optimize.factors import FactorGraph
from qsync_opt.optimize.floors import is_late, time_floor_s
from qsync_opt.optimize.interrupter import Interrupter
from qsync_opt.optimize.problem import AllocationProblem, DeviceKind
from qsync_opt.optimize.result import (
    METHODS,
    DeviceResult,
    Progress,
    SolveParameters,
    SolveResult,
    SolveStatus,
    relative_gap,
)
from qsync_opt.optimize.workers import run_side_by_side
from qsync_opt.plan import PrecisionPlan

#: The fastest feasible time is proven to this gap where it is cheap ...
_FASTEST_GAP = 1e-9

#: ... and on larger kinds to this fraction of the gap asked for: a deadline that is looser by
#: it moves the objective by about as much as the gap allows.
_FASTEST_GAP_FRACTION = 0.1
_FASTEST_EXACT_OPERATORS = 500

#: Draws of the `random` method per device kind.
_RANDOM_TRIES = 4


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


@dataclass(kw_only=True)
class _Kind:
    """One distinct device kind and what was found for it."""

    device: DeviceKind
    members: list[int]
    fastest: KindSolution | None = None
    solution: KindSolution | None = None
    solve_s: float = 0.0
    trouble: str | None = None
    graph: FactorGraph | None = field(default=None, repr=False)
    uniform: tuple[UniformCandidate, ...] | None = field(default=None, repr=False)
    solver: KindSolver | None = field(default=None, repr=False)


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
        self._began = time.perf_counter()
        self._interrupter = Interrupter()
        self.interrupted = False
        self._hint = None if hint is None else plan_columns(problem, hint)
        self._kinds = _distinct(problem)
        self.deadline_s: float | None = problem.deadline_s
        self._fastest_s: float | None = None

    # -- the whole -------------------------------------------------------------------------

    def run(self) -> SolveResult:
        """Deadline, then every kind, then the result."""
        self.find_deadline()
        if self.deadline_s is not None and not self.interrupted:
            if self._method == "fastest":
                if self._problem.deadline_s is not None:
                    self._each(self._find_fastest)
                for kind in self._kinds:
                    kind.solution = kind.fastest
            else:
                self._each(self._solve_kind)
        return self._result()

    def find_deadline(self) -> None:
        """Set the deadline: the problem's own, or from the fastest feasible plan."""
        if self.deadline_s is not None:
            return
        self._each(self._find_fastest)
        times = [None if k.fastest is None else k.fastest.objective for k in self._kinds]
        if any(value is None for value in times):
            return
        self._fastest_s = max(value for value in times if value is not None)
        self.deadline_s = (1.0 + self._problem.slack) * self._fastest_s

    def _each(self, job: Callable[[_Kind], None]) -> None:
        def timed(kind: _Kind) -> None:
            began = time.perf_counter()
            try:
                job(kind)
            except SolverUnavailableError as error:
                kind.trouble = str(error)
            kind.solve_s += time.perf_counter() - began

        jobs = [lambda kind=kind: timed(kind) for kind in self._kinds]
        outcomes, interrupted = run_side_by_side(
            jobs, self._parameters.threads, self._interrupter.interrupt
        )
        self.interrupted |= interrupted
        for outcome in outcomes:
            if outcome.error is not None:
                raise outcome.error
        if interrupted:
            for kind in self._kinds:
                if kind.solution is None and kind.solver is not None:
                    kind.solution = kind.solver.solution()

    def _time_left(self) -> float | None:
        limit = self._parameters.time_limit_s
        return None if limit is None else limit - (time.perf_counter() - self._began)

    def _should_stop(self) -> bool:
        left = self._time_left()
        return self._interrupter.stopped or (left is not None and left <= 0)

    # -- one kind --------------------------------------------------------------------------

    def _kind_solver(self, kind: _Kind, deadline_s: float | None, gap: float) -> KindSolver:
        name = kind.device.name

        def report(phase: str, objective: float | None, bound: float | None) -> None:
            if self._parameters.progress is not None:
                self._parameters.progress(
                    Progress(
                        device=name,
                        phase=phase,
                        objective=objective,
                        bound=bound,
                        elapsed_s=time.perf_counter() - self._began,
                    )
                )

        return KindSolver(
            self._problem,
            kind.device,
            deadline_s=deadline_s,
            relative_gap=gap,
            solver=self._parameters.solver,
            seed=self._parameters.seed,
            time_left=self._time_left,
            stop=lambda: self._interrupter.stopped,
            report=report,
            plain=self._parameters.plain,
            interrupter=self._interrupter,
        )

    def _graph(self, kind: _Kind) -> FactorGraph:
        """The kind's tables, made once."""
        if kind.graph is None:
            domain = allowed_columns(self._problem, kind.device)
            kind.graph = FactorGraph(self._problem, kind.device, domain)
        return kind.graph

    def _uniform(self, kind: _Kind) -> tuple[UniformCandidate, ...]:
        """The kind's uniform plans, judged without a deadline, made once."""
        if kind.uniform is None:
            kind.uniform = uniform_candidates(self._problem, kind.device, math.inf)
        return kind.uniform

    def _best_uniform(self, kind: _Kind, deadline_s: float) -> IntArray | None:
        """The uniform plan of least perturbation that keeps memory and deadline."""
        candidates = [
            c
            for c in self._uniform(kind)
            if c.feasible and not is_late(c.evaluation.iteration_time_s, deadline_s)
        ]
        best = best_uniform(candidates)
        return None if best is None else best.column

    def _find_fastest(self, kind: _Kind) -> None:
        """The least iteration time of one kind within its memory."""
        problem, device = self._problem, kind.device
        if self._method == "brute_force":
            column = brute_force_fastest(problem, device)
            found = None if column is None else evaluate_device(problem, device, column)
            kind.fastest = _proven(column, 0.0 if found is None else found.iteration_time_s)
            return
        exact = len(problem.operators) <= _FASTEST_EXACT_OPERATORS
        gap = _FASTEST_GAP if exact else self._parameters.relative_gap * _FASTEST_GAP_FRACTION
        solver = self._kind_solver(kind, None, gap)
        try:
            kind.fastest = solver.solve(
                [c.column for c in self._uniform(kind) if c.feasible], self._graph(kind)
            )
        except SolverUnavailableError as error:
            kind.trouble = str(error)
            kind.fastest = solver.solution()

    def _solve_kind(self, kind: _Kind) -> None:
        problem, device, deadline_s = self._problem, kind.device, self.deadline_s
        if deadline_s is None:
            return
        method = self._method
        if self._hopeless(device, deadline_s):
            kind.solution = _proven(None, 0.0)
        elif method == "brute_force":
            column = brute_force_columns(problem, device, deadline_s)
            kind.solution = _proven(column, _perturbation(problem, device, column))
        elif method == "uniform":
            column = self._best_uniform(kind, deadline_s)
            kind.solution = _heuristic(column, _perturbation(problem, device, column))
        elif method == "random":
            column = random_columns(
                problem, device, deadline_s, self._parameters.seed, tries=_RANDOM_TRIES
            )
            kind.solution = _heuristic(column, _perturbation(problem, device, column))
        elif method == "greedy":
            column = self._greedy(kind, deadline_s)
            kind.solution = _heuristic(column, _perturbation(problem, device, column))
            if column is None and kind.fastest is not None and kind.fastest.bound > deadline_s:
                kind.solution = replace(kind.solution, status=SolveStatus.INFEASIBLE)
        else:
            self._solve_exactly(kind, deadline_s)

    def _hopeless(self, device: DeviceKind, deadline_s: float) -> bool:
        """Whether every operator at its fastest misses the deadline (solvers dislike 1e-300 s)."""
        if self._method == "brute_force":  # an oracle takes no advice
            return False
        domain = allowed_columns(self._problem, device)
        return is_late(time_floor_s(self._problem, device, domain), deadline_s)

    def _greedy(self, kind: _Kind, deadline_s: float) -> IntArray | None:
        """The better of QSync's recovery from the fastest plan and the best uniform plan."""
        problem, device = self._problem, kind.device
        if kind.fastest is None and not self._interrupter.stopped:
            self._find_fastest(kind)
        # Recovery from the fastest plan may end worse than a uniform plan: give the better.
        found = [self._best_uniform(kind, deadline_s)]
        if kind.fastest is not None and kind.fastest.column is not None:
            start = kind.fastest.column
            found.append(greedy_columns(problem, device, deadline_s, start, self._should_stop))
        plans = [column for column in found if column is not None]
        return min(plans, key=lambda c: _perturbation(problem, device, c), default=None)

    def _solve_exactly(self, kind: _Kind, deadline_s: float) -> None:
        solver = kind.solver = self._kind_solver(kind, deadline_s, self._parameters.relative_gap)
        hints = [] if self._hint is None else [self._hint[index] for index in kind.members]
        starts = [h for h in hints if not broken_rules(self._problem, kind.device, h)]
        began = time.perf_counter()
        # Exact is never worse than greedy because greedy's plan is where it starts; a plain
        # program has no use for a start, nor the time for one.
        greedy = None if self._parameters.plain else self._greedy(kind, deadline_s)
        greedy_s = time.perf_counter() - began
        if greedy is not None:
            starts.append(greedy)
        try:
            kind.solution = solver.solve(starts, self._graph(kind))
        except SolverUnavailableError as error:
            kind.trouble = str(error)
            kind.solution = solver.solution()
        kind.solution.statistics["greedy_s"] = greedy_s
        self._settle_ties(kind, deadline_s)

    def _settle_ties(self, kind: _Kind, deadline_s: float) -> None:
        """Among equal objectives prefer the smaller iteration time, then lower columns."""
        found = kind.solution
        if found is None or found.column is None:
            return
        column = improve_columns(
            self._problem, kind.device, deadline_s, found.column, self._should_stop, exchanges=0
        )
        if column is not None:
            value = _perturbation(self._problem, kind.device, column)
            kind.solution = replace(
                found, column=column, objective=value, bound=min(found.bound, value)
            )

    # -- the result ------------------------------------------------------------------------

    def status(self) -> SolveStatus:
        """Why the whole stopped: the worst of the kinds."""
        parts = [kind.solution or kind.fastest for kind in self._kinds]
        found = {None if part is None else part.status for part in parts}
        # Greedy's plan stands, whatever the search for a start met with.
        done = found <= {SolveStatus.OPTIMAL, SolveStatus.HEURISTIC}
        if any(kind.trouble for kind in self._kinds) and not done:
            return SolveStatus.SOLVER_ERROR
        for status in (
            SolveStatus.INFEASIBLE,
            SolveStatus.INTERRUPTED,
            SolveStatus.SOLVER_ERROR,
            SolveStatus.TIME_LIMIT,
            SolveStatus.NO_PLAN_FOUND,
            SolveStatus.HEURISTIC,
        ):
            if status in found:
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
            notes=() if columns is None or plan is None else self._notes(columns),
            devices=MappingProxyType(self._device_results()),
            solve_s=time.perf_counter() - self._began,
            parameters=self._parameters,
        )

    def _fall_back(self) -> list[IntArray] | None:
        if self.deadline_s is None:
            return None
        found: dict[int, IntArray] = {}
        for kind in self._kinds:
            column = None if kind.solution is None else kind.solution.column
            if column is None:
                try:
                    column = self._greedy(kind, self.deadline_s)
                except QsyncError as error:
                    kind.trouble = str(error)
            if column is None:
                return None
            kind.solution = _heuristic(column, _perturbation(self._problem, kind.device, column))
            found |= dict.fromkeys(kind.members, column)
        return [found[index] for index in range(len(found))]

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

    def _notes(self, columns: list[IntArray]) -> tuple[str, ...]:
        notes = []
        if len(self._problem.precisions) > 1 and self._method in ("auto", "exact", "greedy"):
            for kind in self._kinds:
                mine = columns[kind.members[0]]
                for candidate in self._uniform(kind):
                    if np.array_equal(candidate.column, mine):
                        notes.append(
                            f"{kind.device.name}: the plan is uniform {candidate.precision}"
                        )
                        break
        return tuple(notes)


def _proven(column: IntArray | None, value: float) -> KindSolution:
    status = SolveStatus.INFEASIBLE if column is None else SolveStatus.OPTIMAL
    return KindSolution(
        status=status,
        column=column,
        objective=None if column is None else value,
        bound=math.inf if column is None else value,
    )


def _heuristic(column: IntArray | None, value: float) -> KindSolution:
    status = SolveStatus.NO_PLAN_FOUND if column is None else SolveStatus.HEURISTIC
    objective = None if column is None else value
    return KindSolution(status=status, column=column, objective=objective, bound=-math.inf)


def _perturbation(problem: AllocationProblem, device: DeviceKind, column: IntArray | None) -> float:
    if column is None:
        return 0.0
    return evaluate_device(problem, device, column).perturbation


def _distinct(problem: AllocationProblem) -> list[_Kind]:
    """Device kinds that differ in what a plan costs or may do; equal ones together."""
    kinds: dict[str, _Kind] = {}
    for index, device in enumerate(problem.devices):
        kind = kinds.setdefault(kind_sha256(device), _Kind(device=device, members=[]))
        kind.members.append(index)
    return list(kinds.values())
