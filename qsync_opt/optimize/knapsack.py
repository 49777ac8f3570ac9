"""Exact search of multiple-choice knapsacks with few rows, by labels and shared bounds.

    minimise  sum_c w[i_c]   over one item i_c per class c,
    subject to  sum_c u[i_c, r] <= capacity_r   for every row r.

Classes are decided one after another, those first whose likely items spread the most cost:
the large items that separate the linear relaxation from the optimum. A label is what the
decided classes cost and use. Any prices y >= 0 on the rows bound every label at once,

    cost + y . (use - capacity) + sum over the undecided classes of min_i (w_i + y . u_i),

so a bundle of good prices prunes whole arrays of labels by one matrix product. The bundle is
made as the search goes: prices that are best for the label of the least bound (`relaxation`)
join it while they lift that bound, and their minimising items, with one or two of them
changed, are tried as solutions. What is left once the large items are decided is fine-grained:
its relaxation is all but reached, and either prunes a label or gives a better solution.

The search is a beam: labels beyond its width are dropped, and the least bound of those dropped
is part of the result. If that leaves the search unfinished, it is repeated with labels merged
instead (`labels`), which proves the bound where large items of a row add up in too many ways
to be listed, at the bundle's prices on the rows whose items are small.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from qsync_opt.optimize.arrays import BoolArray, FloatArray, IntArray
from qsync_opt.optimize.exchange import exchange
from qsync_opt.optimize.labels import Bundle, Labels, MergedLabels, by_cell
from qsync_opt.optimize.relaxation import Relaxation, relax

#: Temperature of the likelihood that the order goes by, as a fraction of the room to prune.
_SOFTNESS = 0.5

#: Items that are combined in pairs, those of least reduced cost.
_MOST_PAIRED = 256

#: Relaxations at one depth: as many while they help, fewer and fewer where they do not, but
#: one at least at every so many depths, and where labels are many.
_MOST_RELAXED = 6
_RELAXED_EVERY = 4
_MANY_LABELS = 2_000

#: Side of a cell of labels that use like amounts, as a part of the room to prune, and how many
#: of a cell are as good as the best of others.
_CELL = 0.125
_PER_CELL = 1

#: Prices of the bundle that merged labels are bounded by, and how often solutions near the
#: best of them are looked for.
_MOST_PRICES = 40
_COMPLETED_EVERY = 8

#: Exchanges of two items made in a row.
_EXCHANGES = 12

#: Merged labels that are mended at the end: the ones they stand for break a row by a little.
_MENDED = 24

#: Part of the room that prices have to lift the least bound by to be worth keeping.
_WORTHWHILE = 0.02

#: Relative error of sums of uses in another order; labels this close to a capacity stay.
_ROUNDING = 1e-9


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
        relaxations: how often prices were optimised.
        labels: labels looked at.
    """

    items: IntArray | None
    cost: float
    bound: float
    complete: bool
    relaxations: int
    labels: int


