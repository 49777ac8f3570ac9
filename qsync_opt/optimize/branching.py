"""Which choice a node of the Lagrangian branch and bound is split on."""

from __future__ import annotations

import math

import numpy as np

from qsync_opt.optimize.arrays import FloatArray
from qsync_opt.optimize.lagrangian import Lagrangian, Point
from qsync_opt.optimize.moves import single_changes

#: Temperature of the likelihood that branching goes by, as a fraction of the room to prune:
#: low, because only splitting options that are all but tied lifts the Lagrangian. Without a
#: good incumbent the room is wide; it counts as this fraction of the bound at most.
_SOFTNESS = 0.02
_WIDEST = 0.01


def split_options(
    lagrangian: Lagrangian, point: Point, least: FloatArray, target: float, value: float
) -> list[FloatArray]:
    """The variable whose likely options differ most, split at the mean of what they move.

    Args:
        lagrangian: the Lagrangian.
        point: its best point in the node.
        least: lower bound of every plan of the node that uses an option, [V, P].
        target: plans that cost at least this are not wanted.
        value: lower bound of the node.

    Returns:
        Two masks: 0, or infinity for an option that is closed in this half, [V, P] each.
    """
    room = min(target - value, _WIDEST * abs(value))
    softness = max(_SOFTNESS * room, 1e-12 * abs(value), 1e-300)
    weight = np.where(least < target, np.exp((value - least) / softness), 0.0)
    total = weight.sum(axis=1, keepdims=True)
    share = weight / np.where(total > 0, total, 1.0)
    # What an option moves: the objective, and every priced row at its price. Near a tie
    # these cancel, so each is counted by itself.
    rows = np.flatnonzero(point.prices > 0)
    changes = single_changes(lagrangian, point.options, rows)
    priced = changes.use * (point.prices[rows] / lagrangian.scale[rows])
    parts = np.concatenate([changes.objective[:, :, None], priced], axis=2)
    mean = (share[:, :, None] * parts).sum(axis=1)
    spread = (share[:, :, None] * np.abs(parts - mean[:, None, :])).sum(axis=1)
    total_spread = spread.sum(axis=1)
    total_spread[(weight > 0).sum(axis=1) < 2] = -1.0
    pick = int(total_spread.argmax())
    part = int(spread[pick].argmax())
    amount = parts[pick, :, part]
    options = np.flatnonzero(weight[pick] > 0)
    options = options[np.argsort(amount[options], kind="stable")]
    split = int(np.searchsorted(amount[options], float(mean[pick, part]), side="right"))
    split = min(max(split, 1), len(options) - 1)
    sides = []
    for half in (options[:split], options[split:]):
        closed = np.zeros(lagrangian.graph.allowed.shape)
        closed[pick] = math.inf
        closed[pick, half] = 0.0
        sides.append(closed)
    return sides
