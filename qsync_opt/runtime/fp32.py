"""Products of float32 operands in true fp32 or in tf32, whatever the process has set.

The two differ by flags of the whole process, which are set for the length of one call and put
back. A compiled graph does not set flags, so under torch.compile the calls are opaque
operators. Where there is no tf32 it is emulated: operands rounded to it, sums in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

#: Stride, padding and dilation as (rows, columns), and the number of groups.
Window = tuple[tuple[int, int], tuple[int, int], tuple[int, int], int]

#: Which flag of the process a product goes by.
MATMUL, CONVOLUTION = "matmul", "convolution"

_T = TypeVar("_T")
_TF32_DROPPED_BITS = 13  # of float32's 23 bits of mantissa; tf32 keeps 10
_IEEE = ("none", "ieee")
_convolution_backward: Any = torch.ops.aten.convolution_backward.default


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in a dtype; itself, without a call of torch, where it has it.

    A call that does nothing is not harmless: torch.compile (seen in 2.11) takes its result for
    another output of an autograd function, and the gradient goes there.
    """
    return x if x.dtype is dtype else x.to(dtype)


def matmul(a: Tensor, b: Tensor, tf32: bool) -> Tensor:
    """The product a @ b."""
    if torch.compiler.is_compiling() and needs_flags(a.device.type, tf32, MATMUL):
        out: Tensor = _opaque_matmul(a, b, tf32)
        return out
    return _matmul(a, b, tf32)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, tf32: bool) -> Tensor:
    """The product x @ weight.T + bias."""
    if torch.compiler.is_compiling() and needs_flags(x.device.type, tf32, MATMUL):
        out: Tensor = _opaque_matmul(x, weight.t(), tf32)
        return out if bias is None else out + bias
    x, weight = _operands(tf32, x, weight)
    run = functional.linear
    return with_flags(x.device.type, tf32, MATMUL, lambda: run(x, weight, bias))


def conv2d(x: Tensor, weight: Tensor, bias: Tensor | None, window: Window, tf32: bool) -> Tensor:
    """Convolution with zeros padded."""
    if torch.compiler.is_compiling() and needs_flags(x.device.type, tf32, CONVOLUTION):
        flat = (*map(list, window[:3]), window[3])
        out: Tensor = _opaque_conv2d(x, weight, bias, *flat, tf32)
        return out
    return _conv2d(x, weight, bias, window, tf32)


def conv2d_backward(
    grad: Tensor, x: Tensor, weight: Tensor, window: Window, needed: tuple[bool, bool], tf32: bool
) -> list[Tensor]:
    """Gradients for input and weight; an empty tensor for one that is not needed."""
    if torch.compiler.is_compiling() and needs_flags(x.device.type, tf32, CONVOLUTION):
        flat = (*map(list, window[:3]), window[3], *needed)
        gradients: list[Tensor] = _opaque_conv2d_backward(grad, x, weight, *flat, tf32)
        return gradients
    return _conv2d_backward(grad, x, weight, window, needed, tf32)


def convolution_backward(
    grad: Tensor, x: Tensor, weight: Tensor, window: Window, needed: tuple[bool, bool]
) -> list[Tensor]:
    """As `conv2d_backward`, for operands of any dtype at the flags of the process."""
    stride, padding, dilation, groups = window
    gradients = _convolution_backward(
        grad,
        x,
        weight,
        None,
        stride,
        padding,
        dilation,
        False,  # not transposed
        [0, 0],
        groups,
        [*needed, False],
    )
    # Operators in compiled graphs return tensors only.
    return [part if part is not None else grad.new_empty(0) for part in gradients[:2]]


def round_to_tf32(x: Tensor) -> Tensor:
    """Float32 values rounded to tf32's 10 bits of mantissa, ties to even."""
    bits = x.view(torch.int32)
    odd = (bits >> _TF32_DROPPED_BITS) & 1
    below_half = (1 << (_TF32_DROPPED_BITS - 1)) - 1
    rounded = (bits + below_half + odd) & -(1 << _TF32_DROPPED_BITS)
    result = torch.where(torch.isfinite(x), rounded.view(torch.float32), x)
    # Where a size is 1, strides that no number depends on still tell the layout.
    return result if result.stride() == x.stride() else torch.empty_like(x).copy_(result)


def needs_flags(device_type: str, tf32: bool, product: str) -> bool:
    """Whether the flags of the process have to change for fp32 or tf32 on a device.

    Args:
        device_type: of the operands.
        tf32: what is wanted.
        product: `MATMUL` or `CONVOLUTION`: which of the flags.
    """
    if device_type not in ("cuda", "cpu"):
        return False
    found = _setting(device_type, product).fp32_precision
    # torch.set_float32_matmul_precision lets oneDNN lower fp32 too; a CPU has no tf32.
    return found not in (("tf32",) if tf32 and device_type == "cuda" else _IEEE)


