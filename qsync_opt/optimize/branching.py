"""Which choice a node of the Lagrangian branch and bound is split on."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from qsync_opt.optimize.arrays import FloatArray
from qsync_opt.optimize.climb import Point
from qsync_opt.optimize.lagrangian import Lagrangian
from qsync_opt.optimize.moves import single_changes

#: Temperature of the likelihood that branching goes by, as a fraction of the room to prune:
#: low, because only splitting options that are all but tied lifts the Lagrangian. Without a
#: good incumbent the room is wide; it counts as this fraction of the bound at most.
_SOFTNESS = 0.02
_WIDEST = 0.01


@dataclass(frozen=True, kw_only=True)
class Split:
    """A choice to branch on.

    Attributes:
        spread: how much its likely options differ, in units of the objective.
        sides: two masks: 0, or infinity for an option that is closed in this half, each of
            the shape of the options.
    """

    spread: float
    sides: list[FloatArray]


def softness(target: float, value: float) -> float:
    """Temperature of the likelihood of an option, from the room between bound and target."""
    room = min(target - value, _WIDEST * abs(value))
    return max(_SOFTNESS * room, 1e-12 * abs(value), 1e-300)


def split_options(
    lagrangian: Lagrangian, point: Point, least: FloatArray, target: float, value: float
) -> Split:
    """The variable whose likely options differ most, split at the mean of what they move.

    Args:
        lagrangian: the Lagrangian.
        point: its best point in the node.
        least: lower bound of every plan of the node that uses an option, [V, P].
        target: plans that cost at least this are not wanted.
        value: lower bound of the node.

    Returns:
        The split; its masks are [V, P].
    """
    # An option that is far from likely has a weight of 0, but belongs to one of the halves.
    open_ = least < target
    weight = np.where(open_, np.exp((value - least) / softness(target, value)), 0.0)
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
    total_spread[open_.sum(axis=1) < 2] = -1.0
    pick = int(total_spread.argmax())
    part = int(spread[pick].argmax())
    amount = parts[pick, :, part]
    options = np.flatnonzero(open_[pick])
    options = options[np.argsort(amount[options], kind="stable")]
    split = int(np.searchsorted(amount[options], float(mean[pick, part]), side="right"))
    split = min(max(split, 1), len(options) - 1)
    sides = []
    for half in (options[:split], options[split:]):
        closed = np.zeros(lagrangian.graph.allowed.shape)
        closed[pick] = math.inf
        closed[pick, half] = 0.0
        sides.append(closed)
    return Split(spread=float(total_spread[pick]), sides=sides)
