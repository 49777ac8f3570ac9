"""`list_vectors`: the combinations of bits that bounds leave open, or the best of too many.

At fixed prices the buckets' parts of the Lagrangian add up, so that bucket after bucket every
combination has a lower bound by addition, at each of a bundle of prices; those at or above the
target are never listed. Of buckets that are alike only the number in each code counts
(`bucket_groups`). Codes of a bucket whose variances are all but equal count as one: as fast as
the fastest of them, with the least variance of any. What such a cluster loses is no more than
the tolerance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qsync_opt.optimize.arrays import BoolArray, FloatArray, IntArray
from qsync_opt.optimize.bucket_groups import BucketGroup, bucket_groups
from qsync_opt.optimize.joint_lagrangian import JointLagrangian
from qsync_opt.optimize.joint_vectors import OpenVectors, PricedKinds
from qsync_opt.optimize.problem import AllocationProblem

#: Combinations that are listed, those kept where there are more, and extensions of such that
#: are looked at at a time.
_MOST_VECTORS = 30_000
_BEAM = 2_000
_MOST_EXTENSIONS = 2_000_000

#: Prices by which they are bounded as they are listed: the latest, and as many of all.
_MOST_PRICES = 32


@dataclass(frozen=True, kw_only=True, eq=False)
class CodeBounds:
    """What codes cost at a bundle of prices.

    Attributes:
        constant: of everything but the buckets, [Q].
        costs: of every code of every bucket, [codes, Q] each; infinite where it is closed.
        least: lower bound of every plan that takes a code, [codes] per bucket.
    """

    constant: FloatArray
    costs: list[FloatArray]
    least: list[FloatArray]

    def soonest(self, joint: JointLagrangian, target: float) -> list[int] | None:
        """The fastest code below a target of every bucket, [K]; None where one has none."""
        found = []
        for least, saved in zip(self.least, joint.saved_s, strict=True):
            if not (least < target).any():
                return None
            found.append(int(np.where(least < target, saved, -1.0).argmax()))
        return found


def code_bounds(
    joint: JointLagrangian,
    priced: Sequence[PricedKinds],
    least: Sequence[FloatArray],
    value: float,
    alone: float = 0.0,
) -> CodeBounds:
    """The codes at some prices, and at those of a node.

    Args:
        joint: the Lagrangian.
        priced: its kinds at other prices.
        least: lower bound of the node's plans with a code, [codes] per bucket: the node's bound
            and what the code adds to it at the node's prices; infinite for closed codes.
        value: lower bound of the node.
        alone: lower bound of what the kinds cost at all bits.
    """
    picked = [*priced[: -_MOST_PRICES : len(priced) // _MOST_PRICES or 1], *priced[-_MOST_PRICES:]]
    constant = np.array([value, alone, *(one.constant.sum() for one in picked)])
    worth = np.array([one.worth.sum(axis=0) for one in picked]).reshape(len(picked), -1)
    costs = []
    for bucket, bounds in enumerate(least):
        variance = np.where(np.isinf(bounds), np.inf, joint.variance[bucket])
        here = variance[:, None] - np.outer(joint.saved_s[bucket], worth[:, bucket])
        costs.append(np.column_stack([bounds - value, variance, here]))
    lowest = [cost.min(axis=0) for cost in costs]
    whole = constant + np.sum(lowest, axis=0)
    raised = [(whole - low + cost).max(axis=1) for low, cost in zip(lowest, costs, strict=True)]
    return CodeBounds(constant=constant, costs=costs, least=raised)


def list_vectors(
    problem: AllocationProblem,
    joint: JointLagrangian,
    bounds: CodeBounds,
    *,
    target: float,
    tolerance: float,
) -> tuple[OpenVectors, bool]:
    """The combinations whose bound is below a target.

    Args:
        problem: the problem.
        joint: its Lagrangian.
        bounds: what the codes cost; one of every bucket at least is below the target.
        target: plans that cost at least this are not wanted.
        tolerance: what all clusters of a combination may lose together.

    Returns:
        The combinations, and whether these are all: where they are too many, they are some of
        low bounds.
    """
    share = tolerance / len(problem.buckets)
    above, lowered, whole = [], [], bounds.constant
    for bucket, (cost, least) in enumerate(zip(bounds.costs, bounds.least, strict=True)):
        variance, saved_s = joint.variance[bucket], joint.saved_s[bucket]
        clusters = _clusters(variance, least < target, share)
        here, reached = _merged(clusters, cost, variance, saved_s)
        low = here.min(axis=0)
        above.append(here - low)
        lowered.append(reached)
        whole = whole + low
    groups = bucket_groups(
        joint.choices,
        [-saved for saved in joint.saved_s],
        [more[:, 0] for more in above],
        [np.isinf(more[:, 0]) for more in above],
        target - float(whole[0]),
    )
    codes, complete = _listed(groups, above, whole, target)

    def picked(values: Sequence[FloatArray]) -> FloatArray:
        """What the combinations have of every bucket, [I, K]."""
        return np.stack([mine[code] for mine, code in zip(values, codes.T, strict=True)], axis=1)

    times_s = picked([np.array([c.all_reduce_s for c in b.choices]) for b in problem.buckets])
    vectors = OpenVectors(
        codes=codes,
        variance=picked(lowered).sum(axis=1),
        saved_s=picked(joint.saved_s),
        tails_s=np.cumsum(times_s[:, ::-1], axis=1)[:, ::-1],
        kinds=len(joint.parts),
    )
    return vectors, complete


def _clusters(variance: FloatArray, is_open: BoolArray, share: float) -> list[list[int]]:
    """The open codes of a bucket by rising variance, those together that are within a share."""
    clusters: list[list[int]] = []
    for code in np.argsort(variance, kind="stable").tolist():
        if not is_open[code]:
            continue
        if clusters and variance[code] - variance[clusters[-1][0]] <= share:
            clusters[-1].append(code)
        else:
            clusters.append([code])
    return clusters


def _merged(
    clusters: list[list[int]], cost: FloatArray, variance: FloatArray, saved_s: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Each cluster as one code: its fastest.

    Returns:
        Costs of every code, [codes, Q], infinite for one that is not the fastest of a cluster;
        the least variance of its cluster, [codes].
    """
    costs, lowered = np.full_like(cost, np.inf), variance.copy()
    for cluster in clusters:
        fastest = max(cluster, key=lambda code: saved_s[code])
        lowered[fastest] = variance[cluster[0]]
        # At every price this is no more than what any code of the cluster costs.
        costs[fastest] = cost[fastest] - (variance[fastest] - lowered[fastest])
        costs[fastest, 0] = cost[cluster, 0].min()
    return costs, lowered


