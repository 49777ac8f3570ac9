"""`exchange`: a solution of a multiple-choice knapsack made better by changing one class or two."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from qsync_opt.optimize.arrays import FloatArray, IntArray


def exchange(
    items: IntArray,
    *,
    owner: IntArray,
    cost: FloatArray,
    use: FloatArray,
    capacity: FloatArray,
    rounds: int,
    stop: Callable[[], bool],
) -> IntArray:
    """The best change of one or two classes, made again and again.

    All pairs of items are tried, those that gain most first, so that a pair is passed over as
    soon as its gain cannot be the best.

    Args:
        items: the item of every class, within the capacities, [C].
        owner: class of every item, [I].
        cost: of every item, [I].
        use: of every item, [I, R].
        capacity: [R].
        rounds: most changes.
        stop: whether to give up now.

    Returns:
        Items within the capacities, never dearer than those given, [C].
    """
    for _ in range(rounds):
        if stop():
            break
        changed = _best_change(items, owner, cost, use, capacity - use[items].sum(axis=0))
        if changed is None:
            break
        items = items.copy()
        items[owner[changed]] = changed
    return items


def _best_change(
    items: IntArray, owner: IntArray, cost: FloatArray, use: FloatArray, room: FloatArray
) -> IntArray | None:
    """One or two items to take, whose classes change at the largest gain; None without gain."""
    now = items[owner]
    others = np.flatnonzero(np.arange(len(owner)) != now)
    change = cost[others] - cost[now[others]]
    order = np.argsort(change, kind="stable")
    others, change = others[order], change[order]
    more, classes = use[others] - use[now[others]], owner[others]
    # Rows that no pair can break need not be looked at.
    rows = np.flatnonzero(2 * more.max(axis=0, initial=0.0) > room)
    more, room = more[:, rows], room[rows]
    best, found = 0.0, None
    single = np.flatnonzero((change < 0) & (more <= room).all(axis=1))
    if len(single):
        best, found = float(change[single[0]]), others[single[:1]]
    for first in range(len(others)):
        # The partner comes later, so it gains less: half of the best has to come from here.
        if 2 * change[first] >= best:
            break
        last = int(np.searchsorted(change, best - change[first]))
        partners = slice(first + 1, last)
        fits = classes[partners] != classes[first]
        for row, left in enumerate((room - more[first]).tolist()):
            fits &= more[partners, row] <= left
        if fits.any():
            second = first + 1 + int(fits.argmax())
            best, found = float(change[first] + change[second]), others[[first, second]]
    return found
