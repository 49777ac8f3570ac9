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
from dataclasses import dataclass, field

import numpy as np

from qsync_opt.optimize.arrays import BoolArray, FloatArray, IntArray
from qsync_opt.optimize.branching import split_options
from qsync_opt.optimize.core import Core, find_core
from qsync_opt.optimize.cuts import TimeCut
from qsync_opt.optimize.evaluate import allowed_columns
from qsync_opt.optimize.factors import FactorGraph
from qsync_opt.optimize.incumbent import Incumbent
from qsync_opt.optimize.interrupter import Interrupter
from qsync_opt.optimize.knapsack import KnapsackSearch
from qsync_opt.optimize.lagrangian import Climb, Lagrangian, Point
from qsync_opt.optimize.moves import exchanged, worthwhile
from qsync_opt.optimize.polish import improve_columns
from qsync_opt.optimize.problem import AllocationProblem, DeviceKind
from qsync_opt.optimize.proposals import BackEnd, Program, core_program, flow_program
from qsync_opt.optimize.result import SolveStatus, relative_gap

#: Open choices in the cores that look for better plans, and in one that a proof is left to.
_SMALL_CORES = (60, 240)
_LARGE_CORE = 6_000

#: Open choices from which on a core that does not end soon is branched on instead.
_WIDE_CORE = 1_000

#: Exchanges that are made before a plan is evaluated; one at a time once they meet. With fewer
#: variables than this the cores hold as many of the choices, and find as much sooner.
_EXCHANGES = (6, 1)
_EXCHANGE_FROM = 1_500

#: Open choices that the back end is given in the edge-flow form rather than branched on.
_FEW = 60

#: Labels of the knapsack search in such cores, one beam after another.
_WIDTH = 100
_MERGED_WIDTHS = (300, 500, 1_000)

#: Nodes at which better plans are looked for: sooner or later the plan is the best there is.
_IMPROVED = frozenset(2**power for power in range(12))

#: Open choices of the root that the back end is given so once this many nodes have not ended
#: the branching: one program of a few hundred choices costs less than many small ones.
_FLOW = 400
_PATIENCE = 6

#: Nodes of the branching on large operators before all is left to the back end.
_MOST_BRANCHINGS = 60

#: Points that a node of it may evaluate.
_NODE_ROUNDS = 25

#: Steps of the search for prices that give a feasible plan.
_RAISES = 8

#: Rounding of sums of floats, relative: conditional minima this close count as equal.
_ROUNDING = 1e-11


