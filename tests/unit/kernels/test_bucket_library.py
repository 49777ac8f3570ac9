"""The message operators on a CPU: they mean what the reference means, and fakes fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from qsync_opt.errors import ParameterError
from qsync_opt.kernels import bucket_library as library
from qsync_opt.kernels import bucket_reference as reference
from qsync_opt.kernels.rounding import RandomKey

KEY = RandomKey(seed=-7, step=2**40, tensor=-3)
WORDS = (KEY.seed, KEY.step, KEY.tensor)
LAYOUT = (4, 16, 3)  # buckets, values of a bucket, bits
TABLE = torch.tensor([0.0, 0.1, 0.2, 0.4, 0.5, 0.7, 0.9, 1.0])


def vector(count: int = 120) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(0))


def messages() -> Tensor:
    return reference.message_encode(vector(), 2, *LAYOUT, "nearest", KEY, TABLE)


def calls() -> dict[str, tuple[Any, ...]]:
    """Arguments of one call of every operator, as its schema takes them."""
    beside = torch.ones((2, 5), dtype=torch.uint8)
    return {
        "message_encode": (vector(), 2, *LAYOUT, "stochastic", *WORDS, TABLE, beside),
        "message_decode": (messages(), *LAYOUT, "nearest", *WORDS, TABLE, torch.bfloat16),
        "message_mean": (messages(), *LAYOUT, 2.0, TABLE),
    }


def test_every_operator_is_called_here() -> None:
    assert set(calls()) == set(library.SCHEMAS)


@pytest.mark.parametrize("name", sorted(library.SCHEMAS))
def test_schema_and_fake_version_hold(name: str) -> None:
    operator = getattr(torch.ops.qsync_opt, name).default
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(operator, calls()[name], test_utils=tests)


@pytest.mark.parametrize("name", sorted(library.SCHEMAS))
def test_the_fake_version_has_the_strides_of_the_real_one(name: str) -> None:
    operator = getattr(torch.ops.qsync_opt, name)
    real = operator(*calls()[name])
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        arguments = [mode.from_tensor(v) if isinstance(v, Tensor) else v for v in calls()[name]]
        fake = operator(*arguments)
    assert (real.shape, real.stride(), real.dtype) == (fake.shape, fake.stride(), fake.dtype)


@pytest.mark.parametrize("scheme", reference.SCHEMES)
def test_messages_are_those_of_the_reference(scheme: str) -> None:
    for count in (0, 1, 100, 128):
        x = vector(count)
        found = library.message_encode(x, 2, *LAYOUT, scheme, KEY)
        assert torch.equal(found, reference.message_encode(x, 2, *LAYOUT, scheme, KEY))
        values = library.message_decode(found, *LAYOUT, scheme, KEY)
        assert torch.equal(values, reference.message_decode(found, *LAYOUT, scheme, KEY))
    mean = library.message_mean(messages(), *LAYOUT, 2, TABLE)
    assert torch.equal(mean, reference.message_mean(messages(), *LAYOUT, 2, TABLE))


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: library.message_encode(vector(129), 2, *LAYOUT, "shift"), "x"),
        (lambda: library.message_encode(vector(), 0, *LAYOUT, "shift"), "parts"),
        (lambda: library.message_encode(vector(), 2, *LAYOUT, "floor"), "scheme"),
        (
            lambda: library.message_encode(
                vector(), 2, *LAYOUT, "shift", beside=torch.ones(3, 1, dtype=torch.uint8)
            ),
            "beside",
        ),
        (lambda: library.message_decode(messages()[:, :-1], *LAYOUT, "nearest"), "messages"),
        (lambda: library.message_decode(messages()[0], *LAYOUT, "nearest"), "messages"),
        (lambda: library.message_decode(messages(), *LAYOUT, "shift", table=TABLE), "scheme"),
        (lambda: library.message_mean(messages()[:0], *LAYOUT, 2), "messages"),
        (lambda: library.message_mean(messages(), *LAYOUT, 2, TABLE[1:]), "table"),
    ],
)
def test_what_does_not_fit_is_refused(call: Any, field: str) -> None:
    with pytest.raises(ParameterError, match=f"^{field}: "):
        call()
