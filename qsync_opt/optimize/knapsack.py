"""Branch and bound for multiple-choice knapsacks with few rows.

    minimise  sum_c w[i_c]   over one item i_c per class c,
    subject to  sum_c u[i_c, r] <= capacity_r   for every row r.

Bounds are Lagrangian: for prices y >= 0,  D(y) = sum_c min_i (w_i + y . u_i) - y . capacity,
which at its best equals the linear relaxation. With few rows it is found by Newton's method on
the smooth function in which each minimum is a soft minimum at temperature t (Nesterov, 2005);
the exact D is evaluated along the way, so the bound is valid whatever the temperature. The
soft choices are the relaxation's fractions: branching splits the class whose fractions spread
the most cost, the large items that separate the bound from the optimum. What is left then is
fine-grained, and changing one or two classes closes the gap from above.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from qsync_opt.optimize.arrays import BoolArray, FloatArray, IntArray

#: Newton steps at one temperature.
_STEPS_PER_TEMPERATURE = 4

#: Temperatures tried at a node, and the first as a fraction of what the bound has to rise.
_TEMPERATURES = 3
_HOTTEST = 0.1

#: Relative error of a sum over the classes.
_ROUNDING = 1e-14

#: Times a step may be shortened.
_MOST_HALVINGS = 6

#: Temperature of the likelihood that branching goes by, as a fraction of the room to prune.
_SOFTNESS = 0.5

#: Items that are combined in pairs, those of least reduced cost.
_MOST_PAIRED = 256

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


@dataclass(frozen=True, kw_only=True, eq=False)
class _Soft:
    """The bound at some prices.

    Attributes:
        prices: in units of cost, [R].
        value: D, exact.
        smooth: D with soft minima.
        reduced: reduced cost of every item, [n].
        share: soft choice of every item, [n].
    """

    prices: FloatArray
    value: float
    smooth: float
    reduced: FloatArray
    share: FloatArray


@dataclass(frozen=True, kw_only=True, eq=False)
class _Node:
    """A node after bounding.

    Attributes:
        open: its items, ascending, [n].
        start: first place of every class in `open`, [C].
        value: bound.
        prices: that give it.
        reduced: reduced cost of every item, 0 for the best of its class, [n].
        share: fraction of every item in the relaxation, [n].
        items: the minimising item of every class, [C].
    """

    open: IntArray
    start: IntArray
    value: float
    prices: FloatArray
    reduced: FloatArray
    share: FloatArray
    items: IntArray


class KnapsackSearch:
    """The search; see the module.

    Args:
        problem: the knapsack.
        prices: prices to start from, [R].
        target: solutions that cost at least this are not wanted.
        gap: stop once the best solution found is within this of the bound.
        most_nodes: nodes before giving up.
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
        most_nodes: int,
        stop: Callable[[], bool],
        accept: Callable[[IntArray], bool],
    ) -> None:
        self._problem, self._stop, self._accept = problem, stop, accept
        self._class = np.repeat(np.arange(len(problem.start) - 1), np.diff(problem.start))
        largest = np.abs(problem.use).max(axis=0, initial=0.0)
        # Rows in units of their largest use, so that prices are in units of cost.
        self._scale = np.where(largest > 0, largest, 1.0)
        self._use = problem.use / self._scale
        self._capacity = problem.capacity / self._scale
        self._start_prices = np.maximum(prices, 0.0) * self._scale
        self._target, self._gap, self._most_nodes = target, gap, most_nodes
        self._best: IntArray | None = None
        self._cost = np.inf
        self._nodes = 0

    @property
    def _cutoff(self) -> float:
        """Nodes whose bound reaches this hold nothing wanted."""
        return min(self._target, self._cost - self._gap)

    def solve(self) -> KnapsackSolution:
        """Run the search."""
        everything = np.arange(len(self._class))
        queue: list[tuple[float, int, IntArray, FloatArray]] = [
            (-np.inf, 0, everything, self._start_prices)
        ]
        sequence, complete, bound = 1, True, np.inf
        while queue:
            lowest, _, open_, prices = heapq.heappop(queue)
            if lowest >= self._cutoff:
                bound = min(bound, lowest)
                continue
            if self._nodes >= self._most_nodes or self._stop():
                complete = False
                bound = min(bound, lowest)
                break
            self._nodes += 1
            node = self._bound(open_, prices)
            if node.value < self._cutoff:
                self._complete(node)
            if node.value >= self._cutoff:
                bound = min(bound, node.value)
                continue
            # What is left out of the children costs at least this much.
            possible = node.reduced < self._cutoff - node.value
            bound = min(bound, node.value + float(node.reduced[~possible].min(initial=np.inf)))
            children = self._branch(node, possible)
            if not children:
                # Every class has one item left, and the node's minimiser is the only solution.
                if self._keeps(node.items):
                    bound = min(bound, float(self._problem.cost[node.items].sum()))
                continue
            for child, least in children:
                heapq.heappush(queue, (least, sequence, child, node.prices))
                sequence += 1
        return KnapsackSolution(
            items=self._best,
            cost=self._cost,
            bound=min(bound, self._cost),
            complete=complete,
            nodes=self._nodes,
        )

    def _keeps(self, items: IntArray) -> bool:
        return bool((self._problem.use[items].sum(axis=0) <= self._problem.capacity).all())

    # -- bounds ----------------------------------------------------------------------------

    def _bound(self, open_: IntArray, prices: FloatArray) -> _Node:
        """The best bound of a node, and the relaxation's fractions.

        Args:
            open_: its items, ascending.
            prices: to start from, in units of cost, [R].
        """
        owner = self._class[open_]
        start = np.flatnonzero(np.append(True, owner[1:] != owner[:-1]))
        place = np.cumsum(np.append(False, owner[1:] != owner[:-1]))
        cost, use = self._problem.cost[open_], self._use[open_]
        # Hot at first, as far as the bound has to rise to prune the node; cold at last, so that
        # the soft minimum is within the gap of the true one.
        widest = float(np.ptp(cost)) or max(float(np.abs(cost).max()), 1e-30)
        coldest = max(0.05 * self._gap if self._gap < np.inf else 0.0, 1e-9 * widest)
        best = here = self._soft(cost, use, start, place, prices, widest)
        room = min(self._cutoff - best.value, widest)
        temperature = hottest = max(_HOTTEST * room, coldest)
        cooling = (coldest / hottest) ** (1.0 / (_TEMPERATURES - 1))
        here = self._soft(cost, use, start, place, prices, temperature)
        for _ in range(_TEMPERATURES):
            for _ in range(_STEPS_PER_TEMPERATURE):
                if best.value >= self._cutoff:
                    break
                direction = self._direction(use, here.share, start, here.prices, temperature)
                if direction is None:
                    break
                length, moved = 1.0, None
                for _ in range(_MOST_HALVINGS):
                    there = np.maximum(here.prices + length * direction, 0.0)
                    moved = self._soft(cost, use, start, place, there, temperature)
                    if moved.value > best.value:
                        best = moved
                    if moved.smooth >= here.smooth:
                        break
                    length *= 0.3
                else:
                    break
                gained = moved.smooth - here.smooth
                here = moved
                if gained <= 1e-3 * temperature:
                    break
            if best.value >= self._cutoff:
                break
            temperature *= cooling
            here = self._soft(cost, use, start, place, here.prices, temperature)
        if best.value < self._cutoff and here.value > best.value - 10 * coldest:
            best = here  # its fractions are the sharper ones
        hits = np.flatnonzero(best.reduced == 0)
        firsts = hits[np.append(True, place[hits][1:] != place[hits][:-1])]
        return _Node(
            open=open_,
            start=start,
            value=best.value,
            prices=best.prices,
            reduced=best.reduced,
            share=best.share,
            items=open_[firsts],
        )

    def _soft(
        self,
        cost: FloatArray,
        use: FloatArray,
        start: IntArray,
        place: IntArray,
        prices: FloatArray,
        temperature: float,
    ) -> _Soft:
        """The bound, its smooth form and the soft choices at some prices."""
        priced = cost + use @ prices
        least = np.minimum.reduceat(priced, start)
        reduced = priced - least[place]
        total, paid = float(least.sum()), prices * self._capacity
        # High prices make both parts large; what their difference may be off by is given up.
        slip = _ROUNDING * (float(np.abs(least).sum()) + float(np.abs(paid).sum()))
        value = total - float(paid.sum()) - slip
        weight = np.exp(reduced * (-1.0 / temperature))
        weights = np.add.reduceat(weight, start)
        return _Soft(
            prices=prices,
            value=value,
            smooth=value - temperature * float(np.log(weights).sum()),
            reduced=reduced,
            share=weight / weights[place],
        )

    def _direction(
        self,
        use: FloatArray,
        share: FloatArray,
        start: IntArray,
        prices: FloatArray,
        temperature: float,
    ) -> FloatArray | None:
        """Newton's step for the smooth bound over the rows that may move; None at the top."""
        weighted = share[:, None] * use
        slope = weighted.sum(axis=0) - self._capacity
        free = (prices > 0) | (slope > 0)
        if not free.any() or np.abs(slope[free]).max() <= 1e-12:
            return None
        mean = np.add.reduceat(weighted, start, axis=0)
        spread = (use.T @ weighted - mean.T @ mean)[np.ix_(free, free)]
        # A row that no soft choice moves has no curvature: keep the step within reason.
        scale = max(float(np.trace(spread)) / len(spread), 1e-12)
        step = np.linalg.solve(
            spread + 1e-6 * scale * np.eye(len(spread)), slope[free] * temperature
        )
        direction = np.zeros(len(prices))
        most = 10.0 * max(float(np.abs(prices).max(initial=0.0)), 100.0 * temperature)
        direction[free] = np.clip(step, -most, most)
        return direction

    # -- branching -------------------------------------------------------------------------

    def _branch(self, node: _Node, possible: BoolArray) -> list[tuple[IntArray, float]]:
        """Two children: the class whose likely items spread the most cost, split at its mean.

        An item is the likelier the further its reduced cost is from what prunes it; the
        relaxation's own fractions would look at as many classes as there are rows only.
        """
        owner = self._class[node.open]
        counts = np.add.reduceat(possible.astype(np.int64), node.start)
        choices = np.flatnonzero(counts > 1)
        if not len(choices):
            return []
        cost = self._problem.cost[node.open]
        place = np.cumsum(np.append(False, owner[1:] != owner[:-1]))
        # Without a good solution the room is wide, and says less than the costs themselves.
        room = min(self._cutoff - node.value, float(node.reduced[possible].max()))
        softness = max(room * _SOFTNESS, 1e-300)
        share = np.where(possible, np.exp(-node.reduced / softness), 0.0)
        share /= np.add.reduceat(share, node.start)[place]
        # What an item moves: its cost, and what it uses of every row at the row's price. Near
        # a tie these cancel, so each is counted by itself.
        parts = np.column_stack([cost, self._use[node.open] * node.prices])
        mean = np.add.reduceat(share[:, None] * parts, node.start, axis=0)
        spread = np.add.reduceat(share[:, None] * np.abs(parts - mean[place]), node.start, axis=0)
        pick = int(choices[spread.sum(axis=1)[choices].argmax()])
        part = int(spread[pick].argmax())
        mine = np.flatnonzero(possible & (place == pick))
        amount = parts[mine, part]
        order = mine[np.argsort(amount, kind="stable")]
        split = int(np.searchsorted(np.sort(amount), mean[pick, part], side="right"))
        split = min(max(split, 1), len(order) - 1)
        others = possible & (place != pick)
        children = []
        for side in (order[:split], order[split:]):
            keep = others.copy()
            keep[side] = True
            least = node.value + float(node.reduced[side].min())
            children.append((node.open[keep], least))
        return children

    # -- solutions -------------------------------------------------------------------------

    def _complete(self, node: _Node) -> None:
        """Look for solutions near a node's minimiser, by one change or two."""
        problem, items = self._problem, node.items
        cost = float(problem.cost[items].sum())
        room = problem.capacity - problem.use[items].sum(axis=0)
        if (room >= 0).all():
            self._offer(items, cost)
        pairs = self._nodes % _PAIRS_EVERY == 1 or self._best is None
        others = np.flatnonzero(~np.isin(node.open, items))
        if not len(others):
            return
        most = _MOST_PAIRED if pairs else 4 * _MOST_PAIRED
        if len(others) > most:
            nearest = np.argpartition(node.reduced[others], most)[:most]
            others = np.sort(others[nearest])
        cells = node.open[others]
        owner = self._class[cells]
        gain = problem.cost[cells] - problem.cost[items[owner]]
        use = problem.use[cells] - problem.use[items[owner]]
        below = self._below() - cost
        single = np.flatnonzero((gain < below) & (use <= room).all(axis=1))
        for index in single[np.argsort(gain[single], kind="stable")][:2].tolist():
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