class KnapsackSearch:
    """The search; see the module.

    Args:
        problem: the knapsack.
        prices: prices to start from, [R].
        target: solutions that cost at least this are not wanted.
        gap: stop once the best solution found is within this of the bound.
        width: most labels at a time in the beam.
        merged_widths: most labels at a time where they are merged, one pass after another.
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
        width: int,
        merged_widths: Sequence[int] = (),
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
        self._target, self._gap = target, gap
        self._width, self._merged_widths = width, merged_widths
        self._best: IntArray | None = None
        self._cost = np.inf
        self._near: IntArray | None = None  # the best within the capacities, wanted or not
        self._near_cost = np.inf
        self._relaxations = self._labels = 0
        self._units: FloatArray | None = None  # prices by which merging compares uses

    @property
    def _cutoff(self) -> float:
        """Labels whose bound reaches this hold nothing wanted."""
        return min(self._target, self._cost - self._gap)

    def solve(self) -> KnapsackSolution:
        """Run the search."""
        if self._stop():
            return self._solution(-np.inf)
        everything = np.arange(len(self._class))
        root = self._relax(everything, self._capacity, self._start_prices, 0.0)
        self._complete(root.items, everything, root.reduced)
        bound, passes = root.value, [self._beam, *map(self._merging, self._merged_widths)]
        bundle: Bundle | None = None
        for run in passes:
            if bound >= self._cutoff or self._stop():
                break
            possible = root.reduced < self._cutoff - root.value
            left_out = root.value + float(root.reduced[~possible].min(initial=np.inf))
            before, room = bound, self._cutoff - root.value
            reached, bundle = run(root, everything[possible], bundle)
            bound = max(bound, min(reached, left_out))
            if bound >= self._cutoff:
                break
            self._polish()
            if run != self._beam and bound - before < _WORTHWHILE * room:
                break  # more labels would do no more
        return self._solution(bound)

    def _solution(self, bound: float) -> KnapsackSolution:
        return KnapsackSolution(
            items=self._best,
            cost=self._cost,
            bound=min(bound, self._cost),
            complete=bound >= self._cutoff,
            relaxations=self._relaxations,
            labels=self._labels,
        )

    # -- one beam --------------------------------------------------------------------------

    def _bundle(self, root: Relaxation, order: list[IntArray], known: Bundle | None) -> Bundle:
        bundle = Bundle(order, self._problem.cost, self._use, self._capacity)
        bundle.add(root.prices)
        if known is not None:
            for prices in known.prices[1:_MOST_PRICES]:
                bundle.add(prices)
        return bundle

    def _slack(self, open_: IntArray) -> FloatArray:
        """What sums of uses may be off by, scaled, [R]."""
        slack: FloatArray = _ROUNDING * (
            np.abs(self._capacity) + np.abs(self._use[open_]).sum(axis=0)
        )
        return slack

    def _beam(
        self, root: Relaxation, open_: IntArray, known: Bundle | None
    ) -> tuple[float, Bundle]:
        """Decide class after class with at most `width` labels.

        Returns:
            A lower bound of the solutions with open items only, and the prices found.
        """
        order, width = self._order(root, open_), self._width
        bundle = self._bundle(root, order, known)
        labels = Labels.root(len(self._capacity), root.value)
        pruned, tries = np.inf, float(_MOST_RELAXED)
        slack = self._slack(open_)
        for depth, items in enumerate(order, start=1):
            if self._stop():
                return min(pruned, float(labels.bound.min())), bundle
            labels.extend(items, self._problem.cost, self._use)
            self._labels += len(labels.cost)
            room = self._capacity + slack - bundle.least_use[depth]
            labels.bound = bundle.bounds(labels.cost, labels.use, depth, newest=False)
            fits = (labels.use <= room).all(axis=1)
            if not fits.all():
                labels.keep(fits)
            pruned = min(pruned, self._prune(labels))
            if depth < len(order):
                due = depth % _RELAXED_EVERY == 0 or len(labels.cost) > _MANY_LABELS
                least, helped = self._lift(labels, bundle, order, depth, max(int(tries), int(due)))
                tries = min(2.0 * tries + 1.0, _MOST_RELAXED) if helped else tries / 2.0
                pruned = min(pruned, least)
            if not len(labels.cost):
                return pruned, bundle
            if len(labels.cost) > width:
                chosen = self._select(labels, root.prices, width)
                pruned = min(pruned, float(labels.bound[~chosen].min()))
                labels.keep(chosen)
        return min(pruned, self._finish(labels)), bundle

    def _finish(self, labels: Labels) -> float:
        """Offer what is decided in full, if it keeps every row to the last byte; least cost."""
        for label in np.argsort(labels.cost, kind="stable").tolist():
            cost = float(labels.cost[label])
            if cost >= self._cutoff:
                return cost
            chosen = labels.path(label)
            chosen = chosen[np.argsort(self._class[chosen])]
            if self._keeps(chosen):
                self._offer(chosen, cost)
                if cost >= self._cutoff:
                    return cost
        return np.inf

    def _merging(
        self, width: int
    ) -> Callable[[Relaxation, IntArray, Bundle | None], tuple[float, Bundle]]:
        """A pass in which at most `width` labels are left by merging; see `_beam`."""

        def run(root: Relaxation, open_: IntArray, known: Bundle | None) -> tuple[float, Bundle]:
            order = self._order(root, open_)
            bundle = self._bundle(root, order, known)
            labels = MergedLabels(bundle, self._problem.cost, self._use, root.value)
            slack, pruned = self._slack(open_), np.inf
            learned: list[FloatArray] = []  # for the next pass: merged labels know no others
            if self._units is None:  # of the first pass: what later ones learn is for few labels
                self._units = bundle.prices.max(axis=0)
            large = np.zeros(len(self._units))
            for items in order:
                spread = np.ptp(self._use[items], axis=0) * self._units
                large = np.maximum(large, spread)
            for depth, items in enumerate(order, start=1):
                if self._stop():
                    return min(pruned, float(labels.bound.min())), bundle
                labels.extend(items, depth, self._capacity + slack - bundle.least_use[depth])
                self._labels += len(labels)
                pruned = min(pruned, self._prune(labels))
                if not len(labels):
                    return pruned, bundle
                if len(labels) > width:
                    room = self._cutoff - float(labels.bound.min())
                    labels.merge(
                        depth, width, min(room, float(np.ptp(labels.bound))), large, self._units
                    )
                if depth < len(order) and depth % _COMPLETED_EVERY == 0:
                    label = int(labels.bound.argmin())
                    before = float(labels.bound[label])
                    best = self._look_near(labels.real, label, bundle, order, depth)
                    lifted = float(labels.real.cost[label]) + best.value - before
                    if lifted > _WORTHWHILE * min(self._cutoff - before, abs(before)):
                        learned.append(best.prices)
            self._finish(labels.real)
            for label in np.argsort(labels.bound, kind="stable")[:_MENDED].tolist():
                path = labels.real.path(label)
                self._relaxations += 1
                self._complete(path, open_, root.reduced[open_])
            # A label that stands for itself alone is a solution, looked at just now, or none.
            left = ~labels.alone & (labels.bound < self._cutoff)
            unsure = float(labels.bound[left].min(initial=np.inf))
            for found in learned:
                bundle.add(found)
            return min(pruned, unsure, self._cost), bundle

        return run

    def _select(self, labels: Labels, prices: FloatArray, width: int) -> BoolArray:
        """The labels to go on with: those of least bound, but few that use the same, [n].

        Labels that are alike end alike; the best of each cell of like ones comes first.
        """
        count = len(labels.cost)
        least = float(labels.bound.min())
        room = min(self._cutoff - least, float(labels.bound.max()) - least)
        priced = prices > 0
        cell = np.floor(labels.use[:, priced] * (prices[priced] / max(room * _CELL, 1e-300)))
        order, first = by_cell(cell, labels.bound)
        place = np.arange(count) - np.maximum.accumulate(np.where(first, np.arange(count), 0))
        rank = np.empty(count, dtype=np.int64)
        rank[order] = np.where(place < _PER_CELL, 0, 1)
        best = np.lexsort([labels.bound, rank])[:width]
        chosen: BoolArray = np.zeros(count, dtype=np.bool_)
        chosen[best] = True
        return chosen

    def _prune(self, labels: Labels | MergedLabels) -> float:
        """Drop the labels that hold nothing wanted; the least bound of those."""
        wanted = labels.bound < self._cutoff
        if wanted.all():
            return np.inf
        least = float(labels.bound[~wanted].min())
        labels.keep(wanted)
        return least

    def _lift(
        self, labels: Labels, bundle: Bundle, order: list[IntArray], depth: int, tries: int
    ) -> tuple[float, bool]:
        """Relax the best label of each item just taken, for its prices and its solutions.

        Returns:
            The least bound of the labels pruned, and whether prices or solutions were better.
        """
        pruned, helped = np.inf, False
        for item in order[depth - 1][:tries].tolist():
            if not len(labels.cost) or self._stop():
                break
            mine = np.flatnonzero(labels.items[-1] == item)
            if not len(mine):
                continue
            label = int(mine[labels.bound[mine].argmin()])
            before, known = float(labels.bound[label]), self._cost
            best = self._look_near(labels, label, bundle, order, depth)
            helped |= self._cost < known
            lifted = float(labels.cost[label]) + best.value - before
            if lifted > _WORTHWHILE * min(self._cutoff - before, abs(before)):
                helped = True
                bundle.add(best.prices)
                newest = bundle.bounds(labels.cost, labels.use, depth, newest=True)
                labels.bound = np.maximum(labels.bound, newest)
            pruned = min(pruned, self._prune(labels))
        return pruned, helped

    def _look_near(
        self, labels: Labels, label: int, bundle: Bundle, order: list[IntArray], depth: int
    ) -> Relaxation:
        """Relax the undecided classes after a label, and look for solutions near by."""
        rest = np.sort(np.concatenate(order[depth:]))
        use = labels.use[label]
        prices = bundle.best(use, depth)
        best = self._relax(rest, self._capacity - use, prices, float(labels.cost[label]))
        path = labels.path(label)
        self._complete(
            np.concatenate([path, rest[best.items]]),
            np.concatenate([path, rest]),
            np.concatenate([np.zeros(len(path)), best.reduced]),
        )
        return best

    def _relax(
        self, open_: IntArray, capacity: FloatArray, prices: FloatArray, paid: float
    ) -> Relaxation:
        """The best bound over some items, ascending, once `paid` is spent on the others."""
        self._relaxations += 1
        owner = self._class[open_]
        return relax(
            self._problem.cost[open_],
            self._use[open_],
            np.flatnonzero(np.append(True, owner[1:] != owner[:-1])),
            capacity,
            prices=prices,
            enough=self._cutoff - paid,
            fine=0.05 * self._gap if np.isfinite(self._gap) else 0.0,
        )

    def _order(self, root: Relaxation, open_: IntArray) -> list[IntArray]:
        """The open items of every class, the class first whose likely items spread the most.

        An item is the likelier the further its reduced cost is from what prunes it; the
        relaxation's own fractions would look at as many classes as there are rows only.
        """
        owner = self._class[open_]
        start = np.flatnonzero(np.append(True, owner[1:] != owner[:-1]))
        place = np.cumsum(np.append(False, owner[1:] != owner[:-1]))
        reduced = root.reduced[open_]
        # Without a good solution the room is wide, and says less than the costs themselves.
        room = min(self._cutoff - root.value, float(reduced.max()))
        share = np.exp(-reduced / max(room * _SOFTNESS, 1e-300))
        share /= np.add.reduceat(share, start)[place]
        # What an item moves: its cost, and what it uses of every row at the row's price. Near
        # a tie these cancel, so each is counted by itself.
        parts = np.column_stack([self._problem.cost[open_], self._use[open_] * root.prices])
        mean = np.add.reduceat(share[:, None] * parts, start, axis=0)
        spread = np.add.reduceat(share[:, None] * np.abs(parts - mean[place]), start, axis=0)
        order = np.argsort(-spread.max(axis=1), kind="stable")
        classes = np.split(open_, start[1:])
        return [classes[c] for c in order.tolist()]

    # -- solutions -------------------------------------------------------------------------

    def _keeps(self, items: IntArray) -> bool:
        used = self._problem.use[items].sum(axis=0)
        return bool((used <= self._problem.capacity).all())

    def _complete(self, items: IntArray, open_: IntArray, reduced: FloatArray) -> None:
        """Look for solutions near some items, by one change or two.

        Args:
            items: one of every class, in any order, [C].
            open_: what they may change to, [n].
            reduced: reduced costs of these, which say what to try first, [n].
        """
        problem = self._problem
        items = items[np.argsort(self._class[items])]
        cost = float(problem.cost[items].sum())
        room = problem.capacity - problem.use[items].sum(axis=0)
        if (room >= 0).all():
            self._offer(items, cost)
        others = np.flatnonzero(items[self._class[open_]] != open_)
        if not len(others):
            return
        pairs = self._best is None  # pairs cost more, and a first solution is worth it
        most = _MOST_PAIRED if pairs else 4 * _MOST_PAIRED
        if len(others) > most:
            others = others[np.argpartition(reduced[others], most)[:most]]
        cells = np.sort(open_[others])
        owner = self._class[cells]
        gain = problem.cost[cells] - problem.cost[items[owner]]
        use = problem.use[cells] - problem.use[items[owner]]
        below = self._wanted() - cost
        single = np.flatnonzero((gain < below) & (use <= room).all(axis=1))
        for index in single[np.argsort(gain[single], kind="stable")][:2].tolist():
            self._take(items, cost, gain, cells, (index,))
        if not pairs:
            return
        below = self._wanted() - cost
        fits = (gain[:, None] + gain[None, :] < below) & (owner[:, None] != owner[None, :])
        for row in range(use.shape[1]):
            fits &= use[:, row][:, None] + use[:, row][None, :] <= room[row]
        first, second = np.nonzero(np.triu(fits, 1))
        if len(first):
            total = gain[first] + gain[second]
            for index in np.argsort(total, kind="stable")[:2].tolist():
                self._take(items, cost, gain, cells, (int(first[index]), int(second[index])))

    def _wanted(self) -> float:
        """Solutions below this are looked for; while there is none, any will do to start from."""
        return self._below() if self._near is not None else np.inf

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
        if cost < self._near_cost:
            self._near, self._near_cost = items, cost
        if cost < self._below() and self._accept(items):
            self._best, self._cost = items, float(self._problem.cost[items].sum())

    def _polish(self) -> None:
        """Offer what exchanges make of the best solution within the capacities."""
        if self._near is None:
            return
        items = exchange(
            self._near,
            owner=self._class,
            cost=self._problem.cost,
            use=self._problem.use,
            capacity=self._problem.capacity,
            rounds=_EXCHANGES,
            stop=self._stop,
        )
        self._offer(items, float(self._problem.cost[items].sum()))
