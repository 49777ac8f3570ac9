"""What ranks send each other, and at how many bits: options, and bytes on the wire.

Gradients and weights are coded between the least and the greatest value of each quantisation
bucket (QSDP, arXiv 2302.02390). Biases, norms and tensors that do not fill a bucket are sent
as they are.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from qsync_opt.errors import ParameterError
from qsync_opt.gradient_noise import CAST_BITS
from qsync_opt.plan import FULL_BITS

BUCKET_SIZE = 1024

#: Bits of a code, and of one with learned levels: above, evenly spaced levels are as good.
CODE_BITS = range(2, 9)
LEARNED_BITS = range(2, 7)

#: What gradients can be cast to instead of being coded.
CASTS = ("fp16", "bf16")

#: Least and step of a bucket, two float32.
META_BYTES = 8

_WORD = re.compile(r"(?:w(\d+)(l?))?(?:g(\d+)(l?)(e?))?")


@dataclass(frozen=True, kw_only=True)
class Coding:
    """How values become codes.

    Attributes:
        bits: of a code, 2 to 8.
        learned: levels are fitted to the values instead of evenly spaced.
        feedback: what rounding takes away is added to the next step's values.

    Raises:
        ParameterError: bits out of range.
    """

    bits: int
    learned: bool = False
    feedback: bool = False

    def __post_init__(self) -> None:
        known = LEARNED_BITS if self.learned else CODE_BITS
        if isinstance(self.bits, bool) or self.bits not in known:
            what = "with learned levels " if self.learned else ""
            rule = f"{what}must be a whole number from {known[0]} to {known[-1]}"
            raise ParameterError("communication, bits", rule, self.bits)


@dataclass(frozen=True, kw_only=True)
class Communication:
    """What ranks send.

    Attributes:
        weights: coding of weights where they are sharded; None: as they are.
        gradients: coding of gradients; None: as they are.
        cast: what gradients are cast to instead, one of `CASTS`.
        bucket_size: most values that share a least value and a step, a multiple of 8.

    Raises:
        ParameterError: options out of range, or two that exclude each other.
    """

    weights: Coding | None = None
    gradients: Coding | None = None
    cast: str | None = None
    bucket_size: int = BUCKET_SIZE

    def __post_init__(self) -> None:
        if self.cast is not None and self.cast not in CASTS:
            rule = f"must be one of {', '.join(CASTS)}"
            raise ParameterError("communication, cast", rule, self.cast)
        if self.cast is not None and self.gradients is not None:
            raise ParameterError("communication, cast", "must not be given with bits", self.cast)
        if self.weights is not None and self.weights.feedback:
            rule = "must be off for weights: they are rounded anew from full precision"
            raise ParameterError("communication, feedback", rule, True)
        if self.bucket_size < 8 or self.bucket_size % 8:
            rule = "must be a positive multiple of 8"
            raise ParameterError("communication, bucket_size", rule, self.bucket_size)

    def __str__(self) -> str:
        """The text that `parse_communication` reads."""
        if self.cast is not None:
            return ("" if self.weights is None else _word("w", self.weights)) + self.cast
        parts = (("w", self.weights), ("g", self.gradients))
        return "".join(_word(name, coding) for name, coding in parts if coding) or "fp32"


def parse_communication(text: str) -> Communication:
    """Read what ranks send from a word.

    `w8g8`: weights and gradients in 8 bits; `g4`: gradients alone. `l` behind the bits stands
    for learned levels, `e` for error feedback: `g4l`, `g4e`, `w6g4le`. `fp16` and `bf16` cast
    gradients, `fp32` leaves everything as it is.

    Raises:
        ParameterError: it is no such word.
    """
    if text == "fp32":
        return Communication()
    if text in CASTS:
        return Communication(cast=text)
    found = _WORD.fullmatch(text)
    if not text or found is None:
        rule = "must be fp32, fp16, bf16 or bits such as w8g8, g8, g4, g4l, g4e"
        raise ParameterError("communication", rule, text)
    weight_bits, weight_levels, bits, levels, feedback = found.groups()
    weights = gradients = None
    if weight_bits is not None:
        weights = Coding(bits=int(weight_bits), learned=bool(weight_levels))
    if bits is not None:
        gradients = Coding(bits=int(bits), learned=bool(levels), feedback=bool(feedback))
    return Communication(weights=weights, gradients=gradients)


def communication_at(bits: int) -> Communication:
    """What gradients are sent as at so many bits: 32 as they are, 16 in bf16, fewer in codes.

    Raises:
        ParameterError: nothing is sent at so many bits.
    """
    if bits == FULL_BITS:
        return Communication()
    if bits == CAST_BITS:
        return Communication(cast="bf16")
    if isinstance(bits, bool) or bits not in CODE_BITS:
        known = f"{CODE_BITS[0]} to {CODE_BITS[-1]}, {CAST_BITS} or {FULL_BITS}"
        raise ParameterError("communication, bits", f"must be {known}", bits)
    return Communication(gradients=Coding(bits=bits))


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a vector is cut into messages of whole quantisation buckets, one for each rank.

    The buckets are as large as allowed and as equal as possible, so that little is padded
    however short the vector is.

    Attributes:
        count: values in all.
        parts: messages.
        bits: of a code.
        bucket: values of a quantisation bucket, a multiple of 8.
        buckets: quantisation buckets of a message.
    """

    count: int
    parts: int
    bits: int
    bucket: int
    buckets: int

    @property
    def chunk(self) -> int:
        """Values of a message, padding included."""
        return self.bucket * self.buckets

    @property
    def code_bytes(self) -> int:
        """Codes of a message."""
        return self.chunk * self.bits // 8

    @property
    def meta_bytes(self) -> int:
        """Least values and steps of a message."""
        return self.buckets * META_BYTES

    @property
    def message_bytes(self) -> int:
        """A message."""
        return self.code_bytes + self.meta_bytes


def layout_of(count: int, parts: int, bits: int, bucket_size: int = BUCKET_SIZE) -> Layout:
    """The layout of `count` values in `parts` messages."""
    buckets = -(-count // (parts * bucket_size))
    bucket = 8 * -(-count // (8 * parts * buckets)) if count else 8
    return Layout(count=count, parts=parts, bits=bits, bucket=bucket, buckets=buckets)


def all_reduce_bytes(
    count: int, world: int, bits: int, bucket_size: int = BUCKET_SIZE, exact: int = 0
) -> int:
    """Bytes that a rank sends to average fp32 gradients.

    Codes take two phases. In each a rank sends one of `world` messages to every other rank:
    2 (world - 1) / world times (bits / 8 + 8 / bucket_size) bytes a value, which is 1.76 for
    8 bits and 8 ranks. With 16 and 32 bits all values go round a ring; see `ring_bytes`.

    Args:
        count: values that are coded at fewer than 16 bits.
        world: ranks.
        bits: of a value, see `communication_at`.
        bucket_size: see `Communication`.
        exact: float32 values that are never coded.
    """
    if bits >= CAST_BITS:
        return ring_bytes((count + exact) * bits // 8, world)
    coded = layout_of(count, world, bits, bucket_size).message_bytes
    return 2 * (world - 1) * (coded + 4 * -(-exact // world))


def ring_bytes(size_bytes: int, world: int) -> int:
    """Bytes that a rank sends in an all-reduce round a ring: 2 (world - 1) parts of `world`."""
    return 2 * (world - 1) * -(-size_bytes // world)


def _word(name: str, coding: Coding) -> str:
    marks = ("l" if coding.learned else "") + ("e" if coding.feedback else "")
    return f"{name}{coding.bits}{marks}"
