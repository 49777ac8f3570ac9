"""`JointLagrangian`: prices on the rows of all kinds, with the bits of the buckets free.

With multipliers mu[r, k] on kind r's row of bucket k (ready[r, k] + sum_{j >= k} c_j(b_j) <= D)
the bits and the kinds fall apart:

    L = sum_r min over x_r of [ n_r a_r^2 f_r(x_r) + prices . (rows of r at x_r - limits) ]
      + sum_j min over b_j of [ v_j(b_j) + c_j(b_j) sum_r sum_{k <= j} mu[r, k] ]

Each kind's part is its own Lagrangian (`lagrangian`) at its prices over its weight; each
bucket's part is a minimum over a few codes. Limits are written for the slowest bits C_j of
every bucket, so that a bucket's term is v_j(b_j) + (c_j(b_j) - C_j) times the multipliers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from qsync_opt.optimize.arrays import FloatArray, IntArray
from qsync_opt.optimize.climb import Point, PriceClimb
from qsync_opt.optimize.evaluate import allowed_columns
from qsync_opt.optimize.factors import FactorGraph
from qsync_opt.optimize.lagrangian import Lagrangian
from qsync_opt.optimize.problem import AllocationProblem
from qsync_opt.optimize.rows import time_rows

#: Relative error of the few sums over buckets.
_ROUNDING = 1e-14


class JointLagrangian(PriceClimb):
    """The Lagrangian of all kinds together; see the module.

    Args:
        problem: a problem whose buckets have codes.
        kinds: indices of equal device kinds, one list for each distinct kind.
        deadline_s: iteration time to keep.

    Attributes:
        parts: the Lagrangian of each distinct kind at the slowest bits.
        weights: n_r a_r^2 of each, summed over the kinds that are equal.
        exact: whether all parts are.
        choices: the codes of every bucket.
        variance: what each code of each bucket adds to the objective, [K] arrays.
        saved_s: by how much each code is faster than the bucket's slowest, [K] arrays.
        counts: per distinct kind, whether a bucket's reduction is in a row, [rows, K].
    """

    def __init__(
        self, problem: AllocationProblem, kinds: Sequence[Sequence[int]], deadline_s: float
    ) -> None:
        slowest = [max(b.choices, key=lambda c: c.all_reduce_s) for b in problem.buckets]
        fixed = problem.at_bits([code.bits for code in slowest])
        self.deadline_s = deadline_s
        self.parts = []
        for members in kinds:
            device = fixed.devices[members[0]]
            graph = FactorGraph(fixed, device, allowed_columns(fixed, device))
            if not graph.feasible:
                raise NoPlanError
            self.parts.append(Lagrangian(graph, deadline_s))
        self.weights = [
            sum(problem.weight(problem.devices[index]) for index in members) for members in kinds
        ]
        self.exact = all(part.exact for part in self.parts)
        self.choices = [bucket.choices for bucket in problem.buckets]
        self.variance = [
            np.array([code.perturbation for code in bucket.choices]) for bucket in problem.buckets
        ]
        self.saved_s = [
            np.array([last.all_reduce_s - code.all_reduce_s for code in bucket.choices])
            for bucket, last in zip(problem.buckets, slowest, strict=True)
        ]
        bucket_of = np.array([row.bucket for row in time_rows(fixed)], dtype=np.int64)
        later = np.arange(len(problem.buckets))[None, :] >= bucket_of[:, None]
        in_row = later & (bucket_of >= 0)[:, None]
        self.counts = []
        for part in self.parts:
            table = np.zeros((len(part.limit), len(problem.buckets)))
            table[: len(in_row)] = in_row
            self.counts.append(table)
        self.limit = np.concatenate([part.limit for part in self.parts])
        self.time_rows = 0  # rows of time and memory alternate by kind; none is the objective
        self._rows = np.cumsum([0, *(len(part.limit) for part in self.parts)])
        self._options = np.cumsum([0, *(len(part.elimination.copy_of) for part in self.parts)])
        references = (part.reference for part in self.parts)
        self.reference = sum(w * size for w, size in zip(self.weights, references, strict=True))
        # Prices are as large as what they have to outweigh: now and then a code, not operators.
        self.reference = max(self.reference, *(float(row.max()) for row in self.variance))

    def evaluate(self, prices: FloatArray, closed: FloatArray | None = None) -> Point:
        """Value, slope and minimising plan at some prices, in units of the objective.

        Args:
            prices: of all kinds' rows, one kind after the other, [R].
            closed: per option of every variable of every kind, then per code of every bucket,
                0, or infinity where it may not be taken; flat (see `masks`).
        """
        value = objective = 0.0
        excess, options = [], []
        kinds, closed_codes = self.masks(closed)
        for share, part, weight, mask in zip(
            self.split(prices), self.parts, self.weights, kinds, strict=True
        ):
            point = part.evaluate(share / weight, mask)
            value += weight * point.value
            objective += weight * point.objective
            excess.append(point.excess)
            options.append(point.options)
        costs = [
            cost + mask for cost, mask in zip(self.code_costs(prices), closed_codes, strict=True)
        ]
        codes = [int(cost.argmin()) for cost in costs]
        least = [float(cost[code]) for cost, code in zip(costs, codes, strict=True)]
        value += math.fsum(least) - _ROUNDING * math.fsum(map(abs, least))
        objective += math.fsum(
            float(variance[code]) for variance, code in zip(self.variance, codes, strict=True)
        )
        saved = np.array([s[code] for s, code in zip(self.saved_s, codes, strict=True)])
        for index, (part, counts) in enumerate(zip(self.parts, self.counts, strict=True)):
            excess[index] = excess[index] - counts @ saved / part.scale
        return Point(
            prices=prices,
            value=value,
            objective=objective,
            excess=np.concatenate(excess),
            options=np.concatenate([*options, np.array(codes, dtype=np.int64)]),
        )

    def masks(self, closed: FloatArray | None) -> tuple[list[FloatArray], list[FloatArray]]:
        """A flat mask by kind, [V, P] each, and by bucket, [K] arrays; None closes nothing."""
        shapes = [part.graph.allowed.shape for part in self.parts]
        shapes += [variance.shape for variance in self.variance]
        sizes = [math.prod(shape) for shape in shapes]
        if closed is None:
            closed = np.zeros(sum(sizes))
        flat = np.split(closed, np.cumsum(sizes)[:-1])
        found = [mask.reshape(shape) for mask, shape in zip(flat, shapes, strict=True)]
        return found[: len(self.parts)], found[len(self.parts) :]

    def only(self, codes: Sequence[int]) -> FloatArray:
        """The flat mask that leaves one code of every bucket, and all options of operators."""
        kinds, masks = self.masks(None)
        for mask, code in zip(masks, codes, strict=True):
            mask[:code] = mask[code + 1 :] = math.inf
        return np.concatenate([mask.ravel() for mask in (*kinds, *masks)])

    def part_points(self, point: Point) -> list[Point]:
        """A point as a point of each kind's Lagrangian, in that kind's units; values left out."""
        options = np.split(point.options, self._options[1:])
        excess = np.split(point.excess, self._rows[1:-1])
        return [
            Point(prices=share / weight, value=0.0, objective=0.0, excess=rows, options=mine)
            for share, weight, rows, mine in zip(
                self.split(point.prices), self.weights, excess, options[:-1], strict=True
            )
        ]

    def takes(self, point: Point, closed: FloatArray) -> bool:
        """Whether a point's plan takes a closed option or code."""
        parts = np.split(point.options, self._options[1:])
        kinds, codes = self.masks(closed)
        taken = [
            mask[np.arange(len(mask)), mine[: len(mask)]]
            for mask, mine in zip(kinds, parts[:-1], strict=True)
        ]
        taken.append(np.array([m[c] for m, c in zip(codes, parts[-1].tolist(), strict=True)]))
        return not np.isfinite(np.concatenate(taken)).all()

    def split(self, prices: FloatArray) -> list[FloatArray]:
        """Prices by kind, in units of the objective."""
        return np.split(prices, self._rows[1:-1])

    def code_costs(self, prices: FloatArray) -> list[FloatArray]:
        """What every code of every bucket costs at some prices, [K] arrays."""
        worth = np.zeros(len(self.variance))
        for share, part, counts in zip(self.split(prices), self.parts, self.counts, strict=True):
            worth += (share / part.scale) @ counts
        return [
            variance - saved * price
            for variance, saved, price in zip(
                self.variance, self.saved_s, worth.tolist(), strict=True
            )
        ]

    def columns_of(self, options: IntArray) -> IntArray:
        """A point's plan: columns of the distinct kinds one after another, then codes, flat."""
        parts = np.split(options, self._options[1:])
        columns = [
            part.graph.operator_columns(mine)
            for part, mine in zip(self.parts, parts[:-1], strict=True)
        ]
        return np.concatenate([*columns, parts[-1]])

    def ceiling(self) -> float:
        """What no objective exceeds."""
        kinds = sum(w * part.ceiling() for w, part in zip(self.weights, self.parts, strict=True))
        most = sum(float(variance.max()) for variance in self.variance)
        return kinds + most * (1 + 1e-6)


class NoPlanError(Exception):
    """Pins, groups and followers leave some operator no precision: no plan exists."""
