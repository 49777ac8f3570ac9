"""What the network of a job costs: DDP's buckets, and times of averaging gradients in them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from qsync_opt.costs_checks import interpolate, own_arrays, require
from qsync_opt.errors import CostsError
from qsync_opt.optimize.arrays import FloatArray, IntArray
from qsync_opt.plan import CODE_BITS, FULL_BITS


@dataclass(frozen=True, kw_only=True, eq=False)
class CodedTimes:
    """Times of averaging fp32 gradients that are sent at fewer bits.

    Measured as training sends them, with all that ranks do to the values before and after.

    Attributes:
        bits: of a value on the wire, 2 to 16.
        time_s: one entry per size of the `AllReduceCosts` that this is part of, [A].
        spread: distance of the quartiles over the median, [A].
    """

    bits: int
    time_s: FloatArray
    spread: FloatArray

    def __post_init__(self) -> None:
        least, most = CODE_BITS
        is_whole = isinstance(self.bits, int) and not isinstance(self.bits, bool)
        rule = f"must be a whole number from {least} to {most}"
        require(is_whole and least <= self.bits <= most, "all_reduce.codes.bits", rule, self.bits)
        own_arrays(self, f"all_reduce.codes.{self.bits}")


@dataclass(frozen=True, kw_only=True, eq=False)
class AllReduceCosts:
    """Times of all-reduces of fp32 on a process group, without waiting for late ranks.

    Attributes:
        ranks: of the group.
        backend: `gloo`, `nccl`, or `shared memory` of ranks on one GPU.
        size_bytes: the sizes, ascending, [A].
        time_s: median over rounds of the slowest rank's time after an aligned start, [A].
        spread: distance of the quartiles over the median, [A].
        codes: the same at other bits, those with more bits first; empty where none were asked
            for, and in files of early releases.
    """

    ranks: int
    backend: str
    size_bytes: IntArray
    time_s: FloatArray
    spread: FloatArray
    codes: tuple[CodedTimes, ...] = ()

    def __post_init__(self) -> None:
        own_arrays(self, "all_reduce")
        rises = bool((np.diff(self.size_bytes) > 0).all()) and len(self.size_bytes) > 0
        require(rises, "all_reduce.bytes", "must ascend", self.size_bytes.tolist()[:9])
        bits = self.bits
        falls = all(more > fewer for more, fewer in zip(bits, bits[1:], strict=False))
        require(falls, "all_reduce.codes", "must have descending bits", bits)
        rule = f"must have one entry per size ({len(self.size_bytes)})"
        for where, row in (
            ("all_reduce", self),
            *((f"all_reduce.codes.{row.bits}", row) for row in self.codes),
        ):
            for name in ("time_s", "spread"):
                shape = getattr(row, name).shape
                require(shape == self.size_bytes.shape, f"{where}.{name}", rule, shape)

    @property
    def bits(self) -> tuple[int, ...]:
        """The bits that gradients can be priced at, 32 among them, descending."""
        return (FULL_BITS, *(row.bits for row in self.codes))

    def time(self, size_bytes: int, bits: int = FULL_BITS) -> float:
        """Seconds for a size: linear between the measured ones, proportional beyond them.

        Args:
            size_bytes: of the gradients in fp32.
            bits: at which they are sent.

        Raises:
            CostsError: these bits were not measured.
        """
        times = next((row.time_s for row in self.codes if row.bits == bits), None)
        if bits == FULL_BITS:
            times = self.time_s
        if times is None:
            measured = ", ".join(map(str, self.bits))
            raise CostsError(
                "all_reduce.codes",
                f"must hold times at the bits that are asked for (it has {measured})",
                bits,
                f"Measure on the group of the job with --codes {bits}",
            )
        return interpolate(self.size_bytes, times, size_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientBucket:
    """A bucket of DDP after its rebuild, in launch order.

    Attributes:
        size_bytes: of its gradients.
        parameters: the names of its parameters.
    """

    size_bytes: int
    parameters: tuple[str, ...]
