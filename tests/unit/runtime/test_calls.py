"""Operators that are plain calls: found by module and number, at the precision of the plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from qsync_opt.errors import PlanError
from qsync_opt.precision import Precision
from qsync_opt.runtime.availability import supported_precisions
from qsync_opt.runtime.convert import convert, revert
from tests.low_precision import Attention, decibels

#: Of the products' formats, less what two products and a rounding on the way lose.
FLOORS = {
    Precision.FP32: 110.0,
    Precision.TF32: 60.0,
    Precision.BF16: 42.0,
    Precision.FP16: 60.0,
    Precision.FP8: 16.0,
    Precision.INT8: 34.0,
}


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Calls(nn.Module):
    """One call of a function, with tensors that need gradients."""

    def __init__(self, function: Any, *shapes: tuple[int, ...], **named: Any) -> None:
        super().__init__()
        self.function = function
        self.named = named
        self.operands = [randn(*shape, seed=seed) for seed, shape in enumerate(shapes)]

    def forward(self, *operands: Tensor) -> Tensor:
        return self.function(*operands, **self.named)  # type: ignore[no-any-return]


CASES: dict[str, tuple[str, Calls]] = {
    "matmul": ("matmul", Calls(torch.matmul, (2, 3, 5, 7), (2, 3, 7, 4))),
    "broadcast": ("matmul", Calls(torch.matmul, (3, 5, 7), (2, 1, 7, 4))),
    "vector": ("matmul", Calls(torch.matmul, (5, 7), (7,))),
    "operator": ("matmul", Calls(lambda a, b: a @ b, (5, 7), (7, 3))),
    "method": ("matmul", Calls(lambda a, b: a.matmul(b), (4, 5, 7), (7, 3))),
    "bmm": ("bmm", Calls(torch.bmm, (3, 5, 7), (3, 7, 4))),
    "mm": ("mm", Calls(torch.mm, (5, 17), (17, 4))),
    "addmm": ("addmm", Calls(torch.addmm, (4,), (5, 17), (17, 4))),
    "scaled addmm": ("addmm", Calls(torch.addmm, (5, 4), (5, 17), (17, 4), alpha=0.5, beta=2.0)),
    "baddbmm": ("baddbmm", Calls(torch.baddbmm, (3, 5, 4), (3, 5, 7), (3, 7, 4), alpha=2.0)),
    "linear": ("linear", Calls(functional.linear, (2, 5, 16), (8, 16), (8,))),
    "conv2d": ("conv2d", Calls(functional.conv2d, (2, 4, 7, 7), (6, 2, 3, 3), groups=2)),
    "conv1d": ("conv1d", Calls(functional.conv1d, (2, 4, 9), (6, 4, 3), padding=1)),
    "einsum": ("einsum", Calls(lambda a, b: torch.einsum("ij,kj->ik", a, b), (5, 7), (4, 7))),
    "attention": (
        "scaled_dot_product_attention",
        Calls(functional.scaled_dot_product_attention, *((2, 4, 9, 8),) * 3, is_causal=True),
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("precision", Precision)
def test_a_call_runs_at_its_precision(precision: Precision, case: str) -> None:
    kind, model = CASES[case]
    if precision not in supported_precisions(kind):
        with pytest.raises(PlanError, match="which is what"):
            convert(model, {kind: precision}, emulate=True)
        return
    operands = [x.clone().requires_grad_() for x in model.operands]
    wide = [x.double().requires_grad_() for x in model.operands]
    expected = model(*wide)
    convert(model, {kind: precision}, emulate=True)
    out = model(*operands)
    revert(model)
    assert out.dtype.itemsize == precision.output.element_bytes
    assert out.shape == expected.shape
    grad = randn(*out.shape, seed=9).to(out.dtype)
    out.backward(grad)
    expected.backward(grad.double())
    assert decibels(out, expected) >= FLOORS[precision]
    for found, exact in zip(operands, wide, strict=True):
        assert found.grad is not None
        assert exact.grad is not None
        assert found.grad.dtype is torch.float32
        assert decibels(found.grad, exact.grad) >= FLOORS[precision] - 4


@pytest.mark.parametrize("precision", [Precision.INT8, Precision.FP8])
@pytest.mark.parametrize("shape", [(2, 3), (1,)])
def test_a_batched_product_saves_codes(precision: Precision, shape: tuple[int, ...]) -> None:
    model = Calls(torch.matmul, (*shape, 64, 32), (*shape, 32, 48))
    operands = [x.clone().requires_grad_() for x in model.operands]
    convert(model, {"matmul": precision}, emulate=True)
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(*operands)
    elements = sum(x.numel() for x in operands)
    codes = sum(t.numel() for t in kept.values() if t.element_size() == 1)
    scales = sum(t.numel() for t in kept.values() if t.element_size() == 4)
    assert codes == elements
    rows = sum(x.numel() // 32 for x in operands)
    assert scales == (rows if precision is Precision.INT8 else 2)
    out.sum().backward()


class Numbered(nn.Module):
    """Two calls of one function, a child with a third, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.child = Calls(torch.matmul)
        self.layer = nn.Linear(8, 8)
        self.weight = nn.Parameter(randn(8, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        first = torch.matmul(x, x)
        inner = self.child(x, x)
        second = x @ self.weight
        return first, inner, second, self.layer(x), torch.softmax(first, -1)


def test_calls_are_told_apart_by_module_and_number() -> None:
    model = Numbered()
    plan = {
        "matmul": Precision.INT8,
        "matmul.1": Precision.BF16,
        "child.matmul": Precision.FP16,
        "layer": Precision.FP32,
        "softmax": Precision.FP32,
    }
    x = randn(8, 8)
    convert(model, plan, emulate=True)
    for _ in range(2):  # numbers start again in every run
        first, inner, second, layer, soft = model(x)
        dtypes = [out.dtype for out in (first, inner, second, layer, soft)]
        assert dtypes == [
            *(torch.bfloat16, torch.float16, torch.bfloat16, torch.float32, torch.float32)
        ]
        assert decibels(first, x.double() @ x.double()) < 48
        assert torch.equal(soft, first.float().softmax(-1))
    second.sum().backward()
    assert model.weight.grad is not None
    assert type(model.layer) is not nn.Linear
    revert(model)
    assert type(model) is Numbered
    assert type(model.child) is Calls


def test_a_call_that_the_plan_does_not_name_is_refused() -> None:
    model = Numbered()
    plan = {"matmul": Precision.BF16, "child.matmul": Precision.BF16, "layer": Precision.BF16}
    convert(model, plan)
    with pytest.raises(PlanError, match=r"matmul\.1: must be in the plan"):
        model(randn(8, 8))


def test_a_parameter_is_saved_itself_and_not_its_cast() -> None:
    model = Numbered()
    plan = dict.fromkeys(("matmul", "matmul.1", "child.matmul", "layer"), Precision.BF16)
    convert(model, plan)
    kept = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.data_ptr())
        return tensor

    x = randn(8, 8).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x)
    assert model.weight.data_ptr() in kept
    assert model.layer.weight.data_ptr() in kept


