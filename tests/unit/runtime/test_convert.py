"""Conversion is strict in both directions, changes nothing but classes, and can be undone."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from qsync_opt.errors import ParameterError, PlanError
from qsync_opt.plan import PrecisionPlan
from qsync_opt.precision import Precision
from qsync_opt.runtime.availability import available_precisions, supported_precisions
from qsync_opt.runtime.convert import convert, revert
from qsync_opt.runtime.layers import STATE
from tests.low_precision import (
    TinyCnn,
    TinyGpt,
    gradients,
    language_loss,
    tokens,
    uniform_plan,
)

BF16, FP32, INT8 = Precision.BF16, Precision.FP32, Precision.INT8


def step(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    out = model(tokens())
    language_loss(out, tokens()).backward()
    return out.detach(), dict(gradients(model))


def equal(
    first: tuple[Tensor, dict[str, Tensor]], second: tuple[Tensor, dict[str, Tensor]]
) -> bool:
    same = all(torch.equal(first[1][name], second[1][name]) for name in first[1])
    return torch.equal(first[0], second[0]) and first[1].keys() == second[1].keys() and same


@pytest.mark.parametrize("precision", Precision)
def test_revert_gives_back_the_very_model(precision: Precision) -> None:
    model = TinyGpt()
    before = {name: (id(m), type(m), set(vars(m))) for name, m in model.named_modules()}
    plain = step(model)
    assert convert(model, uniform_plan(model, precision), emulate=True) is model
    assert type(model.head) is not nn.Linear
    assert revert(model) is model
    assert {name: (id(m), type(m), set(vars(m))) for name, m in model.named_modules()} == before
    assert equal(step(model), plain)
    assert revert(model) is model


def test_everything_but_the_class_survives() -> None:
    model = TinyGpt()
    optimizer = torch.optim.Adam(model.parameters())
    calls = []
    model.head.register_forward_hook(lambda *_: calls.append("forward"))
    model.head.register_full_backward_hook(lambda *_: calls.append("backward"))
    head: Any = model.head
    head.weight.register_hook(lambda _: calls.append("weight"))
    model.blocks[0].up.requires_grad_(False)
    model.eval()
    model.blocks[0].down.train()  # type: ignore[union-attr]
    keys = list(model.state_dict())
    parameters = [id(parameter) for parameter in model.parameters()]
    training = [module.training for module in model.modules()]
    convert(model, uniform_plan(model, INT8))
    assert list(model.state_dict()) == keys
    assert [id(parameter) for parameter in model.parameters()] == parameters
    assert [module.training for module in model.modules()] == training
    assert model.head.weight is model.words.weight
    assert isinstance(model.head, nn.Linear)
    step(model)
    assert sorted(calls) == ["backward", "forward", "weight"]
    assert model.blocks[0].up.weight.grad is None  # type: ignore[union-attr]
    before = model.head.weight.clone()
    optimizer.step()
    assert not torch.equal(model.head.weight, before)
    other = TinyGpt()
    other.load_state_dict(model.state_dict())
    model.load_state_dict(other.state_dict())


@pytest.mark.parametrize("precision", [FP32, INT8])
def test_copies_and_pickles_compute_the_same(precision: Precision) -> None:
    model = TinyGpt()
    convert(model, uniform_plan(model, precision))
    expected = step(model)
    twin = copy.deepcopy(model)
    assert twin.head.weight is twin.words.weight
    assert equal(step(twin), expected)
    session: Any = vars(twin.head)[STATE].session
    assert session is vars(twin.words)[STATE].session
    assert session is not vars(model.head)[STATE].session
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    assert equal(step(torch.load(stream, weights_only=False)), expected)
    stream = io.BytesIO()
    torch.save(model.state_dict(), stream)
    stream.seek(0)
    plain = TinyGpt()
    plain.load_state_dict(torch.load(stream, weights_only=True))
    assert equal(step(convert(plain, uniform_plan(plain, precision))), expected)
    revert(twin)
    assert type(twin.head) is nn.Linear
    assert type(model.head) is not nn.Linear


def test_a_layer_shows_the_formats_of_its_products() -> None:
    model = TinyCnn()
    plan = uniform_plan(model, INT8) | {"stem": Precision.FP8, "short": Precision.TF32}
    convert(model, plan, emulate=True)
    text = repr(model)
    int8 = "precision=int8, output=int8 x int8, grad_input=bf16, grad_weight=bf16"
    fp8 = "precision=fp8, output=e4m3 x e4m3, grad_input=e5m2 x e4m3, grad_weight=e5m2 x e4m3"
    assert f"PrecisionLinear(in_features=32, out_features=10, bias=True, {int8})" in text
    assert (
        f"PrecisionConv2d(1, 16, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), {fp8})" in text
    )
    assert "precision=tf32, output=tf32, grad_input=tf32, grad_weight=tf32" in text


class Odd(nn.Module):
    """Modules that are no layers, and a function that is none of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv1d(4, 4, 1)
        self.two = nn.Linear(4, 4)
        self.act = nn.ReLU()
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.act(self.two(self.one(x.mT).mT)))  # type: ignore[no-any-return]


Change = Callable[[dict[str, Any]], Any]


