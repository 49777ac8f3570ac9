"""`BitsRun`: one solve of a problem whose buckets have codes, by any method.

The iteration time is still a maximum over kinds, T(x, b) = max_r T_r(x_r, b), but the bits b are
shared, so the kinds fall apart only once b is fixed. The deadline is found at the fastest bits,
where T is least whatever the precisions. `bits` has the heuristic methods; the exact one starts
from their greedy plan and goes on with `joint_search`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from qsync_opt.errors import SolverUnavailableError
from qsync_opt.optimize.arrays import IntArray
from qsync_opt.optimize.bits import BitsMethods, BitsPlan
from qsync_opt.optimize.evaluate import evaluate_columns, plan_columns, plan_from_columns
from qsync_opt.optimize.floors import is_late
from qsync_opt.optimize.interrupter import Interrupter
from qsync_opt.optimize.joint_search import JointSearch
from qsync_opt.optimize.kind import Limits
from qsync_opt.optimize.polish import improve_columns
from qsync_opt.optimize.problem import AllocationProblem
from qsync_opt.optimize.result import (
    DeviceResult,
    Progress,
    SolveParameters,
    SolveResult,
    SolveStatus,
    relative_gap,
)
from qsync_opt.optimize.run import Run, distinct_kinds
from qsync_opt.optimize.workers import run_side_by_side
from qsync_opt.plan import PrecisionPlan, sending_text

#: Methods that start from the fastest plan.
_FROM_THE_FASTEST = ("auto", "exact", "greedy")

#: How often ties are settled: what one change opens up for others is looked at again.
_MOST_SETTLED = 10


class BitsRun:
    """One solve; see the module.

    Args:
        problem: a problem whose buckets have codes.
        method: see `solve`.
        parameters: see `SolveParameters`.
        hint: a plan of the problem to start from.

    Raises:
        PlanError: the hint is for another problem.
    """

    def __init__(
        self,
        problem: AllocationProblem,
        method: str,
        parameters: SolveParameters,
        hint: PrecisionPlan | None,
    ) -> None:
        self._problem, self._method, self._parameters = problem, method, parameters
        self._hint = None if hint is None else (plan_columns(problem, hint), hint.communication)
        self._limits = Limits(
            began=time.perf_counter(),
            time_limit_s=parameters.time_limit_s,
            interrupter=Interrupter(),
        )
        self._kinds = distinct_kinds(problem)
        self._deadline_s = problem.deadline_s
        self._fastest_s: float | None = None
        self._interrupted = False
        self._trouble: str | None = None

    def run(self) -> SolveResult:
        """Deadline, then the method, then the result."""
        at_soonest = self._problem.at_bits(self._problem.fastest_bits)
        seeking = self._method if self._method == "brute_force" else "fastest"
        soonest = Run(at_soonest, seeking, self._parameters)
        if self._method == "fastest":
            return self._of_run(soonest.run())
        fastest = None
        if self._method in _FROM_THE_FASTEST:
            fastest = soonest.find_fastest()
        else:
            soonest.find_deadline()
        self._interrupted = soonest.interrupted
        deadline_s, self._fastest_s = soonest.deadline_s, soonest.fastest_s
        impossible = soonest.status() is SolveStatus.INFEASIBLE
        if deadline_s is None or impossible or self._interrupted:
            return self._of_run(soonest.result())
        self._deadline_s, self._trouble = deadline_s, soonest.trouble()
        if fastest is not None and is_late(max(found.bound for found in fastest), deadline_s):
            return self._result(SolveStatus.INFEASIBLE, None, None, {})
        columns = None
        if fastest is not None:
            columns = [found.column for found in fastest if found.column is not None]
        methods = BitsMethods(self._problem, deadline_s, self._limits.stop)
        if self._method in ("auto", "exact"):
            return self._exact(methods, columns, deadline_s)
        return self._heuristic(methods, columns)

    def _do(self, job: Callable[[], None]) -> bool:
        """A job that Ctrl-C ends with what it has; says whether its back end failed."""
        outcomes, interrupted = run_side_by_side([job], 1, self._limits.interrupter.interrupt)
        self._interrupted |= interrupted
        error = outcomes[0].error
        if error is None:
            return False
        if not isinstance(error, SolverUnavailableError):
            raise error
        self._trouble = str(error)
        return True

    # -- the methods -----------------------------------------------------------------------

    def _heuristic(self, methods: BitsMethods, fastest: list[IntArray] | None) -> SolveResult:
        found: list[BitsPlan | None] = []
        tasks: dict[str, Callable[[], BitsPlan | None]] = {
            "uniform": methods.uniform,
            "greedy": lambda: methods.greedy(fastest),
            "random": lambda: methods.random(self._parameters.seed),
            "brute_force": methods.brute_force,
        }
        self._do(lambda: found.append(tasks[self._method]()))
        plan = found[0] if found else None
        if self._method == "brute_force":
            status = SolveStatus.INFEASIBLE if plan is None else SolveStatus.OPTIMAL
        else:
            status = SolveStatus.NO_PLAN_FOUND if plan is None else SolveStatus.HEURISTIC
        if self._interrupted:
            status = SolveStatus.INTERRUPTED
        proven = status is SolveStatus.OPTIMAL and plan is not None
        bound = plan.evaluation.perturbation if proven and plan is not None else None
        return self._result(status, plan, bound, {"bit_vectors": float(methods.tried)})

    def _exact(
        self, methods: BitsMethods, fastest: list[IntArray] | None, deadline_s: float
    ) -> SolveResult:
        search = JointSearch(
            self._problem,
            self._kinds,
            deadline_s,
            parameters=self._parameters,
            limits=self._limits,
            report=self._report,
        )
        best = search.incumbent

        def begin() -> None:
            if self._hint is not None:
                best.offer(best.flat(*self._hint))
            if self._parameters.plain:
                search.solve_plainly()
                return
            # Exact is never worse than greedy because greedy's plan is where it starts.
            greedy = methods.greedy(fastest)
            if greedy is not None:
                best.offer(best.flat(greedy.columns, greedy.bits))
            search.climb()

        failed = self._do(begin)
        if not (self._parameters.plain or failed or search.is_over):
            failed = self._do(search.settle)
        found = search.solution()
        status = found.status
        if failed and status is not SolveStatus.OPTIMAL:
            status = SolveStatus.SOLVER_ERROR
        statistics = {**found.statistics, "bit_vectors": float(len(best.tried))}
        if found.column is None and status is not SolveStatus.INFEASIBLE:
            return self._fall_back(methods, fastest, status, statistics)
        plan = None
        if found.column is not None:
            columns, bits = best.read(found.column)
            judged = evaluate_columns(self._problem, columns, deadline_s, bits)
            plan = BitsPlan(columns=columns, bits=bits, evaluation=judged)
            # What the gap leaves: bits that a fast cluster of codes gave up for nothing.
            plan = self._settled(methods.raised(plan), deadline_s)
        known = status is not SolveStatus.INFEASIBLE and math.isfinite(found.bound)
        return self._result(status, plan, found.bound if known else None, statistics)

    def _fall_back(
        self,
        methods: BitsMethods,
        fastest: list[IntArray] | None,
        status: SolveStatus,
        statistics: dict[str, float],
    ) -> SolveResult:
        """Where the exact method has no plan: with `auto` greedy's, and why."""
        plans: list[BitsPlan | None] = [None]
        if self._method == "auto":
            self._do(lambda: plans.append(methods.greedy(fastest)))
        if plans[-1] is None:
            return self._result(status, None, None, statistics)
        reason = self._trouble or status.value
        self._trouble = f"exact found no plan ({reason}); this is greedy's"
        self._method = "greedy"
        if status is not SolveStatus.INTERRUPTED:
            status = SolveStatus.HEURISTIC
        return self._result(status, plans[-1], None, statistics)

    def _settled(self, plan: BitsPlan, deadline_s: float) -> BitsPlan:
        """Among equal objectives prefer the smaller iteration time, then lower columns."""
        fixed, settled = self._problem.at_bits(plan.bits), list(plan.columns)
        for members in self._kinds:
            column, device = settled[members[0]], fixed.devices[members[0]]
            for _ in range(_MOST_SETTLED):
                if self._limits.interrupter.stopped:
                    break
                better = improve_columns(
                    fixed, device, deadline_s, column, self._limits.stop, exchanges=0
                )
                if better is None or np.array_equal(better, column):
                    break
                column = better
            for index in members:
                settled[index] = column
        evaluation = evaluate_columns(self._problem, settled, deadline_s, plan.bits)
        return BitsPlan(columns=settled, bits=plan.bits, evaluation=evaluation)

    def _report(self, phase: str, objective: float | None, bound: float | None) -> None:
        if self._parameters.progress is not None:
            self._parameters.progress(
                Progress(
                    device="",
                    phase=phase,
                    objective=objective,
                    bound=bound,
                    elapsed_s=time.perf_counter() - self._limits.began,
                )
            )

    # -- the result ------------------------------------------------------------------------

    def _of_run(self, found: SolveResult) -> SolveResult:
        """The result of a run at the fastest bits as one of this problem."""
        plan = evaluation = None
        if found.plan is not None:
            bits = self._problem.fastest_bits
            columns = plan_columns(self._problem.at_bits(bits), found.plan)
            plan = plan_from_columns(self._problem, columns, bits)
            evaluation = evaluate_columns(self._problem, columns, found.deadline_s, bits)
        method = "exact" if self._method == "auto" else self._method
        return replace(
            found,
            method=method,
            plan=plan,
            evaluation=evaluation,
            objective=None if evaluation is None else evaluation.perturbation,
            bound=None,
            gap=None,
            notes=() if plan is None else (*found.notes, sending_text(plan.communication)),
            solve_s=time.perf_counter() - self._limits.began,
            parameters=self._parameters,
        )

    def _result(
        self,
        status: SolveStatus,
        found: BitsPlan | None,
        bound: float | None,
        statistics: dict[str, float],
    ) -> SolveResult:
        problem, reason = self._problem, self._trouble
        if found is not None and not found.evaluation.feasible:
            reason = f"the plan breaks a rule: {found.evaluation.violations[0]}"
            found, status = None, SolveStatus.SOLVER_ERROR
        evaluation = None if found is None else found.evaluation
        plan = None
        if found is not None:
            plan = plan_from_columns(problem, found.columns, found.bits)
        objective = None if evaluation is None else evaluation.perturbation
        if bound is not None and objective is not None:
            bound = min(bound, objective)
        solve_s = time.perf_counter() - self._limits.began
        devices = {
            device.name: DeviceResult(
                status=status,
                objective=(
                    None if evaluation is None else evaluation.devices[device.name].perturbation
                ),
                bound=None,
                gap=None,
                same_as=None,
                solve_s=solve_s,
                statistics=MappingProxyType(statistics),
            )
            for device in problem.devices
        }
        return SolveResult(
            method="exact" if self._method == "auto" else self._method,
            status=status,
            plan=plan,
            evaluation=evaluation,
            objective=objective,
            bound=bound,
            gap=relative_gap(objective, bound),
            deadline_s=self._deadline_s,
            fastest_time_s=self._fastest_s,
            fallback_reason=reason,
            notes=() if found is None else (sending_text(found.bits),),
            devices=MappingProxyType(devices),
            solve_s=solve_s,
            parameters=self._parameters,
        )
