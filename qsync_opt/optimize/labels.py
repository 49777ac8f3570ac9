"""Labels of a knapsack's decided classes, and the prices that bound what is undecided.

Any prices y >= 0 on the rows bound a label, which is what the decided classes cost and use:

    cost + y . (use - capacity) + sum over the undecided classes of min_i (w_i + y . u_i).

Labels that use like amounts can be merged into one that stands for all of them: for every y of
a fixed bundle it keeps the least of cost + y . use, so its bounds stay true. In the limit of
one label this is the Lagrangian, in the limit of none merged an enumeration; in between, it is
dynamic programming over the rows whose items are large, with the others priced.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from qsync_opt.optimize.arrays import BoolArray, FloatArray, IntArray

#: Side of the finest cells in which labels are merged, as a part of the room to prune, in rows
#: whose items are large, and in the others, whose items are less than this part of the room.
_FINE, _COARSE, _SMALL = 1 / 256, 1 / 4, 1 / 4


class Bundle:
    """Prices, and what they bound the undecided classes by at every depth.

    Args:
        order: open items, class by class in the order of deciding.
        cost: of all items, [I].
        use: of all items, scaled, [I, R].
        capacity: scaled, [R].
    """

    def __init__(
        self, order: list[IntArray], cost: FloatArray, use: FloatArray, capacity: FloatArray
    ) -> None:
        flat = np.concatenate(order)
        self._start = np.cumsum([0, *(len(part) for part in order[:-1])])
        self._cost, self._use, self._capacity = cost[flat], use[flat], capacity
        self.prices: FloatArray = np.zeros((0, len(capacity)))
        self.rest: FloatArray = np.zeros((0, len(order) + 1))
        least = np.minimum.reduceat(self._use, self._start, axis=0)
        #: Least use of the classes from each depth on, [C + 1, R].
        self.least_use = np.vstack([np.cumsum(least[::-1], axis=0)[::-1], np.zeros(len(capacity))])

    def add(self, prices: FloatArray) -> None:
        """Take prices into the bundle."""
        priced = np.minimum.reduceat(self._cost + weighed(self._use, prices), self._start)
        paid = float((prices * self._capacity).sum())
        rest = np.append(np.cumsum(priced[::-1])[::-1], 0.0) - paid
        self.prices = np.vstack([self.prices, prices])
        self.rest = np.vstack([self.rest, rest])

    def bounds(self, cost: FloatArray, use: FloatArray, depth: int, newest: bool) -> FloatArray:
        """Bounds of labels by all prices (or by the newest alone), [n]."""
        first = len(self.prices) - 1 if newest else 0
        best = np.full(len(cost), -np.inf)
        for prices, rest in zip(self.prices[first:], self.rest[first:, depth], strict=True):
            np.maximum(best, weighed(use, prices) + rest, out=best)
        result: FloatArray = cost + best
        return result

    def best(self, use: FloatArray, depth: int) -> FloatArray:
        """The prices that bound a label best, [R]."""
        by_price = weighed(self.prices, use) + self.rest[:, depth]
        prices: FloatArray = self.prices[int(by_price.argmax())]
        return prices


def weighed(rows: FloatArray, weights: FloatArray) -> FloatArray:
    """`rows @ weights` without BLAS, whose threads cost more here and change the rounding."""
    result: FloatArray = np.einsum("ij,j->i", rows, weights)
    return result


def by_cell(cell: FloatArray | IntArray, bound: FloatArray) -> tuple[IntArray, BoolArray]:
    """Labels cell by cell, the least bound of a cell first.

    Args:
        cell: of every label, [n, rows].
        bound: of every label, [n].

    Returns:
        The order, and whether a new cell begins at each place of it, [n] each.
    """
    order = np.lexsort([bound, *cell.T])
    ranked = cell[order]
    return order, np.append(True, (ranked[1:] != ranked[:-1]).any(axis=1))


@dataclass(eq=False)
class Labels:
    """The labels of one depth, and where each came from at every depth before.

    Attributes:
        cost: of the decided classes, [n].
        use: scaled, [n, R].
        bound: [n].
        parents: of the labels of each depth, among those of the depth before.
        items: item that each took there.
    """

    cost: FloatArray
    use: FloatArray
    bound: FloatArray
    parents: list[IntArray] = field(default_factory=list)
    items: list[IntArray] = field(default_factory=list)

    @classmethod
    def root(cls, rows: int, bound: float) -> Labels:
        """The one label of nothing decided."""
        return cls(cost=np.zeros(1), use=np.zeros((1, rows)), bound=np.array([bound]))

    def keep(self, which: BoolArray | IntArray) -> None:
        """Drop all other labels of this depth."""
        self.cost, self.use, self.bound = self.cost[which], self.use[which], self.bound[which]
        if self.parents:
            self.parents[-1], self.items[-1] = self.parents[-1][which], self.items[-1][which]

    def extend(self, items: IntArray, cost: FloatArray, use: FloatArray) -> None:
        """Give every label each of a class's items."""
        count = len(self.cost)
        parent = np.repeat(np.arange(count), len(items))
        item = np.tile(items, count)
        self.cost = self.cost[parent] + cost[item]
        self.use = self.use[parent] + use[item]
        self.bound = self.bound[parent]
        self.parents.append(parent)
        self.items.append(item)

    def path(self, label: int) -> IntArray:
        """The items of a label, in the order of deciding."""
        taken = []
        for parents, items in zip(reversed(self.parents), reversed(self.items), strict=True):
            taken.append(int(items[label]))
            label = int(parents[label])
        return np.array(taken[::-1], dtype=np.int64)


