"""The meaning of every kernel in plain torch, on any device: the oracle for faster versions.

A scaled tensor is a pair (q, scale) with x ~ q * scale and, in float32,

    scale = amax / q_max,   q = round(clamp(x / scale, -q_max, q_max)),

where amax is the largest |x| of the tensor, of each row or of each column. The clamp only takes
back the rounding error of the quotient; it never hides a value. Edges:

- amax = 0: scale 1, all codes 0. Scales below the smallest normal float32 (2^-126) are raised
  to it, so that tiny tensors round to 0 instead of dividing by 0.
- amax infinite or NaN: the scale is that amax and all codes are 0, so every dequantised value
  and every product with it is NaN. A loss scaler sees the overflow.
- No elements: scale 1.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from qsync_opt.errors import ParameterError
from qsync_opt.kernels.rounding import RandomKey, Rounding, round_to_integer, uniform

#: Largest code. Symmetric, so -128 is not used and negation is exact.
INT8_MAX = 127

#: Format -> (dtype, largest value, bits of the mantissa, exponent of the smallest normal).
FP8_FORMATS = {
    "e4m3": (torch.float8_e4m3fn, 448.0, 3, -6),
    "e5m2": (torch.float8_e5m2, 57344.0, 2, -14),
}
GRANULARITIES = ("tensor", "row", "column")
SCHEMES = ("nearest", "stochastic", "shift")

_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_NO_KEY = RandomKey()


def quantize_int8(
    x: Tensor,
    granularity: str,
    rounding: Rounding = Rounding.NEAREST,
    key: RandomKey = _NO_KEY,
) -> tuple[Tensor, Tensor]:
    """Quantise a matrix to int8.

    Args:
        x: [M, K], fp32, bf16 or fp16, any strides.
        granularity: `tensor`, `row` or `column`: which elements share a scale.
        rounding: of x / scale.
        key: of the random bits; the element's index is its place in row-major order.

    Returns:
        q: int8 [M, K], contiguous, in [-127, 127].
        scale: float32 [], [M, 1] or [1, K].
    """
    scale = _scale(x, float(INT8_MAX), granularity)
    codes = round_to_integer(_quotient(x, scale, float(INT8_MAX)), rounding, key)
    return codes.to(torch.int8), scale


def quantize_fp8(
    x: Tensor,
    format: str,
    granularity: str,
    rounding: Rounding = Rounding.NEAREST,
    key: RandomKey = _NO_KEY,
) -> tuple[Tensor, Tensor]:
    """Quantise a matrix to fp8; as `quantize_int8`, with `format` `e4m3` or `e5m2`.

    Returns:
        q: float8 [M, K], contiguous.
        scale: float32 [], [M, 1] or [1, K].
    """
    dtype, q_max, mantissa_bits, least_exponent = _fp8_format(format)
    scale = _scale(x, q_max, granularity)
    value = _quotient(x, scale, q_max)
    if rounding is Rounding.STOCHASTIC:
        # The distance between neighbours is a power of two; its bits are written directly,
        # because pow and ldexp may be off by one unit in the last place.
        exponent = ((value.view(torch.int32) >> 23) & 0xFF) - 127
        exponent = exponent.clamp_min(least_exponent) - mantissa_bits
        step = ((exponent + 127) << 23).view(torch.float32)
        value = round_to_integer(value / step, rounding, key) * step
    return value.to(dtype), scale


def quantize_fp8_transposed(
    x: Tensor, format: str, rounding: Rounding = Rounding.NEAREST, key: RandomKey = _NO_KEY
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise a matrix to fp8 with one scale, in both orders: what the backward products read.

    Returns:
        q: float8 [M, K], contiguous.
        q_transposed: float8 [K, M], contiguous, the same codes.
        scale: float32 [].
    """
    q, scale = quantize_fp8(x, format, "tensor", rounding, key)
    return q, q.t().contiguous(), scale