@pytest.mark.parametrize(
    ("change", "field", "message"),
    [
        (lambda p: p.update({"twoo": BF16}), "twoo", "Did you mean two?"),
        (lambda p: p.update({"two.sofmax": BF16}), "two.sofmax", "must be a module"),
        (lambda p: p.pop("two"), "two", "must be in the plan"),
        (lambda p: p.update({"two": "int7"}), "two", "must be one of fp32, tf32"),
        (lambda p: p.update({"act": INT8}), "act", "because it multiplies nothing"),
        (lambda p: p.update({"two": Precision.FP8}), "two", "which is what cpu has"),
        (lambda p: p.update({"two.1": BF16}), "two.1", "must be int8 as two is"),
        (
            lambda p: p.update({"scaled_dot_product_attention": INT8}),
            "scaled_dot_product_attention",
            "which is what scaled_dot_product_attention has",
        ),
        (lambda p: p.update({"matmul.1": BF16}), "matmul", "must be in the plan"),
        (lambda p: p.update({"loss.matmul": BF16}), "loss.matmul", "the loss is not patched"),
    ],
)
def test_bad_plans_are_refused_and_change_nothing(change: Change, field: str, message: str) -> None:
    model = Odd()
    plan: dict[str, Any] = {"one": BF16, "two": INT8, "act": BF16, "norm": FP32}
    change(plan)
    with pytest.raises(PlanError) as caught:
        convert(model, plan)
    assert caught.value.field == field
    assert message in str(caught.value)
    assert [type(module) for module in model.children()] == [
        *(nn.Conv1d, nn.Linear, nn.ReLU, nn.LayerNorm)
    ]
    assert type(model) is Odd


def test_plans_and_models_of_the_wrong_kind_are_refused() -> None:
    plan = PrecisionPlan(problem="0" * 64, devices={"weak": {"0": BF16}})
    with pytest.raises(PlanError, match="for_device"):
        convert(nn.Sequential(nn.Linear(2, 2)), plan)  # type: ignore[arg-type]
    model = nn.Sequential(nn.Linear(2, 2))
    convert(model, plan.for_device("weak"))
    with pytest.raises(ParameterError, match="Call revert first"):
        convert(model, plan.for_device("weak"))
    with pytest.raises(PlanError, match=r"convert `model\.module`"):
        convert(nn.ModuleDict({"module": nn.Linear(2, 2)}), {"head": BF16})
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(PlanError, match="Plan the operators inside"):
        convert(model, {"0": BF16, "0.0": BF16})
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].forward = model[0].forward
    with pytest.raises(ParameterError, match="convert before that"):
        convert(model, {"0": BF16})
    with pytest.raises(ParameterError, match="must be initialised"):
        convert(nn.Sequential(nn.LazyLinear(2)), {"0": BF16})


def test_ignored_layers_stay() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    convert(model, {"0": BF16}, ignore=["1"])
    assert type(model[1]) is nn.Linear
    with pytest.raises(PlanError, match="must name modules"):
        convert(nn.Sequential(nn.Linear(2, 2)), {"0": BF16}, ignore=["3"])


class Doubled(nn.Linear):
    """A layer with a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.linear(input, 2 * self.weight, self.bias)


class Named(nn.Linear):
    """A layer without one."""


def test_subclasses_keep_their_own_forward() -> None:
    x = torch.randn(3, 4)
    for cls in (Doubled, Named):
        model = nn.Sequential(cls(4, 4))
        expected = model(x)
        convert(model, {"0": BF16})
        assert isinstance(model[0], cls)
        out = model(x)
        assert out.dtype is torch.bfloat16
        assert torch.allclose(out.float(), expected, atol=0.05)
        out.sum().backward()
        assert model[0].weight.grad is not None
        revert(model)
        assert type(model[0]) is cls


def test_parametrized_layers_work() -> None:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)))
    expected = model(torch.ones(2, 4))
    convert(model, {"0": BF16})
    out = model(torch.ones(2, 4))
    assert out.dtype is torch.bfloat16
    assert torch.allclose(out.float(), expected, atol=0.05)
    out.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_shared_module_is_one_operator() -> None:
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    convert(model, {"0": INT8, "0.1": INT8})
    assert type(model[0]) is type(model[2])
    out = model(torch.randn(2, 4))
    out.sum().backward()
    assert layer.weight.grad is not None
    revert(model)


def test_norms_run_in_fp32_though_no_plan_names_them() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Softmax(-1))
    x = torch.randn(4, 8)
    convert(model, {"0": BF16})
    out = model(x)
    assert out.dtype is torch.float32
    weight, bias, gain, shift = model.parameters()
    half = functional.linear(x.bfloat16(), weight.bfloat16(), bias.bfloat16())
    normed = functional.layer_norm(half.float(), (8,), gain, shift)
    assert torch.equal(out, normed.softmax(-1))


def test_a_cpu_is_honest_about_its_precisions() -> None:
    assert available_precisions("cpu") == {FP32, BF16, INT8}
    assert available_precisions(torch.device("meta")) == {FP32}
    assert INT8 not in supported_precisions("scaled_dot_product_attention")
    assert supported_precisions("linear") == set(Precision)
    if not torch.cuda.is_available():
        with pytest.raises(ParameterError, match="There is no CUDA"):
            available_precisions("cuda")
