"""The power of rounding noise against Monte Carlo, and against what is known of the formats."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from qsync_opt.kernels import reference
from qsync_opt.kernels.rounding import RandomKey, Rounding
from qsync_opt.measure.rounding_noise import (
    Form,
    Layout,
    Part,
    gradient_noise,
    value_noise,
)
from qsync_opt.precision import Precision
from qsync_opt.runtime.fp32 import round_to_tf32

LINEAR = Layout(form=Form.LINEAR, parts={0: Part.INPUT, 1: Part.WEIGHT, 2: Part.BIAS})
CONV = Layout(form=Form.CONV2D, parts={0: Part.INPUT, 1: Part.WEIGHT})
LOWER = [p for p in Precision if p is not Precision.FP32]


def random_tensor(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def noise(
    x: Tensor,
    precision: Precision,
    *,
    layout: Layout = LINEAR,
    part: Part = Part.INPUT,
    rounding: Rounding = Rounding.NEAREST,
) -> float:
    return value_noise(layout, part, precision, x, torch.ones_like(x), rounding)


def test_nearest_is_the_squared_error_of_the_cast() -> None:
    x = random_tensor(64, 32)
    for precision, rounded in (
        (Precision.BF16, x.bfloat16().float()),
        (Precision.FP16, x.half().float()),
        (Precision.TF32, round_to_tf32(x)),
    ):
        expected = float((rounded - x).double().square().sum())
        assert noise(x, precision) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("precision", [Precision.INT8, Precision.FP8])
@pytest.mark.parametrize("part", [Part.INPUT, Part.WEIGHT])
def test_stochastic_variance_is_that_of_the_draws(precision: Precision, part: Part) -> None:
    x = random_tensor(16, 24, seed=1)
    weight = random_tensor(16, 24, seed=2).square()
    total = torch.zeros((), dtype=torch.float64)
    draws = 150
    for step in range(draws):
        key = RandomKey(seed=3, step=step, tensor=int(part is Part.WEIGHT))
        if precision is Precision.INT8:
            codes, scale = reference.quantize_int8(x, "row", Rounding.STOCHASTIC, key)
        else:
            codes, scale = reference.quantize_fp8(x, "e4m3", "tensor", Rounding.STOCHASTIC, key)
        error = reference.dequantize(codes, scale, torch.float32) - x
        total += (error.square() * weight).sum(dtype=torch.float64)
    predicted = value_noise(LINEAR, part, precision, x, weight, Rounding.STOCHASTIC)
    assert float(total) / draws == pytest.approx(predicted, rel=0.04)


def test_stochastic_gradients_of_fp8_are_e5m2() -> None:
    x = random_tensor(8, 40, seed=4)
    errors = []
    for step in range(150):
        codes, scale = reference.quantize_fp8(
            x, "e5m2", "tensor", Rounding.STOCHASTIC, RandomKey(step=step)
        )
        errors.append((reference.dequantize(codes, scale, torch.float32) - x).square().sum())
    predicted = gradient_noise(
        LINEAR,
        Part.OUTPUT,
        Precision.FP8,
        x,
        torch.ones_like(x),
        rounding=Rounding.STOCHASTIC,
    )
    assert float(torch.stack(errors).mean()) == pytest.approx(predicted, rel=0.04)


def test_stochastic_rounding_doubles_the_power_of_nearest_rounding() -> None:
    # Uniform numbers between codes: 1/12 of a squared step to the nearest, 1/6 on average else.
    x = torch.rand(200, 500, generator=torch.Generator().manual_seed(5))
    nearest = noise(x, Precision.INT8)
    stochastic = noise(x, Precision.INT8, rounding=Rounding.STOCHASTIC)
    assert stochastic / nearest == pytest.approx(2.0, rel=0.02)
    steps = (x.amax(1, keepdim=True) / 127).square().sum() * x.shape[1]
    assert nearest == pytest.approx(float(steps) / 12, rel=0.02)


@pytest.mark.parametrize(
    ("finer", "coarser", "bits"),
    [(Precision.FP16, Precision.BF16, 3), (Precision.TF32, Precision.BF16, 3)],
)
def test_a_bit_less_of_mantissa_quadruples_the_power(
    finer: Precision, coarser: Precision, bits: int
) -> None:
    x = random_tensor(400, 500, seed=6)
    assert noise(x, coarser) / noise(x, finer) == pytest.approx(4.0**bits, rel=0.03)


@pytest.mark.parametrize("precision", LOWER)
@pytest.mark.parametrize("part", list(Part))
@pytest.mark.parametrize("layout", [LINEAR, CONV])
def test_zeros_have_no_noise(precision: Precision, part: Part, layout: Layout) -> None:
    x = torch.zeros(4, 3, 2, 2) if layout is CONV and part is not Part.BIAS else torch.zeros(4, 3)
    ones = torch.ones_like(x)
    assert value_noise(layout, part, precision, x, ones) == 0.0
    assert gradient_noise(layout, part, precision, x, ones) == 0.0


def test_fp32_has_no_noise() -> None:
    x = random_tensor(4, 4)
    assert noise(x, Precision.FP32) == 0.0
    assert gradient_noise(LINEAR, Part.OUTPUT, Precision.FP32, x, torch.ones_like(x)) == 0.0


def test_an_outlier_costs_its_own_row_alone_in_int8() -> None:
    x = random_tensor(4, 64, seed=7)
    calm = noise(x[1:], Precision.INT8)
    x[0, 0] = 1e4
    row = x[0, 1:]
    # The other elements of the row fall below half a step and vanish.
    assert noise(x, Precision.INT8) == pytest.approx(float(row.square().sum()) + calm, rel=1e-4)
    whole = noise(x.view(4, 4, 4, 4), Precision.INT8, layout=CONV)
    assert whole == pytest.approx(float(x.flatten()[1:].square().sum()), rel=1e-4)


def test_an_overflow_is_infinite_where_something_depends_on_it() -> None:
    x = torch.tensor([[1.0, 1e6]])
    assert noise(x, Precision.FP16) == math.inf
    ignoring = torch.tensor([[1.0, 0.0]])
    assert value_noise(LINEAR, Part.INPUT, Precision.FP16, x, ignoring) == 0.0
    assert noise(x, Precision.BF16) < math.inf


def test_a_loss_scale_keeps_small_gradients_alive_in_fp16() -> None:
    x = random_tensor(32, 32, seed=8) * 1e-8
    ones = torch.ones_like(x)
    lost = gradient_noise(LINEAR, Part.OUTPUT, Precision.FP16, x, ones)
    kept = gradient_noise(LINEAR, Part.OUTPUT, Precision.FP16, x, ones, loss_scale=2.0**16)
    assert lost > 0.05 * float(x.square().sum())
    assert kept < 1e-3 * float(x.square().sum())


def test_noise_grows_with_the_square_of_the_tensor() -> None:
    x = random_tensor(16, 16, seed=9)
    for precision in LOWER:
        assert noise(x * 4, precision) == pytest.approx(16 * noise(x, precision), rel=1e-5)
