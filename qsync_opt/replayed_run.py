"""`ReplayedRun`: the plan of least perturbation whose *replayed* step keeps the deadline.

`solve` holds the sum of a device's work against the deadline. Where the host limits, or
all-reduces slow the device down, the step takes longer than that (`replay`). Overlap only
changes constants of a kind's rows (`simulate.paths`), so such a kind is solved with

    optimizer + (1 - 1/s) sum_j c_j   and   c_k / s   in place of   optimizer   and   c_k,

which are the same rows. Paths through the host are many, so they are cuts made when needed:

1. Solve without them (`solve`, fast): a relaxation, because paths can only lengthen a step.
2. Replay the plan. A kind whose longest path keeps the deadline is done, and its plan optimal:
   it is the best of a larger set.
3. Else add its plan's longest paths as rows (`TimeCut`: no plan that keeps the deadline breaks
   them, and this plan does), solve the kind with them (`exact`, which prices them like the rows
   of time), and go on from 2. There are finitely many paths, so this ends; the last plan is
   optimal for the same reason as in 2.

A slack is taken of the fastest plan *by replay*, found the same way with the time minimised.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from qsync_opt.optimize.arrays import IntArray
from qsync_opt.optimize.evaluate import (
    TIME_TOLERANCE,
    evaluate_columns,
    plan_columns,
    plan_from_columns,
)
from qsync_opt.optimize.problem import AllocationProblem
from qsync_opt.optimize.result import (
    SEVERITY,
    DeviceResult,
    ReplayedTime,
    SolveParameters,
    SolveResult,
    SolveStatus,
    relative_gap,
)
from qsync_opt.optimize.solve import solve
from qsync_opt.plan import PrecisionPlan
from qsync_opt.replayed_kind import ROUNDING, Budget, KindFound, ReplayedKind
from qsync_opt.simulate.replay import replay
from qsync_opt.simulate.tasks import HostCosts


class ReplayedRun:
    """One call of `solve_replayed` for a problem whose buckets have constant times.

    Args:
        problem: see `solve_replayed`, as are the others.
        hosts: device kind -> what its host takes.
        method: `exact` or `auto`.
        parameters: options.
        hint: a plan to start from.
    """

    def __init__(
        self,
        problem: AllocationProblem,
        hosts: Mapping[str, HostCosts],
        method: str,
        parameters: SolveParameters,
        hint: PrecisionPlan | None,
    ) -> None:
        self._budget = Budget(parameters)
        self._problem, self._hosts, self._method = problem, hosts, method
        self._parameters = parameters
        self._hints = None if hint is None else plan_columns(problem, hint)
        self._kinds = [
            ReplayedKind(problem, d, hosts.get(d.name), self._budget) for d in problem.devices
        ]
        self._fastest_s: float | None = None

    def run(self) -> SolveResult:
        """Deadline, then every kind, then the result."""
        problem = self._problem
        deadline_s, failed = problem.deadline_s, None
        fastest: list[IntArray] | None = None
        if deadline_s is None:
            deadline_s, fastest, failed = self._deadline()
        if deadline_s is None or failed is not None:
            return self._without_plan(failed)
        relaxed = self._relaxed(deadline_s, self._hints)
        found = []
        for index, (kind, part) in enumerate(zip(self._kinds, relaxed, strict=True)):
            if part.column is None or kind.keeps(part.column, deadline_s):
                found.append(part)
                continue
            self._budget.share_time(len(self._kinds) - index)
            starts = [] if fastest is None else [fastest[index]]
            if self._hints is not None:
                starts.append(self._hints[index])
            in_time = kind.first_in_time(deadline_s, part.column)
            starts += [] if in_time is None else [in_time]
            found.append(kind.solve(deadline_s, part.column, starts, part.bound))
        return self._settle(deadline_s, found)

    def find_deadline(self) -> tuple[float, float] | SolveResult:
        """Deadline and fastest time by replay, seconds; or the result that says why not."""
        deadline_s, _, failed = self._deadline()
        if deadline_s is None or failed is not None or self._fastest_s is None:
            return self._without_plan(failed)
        return deadline_s, self._fastest_s

    # -- the relaxation --------------------------------------------------------------------

    def _relaxed(
        self, deadline_s: float | None, hints: Sequence[IntArray] | None
    ) -> list[KindFound]:
        """The best (without a deadline, the fastest) plans without paths through hosts."""
        names = [device.name for device in self._problem.devices]
        if not any(kind.overlaps for kind in self._kinds):
            posed = replace(self._problem, deadline_s=deadline_s, slack=0.0)
            hint = None if hints is None else plan_from_columns(posed, list(hints))
            method = "fastest" if deadline_s is None else "exact"
            result = solve(posed, method=method, parameters=self._budget.left(), hint=hint)
            columns = (
                [None] * len(names) if result.plan is None else plan_columns(posed, result.plan)
            )
            return [
                self._part(result, name, column)
                for name, column in zip(names, columns, strict=True)
            ]
        parts = []
        for index, kind in enumerate(self._kinds):
            result = kind.relaxed(deadline_s, None if hints is None else hints[index])
            column = None if result.plan is None else plan_columns(kind.single, result.plan)[0]
            parts.append(self._part(result, names[index], column))
        return parts

    def _part(self, result: SolveResult, name: str, column: IntArray | None) -> KindFound:
        self._budget.interrupted |= result.status is SolveStatus.INTERRUPTED
        part = result.devices[name]
        return KindFound(
            status=part.status,
            column=column,
            objective=math.inf if part.objective is None else part.objective,
            bound=-math.inf if part.bound is None else part.bound,
            statistics=dict(part.statistics),
        )

    def _deadline(self) -> tuple[float | None, list[IntArray] | None, list[KindFound] | None]:
        """(1 + slack) x the fastest replayed time, the plans, and what failed if one did."""
        parts = self._relaxed(None, None)
        columns = []
        for part in parts:
            if part.column is None:
                return None, None, parts
            columns.append(part.column)
        least = max(
            kind.paths.device_time_s(column)
            for kind, column in zip(self._kinds, columns, strict=True)
        )
        fastest_s = least
        for index, kind in enumerate(self._kinds):
            if kind.paths.time_s(columns[index]) <= fastest_s * (1 + ROUNDING):
                continue
            self._budget.share_time(2 * len(self._kinds) - index)  # the plans are still to be found
            part = kind.solve(None, columns[index], (), parts[index].bound)
            gap = relative_gap(part.objective, part.bound)
            is_close = gap is not None and gap <= self._parameters.relative_gap
            if part.column is None or not (is_close or part.status is SolveStatus.OPTIMAL):
                parts[index] = part
                return None, None, parts
            columns[index] = part.column
            fastest_s = max(fastest_s, part.objective)
        self._fastest_s = fastest_s
        self._budget.share_time(1)
        return (1.0 + self._problem.slack) * fastest_s, columns, None

    # -- the result ------------------------------------------------------------------------

    def _settle(self, deadline_s: float, found: list[KindFound]) -> SolveResult:
        """The result; where rows were not enough, plans that surely keep the deadline."""
        columns = [part.column for part in found if part.column is not None]
        unsure = [index for index, kind in enumerate(self._kinds) if kind.unsure]
        if len(columns) == len(found) and unsure and not self._in_time(columns, deadline_s):
            for index in unsure:
                kind, bound = self._kinds[index], found[index].bound
                kind.use_worst()
                part = kind.solve(deadline_s, columns[index], (), bound)
                part.bound = bound  # that of the worst case is none of all plans
                if part.status is SolveStatus.INFEASIBLE:
                    part.status = SolveStatus.NO_PLAN_FOUND
                elif part.status is SolveStatus.OPTIMAL:
                    close = part.objective - bound <= self._parameters.relative_gap * part.objective
                    part.status = SolveStatus.OPTIMAL if close else SolveStatus.HEURISTIC
                found[index] = part
            columns = [part.column for part in found if part.column is not None]
        return self._result(deadline_s, found, columns if len(columns) == len(found) else None)

    def _in_time(self, columns: list[IntArray], deadline_s: float) -> bool:
        plan = plan_from_columns(self._problem, columns)
        told = replay(self._problem, plan, hosts=self._hosts)
        return told.iteration_time_s <= deadline_s * (1 + TIME_TOLERANCE)

    def _without_plan(self, found: list[KindFound] | None) -> SolveResult:
        return self._result(None, found or [], None)

    def _result(
        self, deadline_s: float | None, found: list[KindFound], columns: list[IntArray] | None
    ) -> SolveResult:
        problem = self._problem
        status = min((part.status for part in found), key=SEVERITY.index)
        plan = evaluation = replayed = None
        reason = None
        if columns is not None:
            plan = plan_from_columns(problem, columns)
            evaluation = evaluate_columns(problem, columns, deadline_s)
            told = replay(problem, plan, hosts=self._hosts)
            replayed = ReplayedTime(
                iteration_time_s=told.iteration_time_s,
                additive_time_s=evaluation.iteration_time_s,
                cuts=sum(len(kind.cuts) for kind in self._kinds),
            )
            late = deadline_s is not None and told.iteration_time_s > deadline_s * (
                1 + 2 * TIME_TOLERANCE
            )
            if late or not evaluation.feasible:
                reason = f"the plan breaks a rule: its step takes {told.iteration_time_s} s"
                plan, evaluation, replayed = None, None, None
                status = SolveStatus.SOLVER_ERROR
        objective = None if evaluation is None else evaluation.perturbation
        bound = self._bound(found) if deadline_s is not None else None
        if bound is not None and objective is not None:
            bound = min(bound, objective)
        return SolveResult(
            method="exact",
            status=status,
            plan=plan,
            evaluation=evaluation,
            objective=objective,
            bound=bound,
            gap=relative_gap(objective, bound),
            deadline_s=deadline_s,
            fastest_time_s=self._fastest_s,
            fallback_reason=reason,
            notes=(),
            devices=MappingProxyType(self._devices(found)),
            solve_s=self._budget.elapsed_s(),
            parameters=self._parameters,
            replayed=replayed,
        )

    def _bound(self, found: list[KindFound]) -> float | None:
        if not all(math.isfinite(part.bound) for part in found):
            return None
        devices = self._problem.devices
        return sum(
            self._problem.weight(device) * part.bound
            for device, part in zip(devices, found, strict=True)
        )

    def _devices(self, found: list[KindFound]) -> Mapping[str, DeviceResult]:
        results = {}
        for device, part in zip(self._problem.devices, found, strict=True):
            objective = part.objective if part.column is not None else None
            bound = part.bound if math.isfinite(part.bound) else None
            results[device.name] = DeviceResult(
                status=part.status,
                objective=objective,
                bound=bound,
                gap=relative_gap(objective, bound),
                same_as=None,
                solve_s=0.0,
                statistics=MappingProxyType(part.statistics),
            )
        return results
