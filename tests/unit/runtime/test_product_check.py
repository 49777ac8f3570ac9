"""A device that multiplies wrong is found out, and neither measured nor trained on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from qsync_opt.errors import KernelError
from qsync_opt.measure.capture import capture
from qsync_opt.measure.measuring import measure
from qsync_opt.precision import Precision
from qsync_opt.runtime import arithmetic, product_check
from qsync_opt.runtime.parameters import TrainParameters
from qsync_opt.runtime.product_check import (
    PRODUCTS,
    Product,
    require_right_products,
    wrong_products,
)
from qsync_opt.runtime.trainer import train

CPU = torch.device("cpu")
LAYOUTS = ("forward", "grad_input", "grad_weight")
SMALL = tuple(
    Product(rows=96, depth=depth, columns=160, layout=layout)
    for layout in LAYOUTS
    for depth in (64, 192)
)


def without_a_tile(out: Tensor) -> None:
    out[32:64, 64:128] = 0


def with_a_tile_twice(out: Tensor) -> None:
    out[32:64, 64:128] = out[64:96, 64:128].clone()


def with_one_element_off(out: Tensor) -> None:
    out[95, 159] += out[95, 159] / 64


@pytest.fixture(params=[without_a_tile, with_a_tile_twice, with_one_element_off])
def spoiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Products of 16-bit operands are wrong, and a CPU is looked at like a GPU."""
    right = arithmetic.matmul
    spoil: Callable[[Tensor], None] = request.param

    def wrong(a: Tensor, b: Tensor, *rest: Any, **options: Any) -> Tensor:
        out = right(a, b, *rest, **options)
        if a.dtype is torch.bfloat16:
            spoil(out)
        return out

    monkeypatch.setattr(arithmetic, "matmul", wrong)
    monkeypatch.setattr(product_check, "_DEVICE_TYPES", ("cpu",))
    monkeypatch.setattr(product_check, "PRODUCTS", SMALL)
    product_check._found_wrong.cache_clear()
    yield
    product_check._found_wrong.cache_clear()


@pytest.mark.parametrize("precision", [p for p in Precision if p is not Precision.INT8])
def test_right_products_pass_exactly_in_every_precision(precision: Precision) -> None:
    assert wrong_products(CPU, precision, SMALL) == []


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("first", [0, 64, 128])
def test_a_product_that_leaves_out_a_part_of_the_depth_is_seen(
    layout: str, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    product = Product(rows=96, depth=192, columns=160, layout=layout)

    def partial(a: Tensor, b: Tensor, out_dtype: torch.dtype, *, tf32: bool) -> Tensor:
        kept = [k for k in range(192) if not first <= k < first + 64]
        out: Tensor = a[:, kept].float() @ b[kept].float()
        return out.to(out_dtype)

    monkeypatch.setattr(arithmetic, "matmul", partial)
    assert wrong_products(CPU, Precision.BF16, [product]) == [product]


def test_operands_lie_in_memory_as_those_of_a_layer_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries choose their kernels by it."""
    found = {}
    right = arithmetic.matmul

    def look(a: Tensor, b: Tensor, *rest: Any, **options: Any) -> Tensor:
        found[tuple(a.shape), tuple(b.shape)] = (a.is_contiguous(), b.is_contiguous())
        return right(a, b, *rest, **options)

    monkeypatch.setattr(arithmetic, "matmul", look)
    layer = PRODUCTS[3:6]  # of different sizes, so that layouts can be told by them
    scaled = [
        Product(rows=p.rows // 12, depth=p.depth // 12, columns=p.columns // 12, layout=p.layout)
        for p in layer
    ]
    assert wrong_products(CPU, Precision.FP32, scaled) == []
    x, weight = torch.empty(128, 64), torch.empty(256, 64)
    grad = torch.empty(128, 256)
    expected = [(x, weight.t()), (grad, weight), (grad.t(), x)]
    assert found == {
        (tuple(a.shape), tuple(b.shape)): (a.is_contiguous(), b.is_contiguous())
        for a, b in expected
    }


def test_wrong_products_are_refused_by_name(spoiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    require_right_products(CPU, [Precision.FP32])
    with pytest.raises(KernelError, match=r"products in bf16: 6 of 6 are wrong on cpu, .*96, 64"):
        require_right_products(CPU, [Precision.FP32, Precision.BF16])
    with pytest.raises(KernelError, match="products in bf16"):  # its gradients have 16 bits
        require_right_products(CPU, [Precision.INT8])
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "75")
    with pytest.raises(KernelError, match=r"another part of the GPU than 75 %"):
        require_right_products(CPU, [Precision.BF16])


@pytest.mark.parametrize("autocast", [False, True])
def test_nothing_is_trained_on_such_a_device(spoiled: None, autocast: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 4))
    batch = torch.randn(6, 8), torch.randint(4, (6,))
    before = copy.deepcopy(model.state_dict())
    chosen = {"autocast" if autocast else "uniform": Precision.BF16}
    with pytest.raises(KernelError, match="products in bf16"):
        train(model, batch, functional.cross_entropy, parameters=TrainParameters(steps=1, **chosen))  # type: ignore[arg-type]
    assert type(model[0]) is nn.Linear
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    plain = TrainParameters(steps=1, uniform=Precision.FP32)
    train(model, batch, functional.cross_entropy, parameters=plain)


def test_nothing_is_measured_on_such_a_device(spoiled: None) -> None:
    model = nn.Sequential(nn.Linear(8, 4))
    batch = torch.randn(6, 8), torch.randint(4, (6,))
    graph = capture(model, batch, functional.cross_entropy)
    with pytest.raises(KernelError, match="products in bf16"):
        measure(graph, precisions=[Precision.BF16])
