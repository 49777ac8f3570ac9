"""From tensors to launches: shapes, strides and padding that the compiled kernels ask for.

Every function takes CUDA tensors and means what its namesake in `reference` means.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor
from torch.nn import functional

from qsync_opt.kernels import reference
from qsync_opt.kernels.native import ELEMENTS, Native
from qsync_opt.kernels.rounding import RandomKey, Rounding, philox_key

_GRANULARITIES = {name: place for place, name in enumerate(reference.GRANULARITIES)}
_MASK_64 = 0xFFFFFFFFFFFFFFFF

#: Bytes that a row of an operand must be a multiple of for the copy engine.
ROW_BYTES = 16


def random_words(key: RandomKey, rounding: Rounding = Rounding.STOCHASTIC) -> tuple[int, int]:
    """The words of a key as launchers take them: of Philox, and of the tensor."""
    if rounding is Rounding.NEAREST:
        return 0, 0
    low, high = philox_key(key)
    return low | high << 32, key.tensor & _MASK_64


def quantize(
    native: Native,
    x: Tensor,
    dtype: torch.dtype,
    granularity: str,
    rounding: Rounding,
    key: RandomKey,
) -> tuple[Tensor, Tensor]:
    """Codes of any 8-bit dtype of a matrix that is not empty."""
    rows, columns = x.shape
    if granularity != "row" or x.stride(1) != 1 or x.stride(0) < columns:
        x = x.contiguous()
    shape = {"tensor": (), "row": (rows, 1), "column": (1, columns)}[granularity]
    scale = torch.empty(shape, dtype=torch.float32, device=x.device)
    q = torch.empty((rows, columns), dtype=dtype, device=x.device)
    # The maxima are unsigned words that the kernel clears itself.
    amax = None if granularity == "row" else torch.empty_like(scale, dtype=torch.int32)
    code = () if dtype is torch.int8 else (ELEMENTS[dtype],)
    native.launch(
        "quantize_int8" if dtype is torch.int8 else "quantize_fp8",
        x.device,
        x,
        ELEMENTS[x.dtype],
        q,
        *code,
        scale,
        amax,
        rows,
        columns,
        columns if rows == 1 else x.stride(0),
        _GRANULARITIES[granularity],
        rounding,
        *random_words(key, rounding),
    )
    return q, scale


def quantize_transposed(
    native: Native, x: Tensor, dtype: torch.dtype, rounding: Rounding, key: RandomKey
) -> tuple[Tensor, Tensor, Tensor]:
    """Fp8 codes of a matrix that is not empty, in both orders."""
    x = x.contiguous()
    rows, columns = x.shape
    q = torch.empty((rows, columns), dtype=dtype, device=x.device)
    transposed = torch.empty((columns, rows), dtype=dtype, device=x.device)
    scale = torch.empty((), dtype=torch.float32, device=x.device)
    amax = torch.empty_like(scale, dtype=torch.int32)
    native.launch(
        "quantize_fp8_transposed",
        x.device,
        x,
        ELEMENTS[x.dtype],
        q,
        transposed,
        ELEMENTS[dtype],
        scale,
        amax,
        rows,
        columns,
        rounding,
        *random_words(key, rounding),
    )
    return q, transposed, scale


def dequantize(native: Native, q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Values of a scaled matrix; the scale is [], [M, 1] or [1, K]."""
    q, scale = q.contiguous(), scale.contiguous()
    rows, columns = q.shape
    out = torch.empty((rows, columns), dtype=dtype, device=q.device)
    by_row = scale.numel() > 1 and scale.shape[0] > 1
    by_column = scale.numel() > 1 and not by_row
    native.launch(
        "dequantize",
        q.device,
        q,
        ELEMENTS[q.dtype],
        scale,
        out,
        ELEMENTS[dtype],
        rows,
        columns,
        by_row,
        by_column,
    )
    return out


def _bias(bias: Tensor | None) -> tuple[Tensor | None, int]:
    if bias is None:
        return None, 0
    if bias.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        bias = bias.to(torch.float32)
    return bias.contiguous(), ELEMENTS[bias.dtype]


def _copyable(matrix: Tensor, depth: int) -> Tensor:
    """The matrix with rows of `depth` bytes at addresses that the copy engine can read."""
    missing = depth - matrix.shape[1]
    if missing:
        return functional.pad(matrix, (0, missing))
    matrix = matrix.contiguous()
    return matrix if matrix.data_ptr() % ROW_BYTES == 0 else matrix.clone()


def int8_product(
    native: Native,
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    tile: tuple[int, int] | None = None,
) -> Tensor:
    """The int8 product of operands that are not empty.

    `tile` holds columns (128, 256) and cluster (1, 2) of the Hopper kernel; None takes the
    kernel that runs on every device.
    """
    if tile is None:
        a, b = a.contiguous(), b.contiguous()
    else:
        depth = -(-a.shape[1] // ROW_BYTES) * ROW_BYTES
        a, b = _copyable(a, depth), _copyable(b, depth)
    a_scale, b_scale = a_scale.contiguous(), b_scale.contiguous()
    values, element = _bias(bias)
    (rows, depth), columns = a.shape, b.shape[0]
    out = torch.empty((rows, columns), dtype=out_dtype, device=a.device)
    native.launch(
        "int8_product" if tile is None else "int8_product_sm90",
        a.device,
        a,
        b,
        a_scale,
        b_scale,
        values,
        element,
        out,
        ELEMENTS[out_dtype],
        rows,
        columns,
        depth,
        a_scale.numel() > 1,
        b_scale.numel() > 1,
        *(tile or ()),
    )
    return out


def int_mm_product(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """The int8 product by the library: padded to what it takes, scales in passes of their own."""
    rows, columns = a.shape[0], b.shape[0]
    depth = -a.shape[1] % 8
    a = functional.pad(a, (0, depth, 0, max(17 - rows, 0)))
    b = functional.pad(b, (0, depth, 0, -columns % 8))
    product = torch._int_mm(a, b.t())[:rows, :columns]
    out = product.to(torch.float32) * a_scale * b_scale.t()
    if bias is not None:
        out = out + bias.to(torch.float32)
    return out.to(out_dtype)


def int8_convolution(
    native: Native,
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    window: tuple[int, ...],
    out_size: tuple[int, int],
    out_dtype: torch.dtype,
    columns: int,
) -> Tensor:
    """The Hopper convolution of one group, by tiles of 128 x `columns` (128 or 256).

    `window` holds filter height and width, then strides, paddings and dilations, rows first;
    `out_size` height and width of the output.
    """
    missing = -x.shape[1] % ROW_BYTES
    if missing:
        x = functional.pad(x, (0, 0, 0, 0, 0, missing))
        weight = functional.pad(weight, (0, 0, 0, 0, 0, missing))
    x = x.contiguous(memory_format=torch.channels_last)
    weight = weight.contiguous(memory_format=torch.channels_last)
    images, channels, height, width = x.shape
    values, element = _bias(bias)
    out = torch.empty(
        (images, weight.shape[0], *out_size),
        dtype=out_dtype,
        device=x.device,
        memory_format=torch.channels_last,
    )
    numbers = (ctypes.c_int * 12)(images, channels, height, width, *window)
    native.launch(
        "int8_conv_sm90",
        x.device,
        x,
        weight,
        x_scale,
        weight_scale.contiguous(),
        values,
        element,
        out,
        ELEMENTS[out_dtype],
        weight.shape[0],
        numbers,
        columns,
    )
    return out
