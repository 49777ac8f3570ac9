"""`Bucket` and `BucketCode`: the gradient buckets, and the ways in which each can be sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qsync_opt.errors import PlanError
from qsync_opt.plan import FULL_BITS


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketCode:
    """A way to send the gradients of a bucket.

    Attributes:
        bits: of every value sent, 2 to 16.
        all_reduce_s: time of the reduction once every rank is ready, coding included.
        perturbation: variance that it adds to the averaged gradient (weight 1 in the
            objective: the noise is that of what all ranks share).
    """

    bits: int
    all_reduce_s: float
    perturbation: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """A gradient bucket of DDP, in launch order.

    Attributes:
        all_reduce_s: time of its all-reduce in 32 bits once every rank is ready.
        size_bytes: bytes of gradient in it.
        codes: other ways to send it, by falling bits; empty where 32 bits are the only one.
    """

    all_reduce_s: float
    size_bytes: int
    codes: tuple[BucketCode, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.codes, list):
            object.__setattr__(self, "codes", tuple(self.codes))

    @property
    def choices(self) -> tuple[BucketCode, ...]:
        """Every way to send it, 32 bits (which add nothing to the variance) first."""
        whole = BucketCode(bits=FULL_BITS, all_reduce_s=self.all_reduce_s, perturbation=0.0)
        return (whole, *self.codes)


def chosen(buckets: Sequence[Bucket], bits: Sequence[int]) -> tuple[BucketCode, ...]:
    """The way in which each bucket is sent at some bits; no bits mean 32 everywhere.

    Raises:
        PlanError: another number of buckets, or bits that a bucket does not have.
    """
    if not len(bits):
        return tuple(bucket.choices[0] for bucket in buckets)
    if len(bits) != len(buckets):
        rule = f"must have one entry per bucket ({len(buckets)})"
        raise PlanError("communication", rule, list(bits), "Leave it out to send in 32 bits")
    picks = []
    for index, (bucket, wanted) in enumerate(zip(buckets, bits, strict=True)):
        found = [code for code in bucket.choices if code.bits == wanted]
        if not found:
            known = ", ".join(str(code.bits) for code in bucket.choices)
            rule = f"must be bits that the bucket has ({known})"
            raise PlanError(f"communication[{index}]", rule, wanted)
        picks += found
    return tuple(picks)
