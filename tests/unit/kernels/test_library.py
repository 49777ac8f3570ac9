"""The operators on a CPU: they mean what the reference means, and their fake versions fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from qsync_opt.errors import ParameterError
from qsync_opt.kernels import library, reference
from qsync_opt.kernels.rounding import RandomKey, Rounding

KEY = RandomKey(seed=-7, step=2**40, tensor=-3)
WORDS = (Rounding.STOCHASTIC, KEY.seed, KEY.step, KEY.tensor)
WINDOW = ((2, 1), (1, 0), (1, 2), 2)


def matrix(rows: int = 6, columns: int = 20, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def codes(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-127, 128, shape, dtype=torch.int8, generator=generator)


def images() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    x = codes(2, 4, 9, 8).to(memory_format=torch.channels_last)
    return x, codes(6, 2, 3, 2), torch.tensor(0.5), torch.rand(6), torch.randn(6)


def calls() -> dict[str, tuple[Any, ...]]:
    """Arguments of one call of every operator, as its schema takes them."""
    a, b = codes(3, 16), codes(5, 16, seed=1)
    scales = torch.rand(3, 1), torch.rand(5, 1)
    fp8 = [reference.quantize_fp8(matrix(rows, 16), "e4m3", "row") for rows in (3, 5)]
    q, scale = reference.quantize_int8(matrix(), "column")
    return {
        "quantize_int8": (matrix(), "row", *WORDS),
        "quantize_fp8": (matrix(), "e5m2", "column", *WORDS),
        "quantize_fp8_transposed": (matrix(), "e4m3", *WORDS),
        "dequantize": (q, scale, torch.bfloat16),
        "int8_matmul": (a, b, *scales, torch.randn(5), torch.float16),
        "fp8_matmul": (fp8[0][0], fp8[1][0], fp8[0][1], fp8[1][1], None, torch.float32),
        "int8_conv2d": (*images(), *WINDOW, torch.bfloat16),
    }


def test_every_operator_is_called_here() -> None:
    assert set(calls()) == set(library.SCHEMAS)


@pytest.mark.parametrize("name", sorted(library.SCHEMAS))
def test_schema_and_fake_version_hold(name: str) -> None:
    operator = getattr(torch.ops.qsync_opt, name).default
    tests = ["test_faketensor", "test_aot_dispatch_dynamic"]
    if "fp8" not in name:  # it compares the arguments before and after, and torch cannot for fp8
        tests.append("test_schema")
    torch.library.opcheck(operator, calls()[name], test_utils=tests)


@pytest.mark.parametrize("name", sorted(library.SCHEMAS))
def test_the_fake_version_has_the_strides_of_the_real_one(name: str) -> None:
    operator = getattr(torch.ops.qsync_opt, name)
    real = operator(*calls()[name])
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        arguments = [mode.from_tensor(v) if isinstance(v, Tensor) else v for v in calls()[name]]
        fake = operator(*arguments)
    pairs = zip(real, fake, strict=True) if isinstance(real, tuple) else [(real, fake)]
    for one, other in pairs:
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


@pytest.mark.parametrize("rounding", list(Rounding))
@pytest.mark.parametrize("granularity", reference.GRANULARITIES)
def test_quantisation_is_that_of_the_reference(granularity: str, rounding: Rounding) -> None:
    x = matrix()
    for found, expected in (
        (
            library.quantize_int8(x, granularity, rounding, KEY),
            reference.quantize_int8(x, granularity, rounding, KEY),
        ),
        (
            library.quantize_fp8(x, "e4m3", granularity, rounding, KEY),
            reference.quantize_fp8(x, "e4m3", granularity, rounding, KEY),
        ),
    ):
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one.float(), other.float())


def test_products_are_those_of_the_reference() -> None:
    arguments = calls()["int8_matmul"]
    assert torch.equal(library.int8_matmul(*arguments), reference.int8_matmul(*arguments))
    arguments = calls()["fp8_matmul"]
    assert torch.equal(library.fp8_matmul(*arguments), reference.fp8_matmul(*arguments))
    arguments = calls()["int8_conv2d"]
    assert torch.equal(library.int8_conv2d(*arguments), reference.int8_conv2d(*arguments))


def test_compiled_code_holds_the_operators_in_one_graph() -> None:
    def layer(x: Tensor, w: Tensor) -> Tensor:
        q, scale = library.quantize_int8(x, "row", Rounding.STOCHASTIC, KEY)
        qw, w_scale = library.quantize_int8(w, "row")
        return library.int8_matmul(q, qw, scale, w_scale, None, torch.float32)

    x, w = matrix(), matrix(4, seed=1)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, w), layer(x, w))


A, B = codes(3, 16), codes(5, 16)
ROWS, COLUMNS, ONE = torch.ones(3, 1), torch.ones(5, 1), torch.ones(())


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ((A.float(), B, ROWS, COLUMNS, None, torch.float32), "a"),
        ((A, B[:, :8], ROWS, COLUMNS, None, torch.float32), "b"),
        ((A, B.flatten(), ROWS, COLUMNS, None, torch.float32), "b"),
        ((A, B, ROWS.T, COLUMNS, None, torch.float32), "a_scale"),
        ((A, B, ROWS, COLUMNS.double(), None, torch.float32), "b_scale"),
        ((A, B, ONE, ONE, torch.ones(3), torch.float32), "bias"),
        ((A, B, ONE, ONE, None, torch.int32), "out_dtype"),
    ],
)
def test_products_refuse_what_does_not_fit(arguments: tuple[Any, ...], field: str) -> None:
    with pytest.raises(ParameterError, match=f"^{field}: "):
        library.int8_matmul(*arguments)


@pytest.mark.parametrize(
    ("place", "value", "field"),
    [
        (0, codes(2, 4, 9), "x"),
        (0, codes(2, 5, 9, 8), "x"),
        (0, codes(2, 4, 9, 2), "x"),
        (1, torch.zeros(6, 2, 3, 2), "weight"),
        (3, torch.rand(5), "weight_scale"),
        (4, torch.rand(5), "bias"),
        (5, (0, 1), "stride"),
        (6, (-1, 0), "padding"),
        (7, (1, 0), "dilation"),
        (8, 4, "groups"),
    ],
)
def test_convolutions_refuse_what_does_not_fit(place: int, value: object, field: str) -> None:
    arguments: list[Any] = [*images(), *WINDOW, torch.float32]
    arguments[place] = value
    with pytest.raises(ParameterError, match=f"^{field}: "):
        library.int8_conv2d(*arguments)


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ParameterError, match="granularity"):
        library.quantize_int8(matrix(), "block")
    with pytest.raises(ParameterError, match="format"):
        library.quantize_fp8(matrix(), "e3m4", "row")
    with pytest.raises(ParameterError, match="scale"):
        library.dequantize(A, COLUMNS, torch.float32)
