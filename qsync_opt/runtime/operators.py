"""Operators at a precision, as functions of tensors: what layers and patched calls run."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from qsync_opt.errors import ParameterError
from qsync_opt.kernels import library as kernels
from qsync_opt.kernels.host_library import CompiledLayers, compiled_layers
from qsync_opt.precision import Precision
from qsync_opt.runtime.batched import CodedMatmul
from qsync_opt.runtime.casts import compute_dtype, half_dtype, require_input
from qsync_opt.runtime.convolutions import (
    FloatConv2d,
    Fp8Conv2d,
    Int8Conv2d,
    PointwiseWeight,
    channel_rows,
    laid_out,
)
from qsync_opt.runtime.fp32 import CONVOLUTION, MATMUL, Window, needs_flags
from qsync_opt.runtime.products import INPUT, FloatLinear, Fp8Linear, Int8Linear, rounding_of
from qsync_opt.runtime.session import OperatorSettings

_NO_PADDING = (0, 0)

#: Whether a transform of torch.func runs; torch's own functions ask in this way.
_transforms_are_active: Any = torch._C._are_functorch_transforms_active

#: What torch.jit.trace has so far; None where it does not run.
_tracing_state: Any = torch._C._get_tracing_state

#: How many modes see the operators that are dispatched.
_dispatch_modes: Any = torch._C._len_torch_dispatch_stack


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, settings: OperatorSettings) -> Tensor:
    """X @ weight.T + bias.

    Args:
        x: [..., K], fp32, bf16 or fp16.
        weight: [N, K].
        bias: [N] or None.
        settings: the precision, among others.

    Returns:
        [..., N] in the dtype that the precision hands on.
    """
    require_input(x, settings.name)
    precision = settings.precision
    if precision.output is not precision.storage and x.shape[-1] != weight.shape[1]:
        rule = f"must have {weight.shape[1]} features in its last dimension"
        raise ParameterError(f"input of {settings.name}", rule, tuple(x.shape))
    if precision is Precision.INT8:
        rounding, key = rounding_of(settings.input_draw(), INPUT)
        codes, scale = settings.shared(
            x, "int8 rows", lambda: kernels.quantize_int8(_matrix(x), "row", rounding, key)
        )
        half = half_dtype(x.device)
        return _apply(Int8Linear, x, weight, bias, codes, scale, half, settings.draw())
    if precision is Precision.FP8:
        rounding, key = rounding_of(settings.input_draw(), INPUT)
        parts = settings.shared(
            x,
            "fp8 both orders",
            lambda: kernels.quantize_fp8_transposed(_matrix(x), "e4m3", rounding, key),
        )
        half = half_dtype(x.device)
        return _apply(Fp8Linear, x, weight, bias, *parts, half, settings.draw())
    if _is_plain(x, weight, precision, MATMUL):
        return functional.linear(x, weight, bias)
    cast = _float_cast(x, settings)
    compiled = _compiled_for(x if cast is None else cast, precision, MATMUL)
    if compiled is not None:
        return compiled.linear(x, weight, bias, cast)  # type: ignore[no-any-return]
    return _apply(FloatLinear, x, weight, bias, cast, precision is Precision.TF32)


def conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None, window: Window, settings: OperatorSettings
) -> Tensor:
    """A convolution with zeros padded.

    Args:
        x: [N, C, H, W], fp32, bf16 or fp16.
        weight: [O, C / groups, kh, kw].
        bias: [O] or None.
        window: stride, padding, dilation and groups.
        settings: the precision, among others.

    Returns:
        [N, O, H_out, W_out] in the dtype that the precision hands on.
    """
    require_input(x, settings.name)
    precision = settings.precision
    if precision is Precision.FP8 and _is_pointwise(weight, window):
        rows, columns = window[0]
        picked = x[:, :, ::rows, ::columns].permute(0, 2, 3, 1)
        matrix = _apply(PointwiseWeight, weight)
        out = linear(picked, matrix, bias, settings).permute(0, 3, 1, 2)
        return laid_out(out, x, weight)
    if precision in (Precision.INT8, Precision.FP8):
        rounding, key = rounding_of(settings.input_draw(), INPUT)
        if precision is Precision.INT8:
            parts = settings.shared(
                x,
                "int8 tensor",
                lambda: kernels.quantize_int8(channel_rows(x), "tensor", rounding, key),
            )
            function: type[torch.autograd.Function] = Int8Conv2d
        else:
            parts = settings.shared(
                x,
                "fp8 tensor",
                lambda: kernels.quantize_fp8(channel_rows(x), "e4m3", "tensor", rounding, key),
            )
            function = Fp8Conv2d
        half = half_dtype(x.device)
        return _apply(function, x, weight, bias, *parts, half, window, settings.draw())
    # Where a size is 1, torch's weight gradient has other strides than the weight.
    if 1 not in weight.shape and _is_plain(x, weight, precision, CONVOLUTION):
        return functional.conv2d(x, weight, bias, *window)
    cast = _float_cast(x, settings)
    compiled = _compiled_for(x if cast is None else cast, precision, CONVOLUTION)
    if compiled is not None:
        return compiled.conv2d(x, weight, bias, cast, *window)  # type: ignore[no-any-return]
    return _apply(FloatConv2d, x, weight, bias, cast, window, precision is Precision.TF32)


def matmul(a: Tensor, b: Tensor, settings: OperatorSettings) -> Tensor:
    """A @ b of two activations from 8-bit codes, shapes as in torch.matmul.

    Raises:
        ParameterError: an operand is neither fp32, bf16 nor fp16.
    """
    require_input(a, settings.name)
    require_input(b, settings.name)
    left = a.unsqueeze(0) if a.dim() == 1 else a
    right = b.unsqueeze(1) if b.dim() == 1 else b
    batch = _broadcast(left.shape[:-2], right.shape[:-2])
    count = math.prod(batch)
    left_shape, right_shape = left.shape[-2:], right.shape[-2:]
    out = _apply(
        CodedMatmul,
        left.expand(*batch, *left_shape).reshape(count, *left_shape),
        right.expand(*batch, *right_shape).reshape(count, *right_shape),
        settings.precision is Precision.FP8,
        half_dtype(a.device),
        settings.draw(),
    )
    out = out.view(*batch, left_shape[0], right_shape[1])
    if a.dim() == 1:
        out = out.squeeze(-2)
    return out.squeeze(-1) if b.dim() == 1 else out


def handed_on(out: Tensor, settings: OperatorSettings) -> Tensor:
    """A result in the dtype that the precision hands on: all that a look-up needs."""
    return out.to(compute_dtype(settings.precision, out.device))


def pad_for(
    x: Tensor, padding: str | tuple[int, int], kernel: tuple[int, int], dilation: tuple[int, int]
) -> tuple[Tensor, tuple[int, int]]:
    """The input and the padding that stand for `valid` and `same`; numbers stay.

    `same` pads dilation * (kernel - 1) zeros, an odd one at the end: those are padded here.
    """
    if padding == "valid":
        return x, _NO_PADDING
    if padding != "same":
        return x, padding  # type: ignore[return-value]
    total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    if all(size % 2 == 0 for size in total):
        return x, (total[0] // 2, total[1] // 2)
    sides = [side for size in reversed(total) for side in (size // 2, size - size // 2)]
    return functional.pad(x, sides), _NO_PADDING


def _broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    broadcast: Any = torch.broadcast_shapes
    return tuple(broadcast(*shapes))


def _float_cast(x: Tensor, settings: OperatorSettings) -> Tensor | None:
    dtype = compute_dtype(settings.precision, x.device)
    if x.dtype is dtype:
        return None
    (cast,) = settings.shared(x, str(dtype), lambda: (x.to(dtype),))
    return cast  # type: ignore[no-any-return]


def _compiled_for(operand: Tensor, precision: Precision, product: str) -> CompiledLayers | None:
    """What runs a layer without Python, where that can.

    Whoever looks into functions, to compile, trace, transform or count them, gets those in
    Python. Nothing there sets flags of the process or emulates a precision.
    """
    if (
        torch.compiler.is_compiling()
        or _tracing_state() is not None
        or _transforms_are_active()
        or _dispatch_modes() > 0
    ):
        return None
    on_cpu = operand.device.type == "cpu"
    if operand.dtype is torch.float32:
        if not _flags_are_set(operand, precision, product):
            return None
    elif on_cpu and (operand.dtype is torch.float16 or needs_flags("cpu", False, MATMUL)):
        return None  # fp16 is emulated, and bf16 gradients are summed in fp32
    return compiled_layers()


def _flags_are_set(x: Tensor, precision: Precision, product: str) -> bool:
    """Whether fp32 operands are multiplied at the precision as things stand.

    The flags of the process must then stay as they are until the backward.
    """
    is_tf32 = precision is Precision.TF32
    if is_tf32 and not x.is_cuda:
        return False
    return not needs_flags(x.device.type, is_tf32, product)


def _is_plain(x: Tensor, weight: Tensor, precision: Precision, product: str) -> bool:
    """Whether torch's own function does the same, for a third of the host's time."""
    if precision not in (Precision.FP32, Precision.TF32):
        return False
    if not x.dtype is weight.dtype is torch.float32:  # FSDP can hand over 16-bit weights
        return False
    if not _flags_are_set(x, precision, product):
        return False
    return x.device.type == "meta" or not torch.is_autocast_enabled(x.device.type)


def _matrix(x: Tensor) -> Tensor:
    return x.unsqueeze(0) if x.dim() == 1 else x.flatten(0, -2)


def _is_pointwise(weight: Tensor, window: Window) -> bool:
    return weight.shape[2:] == (1, 1) and window[1] == _NO_PADDING and window[3] == 1


def _apply(function: Any, *arguments: object) -> Tensor:
    out: Tensor = function.apply(*arguments)
    return out