#: torch.compile takes the answer as it is while it compiles (torch.compiler.
#: assume_constant_result says the same, but loads the compiler).
needs_flags._dynamo_marked_constant = True  # type: ignore[attr-defined]


def set_flags(device_type: str, tf32: bool, product: str) -> Callable[[], None]:
    """Set a flag of the process for fp32 or tf32; calling the result puts it back."""
    setting = _setting(device_type, product)
    before = setting.fp32_precision
    if device_type == "cpu":
        setting.fp32_precision = "ieee"

        def restore() -> None:
            setting.fp32_precision = before

        return restore
    # The older names set the newer ones too; torch refuses to read them where they differ.
    if product == MATMUL:
        setting.allow_tf32 = tf32

        def restore_matmul() -> None:
            setting.allow_tf32 = before == "tf32"

        return restore_matmul
    cudnn: Any = torch.backends.cudnn
    recurrent = cudnn.rnn.fp32_precision
    cudnn.allow_tf32 = tf32

    def restore_cudnn() -> None:
        cudnn.allow_tf32 = before == "tf32"
        cudnn.rnn.fp32_precision = recurrent

    return restore_cudnn


def with_flags(device_type: str, tf32: bool, product: str, run: Callable[[], _T]) -> _T:
    """Call something with the flag set for fp32 or tf32."""
    if not needs_flags(device_type, tf32, product):
        return run()
    restore = set_flags(device_type, tf32, product)
    try:
        return run()
    finally:
        restore()


def _setting(device_type: str, product: str) -> Any:
    """Torch's object with the setting for one kind of product on a device."""
    backends: Any = torch.backends
    if device_type == "cuda":
        return backends.cuda.matmul if product == MATMUL else backends.cudnn.conv
    return backends.mkldnn.matmul if product == MATMUL else backends.mkldnn.conv


def _operands(tf32: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Rounded where tf32 is emulated."""
    if tf32 and not tensors[0].is_cuda:
        return tuple(map(round_to_tf32, tensors))
    return tensors


def _matmul(a: Tensor, b: Tensor, tf32: bool) -> Tensor:
    a, b = _operands(tf32, a, b)
    return with_flags(a.device.type, tf32, MATMUL, lambda: a @ b)


def _conv2d(x: Tensor, weight: Tensor, bias: Tensor | None, window: Window, tf32: bool) -> Tensor:
    x, weight = _operands(tf32, x, weight)
    run = functional.conv2d
    return with_flags(x.device.type, tf32, CONVOLUTION, lambda: run(x, weight, bias, *window))


def _conv2d_backward(
    grad: Tensor, x: Tensor, weight: Tensor, window: Window, needed: tuple[bool, bool], tf32: bool
) -> list[Tensor]:
    grad, x, weight = _operands(tf32, grad, x, weight)
    run = convolution_backward
    return with_flags(
        x.device.type, tf32, CONVOLUTION, lambda: run(grad, x, weight, window, needed)
    )


def _window(stride: list[int], padding: list[int], dilation: list[int], groups: int) -> Window:
    rows = ((sizes[0], sizes[1]) for sizes in (stride, padding, dilation))
    return (*rows, groups)  # type: ignore[return-value]


@torch.library.custom_op("qsync_opt::fp32_matmul", mutates_args=())
def _opaque_matmul(a: Tensor, b: Tensor, tf32: bool) -> Tensor:
    return _matmul(a, b, tf32)


@_opaque_matmul.register_fake
def _(a: Tensor, b: Tensor, tf32: bool) -> Tensor:
    return a @ b


@torch.library.custom_op("qsync_opt::fp32_conv2d", mutates_args=())
def _opaque_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    tf32: bool,
) -> Tensor:
    return _conv2d(x, weight, bias, _window(stride, padding, dilation, groups), tf32)


@_opaque_conv2d.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    tf32: bool,
) -> Tensor:
    return functional.conv2d(x, weight, bias, stride, padding, dilation, groups)


@torch.library.custom_op("qsync_opt::fp32_conv2d_backward", mutates_args=())
def _opaque_conv2d_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    needs_input: bool,
    needs_weight: bool,
    tf32: bool,
) -> list[Tensor]:
    window = _window(stride, padding, dilation, groups)
    return _conv2d_backward(grad, x, weight, window, (needs_input, needs_weight), tf32)


@_opaque_conv2d_backward.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    needs_input: bool,
    needs_weight: bool,
    tf32: bool,
) -> list[Tensor]:
    window = _window(stride, padding, dilation, groups)
    return convolution_backward(grad, x, weight, window, (needs_input, needs_weight))
