"""Quantisation kernels give the codes and scales of the plain torch reference, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from qsync_opt.kernels import library, reference
from qsync_opt.kernels.rounding import RandomKey, Rounding

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels")]

Shape = tuple[int, int]

KEY = RandomKey(seed=-3, step=2**40 + 7, tensor=2**33 + 11)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FORMATS = ("int8", "e4m3", "e5m2")
GRANULARITIES = ("tensor", "row", "column")

#: One element, fewer than a vector, odd, one past a tile, many rows, rows past the registers,
#: and many rows that a warp takes alone.
SHAPES = (
    (1, 1),
    (1, 8),
    (3, 5),
    (17, 64),
    (33, 100),
    (129, 127),
    (128, 128),
    (257, 136),
    (130, 3072),
    (1000, 24),
    (5, 40_000),
    (2, 33_001),
    (1025, 1544),
    (1024, 4096),
)
EMPTY = ((0, 8), (8, 0), (0, 0))


def quantize(
    module: Any,
    x: Tensor,
    format: str,
    granularity: str,
    rounding: Rounding = Rounding.NEAREST,
    key: RandomKey = KEY,
) -> tuple[Tensor, Tensor]:
    if format == "int8":
        found: tuple[Tensor, Tensor] = module.quantize_int8(x, granularity, rounding, key)
    else:
        found = module.quantize_fp8(x, format, granularity, rounding, key)
    return found


def bits(q: Tensor) -> Tensor:
    return q.view(torch.uint8)


def assert_equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        assert one.is_contiguous()
        if one.dtype is torch.float32:
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        else:
            assert torch.equal(bits(one), bits(other))


def random_matrix(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.randn(shape[0], 1, generator=generator)
    return x.to(dtype).to(device)


@pytest.mark.parametrize("rounding", list(Rounding))
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("format", FORMATS)
def test_codes_and_scales_are_those_of_the_reference(
    format: str, granularity: str, rounding: Rounding, device: torch.device
) -> None:
    for shape, dtype in itertools.product(SHAPES, DTYPES):
        x = random_matrix(shape, dtype, device)
        found = quantize(library, x, format, granularity, rounding)
        assert_equal(found, quantize(reference, x, format, granularity, rounding))


@pytest.mark.parametrize("rounding", list(Rounding))
@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
def test_both_orders_hold_the_codes_of_the_reference(
    format: str, rounding: Rounding, device: torch.device
) -> None:
    for shape, dtype in itertools.product((*SHAPES, *EMPTY), DTYPES):
        x = random_matrix(shape, dtype, device)
        found = library.quantize_fp8_transposed(x, format, rounding, KEY)
        assert_equal(found, reference.quantize_fp8_transposed(x, format, rounding, KEY))


def test_the_cpu_gives_the_same_codes(device: torch.device) -> None:
    for format, granularity, rounding in itertools.product(FORMATS, GRANULARITIES, Rounding):
        x = random_matrix((65, 200), torch.float32, device)
        found = quantize(library, x, format, granularity, rounding)
        expected = quantize(library, x.cpu(), format, granularity, rounding)
        assert_equal([part.cpu() for part in found], expected)


@pytest.mark.parametrize("value", [0.0, float("inf"), -float("inf"), float("nan"), 1e-38, 1e-44])
@pytest.mark.parametrize("format", FORMATS)
def test_edge_values(format: str, value: float, device: torch.device) -> None:
    for granularity, shape in itertools.product(GRANULARITIES, ((4, 16), (5, 33))):
        x = torch.zeros(shape, device=device)
        x[1] = value
        x[2, 3] = value
        found = quantize(library, x, format, granularity)
        assert_equal(found, quantize(reference, x, format, granularity))


def test_huge_and_tiny_rows_divide_exactly(device: torch.device) -> None:
    exponent = torch.linspace(-148, 127, 276, device=device).view(-1, 1)
    x = torch.randn(276, 512, device=device).clamp(-1, 1) * 2.0**exponent
    for format, rounding in itertools.product(FORMATS, Rounding):
        found = quantize(library, x, format, "row", rounding)
        assert_equal(found, quantize(reference, x, format, "row", rounding))


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_any_strides(granularity: str, device: torch.device) -> None:
    wide = random_matrix((96, 160), torch.bfloat16, device)
    for x in (wide.t(), wide[:, 16:80], wide[:, 3:67], wide[::2], wide[:, ::2], wide[5:6]):
        found = quantize(library, x, "int8", granularity, Rounding.STOCHASTIC)
        assert_equal(found, quantize(reference, x, "int8", granularity, Rounding.STOCHASTIC))


@pytest.mark.parametrize("shape", EMPTY)
def test_empty(shape: Shape, device: torch.device) -> None:
    for format, granularity in itertools.product(FORMATS, GRANULARITIES):
        x = torch.empty(shape, device=device)
        found = quantize(library, x, format, granularity)
        assert_equal(found, quantize(reference, x, format, granularity))


def test_values_come_back(device: torch.device) -> None:
    for shape, format, granularity in itertools.product(SHAPES, FORMATS, GRANULARITIES):
        x = random_matrix(shape, torch.float32, device)
        q, scale = quantize(reference, x, format, granularity)
        for dtype in DTYPES:
            found = library.dequantize(q, scale, dtype)
            assert torch.equal(found, reference.dequantize(q, scale, dtype))
            found = library.dequantize(q.t(), scale.t() if scale.dim() else scale, dtype)
            assert torch.equal(found, reference.dequantize(q, scale, dtype).t())


def test_every_code_of_every_format_comes_back(device: torch.device) -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(2, 128)
    scale = torch.tensor(0.75, device=device)
    for dtype in (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2):
        q = codes.view(dtype)
        found = library.dequantize(q, scale, torch.float32)
        expected = reference.dequantize(q, scale, torch.float32)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_stochastic_rounding_is_unbiased(device: torch.device) -> None:
    x = torch.full((4096, 256), 0.3, device=device)
    x[:, 0] = 1.0
    q, scale = library.quantize_int8(x, "tensor", Rounding.STOCHASTIC, KEY)
    place = 0.3 / scale.item()
    chance = place - int(place)
    error = q[:, 1:].double().mean().item() - place
    deviation = (chance * (1 - chance) / q[:, 1:].numel()) ** 0.5
    assert abs(error) < 5 * deviation
