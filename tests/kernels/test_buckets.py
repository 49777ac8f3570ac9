"""Messages of bucket codes equal the reference's, byte for byte and bit for bit."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from qsync_opt.kernels import bucket_library as library
from qsync_opt.kernels import bucket_reference as reference
from qsync_opt.kernels.rounding import RandomKey

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels")]

KEY = RandomKey(seed=5, step=1, tensor=-9)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Values, messages, buckets of a message, values of a bucket: a single value, short and padded
#: buckets, whole messages of padding, a bucket for a warp and for several, one read twice.
LAYOUTS = (
    (1, 1, 1, 8),
    (7, 3, 2, 8),
    (1000, 2, 8, 64),
    (1024, 1, 1, 1024),
    (2500, 3, 1, 1000),
    (4097, 4, 2, 1024),
    (5000, 2, 2, 2000),
    (20_001, 1, 2, 10_008),
    (100_003, 4, 25, 1008),
)


def vector(count: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator(device).manual_seed(count)
    return torch.randn(count, device=device, generator=generator).to(dtype)


def table_of(bits: int, device: torch.device) -> Tensor:
    inner = torch.rand(2**bits - 2, generator=torch.Generator().manual_seed(bits)).sort().values
    return torch.cat((torch.zeros(1), inner, torch.ones(1))).to(device)


def schemes(bits: int, device: torch.device) -> list[tuple[str, Tensor | None]]:
    """Every scheme with evenly spaced levels, and with learned ones where there are such."""
    found: list[tuple[str, Tensor | None]] = [(scheme, None) for scheme in reference.SCHEMES]
    if bits <= reference.MOST_LEARNED_BITS:
        found += [(scheme, table_of(bits, device)) for scheme in ("nearest", "stochastic")]
    return found


def same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bits", range(2, 9))
def test_messages_and_values_are_those_of_the_reference(
    bits: int, layout: tuple[int, int, int, int], device: torch.device
) -> None:
    count, parts, buckets, size = layout
    for (scheme, table), dtype in itertools.product(schemes(bits, device), DTYPES):
        x = vector(count, device, dtype)
        code = (buckets, size, bits, scheme, KEY, table)
        messages = library.message_encode(x, parts, *code)
        assert torch.equal(messages, reference.message_encode(x, parts, *code))
        values = library.message_decode(messages, *code, dtype)
        assert torch.equal(values, reference.message_decode(messages, *code, dtype))


@pytest.mark.parametrize("behind", [1, 2, 4, 12])
@pytest.mark.parametrize("bits", [3, 4, 6, 8])
def test_rows_lie_anywhere(bits: int, behind: int, device: torch.device) -> None:
    """Whatever follows a message, and wherever the first begins, the bytes are the same."""
    parts, buckets, size = 3, 4, 72
    x = vector(800, device)
    beside = torch.randint(256, (parts, behind), dtype=torch.uint8, device=device)
    for scheme, table in schemes(bits, device):
        code = (buckets, size, bits, scheme, KEY, table)
        rows = library.message_encode(x, parts, *code, beside)
        assert torch.equal(rows, reference.message_encode(x, parts, *code, beside))
        moved = torch.full((parts, rows.shape[1] + behind), 255, dtype=torch.uint8, device=device)
        moved[:, behind:] = rows
        expected = reference.message_decode(rows, *code)
        assert torch.equal(library.message_decode(moved[:, behind:], *code), expected)
        if scheme != "shift":
            layout = (buckets, size, bits)
            mean = library.message_mean(moved[:, behind:], *layout, parts, table)
            assert torch.equal(mean, reference.message_mean(rows, *layout, parts, table))


@pytest.mark.parametrize("parts", [1, 2, 3, 8])
@pytest.mark.parametrize("bits", [2, 5, 6, 8])
def test_means_are_those_of_the_reference(bits: int, parts: int, device: torch.device) -> None:
    for size, table in itertools.product((8, 1000, 1024), (None, table_of(min(bits, 6), device))):
        code = (3, size, bits if table is None else min(bits, 6))
        x = vector(parts * 3 * size, device)
        messages = library.message_encode(x, parts, *code, "stochastic", KEY, table)
        for divisor in (1.0, float(parts), 7.0):
            found = library.message_mean(messages, *code, divisor, table)
            assert torch.equal(found, reference.message_mean(messages, *code, divisor, table))


@pytest.mark.parametrize(
    "value", [0.0, -0.0, 3.5, 1e-44, 1e-38, 1e-30, 1e30, 3e38, float("inf"), float("nan")]
)
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_edge_values(bits: int, value: float, device: torch.device) -> None:
    for scheme, table in schemes(bits, device):
        code = (5, 1024, bits, scheme, KEY, table)
        for scale in (1.0, value):
            x = vector(5000, device) * scale
            x[1024:3000] = value  # a constant bucket, and one that is so in part
            messages = library.message_encode(x, 1, *code)
            expected = reference.message_encode(x, 1, *code)
            # NaN has many patterns: the ranges as numbers, the codes as bytes.
            found, ranges = (m[0, :40].view(torch.float32) for m in (messages, expected))
            same(found, ranges)
            assert torch.equal(messages[:, 40:], expected[:, 40:])
            same(library.message_decode(messages, *code), reference.message_decode(messages, *code))
            layout = (5, 1024, bits)
            same(
                library.message_mean(messages, *layout, 3, table),
                reference.message_mean(messages, *layout, 3, table),
            )


@pytest.mark.parametrize("units", [4, 7, 100, 254])
def test_steps_below_the_normal_numbers(units: int, device: torch.device) -> None:
    """A step of few units of the last place is rounded so far that places pass the last code."""
    x = torch.arange(units + 1, device=device, dtype=torch.float32) * 2.0**-149
    for bits in (2, 4, 8):
        for scheme, table in schemes(bits, device):
            code = (1, 256, bits, scheme, KEY, table)
            found = library.message_encode(x, 1, *code)
            assert torch.equal(found, reference.message_encode(x, 1, *code))


def test_a_vector_that_starts_anywhere_or_is_not_contiguous(device: torch.device) -> None:
    x = vector(8198, device)
    for given in (x[1:4100], x[2:4101], x[3:4102], x[::2], x.view(2, -1).t()):
        code = (65, 64, 5, "stochastic", KEY)
        parts = -(-given.numel() // (65 * 64))
        found = library.message_encode(given, parts, *code)
        assert torch.equal(found, reference.message_encode(given, parts, *code))


def test_every_table_of_levels_close_together(device: torch.device) -> None:
    """Levels a sixteenth of a cell of the histogram apart, as close as they are fitted."""
    gaps = torch.full((63,), 2.0**-15)
    gaps[31] = 1 - 62 * 2.0**-15
    table = torch.cat((torch.zeros(1), gaps.cumsum(0))).to(device)
    table[-1] = 1.0
    x = torch.cat((vector(3000, device), vector(5000, device) * 1e-3))
    for scheme in ("nearest", "stochastic"):
        code = (8, 1000, 6, scheme, KEY, table)
        found = library.message_encode(x, 1, *code)
        assert torch.equal(found, reference.message_encode(x, 1, *code))


def test_empty(device: torch.device) -> None:
    messages = library.message_encode(torch.empty(0, device=device), 2, 1, 64, 4, "nearest")
    assert messages.shape == (2, 40)
    assert not bool(messages.any())
    assert library.message_decode(messages[:, :0], 0, 64, 4, "nearest").shape == (2, 0)
    assert library.message_mean(messages[:, :0], 0, 64, 4, 2).shape == (0,)


def test_more_elements_than_an_int_counts(device: torch.device) -> None:
    """Behind 2^31 elements codes and draws are still those of their place."""
    if torch.cuda.get_device_properties(device).total_memory < 2**35:
        pytest.skip("needs 32 GiB")
    size, tail = 1024, 8
    buckets = 2**31 // size + tail
    x = torch.zeros(buckets * size, dtype=torch.bfloat16, device=device)
    own = vector(tail * size, device).to(torch.bfloat16)
    x[-own.numel() :] = own
    messages = library.message_encode(x, 1, buckets, size, 4, "shift", KEY)
    del x
    values = library.message_decode(messages, buckets, size, 4, "shift", KEY, None, own.dtype)
    assert not bool(values[0, : -own.numel()].any())
    found = values[0, -own.numel() :].float().view(tail, size)
    rows = own.float().view(tail, size)
    step = (rows.amax(1) - rows.amin(1)) / 15
    assert bool(((found - rows).abs() <= 0.51 * step[:, None] + 0.02).all())
    ranges = messages[0, (buckets - tail) * 8 : buckets * 8].clone().view(torch.float32)
    assert torch.equal(ranges.view(tail, 2)[:, 0], rows.amin(1))
