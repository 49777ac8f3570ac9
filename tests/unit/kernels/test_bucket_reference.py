"""Bucket codes and their messages: laws of the reference, against arithmetic written out."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from qsync_opt.errors import ParameterError
from qsync_opt.kernels import bucket_reference as reference
from qsync_opt.kernels.bucket_reference import SCHEMES
from qsync_opt.kernels.rounding import RandomKey, half_words

INF = math.inf
CPU = torch.device("cpu")


def randn(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def table_of(bits: int, seed: int = 0) -> Tensor:
    """Any table: strictly increasing from 0 to 1."""
    inner = torch.rand(2**bits - 2, generator=torch.Generator().manual_seed(seed)).sort().values
    return torch.cat((torch.zeros(1), inner, torch.ones(1)))


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


@pytest.mark.parametrize("bits", range(2, 9))
def test_stochastic_codes_carry_the_bits_of_their_element(bits: int) -> None:
    """In whole numbers and fractions: round to the places there are, add the draw, cut off."""
    x, key = randn(100), RandomKey(seed=3)
    packed, meta = reference.bucket_encode(x, bits, 104, "stochastic", key)
    found = reference.bucket_decode(packed, torch.tensor([[0.0, 1.0]]), bits, 104, 100, "nearest")
    places = min(16, 23 - bits)
    halves = half_words(100, key, CPU).tolist()
    exact = ((x - meta[0, 0]) / meta[0, 1]).tolist()
    for place, half, code in zip(exact, halves, found.tolist(), strict=True):
        fixed = Fraction(round(Fraction(place) * 2**places), 2**places)
        assert code == math.floor(fixed + Fraction(half, 2**16))


@pytest.mark.parametrize("scheme", ["nearest", "stochastic"])
@pytest.mark.parametrize("bits", range(2, 7))
def test_learned_codes_are_neighbours_in_the_table(bits: int, scheme: str) -> None:
    x, table, key = randn(300), table_of(bits), RandomKey(step=2)
    packed, meta = reference.bucket_encode(x, bits, 64, scheme, key, table)
    rows = torch.cat((x, x[-1:].expand(20))).view(5, 64)
    assert torch.equal(meta, torch.stack((rows.amin(1), rows.amax(1) - rows.amin(1)), dim=1))
    even = torch.tensor([[0.0, 1.0]]).expand(5, 2)
    codes = reference.bucket_decode(packed, even, bits, 64, 300, "nearest").long()
    low, span = (meta[:, i].repeat_interleave(64)[:300] for i in range(2))
    place = (x - low) / span
    above = torch.searchsorted(table.double(), place.double()).clamp(1, 2**bits - 1)
    assert bool(((codes == above) | (codes == above - 1)).all())
    if scheme == "nearest":
        other = torch.where(codes == above, above - 1, above)
        gap = (table[above] - table[above - 1]).double()
        nearer = (table[codes].double() - place).abs() - (table[other].double() - place).abs()
        assert bool((nearer <= gap * 1e-5).all())
    back = reference.bucket_decode(packed, meta, bits, 64, 300, scheme, key, table)
    assert torch.equal(back, low + span * table[codes])


@pytest.mark.parametrize("bits", [2, 4, 6])
def test_a_table_of_even_levels_codes_as_none_does(bits: int) -> None:
    x = randn(1000)
    table = torch.linspace(0, 1, 2**bits)
    packed, _ = reference.bucket_encode(x, bits, 64, "nearest", table=table)
    even, _ = reference.bucket_encode(x, bits, 64, "nearest")
    # Float32 puts levels that are no sums of powers of two a little off: ties may differ.
    assert float((packed != even).float().mean()) < 0.01


@pytest.mark.parametrize("table", [None, table_of(4)])
@pytest.mark.parametrize("scheme", ["nearest", "stochastic"])
def test_messages_are_rows_of_ranges_and_codes(scheme: str, table: Tensor | None) -> None:
    x, key = randn(100), RandomKey(step=1)
    beside = torch.arange(12, dtype=torch.uint8).view(4, 3)
    messages = reference.message_encode(x, 4, 2, 16, 4, scheme, key, table, beside)
    assert messages.shape == (4, reference.message_bytes(2, 16, 4) + 3) == (4, 35)
    packed, meta = reference.bucket_encode(x, 4, 16, scheme, key, table)
    ranges = torch.cat((meta.flatten().view(torch.uint8), torch.zeros(8, dtype=torch.uint8)))
    assert torch.equal(messages[:, :16].flatten(), ranges)
    codes = torch.cat((packed, torch.zeros(14, dtype=torch.uint8)))
    assert torch.equal(messages[:, 16:32].flatten(), codes)
    assert torch.equal(messages[:, 32:], beside)
    values = reference.message_decode(messages, 2, 16, 4, scheme, key, table)
    expected = reference.bucket_decode(packed, meta, 4, 16, 100, scheme, key, table)
    assert torch.equal(values.flatten()[:100], expected)
    assert not bool(values.flatten()[112:].any())


def test_messages_of_no_buckets_hold_what_is_beside_them() -> None:
    beside = torch.arange(6, dtype=torch.uint8).view(2, 3)
    for given in (None, beside):
        messages = reference.message_encode(torch.empty(0), 2, 0, 8, 4, "nearest", beside=given)
        assert messages.shape == (2, 0 if given is None else 3)
        assert reference.message_decode(messages, 0, 8, 4, "nearest").shape == (2, 0)
        assert reference.message_mean(messages, 0, 8, 4, 2).shape == (0,)


def test_a_mean_adds_up_in_the_order_of_the_messages() -> None:
    rows = torch.stack([randn(32, seed=part) * 10.0 ** (3 * part) for part in range(3)])
    messages = torch.cat([reference.message_encode(r, 1, 2, 16, 8, "nearest") for r in rows])
    values = reference.message_decode(messages, 2, 16, 8, "nearest")
    expected = ((values[0] + values[1]) + values[2]) / torch.tensor(3.0)
    found = reference.message_mean(messages, 2, 16, 8, 3.0)
    assert torch.equal(found, expected)
    assert not torch.equal(found, ((values[1] + values[2]) + values[0]) / torch.tensor(3.0))


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ((torch.zeros(8), 9, 8, "shift"), "bits"),
        ((torch.zeros(8), 8, 12, "shift"), "bucket_size"),
        ((torch.zeros(8), 8, 8, "coin"), "scheme"),
        ((torch.zeros(8).double(), 8, 8, "shift"), "x"),
        ((torch.zeros(8), 7, 8, "nearest", RandomKey(), torch.linspace(0, 1, 128)), "bits"),
        ((torch.zeros(8), 4, 8, "nearest", RandomKey(), torch.linspace(0, 1, 8)), "table"),
        ((torch.zeros(8), 4, 8, "nearest", RandomKey(), table_of(4).double()), "table"),
        ((torch.zeros(8), 4, 8, "shift", RandomKey(), table_of(4)), "scheme"),
    ],
)
def test_bad_arguments_are_named(arguments: tuple[object, ...], field: str) -> None:
    with pytest.raises(ParameterError) as caught:
        reference.bucket_encode(*arguments)  # type: ignore[arg-type]
    assert caught.value.field == field
