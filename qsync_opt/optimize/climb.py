"""`PriceClimb`: the best prices of a Lagrangian, by cutting planes in a box.

A Lagrangian L is concave and piecewise linear in its prices; each evaluation gives its value, a
slope (by how much the minimising plan breaks each row) and a plan. `maximise` climbs it by
cutting planes inside a box around the best prices so far (Marsten, Hogan and Blankenship,
1975), adding a row only once a plan breaks it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from qsync_opt.optimize.arrays import FloatArray, IntArray
from qsync_opt.optimize.backends import solve_linear
from qsync_opt.optimize.linear import LazyNames, ProgramBuilder

_MOST_ROUNDS = 300

#: A promised gain of this fraction is none.
_NEGLIGIBLE = 1e-13


@dataclass(frozen=True, kw_only=True, eq=False)
class Point:
    """One evaluation of the Lagrangian.

    Attributes:
        prices: per row (time rows, then memory points), per unit of the row's scale, [R].
        value: L at these prices: a lower bound of the optimum.
        objective: of the minimising plan (0 where time is the objective).
        excess: row value minus limit, in units of the row's scale, of that plan, [R].
        options: option of every variable, copies included.
    """

    prices: FloatArray
    value: float
    objective: float
    excess: FloatArray
    options: IntArray


@dataclass(frozen=True, kw_only=True, eq=False)
class Climb:
    """What a climb found.

    Attributes:
        best: the best point.
        points: every point, the known ones first.
        impossible: whether no plan keeps all limits: the Lagrangian exceeds every objective
            there is, so it has no finite maximum.
    """

    best: Point
    points: list[Point]
    impossible: bool


class PriceClimb(ABC):
    """What is climbed: a Lagrangian with its rows.

    Attributes:
        deadline_s: iteration time to keep; None where the iteration time is the objective.
        limit: right side of every row, those of time first, [R].
        time_rows: how many rows are of time.
        reference: the natural size of a price.
    """

    deadline_s: float | None
    limit: FloatArray
    time_rows: int
    reference: float

    @abstractmethod
    def evaluate(self, prices: FloatArray, closed: FloatArray | None = None) -> Point:
        """Value, slope and minimising plan at some prices; `closed` leaves options out."""

    @abstractmethod
    def ceiling(self) -> float:
        """What no objective exceeds: a value above it proves that no plan keeps all limits."""

    def maximise(
        self,
        *,
        tolerance: float,
        visit: Callable[[Point], bool],
        enough: Callable[[float], bool],
        start: FloatArray | None = None,
        known: Sequence[Point] = (),
        closed: FloatArray | None = None,
        rounds: int = _MOST_ROUNDS,
    ) -> Climb:
        """Climb to the best prices.

        Args:
            tolerance: stop when the cutting planes leave at most this fraction to gain.
            visit: called with every point; True stops the climb.
            enough: called with the best value so far; True stops the climb.
            start: prices to start from.
            known: points whose plans are allowed here; their planes are used from the start.
            closed: options that may not be taken, as for `evaluate`.
            rounds: most points evaluated.
        """
        if start is None:
            start = np.zeros(len(self.limit))
            if self.deadline_s is None:
                start[self.time_rows - 1] = 1.0
        best = point = self.evaluate(start, closed)
        if not math.isfinite(point.value):
            return Climb(best=point, points=[], impossible=True)
        points = [*known, point]
        used = (point.excess > 0) | (start > 0)
        if self.deadline_s is None:
            used[: self.time_rows] = True
        reach = (0.05 if not known else 0.01) * self.reference
        ceiling = self.ceiling()
        stalled = False
        for _ in range(rounds):
            if visit(point) or enough(best.value) or stalled or not used.any():
                break
            prices, promise, at_edge = self._climb(points, best, used, reach)
            gain = promise - best.value
            if not at_edge and gain <= tolerance * max(abs(best.value), 1e-300):
                break
            point = self.evaluate(prices, closed)
            points.append(point)
            fresh = (point.excess > 0) & ~used
            used |= fresh
            if point.value > best.value:
                if at_edge:
                    reach *= 4.0
                best = point
                if best.value > ceiling:
                    return Climb(best=best, points=points, impossible=True)
            elif not fresh.any():
                reach *= 0.5
            smallest = _NEGLIGIBLE * max(abs(best.value), abs(promise), 1e-300)
            stalled = gain <= smallest and not fresh.any()
        else:
            visit(point)
        return Climb(best=best, points=points, impossible=False)

    def _climb(
        self, points: list[Point], best: Point, used: np.ndarray, reach: float
    ) -> tuple[FloatArray, float, bool]:
        """Maximise the cutting planes within `reach` of the best prices, over the used rows.

        Returns:
            The prices, the planes' value there, and whether they lie on the box's edge.
        """
        rows = np.flatnonzero(used)
        center = best.prices[rows]
        low, high = np.maximum(center - reach, 0.0), center + reach
        builder = ProgramBuilder("cutting planes", named=False)
        unit = self.reference
        price = builder.add_columns(LazyNames(len(rows), list), lower=low / unit, upper=high / unit)
        value = builder.add_columns(LazyNames(1, list), objective=-1.0, lower=-np.inf, upper=np.inf)
        # value <= objective + sum prices x excess, for every plan seen.
        excess = np.array([point.excess[rows] for point in points])
        right = np.array([point.objective for point in points]) / unit
        plane = builder.add_rows(LazyNames(len(points), list), lower=-np.inf, upper=right)
        builder.add_entries(plane, np.broadcast_to(value, plane.shape), 1.0)
        builder.add_entries(
            np.repeat(plane, len(rows)), np.tile(price, len(points)), -excess.ravel()
        )
        if self.deadline_s is None:
            one = builder.add_rows(LazyNames(1, list), lower=1.0 / unit, upper=1.0 / unit)
            time = rows < self.time_rows
            builder.add_entries(np.repeat(one, int(time.sum())), price[time], 1.0)
        x = solve_linear(builder.build())
        prices = np.zeros(len(used))
        prices[rows] = np.maximum(x[price], 0.0) * unit
        if self.deadline_s is None:  # at the solver's tolerance the bound would be too high
            prices[: self.time_rows] /= prices[: self.time_rows].sum()
        edge = (prices[rows] >= high * (1 - 1e-9)) | ((prices[rows] <= low) & (low > 0))
        return prices, float(x[value][0]) * unit, bool(edge.any())
