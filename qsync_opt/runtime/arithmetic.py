"""Matrix products and convolutions of float operands, fp32 and 16-bit, with fp32 sums.

fp16 on a CPU is emulated: fp16 operands, products and sums in fp32, one rounding at the end.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.nn import functional

from qsync_opt.runtime import fp32
from qsync_opt.runtime.fp32 import Window, as_dtype

_NOTHING = nullcontext()


def without_autocast(device_type: str) -> AbstractContextManager[object]:
    """A context in which autocast is off: the precision of the plan wins."""
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return _NOTHING


def matmul(a: Tensor, b: Tensor, out_dtype: torch.dtype, *, tf32: bool = False) -> Tensor:
    """The product a @ b.

    Args:
        a: [M, K] or [B, M, K].
        b: [K, N] or [B, K, N], of the dtype of `a`.
        out_dtype: of the result; from 16-bit operands fp32 is given unrounded.
        tf32: for fp32 operands: multiply in tf32.
    """
    if a.dtype is torch.float32:
        return as_dtype(fp32.matmul(a, b, tf32), out_dtype)
    if out_dtype is a.dtype and not _is_emulated(a):
        return a @ b
    if a.is_cuda and out_dtype is torch.float32:
        product = torch.mm if a.dim() == 2 else torch.bmm
        return product(a, b, out_dtype=torch.float32)
    return as_dtype(fp32.matmul(a.float(), b.float(), False), out_dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, tf32: bool = False) -> Tensor:
    """The product x @ weight.T + bias, operands and result of one dtype.

    Args:
        x: [M, K].
        weight: [N, K].
        bias: [N] or None.
        tf32: for fp32 operands: multiply in tf32.
    """
    if x.dtype is torch.float32:
        return fp32.linear(x, weight, bias, tf32)
    if _is_emulated(x):
        wide_bias = None if bias is None else bias.float()
        return fp32.linear(x.float(), weight.float(), wide_bias, False).to(x.dtype)
    return functional.linear(x, weight, bias)


def conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None, window: Window, *, tf32: bool = False
) -> Tensor:
    """Convolution with zeros padded, operands and result of one dtype."""
    if x.dtype is torch.float32:
        return fp32.conv2d(x, weight, bias, window, tf32)
    if _is_emulated(x):
        wide_bias = None if bias is None else bias.float()
        return fp32.conv2d(x.float(), weight.float(), wide_bias, window, False).to(x.dtype)
    return functional.conv2d(x, weight, bias, *window)


def conv2d_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    window: Window,
    needed: tuple[bool, bool],
    *,
    tf32: bool = False,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of a convolution for its input and its weight.

    Args:
        grad: of the output.
        x: input of the forward; only its shape matters where no weight gradient is needed.
        weight: of the forward; likewise for the input gradient.
        window: of the forward.
        needed: which of the two gradients.
        tf32: for fp32 operands: multiply in tf32.

    Returns:
        The two gradients in the dtype of the operands, None for one that is not needed.
    """
    if grad.dtype is torch.float32:
        gradients = fp32.conv2d_backward(grad, x, weight, window, needed, tf32)
    elif _is_emulated(grad):
        wide = (grad.float(), x.float(), weight.float())
        gradients = fp32.conv2d_backward(*wide, window, needed, False)
        gradients = [gradient.to(grad.dtype) for gradient in gradients]
    else:
        gradients = fp32.convolution_backward(grad, x, weight, window, needed)
    return (gradients[0] if needed[0] else None), (gradients[1] if needed[1] else None)


def _is_emulated(x: Tensor) -> bool:
    return x.dtype is torch.float16 and x.device.type == "cpu"
