"""`ReplayedKind`: one device kind solved under replay, with cuts for the paths through its host.

See `replayed`, which makes the deadline and puts the kinds together.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from qsync_opt.optimize.arrays import IntArray
from qsync_opt.optimize.cuts import TimeCut
from qsync_opt.optimize.evaluate import (
    TIME_TOLERANCE,
    broken_rules,
    evaluate_device,
    plan_columns,
    plan_from_columns,
)
from qsync_opt.optimize.exact import KindSolver
from qsync_opt.optimize.problem import AllocationProblem, DeviceKind
from qsync_opt.optimize.proof import KindSolution
from qsync_opt.optimize.result import Progress, SolveParameters, SolveResult, SolveStatus
from qsync_opt.optimize.solve import solve
from qsync_opt.simulate.paths import KindPaths, violated
from qsync_opt.simulate.tasks import HostCosts

#: The fastest time is proven to this fraction of the gap asked for, as `solve` does where kinds
#: are large: a deadline looser by it moves the objective by about as much as the gap allows.
_FASTEST_GAP_FRACTION = 0.1

#: How much wider the gap is while plans still give new cuts; most do so near the optimum too.
_COARSER = 20.0

#: Deadlines tried for a first plan in time, each the last one shortened by what was missed.
_TIGHTENINGS = 4

#: Rounding of sums of floats, relative.
ROUNDING = 1e-11


class Budget:
    """The options of a call, and the time it has left.

    Attributes:
        parameters: of the call.
        interrupted: whether Ctrl-C came.
    """

    def __init__(self, parameters: SolveParameters) -> None:
        self.parameters = parameters
        self.interrupted = False
        self._began = time.perf_counter()
        self._until_s = math.inf

    def share_time(self, kinds: int) -> None:
        """From now on leave as much time for other kinds as for the one that is solved."""
        limit = self.parameters.time_limit_s
        if limit is not None:
            elapsed = self.elapsed_s()
            self._until_s = elapsed + (limit - elapsed) / kinds

    def left(self) -> SolveParameters:
        """The options, with the time that is left."""
        limit = self.parameters.time_limit_s
        if limit is None:
            return self.parameters
        left = max(min(limit, self._until_s) - self.elapsed_s(), 0.0)
        return replace(self.parameters, time_limit_s=left)

    def elapsed_s(self) -> float:
        """Since the call began."""
        return time.perf_counter() - self._began

    def stopped(self) -> bool:
        """Whether to give up now."""
        return self.interrupted or self.left().time_limit_s == 0.0


@dataclass(kw_only=True, eq=False)
class KindFound:
    """What is known of one kind.

    Attributes:
        status: why the search stopped.
        column: the best plan in time, [N]; None without one.
        objective: perturbation of the plan, or its replayed time.
        bound: proven lower bound.
    """

    status: SolveStatus
    column: IntArray | None = None
    objective: float = math.inf
    bound: float = -math.inf
    statistics: dict[str, float] = field(default_factory=dict)


class ReplayedKind:
    """One device kind, its paths, and the cuts made so far."""

    def __init__(
        self,
        problem: AllocationProblem,
        device: DeviceKind,
        host: HostCosts | None,
        budget: Budget,
    ) -> None:
        self.device, self._budget = device, budget
        slowed = 0.0 if host is None else 1.0 - 1.0 / host.overlap_slowdown
        self.overlaps = slowed > 0.0
        self.unsure = self.overlaps and host is not None and host.waits
        self._problem, self._host = problem, host
        self.paths = KindPaths(problem, device, host)
        total_s = sum(bucket.all_reduce_s for bucket in problem.buckets)
        alone = replace(
            device,
            workers=1,
            batch_share=1.0,
            optimizer_s=device.optimizer_s + slowed * total_s,
        )
        self.single = replace(
            problem,
            devices=(alone,),
            buckets=tuple(
                replace(bucket, all_reduce_s=bucket.all_reduce_s * (1.0 - slowed))
                for bucket in problem.buckets
            ),
            deadline_s=None,
            slack=0.0,
        )
        self.cuts: dict[str, TimeCut] = {}

    def use_worst(self) -> None:
        """From now on count every reduction as overlapping: enough, but not needed."""
        self.paths = KindPaths(self._problem, self.device, self._host, worst=True)
        self.cuts = {}

    def keeps(self, column: IntArray, deadline_s: float) -> bool:
        """Whether the replayed step of this kind ends in time."""
        return self.paths.time_s(column) <= deadline_s * (1 + TIME_TOLERANCE)

    def relaxed(self, deadline_s: float | None, hint: IntArray | None) -> SolveResult:
        """The best plan without paths through the host, alone; the fastest without a deadline."""
        posed = replace(self.single, deadline_s=deadline_s)
        plan = None if hint is None else plan_from_columns(posed, [hint])
        method = "fastest" if deadline_s is None else "exact"
        return solve(posed, method=method, parameters=self._budget.left(), hint=plan)

    def first_in_time(self, deadline_s: float, column: IntArray) -> IntArray | None:
        """A plan in time, from solves with deadlines ever shorter; None if that finds none."""
        held = deadline_s
        for _ in range(_TIGHTENINGS):
            held *= deadline_s / self.paths.time_s(column)
            result = self.relaxed(held, None)
            if result.plan is None or self._budget.stopped():
                return None
            (column,) = plan_columns(self.single, result.plan)
            if self.keeps(column, deadline_s):
                return column
        return None

    def solve(
        self, deadline_s: float | None, first: IntArray, starts: Sequence[IntArray], bound: float
    ) -> KindFound:
        """Steps 2 and 3 of the module, or the same with the time minimised.

        Args:
            deadline_s: None minimises the replayed time.
            first: the best plan of the relaxation, whose longest paths are the first cuts.
            starts: plans that may be in time.
            bound: of the relaxation.
        """
        budget, parameters = self._budget, self._budget.parameters
        minimise = deadline_s is None
        gap = parameters.relative_gap * (_FASTEST_GAP_FRACTION if minimise else 1.0)
        found = KindFound(status=SolveStatus.TIME_LIMIT, bound=bound)
        for column in (first, *starts):
            self._offer(found, column, deadline_s)
        self._add_cuts(first, self._limit(deadline_s, first))
        asked = _COARSER * gap
        while not budget.stopped():
            answer = self._with_cuts(deadline_s, asked, found)
            found.bound = max(found.bound, answer.bound)
            if answer.column is None:
                break
            self._offer(found, answer.column, deadline_s)
            if self._proven(found, gap):
                break
            limit_s = self._limit(deadline_s, answer.column)
            if self._add_cuts(answer.column, limit_s):
                if deadline_s is not None:
                    self._shorten(found, answer.column, deadline_s, asked)
            elif asked > gap and answer.status is SolveStatus.OPTIMAL:
                asked = gap
            else:
                break  # its plan is in time, so the time ran out before the proof
        self._conclude(found, gap)
        found.statistics["cuts"] = float(len(self.cuts))
        return found

    def _with_cuts(self, deadline_s: float | None, gap: float, found: KindFound) -> KindSolution:
        """The best plan that keeps the cuts made so far."""
        budget, parameters = self._budget, self._budget.parameters
        solver = KindSolver(
            self.single,
            self.single.devices[0],
            deadline_s=deadline_s,
            relative_gap=gap,
            solver=parameters.solver,
            seed=parameters.seed,
            time_left=lambda: budget.left().time_limit_s,
            stop=budget.stopped,
            report=self._report,
            plain=parameters.plain,
            cuts=tuple(self.cuts.values()),
        )
        _count(found, "rounds")
        try:
            return solver.solve([] if found.column is None else [found.column])
        except KeyboardInterrupt:
            budget.interrupted = True
            return solver.solution()

    def _shorten(self, found: KindFound, column: IntArray, deadline_s: float, gap: float) -> None:
        """A plan in time where one is late by little: the best for a deadline as much shorter."""
        late = self.paths.time_s(column) / deadline_s
        if late > 1.0 and not self._proven(found, gap):
            answer = self._with_cuts(deadline_s / late, gap, KindFound(status=found.status))
            if answer.column is not None:
                self._offer(found, answer.column, deadline_s)

    def _report(self, phase: str, objective: float | None, bound: float | None) -> None:
        budget = self._budget
        if budget.parameters.progress is not None:
            budget.parameters.progress(
                Progress(
                    device=self.device.name,
                    phase=f"{phase}, {len(self.cuts)} cuts",
                    objective=objective,
                    bound=bound,
                    elapsed_s=budget.elapsed_s(),
                )
            )

    def _limit(self, deadline_s: float | None, column: IntArray) -> float:
        """Paths longer than this are not yet in the program, or its solver let them through."""
        if deadline_s is not None:
            return deadline_s * (1 + TIME_TOLERANCE)
        longest = max((c.length_s(self.device, column) for c in self.cuts.values()), default=0.0)
        return max(self.paths.device_time_s(column), longest) * (1 + ROUNDING)

    def _add_cuts(self, column: IntArray, limit_s: float) -> bool:
        fresh = False
        for path in violated(self.paths.host_paths(column), limit_s):
            cut = self.paths.cut(column, path)
            fresh |= cut.name not in self.cuts
            self.cuts.setdefault(cut.name, cut)
        return fresh

    def _offer(self, found: KindFound, column: IntArray, deadline_s: float | None) -> None:
        """Take a plan that keeps all budgets, if it is better."""
        device = self.single.devices[0]
        part = evaluate_device(self.single, device, column)
        if part.peak_memory_bytes > device.memory_bytes or broken_rules(
            self.single, device, column
        ):
            return
        if deadline_s is not None and not self.keeps(column, deadline_s):
            return
        value = self.paths.time_s(column) if deadline_s is None else part.perturbation
        if value < found.objective:
            found.column, found.objective = column, value

    @staticmethod
    def _proven(found: KindFound, gap: float) -> bool:
        if found.column is None:
            return False
        return found.objective - found.bound <= max(gap, 2 * ROUNDING) * abs(found.objective)

    def _conclude(self, found: KindFound, gap: float) -> None:
        if self._proven(found, gap) or (found.column is not None and math.isinf(found.bound)):
            found.status = SolveStatus.OPTIMAL
        elif found.column is None and found.bound == math.inf:
            found.status = SolveStatus.INFEASIBLE
        elif self._budget.interrupted:
            found.status = SolveStatus.INTERRUPTED
        if found.column is not None:
            found.bound = min(found.bound, found.objective)


def _count(found: KindFound, name: str) -> None:
    found.statistics[name] = found.statistics.get(name, 0.0) + 1.0
