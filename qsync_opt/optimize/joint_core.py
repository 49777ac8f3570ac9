"""What the bounds of the joint Lagrangian leave open, as one multiple-choice knapsack.

Each kind's open options become a knapsack of their own (`core`), at its prices; the kinds'
classes and rows stand side by side, and each bucket (or group of like ones, `bucket_groups`) is
one more class: its codes cost their variance and use what they take, less than the slowest, in
every row of every kind that waits for the bucket. So bits are decided by the search that
decides precisions, and with them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from qsync_opt.optimize.arrays import BoolArray, FloatArray, IntArray
from qsync_opt.optimize.bucket_groups import BucketGroup, bucket_groups
from qsync_opt.optimize.climb import Point
from qsync_opt.optimize.core import Core, find_core
from qsync_opt.optimize.factors import FactorGraph
from qsync_opt.optimize.joint_lagrangian import JointLagrangian
from qsync_opt.optimize.knapsack import Knapsack
from qsync_opt.optimize.lagrangian import Lagrangian
from qsync_opt.optimize.proof import ROUNDING


@dataclass(frozen=True, kw_only=True)
class OpenOptions:
    """Lower bounds of every plan that takes an option, in units of the objective.

    Attributes:
        kinds: per distinct kind, of every option of every variable, [V, P] each.
        codes: per bucket, of every code, [K] arrays.
    """

    kinds: list[FloatArray]
    codes: list[FloatArray]

    def count(self, threshold: float) -> int:
        """How many variables and buckets have a second option below a threshold."""
        return sum(int((second < threshold).sum()) for second in self._seconds())

    def threshold(self, size: int) -> float:
        """The threshold below which about `size` of them have a second option."""
        second = np.sort(np.concatenate(self._seconds()))
        second = second[np.isfinite(second)]
        return float(second[size]) if len(second) > size else np.inf

    def _seconds(self) -> list[FloatArray]:
        found = [np.sort(least, axis=1)[:, 1] for least in self.kinds if least.shape[1] > 1]
        several = [np.sort(least)[1] for least in self.codes if len(least) > 1]
        return [*found, np.array(several)]


def open_options(
    joint: JointLagrangian, point: Point, closed: FloatArray | None = None
) -> OpenOptions:
    """The bounds at a point: that of the whole, with one part at its least with the option.

    Args:
        joint: the Lagrangian.
        point: a point of it.
        closed: what may not be taken, see `JointLagrangian.evaluate`.
    """
    kinds, codes = [], []
    slack = ROUNDING * abs(point.value)
    closed_kinds, closed_codes = joint.masks(closed)
    for share, part, weight, mask in zip(
        joint.split(point.prices), joint.parts, joint.weights, closed_kinds, strict=True
    ):
        prices = share / weight
        least = part.elimination.conditional_minima(part.costs(prices, mask))
        value = float(least[np.isfinite(least)].min())
        # Sums in another order differ by rounding; never drop an option because of it.
        raised = point.value + weight * (least - value - part.rounding(prices, value)) - slack
        kinds.append(np.where(part.graph.allowed, raised, np.inf))
    for cost, mask in zip(joint.code_costs(point.prices), closed_codes, strict=True):
        left = cost + mask
        codes.append(point.value + (left - left.min()) - slack)
    return OpenOptions(kinds=kinds, codes=codes)


@dataclass(frozen=True, kw_only=True)
class _KindCore:
    """A kind's part: its classes and rows; without a choice left, rows only."""

    graph: FactorGraph
    core: Core | None
    base: IntArray
    constant: float
    rows: IntArray
    capacity: FloatArray
    prices: FloatArray


@dataclass(frozen=True, kw_only=True)
class JointCore:
    """The knapsack, and how to read a plan from its items.

    Attributes:
        knapsack: classes of the kinds, then one for each bucket; costs in the objective's
            units.
        constant: objective of what has no choice left.
        prices: of its rows, to start from.
        groups: the buckets, and what each item of theirs stands for.
    """

    knapsack: Knapsack
    constant: float
    prices: FloatArray
    groups: tuple[BucketGroup, ...]
    _parts: tuple[_KindCore, ...]

    def column_of(self, items: IntArray) -> IntArray:
        """The plan of some items, one for each class, as one flat array (`JointIncumbent`)."""
        columns, first_class, first_item = [], 0, 0
        for part in self._parts:
            options = part.base
            if part.core is not None:
                classes = len(part.core.knapsack.start) - 1
                mine = items[first_class : first_class + classes] - first_item
                options = part.core.options(mine)
                first_class += classes
                first_item += len(part.core.knapsack.cost)
            columns.append(part.graph.operator_columns(options))
        codes = np.zeros(sum(len(group.buckets) for group in self.groups), dtype=np.int64)
        for group, item in zip(self.groups, items[first_class:].tolist(), strict=True):
            codes[group.buckets] = group.codes[item - first_item]
            first_item += len(group.codes)
        return np.concatenate([*columns, codes])


