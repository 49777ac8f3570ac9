"""Combinations of bits that the joint Lagrangian leaves open, where these are few.

At fixed prices the buckets' parts of the Lagrangian add up, so every combination has a lower
bound by addition, and those at or above the target are never listed. Of buckets that are alike
only the number in each code counts (`bucket_groups`). Codes of a bucket whose
variances are all but equal count as one: as fast as the fastest of them, with the least variance
of any. What such a cluster loses is no more than the tolerance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qsync_opt.optimize.arrays import BoolArray, FloatArray, IntArray
from qsync_opt.optimize.bucket_groups import bucket_groups
from qsync_opt.optimize.buckets import BucketCode
from qsync_opt.optimize.evaluate import tails_s
from qsync_opt.optimize.problem import AllocationProblem


@dataclass(frozen=True, kw_only=True, order=True)
class BitsVector:
    """A combination of clusters.

    Attributes:
        bound: no plan with these bits is below it.
        bits: the fastest code of every cluster, [K].
        spared: variance of these bits less the least of their clusters.
    """

    bound: float
    bits: tuple[int, ...]
    spared: float


@dataclass(frozen=True, kw_only=True, eq=False)
class _Solved:
    """The kinds alone at some bits.

    Attributes:
        tails_s: S of every bucket, [K].
        bounds: lower bound of every distinct kind's perturbation, not weighted.
        columns: the plans found, [N] per device kind; None without one.
    """

    tails_s: FloatArray
    bounds: list[float]
    columns: list[IntArray] | None


class KindBounds:
    """What is proven of the kinds at some bits, and so at all whose tails are no shorter.

    Args:
        kinds: how many distinct kinds there are.
    """

    def __init__(self, kinds: int) -> None:
        self._kinds = kinds
        self._known: list[_Solved] = []

    def solved(self, problem: AllocationProblem, bits: Sequence[int]) -> _Solved | None:
        """What was found at the tails that some bits have; None where nothing was."""
        tails = tails_s(problem.at_bits(bits))
        same = (found for found in self._known if np.array_equal(found.tails_s, tails))
        return next(same, None)

    def add(
        self,
        problem: AllocationProblem,
        bits: Sequence[int],
        bounds: list[float],
        columns: list[IntArray] | None,
    ) -> _Solved:
        """Take what was found at some bits; see `_Solved`."""
        tails = tails_s(problem.at_bits(bits))
        found = _Solved(tails_s=tails, bounds=bounds, columns=columns)
        self._known.append(found)
        return found

    def least(self, problem: AllocationProblem, bits: Sequence[int]) -> list[float]:
        """The best lower bound of every kind at some bits; 0 where nothing is proven."""
        tails, best = tails_s(problem.at_bits(bits)), [0.0] * self._kinds
        for found in self._known:
            if (tails >= found.tails_s).all():
                best = list(map(max, best, found.bounds))
        return best


def soonest(problem: AllocationProblem, vectors: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The fastest bits of every bucket among some combinations, [K]."""
    result = []
    for bucket, counts in zip(problem.buckets, zip(*vectors, strict=True), strict=True):
        left = [code for code in bucket.choices if code.bits in counts]
        result.append(min(left, key=lambda code: code.all_reduce_s).bits)
    return tuple(result)


def open_vectors(
    problem: AllocationProblem,
    bounds: Sequence[FloatArray],
    closed: Sequence[BoolArray],
    *,
    value: float,
    target: float,
    tolerance: float,
    most: int,
) -> list[BitsVector] | None:
    """The combinations whose bound is below a target, by rising bound; None if there are many.

    Args:
        problem: the problem.
        bounds: lower bound of every plan with a code, per bucket, [K] arrays.
        closed: which codes may not be taken, [K] arrays.
        value: lower bound of all plans; each of `bounds` is this and what the code adds.
        target: plans that cost at least this are not wanted.
        tolerance: what all clusters of a combination may lose together.
        most: the most combinations to list.
    """
    share = tolerance / max(len(bounds), 1)
    above, spared = [], []
    for bucket, least in zip(problem.buckets, bounds, strict=True):
        more, less = _clustered(bucket.choices, least - value, target - value, share)
        above.append(more)
        spared.append(less)
    groups = bucket_groups(
        [bucket.choices for bucket in problem.buckets],
        [np.array([code.all_reduce_s for code in b.choices]) for b in problem.buckets],
        above,
        closed,
        target - value,
    )
    total, lost = np.zeros(1), np.zeros(1)
    codes = np.zeros((1, len(bounds)), dtype=np.int64)
    for group in groups:
        members = group.buckets.tolist()
        worse = np.sum([above[k][c] for k, c in zip(members, group.codes.T, strict=True)], axis=0)
        less = np.sum([spared[k][c] for k, c in zip(members, group.codes.T, strict=True)], axis=0)
        row, item = np.nonzero(total[:, None] + worse[None, :] < target - value)
        if len(row) > most:
            return None
        total, lost, codes = total[row] + worse[item], lost[row] + less[item], codes[row]
        codes[:, group.buckets] = group.codes[item]
    return sorted(
        BitsVector(
            bound=value + more,
            bits=tuple(b.choices[c].bits for b, c in zip(problem.buckets, picked, strict=True)),
            spared=less,
        )
        for more, less, picked in zip(total.tolist(), lost.tolist(), codes.tolist(), strict=True)
    )


def _clustered(
    choices: Sequence[BucketCode], above: FloatArray, room: float, share: float
) -> tuple[FloatArray, FloatArray]:
    """What the codes of a bucket add, and what they spare, with each cluster in its fastest code.

    Returns:
        Per code the least that its cluster adds to the bound, infinite for a code that is not
        the fastest of its cluster or ruled out; its variance less the least of the cluster.
    """
    groups: list[list[int]] = []
    for code in sorted(range(len(choices)), key=lambda code: choices[code].perturbation):
        if above[code] >= room:
            continue
        variance = choices[code].perturbation
        if groups and variance - choices[groups[-1][0]].perturbation <= share:
            groups[-1].append(code)
        else:
            groups.append([code])
    added, spared = np.full(len(choices), np.inf), np.zeros(len(choices))
    for group in groups:
        fastest = min(group, key=lambda code: choices[code].all_reduce_s)
        added[fastest] = max(float(above[group].min()), 0.0)
        spared[fastest] = choices[fastest].perturbation - choices[group[0]].perturbation
    return added, spared
