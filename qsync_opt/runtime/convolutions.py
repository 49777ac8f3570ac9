"""Convolutions of layers as autograd functions; precisions and savings as in `products`.

There is no fp8 convolution in cuDNN or cuBLAS. Every fp8 number is a bf16 number, so the codes
are convolved in bf16 with fp32 sums, which multiplies exactly what fp8 hardware would. Such an
operator saves memory, not time; 1x1 convolutions are matrix products and need none of this.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch.autograd import Function

from qsync_opt.kernels import library as kernels
from qsync_opt.runtime import arithmetic
from qsync_opt.runtime.fp32 import Window, as_dtype
from qsync_opt.runtime.once import once
from qsync_opt.runtime.products import GRADIENT, WEIGHT, Draw, rounding_of


def channel_rows(x: Tensor) -> Tensor:
    """A tensor [N, C, H, W] as a matrix [N * H * W, C]: a view where it is channels_last."""
    return x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])


def from_channel_rows(rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The tensor of `shape` [N, C, H, W] behind a matrix [N * H * W, C], channels_last."""
    count, channels, height, width = shape
    return rows.view(count, height, width, channels).permute(0, 3, 1, 2)


def weight_rows(weight: Tensor) -> Tensor:
    """A weight [O, C, kh, kw] as a matrix [O, kh * kw * C]: channels_last codes come of it."""
    return weight.permute(0, 2, 3, 1).reshape(weight.shape[0], -1)