class NothingOpenError(Exception):
    """Some variable or bucket has no option below the threshold: no plan is below it."""


def find_joint_core(
    joint: JointLagrangian,
    point: Point,
    least: OpenOptions,
    threshold: float,
    closed: FloatArray | None = None,
) -> JointCore | None:
    """The knapsack over the options below a threshold; None where it would be too large.

    Args:
        joint: the Lagrangian.
        point: a point of it.
        least: the bounds at this point.
        threshold: plans that cost at least this are not wanted.
        closed: what may not be taken, see `JointLagrangian.evaluate`.

    Raises:
        NothingOpenError: no plan is below the threshold.
    """
    keeps = [bounds < threshold for bounds in least.kinds]
    if any(not (bounds < threshold).any() for bounds in least.codes):
        raise NothingOpenError
    if any(not keep.any(axis=1).all() for keep in keeps):
        raise NothingOpenError
    parts = []
    shares = joint.split(point.prices)
    for part, keep, share, weight in zip(joint.parts, keeps, shares, joint.weights, strict=True):
        found = _kind_core(part, keep, share / weight, (threshold - point.value) / weight)
        if found is None:
            return None
        parts.append(found)
    groups = bucket_groups(
        joint.choices,
        [-saved for saved in joint.saved_s],
        [bounds - bounds.min() for bounds in least.codes],
        [np.isinf(mask) for mask in joint.masks(closed)[1]],
        threshold - point.value,
    )
    if any(not len(group.codes) for group in groups):
        raise NothingOpenError
    return _joined(joint, tuple(parts), tuple(groups))


def _kind_core(
    part: Lagrangian, keep: BoolArray, prices: FloatArray, slack: float
) -> _KindCore | None:
    graph = part.graph.restricted(keep)
    if not graph.feasible:
        raise NothingOpenError
    reduced = Lagrangian(graph, part.deadline_s, part.points)
    point = reduced.evaluate(prices)
    if (graph.allowed.sum(axis=1) > 1).any():
        # The options left out lie above the slack, so the least of these is the least of all.
        core = find_core(reduced, prices, point.value + slack)
        if core is None:
            return None
        rows, capacity, constant = core.rows, core.knapsack.capacity, core.constant
    else:
        core = None
        constant, use = reduced.usage(point.options)
        rows, capacity = np.arange(len(use)), reduced.limit - use
    return _KindCore(
        graph=graph,
        core=core,
        base=point.options,
        constant=constant,
        rows=rows,
        capacity=capacity,
        prices=(prices / reduced.scale)[rows],
    )


def _joined(
    joint: JointLagrangian, parts: tuple[_KindCore, ...], groups: tuple[BucketGroup, ...]
) -> JointCore:
    rows = sum(len(part.rows) for part in parts)
    variance, saved = [], []
    for group in groups:
        picked = list(zip(group.buckets.tolist(), group.codes.T, strict=True))
        variance.append(np.sum([joint.variance[k][codes] for k, codes in picked], axis=0))
        saved.append(np.stack([joint.saved_s[k][codes] for k, codes in picked], axis=1))
    sent = [np.zeros((len(group.codes), rows)) for group in groups]
    sizes, costs, uses, prices, capacities = [], [], [], [], []
    start = 0
    for part, counts, weight in zip(parts, joint.counts, joint.weights, strict=True):
        mine = slice(start, start + len(part.rows))
        for group, use, seconds in zip(groups, sent, saved, strict=True):
            use[:, mine] = -seconds @ counts[part.rows][:, group.buckets].T
        if part.core is not None:
            knapsack = part.core.knapsack
            wide = np.zeros((len(knapsack.cost), rows))
            wide[:, mine] = knapsack.use
            sizes.append(np.diff(knapsack.start))
            costs.append(weight * knapsack.cost)
            uses.append(wide)
        prices.append(weight * part.prices)
        capacities.append(part.capacity)
        start += len(part.rows)
    for cost, use in zip(variance, sent, strict=True):
        sizes.append(np.array([len(use)]))
        costs.append(cost)
        uses.append(use)
    constant = sum(w * part.constant for w, part in zip(joint.weights, parts, strict=True))
    return JointCore(
        knapsack=Knapsack(
            start=np.concatenate([[0], np.cumsum(np.concatenate(sizes))]).astype(np.int64),
            cost=np.concatenate(costs),
            use=np.concatenate(uses),
            capacity=np.concatenate(capacities),
        ),
        constant=float(constant),
        prices=np.concatenate(prices),
        groups=groups,
        _parts=parts,
    )
