"""The meaning of the kernels in plain torch, on any device: the oracle for faster versions.

Bucket codes and their messages are in `bucket_reference`.

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
from qsync_opt.kernels.rounding import RandomKey, Rounding, round_to_integer

#: Largest code. Symmetric, so -128 is not used and negation is exact.
INT8_MAX = 127

#: Terms of a product of int8 that an int32 is sure to hold; longer sums take float64.
INT8_DEPTH = (2**31 - 1) // 128**2

#: Format -> (dtype, largest value, bits of the mantissa, exponent of the smallest normal).
FP8_FORMATS = {
    "e4m3": (torch.float8_e4m3fn, 448.0, 3, -6),
    "e5m2": (torch.float8_e5m2, 57344.0, 2, -14),
}
GRANULARITIES = ("tensor", "row", "column")

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

    Scales and bias apply in float32, in that order.

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
    is_int8 = a.dtype is torch.int8 and a.shape[1] <= INT8_DEPTH
    # Exact too, and several times faster; of matrices with one column it reads the strides wrong.
    if is_int8 and a.device.type == "cpu" and a.shape[1] > 1:
        product = torch._int_mm(a, b.t())
    else:
        product = a.to(torch.float64) @ b.to(torch.float64).t()
    out = product.to(torch.float32) * a_scale * b_scale.t()
    if bias is not None:
        out = out + bias.to(torch.float32)
    return out.to(out_dtype)


def _fp8_format(format: str) -> tuple[torch.dtype, float, int, int]:
    if format not in FP8_FORMATS:
        raise ParameterError("format", f"must be one of {', '.join(FP8_FORMATS)}", format)
    return FP8_FORMATS[format]


def _require_float(x: Tensor) -> None:
    if x.dtype not in _FLOATS:
        rule = "must have dtype float32, bfloat16 or float16"
        raise ParameterError("x", rule, x.dtype, "Cast it first.")
