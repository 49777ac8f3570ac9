"""Batched products of two activations from 8-bit codes, as an autograd function.

No library multiplies batches of 8-bit matrices in one call. Codes of int8 and fp8 are bf16
numbers, so a batch is multiplied in bf16 with fp32 sums, which gives what 8-bit hardware
would; such an operator saves memory, not time. One matrix alone takes the 8-bit product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from qsync_opt.kernels import library as kernels
from qsync_opt.runtime import arithmetic
from qsync_opt.runtime.fp32 import as_dtype
from qsync_opt.runtime.once import once
from qsync_opt.runtime.products import GRADIENT, INPUT, WEIGHT, Draw, rounding_of


class CodedMatmul(Function):
    """a @ b for [B, M, K] and [B, K, N].

    int8: a scale per row of a and per column of b, 16-bit gradients of the dequantised
    operands. fp8: one scale a tensor, e4m3 operands, e5m2 gradients, all three from codes.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, fp8: bool, half: torch.dtype, draw: Draw) -> Tensor:
        """See the class."""
        ctx.fp8, ctx.half, ctx.draw = fp8, half, draw
        ctx.dtypes = a.dtype, b.dtype
        with arithmetic.without_autocast(a.device.type):
            a_codes, a_scale = _quantize(a, fp8, draw, INPUT)
            b_codes, b_scale = _quantize(b.transpose(1, 2), fp8, draw, WEIGHT)
            out = _product(a_codes, a_scale, b_codes, b_scale, half, half)
        kept_a = (a_codes, a_scale) if ctx.needs_input_grad[1] else (None, None)
        kept_b = (b_codes, b_scale) if ctx.needs_input_grad[0] else (None, None)
        ctx.save_for_backward(*kept_a, *kept_b)
        return out

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients for a and b."""
        a_codes, a_scale, b_codes, b_scale = ctx.saved_tensors
        half = ctx.half
        grad_a = grad_b = None
        with arithmetic.without_autocast(grad.device.type):
            if ctx.fp8:
                rounding, key = rounding_of(ctx.draw, GRADIENT)
                rows, scale = kernels.quantize_fp8(
                    grad.flatten(0, 1), "e5m2", "tensor", rounding, key
                )
                cast = rows.view(grad.shape)
                if b_codes is not None:  # [B, M, N] @ [B, N, K]
                    grad_a = _scaled(cast, b_codes, half) * (scale * b_scale)
                if a_codes is not None:  # [B, K, M] @ [B, M, N]
                    grad_b = _scaled(a_codes.transpose(1, 2), cast, half) * (scale * a_scale)
            else:
                cast = as_dtype(grad, half)
                if b_codes is not None:
                    grad_a = arithmetic.matmul(cast, _values(b_codes, b_scale, half), half)
                if a_codes is not None:
                    a = _values(a_codes, a_scale, half)
                    grad_b = arithmetic.matmul(a.transpose(1, 2), cast, half)
        grad_a = None if grad_a is None else as_dtype(grad_a, ctx.dtypes[0])
        grad_b = None if grad_b is None else as_dtype(grad_b, ctx.dtypes[1])
        return grad_a, grad_b, None, None, None


def _quantize(x: Tensor, fp8: bool, draw: Draw, salt: int) -> tuple[Tensor, Tensor]:
    """Codes [B, M, K] with a scale [B * M, 1] for int8, [] for fp8."""
    rounding, key = rounding_of(draw, salt)
    rows = x.reshape(x.shape[0] * x.shape[1], x.shape[2])
    if fp8:
        codes, scale = kernels.quantize_fp8(rows, "e4m3", "tensor", rounding, key)
    else:
        codes, scale = kernels.quantize_int8(rows, "row", rounding, key)
    return codes.view(x.shape), scale


def _product(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, half: torch.dtype, out: torch.dtype
) -> Tensor:
    """The product [B, M, N] of codes [B, M, K] and [B, N, K]."""
    if a.shape[0] == 1:
        product = kernels.int8_matmul if a.dtype is torch.int8 else kernels.fp8_matmul
        return product(a[0], b[0], a_scale, b_scale, None, out).unsqueeze(0)
    if a_scale.dim():
        a_scale = a_scale.view(a.shape[0], -1, 1)
        b_scale = b_scale.view(b.shape[0], 1, -1)
    return as_dtype(_scaled(a, b.transpose(1, 2), half) * a_scale * b_scale, out)


def _scaled(a: Tensor, b: Tensor, half: torch.dtype) -> Tensor:
    """The product of codes in fp32, before scales."""
    return arithmetic.matmul(a.to(half), b.to(half), torch.float32)


def _values(codes: Tensor, scale: Tensor, half: torch.dtype) -> Tensor:
    return kernels.dequantize(codes.flatten(0, 1), scale, half).view(codes.shape)