def dequantize(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of a scaled tensor, q * scale in float32, rounded to `dtype`."""
    return (q.to(torch.float32) * scale).to(dtype)


def int8_matmul(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """(a @ b.T) * a_scale * b_scale.T + bias, the products summed exactly.

    The sum is an int32 for K <= 133,144. Scales and bias apply in float32, in that order.

    Args:
        a: int8 [M, K]; any sizes, 0 included.
        b: int8 [N, K].
        a_scale: float32 [M, 1] or [].
        b_scale: float32 [N, 1] or [].
        bias: [N] or None.
        out_dtype: dtype of the result.

    Returns:
        [M, N].
    """
    return _scaled_product(a, b, a_scale, b_scale, bias, out_dtype)


def fp8_matmul(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """As `int8_matmul`, for fp8 codes of either format."""
    return _scaled_product(a, b, a_scale, b_scale, bias, out_dtype)


def int8_conv2d(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    groups: int,
    out_dtype: torch.dtype,
) -> Tensor:
    """Convolution of int8 codes, summed exactly, then scaled as in `int8_matmul`.

    Args:
        x: int8 [N, C, H, W]; zeros are padded.
        weight: int8 [O, C / groups, kh, kw].
        x_scale: float32 [].
        weight_scale: float32 [O].
        bias: [O] or None.
        stride: rows and columns between outputs.
        padding: zeros on each side of rows and columns.
        dilation: rows and columns between taps.
        groups: of channels that do not see one another.
        out_dtype: dtype of the result.

    Returns:
        [N, O, H_out, W_out] in channels_last memory.
    """
    product = functional.conv2d(
        x.to(torch.float64), weight.to(torch.float64), None, stride, padding, dilation, groups
    )
    out = product.to(torch.float32) * x_scale * weight_scale.view(1, -1, 1, 1)
    if bias is not None:
        out = out + bias.to(torch.float32).view(1, -1, 1, 1)
    return out.to(out_dtype).contiguous(memory_format=torch.channels_last)


def bucket_encode(
    x: Tensor, bits: int, bucket_size: int, scheme: str, key: RandomKey = _NO_KEY
) -> tuple[Tensor, Tensor]:
    """Code a vector between the least and the greatest value of each bucket.

    With levels = 2^bits - 1 and step = (max - min) / levels, in float32, the code is

    - `nearest`: round((x - min) / step), ties to even;
    - `stochastic`: unbiased, an own draw per element, keyed by the element's index;
    - `shift`: round((x - min) / step - r / step) with one r ~ U[-step/2, step/2) per bucket,
      keyed by the bucket's index; unbiased with an error of step^2/12 (QSDP, arXiv 2302.02390).

    A step of 0 gives codes 0 and exact values; a bucket with NaN or infinity decodes to numbers
    that are not finite.

    Args:
        x: [n], fp32, bf16 or fp16.
        bits: of a code, 2 to 8.
        bucket_size: elements that share min and step, a multiple of 8; the last may be short.
        scheme: `nearest`, `stochastic` or `shift`.
        key: of the random bits.

    Returns:
        packed: uint8 [ceil(n * bits / 8)]. Code i takes the bits i*bits .. (i+1)*bits - 1,
            counted from the least significant bit of byte 0; unused bits are 0.
        meta: float32 [buckets, 2]: min and step.
    """
    _check_bucket(bits, bucket_size, scheme)
    _require_float(x)
    count = x.numel()
    if count == 0:
        return x.new_empty(0, dtype=torch.uint8), x.new_empty((0, 2), dtype=torch.float32)
    buckets = -(-count // bucket_size)
    value = x.reshape(-1).to(torch.float32)
    # The padding repeats a value of the last bucket: its least and greatest stay.
    missing = buckets * bucket_size - count
    rows = torch.cat((value, value[-1:].expand(missing))).view(buckets, bucket_size)
    low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
    levels = 2**bits - 1
    step = (high - low) / low.new_full((), levels)  # a tensor: CUDA multiplies by 1 / scalar
    usable = torch.isfinite(step) & (step > 0)
    place = torch.where(usable, (rows - low) / step, 0.0)
    if scheme == "shift":
        place = place - _shift(buckets, key, x.device)
    rounding = Rounding.STOCHASTIC if scheme == "stochastic" else Rounding.NEAREST
    codes = round_to_integer(place, rounding, key).clamp(0, levels)
    codes = torch.where(usable, codes, 0.0).view(-1)[:count]
    return _pack(codes.to(torch.int64), bits), torch.cat((low, step), dim=1)


def bucket_decode(
    packed: Tensor,
    meta: Tensor,
    bits: int,
    bucket_size: int,
    n: int,
    scheme: str,
    key: RandomKey = _NO_KEY,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The values behind bucket codes: min + step * code, plus the shift that was taken off.

    In float32: min + step * (code + r / step), the sum in brackets first.

    Args:
        packed: from `bucket_encode`.
        meta: from `bucket_encode`.
        bits: as encoded.
        bucket_size: as encoded.
        n: number of values.
        scheme: as encoded.
        key: as encoded; read by `shift` alone.
        dtype: of the result.

    Returns:
        [n] of `dtype`.
    """
    _check_bucket(bits, bucket_size, scheme)
    if n == 0:
        return packed.new_empty(0, dtype=dtype)
    codes = _unpack(packed, bits, n).to(torch.float32)
    buckets = meta.shape[0]
    codes = functional.pad(codes, (0, buckets * bucket_size - n)).view(buckets, bucket_size)
    if scheme == "shift":
        codes = codes + _shift(buckets, key, packed.device)
    low, step = meta[:, :1], meta[:, 1:]
    return (low + step * codes).reshape(-1)[:n].to(dtype)


def _scale(x: Tensor, q_max: float, granularity: str) -> Tensor:
    _require_float(x)
    if x.dim() != 2:
        raise ParameterError("x", "must be a matrix", tuple(x.shape), "Reshape it first.")
    if granularity not in GRANULARITIES:
        rule = f"must be one of {', '.join(GRANULARITIES)}"
        raise ParameterError("granularity", rule, granularity)
    shape = {"tensor": (), "row": (x.shape[0], 1), "column": (1, x.shape[1])}[granularity]
    if x.numel() == 0:
        return x.new_ones(shape, dtype=torch.float32)
    size = x.abs()
    if granularity == "tensor":
        amax = size.amax()
    else:
        amax = size.amax(1 if granularity == "row" else 0, keepdim=True)
    amax = amax.to(torch.float32)
    scale = amax / amax.new_full((), q_max)  # a tensor: CUDA multiplies by 1 / scalar
    return torch.where(amax == 0, 1.0, scale.clamp_min(_SMALLEST_SCALE))


def _quotient(x: Tensor, scale: Tensor, q_max: float) -> Tensor:
    quotient = (x.to(torch.float32) / scale).clamp(-q_max, q_max)
    return torch.where(torch.isfinite(scale), quotient, 0.0).contiguous()


def _scaled_product(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    if a.device.type == "cpu" and a.dtype is torch.int8:
        product = torch._int_mm(a, b.t())  # exact too, and several times faster
    else:
        product = a.to(torch.float64) @ b.to(torch.float64).t()
    out = product.to(torch.float32) * a_scale * b_scale.t()
    if bias is not None:
        out = out + bias.to(torch.float32)
    return out.to(out_dtype)


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


def _fp8_format(format: str) -> tuple[torch.dtype, float, int, int]:
    if format not in FP8_FORMATS:
        raise ParameterError("format", f"must be one of {', '.join(FP8_FORMATS)}", format)
    return FP8_FORMATS[format]


def _require_float(x: Tensor) -> None:
    if x.dtype not in _FLOATS:
        rule = "must have dtype float32, bfloat16 or float16"
        raise ParameterError("x", rule, x.dtype, "Cast it first.")


def _check_bucket(bits: int, bucket_size: int, scheme: str) -> None:
    if not 2 <= bits <= 8:
        raise ParameterError("bits", "must be 2 to 8", bits)
    if bucket_size < 8 or bucket_size % 8:
        raise ParameterError("bucket_size", "must be a positive multiple of 8", bucket_size)
    if scheme not in SCHEMES:
        raise ParameterError("scheme", f"must be one of {', '.join(SCHEMES)}", scheme)
