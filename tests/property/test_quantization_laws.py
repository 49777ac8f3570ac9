"""Laws of the reference kernels, on matrices that hypothesis makes up."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qsync_opt.kernels import bucket_reference, reference
from qsync_opt.kernels.bucket_reference import SCHEMES
from qsync_opt.kernels.reference import FP8_FORMATS, GRANULARITIES
from qsync_opt.kernels.rounding import RandomKey, Rounding

FLOATS = st.floats(min_value=-1e6, max_value=1e6, width=32)
KEYS = st.builds(
    RandomKey,
    seed=st.integers(-(2**63), 2**63 - 1),
    step=st.integers(0, 2**40),
    tensor=st.integers(-(2**63), 2**63 - 1),
)


@st.composite
def matrices(draw: st.DrawFn, least: int = 0) -> Tensor:
    rows, columns = draw(st.integers(least, 6)), draw(st.integers(least, 6))
    size = rows * columns
    values = draw(st.lists(FLOATS, min_size=size, max_size=size))
    return torch.tensor(values, dtype=torch.float32).view(rows, columns)


@given(matrices(), st.sampled_from(GRANULARITIES), st.sampled_from(list(Rounding)), KEYS)
def test_int8_is_off_by_less_than_a_step(
    x: Tensor, granularity: str, rounding: Rounding, key: RandomKey
) -> None:
    q, scale = reference.quantize_int8(x, granularity, rounding, key)
    error = (q.double() * scale.double() - x.double()).abs()
    room = 0.5 if rounding is Rounding.NEAREST else 1.0
    assert bool((error <= scale.double() * (room + 1e-4)).all())
    assert bool((q.abs() <= 127).all())


@given(matrices(), st.sampled_from(list(FP8_FORMATS)), st.sampled_from(list(Rounding)), KEYS)
def test_fp8_is_off_by_less_than_a_step(
    x: Tensor, format: str, rounding: Rounding, key: RandomKey
) -> None:
    q, scale = reference.quantize_fp8(x, format, "row", rounding, key)
    _, _, mantissa, least = FP8_FORMATS[format]
    place = (x.double() / scale.double()).abs()
    step = torch.exp2(place.clamp_min(2.0**least).log2().floor() - mantissa)
    room = 0.5 if rounding is Rounding.NEAREST else 1.0
    error = (q.double().abs() - place).abs()
    assert bool((error <= step * (room + 1e-4)).all())


@given(matrices(), st.sampled_from(GRANULARITIES))
def test_quantising_again_changes_nothing(x: Tensor, granularity: str) -> None:
    q, scale = reference.quantize_int8(x, granularity)
    back = reference.dequantize(q, scale, torch.float32)
    again, scale_again = reference.quantize_int8(back, granularity)
    once_more = reference.dequantize(again, scale_again, torch.float32)
    assert torch.allclose(once_more, back, rtol=1e-5, atol=0)


@given(matrices(), st.sampled_from(GRANULARITIES), st.integers(-10, 10))
def test_a_power_of_two_moves_to_the_scale(x: Tensor, granularity: str, power: int) -> None:
    # Not where the scale meets the smallest float.
    x = torch.where(x.abs() < 1e-20, 0.0, x)
    q, scale = reference.quantize_int8(x, granularity)
    moved, moved_scale = reference.quantize_int8(x * 2.0**power, granularity)
    assert torch.equal(moved, q)
    amax = x.abs().amax() if x.numel() else torch.tensor(0.0)
    if granularity == "tensor" and float(amax) > 0:
        assert torch.equal(moved_scale, scale * 2.0**power)


@given(matrices(), st.sampled_from(GRANULARITIES))
def test_signs_do_not_matter(x: Tensor, granularity: str) -> None:
    q, scale = reference.quantize_int8(x, granularity)
    negated, same = reference.quantize_int8(-x, granularity)
    assert torch.equal(negated, -q)
    assert torch.equal(same, scale)


@given(matrices())
def test_columns_are_rows_of_the_transpose(x: Tensor) -> None:
    by_column, column_scale = reference.quantize_int8(x, "column")
    by_row, row_scale = reference.quantize_int8(x.t(), "row")
    assert torch.equal(by_column, by_row.t())
    assert torch.equal(column_scale, row_scale.t())


@given(matrices(least=1), st.data())
def test_a_row_quantises_alone(x: Tensor, data: st.DataObject) -> None:
    row = data.draw(st.integers(0, x.shape[0] - 1))
    q, scale = reference.quantize_int8(x, "row")
    alone, scale_alone = reference.quantize_int8(x[row : row + 1], "row")
    assert torch.equal(q[row : row + 1], alone)
    assert torch.equal(scale[row : row + 1], scale_alone)


@given(
    st.lists(FLOATS, max_size=70),
    st.integers(2, 8),
    st.sampled_from([8, 16, 64]),
    st.sampled_from(SCHEMES),
    KEYS,
)
def test_bucket_codes_come_back_within_a_step(
    values: list[float], bits: int, bucket_size: int, scheme: str, key: RandomKey
) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    packed, meta = bucket_reference.bucket_encode(x, bits, bucket_size, scheme, key)
    assert packed.numel() == math.ceil(len(values) * bits / 8)
    back = bucket_reference.bucket_decode(packed, meta, bits, bucket_size, len(values), scheme, key)
    step = meta[:, 1].repeat_interleave(bucket_size)[: len(values)].double()
    size = x.abs().amax().item() if len(values) else 0.0
    room = {"nearest": 0.5, "stochastic": 1.0, "shift": 0.5}[scheme]
    error = (back.double() - x.double()).abs()
    # min + step * code is rounded once more, in the size of the bucket's values.
    assert bool((error <= step * (room + 1e-4) + size * 2**-22).all())
