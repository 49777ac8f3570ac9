"""`BucketGroup`: buckets that are alike, whose bits are decided together.

Of two buckets with the same codes the one that is launched earlier may as well be sent in the
slower code: exchanging the two changes neither the variance nor the tail of a bucket up to the
first of them, and shortens the tails between. So the codes of a group need be looked at only
in the order of falling time, which leaves the number of buckets in each code to be chosen, not
which buckets they are. Networks of equal blocks have dozens of equal buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qsync_opt.optimize.arrays import BoolArray, FloatArray, IntArray

#: Assignments of a group that are listed; a group with more is taken apart.
_MOST_LISTED = 20_000


@dataclass(frozen=True, kw_only=True)
class BucketGroup:
    """Buckets that are alike, and the codes they may take together.

    Attributes:
        buckets: indices, in launch order, [n].
        codes: the code of every bucket in every assignment, [I, n].
    """

    buckets: IntArray
    codes: IntArray


def bucket_groups(
    choices: Sequence[object],
    seconds: Sequence[FloatArray],
    reduced: Sequence[FloatArray],
    closed: Sequence[BoolArray],
    slack: float,
) -> list[BucketGroup]:
    """All buckets in groups, with the assignments that are not ruled out.

    Args:
        choices: the codes of every bucket; buckets with equal ones are alike.
        seconds: time of every code of every bucket, [K] arrays.
        reduced: by how much every code is worse than the bucket's best at the prices, [K] arrays.
        closed: which codes may not be taken, [K] arrays; only buckets that may take the same
            codes are alike.
        slack: assignments that are worse than the best by this or more are not wanted.
    """
    alike: dict[tuple[object, bytes], list[int]] = {}
    for bucket, (codes, mask) in enumerate(zip(choices, closed, strict=True)):
        alike.setdefault((codes, mask.tobytes()), []).append(bucket)
    groups = []
    for members in alike.values():
        listed = _assignments(members, seconds, reduced, closed, slack)
        if listed is not None:
            groups.append(BucketGroup(buckets=np.array(members), codes=listed))
            continue
        for bucket in members:
            open_ = np.flatnonzero((reduced[bucket] < slack) & ~closed[bucket])
            groups.append(BucketGroup(buckets=np.array([bucket]), codes=open_[:, None]))
    return groups


def _assignments(
    members: Sequence[int],
    seconds: Sequence[FloatArray],
    reduced: Sequence[FloatArray],
    closed: Sequence[BoolArray],
    slack: float,
) -> IntArray | None:
    """The codes of some like buckets, by falling time, [I, n]; None where these are too many."""
    order = np.argsort(-seconds[members[0]], kind="stable")
    order = order[~closed[members[0]][order]]
    places = np.zeros((1, 0), dtype=np.int64)
    worse = np.zeros(1)
    last = np.zeros(1, dtype=np.int64)
    for bucket in members:
        cost = worse[:, None] + reduced[bucket][order][None, :]
        wanted = (cost < slack) & (np.arange(len(order))[None, :] >= last[:, None])
        row, last = np.nonzero(wanted)
        places = np.column_stack([places[row], last])
        worse = cost[row, last]
        if len(places) > _MOST_LISTED:
            return None
    listed: IntArray = order[places]
    return listed
