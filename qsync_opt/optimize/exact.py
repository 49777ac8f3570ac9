"""One device kind solved to proven optimality: bounds first, then only what they leave open.

1. The Lagrangian (`lagrangian`) gives a lower bound L, prices, and plans close to the best.
2. Those plans, the caller's starts, and plans from raised prices, polished by local moves,
   give an incumbent U.
3. With the best prices, the least cost of every plan that uses a given option is known
   (`Elimination.conditional_minima`). Options for which it is not below the target
   U (1 - gap) are dropped: no plan that uses one is better by more than the gap.
4. Where few choices stay open, they are solved as a multiple-choice knapsack over the small
   components they fall into (`core`, `knapsack`; a core after Pisinger, 1995): by labels that
   share their bounds, and by the back end with its cuts where those do not suffice.
5. Where many stay open, a few large operators separate L from the optimum: branch on the one
   whose likely options differ most, which lifts the Lagrangian of both sides, and go on
   from 3 (Lagrangian branch and bound, Geoffrion, 1974). A small core (the choices nearest
   to equal) improves U at some of the nodes.

Every plan is verified by `evaluate_device` (`incumbent`, `proposals`).
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from qsync_opt.optimize.arrays import BoolArray, FloatArray, IntArray
from qsync_opt.optimize.branching import split_options
from qsync_opt.optimize.climb import Climb, Point
from qsync_opt.optimize.cores import FLOW, CoreSearch
from qsync_opt.optimize.cuts import TimeCut
from qsync_opt.optimize.evaluate import allowed_columns
from qsync_opt.optimize.factors import FactorGraph
from qsync_opt.optimize.incumbent import Incumbent
from qsync_opt.optimize.interrupter import Interrupter
from qsync_opt.optimize.lagrangian import Lagrangian
from qsync_opt.optimize.moves import worthwhile
from qsync_opt.optimize.problem import AllocationProblem, DeviceKind
from qsync_opt.optimize.proof import ROUNDING, KindSolution, Proof
from qsync_opt.optimize.proposals import BackEnd, flow_program
from qsync_opt.optimize.result import SolveStatus, relative_gap
from qsync_opt.optimize.starts import exchange_options, polish, raise_prices

#: Nodes at which better plans are looked for: sooner or later the plan is the best there is.
_IMPROVED = frozenset(2**power for power in range(12))

#: Nodes after which, where the root has few enough open choices, the back end is given them all:
#: one program of a few hundred choices costs less than many small ones.
_PATIENCE = 6

#: Nodes of the branching on large operators before all is left to the back end.
_MOST_BRANCHINGS = 60

#: Points that a node of it may evaluate.
_NODE_ROUNDS = 25


class KindSolver:
    """Solves one device kind; see the module.

    Args:
        problem: the problem.
        device: the kind.
        deadline_s: iteration time to keep; None minimises the iteration time.
        relative_gap: gap to prove.
        solver: back end for the mixed-integer programs.
        seed: for back ends that take one.
        time_left: seconds left, or None for no limit.
        stop: whether to give up now.
        report: called with (phase, objective, bound) as the work goes on.
        plain: give the whole program to the back end at once.
        interrupter: makes the back end stop soon.
        cuts: paths that must not be longer than the iteration time either (`cuts.TimeCut`).
    """

    def __init__(
        self,
        problem: AllocationProblem,
        device: DeviceKind,
        *,
        deadline_s: float | None,
        relative_gap: float,
        solver: str,
        seed: int,
        time_left: Callable[[], float | None],
        stop: Callable[[], bool],
        report: Callable[[str, float | None, float | None], None],
        plain: bool = False,
        interrupter: Interrupter | None = None,
        cuts: Sequence[TimeCut] = (),
    ) -> None:
        incumbent = Incumbent(
            problem=problem, device=device, deadline_s=deadline_s, cuts=tuple(cuts)
        )
        self._proof = Proof(incumbent, relative_gap=relative_gap, time_left=time_left, stop=stop)
        back_end = BackEnd(
            solver=solver,
            seed=seed,
            relative_gap=self._proof.gap,
            time_left=time_left,
            count=self._proof.count,
            interrupter=interrupter,
        )
        self._cores = CoreSearch(self._proof, back_end)
        self._report, self._plain = report, plain
        self._lagrangian: Lagrangian | None = None

    # -- the whole -------------------------------------------------------------------------

    def solve(self, starts: Sequence[IntArray], graph: FactorGraph | None = None) -> KindSolution:
        """Solve, from plans that may or may not be feasible.

        Args:
            starts: precision columns, [N] each.
            graph: the kind's tables, where the caller has them already.

        Raises:
            SolverUnavailableError: the back end failed; the incumbent is lost to the caller
                only if there was none (`solution` gives it).
        """
        incumbent = self._proof.incumbent
        for column in starts:
            incumbent.offer(column)
        domain = allowed_columns(incumbent.problem, incumbent.device)
        if graph is None:
            graph = FactorGraph(incumbent.problem, incumbent.device, domain)
        if not graph.feasible:
            return self._proof.solution(SolveStatus.INFEASIBLE)
        if self._plain:
            self._proof.raise_bound(self._cores.propose(flow_program(incumbent, domain), math.inf))
            return self._proof.solution()
        began = time.perf_counter()
        lagrangian = self._lagrangian = Lagrangian(
            graph, self._proof.deadline_s, cuts=incumbent.cuts
        )
        # Only tables that were split or left out can propose a plan against the rules.
        incumbent.distrusted = not lagrangian.exact
        self._proof.statistics["variables"] = float((graph.allowed.sum(axis=1) > 1).sum())
        self._proof.statistics["exact_tables"] = float(lagrangian.exact)
        self._proof.statistics["graph_s"] = time.perf_counter() - began
        climb = self._climb(lagrangian)
        self._proof.statistics["bound_s"] = time.perf_counter() - began
        if climb.impossible:
            return self._proof.solution(SolveStatus.INFEASIBLE)
        raise_prices(self._proof, lagrangian, climb.best)
        exchange_options(self._proof, lagrangian, climb.best)
        if not lagrangian.exact:
            polish(self._proof)  # the cores that would find better plans need exact tables
        self._proof.statistics["heuristic_s"] = time.perf_counter() - began
        self._proof.statistics["first_gap"] = (
            relative_gap(self._proof.objective, self._proof.bound) or 0.0
        )
        self._report("bounds and heuristics", self._proof.objective, self._proof.bound)
        if self._proof.is_over():
            return self._proof.solution()
        result = self._close(lagrangian, climb)
        self._proof.statistics["total_s"] = time.perf_counter() - began
        return result

    def solution(self) -> KindSolution:
        """The state as it is, for a caller whose back end failed."""
        return self._proof.solution()

    def changes(self, column: IntArray) -> BoolArray | None:
        """The single changes of a plan, [N], that may be worth making; None where unknown.

        Returns:
            Columns of every operator, [N, P]; see `moves.worthwhile`.
        """
        lagrangian = self._lagrangian
        if lagrangian is None or not lagrangian.exact or self._proof.deadline_s is None:
            return None
        graph = lagrangian.graph
        return graph.operator_options(
            worthwhile(lagrangian, graph.options_of(column), 100 * ROUNDING)
        )

    # -- steps 1 and 2 ---------------------------------------------------------------------

    def _climb(self, lagrangian: Lagrangian) -> Climb:
        rounds = 0

        def visit(point: Point) -> bool:
            nonlocal rounds
            rounds += 1
            return self._offer(lagrangian, point)

        def enough(value: float) -> bool:
            self._proof.raise_bound(value - ROUNDING * abs(value))
            return self._proof.is_closed

        tolerance = max(self._proof.gap * 0.02, 1e-9)
        climb = lagrangian.maximise(tolerance=tolerance, visit=visit, enough=enough)
        enough(climb.best.value)
        self._proof.statistics["rounds"] = float(rounds)
        return climb

    def _offer(self, lagrangian: Lagrangian, point: Point) -> bool:
        """Offer the plan of a point if it keeps every row; says whether to stop.

        Where time is the objective, its rows are none that a plan could break.
        """
        first = lagrangian.time_rows if self._proof.deadline_s is None else 0
        if not (point.excess[first:] > 0).any():
            self._proof.incumbent.offer(lagrangian.graph.operator_columns(point.options))
        return self._proof.out_of_time()

    # -- steps 3 to 5 ----------------------------------------------------------------------

    def _close(self, lagrangian: Lagrangian, root: Climb) -> KindSolution:
        """Branch until every node's choices are few, and solve those."""
        free = np.zeros(lagrangian.graph.allowed.shape)
        queue = [(root.best.value, 0, free, root)]
        first = free
        sequence, done = 1, math.inf  # lowest bound of the nodes that are finished
        while queue:
            value, _, closed, climb = heapq.heappop(queue)
            self._proof.raise_bound(min(done, value))
            self._report("branching", self._proof.objective, self._proof.bound)
            if self._proof.is_over():
                return self._proof.solution()
            self._proof.count("branchings")
            if self._proof.statistics["branchings"] > _PATIENCE and climb is not root:
                keep = first < self._proof.target
                if (keep.sum(axis=1) > 1).sum() <= FLOW:
                    proven = self._cores.flow(lagrangian, keep, self._proof.target)
                    self._proof.raise_bound(proven)
                    return self._proof.solution()
            least = self._conditional(lagrangian, climb.best, closed)
            if climb is root:
                first = least
            if self._proof.statistics["branchings"] in _IMPROVED:
                self._cores.improve(lagrangian, climb.best, least)
            whole = self._proof.statistics["branchings"] > _MOST_BRANCHINGS
            bound = self._cores.settle(lagrangian, climb.best, least, whole)
            if bound is not None:
                done = min(done, max(bound, value))
                continue
            split = split_options(lagrangian, climb.best, least, self._proof.target, value)
            for side in split.sides:
                there = closed + side
                child = self._climb_from(lagrangian, climb, there)
                if not child.impossible:
                    worth = max(child.best.value, value)
                    heapq.heappush(queue, (worth, sequence, there, child))
                    sequence += 1
        self._proof.raise_bound(done)
        return self._proof.solution()

    def _conditional(self, lagrangian: Lagrangian, point: Point, closed: FloatArray) -> FloatArray:
        """Lower bound of every plan that uses an option, [V, P]."""
        least = lagrangian.elimination.conditional_minima(lagrangian.costs(point.prices, closed))
        least = least - lagrangian.constant(point.prices)
        # Sums in another order differ by rounding; never drop an option because of it.
        least -= ROUNDING * abs(point.value) + lagrangian.rounding(point.prices, point.value)
        return np.where(lagrangian.graph.allowed, least, math.inf)

    def _climb_from(self, lagrangian: Lagrangian, parent: Climb, closed: FloatArray) -> Climb:
        """The best bound of a node, from its parent's prices and those of its plans that stay."""
        rows = np.arange(len(lagrangian.graph.allowed))
        known = [
            point
            for point in parent.points
            if np.isfinite(closed[rows, point.options[: len(rows)]]).all()
        ]

        return lagrangian.maximise(
            tolerance=max(self._proof.gap * 0.1, 1e-9),
            visit=lambda point: self._offer(lagrangian, point),
            enough=lambda value: value >= self._proof.target,
            start=parent.best.prices,
            known=known,
            closed=closed,
            rounds=_NODE_ROUNDS,
        )