def _listed(
    groups: Sequence[BucketGroup], above: Sequence[FloatArray], whole: FloatArray, target: float
) -> tuple[IntArray, bool]:
    """The codes of the combinations below a target, [I, K], and whether these are all.

    Args:
        groups: the buckets, and the codes they may take together.
        above: by how much every code costs more than the best at each price, [codes, Q] each.
        whole: bound of all combinations at each price, [Q].
        target: see `list_vectors`.
    """
    total = whole[None, :]
    codes, complete = np.zeros((1, len(above)), dtype=np.int64), True
    for group in sorted(groups, key=lambda group: -len(group.codes)):
        members = zip(group.buckets.tolist(), group.codes.T, strict=True)
        more = np.sum([above[bucket][taken] for bucket, taken in members], axis=0)
        most = max(_MOST_EXTENSIONS // max(len(more), 1), 1)
        if len(total) > most:
            complete = False
            kept = np.argsort(total.max(axis=1), kind="stable")[:most]
            total, codes = total[kept], codes[kept]
        best = total[:, 0][:, None] + more[:, 0][None, :]
        row, item = np.nonzero(best < target)
        best = best[row, item]
        for mine, step in zip(total.T[1:], more.T[1:], strict=True):
            best = np.maximum(best, mine[row] + step[item])
            wanted = best < target
            if not wanted.all():
                row, item, best = row[wanted], item[wanted], best[wanted]
        if len(row) > _MOST_VECTORS:
            complete = False
            kept = np.argsort(best, kind="stable")[:_BEAM]
            row, item = row[kept], item[kept]
        total, codes = total[row] + more[item], codes[row]
        codes[:, group.buckets] = group.codes[item]
    return codes, complete
