"""Other bits for the buckets of a problem: what each takes, and what it adds to the variance."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from qsync_opt.costs import AllReduceCosts, Cluster, GradientBucket
from qsync_opt.errors import ParameterError
from qsync_opt.gradient_noise import CAST_BITS, GradientRanges, cast_variance, coded_variance
from qsync_opt.optimize.arrays import FloatArray
from qsync_opt.optimize.problem import BucketCode
from qsync_opt.perturbation import VARIANCES, PerturbationTable
from qsync_opt.plan import FULL_BITS


def bucket_codes(
    buckets: Sequence[GradientBucket],
    bits: Iterable[int],
    reduce: AllReduceCosts,
    tables: Mapping[str, PerturbationTable],
    cluster: Cluster,
) -> list[tuple[BucketCode, ...]]:
    """The codes of every bucket, those with more bits first.

    Args:
        buckets: of the job, in launch order.
        bits: that buckets may be sent at, beside 32.
        reduce: times on the network of the job.
        tables: device kind -> its table, which must hold what gradients lose.
        cluster: the workers of the job.

    Raises:
        CostsError: averages were not timed at these bits.
        ParameterError: 32 bits, a table whose entries are no variances, without ranges of
            gradients, or without those of a parameter.
    """
    wanted = sorted(set(bits), reverse=True)
    if FULL_BITS in wanted:
        rule = f"must be fewer than {FULL_BITS}, which every bucket has"
        raise ParameterError("bits", rule, FULL_BITS)
    losses = {kind: _Losses(kind, table) for kind, table in tables.items()}
    codes = []
    for bucket in buckets:
        own, mean = np.zeros(2), np.zeros(2)
        for kind in cluster.kinds:
            share = 1 / cluster.workers if kind.batch_share is None else kind.batch_share
            own_of_kind, mean_of_kind = losses[kind.name].of(bucket.parameters)
            own += kind.workers * share**2 * own_of_kind
            mean += kind.workers * share * mean_of_kind  # shares add up to 1
        codes.append(
            tuple(
                BucketCode(
                    bits=b,
                    all_reduce_s=reduce.time(bucket.size_bytes, b),
                    perturbation=_variance(b, cluster.workers, own.tolist(), mean.tolist()),
                )
                for b in wanted
            )
        )
    return codes


def _variance(bits: int, workers: int, own: list[float], mean: list[float]) -> float:
    """See `gradient_noise`; own and mean hold ranges and casts."""
    if bits == CAST_BITS:
        return cast_variance(workers, own[1], mean[1])
    return coded_variance(bits, own[0], mean[0])


class _Losses:
    """What the gradients of one kind lose."""

    def __init__(self, kind: str, table: PerturbationTable) -> None:
        self._where = f"perturbation of {kind}"
        if table.gradients is None:
            rule = "must hold the ranges of gradients to offer other bits"
            raise ParameterError(self._where, rule, None, "Compute it with --gradients")
        if table.method not in VARIANCES:
            rule = f"must be of {' or '.join(VARIANCES)}: what bits add to it is a variance"
            remedy = f"Compute it with --method {VARIANCES[0]}, or leave out other bits"
            raise ParameterError(self._where, rule, table.method, remedy)
        self._ranges: GradientRanges = table.gradients
        self._rows = {name: row for row, name in enumerate(self._ranges.parameters)}

    def of(self, parameters: Iterable[str]) -> tuple[FloatArray, FloatArray]:
        """Ranges and casts of a bucket: of a worker's gradient, and of the mean one, [2] each."""
        rows = []
        for name in parameters:
            if name not in self._rows:
                rule = "must hold the ranges of every gradient in a bucket"
                raise ParameterError(self._where, rule, name, "Compute it with this graph")
            rows.append(self._rows[name])
        r = self._ranges
        own = np.array([r.own_ranges[rows].sum(), r.own_casts[rows].sum()])
        return own, np.array([r.mean_ranges[rows].sum(), r.mean_casts[rows].sum()])