class MergedLabels:
    """Labels each of which may stand for many; `real` holds one of those of each.

    Args:
        bundle: the prices, which must not change from now on.
        cost: of all items, [I].
        use: of all items, scaled, [I, R].
        bound: of the one label of nothing decided.
    """

    def __init__(self, bundle: Bundle, cost: FloatArray, use: FloatArray, bound: float) -> None:
        rows = use.shape[1]
        self._bundle, self._cost, self._use = bundle, cost, use
        #: cost + y . use of every item, [Q, I].
        self._item = np.array([cost + weighed(use, prices) for prices in bundle.prices])
        self.real = Labels.root(rows, bound)
        self.bound: FloatArray = np.array([bound])
        self._priced: FloatArray = np.zeros((len(bundle.prices), 1))
        self._least_use: FloatArray = np.zeros((1, rows))
        self.alone: BoolArray = np.ones(1, dtype=np.bool_)

    def __len__(self) -> int:
        return len(self.bound)

    def keep(self, which: BoolArray | IntArray) -> None:
        """Drop all other labels of this depth."""
        self.real.keep(which)
        self.bound, self._priced = self.bound[which], self._priced[:, which]
        self._least_use, self.alone = self._least_use[which], self.alone[which]

    def extend(self, items: IntArray, depth: int, room: FloatArray) -> None:
        """Give every label each of a class's items; drop those that no longer fit, and bound."""
        self.real.extend(items, self._cost, self._use)
        parent, item = self.real.parents[-1], self.real.items[-1]
        self._least_use = self._least_use[parent] + self._use[item]
        self._priced = self._priced[:, parent] + self._item[:, item]
        self.alone = self.alone[parent]
        self.bound = (self._priced + self._bundle.rest[:, depth, None]).max(axis=0)
        fits: BoolArray = np.all(self._least_use <= room, axis=1)
        if not fits.all():
            self.keep(fits)

    def merge(
        self, depth: int, width: int, room: float, large: FloatArray, units: FloatArray
    ) -> None:
        """Merge labels of like use until at most `width` are left.

        Args:
            depth: classes decided.
            width: most labels.
            room: what their bounds have to rise by to be pruned.
            large: largest use of an item in every row, in these units, [R].
            units: what uses of the rows are worth, [R]; 0 in rows that need not be alike.
        """
        real = self.real
        real.bound = self._bundle.bounds(real.cost, real.use, depth, newest=False)
        rows = np.flatnonzero(large > 0)
        side = np.where(large[rows] > _SMALL * room, _FINE, _COARSE) * max(room, 1e-300)
        place = real.use[:, rows] * (units[rows] / side)
        while True:
            cell = np.floor(place).astype(np.int64)
            order, new = by_cell(cell, real.bound)
            if new.sum() <= width or not len(rows):
                break
            place *= 0.5
        first = np.flatnonzero(new)
        priced = np.minimum.reduceat(self._priced[:, order], first, axis=1)
        least_use = np.minimum.reduceat(self._least_use[order], first, axis=0)
        alone = np.logical_and.reduceat(self.alone[order], first)
        alone &= np.diff(np.append(first, len(order))) == 1
        self.keep(order[first])
        self._priced, self._least_use, self.alone = priced, least_use, alone
        self.bound = (priced + self._bundle.rest[:, depth, None]).max(axis=0)
