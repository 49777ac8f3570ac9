"""Int8 products equal the reference bit for bit; fp8 ones keep a distance from float64."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from qsync_opt.kernels import launch, library, products, reference
from qsync_opt.kernels.native import Native

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels")]

Shape = tuple[int, int, int]
Product = Callable[..., Tensor]

DTYPES = (torch.bfloat16, torch.float32, torch.float16)

#: M, K, N: one element, one token, odd ones, 16 and 17 rows, one past a tile, several waves.
SHAPES = (
    (1, 1, 1),
    (1, 768, 768),
    (3, 5, 7),
    (5, 1, 7),
    (16, 16, 16),
    (17, 100, 33),
    (128, 128, 256),
    (129, 144, 257),
    (300, 1000, 1000),
    (513, 272, 120),
    (2049, 640, 3072),
    (700, 4096, 5000),
)
EMPTY = ((0, 16, 16), (16, 0, 16), (16, 16, 0))


def operands(
    shape: Shape, device: torch.device, *, a_rows: bool = True, b_rows: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    m, k, n = shape
    generator = torch.Generator(device).manual_seed(m * 31 + k * 7 + n)
    a, b = (
        torch.randint(-127, 128, size, dtype=torch.int8, device=device, generator=generator)
        for size in ((m, k), (n, k))
    )
    a_scale, b_scale = (
        torch.rand((size, 1) if rows else (), device=device, generator=generator) / 1e3
        for size, rows in ((m, a_rows), (n, b_rows))
    )
    return a, b, a_scale, b_scale, torch.randn(n, device=device, generator=generator)


def implementations(kernels: Native, device: torch.device) -> dict[str, Product]:
    tiles: dict[str, tuple[int, int] | None] = {"mma": None}
    if torch.cuda.get_device_capability(device) == products.HOPPER:
        tiles.update(products.TILES)
    found: dict[str, Product] = {"_int_mm": launch.int_mm_product}
    for name, tile in tiles.items():
        found[name] = functools.partial(launch.int8_product, kernels, tile=tile)
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_every_implementation_equals_the_reference(
    shape: Shape, kernels: Native, device: torch.device
) -> None:
    for a_rows, b_rows in itertools.product((True, False), repeat=2):
        a, b, a_scale, b_scale, bias = operands(shape, device, a_rows=a_rows, b_rows=b_rows)
        for values, dtype in ((None, torch.bfloat16), (bias, torch.float32), (bias, torch.float16)):
            arguments = (a, b, a_scale, b_scale, values, dtype)
            expected = reference.int8_matmul(*arguments)
            for name, run in implementations(kernels, device).items():
                found = run(*arguments)
                assert found.dtype is dtype, name
                assert torch.equal(found, expected), name


@pytest.mark.parametrize("shape", [*SHAPES, *EMPTY])
def test_the_operator_equals_the_reference(shape: Shape, device: torch.device) -> None:
    a, b, a_scale, b_scale, bias = operands(shape, device)
    for values, dtype in itertools.product((None, bias, bias.bfloat16(), bias.half()), DTYPES):
        arguments = (a, b, a_scale, b_scale, values, dtype)
        assert torch.equal(library.int8_matmul(*arguments), reference.int8_matmul(*arguments))


def test_sums_are_exact_at_the_largest_codes(kernels: Native, device: torch.device) -> None:
    a = torch.full((256, 8192), 127, dtype=torch.int8, device=device)
    one = torch.ones((), device=device)
    for name, run in implementations(kernels, device).items():
        found = run(a, -a, one, one, None, torch.float32)
        assert torch.equal(found, torch.full_like(found, -127.0 * 127 * 8192)), name


def test_sums_go_on_beyond_the_largest_integer(device: torch.device) -> None:
    a = torch.full((33, 140_000), -128, dtype=torch.int8, device=device)
    one = torch.ones((), device=device)
    found = library.int8_matmul(a, a, one, one, None, torch.float32)
    assert torch.equal(found, torch.full_like(found, 128.0 * 128 * 140_000))


def test_operands_of_any_strides(device: torch.device) -> None:
    wide, b, a_scale, b_scale, bias = operands((200, 160, 96), device)
    for a in (wide[:, 1:129], wide[:, 16:144], wide.t()[:128].t(), wide[::2, :128]):
        scale = a_scale[: a.shape[0]]
        arguments = (a, b[:, :128], scale, b_scale, bias, torch.bfloat16)
        assert torch.equal(library.int8_matmul(*arguments), reference.int8_matmul(*arguments))


def test_nan_scales_are_seen_in_the_result(device: torch.device) -> None:
    a, b, a_scale, b_scale, _ = operands((64, 64, 64), device)
    a_scale[3] = float("nan")
    a_scale[4] = float("inf")
    a[4] = 0
    out = library.int8_matmul(a, b, a_scale, b_scale, None, torch.bfloat16)
    assert out[3:5].isnan().all()
    assert out[5:].isfinite().all()


def sqnr_db(expected: Tensor, found: Tensor) -> float:
    expected, found = expected.double(), found.double()
    return float(20 * torch.log10(expected.norm() / (found - expected).norm()))


@pytest.mark.parametrize("formats", [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2")])
@pytest.mark.parametrize("shape", [(1, 16, 16), (17, 100, 33), (256, 1024, 512), *EMPTY])
def test_fp8_products(shape: Shape, formats: tuple[str, str], device: torch.device) -> None:
    m, k, n = shape
    a = torch.randn(m, k, device=device)
    b = torch.randn(n, k, device=device)
    bias = torch.randn(n, device=device)
    for granularity in ("tensor", "row"):
        qa, a_scale = reference.quantize_fp8(a, formats[0], granularity)
        qb, b_scale = reference.quantize_fp8(b, formats[1], granularity)
        for values, dtype in itertools.product((None, bias), DTYPES):
            arguments = (qa, qb, a_scale, b_scale, values)
            found = library.fp8_matmul(*arguments, dtype)
            assert found.shape == (m, n)
            assert found.dtype is dtype
            if found.numel() and k:
                exact = reference.fp8_matmul(*arguments, torch.float32)
                # An output of 8 bits of mantissa is 50 dB away; fp8 sums carry 13 bits or more.
                assert sqnr_db(exact, found) > (60 if dtype is torch.float32 else 48)


def test_a_product_on_another_stream_and_in_a_graph(device: torch.device) -> None:
    a, b, a_scale, b_scale, bias = operands((256, 256, 256), device)
    arguments = (a, b, a_scale, b_scale, bias, torch.bfloat16)
    expected = reference.int8_matmul(*arguments)
    make_stream: Any = torch.cuda.Stream  # torch leaves it without annotations
    stream = make_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        found = library.int8_matmul(*arguments)
    stream.synchronize()
    assert torch.equal(found, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = library.int8_matmul(*arguments)
    kept.zero_()
    graph.replay()
    torch.cuda.synchronize(device)
    assert torch.equal(kept, expected)


def test_compiled_code_gives_the_same(device: torch.device) -> None:
    x = torch.randn(130, 200, device=device)
    w = torch.randn(64, 200, device=device)

    def layer(x: Tensor, w: Tensor) -> Tensor:
        q, scale = library.quantize_int8(x, "row")
        qw, w_scale = library.quantize_int8(w, "row")
        return library.int8_matmul(q, qw, scale, w_scale, None, torch.bfloat16)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, w), layer(x, w))
