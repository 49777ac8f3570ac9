"""Which choice a node of the joint branch and bound is split on: an operator's or a bucket's."""

from __future__ import annotations

import math

import numpy as np

from qsync_opt.optimize.arrays import FloatArray
from qsync_opt.optimize.branching import Split, softness, split_options
from qsync_opt.optimize.climb import Point
from qsync_opt.optimize.joint_core import OpenOptions
from qsync_opt.optimize.joint_lagrangian import JointLagrangian


def split_jointly(
    joint: JointLagrangian, point: Point, least: OpenOptions, target: float, value: float
) -> list[FloatArray]:
    """The variable or bucket whose likely options differ most, split in two.

    Args:
        joint: the Lagrangian.
        point: its best point in the node.
        least: lower bounds of every plan of the node that takes an option.
        target: plans that cost at least this are not wanted.
        value: lower bound of the node.

    Returns:
        Two masks of what is closed, flat (`JointLagrangian.masks`).
    """
    best: tuple[float, int, list[FloatArray]] = (-math.inf, 0, [])
    for index, (part, mine, bounds, weight) in enumerate(
        zip(joint.parts, joint.part_points(point), least.kinds, joint.weights, strict=True)
    ):
        if not ((bounds < target).sum(axis=1) > 1).any():
            continue
        split = split_options(part, mine, bounds / weight, target / weight, value / weight)
        if weight * split.spread > best[0]:
            best = (weight * split.spread, index, split.sides)
    costs = joint.code_costs(point.prices)
    for bucket, (cost, bounds) in enumerate(zip(costs, least.codes, strict=True)):
        found = _split_codes(joint.variance[bucket], cost, bounds, target, value)
        if found is not None and found.spread > best[0]:
            best = (found.spread, len(joint.parts) + bucket, found.sides)
    _, place, sides = best
    result = []
    for side in sides:
        kinds, codes = joint.masks(None)
        whole = [*kinds, *codes]
        whole[place] = side
        result.append(np.concatenate([mask.ravel() for mask in whole]))
    return result


def _split_codes(
    variance: FloatArray, cost: FloatArray, bounds: FloatArray, target: float, value: float
) -> Split | None:
    """The codes of one bucket, split at the mean of the variance they add."""
    open_ = bounds < target
    weight = np.where(open_, np.exp((value - bounds) / softness(target, value)), 0.0)
    options = np.flatnonzero(open_)
    if len(options) < 2:
        return None
    share = weight / weight.sum()
    parts = np.stack([variance, cost - variance], axis=1)
    mean = share @ parts
    spread = float((share @ np.abs(parts - mean)).sum())
    order = options[np.argsort(variance[options], kind="stable")]
    at = int(np.searchsorted(variance[order], float(mean[0]), side="right"))
    at = min(max(at, 1), len(order) - 1)
    sides = []
    for half in (order[:at], order[at:]):
        closed = np.full(len(variance), math.inf)
        closed[half] = 0.0
        sides.append(closed)
    return Split(spread=spread, sides=sides)
