"""The meaning of bucket codes and their messages in plain torch: the oracle of their kernels.

A vector is cut into buckets. A value's place between the least and the greatest of its bucket,
counted in codes, is rounded to a code:

    step = (max - min) / (2^bits - 1),   place = (x - min) / step          evenly spaced levels
    span = max - min,   place = bend((x - min) / span)                     learned levels

in float32. A table of 2^bits increasing levels from 0 to 1 bends [0, 1] so that level i lies at
i: bend(v) = i + (v - table[i]) * (1 / (table[i + 1] - table[i])) for table[i] <= v < table[i + 1].

A message holds, for a run of whole buckets, the pairs (min, step) or (min, span) as float32 and
behind them the codes; what is behind the last value is 0.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from qsync_opt.errors import ParameterError
from qsync_opt.kernels.rounding import CARRY_BITS, RandomKey, round_by_carry, uniform

SCHEMES = ("nearest", "stochastic", "shift")

#: Most bits of a code with learned levels.
MOST_LEARNED_BITS = 6

#: The pair of a bucket in a message, two float32.
RANGE_BYTES = 8

#: Bits of a float32 behind the first: a code and its fraction must fit.
_MANTISSA_BITS = 23

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_NO_KEY = RandomKey()


def bucket_encode(
    x: Tensor,
    bits: int,
    bucket_size: int,
    scheme: str,
    key: RandomKey = _NO_KEY,
    table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Code a vector between the least and the greatest value of each bucket.

    The code of a place (see the module) is

    - `nearest`: round(place), ties to even;
    - `stochastic`: up or down by chance, an own draw per element, keyed by the element's index.
      The place is rounded to 16 binary places before, to 15 where a code has 8 bits, so the mean
      is off by at most 2^-17 (2^-16) of a step; see `rounding.round_by_carry`;
    - `shift`: round(place - r) with one r ~ U[-1/2, 1/2) per bucket, keyed by the bucket's index;
      unbiased with an error of step^2 / 12 (QSDP, arXiv 2302.02390). Not with learned levels,
      between which it would be biased.

    A step of 0 gives codes 0 and exact values; a bucket with NaN or infinity decodes to numbers
    that are not finite.

    Args:
        x: [n], fp32, bf16 or fp16.
        bits: of a code, 2 to 8; 2 to 6 with learned levels.
        bucket_size: elements that share a range, a multiple of 8; the last may be short.
        scheme: `nearest`, `stochastic` or `shift`.
        key: of the random bits.
        table: learned levels, float32 [2^bits], strictly increasing from 0 to 1; None: even ones.

    Returns:
        packed: uint8 [ceil(n * bits / 8)]. Code i takes the bits i*bits .. (i+1)*bits - 1,
            counted from the least significant bit of byte 0; unused bits are 0.
        meta: float32 [buckets, 2]: min, and step or span.
    """
    check_code(bits, bucket_size, scheme, table)
    count = x.numel()
    if count == 0:
        return x.new_empty(0, dtype=torch.uint8), x.new_empty((0, 2), dtype=torch.float32)
    if x.dtype not in _FLOATS:
        rule = "must have dtype float32, bfloat16 or float16"
        raise ParameterError("x", rule, x.dtype, "Cast it first.")
    buckets = -(-count // bucket_size)
    value = x.reshape(-1).to(torch.float32)
    # The padding repeats a value of the last bucket: its least and greatest stay.
    missing = buckets * bucket_size - count
    rows = torch.cat((value, value[-1:].expand(missing))).view(buckets, bucket_size)
    low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
    levels = 2**bits - 1
    # Over a tensor: CUDA multiplies by 1 / scalar.
    unit = high - low if table is not None else (high - low) / low.new_full((), levels)
    usable = torch.isfinite(unit) & (unit > 0)
    place = torch.where(usable, (rows - low) / unit, 0.0)
    if table is not None:
        place = _bend(place, table)
    if scheme == "stochastic":
        codes = round_by_carry(place, min(CARRY_BITS, _MANTISSA_BITS - bits), key)
    else:
        codes = (place - _shift(buckets, key, x.device) if scheme == "shift" else place).round()
    codes = torch.where(usable, codes.clamp(0, levels), 0.0).view(-1)[:count]
    return _pack(codes.to(torch.int64), bits), torch.cat((low, unit), dim=1)


def bucket_decode(
    packed: Tensor,
    meta: Tensor,
    bits: int,
    bucket_size: int,
    n: int,
    scheme: str,
    key: RandomKey = _NO_KEY,
    table: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The values behind bucket codes, in float32.

    min + step * (code + r) with the shift r that was taken off, 0 without one, the sum in
    brackets first; with learned levels min + span * table[code].

    Args:
        packed: from `bucket_encode`.
        meta: from `bucket_encode`.
        bits: as encoded.
        bucket_size: as encoded.
        n: number of values.
        scheme: as encoded.
        key: as encoded; read by `shift` alone.
        table: as encoded.
        dtype: of the result.

    Returns:
        [n] of `dtype`.
    """
    check_code(bits, bucket_size, scheme, table)
    if n == 0:
        return packed.new_empty(0, dtype=dtype)
    codes = _unpack(packed, bits, n)
    buckets = meta.shape[0]
    codes = functional.pad(codes, (0, buckets * bucket_size - n)).view(buckets, bucket_size)
    if table is not None:
        place = table[codes]
    else:
        place = codes.to(torch.float32)
        if scheme == "shift":
            place = place + _shift(buckets, key, packed.device)
    low, unit = meta[:, :1], meta[:, 1:]
    return (low + unit * place).reshape(-1)[:n].to(dtype)


def check_code(bits: int, bucket_size: int, scheme: str, table: Tensor | None) -> None:
    """Refuse a code that there is not.

    Raises:
        ParameterError: names the argument and the rule.
    """
    most = 8 if table is None else MOST_LEARNED_BITS
    if not 2 <= bits <= most:
        raise ParameterError("bits", f"must be 2 to {most}", bits)
    if bucket_size < 8 or bucket_size % 8:
        raise ParameterError("bucket_size", "must be a positive multiple of 8", bucket_size)
    if scheme not in SCHEMES:
        raise ParameterError("scheme", f"must be one of {', '.join(SCHEMES)}", scheme)
    if table is None:
        return
    if scheme == "shift":
        rule = "must be nearest or stochastic with learned levels"
        raise ParameterError("scheme", rule, scheme)
    if table.dtype is not torch.float32 or tuple(table.shape) != (2**bits,):
        rule = f"must be float32 [{2**bits}]"
        raise ParameterError("table", rule, (tuple(table.shape), table.dtype))


def message_bytes(buckets: int, bucket_size: int, bits: int) -> int:
    """Bytes of a message of so many buckets."""
    return buckets * (RANGE_BYTES + bucket_size * bits // 8)


def message_encode(
    x: Tensor,
    parts: int,
    buckets: int,
    bucket_size: int,
    bits: int,
    scheme: str,
    key: RandomKey = _NO_KEY,
    table: Tensor | None = None,
    beside: Tensor | None = None,
) -> Tensor:
    """The messages of a vector: `bucket_encode`, in rows of whole buckets.

    Args:
        x: [n], of at most parts * buckets * bucket_size values.
        parts: messages.
        buckets: of a message.
        bucket_size: see `bucket_encode`.
        bits: see `bucket_encode`.
        scheme: see `bucket_encode`.
        key: see `bucket_encode`.
        table: see `bucket_encode`.
        beside: uint8 [parts, m], bytes that follow each message in its row.

    Returns:
        uint8 [parts, `message_bytes` + m].
    """
    packed, meta = bucket_encode(x, bits, bucket_size, scheme, key, table)
    sizes = buckets * RANGE_BYTES, buckets * bucket_size * bits // 8
    columns = [
        functional.pad(part, (0, parts * size - part.numel())).view(parts, size)
        for part, size in zip((meta.flatten().view(torch.uint8), packed), sizes, strict=True)
    ]
    return torch.cat(columns if beside is None else [*columns, beside], dim=1)


def message_decode(
    messages: Tensor,
    buckets: int,
    bucket_size: int,
    bits: int,
    scheme: str,
    key: RandomKey = _NO_KEY,
    table: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The values of messages, what is padded included.

    Args:
        messages: uint8 [parts, at least `message_bytes`]; more bytes are not looked at.
        buckets: of a message, as encoded.
        bucket_size: as encoded.
        bits: as encoded.
        scheme: as encoded.
        key: as encoded; a shift depends on the bucket's number from the first message on.
        table: as encoded.
        dtype: of the result.

    Returns:
        [parts, buckets * bucket_size] of `dtype`.
    """
    parts, chunk = messages.shape[0], buckets * bucket_size
    end = buckets * RANGE_BYTES
    # Copies: bytes in rows are not aligned.
    ranges = messages[:, :end].clone(memory_format=torch.contiguous_format).view(-1)
    packed = messages[:, end : message_bytes(buckets, bucket_size, bits)].flatten()
    values = bucket_decode(
        packed,
        ranges.view(torch.float32).view(-1, 2),
        bits,
        bucket_size,
        parts * chunk,
        scheme,
        key,
        table,
        dtype,
    )
    return values.view(parts, chunk)


def message_mean(
    messages: Tensor,
    buckets: int,
    bucket_size: int,
    bits: int,
    divisor: float,
    table: Tensor | None = None,
) -> Tensor:
    """The values of messages added up over the messages in their order, over a divisor.

    Args:
        messages: as of `message_decode`, without a shift.
        buckets: of a message, as encoded.
        bucket_size: as encoded.
        bits: as encoded.
        divisor: what the sum is divided by.
        table: as encoded.

    Returns:
        float32 [buckets * bucket_size].
    """
    rows = message_decode(messages, buckets, bucket_size, bits, "nearest", table=table)
    total = rows[0]
    for row in rows[1:]:
        total = total + row
    return total / total.new_full((), divisor)  # a tensor: CUDA multiplies by 1 / scalar


def _bend(place: Tensor, table: Tensor) -> Tensor:
    """Places in [0, 1] to places in [0, 2^bits - 1], where level i lies at i."""
    index = torch.bucketize(place, table[1:-1].contiguous(), right=True)
    gaps = table[1:] - table[:-1]
    return index + (place - table[index]) * (torch.ones_like(gaps) / gaps)[index]


def _shift(buckets: int, key: RandomKey, device: torch.device) -> Tensor:
    """The shift over the step, of each bucket: float32 [buckets, 1] in [-1/2, 1/2)."""
    return (uniform(buckets, key, device) - 0.5).view(-1, 1)


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Eight codes fill `bits` whole bytes: write them into one 64-bit word and cut it up."""
    count = codes.numel()
    groups = functional.pad(codes, (0, -count % 8)).view(-1, 8)
    places = torch.arange(8, device=codes.device)
    words = (groups << (places * bits)).sum(1, keepdim=True)
    packed = (words >> (places[:bits] * 8)) & 0xFF
    return packed.to(torch.uint8).view(-1)[: -(-count * bits // 8)]


def _unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    groups = -(-count // 8)
    data = functional.pad(packed, (0, groups * bits - packed.numel())).view(groups, bits)
    places = torch.arange(8, device=packed.device)
    words = (data.to(torch.int64) << (places[:bits] * 8)).sum(1, keepdim=True)
    codes: Tensor = (words >> (places * bits)) & (2**bits - 1)
    return codes.reshape(-1)[:count]
