"""How each bucket of DDP is sent: all alike, or each at the bits that a plan has for it.

A plan's bits belong to the problem's buckets, which are DDP's as they were when costs were
measured. In a job they are seldom the same to the parameter: at another precision the gradients
of an operator arrive in another order, and a bias changes sides. A live bucket that shares nearly
all with one of the problem's is sent at its bits. Where there is none, as before DDP has formed
its buckets anew, it is sent at the most bits of its parameters' buckets, so that none of them
loses more than the plan allows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from qsync_opt.errors import PlanError
from qsync_opt.plan import FULL_BITS
from qsync_opt.runtime.communication import BUCKET_SIZE, Communication, communication_at

#: Share of the larger of two buckets that both must hold to be the same one.
_ALIKE = 0.9


class Sending(Protocol):
    """Says how the buckets of DDP are sent."""

    @property
    def bucket_size(self) -> int:
        """See `Communication`; the same for all buckets."""

    def of(self, size_bytes: Mapping[str, int]) -> Communication:
        """How a bucket is sent.

        Args:
            size_bytes: name of each of its parameters -> bytes of its gradient.
        """

    def facts(self) -> list[int]:
        """What ranks must have in common, as numbers."""


@dataclass(frozen=True, kw_only=True)
class Uniform:
    """All buckets alike."""

    communication: Communication

    @property
    def bucket_size(self) -> int:
        """See `Sending`."""
        return self.communication.bucket_size

    def of(self, size_bytes: Mapping[str, int]) -> Communication:
        """See `Sending`."""
        return self.communication

    def facts(self) -> list[int]:
        """See `Sending`."""
        return [self.bucket_size, *str(self.communication).encode()]


@dataclass(frozen=True, kw_only=True)
class PlannedBits:
    """The bits that a plan has for the buckets of its problem.

    Attributes:
        bits: of every bucket, in launch order.
        size_bytes: of every bucket.
        bucket_of: name of a parameter -> its bucket.

    Raises:
        PlanError: another number of buckets.
        ParameterError: nothing is sent at so many bits.
    """

    bits: tuple[int, ...]
    size_bytes: tuple[int, ...]
    bucket_of: Mapping[str, int]

    def __post_init__(self) -> None:
        if len(self.bits) != len(self.size_bytes):
            rule = f"must have one entry per bucket ({len(self.size_bytes)})"
            raise PlanError("communication", rule, list(self.bits), "Solve this problem again")
        for wanted in self.bits:
            communication_at(wanted)

    @property
    def bucket_size(self) -> int:
        """See `Sending`."""
        return BUCKET_SIZE

    def of(self, size_bytes: Mapping[str, int]) -> Communication:
        """See `Sending`; a parameter that the problem does not know is sent as it is."""
        shared = [0] * len(self.bits)
        most = 0
        for name, size in size_bytes.items():
            bucket = self.bucket_of.get(name)
            if bucket is not None:
                shared[bucket] += size
            most = max(most, FULL_BITS if bucket is None else self.bits[bucket])
        whole = sum(size_bytes.values())
        for bits, size, part in zip(self.bits, self.size_bytes, shared, strict=True):
            if part >= _ALIKE * max(size, whole):
                return communication_at(bits)
        return communication_at(most)

    def facts(self) -> list[int]:
        """See `Sending`."""
        owners = [self.bucket_of[name] for name in sorted(self.bucket_of)]
        return [self.bucket_size, *self.bits, *self.size_bytes, *owners]

    def at(self, communication: Sequence[int]) -> PlannedBits:
        """The same buckets at the bits of another plan, 32 where it has none.

        Raises:
            PlanError: another number of buckets.
            ParameterError: nothing is sent at so many bits.
        """
        return replace(self, bits=tuple(communication) or (FULL_BITS,) * len(self.size_bytes))
