"""The functions of `reference` as torch operators in the namespace `qsync_opt`.

On a CUDA device the compiled kernels run, elsewhere the plain torch reference; fake versions
give shapes and dtypes to torch.compile. None is differentiable by itself: the layers of the
runtime say what the gradients are. The public functions have the signatures and meanings of
their namesakes in `reference`, and call the operators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from qsync_opt.kernels import launch, products, reference
from qsync_opt.kernels.checks import (
    FP8,
    INT8,
    check_convolution,
    check_product,
    check_scaled,
)
from qsync_opt.kernels.native import ELEMENTS, Native, capability_of, native
from qsync_opt.kernels.rounding import RandomKey, Rounding

NAMESPACE = "qsync_opt"

#: An operator's real and fake version.
Versions = tuple[Callable[..., Any], Callable[..., Any]]

_NO_KEY = RandomKey()
_RANDOM = "int rounding, int seed, int step, int tensor"
_PRODUCT = (
    "(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, Tensor? bias, ScalarType out_dtype)"
)

#: Operator -> schema, without its name.
SCHEMAS = {
    "quantize_int8": f"(Tensor x, str granularity, {_RANDOM}) -> (Tensor, Tensor)",
    "quantize_fp8": f"(Tensor x, str format, str granularity, {_RANDOM}) -> (Tensor, Tensor)",
    "quantize_fp8_transposed": f"(Tensor x, str format, {_RANDOM}) -> (Tensor, Tensor, Tensor)",
    "dequantize": "(Tensor q, Tensor scale, ScalarType dtype) -> Tensor",
    "int8_matmul": f"{_PRODUCT} -> Tensor",
    "fp8_matmul": f"{_PRODUCT} -> Tensor",
    "int8_conv2d": (
        "(Tensor x, Tensor weight, Tensor x_scale, Tensor weight_scale, Tensor? bias,"
        " int[2] stride, int[2] padding, int[2] dilation, int groups, ScalarType out_dtype)"
        " -> Tensor"
    ),
}


def define_operators(schemas: Mapping[str, str], versions: Mapping[str, Versions]) -> None:
    """Make torch operators of functions: schemas by name, and the real and the fake versions."""
    for name, (real, fake) in versions.items():
        torch.library.define(f"{NAMESPACE}::{name}", schemas[name])
        torch.library.impl(f"{NAMESPACE}::{name}", "CompositeExplicitAutograd", real)
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake)


def kernels_for(x: Tensor) -> Native | None:
    """The compiled kernels for the device of a tensor; None: the reference runs."""
    return native(x.device.index) if x.is_cuda else None


def _fp8_native(x: Tensor) -> Native | None:
    """The kernels, where the device rounds to fp8 in hardware."""
    if not x.is_cuda or capability_of(x.device.index) < products.FP8_CAPABILITY:
        return None
    return kernels_for(x)


def _takes(x: Tensor, dimensions: int) -> bool:
    """Whether the kernels read x; else the reference does, or says what is wrong with it."""
    return x.dim() == dimensions and x.numel() > 0 and ELEMENTS.get(x.dtype, 9) < 3


# --- the operators ---------------------------------------------------------------------------


def _quantize_int8(
    x: Tensor, granularity: str, rounding: int, seed: int, step: int, tensor: int
) -> tuple[Tensor, Tensor]:
    mode, key = Rounding(rounding), RandomKey(seed=seed, step=step, tensor=tensor)
    kernels = kernels_for(x)
    if kernels is None or not _takes(x, 2) or granularity not in reference.GRANULARITIES:
        return reference.quantize_int8(x, granularity, mode, key)
    return launch.quantize(kernels, x, torch.int8, granularity, mode, key)


def _quantize_fp8(
    x: Tensor, format: str, granularity: str, rounding: int, seed: int, step: int, tensor: int
) -> tuple[Tensor, Tensor]:
    mode, key = Rounding(rounding), RandomKey(seed=seed, step=step, tensor=tensor)
    kernels = _fp8_native(x)
    known = granularity in reference.GRANULARITIES and format in reference.FP8_FORMATS
    if kernels is None or not _takes(x, 2) or not known:
        return reference.quantize_fp8(x, format, granularity, mode, key)
    dtype = reference.FP8_FORMATS[format][0]
    return launch.quantize(kernels, x, dtype, granularity, mode, key)


def _quantize_fp8_transposed(
    x: Tensor, format: str, rounding: int, seed: int, step: int, tensor: int
) -> tuple[Tensor, Tensor, Tensor]:
    mode, key = Rounding(rounding), RandomKey(seed=seed, step=step, tensor=tensor)
    kernels = _fp8_native(x)
    if kernels is None or not _takes(x, 2) or format not in reference.FP8_FORMATS:
        return reference.quantize_fp8_transposed(x, format, mode, key)
    dtype = reference.FP8_FORMATS[format][0]
    return launch.quantize_transposed(kernels, x, dtype, mode, key)


def _dequantize(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    check_scaled(q, scale, dtype)
    kernels = kernels_for(q)
    if kernels is None or q.numel() == 0:
        return reference.dequantize(q, scale, dtype)
    if q.dim() == 2:
        return launch.dequantize(kernels, q, scale, dtype)
    return launch.dequantize(kernels, q.reshape(1, -1), scale, dtype).view(q.shape)


def _int8_matmul(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    check_product(a, b, a_scale, b_scale, bias, INT8, out_dtype)
    if not a.is_cuda:
        return reference.int8_matmul(a, b, a_scale, b_scale, bias, out_dtype)
    return products.int8_matmul(kernels_for(a), a, b, a_scale, b_scale, bias, out_dtype)


def _fp8_matmul(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    check_product(a, b, a_scale, b_scale, bias, FP8, out_dtype)
    function = products.fp8_matmul if a.is_cuda else reference.fp8_matmul
    return function(a, b, a_scale, b_scale, bias, out_dtype)


def _int8_conv2d(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    out_dtype: torch.dtype,
) -> Tensor:
    window = ((stride[0], stride[1]), (padding[0], padding[1]), (dilation[0], dilation[1]))
    arguments = (x, weight, x_scale, weight_scale, bias, *window, groups, out_dtype)
    check_convolution(*arguments)
    if not x.is_cuda:
        return reference.int8_conv2d(*arguments)
    return products.int8_conv2d(kernels_for(x), *arguments)


# --- their fake versions ---------------------------------------------------------------------


def _scale_shape(x: Tensor, granularity: str) -> tuple[int, ...]:
    shapes = {"tensor": (), "row": (x.shape[0], 1), "column": (1, x.shape[1])}
    return shapes[granularity]


def _fake_codes(x: Tensor, dtype: torch.dtype, granularity: str) -> tuple[Tensor, Tensor]:
    scale = x.new_empty(_scale_shape(x, granularity), dtype=torch.float32)
    return x.new_empty(x.shape, dtype=dtype), scale


def _fake_quantize_int8(x: Tensor, granularity: str, *_random: int) -> tuple[Tensor, Tensor]:
    return _fake_codes(x, torch.int8, granularity)


def _fake_quantize_fp8(
    x: Tensor, format: str, granularity: str, *_random: int
) -> tuple[Tensor, Tensor]:
    return _fake_codes(x, reference.FP8_FORMATS[format][0], granularity)


def _fake_quantize_fp8_transposed(
    x: Tensor, format: str, *_random: int
) -> tuple[Tensor, Tensor, Tensor]:
    q, scale = _fake_codes(x, reference.FP8_FORMATS[format][0], "tensor")
    return q, q.new_empty((x.shape[1], x.shape[0])), scale


def _fake_dequantize(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return q.new_empty(q.shape, dtype=dtype)


def _fake_product(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


def _fake_int8_conv2d(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    out_dtype: torch.dtype,
) -> Tensor:
    size = products.out_size(x, weight, stride, padding, dilation)
    shape = (x.shape[0], weight.shape[0], *size)
    return x.new_empty(shape, dtype=out_dtype).to(memory_format=torch.channels_last)


_VERSIONS: dict[str, Versions] = {
    "quantize_int8": (_quantize_int8, _fake_quantize_int8),
    "quantize_fp8": (_quantize_fp8, _fake_quantize_fp8),
    "quantize_fp8_transposed": (_quantize_fp8_transposed, _fake_quantize_fp8_transposed),
    "dequantize": (_dequantize, _fake_dequantize),
    "int8_matmul": (_int8_matmul, _fake_product),
    "fp8_matmul": (_fp8_matmul, _fake_product),
    "int8_conv2d": (_int8_conv2d, _fake_int8_conv2d),
}

define_operators(SCHEMAS, _VERSIONS)

_operators = torch.ops.qsync_opt


# --- the public functions --------------------------------------------------------------------


def quantize_int8(
    x: Tensor,
    granularity: str,
    rounding: Rounding = Rounding.NEAREST,
    key: RandomKey = _NO_KEY,
) -> tuple[Tensor, Tensor]:
    """Codes and scale of a matrix; see `reference.quantize_int8`."""
    found: tuple[Tensor, Tensor] = _operators.quantize_int8(
        x, granularity, rounding, key.seed, key.step, key.tensor
    )
    return found


def quantize_fp8(
    x: Tensor,
    format: str,
    granularity: str,
    rounding: Rounding = Rounding.NEAREST,
    key: RandomKey = _NO_KEY,
) -> tuple[Tensor, Tensor]:
    """Codes and scale of a matrix; see `reference.quantize_fp8`."""
    words = (rounding, key.seed, key.step, key.tensor)
    found: tuple[Tensor, Tensor] = _operators.quantize_fp8(x, format, granularity, *words)
    return found


def quantize_fp8_transposed(
    x: Tensor, format: str, rounding: Rounding = Rounding.NEAREST, key: RandomKey = _NO_KEY
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes in both orders and their scale; see `reference.quantize_fp8_transposed`."""
    words = (rounding, key.seed, key.step, key.tensor)
    found: tuple[Tensor, Tensor, Tensor] = _operators.quantize_fp8_transposed(x, format, *words)
    return found


def dequantize(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of a scaled tensor; see `reference.dequantize`."""
    found: Tensor = _operators.dequantize(q, scale, dtype)
    return found


def int8_matmul(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """A scaled product of int8 codes; see `reference.int8_matmul`."""
    found: Tensor = _operators.int8_matmul(a, b, a_scale, b_scale, bias, out_dtype)
    return found


def fp8_matmul(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """A scaled product of fp8 codes; see `reference.fp8_matmul`."""
    found: Tensor = _operators.fp8_matmul(a, b, a_scale, b_scale, bias, out_dtype)
    return found


def int8_conv2d(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    groups: int,
    out_dtype: torch.dtype,
) -> Tensor:
    """A scaled convolution of int8 codes; see `reference.int8_conv2d`."""
    window = (stride, padding, dilation, groups)
    found: Tensor = _operators.int8_conv2d(
        x, weight, x_scale, weight_scale, bias, *window, out_dtype
    )
    return found
