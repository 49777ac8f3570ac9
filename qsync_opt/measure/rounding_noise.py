"""What the layers of the runtime round at each precision, and the power of that noise.

The error of a rounding is not modelled but computed, with the quantisers of the layers:

    nearest:     (round(x) - x)^2, the square of the error itself;
    stochastic:  (x - below) * (above - x), its variance over the draws,

element by element, in float32. The tensors that are rounded, by the form an operator takes
(`runtime.operators`, `runtime.functions`; M rows, K inputs, N outputs):

    form        operands                           output   gradients
    linear      input [M, K], weight [N, K], bias  [M, N]   of the output, of the input
    conv2d      input, weight, bias                [...]    of the output, input and weight
    batched     a [B, M, K], b [B, K, N]           [...]    of the output, of both
    cast        all floats                         [...]    of the output, of the operands
    embedding   weight: rows that are looked up    none     of the output

A row that is looked up several times brings the same error each time, so the error of a
look-up counts where the rows are, not where they arrive.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from qsync_opt.graph import OperatorGraph, Origin
from qsync_opt.kernels import library as kernels
from qsync_opt.kernels.rounding import Rounding
from qsync_opt.precision import Precision
from qsync_opt.runtime.availability import supported_precisions
from qsync_opt.runtime.casts import compute_dtype
from qsync_opt.runtime.fp32 import round_to_tf32

_EIGHT_BITS = (Precision.INT8, Precision.FP8)
_E4M3 = (3, -6)  # bits of the mantissa, exponent of the smallest normal
_E5M2 = (2, -14)


class Form(Enum):
    """How the runtime computes an operator; see the module."""

    LINEAR = "linear"
    CONV2D = "conv2d"
    BATCHED = "batched"
    CAST = "cast"
    EMBEDDING = "embedding"


class Part(Enum):
    """What a tensor is to its operator."""

    INPUT = "input"
    WEIGHT = "weight"
    BIAS = "bias"
    OUTPUT = "output"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The tensors of one operator.

    Attributes:
        form: how it is computed.
        parts: number of a tensor argument -> what it is; only floats that are rounded.
        transposed: whether the weight of a linear form stands as [K, N].
        pointwise: whether a convolution is a product of matrices: 1 x 1, no padding.
        precisions: that the operator has.
    """

    form: Form
    parts: dict[int, Part]
    transposed: bool = False
    pointwise: bool = False
    precisions: frozenset[Precision] = frozenset(Precision)


def layout_of(graph: OperatorGraph, index: int) -> Layout:
    """The tensors of an adjustable operator."""
    signature = graph.signature_of(index)
    kind = signature.kind
    operands = signature.operands
    floats = [i for i, operand in enumerate(operands) if operand.dtype == "float32"]
    precisions = supported_precisions(kind)
    weights = [
        i for i in floats if operands[i].origin is Origin.PARAMETER and len(operands[i].shape) == 2
    ]
    if not signature.parts:
        parts = dict.fromkeys(floats, Part.WEIGHT)
        return Layout(form=Form.EMBEDDING, parts=parts, precisions=precisions)
    if kind == "linear":
        parts = dict(zip(floats, (Part.INPUT, Part.WEIGHT, Part.BIAS), strict=False))
        return Layout(form=Form.LINEAR, parts=parts, precisions=precisions)
    if kind == "conv2d":
        parts = dict(zip(floats, (Part.INPUT, Part.WEIGHT, Part.BIAS), strict=False))
        return Layout(
            form=Form.CONV2D,
            parts=parts,
            pointwise=operands[floats[1]].shape[2:] == (1, 1),
            precisions=precisions,
        )
    last = floats[-1]
    if kind in ("matmul", "mm", "addmm") and weights == [last]:
        names = (Part.BIAS, Part.INPUT) if kind == "addmm" else (Part.INPUT,)
        parts = {**dict(zip(floats, names, strict=False)), last: Part.WEIGHT}
        return Layout(form=Form.LINEAR, parts=parts, transposed=True, precisions=precisions)
    parts = dict.fromkeys(floats, Part.INPUT)
    if Precision.INT8 in precisions and len(floats) >= 2:
        parts[last] = Part.WEIGHT
        if len(floats) == 3:
            parts[floats[0]] = Part.BIAS
        return Layout(form=Form.BATCHED, parts=parts, precisions=precisions)
    return Layout(form=Form.CAST, parts=parts, precisions=precisions)


