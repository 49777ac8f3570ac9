"""Calls of torch functions at a precision: as a layer where one fits, else on cast operands."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from qsync_opt.errors import PlanError
from qsync_opt.precision import Precision
from qsync_opt.runtime import fp32, operators
from qsync_opt.runtime.arithmetic import without_autocast
from qsync_opt.runtime.casts import cast_floats, compute_dtype, float_tensors, map_floats
from qsync_opt.runtime.session import OperatorSettings

_EIGHT_BITS = (Precision.INT8, Precision.FP8)


def run_call(
    function: Callable[..., Any],
    kind: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    settings: OperatorSettings,
) -> Any:
    """Run a call at the precision of its settings.

    Layers' functions save the fp32 parameter and share casts, so they run what they can: a
    call with a parameter, or with 8-bit codes. Other calls get their operands cast.
    """
    found = _LAYER_CALLS.get(kind)
    if found is not None:
        out = found(settings, *args, **kwargs)
        if out is not None:
            return out
    if settings.precision in _EIGHT_BITS:
        rule = f"must not be {settings.precision} for this call of {kind}"
        raise PlanError(settings.name, rule, settings.precision, "Plan a float precision.")
    return _run_cast(function, kind, args, kwargs, settings)


def _linear(
    settings: OperatorSettings, input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor | None:
    return operators.linear(input, weight, bias, settings)


def _matmul(settings: OperatorSettings, input: Tensor, other: Tensor, **named: Any) -> Any:
    if named:
        return None  # out= and out_dtype=
    if other.dim() == 2 and _is_parameter(other):
        return operators.linear(input, other.t(), None, settings)
    if settings.precision in _EIGHT_BITS:
        return operators.matmul(input, other, settings)
    return None


def _addmm(
    settings: OperatorSettings, input: Tensor, mat1: Tensor, mat2: Tensor, **named: Any
) -> Any:
    if not named and input.dim() == 1 and mat2.dim() == 2 and _is_parameter(mat2):
        return operators.linear(mat1, mat2.t(), input, settings)
    if settings.precision not in _EIGHT_BITS or named.keys() - {"alpha", "beta"}:
        return None
    product = operators.matmul(mat1, mat2, settings)
    added = input.to(product.dtype) * named.get("beta", 1)
    return product * named.get("alpha", 1) + added


def _conv2d(
    settings: OperatorSettings,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    images = input.unsqueeze(0) if input.dim() == 3 else input
    spread = _pair(dilation)
    zeros = padding if isinstance(padding, str) else _pair(padding)
    images, zeros = operators.pad_for(images, zeros, _pair(weight.shape[2:]), spread)
    window = (_pair(stride), zeros, spread, groups)
    out = operators.conv2d(images, weight, bias, window, settings)
    return out.squeeze(0) if input.dim() == 3 else out


def _embedding(settings: OperatorSettings, *args: Any, **named: Any) -> Tensor:
    return operators.handed_on(functional.embedding(*args, **named), settings)


_LAYER_CALLS: dict[str, Callable[..., Any]] = {
    "linear": _linear,
    "matmul": _matmul,
    "mm": _matmul,
    "bmm": _matmul,
    "addmm": _addmm,
    "baddbmm": _addmm,
    "conv2d": _conv2d,
    "embedding": _embedding,
}


def _pair(sizes: Any) -> tuple[int, int]:
    return (sizes, sizes) if isinstance(sizes, int) else (sizes[0], sizes[-1])


def _is_parameter(x: Tensor) -> bool:
    base = x._base if x._is_view() else x
    return base is not None and base.is_leaf and base.requires_grad


def _run_cast(
    function: Callable[..., Any],
    kind: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    settings: OperatorSettings,
) -> Any:
    """Run torch's own function on cast operands; autograd casts the gradients back."""
    device = float_tensors((args, kwargs))[0].device
    is_tf32 = settings.precision is Precision.TF32
    dtype = compute_dtype(settings.precision, device)
    args, kwargs = cast_floats((args, kwargs), dtype)
    if is_tf32 and device.type != "cuda":
        args, kwargs = map_floats((args, kwargs), _round_to_tf32)
    product = fp32.CONVOLUTION if kind.startswith("conv") else fp32.MATMUL
    flags = dtype is torch.float32 and fp32.needs_flags(device.type, is_tf32, product)
    autocast = device.type != "meta" and torch.is_autocast_enabled(device.type)
    with without_autocast(device.type):
        if flags:
            run = partial(function, *args, **kwargs)
            out = fp32.with_flags(device.type, is_tf32, product, run)
        else:
            out = function(*args, **kwargs)
    if (flags or autocast) and not torch.compiler.is_compiling():
        _guard_backward(out, (args, kwargs), partial(fp32.set_flags, device.type, is_tf32, product))
    return out


def _guard_backward(out: Any, inputs: Any, set_flags: Callable[[], Callable[[], None]]) -> None:
    """Let the backward of a call run under the flags of its forward, and without autocast."""
    device_type = float_tensors(out)[0].device.type
    stop = {tensor.grad_fn for tensor in float_tensors(inputs)}
    waiting = [tensor.grad_fn for tensor in float_tensors(out)]
    seen = set(stop)
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        undo: list[Callable[[], None]] = []

        def before(_: Any, undo: list[Callable[[], None]] = undo) -> None:
            undo.append(set_flags())
            if torch.is_autocast_enabled(device_type):
                torch.set_autocast_enabled(device_type, False)
                undo.append(lambda: torch.set_autocast_enabled(device_type, True))

        def after(_: Any, __: Any, undo: list[Callable[[], None]] = undo) -> None:
            while undo:
                undo.pop()()

        node.register_prehook(before)
        node.register_hook(after)
        waiting.extend(following for following, _ in node.next_functions)


def _round_to_tf32(x: Tensor) -> Tensor:
    function: Any = _RoundToTf32
    rounded: Tensor = function.apply(x)
    return rounded


class _RoundToTf32(torch.autograd.Function):
    """Rounds an operand to tf32 where there is no tf32; the gradient passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Rounded values."""
        return fp32.round_to_tf32(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """The gradient as it comes."""
        return grad
