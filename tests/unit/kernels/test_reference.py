from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from qsync_opt.errors import ParameterError
from qsync_opt.kernels import reference
from qsync_opt.kernels.reference import FP8_FORMATS, GRANULARITIES, SCHEMES
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


@pytest.mark.parametrize("shape", [(3, 5, 7), (1, 1, 1), (0, 4, 4), (4, 0, 4), (17, 130, 33)])
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
    k = 133_144
    ones = torch.full((1, k), 127, dtype=torch.int8)
    one = torch.tensor(1.0)
    out = reference.int8_matmul(ones, ones, one, one, None, torch.float32)
    assert out.item() == float(np.float32(127 * 127 * k))


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


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("scheme", SCHEMES)
def test_bucket_codes_are_one_little_endian_string_of_bits(scheme: str, bits: int) -> None:
    x, key = randn(77), RandomKey(step=bits)
    packed, meta = reference.bucket_encode(x, bits, 16, scheme, key)
    whole = int.from_bytes(bytes(packed.tolist()), "little")
    found = torch.tensor([(whole >> (bits * i)) & (2**bits - 1) for i in range(77)])
    assert packed.numel() == math.ceil(77 * bits / 8)
    assert whole >> (bits * 77) == 0
    low, step = (meta[:, i].repeat_interleave(16)[:77] for i in range(2))
    ends = [x[i : i + 16] for i in range(0, 77, 16)]
    assert meta[:, 0].tolist() == [part.min().item() for part in ends]
    place = (x - low) / step
    if scheme == "nearest":
        assert torch.equal(found, place.round().long())
    else:
        assert float((found - place).abs().max()) <= 1 + 1e-5
    back = reference.bucket_decode(packed, meta, bits, 16, 77, scheme, key)
    room = {"nearest": 0.5, "stochastic": 1.0, "shift": 0.5}[scheme]
    assert bool(((back - x).abs() <= room * step * (1 + 1e-5) + 1e-6).all())


@pytest.mark.parametrize("scheme", ["stochastic", "shift"])
def test_bucket_codes_are_unbiased(scheme: str) -> None:
    x = randn(64)
    count, key = 2000, RandomKey(step=1)
    many = x.repeat(count)
    packed, meta = reference.bucket_encode(many, 3, 32, scheme, key)
    draws = reference.bucket_decode(packed, meta, 3, 32, len(many), scheme, key).view(count, 64)
    meta = meta[:2]
    step = meta[:, 1].repeat_interleave(32)
    inner = (x > meta[:, 0].repeat_interleave(32)) & (
        x < (meta[:, 0] + 7 * meta[:, 1]).repeat_interleave(32) - 1e-6
    )
    error = (draws.mean(0) - x)[inner] / step[inner]
    # A draw is off by at most one step, with a variance of at most a quarter of its square.
    assert float(error.abs().max()) <= 5 * 0.5 / math.sqrt(count) + 1e-5


def test_a_shift_has_half_the_error_of_a_coin() -> None:
    x = torch.rand(4096, generator=torch.Generator().manual_seed(1))
    mean_square = {}
    for scheme in SCHEMES:
        errors = []
        for number in range(64):
            key = RandomKey(step=number)
            packed, meta = reference.bucket_encode(x, 4, 1024, scheme, key)
            back = reference.bucket_decode(packed, meta, 4, 1024, 4096, scheme, key)
            errors.append(((back - x) / meta[:, 1].repeat_interleave(1024)).square().mean())
        mean_square[scheme] = float(torch.stack(errors).mean())
    # Uniform in a step of width 1: 1/12; a coin with chance p: p (1 - p), on average 1/6.
    assert mean_square["nearest"] == pytest.approx(1 / 12, rel=0.05)
    assert mean_square["shift"] == pytest.approx(1 / 12, rel=0.05)
    assert mean_square["stochastic"] == pytest.approx(1 / 6, rel=0.05)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_edges_of_buckets(scheme: str) -> None:
    constant = torch.full((24,), 3.25)
    packed, meta = reference.bucket_encode(constant, 4, 8, scheme)
    assert torch.equal(reference.bucket_decode(packed, meta, 4, 8, 24, scheme), constant)
    broken = randn(24)
    broken[9] = INF
    packed, meta = reference.bucket_encode(broken, 4, 8, scheme)
    back = reference.bucket_decode(packed, meta, 4, 8, 24, scheme)
    assert back.isfinite().view(3, 8).any(1).tolist() == [True, False, True]
    assert back.isfinite().view(3, 8).all(1).tolist() == [True, False, True]
    packed, meta = reference.bucket_encode(torch.empty(0), 4, 8, scheme)
    assert reference.bucket_decode(packed, meta, 4, 8, 0, scheme).shape == (0,)


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: reference.quantize_int8(torch.zeros(2, 2).double(), "row"), "x"),
        (lambda: reference.quantize_int8(torch.zeros(2), "row"), "x"),
        (lambda: reference.quantize_int8(torch.zeros(2, 2), "rows"), "granularity"),
        (lambda: reference.quantize_fp8(torch.zeros(2, 2), "e3m4", "row"), "format"),
        (lambda: reference.bucket_encode(torch.zeros(8), 9, 8, "shift"), "bits"),
        (lambda: reference.bucket_encode(torch.zeros(8), 8, 12, "shift"), "bucket_size"),
        (lambda: reference.bucket_encode(torch.zeros(8), 8, 8, "coin"), "scheme"),
    ],
)
def test_bad_arguments_are_named(call: object, field: str) -> None:
    with pytest.raises(ParameterError) as caught:
        call()  # type: ignore[operator]
    assert caught.value.field == field
