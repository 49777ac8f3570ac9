"""`BitColumns`: the bits of every bucket as columns that all kinds of a joint program share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qsync_opt.optimize.arrays import FloatArray, IntArray
from qsync_opt.optimize.linear import LazyNames, ProgramBuilder
from qsync_opt.optimize.problem import AllocationProblem
from qsync_opt.optimize.rows import TimeRow, launch_rows


@dataclass(frozen=True, kw_only=True, eq=False)
class BitColumns:
    """The columns b of a program.

    Attributes:
        bits: per bucket, the bits that it may be sent in, [K][n].
        columns: per bucket, the column of each of them, [K] arrays [n].
        seconds: per bucket, what the reduction takes in each of them, [K] arrays [n].
        rows: the rows of time that hold at any bits; their tails are in the columns.
    """

    bits: tuple[tuple[int, ...], ...]
    columns: tuple[IntArray, ...]
    seconds: tuple[FloatArray, ...]
    rows: tuple[TimeRow, ...]

    def from_bucket(self, bucket: int) -> tuple[IntArray, FloatArray]:
        """The columns of the buckets from one on, and their seconds; of none for -1."""
        if bucket < 0:
            return np.zeros(0, dtype=np.int64), np.zeros(0)
        return np.concatenate(self.columns[bucket:]), np.concatenate(self.seconds[bucket:])

    def read(self, values: FloatArray) -> tuple[int, ...]:
        """The bits of every bucket in a solution: the largest of its columns, [K]."""
        return tuple(
            bits[int(values[columns].argmax())]
            for bits, columns in zip(self.bits, self.columns, strict=True)
        )


def add_bits(
    builder: ProgramBuilder,
    problem: AllocationProblem,
    bits: Sequence[Sequence[int]] | None,
    *,
    ordered: bool,
) -> BitColumns:
    """Add the columns b, and the rows that one of each bucket is at 1.

    Args:
        builder: takes them.
        problem: the problem.
        bits: per bucket, the bits left to it; None leaves all.
        ordered: whether of buckets with the same codes the earlier must be no faster, which
            some best plan keeps (see `bucket_groups`).
    """
    left, columns, seconds = [], [], []
    for k, bucket in enumerate(problem.buckets):
        codes = [c for c in bucket.choices if bits is None or c.bits in bits[k]]
        names = [f"b[{k},{code.bits}]" for code in codes]
        added = builder.add_columns(
            LazyNames(len(codes), names.__iter__),
            objective=np.array([code.perturbation for code in codes]),
            integer=True,
        )
        one = builder.add_rows(LazyNames(1, [f"sent[{k}]"].__iter__), lower=1.0, upper=1.0)
        builder.add_entries(np.broadcast_to(one, added.shape), added, 1.0)
        left.append(tuple(code.bits for code in codes))
        columns.append(added)
        seconds.append(np.array([code.all_reduce_s for code in codes]))
    if ordered:
        _add_order(builder, problem, left, columns, seconds)
    return BitColumns(
        bits=tuple(left),
        columns=tuple(columns),
        seconds=tuple(seconds),
        rows=launch_rows(problem),
    )


def _add_order(
    builder: ProgramBuilder,
    problem: AllocationProblem,
    left: Sequence[tuple[int, ...]],
    columns: Sequence[IntArray],
    seconds: Sequence[FloatArray],
) -> None:
    before: dict[object, int] = {}
    for k, bucket in enumerate(problem.buckets):
        kind = (bucket.choices, left[k])
        slowest = seconds[k].max()
        if kind in before and len(left[k]) > 1 and slowest > 0:
            j = before[kind]
            row = builder.add_rows(
                LazyNames(1, [f"order[{j},{k}]"].__iter__), lower=0.0, upper=np.inf
            )
            for bits, sign in ((j, 1.0), (k, -1.0)):
                share = sign * seconds[bits] / slowest
                builder.add_entries(np.broadcast_to(row, share.shape), columns[bits], share)
        before[kind] = k
