"""Made-up tensors with the shape, strides, dtype and kind of content that a signature says."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qsync_opt.graph import Operand, Origin
from qsync_opt.precision import Precision

DTYPES = {
    Precision.FP32: torch.float32,
    Precision.BF16: torch.bfloat16,
    Precision.FP16: torch.float16,
}

_PARAMETER_SCALE = 0.02


def make_operand(operand: Operand, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor that a call can be run with; a leaf without gradient.

    Activations are normal; a buffer is positive, because it may be a variance; indices are
    spread over the range that was seen, unless a marker such as -100 was among them.
    """
    size = storage_size(operand.shape, operand.stride)
    if operand.dtype == "bool":
        content = torch.ones(size, dtype=torch.bool, device=device)
    elif dtype.is_floating_point:
        if operand.origin is Origin.BUFFER:
            content = torch.rand(size, device=device) + 0.5
        else:
            content = torch.randn(size, device=device)
            if operand.origin is Origin.PARAMETER:
                content *= _PARAMETER_SCALE
        content = content.to(dtype)
    elif dtype.is_complex:
        content = torch.randn(size, dtype=dtype, device=device)
    else:
        low, high = operand.bounds or (0, 0)
        if low >= 0:
            content = torch.randint(low, high + 1, (size,), device=device).to(dtype)
        else:
            ends = torch.tensor([low, high], dtype=dtype, device=device)
            content = ends[torch.randint(0, 2, (size,), device=device)]
    return content.as_strided(operand.shape, operand.stride)


def storage_size(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last that a tensor reaches."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def gradient_like(out: Tensor, reader: Operand | None) -> Tensor:
    """A gradient for an output, laid out as its reader's backward gives it.

    A reader of a permuted view hands back a gradient that is contiguous in the order in which
    it saw the dimensions.

    Args:
        out: the output.
        reader: how the last reader reads it; None where nobody does.
    """
    plain = torch.randn(out.shape, dtype=torch.float32, device=out.device).to(out.dtype)
    plain = torch.empty_like(out).copy_(plain)
    if reader is None or not out.is_contiguous():
        return plain
    order = sorted(range(len(reader.shape)), key=lambda i: -reader.stride[i])
    if order == list(range(len(order))) or _size(reader.shape) != out.numel():
        return plain
    seen = torch.empty(reader.shape, dtype=out.dtype, device=out.device).copy_(
        plain.flatten()[: out.numel()].view(reader.shape)
    )
    try:
        return seen.permute(order).view(out.shape)
    except RuntimeError:  # the view in between copies, and is an operator of its own
        return plain


def _size(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
