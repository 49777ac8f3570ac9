"""The products of layers as autograd functions: output, grad_input and grad_weight.

A function gets its operands already cast (`x` is there for autograd alone), so that layers
share casts of a common input. It saves the cast operand and the fp32 parameter itself, and
only what a gradient that somebody needs is made of.

    precision        output           grad_input        grad_weight       saved of x
    fp32, tf32       fp32             fp32              fp32              fp32
    bf16, fp16       16-bit           16-bit            16-bit            16-bit
    int8             int8             16-bit            16-bit            int8
    fp8              e4m3 x e4m3      e5m2 x e4m3       e5m2 x e4m3       e4m3

grad_weight is summed and handed on in fp32 where the library gives it (matrix products), so
that a long sum over tokens is not rounded to 16 bits. The gradient for the input of an 8-bit
product is taken through the unrounded weight, and rounding itself counts as the identity.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from qsync_opt.kernels import library as kernels
from qsync_opt.kernels.rounding import RandomKey, Rounding
from qsync_opt.runtime import arithmetic
from qsync_opt.runtime.fp32 import as_dtype
from qsync_opt.runtime.once import once

#: Rounding, seed, step and tensor: how an operator rounds, in a form that graphs can carry.
Draw = tuple[int, int, int, int]


def rounding_of(draw: Draw, salt: int) -> tuple[Rounding, RandomKey]:
    """The rounding and the key of the `salt`-th tensor that an operator rounds."""
    rounding, seed, step, tensor = draw
    return Rounding(rounding), RandomKey(seed=seed, step=step, tensor=tensor + salt)


#: Looked up once: finding an overload takes the host as long as the call.
_unsafe_view = torch.ops.aten._unsafe_view.default

#: Salts: which operand of an operator is rounded.
INPUT, WEIGHT, GRADIENT = 0, 1, 2


class FloatLinear(Function):
    """x @ weight.T + bias in fp32, tf32, bf16 or fp16."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        cast: Tensor | None,
        tf32: bool,
    ) -> Tensor:
        """See the class; `cast` is x in the dtype of the product, None where x has it."""
        operand = x if cast is None else cast
        dtype = operand.dtype
        ctx.tf32, ctx.dtype = tf32, dtype
        _remember(ctx, x, weight, bias)
        ctx.save_for_backward(
            operand if ctx.needs_input_grad[1] else None,
            weight if ctx.needs_input_grad[0] else None,
        )
        with arithmetic.without_autocast(x.device.type):
            cast_bias = None if bias is None else as_dtype(bias, dtype)
            out = arithmetic.linear(_rows(operand), as_dtype(weight, dtype), cast_bias, tf32=tf32)
        return _like_input(out, x)

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients for x, weight and bias."""
        operand, weight = ctx.saved_tensors
        grad_x = grad_weight = None
        with arithmetic.without_autocast(grad.device.type):
            rows = as_dtype(_rows(grad), ctx.dtype)
            if ctx.needs_input_grad[0]:
                product = arithmetic.matmul(
                    rows, as_dtype(weight, ctx.dtype), ctx.dtype, tf32=ctx.tf32
                )
                grad_x = as_dtype(product.view(ctx.shape), ctx.input_dtype)
            if ctx.needs_input_grad[1]:
                columns = rows.t()
                product = arithmetic.matmul(columns, _rows(operand), torch.float32, tf32=ctx.tf32)
                grad_weight = as_dtype(product, ctx.weight_dtype)
        return grad_x, grad_weight, _grad_bias(ctx, rows), None, None


class Int8Linear(Function):
    """An int8 product with one scale per row of x and per output channel; 16-bit backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        codes: Tensor,
        scale: Tensor,
        half: torch.dtype,
        draw: Draw,
    ) -> Tensor:
        """See the class; `codes` int8 [M, K] and `scale` [M, 1] are x."""
        ctx.half = half
        _remember(ctx, x, weight, bias)
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        kept = (codes, scale) if needs_weight else (None, None)
        ctx.save_for_backward(*kept, weight if needs_x else None)
        with arithmetic.without_autocast(x.device.type):
            rounding, key = rounding_of(draw, WEIGHT)
            weight_codes, weight_scale = kernels.quantize_int8(weight, "row", rounding, key)
            out = kernels.int8_matmul(codes, weight_codes, scale, weight_scale, bias, half)
        return _like_input(out, x)

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients for x, weight and bias."""
        codes, scale, weight = ctx.saved_tensors
        grad_x = grad_weight = None
        with arithmetic.without_autocast(grad.device.type):
            rows = as_dtype(_rows(grad), ctx.half)
            if ctx.needs_input_grad[0]:
                product = arithmetic.matmul(rows, as_dtype(weight, ctx.half), ctx.half)
                grad_x = as_dtype(product.view(ctx.shape), ctx.input_dtype)
            if ctx.needs_input_grad[1]:
                operand = kernels.dequantize(codes, scale, ctx.half)
                product = arithmetic.matmul(rows.t(), operand, torch.float32)
                grad_weight = as_dtype(product, ctx.weight_dtype)
        return grad_x, grad_weight, _grad_bias(ctx, rows), None, None, None, None


class Fp8Linear(Function):
    """Three fp8 products with one scale a tensor: e4m3 for x and weight, e5m2 for gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        codes: Tensor,
        codes_transposed: Tensor,
        scale: Tensor,
        half: torch.dtype,
        draw: Draw,
    ) -> Tensor:
        """See the class; `codes` [M, K] and [K, M] with `scale` [] are x."""
        ctx.half, ctx.draw = half, draw
        _remember(ctx, x, weight, bias)
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        kept = (codes_transposed, scale) if needs_weight else (None, None)
        ctx.save_for_backward(*kept, weight if needs_x else None)
        with arithmetic.without_autocast(x.device.type):
            rounding, key = rounding_of(draw, WEIGHT)
            weight_codes, weight_scale = kernels.quantize_fp8(
                weight, "e4m3", "tensor", rounding, key
            )
            out = kernels.fp8_matmul(codes, weight_codes, scale, weight_scale, bias, half)
        return _like_input(out, x)

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients for x, weight and bias."""
        codes_transposed, scale, weight = ctx.saved_tensors
        grad_x = grad_weight = None
        with arithmetic.without_autocast(grad.device.type):
            rows = _rows(grad)
            rounding, key = rounding_of(ctx.draw, GRADIENT)
            grad_codes, grad_transposed, grad_scale = kernels.quantize_fp8_transposed(
                rows, "e5m2", rounding, key
            )
            if ctx.needs_input_grad[0]:
                rounding, key = rounding_of(ctx.draw, WEIGHT)
                _, weight_transposed, weight_scale = kernels.quantize_fp8_transposed(
                    weight, "e4m3", rounding, key
                )
                product = kernels.fp8_matmul(
                    grad_codes, weight_transposed, grad_scale, weight_scale, None, ctx.half
                )
                grad_x = as_dtype(product.view(ctx.shape), ctx.input_dtype)
            if ctx.needs_input_grad[1]:
                product = kernels.fp8_matmul(
                    grad_transposed, codes_transposed, grad_scale, scale, None, torch.float32
                )
                grad_weight = as_dtype(product, ctx.weight_dtype)
        return grad_x, grad_weight, _grad_bias(ctx, rows), None, None, None, None, None


def _remember(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Shapes and dtypes that backward needs, and that are no tensors."""
    ctx.shape, ctx.input_dtype, ctx.weight_dtype = x.shape, x.dtype, weight.dtype
    ctx.bias_dtype = None if bias is None else bias.dtype


def _like_input(out: Tensor, x: Tensor) -> Tensor:
    """A matrix [M, N] as [..., N]; no view, so that what follows may write into it."""
    if x.dim() == 2:
        return out
    shaped: Tensor = _unsafe_view(out, [*x.shape[:-1], out.shape[-1]])
    return shaped


def _rows(x: Tensor) -> Tensor:
    """A tensor [..., N] as a matrix."""
    if x.dim() == 2:
        return x
    return x.flatten(0, -2) if x.dim() != 1 else x.unsqueeze(0)


def _grad_bias(ctx: Any, rows: Tensor) -> Tensor | None:
    if ctx.bias_dtype is None or not ctx.needs_input_grad[2]:
        return None
    return as_dtype(rows.sum(0, dtype=torch.float32), ctx.bias_dtype)
