"""Bucket codes equal the reference bit for bit, for every width and scheme."""

from __future__ import annotations

import itertools

import pytest
import torch

from qsync_opt.kernels import library, reference
from qsync_opt.kernels.rounding import RandomKey

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels")]

KEY = RandomKey(seed=5, step=1, tensor=-9)
COUNTS = (1, 7, 8, 1000, 1024, 1025, 4096, 100_003)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("scheme", reference.SCHEMES)
@pytest.mark.parametrize("bits", range(2, 9))
def test_codes_and_values_are_those_of_the_reference(
    bits: int, scheme: str, device: torch.device
) -> None:
    for count, size, dtype in itertools.product(COUNTS, (8, 1024, 2000), DTYPES):
        generator = torch.Generator(device).manual_seed(count)
        x = torch.randn(count, device=device, generator=generator).to(dtype)
        found = library.bucket_encode(x, bits, size, scheme, KEY)
        expected = reference.bucket_encode(x, bits, size, scheme, KEY)
        assert torch.equal(found[1], expected[1])
        assert torch.equal(found[0], expected[0])
        values = library.bucket_decode(*found, bits, size, count, scheme, KEY, dtype)
        assert torch.equal(
            values, reference.bucket_decode(*found, bits, size, count, scheme, KEY, dtype)
        )


@pytest.mark.parametrize("scheme", reference.SCHEMES)
@pytest.mark.parametrize("value", [0.0, 3.5, 1e-44, 3e38, float("inf"), float("nan")])
def test_edge_values(value: float, scheme: str, device: torch.device) -> None:
    x = torch.randn(5000, device=device)
    x[1024:3000] = value
    found = library.bucket_encode(x, 4, 1024, scheme, KEY)
    codes, meta = reference.bucket_encode(x, 4, 1024, scheme, KEY)
    assert torch.equal(found[0], codes)
    torch.testing.assert_close(found[1], meta, rtol=0, atol=0, equal_nan=True)
    values = library.bucket_decode(*found, 4, 1024, 5000, scheme, KEY)
    expected = reference.bucket_decode(*found, 4, 1024, 5000, scheme, KEY)
    torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)


def test_a_vector_that_starts_anywhere(device: torch.device) -> None:
    x = torch.randn(4099, device=device)
    for start in (1, 2, 3):
        found = library.bucket_encode(x[start:], 5, 64, "shift", KEY)
        expected = reference.bucket_encode(x[start:], 5, 64, "shift", KEY)
        assert torch.equal(found[0], expected[0])


def test_empty(device: torch.device) -> None:
    packed, meta = library.bucket_encode(torch.empty(0, device=device), 4, 64, "nearest")
    assert packed.shape == (0,)
    assert meta.shape == (0, 2)
    assert library.bucket_decode(packed, meta, 4, 64, 0, "nearest").shape == (0,)
