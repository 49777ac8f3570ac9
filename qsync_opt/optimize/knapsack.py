"""Branch and bound for multiple-choice knapsacks with few rows.

    minimise  sum_c w[i_c]   over one item i_c per class c,
    subject to  sum_c u[i_c, r] <= capacity_r   for every row r.

Bounds are Lagrangian: for prices y >= 0,  sum_c min_i (w_i + y . u_i) - y . capacity.  With
few rows a bound costs microseconds, so a node tries all prices that served before and then
takes subgradient steps of Polyak's length towards the value that would prune it (Polyak,
1969). Branching fixes the class whose items differ most in what they use while being nearly
equal in reduced cost: the few large items, whose fractions are what separates the bound from
the optimum. What is left then is fine-grained, and changing one or two classes closes the
gap from above.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from qsync_opt.optimize.arrays import BoolArray, FloatArray, IntArray

#: Subgradient steps at a node.
_MOST_STEPS = 24

#: Prices remembered: all are tried at every node.
_MOST_PRICES = 24

#: Items that are combined in pairs, those of least reduced cost.
_MOST_PAIRED = 256

#: Nodes before giving up.
_MOST_NODES = 20_000

#: Every so many nodes the pairs are tried again.
_PAIRS_EVERY = 16


@dataclass(frozen=True, kw_only=True, eq=False)
class Knapsack:
    """A multiple-choice knapsack.

    Attributes:
        start: items of class c are `start[c]:start[c + 1]`, [C + 1].
        cost: w, [I].
        use: u, [I, R].
        capacity: [R].
    """

    start: IntArray
    cost: FloatArray
    use: FloatArray
    capacity: FloatArray


@dataclass(frozen=True, kw_only=True, eq=False)
class KnapsackSolution:
    """What the search found.

    Attributes:
        items: the item of every class, [C]; None if none below the target was found.
        cost: of these items.
        bound: no solution costs less than this (or than `cost`).
        complete: whether the search ended by itself.
        nodes: nodes looked at.
    """

    items: IntArray | None
    cost: float
    bound: float
    complete: bool
    nodes: int


class KnapsackSearch:
    """The search; see the module.

    Args:
        problem: the knapsack.
        prices: prices to start from, one set a row, [n, R].
        target: solutions that cost at least this are not wanted.
        gap: stop once the best solution found is within this of the bound.
        stop: whether to give up now.
        accept: a last check of a solution; one that fails it is passed over.
    """

    def __init__(
        self,
        problem: Knapsack,
        *,
        prices: FloatArray,
        target: float,
        gap: float,
        stop: Callable[[], bool],
        accept: Callable[[IntArray], bool],
    ) -> None:
        self._problem, self._stop, self._accept = problem, stop, accept
        self._first = problem.start[:-1]
        self._counts = np.diff(problem.start)
        self._class = np.repeat(np.arange(len(self._first)), self._counts)
        self._prices = [row for row in np.maximum(prices, 0.0)]
        largest = np.abs(problem.use).max(axis=0, initial=0.0)
        self._scale = np.where(largest > 0, largest, 1.0)
        self._target, self._gap = target, gap
        self._best: IntArray | None = None
        self._cost = np.inf
        self._nodes = 0

    @property
    def _cutoff(self) -> float:
        """Nodes whose bound reaches this hold nothing wanted."""
        return min(self._target, self._cost - self._gap)

    def solve(self) -> KnapsackSolution:
        """Run the search."""
        open_ = np.ones(len(self._class), dtype=np.bool_)
        queue: list[tuple[float, int, BoolArray]] = [(-np.inf, 0, open_)]
        sequence, complete, bound = 1, True, np.inf
        while queue:
            lowest, _, open_ = heapq.heappop(queue)
            if lowest >= self._cutoff:
                bound = min(bound, lowest)
                continue
            if self._nodes >= _MOST_NODES or self._stop():
                complete = False
                bound = min(bound, lowest)
                break
            self._nodes += 1
            value, reduced, items = self._bound(open_)
            if value >= self._cutoff:
                bound = min(bound, value)
                continue
            self._complete(reduced, items, open_)
            if value >= self._cutoff:
                bound = min(bound, value)
                continue
            # What branching leaves out costs at least this much.
            dropped = reduced[open_ & (reduced >= self._cutoff - value)]
            bound = min(bound, value + float(dropped.min(initial=np.inf)))
            branched = self._branch(reduced, open_, value)
            if branched is None:
                # No class has a choice left: its only solution was seen by `_complete`.
                if (self._problem.use[items].sum(axis=0) <= self._problem.capacity).all():
                    bound = min(bound, float(self._problem.cost[items].sum()))
                continue
            for child, least in branched:
                if least < self._cutoff:
                    heapq.heappush(queue, (least, sequence, child))
                    sequence += 1
                else:
                    bound = min(bound, least)
        return KnapsackSolution(
            items=self._best,
            cost=self._cost,
            bound=min(bound, self._cost),
            complete=complete,
            nodes=self._nodes,
        )

    # -- bounds ----------------------------------------------------------------------------

    def _bound(self, open_: BoolArray) -> tuple[float, FloatArray, IntArray]:
        """Best bound found at a node, reduced costs there, and the minimising items."""
        problem = self._problem
        cost = np.where(open_, problem.cost, np.inf)
        table = np.array(self._prices)
        priced = cost[:, None] + problem.use @ table.T
        least = np.minimum.reduceat(priced, self._first, axis=0)
        values = least.sum(axis=0) - table @ problem.capacity
        pick = int(values.argmax())
        prices, best = table[pick], float(values[pick])
        best_prices = prices
        best_priced, best_least = priced[:, pick], least[:, pick]
        value, current, floor = best, best_priced, best_least
        goal = self._cutoff
        slack_step = 1.0
        for _ in range(_MOST_STEPS):
            if best >= goal or not np.isfinite(value):
                break
            items = self._minimisers(current, floor)
            slope = (problem.use[items].sum(axis=0) - problem.capacity) / self._scale
            slope = np.where((prices <= 0) & (slope < 0), 0.0, slope)
            length = float(slope @ slope)
            if length <= 1e-24:
                break
            aim = goal if np.isfinite(goal) else best + abs(best) * 1e-3
            step = slack_step * (aim - value) / length
            prices = np.maximum(prices + step * slope / self._scale, 0.0)
            current = cost + problem.use @ prices
            floor = np.minimum.reduceat(current, self._first)
            value = float(floor.sum() - prices @ problem.capacity)
            if value > best:
                best, best_prices = value, prices
                best_priced, best_least = current, floor
            else:
                slack_step *= 0.7
        if best_prices is not table[pick]:
            self._prices.append(best_prices)
            if len(self._prices) > _MOST_PRICES:
                del self._prices[1]
        reduced = best_priced - best_least[self._class]
        return best, reduced, self._minimisers(best_priced, best_least)

    def _minimisers(self, priced: FloatArray, least: FloatArray) -> IntArray:
        hits = np.flatnonzero(priced == least[self._class])
        owner = self._class[hits]
        return hits[np.append(True, owner[1:] != owner[:-1])]

    # -- branching -------------------------------------------------------------------------

    def _branch(
        self, reduced: FloatArray, open_: BoolArray, value: float
    ) -> list[tuple[BoolArray, float]] | None:
        """Children of a node: one class, split in the items still possible."""
        room = self._cutoff - value
        possible = open_ & (reduced < room)
        counts = np.add.reduceat(possible.astype(np.int64), self._first)
        choices = np.flatnonzero(counts > 1)
        if not len(choices):
            return None
        # How much of the cost an item moves, less as its reduced cost nears what prunes it.
        lowest = np.where(reduced <= 0, self._problem.cost, np.inf)
        base = np.minimum.reduceat(lowest, self._first)[self._class]
        weight = 1.0 - reduced / room if np.isfinite(room) else 1.0 / (1.0 + reduced)
        score = np.where(possible, np.abs(self._problem.cost - base) * weight, -1.0)
        by_class = np.maximum.reduceat(score, self._first)
        pick = int(choices[by_class[choices].argmax()])
        rows = slice(int(self._problem.start[pick]), int(self._problem.start[pick + 1]))
        children = []
        for item in (np.flatnonzero(possible[rows]) + rows.start).tolist():
            child = possible.copy()
            child[rows] = False
            child[item] = True
            children.append((child, value + float(reduced[item])))
        return children

    # -- solutions -------------------------------------------------------------------------

    def _complete(self, reduced: FloatArray, items: IntArray, open_: BoolArray) -> None:
        """Look for solutions near a node's minimiser, by one change or two."""
        problem = self._problem
        cost = float(problem.cost[items].sum())
        room = problem.capacity - problem.use[items].sum(axis=0)
        if (room >= 0).all():
            self._offer(items, cost)
        pairs = self._nodes % _PAIRS_EVERY == 1 or self._best is None
        others = open_.copy()
        others[items] = False
        cells = np.flatnonzero(others)
        if not len(cells):
            return
        most = _MOST_PAIRED if pairs else 4 * _MOST_PAIRED
        if len(cells) > most:
            cells = cells[np.argpartition(reduced[cells], most)[:most]]
            cells.sort()
        owner = self._class[cells]
        gain = problem.cost[cells] - problem.cost[items[owner]]
        use = problem.use[cells] - problem.use[items[owner]]
        below = self._below() - cost
        single = (gain < below) & (use <= room).all(axis=1)
        for index in np.flatnonzero(single)[np.argsort(gain[single], kind="stable")][:2].tolist():
            self._take(items, cost, gain, cells, (index,))
        if not pairs:
            return
        below = self._below() - cost
        fits = (gain[:, None] + gain[None, :] < below) & (owner[:, None] != owner[None, :])
        for row in range(use.shape[1]):
            fits &= use[:, row][:, None] + use[:, row][None, :] <= room[row]
        first, second = np.nonzero(np.triu(fits, 1))
        if len(first):
            total = gain[first] + gain[second]
            for index in np.argsort(total, kind="stable")[:2].tolist():
                self._take(items, cost, gain, cells, (int(first[index]), int(second[index])))

    def _below(self) -> float:
        return min(self._cost, self._target)

    def _take(
        self,
        items: IntArray,
        cost: float,
        gain: FloatArray,
        cells: IntArray,
        changes: tuple[int, ...],
    ) -> None:
        changed = items.copy()
        for index in changes:
            changed[self._class[cells[index]]] = cells[index]
        self._offer(changed, cost + float(gain[list(changes)].sum()))

    def _offer(self, items: IntArray, cost: float) -> None:
        if cost < self._below() and self._accept(items):
            self._best, self._cost = items, float(self._problem.cost[items].sum())