def test_multi_head_attention_opens() -> None:
    model = nn.Sequential()
    model.add_module("attention", nn.MultiheadAttention(16, 4, batch_first=True))

    class Self(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]

    outer = Self()
    x = randn(2, 5, 16)
    expected = outer(x)
    plan = dict.fromkeys(
        (
            "attention.linear",
            "attention.linear.1",
            "attention.scaled_dot_product_attention",
        ),
        Precision.BF16,
    )
    convert(outer, plan)
    out = outer(x)
    assert out.dtype is torch.bfloat16
    assert decibels(out, expected) > FLOORS[Precision.BF16]
    out.sum().backward()
    assert all(parameter.grad is not None for parameter in outer.parameters())


def test_other_modes_still_see_the_calls() -> None:
    seen = []

    class Watch(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    model = Attention(16, 4)
    plan = dict.fromkeys(("query", "key", "value", "out", "matmul", "matmul.1"), Precision.BF16)
    plan["scaled_dot_product_attention"] = Precision.BF16
    convert(model, plan)
    with Watch():
        model(randn(2, 5, 16))
    assert "scaled_dot_product_attention" in seen


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_backward_under_autocast_keeps_the_precision(precision: Precision) -> None:
    model = Calls(torch.matmul, (4, 16, 16), (4, 16, 16))
    convert(model, {"matmul": precision})
    found = []
    for enabled in (False, True):
        operands = [x.clone().requires_grad_() for x in model.operands]
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = model(*operands)
            out.backward(torch.ones_like(out))
        assert torch.is_autocast_enabled("cpu") is False
        found.append([out, *(x.grad for x in operands)])
    assert all(map(torch.equal, *found))