def laid_out(out: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """A result in the memory format that torch's own convolution gives for these operands.

    That is channels_last where one of the two is. What reads the result then does what it does
    in fp32: after another layout a later flatten would copy, and keep the copy for backward.
    """
    formats = suggest_memory_format(x), suggest_memory_format(weight)
    wanted = torch.channels_last if torch.channels_last in formats else torch.contiguous_format
    if out.is_contiguous(memory_format=wanted):
        return out
    return out.contiguous(memory_format=wanted)


class FloatConv2d(Function):
    """A convolution in fp32, tf32, bf16 or fp16."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        cast: Tensor | None,
        window: Window,
        tf32: bool,
    ) -> Tensor:
        """See the class; `cast` is x in the dtype of the product, None where x has it."""
        operand = x if cast is None else cast
        dtype = operand.dtype
        ctx.window, ctx.tf32, ctx.dtype = window, tf32, dtype
        _remember(ctx, x, weight, bias)
        ctx.save_for_backward(
            operand if ctx.needs_input_grad[1] else None,
            weight if ctx.needs_input_grad[0] else None,
        )
        with arithmetic.without_autocast(x.device.type):
            cast_bias = None if bias is None else as_dtype(bias, dtype)
            return arithmetic.conv2d(operand, as_dtype(weight, dtype), cast_bias, window, tf32=tf32)

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients for x, weight and bias."""
        operand, weight = ctx.saved_tensors
        with arithmetic.without_autocast(grad.device.type):
            cast = as_dtype(grad, ctx.dtype)
            grad_x, grad_weight = arithmetic.conv2d_backward(
                cast,
                _or_shape(operand, ctx.shape, cast),
                as_dtype(_or_shape(weight, ctx.weight_shape, cast), ctx.dtype),
                ctx.window,
                ctx.needs_input_grad[:2],
                tf32=ctx.tf32,
            )
        return *_finish(ctx, grad_x, grad_weight), _grad_bias(ctx, grad), None, None, None


class Int8Conv2d(Function):
    """An int8 convolution, one scale for x and one per output channel; 16-bit backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        codes: Tensor,
        scale: Tensor,
        half: torch.dtype,
        window: Window,
        draw: Draw,
    ) -> Tensor:
        """See the class; `codes` int8 [N * H * W, C] and `scale` [] are x."""
        ctx.window, ctx.half = window, half
        _remember(ctx, x, weight, bias)
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        kept = (codes, scale) if needs_weight else (None, None)
        ctx.save_for_backward(*kept, weight if needs_x else None)
        with arithmetic.without_autocast(x.device.type):
            rounding, key = rounding_of(draw, WEIGHT)
            rows, weight_scale = kernels.quantize_int8(weight_rows(weight), "row", rounding, key)
            out = kernels.int8_conv2d(
                from_channel_rows(codes, x.shape),
                from_channel_rows(rows, weight.shape),
                scale,
                weight_scale.view(-1),
                bias,
                *window,
                half,
            )
            return laid_out(out, x, weight)

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients for x, weight and bias."""
        codes, scale, weight = ctx.saved_tensors
        with arithmetic.without_autocast(grad.device.type):
            cast = as_dtype(grad, ctx.half)
            operand = None
            if codes is not None:
                rows = kernels.dequantize(codes, scale, ctx.half)
                operand = from_channel_rows(rows, ctx.shape)
            grad_x, grad_weight = arithmetic.conv2d_backward(
                cast,
                _or_shape(operand, ctx.shape, cast),
                as_dtype(_or_shape(weight, ctx.weight_shape, cast), ctx.half),
                ctx.window,
                ctx.needs_input_grad[:2],
            )
        none = (None,) * 5
        return *_finish(ctx, grad_x, grad_weight), _grad_bias(ctx, grad), *none


class Fp8Conv2d(Function):
    """Three convolutions of fp8 codes with one scale a tensor: e4m3, and e5m2 for gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        codes: Tensor,
        scale: Tensor,
        half: torch.dtype,
        window: Window,
        draw: Draw,
    ) -> Tensor:
        """See the class; `codes` e4m3 [N * H * W, C] and `scale` [] are x."""
        ctx.window, ctx.draw = window, draw
        # Sums of codes, which scales make small only later, are too large for fp16.
        ctx.half = torch.float32 if half is torch.float16 else half
        _remember(ctx, x, weight, bias)
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        kept = (codes, scale) if needs_weight else (None, None)
        ctx.save_for_backward(*kept, weight if needs_x else None)
        with arithmetic.without_autocast(x.device.type):
            weight_codes, weight_scale = _fp8_weight(ctx, weight)
            operand = from_channel_rows(codes.to(ctx.half), x.shape)
            out = arithmetic.conv2d(operand, weight_codes, None, window) * (scale * weight_scale)
            out = as_dtype(out, half)
            out = out if bias is None else out + as_dtype(bias, half).view(-1, 1, 1)
            return laid_out(out, x, weight)

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients for x, weight and bias."""
        codes, scale, weight = ctx.saved_tensors
        with arithmetic.without_autocast(grad.device.type):
            rounding, key = rounding_of(ctx.draw, GRADIENT)
            rows, grad_scale = kernels.quantize_fp8(
                channel_rows(grad), "e5m2", "tensor", rounding, key
            )
            cast = from_channel_rows(rows.to(ctx.half), grad.shape)
            operand = weight_codes = weight_scale = None
            if codes is not None:
                operand = from_channel_rows(codes.to(ctx.half), ctx.shape)
            if weight is not None:
                weight_codes, weight_scale = _fp8_weight(ctx, weight)
            grad_x, grad_weight = arithmetic.conv2d_backward(
                cast,
                _or_shape(operand, ctx.shape, cast),
                _or_shape(weight_codes, ctx.weight_shape, cast),
                ctx.window,
                ctx.needs_input_grad[:2],
            )
            if grad_x is not None and weight_scale is not None:
                grad_x = grad_x * (grad_scale * weight_scale)
            if grad_weight is not None:
                grad_weight = grad_weight.float() * (grad_scale * scale)
        none = (None,) * 5
        return *_finish(ctx, grad_x, grad_weight), _grad_bias(ctx, grad), *none


class PointwiseWeight(Function):
    """A weight [O, C, 1, 1] as the matrix [O, C]; its gradient has the weight's strides."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        """See the class."""
        ctx.weight_shape, ctx.weight_stride = weight.shape, weight.stride()
        return weight.flatten(1)

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """The gradient for the weight."""
        return _strided(grad.view(ctx.weight_shape), ctx)


def _fp8_weight(ctx: Any, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of a weight, as 16-bit floats in its shape, and their scale."""
    rounding, key = rounding_of(ctx.draw, WEIGHT)
    rows, scale = kernels.quantize_fp8(weight_rows(weight), "e4m3", "tensor", rounding, key)
    return from_channel_rows(rows.to(ctx.half), weight.shape), scale


def _remember(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Shapes and dtypes that backward needs, and that are no tensors."""
    ctx.shape, ctx.input_dtype = x.shape, x.dtype
    ctx.weight_shape, ctx.weight_dtype = weight.shape, weight.dtype
    ctx.weight_stride = weight.stride()
    ctx.bias_dtype = None if bias is None else bias.dtype


def _or_shape(operand: Tensor | None, shape: torch.Size, like: Tensor) -> Tensor:
    """The operand, or where it was not kept a stand-in of its shape without memory."""
    return like.new_empty(1).expand(shape) if operand is None else operand


def _finish(
    ctx: Any, grad_x: Tensor | None, grad_weight: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    return (
        None if grad_x is None else as_dtype(grad_x, ctx.input_dtype),
        None if grad_weight is None else _strided(as_dtype(grad_weight, ctx.weight_dtype), ctx),
    )


def _strided(grad_weight: Tensor, ctx: Any) -> Tensor:
    """The gradient with the strides of the weight, which DDP compares to the last.

    Libraries choose the strides of dimensions of size 1, and may choose others for all.
    """
    wanted = ctx.weight_stride
    if grad_weight.stride() == wanted or 0 in wanted:
        return grad_weight
    sizes = zip(grad_weight.shape, grad_weight.stride(), wanted, strict=True)
    if all(found == stride for size, found, stride in sizes if size != 1):
        return grad_weight.as_strided(ctx.weight_shape, wanted)
    laid = grad_weight.new_empty_strided(ctx.weight_shape, wanted)
    return laid.copy_(grad_weight)


def _grad_bias(ctx: Any, grad: Tensor) -> Tensor | None:
    if ctx.bias_dtype is None or not ctx.needs_input_grad[2]:
        return None
    return as_dtype(grad.sum((0, 2, 3), dtype=torch.float32), ctx.bias_dtype)
