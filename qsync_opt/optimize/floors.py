"""Lower bounds of the memory and time of any plan of one device kind, by arithmetic alone."""

from __future__ import annotations

import numpy as np

from qsync_opt.optimize.arrays import BoolArray
from qsync_opt.optimize.evaluate import TIME_TOLERANCE
from qsync_opt.optimize.problem import AllocationProblem, DeviceKind
from qsync_opt.optimize.rows import first_savers, time_rows, transient_bytes


def is_late(time_s: float, deadline_s: float | None) -> bool:
    """Whether a time misses a deadline, with the tolerance of `evaluate`."""
    return deadline_s is not None and time_s > deadline_s * (1 + TIME_TOLERANCE)


def memory_floor_bytes(problem: AllocationProblem, device: DeviceKind, domain: BoolArray) -> int:
    """Lower bound of the peak memory of any plan within `domain` [N, P], bytes.

    Of every saved tensor at least one copy is kept, no smaller than the cheapest copy that
    the most demanding saver can ask for; at every operator its smallest transient is added.
    """
    largest = np.iinfo(np.int64).max
    saved = device.saved
    held = np.zeros(len(problem.operators), dtype=np.int64)
    if len(saved):
        owner = np.repeat(np.arange(len(saved)), np.diff(saved.saver_start))
        cheapest = np.full(len(owner), largest)
        for column, storage in enumerate(problem.storage):
            if storage in saved.dtypes:
                size = saved.size_bytes[owner, saved.dtypes.index(storage)]
                asks = domain[saved.savers, column]
                cheapest = np.where(asks, np.minimum(cheapest, size), cheapest)
        least = np.maximum.reduceat(cheapest, saved.saver_start[:-1])
        np.add.at(held, first_savers(device), least)
    transient = np.where(domain, transient_bytes(device), largest).min(axis=1)
    return int(device.fixed_bytes + (np.cumsum(held) + transient).max())


def time_floor_s(problem: AllocationProblem, device: DeviceKind, domain: BoolArray) -> float:
    """Lower bound of the iteration time of any plan within `domain` [N, P], seconds.

    Casts count for nothing, and each row of the recurrence takes every operator at its best.
    """
    forward = np.where(domain, device.forward_s, np.inf)
    backward = np.where(domain, device.backward_s, np.inf)
    floor = 0.0
    for row in time_rows(problem):
        counts = (np.arange(len(problem.operators)) >= row.first_operator)[:, None]
        step = (forward + np.where(counts, backward, 0.0)).min(axis=1).sum()
        floor = max(floor, float(device.optimizer_s + step + row.tail_s))
    return floor
