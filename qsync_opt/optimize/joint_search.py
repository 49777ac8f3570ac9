"""`JointSearch`: precisions of all kinds and bits of all buckets, solved to proven optimality.

The steps are those of `exact`, taken for all kinds at once:

1. The joint Lagrangian (`joint_lagrangian`) gives a lower bound L, prices, and plans with bits.
2. Those plans, and the caller's, give an incumbent U.
3. At the best prices, options of operators and codes of buckets that no plan below U (1 - gap)
   can take are dropped.
4. Where little stays open, it is one multiple-choice knapsack (`joint_core`), searched by
   labels. What those do not end is closed by bits: the combinations that are open are listed,
   and bounded by the kinds alone (`joint_apart`).
5. Where those are too many, what little is open goes to the back end as the joint program
   (`formulation`). Of much, branch on the operator or the bucket whose likely options differ
   most (`joint_branching`), and go on from 3.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from qsync_opt.optimize.arrays import FloatArray
from qsync_opt.optimize.climb import Climb, Point
from qsync_opt.optimize.core_labels import MERGED_WIDTHS, search_core
from qsync_opt.optimize.joint_apart import KindsApart
from qsync_opt.optimize.joint_branching import split_jointly
from qsync_opt.optimize.joint_core import (
    JointCore,
    NothingOpenError,
    OpenOptions,
    find_joint_core,
    open_options,
)
from qsync_opt.optimize.joint_incumbent import JointIncumbent
from qsync_opt.optimize.joint_lagrangian import JointLagrangian, NoPlanError
from qsync_opt.optimize.joint_program import joint_program, open_domains
from qsync_opt.optimize.kind import Limits
from qsync_opt.optimize.problem import AllocationProblem
from qsync_opt.optimize.proof import ROUNDING, KindSolution, Proof
from qsync_opt.optimize.proposals import BackEnd
from qsync_opt.optimize.result import SolveParameters, SolveStatus

#: Open choices in the cores that look for better plans.
_SMALL_CORES = (60, 240)

#: Open choices up to which labels are merged before combinations of bits are listed, not after.
_NARROW = 220

#: Steps of the search for prices that give a feasible plan.
_RAISES = 12

#: How often what is open is looked at again because a better plan left less of it.
_MOST_LOOKS = 8

#: As in `exact` and `cores`: nodes at which better plans are looked for, nodes after which few
#: enough open choices are all given to the back end, nodes in all, points a node may evaluate;
#: open choices that the back end is given rather than branched on, and rather than nothing.
_IMPROVED = frozenset(2**power for power in range(12))
_PATIENCE = 6
_MOST_BRANCHINGS = 60
_NODE_ROUNDS = 25
_FEW = 60
_FLOW = 400


class JointSearch:
    """The search; see the module.

    Args:
        problem: a problem whose buckets have codes.
        kinds: indices of equal device kinds, one list for each distinct kind.
        deadline_s: iteration time to keep.
        parameters: gap and back end.
        limits: when to stop.
        report: called with (phase, objective, bound) as the work goes on.

    Attributes:
        incumbent: the best plan so far.
    """

    def __init__(
        self,
        problem: AllocationProblem,
        kinds: Sequence[Sequence[int]],
        deadline_s: float,
        *,
        parameters: SolveParameters,
        limits: Limits,
        report: Callable[[str, float | None, float | None], None],
    ) -> None:
        self._problem, self._kinds, self._deadline_s = problem, kinds, deadline_s
        self.incumbent = JointIncumbent(problem, kinds, deadline_s)
        self._proof = Proof(
            self.incumbent,
            relative_gap=parameters.relative_gap,
            time_left=limits.time_left,
            stop=lambda: limits.interrupter.stopped,
        )
        self._back_end = BackEnd(
            solver=parameters.solver,
            seed=parameters.seed,
            relative_gap=self._proof.gap,
            time_left=limits.time_left,
            count=self._proof.count,
            interrupter=limits.interrupter,
        )
        self._report = report
        self._joint: JointLagrangian | None = None
        self._climbed: Climb | None = None
        self._apart = KindsApart(problem, self._proof, parameters, limits)
        self._proven: SolveStatus | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to do, or no time to do it."""
        return self._proven is not None or self._proof.is_over()

    def solution(self) -> KindSolution:
        """The state as it is; its column is flat (`JointIncumbent`)."""
        return self._proof.solution(self._proven)

    # -- the whole program at once ---------------------------------------------------------

    def solve_plainly(self) -> None:
        """Give the joint program to the back end as it is.

        Raises:
            SolverUnavailableError: the back end failed.
        """
        self._proof.raise_bound(self._flow(None, math.inf))

    def _flow(self, least: OpenOptions | None, threshold: float) -> float:
        """The joint program over the options below a threshold; a lower bound of all plans."""
        open_ = None
        if least is not None and self._joint is not None:
            open_ = open_domains(self._joint, least, threshold)
        return self._back_end.solve(
            joint_program(self._problem, self.incumbent, open_),
            self.incumbent,
            bound=self._proof.bound,
            threshold=threshold,
        )

    # -- steps 1 and 2 ---------------------------------------------------------------------

    def climb(self) -> None:
        """The best prices, and plans near them."""
        began = time.perf_counter()
        try:
            joint = JointLagrangian(self._problem, self._kinds, self._deadline_s)
        except NoPlanError:
            self._proven = SolveStatus.INFEASIBLE
            return
        self._joint = joint

        def visit(point: Point) -> bool:
            self._proof.count("rounds")
            self._offer(point)
            return self._proof.out_of_time()

        def enough(value: float) -> bool:
            self._proof.raise_bound(value - ROUNDING * abs(value))
            return self._proof.is_closed

        tolerance = max(self._proof.gap * 0.02, 1e-9)
        self._climbed = joint.maximise(tolerance=tolerance, visit=visit, enough=enough)
        if self._climbed.impossible:
            self._proven = SolveStatus.INFEASIBLE
        else:
            enough(self._climbed.best.value)
            self._raise_prices(joint, self._climbed.best)
        self._proof.statistics["bound_s"] = time.perf_counter() - began
        self._report("bounds and heuristics", self._proof.objective, self._proof.bound)

    def _offer(self, point: Point) -> bool:
        """Offer the plan of a point if it keeps every row; says whether it does."""
        if self._joint is None or (point.excess > 0).any():
            return False
        self.incumbent.offer(self._joint.columns_of(point.options))
        return True

    def _raise_prices(self, joint: JointLagrangian, point: Point) -> None:
        """Bisect for the smallest factor on the prices whose plan is feasible."""
        if not point.prices.any() or self._proof.is_closed:
            return
        low, high = 1.0, 1.0 + 1e-3
        for _ in range(_RAISES):
            if self._proof.out_of_time():
                return
            middle = high if low == 1.0 else math.sqrt(low * high)
            if self._offer(joint.evaluate(point.prices * middle)):
                high = middle
                if low == 1.0:
                    return
            else:
                low, high = middle, max(high, 1.0 + (middle - 1.0) * 8)

    # -- steps 3 to 5 ----------------------------------------------------------------------

    def settle(self) -> None:
        """Branch until what a node leaves open is solved, for all nodes.

        Raises:
            SolverUnavailableError: the back end failed.
        """
        if self._joint is None or self._climbed is None or self.is_over:
            return
        joint, root = self._joint, self._climbed
        nothing = np.concatenate([mask.ravel() for masks in joint.masks(None) for mask in masks])
        queue = [(root.best.value, 0, nothing, root)]
        first = open_options(joint, root.best)
        sequence, done, nodes = 1, math.inf, 0  # done: lowest bound of the nodes finished
        while queue:
            value, _, closed, climb = heapq.heappop(queue)
            self._proof.raise_bound(min(done, value))
            self._report("branching", self._proof.objective, self._proof.bound)
            if self._proof.is_over():
                return
            nodes += 1
            self._proof.count("branchings")
            patient = nodes <= _PATIENCE or first.count(self._proof.target) > _FLOW
            if not patient or nodes > _MOST_BRANCHINGS:
                self._proof.raise_bound(self._flow(first, self._proof.target))
                return
            least = open_options(joint, climb.best, closed)
            if nodes in _IMPROVED:
                self._improve(joint, climb.best, least, closed)
            bound = self._settle_node(joint, climb, closed, least)
            if bound is not None:
                done = min(done, max(bound, value))
                continue
            for side in split_jointly(joint, climb.best, least, self._proof.target, value):
                there = closed + side
                child = self._climb_from(joint, climb, there)
                if not child.impossible:
                    worth = max(child.best.value, value)
                    heapq.heappush(queue, (worth, sequence, there, child))
                    sequence += 1
        self._proof.raise_bound(done)

    def _climb_from(self, joint: JointLagrangian, parent: Climb, closed: FloatArray) -> Climb:
        """The best bound of a node, from its parent's prices and those of its plans that stay."""

        def visit(point: Point) -> bool:
            self._offer(point)
            return self._proof.out_of_time()

        return joint.maximise(
            tolerance=max(self._proof.gap * 0.1, 1e-9),
            visit=visit,
            enough=lambda value: value >= self._proof.target,
            start=parent.best.prices,
            known=[point for point in parent.points if not joint.takes(point, closed)],
            closed=closed,
            rounds=_NODE_ROUNDS,
        )

    def _improve(
        self, joint: JointLagrangian, point: Point, least: OpenOptions, closed: FloatArray
    ) -> None:
        """Look for better plans among the choices that are nearest to equal."""
        for size in _SMALL_CORES:
            threshold = least.threshold(size)
            if threshold >= self._proof.target or self._proof.out_of_time() or not joint.exact:
                return
            try:
                core = find_joint_core(joint, point, least, threshold, closed)
            except NothingOpenError:
                return
            if core is None:
                return
            self._search(core, threshold, ())

    def _settle_node(
        self, joint: JointLagrangian, climb: Climb, closed: FloatArray, least: OpenOptions
    ) -> float | None:
        """Solve what a node leaves open, if that is little.

        Returns:
            A lower bound of the node's plans, or None if it should be branched on.
        """
        for _ in range(_MOST_LOOKS):
            target = self._proof.target
            count = least.count(target)
            self._proof.statistics["open"] = float(count)
            core = None
            try:
                if joint.exact:
                    core = find_joint_core(joint, climb.best, least, target, closed)
            except NothingOpenError:
                return target  # no plan of the node is below it
            if core is not None:
                widths = MERGED_WIDTHS if count <= _NARROW else ()
                bound, complete = self._search(core, target, widths)
                if complete or self._proof.out_of_time():
                    return bound
            apart = self._apart.settle(joint, climb, least)
            if apart is not None:
                return apart
            if core is not None and count > _NARROW and self._proof.target == target:
                bound, complete = self._search(core, target, MERGED_WIDTHS)
                if complete or self._proof.out_of_time():
                    return bound
            if self._proof.target == target:
                break  # no better plan, which would leave less open
        few = count <= (_FEW if core is None else _FLOW)
        return self._flow(least, self._proof.target) if few else None

    def _search(
        self, core: JointCore, threshold: float, merged_widths: Sequence[int]
    ) -> tuple[float, bool]:
        """Search a core: lower bound of its plans and those left out, and whether it ended."""
        began = time.perf_counter()
        found = search_core(
            self._proof,
            core.knapsack,
            core.constant,
            core.column_of,
            core.prices,
            threshold,
            merged_widths,
        )
        self._proof.count("core_s", time.perf_counter() - began)
        return found
