"""What the operators demand of their arguments before a kernel reads memory by them.

Called on every launch: the words of a refusal are put together only when there is one.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from qsync_opt.errors import ParameterError

FP8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
INT8 = frozenset({torch.int8})
FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})

Pair = tuple[int, int]


def _refuse(field: str, rule: str, value: object) -> NoReturn:
    raise ParameterError(field, rule, value)


def check_product(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    codes: frozenset[torch.dtype],
    out_dtype: torch.dtype,
) -> None:
    """Refuse operands of a scaled product that do not fit together.

    Raises:
        ParameterError: names the operand and the rule.
    """
    for name, operand in (("a", a), ("b", b)):
        if operand.dim() != 2:
            _refuse(name, "must be a matrix", tuple(operand.shape))
        if operand.dtype not in codes:
            _refuse(name, f"must have dtype {' or '.join(sorted(map(str, codes)))}", operand.dtype)
    if a.shape[1] != b.shape[1]:
        _refuse("b", f"must have {a.shape[1]} columns as a has", tuple(b.shape))
    if a.device != b.device:
        _refuse("b", f"must be on {a.device}", b.device)
    _check_scale("a_scale", a_scale, ((), (a.shape[0], 1)), a.device)
    _check_scale("b_scale", b_scale, ((), (b.shape[0], 1)), a.device)
    _check_rest(bias, b.shape[0], a.device, out_dtype)


def check_convolution(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
    out_dtype: torch.dtype,
) -> None:
    """Refuse operands of a convolution that do not fit together.

    Raises:
        ParameterError: names the operand and the rule.
    """
    for name, operand in (("x", x), ("weight", weight)):
        if operand.dim() != 4:
            _refuse(name, "must have four dimensions", tuple(operand.shape))
        if operand.dtype is not torch.int8:
            _refuse(name, "must be int8", operand.dtype)
    if x.device != weight.device:
        _refuse("weight", f"must be on {x.device}", weight.device)
    if min(stride) < 1:
        _refuse("stride", "must be positive", stride)
    if min(padding) < 0:
        _refuse("padding", "must not be negative", padding)
    if min(dilation) < 1:
        _refuse("dilation", "must be positive", dilation)
    if groups < 1 or weight.shape[0] % groups:
        _refuse("groups", f"must divide the {weight.shape[0]} filters", groups)
    if x.shape[1] != weight.shape[1] * groups:
        rule = f"must have {weight.shape[1] * groups} channels as weight asks for"
        _refuse("x", rule, tuple(x.shape))
    for axis in range(2):
        reach = dilation[axis] * (weight.shape[axis + 2] - 1) + 1
        if x.shape[axis + 2] + 2 * padding[axis] < reach:
            rule = f"must be at least as large as the filter's reach {reach}, with its padding"
            _refuse("x", rule, tuple(x.shape))
    _check_scale("x_scale", x_scale, ((),), x.device)
    _check_scale("weight_scale", weight_scale, ((weight.shape[0],),), x.device)
    _check_rest(bias, weight.shape[0], x.device, out_dtype)


def check_scaled(q: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
    """Refuse codes and a scale that do not fit together.

    Raises:
        ParameterError: names the argument and the rule.
    """
    if q.dtype not in INT8 and q.dtype not in FP8:
        _refuse("q", "must hold 8-bit codes", q.dtype)
    shapes: tuple[tuple[int, ...], ...] = ((),)
    if q.dim() == 2:
        shapes = ((), (q.shape[0], 1), (1, q.shape[1]))
    _check_scale("scale", scale, shapes, q.device)
    if dtype not in FLOATS:
        _refuse("dtype", "must be float32, bfloat16 or float16", dtype)


def check_messages(messages: Tensor, size_bytes: int, table: Tensor | None) -> None:
    """Refuse messages of bucket codes that are too short, or not where their levels are.

    Raises:
        ParameterError: names the argument and the rule.
    """
    if messages.dtype is not torch.uint8 or messages.dim() != 2:
        _refuse("messages", "must be rows of uint8", (tuple(messages.shape), messages.dtype))
    if messages.shape[0] == 0 or messages.shape[1] < size_bytes:
        rule = f"must be at least one row of {size_bytes} bytes or more"
        _refuse("messages", rule, tuple(messages.shape))
    if table is not None and table.device != messages.device:
        _refuse("table", f"must be on {messages.device}", table.device)


def check_room(
    x: Tensor, parts: int, room: int, table: Tensor | None, beside: Tensor | None
) -> None:
    """Refuse a vector that its messages have no room for, or what is to follow them.

    Raises:
        ParameterError: names the argument and the rule.
    """
    if parts < 1:
        _refuse("parts", "must be at least 1", parts)
    if x.numel() > room:
        _refuse("x", f"must have at most {room} values", x.numel())
    if table is not None and table.device != x.device:
        _refuse("table", f"must be on {x.device}", table.device)
    if beside is None:
        return
    fits = beside.dtype is torch.uint8 and beside.dim() == 2 and beside.device == x.device
    if not fits or beside.shape[0] != parts:
        rule = f"must be uint8 [{parts}, any] on {x.device}"
        _refuse("beside", rule, (tuple(beside.shape), beside.dtype, beside.device))


def _check_scale(
    name: str, scale: Tensor, shapes: tuple[tuple[int, ...], ...], device: torch.device
) -> None:
    fits = scale.dtype is torch.float32 and scale.device == device
    if not fits or tuple(scale.shape) not in shapes:
        rule = f"must be float32 of shape {' or '.join(str(list(s)) for s in shapes)} on {device}"
        _refuse(name, rule, (tuple(scale.shape), scale.dtype, scale.device))


def _check_rest(
    bias: Tensor | None, columns: int, device: torch.device, out_dtype: torch.dtype
) -> None:
    if bias is not None and (tuple(bias.shape) != (columns,) or bias.device != device):
        rule = f"must have shape [{columns}] on {device}"
        _refuse("bias", rule, (tuple(bias.shape), bias.device))
    if out_dtype not in FLOATS:
        _refuse("out_dtype", "must be float32, bfloat16 or float16", out_dtype)
