"""`KindJob`: what `solve` does for one distinct device kind, its fastest plan and its best one.

Everything here sees one device kind and one deadline; `solve` makes the deadline, and puts the
kinds together. A job can be done in this process or in a forked one: what it found goes
through `KindJob.state` and `KindJob.load`.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from qsync_opt.errors import SolverUnavailableError
from qsync_opt.optimize.arrays import IntArray
from qsync_opt.optimize.baselines import (
    UniformCandidate,
    best_uniform,
    random_columns,
    uniform_candidates,
)
from qsync_opt.optimize.brute_force import brute_force_columns, brute_force_fastest
from qsync_opt.optimize.evaluate import allowed_columns, broken_rules, evaluate_device
from qsync_opt.optimize.exact import KindSolver
from qsync_opt.optimize.factors import FactorGraph
from qsync_opt.optimize.floors import is_late, time_floor_s
from qsync_opt.optimize.greedy import greedy_columns
from qsync_opt.optimize.interrupter import Interrupter
from qsync_opt.optimize.ladders import Workspace
from qsync_opt.optimize.polish import improve_columns
from qsync_opt.optimize.problem import AllocationProblem, DeviceKind
from qsync_opt.optimize.proof import KindSolution
from qsync_opt.optimize.result import Progress, SolveParameters, SolveStatus

#: The fastest feasible time is proven to this gap where it is cheap ...
_FASTEST_GAP = 1e-9

#: ... and on larger kinds to this fraction of the gap asked for: a deadline that is looser by
#: it moves the objective by about as much as the gap allows.
_FASTEST_GAP_FRACTION = 0.1
_FASTEST_EXACT_OPERATORS = 500

#: Draws of the `random` method per device kind.
_RANDOM_TRIES = 4


#: How often ties are settled: what one change opens up for others is looked at again.
_MOST_SETTLED = 10


@dataclass(frozen=True, kw_only=True, eq=False)
class Limits:
    """When the work has to stop.

    Attributes:
        began: `time.perf_counter` when it began; the same clock in a forked process.
        time_limit_s: seconds it may take; None for no limit.
        interrupter: says whether to stop now.
    """

    began: float
    time_limit_s: float | None
    interrupter: Interrupter

    def time_left(self) -> float | None:
        """Seconds left; None for no limit."""
        if self.time_limit_s is None:
            return None
        return self.time_limit_s - (time.perf_counter() - self.began)

    def stop(self) -> bool:
        """Whether to stop now."""
        left = self.time_left()
        return self.interrupter.stopped or (left is not None and left <= 0)


class KindJob:
    """One distinct device kind and what was found for it.

    Args:
        problem: the problem.
        device: one of its device kinds.
        members: indices of the kinds that are equal to it, itself included.
        method: see `solve`.
        parameters: see `SolveParameters`.
        hints: plans to start from, precision columns [N] each.
        limits: when to stop.
        recovers: whether the exact method starts from greedy's plan beside the hints.

    Attributes:
        fastest: the plan of least iteration time; None before it was looked for.
        solution: the plan asked for; None before it was looked for.
        solve_s: seconds spent.
        trouble: what went wrong with the back end, if anything did.
        died: whether the back end ended the process that asked it.
        uniform: name of the precision that the solution runs everywhere, if it does.
        report: takes progress.
    """

    def __init__(
        self,
        problem: AllocationProblem,
        device: DeviceKind,
        members: Sequence[int],
        *,
        method: str,
        parameters: SolveParameters,
        hints: Sequence[IntArray],
        limits: Limits,
        recovers: bool = True,
    ) -> None:
        self._problem, self.device, self.members = problem, device, tuple(members)
        self._method, self._parameters = method, parameters
        self._hints, self._limits = hints, limits
        self._recovers = recovers and not parameters.plain
        self.fastest: KindSolution | None = None
        self.solution: KindSolution | None = None
        self.solve_s = 0.0
        self.trouble: str | None = None
        self.died = False
        self.uniform: str | None = None
        self.report: Callable[[Progress], None] | None = parameters.progress
        self._solver: KindSolver | None = None
        self._graph: FactorGraph | None = None
        self._candidates: tuple[UniformCandidate, ...] | None = None
        self._workspace = Workspace(problem, device)

    # -- requests --------------------------------------------------------------------------

    def perform(self, deadline_s: float | None) -> None:
        """Find the plan for a deadline, in seconds, or the fastest plan where it is None."""
        began = time.perf_counter()
        try:
            if deadline_s is None:
                self._find_fastest()
            else:
                self._solve(deadline_s)
        except SolverUnavailableError as error:
            self.trouble = str(error)
        finally:
            self.solve_s += time.perf_counter() - began

    def interrupt(self) -> None:
        """Make `perform` return soon."""
        self._limits.interrupter.interrupt()

    def settle(self) -> None:
        """After an interrupt: take what the solver has, where it has not returned."""
        if self.solution is None and self._solver is not None:
            self.solution = self._solver.solution()

    def state(self) -> str:
        """What was found so far, for `load` in another process."""
        return json.dumps(
            {
                "fastest": _packed(self.fastest),
                "solution": _packed(self.solution),
                "solve_s": self.solve_s,
                "trouble": self.trouble,
                "uniform": self.uniform,
            }
        )

    def load(self, state: str) -> None:
        """Take what was found in another process."""
        values = json.loads(state)
        self.fastest, self.solution = _unpacked(values["fastest"]), _unpacked(values["solution"])
        self.solve_s, self.trouble = values["solve_s"], values["trouble"]
        self.uniform = values["uniform"]

    # -- pieces made once ------------------------------------------------------------------

    def _tables(self) -> FactorGraph:
        if self._graph is None:
            domain = allowed_columns(self._problem, self.device)
            self._graph = FactorGraph(self._problem, self.device, domain)
        return self._graph

    def _uniform_plans(self) -> tuple[UniformCandidate, ...]:
        """The uniform plans, judged without a deadline."""
        if self._candidates is None:
            self._candidates = uniform_candidates(self._problem, self.device, math.inf)
        return self._candidates

    def _kind_solver(self, deadline_s: float | None, gap: float) -> KindSolver:
        name, report, began = self.device.name, self.report, self._limits.began

        def tell(phase: str, objective: float | None, bound: float | None) -> None:
            if report is not None:
                elapsed_s = time.perf_counter() - began
                report(
                    Progress(
                        device=name,
                        phase=phase,
                        objective=objective,
                        bound=bound,
                        elapsed_s=elapsed_s,
                    )
                )

        interrupter = self._limits.interrupter
        return KindSolver(
            self._problem,
            self.device,
            deadline_s=deadline_s,
            relative_gap=gap,
            solver=self._parameters.solver,
            seed=self._parameters.seed,
            time_left=self._limits.time_left,
            stop=lambda: interrupter.stopped,
            report=tell,
            plain=self._parameters.plain,
            interrupter=interrupter,
        )

    # -- the fastest plan ------------------------------------------------------------------

    def _find_fastest(self) -> None:
        """The least iteration time within the memory."""
        problem, device = self._problem, self.device
        if self._method == "brute_force":
            column = brute_force_fastest(problem, device)
            found = None if column is None else evaluate_device(problem, device, column)
            self.fastest = proven(column, 0.0 if found is None else found.iteration_time_s)
            return
        exact = len(problem.operators) <= _FASTEST_EXACT_OPERATORS
        gap = _FASTEST_GAP if exact else self._parameters.relative_gap * _FASTEST_GAP_FRACTION
        solver = self._kind_solver(None, gap)
        try:
            self.fastest = solver.solve(
                [c.column for c in self._uniform_plans() if c.feasible], self._tables()
            )
        except SolverUnavailableError as error:
            self.trouble = str(error)
            self.fastest = solver.solution()

    # -- the plan for a deadline -----------------------------------------------------------

    def _solve(self, deadline_s: float) -> None:
        problem, device, method = self._problem, self.device, self._method
        if self._hopeless(deadline_s):
            self.solution = proven(None, 0.0)
        elif method == "brute_force":
            column = brute_force_columns(problem, device, deadline_s)
            self.solution = proven(column, self._perturbation(column))
        elif method == "uniform":
            self._take(self._best_uniform(deadline_s))
        elif method == "random":
            seed = self._parameters.seed
            self._take(random_columns(problem, device, deadline_s, seed, tries=_RANDOM_TRIES))
        elif method == "greedy":
            self._take(self.greedy(deadline_s))
            late = self.fastest is not None and self.fastest.bound > deadline_s
            if self.solution is not None and self.solution.column is None and late:
                self.solution = replace(self.solution, status=SolveStatus.INFEASIBLE)
            self._name_uniform()
        else:
            self._solve_exactly(deadline_s)
            self._name_uniform()

    def _take(self, column: IntArray | None) -> None:
        self.solution = heuristic(column, self._perturbation(column))

    def _perturbation(self, column: IntArray | None) -> float:
        if column is None:
            return 0.0
        return evaluate_device(self._problem, self.device, column).perturbation

    def _hopeless(self, deadline_s: float) -> bool:
        """Whether every operator at its fastest misses the deadline (solvers dislike 1e-300 s)."""
        if self._method == "brute_force":  # an oracle takes no advice
            return False
        domain = allowed_columns(self._problem, self.device)
        return is_late(time_floor_s(self._problem, self.device, domain), deadline_s)

    def _best_uniform(self, deadline_s: float) -> IntArray | None:
        """The uniform plan of least perturbation that keeps memory and deadline."""
        candidates = [
            c
            for c in self._uniform_plans()
            if c.feasible and not is_late(c.evaluation.iteration_time_s, deadline_s)
        ]
        best = best_uniform(candidates)
        return None if best is None else best.column

    def greedy(self, deadline_s: float) -> IntArray | None:
        """The better of QSync's recovery from the fastest plan and the best uniform plan.

        Raises:
            SolverUnavailableError: no fastest plan, and no back end to find it.
        """
        problem, device, limits = self._problem, self.device, self._limits
        # A back end that has ended one process is not asked again: the next would be this one.
        if self.fastest is None and not limits.interrupter.stopped and not self.died:
            self._find_fastest()
        # Recovery from the fastest plan may end worse than a uniform plan: give the better.
        found = [self._best_uniform(deadline_s)]
        if self.fastest is not None and self.fastest.column is not None:
            start = self.fastest.column
            found.append(
                greedy_columns(problem, device, deadline_s, start, limits.stop, self._workspace)
            )
        plans = [column for column in found if column is not None]
        return min(plans, key=self._perturbation, default=None)

    def fall_back(self, deadline_s: float) -> None:
        """Where there is no plan: greedy's, if it has one.

        Raises:
            SolverUnavailableError: see `greedy`.
        """
        if self.solution is None or self.solution.column is None:
            column = self.greedy(deadline_s)
        else:
            column = self.solution.column
        if column is not None:
            self._take(column)

    def _solve_exactly(self, deadline_s: float) -> None:
        solver = self._solver = self._kind_solver(deadline_s, self._parameters.relative_gap)
        starts = [h for h in self._hints if not broken_rules(self._problem, self.device, h)]
        began = time.perf_counter()
        # Exact is never worse than greedy because greedy's plan is where it starts; a plain
        # program has no use for a start, nor the time for one.
        greedy = self.greedy(deadline_s) if self._recovers else None
        greedy_s = time.perf_counter() - began
        if greedy is not None:
            starts.append(greedy)
        try:
            self.solution = solver.solve(starts, self._tables())
        except SolverUnavailableError as error:
            self.trouble = str(error)
            self.solution = solver.solution()
        self.solution.statistics["greedy_s"] = greedy_s
        self._settle_ties(deadline_s)

    def _settle_ties(self, deadline_s: float) -> None:
        """Among equal objectives prefer the smaller iteration time, then lower columns."""
        for _ in range(_MOST_SETTLED):
            found = self.solution
            if found is None or found.column is None:
                return
            only = None if self._solver is None else self._solver.changes(found.column)
            if only is not None and not only.any():
                return
            column = improve_columns(
                self._problem,
                self.device,
                deadline_s,
                found.column,
                self._limits.stop,
                exchanges=0,
                only=only,
                workspace=self._workspace,
            )
            if column is None or np.array_equal(column, found.column):
                return
            value = self._perturbation(column)
            self.solution = replace(
                found, column=column, objective=value, bound=min(found.bound, value)
            )

    def _name_uniform(self) -> None:
        column = None if self.solution is None else self.solution.column
        if column is None or len(self._problem.precisions) == 1:
            return
        for candidate in self._uniform_plans():
            if np.array_equal(candidate.column, column):
                self.uniform = candidate.precision.value
                return


def proven(column: IntArray | None, value: float) -> KindSolution:
    """A plan known to be the best, or the knowledge that there is none."""
    status = SolveStatus.INFEASIBLE if column is None else SolveStatus.OPTIMAL
    return KindSolution(
        status=status,
        column=column,
        objective=None if column is None else value,
        bound=math.inf if column is None else value,
    )


def heuristic(column: IntArray | None, value: float) -> KindSolution:
    """A plan of which nothing is proven, or none found."""
    status = SolveStatus.NO_PLAN_FOUND if column is None else SolveStatus.HEURISTIC
    objective = None if column is None else value
    return KindSolution(status=status, column=column, objective=objective, bound=-math.inf)


def _packed(found: KindSolution | None) -> dict[str, object] | None:
    if found is None:
        return None
    return {
        "status": found.status.name,
        "column": None if found.column is None else found.column.tolist(),
        "objective": found.objective,
        "bound": found.bound,
        "statistics": found.statistics,
    }


def _unpacked(values: dict[str, object] | None) -> KindSolution | None:
    if values is None:
        return None
    status, column = values.pop("status"), values.pop("column")
    return KindSolution(
        status=SolveStatus[str(status)],
        column=None if column is None else np.array(column, dtype=np.int64),
        **values,  # type: ignore[arg-type]  # written by `_packed`
    )