def value_noise(
    layout: Layout,
    part: Part,
    precision: Precision,
    value: Tensor,
    weight: Tensor,
    rounding: Rounding = Rounding.NEAREST,
) -> float:
    """Weighted power of the error with which a tensor enters an operator, or leaves it.

    Args:
        layout: of the operator.
        part: what the tensor is to it.
        precision: of the operator.
        value: the tensor, float32.
        weight: of each element, of the shape of `value`, >= 0.
        rounding: of what is quantised to 8 bits; casts are to the nearest.

    Returns:
        sum_i weight_i * E error_i^2; infinite where an element overflows that counts.
    """
    device = value.device
    if precision is Precision.FP32:
        return 0.0
    looked_up = layout.form is Form.EMBEDDING
    if part is Part.OUTPUT or looked_up:
        if precision.output is Precision.FP32 or (looked_up and part is Part.OUTPUT):
            return 0.0
        return _weighted(value, weight, _cast(compute_dtype(precision, device)))
    if part is Part.BIAS:
        if precision in (*_EIGHT_BITS, Precision.TF32):
            return 0.0
        return _weighted(value, weight, _cast(compute_dtype(precision, device)))
    if precision is Precision.TF32:
        return _weighted(value, weight, _tf32)
    if precision not in _EIGHT_BITS:
        return _weighted(value, weight, _cast(compute_dtype(precision, device)))
    value, weight = _rows(layout, part, value), _rows(layout, part, weight)
    if precision is Precision.FP8:
        return _weighted(value, weight, _fp8("e4m3", rounding))
    whole = layout.form is Form.CONV2D and part is Part.INPUT
    return _weighted(value, weight, _int8("tensor" if whole else "row", rounding))


def gradient_noise(
    layout: Layout,
    part: Part,
    precision: Precision,
    gradient: Tensor,
    weight: Tensor,
    *,
    loss_scale: float = 1.0,
    rounding: Rounding = Rounding.NEAREST,
) -> float:
    """The same for gradients: of the output on arrival, of operands on leaving.

    Args:
        layout: of the operator.
        part: what the tensor is to it whose gradient this is.
        precision: of the operator.
        gradient: float32.
        weight: of each element, of the shape of `gradient`, >= 0.
        loss_scale: what the loss is multiplied by in fp16.
        rounding: of what is quantised to 8 bits.
    """
    device = gradient.device
    if precision is Precision.FP32:
        return 0.0
    if part is Part.OUTPUT:
        if layout.form is Form.EMBEDDING and precision.output is Precision.FP32:
            return 0.0
        if precision is Precision.TF32:
            # Where calls are emulated, only their operands are rounded.
            emulated = layout.form in (Form.CAST, Form.BATCHED) and device.type != "cuda"
            return 0.0 if emulated else _weighted(gradient, weight, _tf32)
        if precision is Precision.FP8 and layout.form is not Form.EMBEDDING:
            rows = _rows(layout, part, gradient), _rows(layout, part, weight)
            return _weighted(*rows, _fp8("e5m2", rounding))
    elif precision is Precision.TF32 or part is Part.BIAS:
        return 0.0
    elif part is Part.WEIGHT and layout.form in (Form.LINEAR, Form.EMBEDDING):
        return 0.0  # summed and handed on in fp32
    dtype = compute_dtype(precision, device)
    scale = loss_scale if dtype is torch.float16 else 1.0
    return _weighted(gradient, weight, _cast(dtype, scale))


#: From values to the expected squares of their errors.
_Error = Callable[[Tensor], Tensor]


def _weighted(value: Tensor, weight: Tensor, error: _Error) -> float:
    power = error(value) * weight
    # An overflow that nothing depends on counts for nothing.
    return float(torch.where(weight > 0, power, 0.0).sum(dtype=torch.float64))


def _cast(dtype: torch.dtype, scale: float = 1.0) -> _Error:
    return lambda x: ((x * scale).to(dtype).float() / scale - x).square()


def _tf32(x: Tensor) -> Tensor:
    return (round_to_tf32(x) - x).square()


def _int8(granularity: str, rounding: Rounding) -> _Error:
    def error(x: Tensor) -> Tensor:
        codes, scale = kernels.quantize_int8(x, granularity)
        if rounding is Rounding.STOCHASTIC:
            place = x / scale
            share = place - place.floor()
            return share * (1 - share) * scale.square()
        return (kernels.dequantize(codes, scale, torch.float32) - x).square()

    return error


def _fp8(format: str, rounding: Rounding) -> _Error:
    mantissa_bits, least_exponent = _E4M3 if format == "e4m3" else _E5M2

    def error(x: Tensor) -> Tensor:
        codes, scale = kernels.quantize_fp8(x, format, "tensor")
        if rounding is Rounding.STOCHASTIC:
            place = x / scale
            exponent = torch.frexp(place).exponent - 1
            step = torch.ldexp(
                torch.ones_like(place), exponent.clamp_min(least_exponent) - mantissa_bits
            )
            share = place / step - (place / step).floor()
            return share * (1 - share) * (step * scale).square()
        return (kernels.dequantize(codes, scale, torch.float32) - x).square()

    return error


def _rows(layout: Layout, part: Part, x: Tensor) -> Tensor:
    """A tensor as the matrix whose rows the runtime quantises."""
    if layout.form is Form.CONV2D:
        if part is Part.WEIGHT:
            return x.flatten(1)
        return x.reshape(1, -1) if x.dim() < 2 else x.flatten(1)
    if part is Part.WEIGHT and (layout.transposed or layout.form is Form.BATCHED):
        x = x.transpose(-1, -2) if x.dim() > 1 else x
    return x.unsqueeze(0) if x.dim() == 1 else x.reshape(-1, x.shape[-1])
