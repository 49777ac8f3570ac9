"""`ReplayedBits`: precisions and bits of buckets together, where the replayed step must be in time.

Bits decide how long the network takes, and so what hosts leave room for. At given bits
`ReplayedRun` finds the best plan; which bits are tried, and in which order, is decided here:

1. Those of the plan that `solve` finds with all hosts left out, for the deadline and for nearer
   ones until it is in time, those of the hint, and those that are reduced soonest.
2. From the best of them on, other bits for one bucket at a time, while that helps.
3. All others, in the order of a lower bound: what the bits themselves add to the variance, and
   the least that precisions add when the network is as fast as it can be. The search ends,
   with a proof, where this bound reaches the best plan.

Bits are not tried where the best plan with hosts left out is no better than what is known: paths
through hosts only lengthen a step. So the bound is that of the solve over all bits, or, where the
search ends early, the least that bits not tried could give.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from qsync_opt.optimize.arrays import IntArray
from qsync_opt.optimize.evaluate import (
    TIME_TOLERANCE,
    evaluate_columns,
    plan_columns,
    plan_from_columns,
)
from qsync_opt.optimize.problem import AllocationProblem
from qsync_opt.optimize.result import SolveParameters, SolveResult, SolveStatus, relative_gap
from qsync_opt.optimize.solve import solve
from qsync_opt.plan import PrecisionPlan, sending_text
from qsync_opt.replayed_kind import Budget
from qsync_opt.replayed_run import ReplayedRun
from qsync_opt.simulate.replay import replay
from qsync_opt.simulate.tasks import HostCosts

Bits = tuple[int, ...]

#: Bits of buckets that are tried at most: each takes a solve, some several.
_MOST_TRIES = 100

#: Deadlines tried for a first plan in time, each nearer by what was missed.
_TIGHTENINGS = 4

#: How much nearer than by what was missed, so that plans that differ little are in time.
_FURTHER = 1.2

_STOPPED = (SolveStatus.INTERRUPTED, SolveStatus.TIME_LIMIT)


class ReplayedBits:
    """One call of `solve_replayed` for a problem in which bits of buckets are a decision.

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
        self._hint = hint
        self._fastest_s: float | None = None
        self._best: tuple[float, Bits, SolveResult] | None = None
        self._tried: dict[Bits, SolveResult | None] = {}
        self._stopped: SolveStatus | None = None
        #: Least bound of bits that were tried.
        self._unsure = math.inf

    def run(self) -> SolveResult:
        """Deadline, then bits, then the result."""
        deadline_s = self._problem.deadline_s
        if deadline_s is None:
            soonest = self._problem.at_bits(self._problem.fastest_bits)
            run = ReplayedRun(soonest, self._hosts, self._method, self._budget.left(), None)
            found = run.find_deadline()
            if isinstance(found, SolveResult):
                return found
            deadline_s, self._fastest_s = found
        held = replace(self._problem, deadline_s=deadline_s, slack=0.0)
        hint = self._hint_at(held)
        free = solve(held, method=self._method, parameters=self._budget.left(), hint=hint)
        if free.plan is None:
            return free
        if free.status is SolveStatus.INTERRUPTED:  # its plan is not known to be in time
            return replace(free, plan=None, evaluation=None, objective=None, gap=None, notes=())
        for start in (free.plan, hint):
            if start is not None:
                self._try(held, self._full(start.communication), plan_columns(held, start))
        columns = plan_columns(held, free.plan)
        for sooner in self._sooner(held, free.plan):
            self._try(held, self._full(sooner.communication), plan_columns(held, sooner))
        self._try(held, held.fastest_bits, columns)
        if self._best is None:
            # Other bits only make the step longer: what is said of these is said of all.
            said = self._tried.get(held.fastest_bits)
            if said is None:  # there was no time to try them
                said = replace(free, status=self._stopped or SolveStatus.NO_PLAN_FOUND)
            return replace(said, plan=None, evaluation=None, objective=None, gap=None)
        self._descend(held, columns)
        rest = self._search(held, columns)
        _, bits, result = self._best
        return self._result(held, free, min(rest, self._unsure), bits, result)

    def _hint_at(self, held: AllocationProblem) -> PrecisionPlan | None:
        """The hint as a plan of the problem with its deadline."""
        if self._hint is None:
            return None
        columns = plan_columns(self._problem, self._hint)
        return plan_from_columns(held, columns, self._hint.communication)

    def _sooner(self, held: AllocationProblem, plan: PrecisionPlan) -> Iterator[PrecisionPlan]:
        """Plans for deadlines nearer by what hosts took, until one is in time."""
        deadline_s = wanted_s = held.deadline_s or math.inf
        for _ in range(_TIGHTENINGS):
            told_s = replay(held, plan, hosts=self._hosts).iteration_time_s
            if told_s <= wanted_s * (1 + TIME_TOLERANCE) or self._is_over():
                return
            deadline_s -= _FURTHER * (told_s - wanted_s)
            if deadline_s <= 0.0:
                return
            nearer = replace(held, deadline_s=deadline_s)
            found = solve(nearer, method=self._method, parameters=self._budget.left())
            self._note(found.status)
            if found.plan is None:
                return
            columns = plan_columns(nearer, found.plan)
            plan = plan_from_columns(held, columns, found.plan.communication)
            yield plan

    def _full(self, bits: Bits) -> Bits:
        """With an entry for every bucket, where none stands for 32 bits everywhere."""
        return bits or tuple(bucket.choices[0].bits for bucket in self._problem.buckets)

    # -- trying bits -----------------------------------------------------------------------

    def _try(self, held: AllocationProblem, bits: Bits, columns: list[IntArray]) -> None:
        """Find the best plan at some bits, unless it cannot be better than what is known."""
        if bits in self._tried or self._is_over():
            return
        self._tried[bits] = None
        fixed, added = held.at_bits(bits), held.bits_perturbation(bits)
        start = plan_from_columns(fixed, columns)
        bound = -math.inf
        if self._best is not None:
            free = solve(fixed, method=self._method, parameters=self._budget.left(), hint=start)
            self._note(free.status)
            bound = added + (-math.inf if free.bound is None else free.bound)
            if free.status is SolveStatus.INFEASIBLE or bound >= self._enough():
                return
            if self._is_over():
                self._unsure = min(self._unsure, bound)
                return
            start = start if free.plan is None else free.plan
        run = ReplayedRun(fixed, self._hosts, self._method, self._budget.left(), start)
        result = self._tried[bits] = run.run()
        self._note(result.status)
        if result.status is not SolveStatus.INFEASIBLE:
            low = -math.inf if result.bound is None else added + result.bound
            self._unsure = min(self._unsure, max(low, bound))
        if result.objective is not None and result.plan is not None:
            objective = result.objective + added
            if self._best is None or objective < self._best[0]:
                self._best = (objective, bits, result)

    def _enough(self) -> float:
        """An objective from which on nothing is better by more than the gap asked for."""
        if self._best is None:
            return math.inf
        return self._best[0] * (1.0 - self._budget.parameters.relative_gap)

    def _note(self, status: SolveStatus) -> None:
        if status in _STOPPED:
            self._stopped = status

    def _is_over(self) -> bool:
        late = self._budget.left().time_limit_s == 0.0
        if late and self._stopped is None:
            self._stopped = SolveStatus.TIME_LIMIT
        return self._stopped is not None or len(self._tried) >= _MOST_TRIES

    def _descend(self, held: AllocationProblem, columns: list[IntArray]) -> None:
        """Other bits for one bucket at a time, those first that add least to the variance."""
        is_better = self._best is not None
        while is_better:
            is_better = False
            for k, bucket in enumerate(held.buckets):
                for code in sorted(bucket.choices, key=lambda code: code.perturbation):
                    if self._best is None:
                        return
                    before, bits, _ = self._best
                    self._try(held, (*bits[:k], code.bits, *bits[k + 1 :]), columns)
                    if self._best[0] < before:
                        is_better = True
                        break

    def _search(self, held: AllocationProblem, columns: list[IntArray]) -> float:
        """All other bits by their bound, until none can be better; the bound of the next."""
        soonest = held.at_bits(held.fastest_bits)
        start = plan_from_columns(soonest, columns)
        least = solve(soonest, method=self._method, parameters=self._budget.left(), hint=start)
        self._note(least.status)
        if least.bound is None:
            return -math.inf
        for added, bits in _by_perturbation(held):
            if added + least.bound >= self._enough():
                return math.inf
            if bits not in self._tried and self._is_over():
                return added + least.bound
            self._try(held, bits, columns)
        return math.inf

    # -- the result ------------------------------------------------------------------------

    def _result(
        self,
        held: AllocationProblem,
        free: SolveResult,
        rest: float,
        bits: Bits,
        result: SolveResult,
    ) -> SolveResult:
        """The best result, at some bits, as one of the problem that leaves them open."""
        columns = plan_columns(held.at_bits(bits), result.require_plan())
        plan = plan_from_columns(held, columns, bits)
        evaluation = evaluate_columns(held, columns, result.deadline_s, bits)
        objective = evaluation.perturbation
        least = -math.inf if free.bound is None else free.bound
        bound = min(objective, max(least, min(rest, self._enough())))
        gap = relative_gap(objective, bound)
        is_proven = gap is not None and gap <= self._budget.parameters.relative_gap
        status = SolveStatus.OPTIMAL if is_proven else self._stopped or SolveStatus.HEURISTIC
        note = f"{sending_text(plan.communication)}, of {len(self._tried)} choices looked at"
        return replace(
            result,
            status=status,
            plan=plan,
            evaluation=evaluation,
            objective=objective,
            bound=bound if math.isfinite(bound) else None,
            gap=gap,
            fastest_time_s=self._fastest_s,
            notes=(*result.notes, note),
            solve_s=self._budget.elapsed_s(),
            parameters=self._budget.parameters,
        )


def _by_perturbation(problem: AllocationProblem) -> Iterator[tuple[float, Bits]]:
    """All bits of buckets, those first that add least to the variance."""
    rows = [sorted(b.choices, key=lambda code: code.perturbation) for b in problem.buckets]

    def total(picks: tuple[int, ...]) -> float:
        return math.fsum(row[pick].perturbation for row, pick in zip(rows, picks, strict=True))

    first = (0,) * len(rows)
    heap, seen = [(total(first), first)], {first}
    while heap:
        added, picks = heapq.heappop(heap)
        yield added, tuple(row[pick].bits for row, pick in zip(rows, picks, strict=True))
        for k, pick in enumerate(picks):
            following = (*picks[:k], pick + 1, *picks[k + 1 :])
            if pick + 1 < len(rows[k]) and following not in seen:
                seen.add(following)
                heapq.heappush(heap, (total(following), following))