@dataclass(frozen=True, kw_only=True, eq=False)
class KindSolution:
    """What was found for one device kind.

    Attributes:
        status: why it stopped.
        column: precision column of every operator, [N]; None without a plan.
        objective: perturbation (not weighted), or iteration time; None without a plan.
        bound: proven lower bound; infinite where no plan exists.
        statistics: counts and times of the steps.
    """

    status: SolveStatus
    column: IntArray | None
    objective: float | None
    bound: float
    statistics: dict[str, float] = field(default_factory=dict)


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
        self._deadline_s = deadline_s
        self._cuts = tuple(cuts)
        self._incumbent = Incumbent(
            problem=problem, device=device, deadline_s=deadline_s, cuts=self._cuts
        )
        # A little less than asked, so that rounding cannot push the proven gap above it.
        self._gap = relative_gap - min(0.4 * relative_gap, 8 * _ROUNDING)
        self._back_end = BackEnd(
            solver=solver,
            seed=seed,
            relative_gap=self._gap,
            time_left=time_left,
            count=self._count,
            interrupter=interrupter,
        )
        self._time_left, self._stop, self._report = time_left, stop, report
        self._plain = plain
        self._bound = 0.0  # neither a perturbation nor a time is negative
        self._statistics: dict[str, float] = {}
        self._lagrangian: Lagrangian | None = None

    # -- where it stands -------------------------------------------------------------------

    def _target(self) -> float:
        """No plan below this is wanted: U (1 - gap)."""
        upper = self._incumbent.objective
        return upper - max(self._gap, _ROUNDING) * abs(upper) if math.isfinite(upper) else math.inf

    def _closed(self) -> bool:
        return self._bound + 6 * _ROUNDING * abs(self._bound) >= self._target()

    def _out_of_time(self) -> bool:
        left = self._time_left()
        return self._stop() or (left is not None and left <= 0)

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
        incumbent = self._incumbent
        for column in starts:
            incumbent.offer(column)
        domain = allowed_columns(incumbent.problem, incumbent.device)
        if graph is None:
            graph = FactorGraph(incumbent.problem, incumbent.device, domain)
        if not graph.feasible:
            return self._finish(SolveStatus.INFEASIBLE)
        if self._plain:
            proven = self._propose(flow_program(incumbent, domain), math.inf)
            self._bound = max(self._bound, proven)
            return self._finish(None)
        began = time.perf_counter()
        lagrangian = self._lagrangian = Lagrangian(graph, self._deadline_s, cuts=self._cuts)
        # Only tables that were split or left out can propose a plan against the rules.
        incumbent.distrusted = not lagrangian.exact
        self._statistics["variables"] = float((graph.allowed.sum(axis=1) > 1).sum())
        self._statistics["exact_tables"] = float(lagrangian.exact)
        self._statistics["graph_s"] = time.perf_counter() - began
        climb = self._climb(lagrangian)
        self._statistics["bound_s"] = time.perf_counter() - began
        if climb.impossible:
            return self._finish(SolveStatus.INFEASIBLE)
        self._raise_prices(lagrangian, climb.best)
        self._exchange(lagrangian, climb.best)
        if not lagrangian.exact:
            self._polish()  # the cores that would find better plans need exact tables
        self._statistics["heuristic_s"] = time.perf_counter() - began
        self._statistics["first_gap"] = relative_gap(self._objective(), self._bound) or 0.0
        self._report("bounds and heuristics", self._objective(), self._bound)
        if self._closed() or self._out_of_time():
            return self._finish(None)
        result = self._close(lagrangian, climb)
        self._statistics["total_s"] = time.perf_counter() - began
        return result

    def solution(self) -> KindSolution:
        """The state as it is, for a caller whose back end failed."""
        return self._finish(None)

    def changes(self, column: IntArray) -> BoolArray | None:
        """The single changes of a plan, [N], that may be worth making; None where unknown.

        Returns:
            Columns of every operator, [N, P]; see `moves.worthwhile`.
        """
        lagrangian = self._lagrangian
        if lagrangian is None or not lagrangian.exact or self._deadline_s is None:
            return None
        graph = lagrangian.graph
        return graph.operator_options(
            worthwhile(lagrangian, graph.options_of(column), 100 * _ROUNDING)
        )

    def _objective(self) -> float | None:
        return None if self._incumbent.column is None else self._incumbent.objective

    def _finish(self, status: SolveStatus | None) -> KindSolution:
        column, upper = self._incumbent.column, self._incumbent.objective
        if status is None:
            if column is not None and self._closed():
                status = SolveStatus.OPTIMAL
            elif column is None and math.isinf(self._bound) and self._bound > 0:
                status = SolveStatus.INFEASIBLE
            elif self._stop():
                status = SolveStatus.INTERRUPTED
            else:
                status = SolveStatus.TIME_LIMIT
        if status is SolveStatus.INFEASIBLE and column is not None:
            # A verified plan contradicts the proof: believe the plan, claim nothing.
            status, self._bound = SolveStatus.TIME_LIMIT, 0.0
        bound = math.inf if status is SolveStatus.INFEASIBLE else min(self._bound, upper)
        if upper - bound <= 10 * _ROUNDING * abs(upper):
            bound = upper  # equal but for rounding
        return KindSolution(
            status=status,
            column=column,
            objective=self._objective(),
            bound=bound,
            statistics=dict(self._statistics),
        )

    # -- steps 1 and 2 ---------------------------------------------------------------------

    def _climb(self, lagrangian: Lagrangian) -> Climb:
        rounds = 0

        def visit(point: Point) -> bool:
            nonlocal rounds
            rounds += 1
            if not (point.excess[self._own_rows(lagrangian) :] > 0).any():
                self._incumbent.offer(lagrangian.graph.operator_columns(point.options))
            return self._out_of_time()

        def enough(value: float) -> bool:
            self._bound = max(self._bound, value - _ROUNDING * abs(value))
            return self._closed()

        tolerance = max(self._gap * 0.02, 1e-9)
        climb = lagrangian.maximise(tolerance=tolerance, visit=visit, enough=enough)
        enough(climb.best.value)
        self._statistics["rounds"] = float(rounds)
        return climb

    def _own_rows(self, lagrangian: Lagrangian) -> int:
        """Rows that a plan may break: none of time's where time is the objective."""
        return lagrangian.time_rows if self._deadline_s is None else 0

    def _raise_prices(self, lagrangian: Lagrangian, point: Point) -> None:
        """Bisect for the smallest factor on the prices whose plan is feasible."""
        if self._deadline_s is None or not point.prices.any() or self._closed():
            return
        low, high = 1.0, 1.0 + 1e-3
        for _ in range(_RAISES):
            if self._out_of_time():
                return
            middle = high if low == 1.0 else math.sqrt(low * high)
            raised = lagrangian.evaluate(point.prices * middle)
            if (raised.excess > 0).any():
                low, high = middle, max(high, 1.0 + (middle - 1.0) * 8)
            else:
                self._incumbent.offer(lagrangian.graph.operator_columns(raised.options))
                high = middle
                if low == 1.0:
                    return

    def _polish(self) -> None:
        found = self._incumbent
        if found.column is None or self._deadline_s is None or self._closed():
            return  # nothing to polish, or nothing to gain
        column = improve_columns(
            found.problem, found.device, self._deadline_s, found.column, self._out_of_time
        )
        if column is not None:
            self._incumbent.offer(column)

    def _exchange(self, lagrangian: Lagrangian, point: Point) -> None:
        """Exchange one option or two of the incumbent for as long as that helps."""
        few = len(lagrangian.graph.allowed) < _EXCHANGE_FROM
        if self._deadline_s is None or few or not lagrangian.exact:
            return
        for rounds in _EXCHANGES:
            while not (self._closed() or self._out_of_time()):
                if self._incumbent.column is None:
                    return
                options = exchanged(
                    lagrangian,
                    lagrangian.graph.options_of(self._incumbent.column),
                    point.prices,
                    rounds=rounds,
                    stop=self._out_of_time,
                )
                if not self._incumbent.offer(lagrangian.graph.operator_columns(options)):
                    break

    # -- steps 3 to 5 ----------------------------------------------------------------------

    def _close(self, lagrangian: Lagrangian, root: Climb) -> KindSolution:
        """Branch until every node's choices are few, and solve those."""
        free = np.zeros(lagrangian.graph.allowed.shape)
        queue = [(root.best.value, 0, free, root)]
        first = free
        sequence, done = 1, math.inf  # lowest bound of the nodes that are finished
        while queue:
            value, _, closed, climb = heapq.heappop(queue)
            self._bound = max(self._bound, min(done, value))
            self._report("branching", self._objective(), self._bound)
            if self._closed() or self._out_of_time():
                return self._finish(None)
            self._count("branchings")
            if self._statistics["branchings"] > _PATIENCE and climb is not root:
                keep = first < self._target()
                if (keep.sum(axis=1) > 1).sum() <= _FLOW:
                    return self._leave(lagrangian, keep)
            least = self._conditional(lagrangian, climb.best, closed)
            if climb is root:
                first = least
            if self._statistics["branchings"] in _IMPROVED:
                self._improve(lagrangian, climb.best, least)
            whole = self._statistics["branchings"] > _MOST_BRANCHINGS
            bound = self._settle(lagrangian, climb.best, least, whole)
            if bound is not None:
                done = min(done, max(bound, value))
                continue
            for side in split_options(lagrangian, climb.best, least, self._target(), value):
                there = closed + side
                child = self._climb_from(lagrangian, climb, there)
                if not child.impossible:
                    worth = max(child.best.value, value)
                    heapq.heappush(queue, (worth, sequence, there, child))
                    sequence += 1
        self._bound = max(self._bound, done)
        return self._finish(None)

    def _leave(self, lagrangian: Lagrangian, keep: BoolArray) -> KindSolution:
        """Give all that is open to the back end in the edge-flow form."""
        domain = lagrangian.graph.operator_options(keep)
        proven = self._propose(flow_program(self._incumbent, domain), self._target())
        self._bound = max(self._bound, proven)
        return self._finish(None)

    def _conditional(self, lagrangian: Lagrangian, point: Point, closed: FloatArray) -> FloatArray:
        """Lower bound of every plan that uses an option, [V, P]."""
        least = lagrangian.elimination.conditional_minima(lagrangian.costs(point.prices, closed))
        least = least - lagrangian.constant(point.prices)
        # Sums in another order differ by rounding; never drop an option because of it.
        least -= _ROUNDING * abs(point.value) + lagrangian.rounding(point.prices, point.value)
        return np.where(lagrangian.graph.allowed, least, math.inf)

    def _improve(self, lagrangian: Lagrangian, point: Point, least: FloatArray) -> None:
        """Look for better plans among the choices that are nearest to equal.

        A core that is too small cannot make up for what the minimising plan breaks; it grows
        until it holds all that is still open, which is then left to `_settle`.
        """
        if self._deadline_s is None:
            return
        for size in _SMALL_CORES:
            threshold = self._core_threshold(least, size)
            if threshold >= self._target() or self._out_of_time():
                return
            found = self._core(lagrangian, point, least < threshold, threshold)
            if found is None:
                return
            core, column_of, prices = found
            self._search(core, column_of, prices, threshold, ())

    def _settle(
        self, lagrangian: Lagrangian, point: Point, least: FloatArray, whole: bool
    ) -> float | None:
        """Solve a node whose open choices are few (or all that is left, if `whole`).

        Returns:
            A lower bound of the node's plans, or None if it should be branched on.
        """
        target = self._target()
        keep = least < target
        self._statistics["open"] = float((keep.sum(axis=1) > 1).sum())
        if not keep.any(axis=1).all():
            return target  # no plan of the node is below it
        if self._statistics["open"] > _LARGE_CORE and not whole:
            return None
        began = time.perf_counter()
        found = self._core(lagrangian, point, keep, target)
        if found is None:
            few = self._statistics["open"] <= _FEW
            if not (whole or few or self._deadline_s is None):
                return None
            domain = lagrangian.graph.operator_options(keep)
            return self._propose(flow_program(self._incumbent, domain), target)
        core, column_of, prices = found
        if self._deadline_s is not None:
            wide = self._statistics["open"] > _WIDE_CORE and not whole
            widths = _MERGED_WIDTHS[:1] if wide else _MERGED_WIDTHS
            bound, complete = self._search(core, column_of, prices, target, widths)
            self._count("core_s", time.perf_counter() - began)
            if complete or self._out_of_time():
                return bound
            if self._target() < target:  # a better plan leaves fewer choices open: look again
                return self._settle(lagrangian, point, least, whole)
            if wide:
                return None  # where choices are many, one that is fixed lifts the bound at less
        if self._deadline_s is not None and self._statistics["open"] <= _FLOW:
            domain = lagrangian.graph.operator_options(keep)
            return self._propose(flow_program(self._incumbent, domain), target)
        return self._propose(core_program(core, column_of), target)

    def _climb_from(self, lagrangian: Lagrangian, parent: Climb, closed: FloatArray) -> Climb:
        """The best bound of a node, from its parent's prices and those of its plans that stay."""
        rows = np.arange(len(lagrangian.graph.allowed))
        known = [
            point
            for point in parent.points
            if np.isfinite(closed[rows, point.options[: len(rows)]]).all()
        ]

        def visit(point: Point) -> bool:
            if not (point.excess[self._own_rows(lagrangian) :] > 0).any():
                self._incumbent.offer(lagrangian.graph.operator_columns(point.options))
            return self._out_of_time()

        return lagrangian.maximise(
            tolerance=max(self._gap * 0.1, 1e-9),
            visit=visit,
            enough=lambda value: value >= self._target(),
            start=parent.best.prices,
            known=known,
            closed=closed,
            rounds=_NODE_ROUNDS,
        )

    @staticmethod
    def _core_threshold(least: FloatArray, size: int) -> float:
        """Threshold below which about `size` variables have a second option."""
        if least.shape[1] < 2:
            return math.inf
        second = np.sort(least, axis=1)[:, 1]
        second = np.sort(second[np.isfinite(second)])
        return float(second[size]) if len(second) > size else math.inf

    def _core(
        self, lagrangian: Lagrangian, point: Point, keep: BoolArray, threshold: float
    ) -> tuple[Core, Callable[[IntArray], IntArray], FloatArray] | None:
        """The knapsack over some options, its reader, and its prices; None if too large."""
        if not lagrangian.exact:
            return None
        graph = lagrangian.graph.restricted(keep)
        if not graph.feasible:
            return None
        reduced = Lagrangian(graph, self._deadline_s, lagrangian.points, self._cuts)
        core = find_core(reduced, point.prices, threshold)
        if core is None:
            return None
        self._statistics["classes"] = float(len(core.knapsack.start) - 1)
        self._statistics["items"] = float(len(core.knapsack.cost))

        def column_of(items: IntArray) -> IntArray:
            return graph.operator_columns(core.options(items))

        return core, column_of, (point.prices / reduced.scale)[core.rows]

    def _search(
        self,
        core: Core,
        column_of: Callable[[IntArray], IntArray],
        prices: FloatArray,
        threshold: float,
        merged_widths: Sequence[int],
    ) -> tuple[float, bool]:
        """Search a core: lower bound of its plans and those left out, and whether it ended."""

        def accept(items: IntArray) -> bool:
            column = column_of(items)
            return self._incumbent.offer(column) or self._incumbent.keeps(column)

        solution = KnapsackSearch(
            core.knapsack,
            prices=prices,
            # A plan above the threshold is welcome too: it may be the best there is.
            target=self._target() - core.constant,
            # Of the bound, not of the incumbent: a better plan makes the gap allowed smaller.
            gap=self._gap * max(self._bound, 0.0),
            width=_WIDTH,
            merged_widths=merged_widths,
            stop=self._out_of_time,
            accept=accept,
        ).solve()
        self._count("relaxations", solution.relaxations)
        self._count("labels", solution.labels)
        bound = core.constant + solution.bound
        if math.isfinite(bound):  # infinite where no plan is below the target
            bound -= _ROUNDING * abs(bound)
        return min(bound, threshold), solution.complete

    def _propose(self, program: Program, threshold: float) -> float:
        """Have a program solved; see `BackEnd.solve`."""
        return self._back_end.solve(
            program, self._incumbent, bound=self._bound, threshold=threshold
        )

    def _count(self, name: str, amount: float = 1.0) -> None:
        self._statistics[name] = self._statistics.get(name, 0.0) + amount
