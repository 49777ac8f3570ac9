"""The least memory and the least iteration time of one device kind, by arithmetic and by program.

Arithmetic gives a lower bound (`memory_floor_bytes`, `time_floor_s`) and plans that are upper
bounds (`candidate_columns`); where the two do not settle the question, the formulation of the
exact method does, with memory or time as the objective. Every value returned is that of a
plan judged by `evaluate`. Least memory is exact to the byte: after the program has found a
plan of M bytes, one more program shows that M - 1 bytes are too few, or finds a smaller plan.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace

import numpy as np

from qsync_opt.errors import SolverUnavailableError
from qsync_opt.optimize.arrays import IntArray
from qsync_opt.optimize.backends import solve_program
from qsync_opt.optimize.consistency import Network, SearchLimitError, rules_of
from qsync_opt.optimize.evaluate import (
    DeviceEvaluation,
    evaluate_columns,
    evaluate_device,
)
from qsync_opt.optimize.floors import is_late, memory_floor_bytes, time_floor_s
from qsync_opt.optimize.formulation import formulate
from qsync_opt.optimize.linear import LinearProgram, ProgramSolution, without_plan
from qsync_opt.optimize.problem import AllocationProblem, DeviceKind
from qsync_opt.optimize.result import SolveParameters
from qsync_opt.optimize.rows import transient_bytes

#: Plans that miss a limit by the solver's tolerance and are cut off before the search gives up.
_MOST_CUTS = 50

#: More memory than any plan can take (sizes are refused above 2^53 bytes each).
UNLIMITED_BYTES = 2**53


@dataclass(frozen=True, kw_only=True)
class Minimum:
    """The least amount of one resource.

    Attributes:
        value: what the best plan found takes (bytes or seconds); None without a plan.
        bound: no plan takes less; None where nothing is proven.
        column: that plan's precision columns, [N]; None without a plan.
        infeasible: proven that no plan exists at all under the other limit.
        reason: why the search stopped without a proof; empty otherwise.
    """

    value: float | None
    bound: float | None
    column: IntArray | None = field(repr=False)
    infeasible: bool = False
    reason: str = ""

    def proven_above(self, limit: float) -> bool:
        """Whether it is proven that more than `limit` is needed."""
        return self.infeasible or (self.bound is not None and self.bound > limit)


_OUT_OF_TIME = "the time limit was reached"

#: Nothing exists, and that is proven.
_NO_PLAN = Minimum(value=None, bound=None, column=None, infeasible=True)

#: What a solver's bound on memory may be off by: the program counts MiB, rows are kept to about
#: 1e-6 of a unit and whole numbers to 1e-9 of the sizes.
_SLACK_BYTES, _SLACK = 64.0, 2e-9

#: Share of the time left that one test for a smaller plan may take.
_SHARE_OF_A_TEST = 0.25


@dataclass(frozen=True, kw_only=True)
class _Found:
    """A plan and what it takes."""

    column: IntArray = field(repr=False)
    memory_bytes: int
    time_s: float


@dataclass(kw_only=True)
class _Known:
    """What is known so far about least memory within one deadline.

    Attributes:
        bound: proven, bytes.
        program_ran: whether the program of least memory has been run.
        reason: why the search stopped, if it did.
    """

    bound: int
    program_ran: bool = False
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class _Answer:
    """What one program proved: a bound in seconds or bytes, infeasibility, or nothing and why."""

    bound: float | None = None
    infeasible: bool = False
    reason: str = ""


class SoleKind:
    """One device kind taken on its own: T <= D splits by kind (design, section 4, item 6).

    Args:
        problem: the problem.
        device: one of its device kinds.
        parameters: solver and gap of the programs; their time limit is for all of them together.
    """

    def __init__(
        self, problem: AllocationProblem, device: DeviceKind, parameters: SolveParameters
    ) -> None:
        self.device = replace(device, workers=1, batch_share=1.0)
        self.problem = replace(problem, devices=(self.device,), deadline_s=None, slack=0.0)
        self._parameters = parameters
        limit = parameters.time_limit_s
        self._finish_s = None if limit is None else time.monotonic() + limit
        self._network = Network(problem, device, rules_of(problem, device))
        self._network.propagate()
        self.domain = self._network.allowed()
        self.memory_floor_bytes = memory_floor_bytes(self.problem, self.device, self.domain)
        self.time_floor_s = time_floor_s(self.problem, self.device, self.domain)
        #: Plans met so far, all of which keep pins, groups and followers.
        self.plans: list[_Found] = []
        self._known: dict[float | None, _Known] = {}
        sizes = np.append(self.device.saved.size_bytes.clip(min=0), transient_bytes(self.device))
        self._divisor = max(int(np.gcd.reduce(sizes)), 1)
        self._add_candidates()

    def evaluate(self, column: IntArray) -> DeviceEvaluation:
        """What a plan costs on this kind."""
        return evaluate_device(self.problem, self.device, column)

    def _obeys_rules(self, column: IntArray) -> bool:
        """Whether a plan keeps pins, groups and followers, whatever it costs."""
        broken = evaluate_columns(self.problem, [column], None).violations
        return all(violation.resource == "memory" for violation in broken)

    def _add_candidates(self) -> None:
        """Plans that obey the rules: fast or small options first, or one precision first."""
        device, columns = self.device, len(self.problem.precisions)
        kept = transient_bytes(device).astype(np.float64)
        saved = device.saved
        owner = np.repeat(np.arange(len(saved)), np.diff(saved.saver_start))
        for column, storage in enumerate(self.problem.storage):
            if storage in saved.dtypes:
                size = saved.size_bytes[owner, saved.dtypes.index(storage)]
                np.add.at(kept[:, column], saved.savers, np.maximum(size, 0))
        preferences = [device.forward_s + device.backward_s, kept]
        for column in range(columns):
            row = (np.arange(columns) != column).astype(np.float64)
            preferences.append(np.broadcast_to(row, kept.shape))
        for preference in preferences:
            try:
                assigned = self._network.assign(preference)
            except SearchLimitError:
                continue  # a missing candidate costs a program, never a wrong answer
            if assigned is not None:
                self._add(assigned)

    def least_time(self, memory_bytes: int | None) -> Minimum:
        """The least iteration time of a plan within a memory budget (None: any), seconds."""
        budget = UNLIMITED_BYTES if memory_bytes is None else memory_bytes
        if self.memory_floor_bytes > budget:
            return _NO_PLAN
        best, reason = self._fastest(budget), ""
        bound = self.time_floor_s
        if best is None or is_late(best.time_s, bound):
            answer = self._solve("time", budget, None)
            if answer.infeasible and best is None:
                return _NO_PLAN
            best, reason = self._fastest(budget), answer.reason
            bound = max(bound, answer.bound or 0.0)
            if memory_bytes is None:
                self.time_floor_s = bound
        if best is None:
            return Minimum(value=None, bound=bound, column=None, reason=reason)
        bound = min(bound, best.time_s)
        return Minimum(value=best.time_s, bound=bound, column=best.column, reason=reason)

    def least_memory(self, deadline_s: float | None, *, enough: int = -1) -> Minimum:
        """The least peak memory of a plan within a deadline (None: any), whole bytes.

        Args:
            deadline_s: the deadline.
            enough: stop as soon as it is known whether a plan takes no more bytes than this.
        """
        if is_late(self.time_floor_s, deadline_s):
            return _NO_PLAN
        known = self._known.setdefault(deadline_s, _Known(bound=self.memory_floor_bytes))
        known.bound = max(known.bound, self.memory_floor_bytes)
        if not known.program_ran:
            best = self._smallest(deadline_s)
            if best is None or best.memory_bytes > max(known.bound, enough):
                answer = self._solve("memory", UNLIMITED_BYTES, deadline_s)
                if answer.infeasible and best is None:
                    return _NO_PLAN
                known.program_ran, known.reason = True, answer.reason
                if answer.bound is not None:
                    slack = _SLACK_BYTES + _SLACK * abs(answer.bound)
                    known.bound = max(known.bound, self._reachable(answer.bound - slack))
        self._close_gap(known, deadline_s, enough)
        best = self._smallest(deadline_s)
        if deadline_s is None:
            self.memory_floor_bytes = known.bound
        if best is None:
            return Minimum(value=None, bound=known.bound, column=None, reason=known.reason)
        bound = min(known.bound, best.memory_bytes)
        return Minimum(
            value=best.memory_bytes, bound=bound, column=best.column, reason=known.reason
        )

    def _close_gap(self, known: _Known, deadline_s: float | None, enough: int) -> None:
        """Ask for plans below the smallest one until there is proof that none exists.

        The program of least memory leaves a few bytes open. What is enough is asked for
        first; then one step less than the best, nearly always too little, which ends it;
        else what is open is halved.
        """
        tests = 0
        while not known.reason:
            best = self._smallest(deadline_s)
            settled = enough >= 0 and known.bound > enough
            if best is None or best.memory_bytes <= max(known.bound, enough) or settled:
                return
            if enough >= known.bound:
                budget, share = enough, 1.0
            else:
                budget = best.memory_bytes - 1
                if tests:
                    budget = (known.bound + budget) // 2
                tests, share = tests + 1, _SHARE_OF_A_TEST
            answer = self._solve("any", budget, deadline_s, share=share)
            known.reason = answer.reason
            if answer.infeasible:
                known.bound = self._reachable(budget + 1)

    def _reachable(self, bound_bytes: float) -> int:
        """The least peak memory at or above a bound: sizes are multiples of a common divisor."""
        above = math.ceil((bound_bytes - self.device.fixed_bytes) / self._divisor)
        return self.device.fixed_bytes + above * self._divisor

    def _fastest(self, budget: int) -> _Found | None:
        fits = (found for found in self.plans if found.memory_bytes <= budget)
        return min(fits, key=lambda found: found.time_s, default=None)

    def _smallest(self, deadline_s: float | None) -> _Found | None:
        in_time = (found for found in self.plans if not is_late(found.time_s, deadline_s))
        return min(in_time, key=lambda found: found.memory_bytes, default=None)

    def _add(self, column: IntArray) -> _Found:
        part = self.evaluate(column)
        found = _Found(
            column=column, memory_bytes=part.peak_memory_bytes, time_s=part.iteration_time_s
        )
        self.plans.append(found)
        return found

    def _solve(
        self, objective: str, budget: int, deadline_s: float | None, *, share: float = 1.0
    ) -> _Answer:
        """Run one program; its plan counts only once `evaluate` has checked it.

        A solver may take 1 - 1e-9 for 1 and so miss a deadline by a hair. Such a plan is cut
        off, by itself, and the program run again: bounds and infeasibility stay valid.
        """
        formulation = formulate(
            replace(self.problem, devices=(replace(self.device, memory_bytes=budget),)),
            deadline_s=deadline_s,
            device=self.device.name,
            objective="perturbation" if objective == "any" else objective,
            domains=[self.domain],
        )
        program = formulation.program
        if objective == "any":
            program = replace(program, objective=np.zeros(program.shape[1]))
        bound = None
        for _ in range(_MOST_CUTS):
            left_s = None if self._finish_s is None else self._finish_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                return _Answer(reason=_OUT_OF_TIME)
            limit_s = None if left_s is None else left_s * share
            solution = self._run(program, limit_s)
            if isinstance(solution, str):
                return _Answer(reason=solution)
            if solution.status == "infeasible":
                return _Answer(infeasible=True)
            if np.isfinite(solution.bound) and objective != "any":
                bound = solution.bound * formulation.objective_unit
                bound += self.device.fixed_bytes if objective == "memory" else 0
            if solution.values is None:
                return _Answer(bound=bound, reason=_OUT_OF_TIME)
            (_, column), *_ = formulation.read(solution.values)
            if self._obeys_rules(column):
                found = self._add(column)
                late = is_late(found.time_s, deadline_s)
                if found.memory_bytes <= budget and not late:
                    reason = "" if solution.status == "optimal" else _OUT_OF_TIME
                    return _Answer(bound=bound, reason=reason)
            (_, x), *_ = formulation.choices
            program = without_plan(program, np.unique(x[np.arange(len(column)), column]))
        return _Answer(bound=bound, reason="the solver kept returning plans that break a limit")

    def _run(self, program: LinearProgram, limit_s: float | None) -> ProgramSolution | str:
        """The solver's answer, or in words why there is none."""
        try:
            return solve_program(
                program,
                solver=self._parameters.solver,
                time_limit_s=limit_s,
                relative_gap=self._parameters.relative_gap,
                threads=self._parameters.threads,
                seed=self._parameters.seed,
            )
        except SolverUnavailableError as error:
            return str(error)
