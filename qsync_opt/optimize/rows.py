"""Which time and memory constraints a device kind really has, after dropping the implied ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from qsync_opt.optimize.arrays import BoolArray, IntArray
from qsync_opt.optimize.evaluate import first_operators, tails_s
from qsync_opt.optimize.problem import AllocationProblem, DeviceKind


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeRow:
    """optimizer + F + (backward of operators >= first_operator) + tail_s <= iteration time.

    Attributes:
        name: `compute`, or `bucket k`.
        first_operator: lowest operator whose backward counts.
        tail_s: all-reduce time from this bucket on.
        bucket: the bucket; -1 for `compute`.
    """

    name: str
    first_operator: int
    tail_s: float
    bucket: int = -1


def time_rows(problem: AllocationProblem) -> tuple[TimeRow, ...]:
    """The rows of the unrolled recurrence that no other row implies, by falling `first_operator`.

    A row whose backward part is contained in another's and whose tail is no longer is implied
    by it, whatever the plan (all times are >= 0). The rank's own compute is the row with
    every operator and no tail.
    """
    rows = [TimeRow(name="compute", first_operator=0, tail_s=0.0)]
    tails, first = tails_s(problem), first_operators(problem)
    for k in range(len(problem.buckets)):
        rows.append(
            TimeRow(
                name=f"bucket {k}", first_operator=int(first[k]), tail_s=float(tails[k]), bucket=k
            )
        )
    # Longest tail first; among equals the one that contains the others.
    rows.sort(key=lambda row: (-row.tail_s, row.first_operator, row.name))
    kept: list[TimeRow] = []
    for row in rows:
        if not kept or row.first_operator < kept[-1].first_operator:
            kept.append(row)
    return tuple(kept)


def launch_rows(problem: AllocationProblem) -> tuple[TimeRow, ...]:
    """The rows that no other row implies whatever the bits of the buckets, without their tails.

    A bucket that is ready no later than one launched before it waits for that one's reduction:
    its row has the shorter tail at any bits. The rows come by falling `first_operator`.
    """
    rows, lowest = [], len(problem.operators) + 1
    for k, first in enumerate(first_operators(problem).tolist()):
        if first < lowest:
            rows.append(TimeRow(name=f"bucket {k}", first_operator=first, tail_s=0.0, bucket=k))
            lowest = first
    if lowest > 0:
        rows.append(TimeRow(name="compute", first_operator=0, tail_s=0.0))
    return tuple(rows)


def first_savers(device: DeviceKind) -> IntArray:
    """The first saver, in forward order, of every saved tensor, [S]."""
    saved = device.saved
    if not len(saved):
        return np.zeros(0, dtype=np.int64)
    return np.minimum.reduceat(saved.savers, saved.saver_start[:-1])


def transient_bytes(device: DeviceKind) -> IntArray:
    """Larger of the forward and backward transient, [N, P].

    The same tensors are live in an operator's forward and backward, so one row holds for both.
    """
    forward, backward = device.forward_transient_bytes, device.backward_transient_bytes
    return np.maximum(forward, backward)  # type: ignore[arg-type]  # set on construction


def least_saved_bytes(
    problem: AllocationProblem, device: DeviceKind, domain: BoolArray
) -> IntArray:
    """Lower bound of the bytes kept of every saved tensor: its first saver's cheapest copy, [S]."""
    saved = device.saved
    if not len(saved):
        return np.zeros(0, dtype=np.int64)
    sizes = np.full((len(saved), len(problem.precisions)), np.iinfo(np.int64).max)
    for column, storage in enumerate(problem.storage):
        if storage in saved.dtypes:
            given = saved.size_bytes[:, saved.dtypes.index(storage)]
            sizes[:, column] = np.where(given >= 0, given, np.iinfo(np.int64).max)
    sizes = np.where(domain[first_savers(device)], sizes, np.iinfo(np.int64).max)
    smallest: IntArray = sizes.min(axis=1)
    return smallest


def memory_points(problem: AllocationProblem, device: DeviceKind, domain: BoolArray) -> IntArray:
    """Operators whose program point can be the peak, ascending.

    The bytes held at a later point j exceed those at i by what is saved in between, plus the
    difference of transients. Point i is implied by a later j if even the least of that is
    >= 0, and j by an earlier i if even the most of it is <= 0.
    """
    count = len(problem.operators)
    transient = transient_bytes(device)
    most_transient = np.where(domain, transient, 0).max(axis=1)
    least_transient = np.where(domain, transient, np.iinfo(np.int64).max).min(axis=1)
    least, most = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    first = first_savers(device)
    np.add.at(least, first, least_saved_bytes(problem, device, domain))
    # Every copy a saver can ask for, kept at once.
    np.add.at(most, first, np.maximum(device.saved.size_bytes, 0).sum(axis=1))
    low, high = np.cumsum(least), np.cumsum(most)
    # Implied by a later point: low[j] + least_transient[j] >= low[i] + most_transient[i].
    ahead = np.append(np.maximum.accumulate((low + least_transient)[::-1])[::-1][1:], -1)
    keep = ahead < low + most_transient
    # Implied by an earlier point: high[j] + most_transient[j] <= high[i] + least_transient[i].
    behind = np.maximum.accumulate(np.where(keep, high + least_transient, -1))
    behind = np.concatenate([[-1], behind[:-1]])
    keep &= behind < high + most_transient
    return np.flatnonzero(keep)
