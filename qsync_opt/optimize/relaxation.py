"""`relax`: the linear relaxation of a multiple-choice knapsack, by prices on its few rows.

For prices y >= 0 the bound  D(y) = sum_c min_i (w_i + y . u_i) - y . capacity  equals the linear
relaxation at its best. With few rows the best is found by Newton's method on the smooth function
in which each minimum is a soft minimum at temperature t (Nesterov, 2005); the exact D is
evaluated along the way, so the bound is valid whatever the temperature.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from qsync_opt.optimize.arrays import FloatArray, IntArray
from qsync_opt.optimize.labels import weighed

#: Newton steps at one temperature.
_STEPS_PER_TEMPERATURE = 4

#: Temperatures tried, and the first as a fraction of what the bound has to rise.
_TEMPERATURES = 3
_HOTTEST = 0.1

#: Relative error of a sum over the classes.
_ROUNDING = 1e-14

#: Times a step may be shortened.
_MOST_HALVINGS = 6


@dataclass(frozen=True, kw_only=True, eq=False)
class Relaxation:
    """The bound at some prices.

    Attributes:
        prices: of the rows, [R].
        value: D, exact but for rounding, which is taken off.
        smooth: D with soft minima.
        reduced: reduced cost of every item, 0 for the best of its class, [n].
        share: soft choice of every item, [n].
        items: the minimising item of every class, a place among the n, [C].
    """

    prices: FloatArray
    value: float
    smooth: float
    reduced: FloatArray
    share: FloatArray
    items: IntArray


class _Items:
    """Items that are open, in classes: w [n], u [n, R], first of each class [C]."""

    def __init__(
        self, cost: FloatArray, use: FloatArray, start: IntArray, capacity: FloatArray
    ) -> None:
        self.cost, self.use, self.start, self.capacity = cost, use, start, capacity
        self.place = np.zeros(len(cost), dtype=np.int64)
        self.place[start[1:]] = 1
        self.place = np.cumsum(self.place)

    def at(self, prices: FloatArray, temperature: float) -> Relaxation:
        """The bound, its smooth form and the soft choices at some prices."""
        priced = self.cost + weighed(self.use, prices)
        least = np.minimum.reduceat(priced, self.start)
        reduced = priced - least[self.place]
        total, paid = float(least.sum()), prices * self.capacity
        # High prices make both parts large; what their difference may be off by is given up.
        slip = _ROUNDING * (float(np.abs(least).sum()) + float(np.abs(paid).sum()))
        value = total - float(paid.sum()) - slip
        weight = np.exp(reduced * (-1.0 / temperature))
        weights = np.add.reduceat(weight, self.start)
        hits = np.flatnonzero(reduced == 0)
        first = np.append(True, self.place[hits][1:] != self.place[hits][:-1])
        return Relaxation(
            prices=prices,
            value=value,
            smooth=value - temperature * float(np.log(weights).sum()),
            reduced=reduced,
            share=weight / weights[self.place],
            items=hits[first],
        )

    def direction(
        self, share: FloatArray, prices: FloatArray, temperature: float
    ) -> FloatArray | None:
        """Newton's step for the smooth bound over the rows that may move; None at the top."""
        weighted = share[:, None] * self.use
        slope = weighted.sum(axis=0) - self.capacity
        free = (prices > 0) | (slope > 0)
        if not free.any() or np.abs(slope[free]).max() <= 1e-12:
            return None
        mean = np.add.reduceat(weighted, self.start, axis=0)
        spread = np.einsum("ir,is->rs", self.use, weighted) - np.einsum("ir,is->rs", mean, mean)
        spread = spread[np.ix_(free, free)]
        # A row that no soft choice moves has no curvature: keep the step within reason.
        scale = max(float(np.trace(spread)) / len(spread), 1e-12)
        step = np.linalg.solve(
            spread + 1e-6 * scale * np.eye(len(spread)), slope[free] * temperature
        )
        direction = np.zeros(len(prices))
        most = 10.0 * max(float(np.abs(prices).max(initial=0.0)), 100.0 * temperature)
        direction[free] = np.clip(step, -most, most)
        return direction


def relax(
    cost: FloatArray,
    use: FloatArray,
    start: IntArray,
    capacity: FloatArray,
    *,
    prices: FloatArray,
    enough: float,
    fine: float,
) -> Relaxation:
    """The best bound of a knapsack.

    Args:
        cost: w of the items, class by class, [n], n > 0.
        use: u, in units that make prices comparable, [n, R].
        start: first item of every class, [C].
        capacity: [R].
        prices: to start from, [R].
        enough: a bound of this much is as good as any other.
        fine: temperature at which soft minima are as good as true ones; 0 for the least.
    """
    items = _Items(cost, use, start, capacity)
    # Hot at first, as far as the bound has to rise; cold at last.
    widest = float(np.ptp(cost)) or max(float(np.abs(cost).max()), 1e-30)
    coldest = max(fine, 1e-9 * widest)
    best = here = items.at(prices, widest)
    room = min(enough - best.value, widest)
    temperature = hottest = max(_HOTTEST * room, coldest)
    cooling = (coldest / hottest) ** (1.0 / (_TEMPERATURES - 1))
    for _ in range(_TEMPERATURES):
        here = items.at(here.prices, temperature)
        for _ in range(_STEPS_PER_TEMPERATURE):
            if best.value >= enough:
                return best
            direction = items.direction(here.share, here.prices, temperature)
            if direction is None:
                break
            length = 1.0
            for _ in range(_MOST_HALVINGS):
                there = np.maximum(here.prices + length * direction, 0.0)
                moved = items.at(there, temperature)
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
        temperature *= cooling
    return best
