from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from qsync_opt.errors import ParameterError
from qsync_opt.kernels import library, reference
from qsync_opt.kernels.reference import FP8_FORMATS, GRANULARITIES
from qsync_opt.kernels.rounding import RandomKey, Rounding

INF, NAN = math.inf, math.nan


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def codes(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)


def axis_of(granularity: str) -> int | None:
    return {"tensor": None, "row": 1, "column": 0}[granularity]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_int8_is_what_numpy_makes_of_the_definition(granularity: str, dtype: torch.dtype) -> None:
    x = randn(19, 37).to(dtype)
    q, scale = reference.quantize_int8(x, granularity)
    values = x.float().numpy()
    amax = np.abs(values).max(axis_of(granularity), keepdims=granularity != "tensor")
    expected_scale = (amax / np.float32(127)).astype(np.float32)
    np.testing.assert_array_equal(scale.numpy(), expected_scale)
    np.testing.assert_array_equal(q.numpy(), np.rint(values / expected_scale).astype(np.int8))
    assert q.is_contiguous()


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("format", FP8_FORMATS)
def test_fp8_takes_the_nearest_of_all_values(format: str, granularity: str) -> None:
    x = randn(11, 23) * torch.logspace(-6, 2, 23)
    q, scale = reference.quantize_fp8(x, format, granularity)
    dtype = FP8_FORMATS[format][0]
    every = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    every = every[torch.isfinite(every)]
    place = x.double() / scale.double()
    distance = (place.unsqueeze(-1) - every).abs().amin(-1)
    assert torch.allclose((q.double() - place).abs(), distance, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("format", FP8_FORMATS)
def test_fp8_rounds_stochastically_to_a_neighbour_without_bias(format: str) -> None:
    x = randn(1, 64) * torch.logspace(-7, 0, 64)
    dtype, largest, *_ = FP8_FORMATS[format]
    q, scale = reference.quantize_fp8(
        x.expand(3000, -1), format, "tensor", Rounding.STOCHASTIC, RandomKey(step=1)
    )
    found = q.double()
    every = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    every = torch.tensor(sorted(set(every[torch.isfinite(every)].tolist()))).double()
    # The quotient as the definition has it, in float32.
    place = (x / scale).clamp(-largest, largest).double()
    upper = every[torch.searchsorted(every, place).clamp(max=len(every) - 1)]
    lower = every[(torch.searchsorted(every, place, right=True) - 1).clamp(min=0)]
    assert bool(((found == lower) | (found == upper)).all())
    share = torch.where(upper > lower, (place - lower) / (upper - lower), 0.0)
    bound = (upper - lower) * (5 * (share * (1 - share) / len(found)).sqrt() + 2**-20)
    assert bool(((found.mean(0) - place).abs() <= bound).all())


@pytest.mark.parametrize("rounding", Rounding)
def test_edges_of_a_scale(rounding: Rounding) -> None:
    x = torch.tensor(
        [[0.0, -0.0], [1.0, INF], [2.0, -INF], [3.0, NAN], [1e-45, -1e-45], [3.4e38, -3.4e38]]
    )
    for q, scale in (
        reference.quantize_int8(x, "row", rounding, RandomKey()),
        reference.quantize_fp8(x, "e4m3", "row", rounding, RandomKey()),
        reference.quantize_fp8(x, "e5m2", "row", rounding, RandomKey()),
    ):
        values = reference.dequantize(q, scale, torch.float32)
        assert values[0].tolist() == [0, 0]
        assert scale[0].item() == 1
        assert bool(values[1:4].isnan().all()), "an overflow must be seen"
        assert bool((q[1:4].float() == 0).all())
        assert values[4].tolist() == [0, 0], "a tiny row must not divide by zero"
        assert torch.allclose(values[5], x[5])


def test_overflow_stays_in_its_row() -> None:
    x = randn(4, 8)
    x[2, 3] = INF
    q, scale = reference.quantize_int8(x, "row")
    weight, weight_scale = reference.quantize_int8(randn(5, 8, seed=1), "row")
    out = reference.int8_matmul(q, weight, scale, weight_scale, None, torch.bfloat16)
    assert out.isnan().all(1).tolist() == [False, False, True, False]
    assert out.isnan().any(1).tolist() == [False, False, True, False]


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_empty_matrices(granularity: str, shape: tuple[int, int]) -> None:
    expected = {"tensor": (), "row": (shape[0], 1), "column": (1, shape[1])}[granularity]
    x = torch.empty(shape)
    for q, scale in (
        reference.quantize_int8(x, granularity),
        reference.quantize_fp8(x, "e5m2", granularity, Rounding.STOCHASTIC, RandomKey()),
    ):
        assert q.shape == shape
        assert scale.shape == expected
        assert bool((scale == 1).all())


def test_strides_do_not_matter() -> None:
    x = randn(32, 30)[::2, 1::3].t()
    assert not x.is_contiguous()
    key = RandomKey(seed=4)
    for granularity in GRANULARITIES:
        for rounding in Rounding:
            strided = reference.quantize_int8(x, granularity, rounding, key)
            packed = reference.quantize_int8(x.contiguous(), granularity, rounding, key)
            assert all(map(torch.equal, strided, packed))


@pytest.mark.parametrize("rounding", Rounding)
def test_both_orders_hold_the_same_codes(rounding: Rounding) -> None:
    q, turned, scale = reference.quantize_fp8_transposed(randn(7, 9), "e4m3", rounding)
    assert q.is_contiguous()
    assert turned.is_contiguous()
    assert torch.equal(q.float(), turned.float().t())
    assert scale.shape == ()


@pytest.mark.parametrize(
    "shape", [(0, 4, 4), (4, 0, 4), (17, 130, 33), *itertools.product((1, 2, 3, 5, 8), repeat=3)]
)
@pytest.mark.parametrize("scalar", [False, True])
def test_int8_product_is_exact(shape: tuple[int, int, int], scalar: bool) -> None:
    m, k, n = shape
    a, b, bias = codes(m, k), codes(n, k, seed=1), randn(n)
    a_scale = torch.tensor(0.25) if scalar else randn(m, 1, seed=2)
    b_scale = torch.tensor(0.5) if scalar else randn(n, 1, seed=3)
    out = reference.int8_matmul(a, b, a_scale, b_scale, bias, torch.float32)
    whole = a.long() @ b.long().t()
    assert torch.equal(out, whole.float() * a_scale * b_scale.t() + bias)


def test_int8_sums_reach_the_largest_integer() -> None:
    k = reference.INT8_DEPTH
    ones = torch.full((1, k), 127, dtype=torch.int8)
    one = torch.tensor(1.0)
    out = reference.int8_matmul(ones, ones, one, one, None, torch.float32)
    assert out.item() == float(np.float32(127 * 127 * k))
    least = torch.full((1, k), -128, dtype=torch.int8)
    out = reference.int8_matmul(least, least, one, one, None, torch.float32)
    assert out.item() == float(np.float32(128 * 128 * k))


def test_int8_sums_go_on_beyond_the_largest_integer() -> None:
    one = torch.tensor(1.0)
    for k in (reference.INT8_DEPTH + 1, 300_000):
        least = torch.full((2, k), -128, dtype=torch.int8)
        out = library.int8_matmul(least, least, one, one, None, torch.float32)
        assert torch.equal(out, torch.full((2, 2), float(np.float32(128 * 128 * k))))


def test_fp8_product() -> None:
    a, a_scale = reference.quantize_fp8(randn(6, 40), "e5m2", "tensor")
    b, b_scale = reference.quantize_fp8(randn(5, 40, seed=1), "e4m3", "row")
    bias = randn(5)
    out = reference.fp8_matmul(a, b, a_scale, b_scale, bias, torch.float32)
    exact = (a.double() * a_scale) @ (b.double() * b_scale).t() + bias
    assert torch.allclose(out.double(), exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "window",
    [((1, 1), (0, 0), (1, 1), 1), ((2, 1), (1, 2), (1, 1), 2), ((1, 2), (2, 2), (2, 3), 4)],
)
def test_int8_convolution_is_exact(
    window: tuple[tuple[int, int], tuple[int, int], tuple[int, int], int],
) -> None:
    x = codes(2, 8, 11, 9).contiguous(memory_format=torch.channels_last)
    weight = codes(12, 8 // window[3], 3, 3, seed=1)
    x_scale, weight_scale, bias = torch.tensor(0.1), randn(12).abs(), randn(12)
    out = reference.int8_conv2d(x, weight, x_scale, weight_scale, bias, *window, torch.float32)
    whole = functional.conv2d(x.double(), weight.double(), None, *window).float()
    columns = (1, -1, 1, 1)
    assert torch.equal(out, whole * x_scale * weight_scale.view(columns) + bias.view(columns))
    assert out.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: reference.quantize_int8(torch.zeros(2, 2).double(), "row"), "x"),
        (lambda: reference.quantize_int8(torch.zeros(2), "row"), "x"),
        (lambda: reference.quantize_int8(torch.zeros(2, 2), "rows"), "granularity"),
        (lambda: reference.quantize_fp8(torch.zeros(2, 2), "e3m4", "row"), "format"),
    ],
)
def test_bad_arguments_are_named(call: object, field: str) -> None:
    with pytest.raises(ParameterError) as caught:
        call()  # type: ignore[operator]
    assert caught.value.field == field
