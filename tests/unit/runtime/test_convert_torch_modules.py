"""Modules of torch beside the layers: which would fail, or leave the plan, when converted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from qsync_opt.errors import ParameterError, PlanError
from qsync_opt.kernels.rounding import Rounding
from qsync_opt.measure.capture import capture
from qsync_opt.measure.uniform import uniform_plan
from qsync_opt.precision import Precision
from qsync_opt.runtime.availability import available_precisions
from qsync_opt.runtime.convert import convert, revert
from tests.low_precision import decibels

BATCH = torch.randn(6, 8), torch.randint(4, (6,))
HALVES = [Precision.BF16, Precision.FP16]
RECURRENT = [nn.LSTM, nn.GRU, nn.RNN]
CELLS = [nn.LSTMCell, nn.GRUCell, nn.RNNCell]


class Between(nn.Module):
    """A module between two layers."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.first, self.module, self.last = nn.Linear(8, 8), module, nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out = self.call(self.first(x))
        return self.last(out[0] if isinstance(out, tuple) else out)  # type: ignore[no-any-return]

    def call(self, x: Tensor) -> Any:
        if isinstance(self.module, nn.MultiheadAttention):
            return self.module(x, x, x)
        return self.module(x, x) if isinstance(self.module, nn.Bilinear) else self.module(x)


@pytest.mark.parametrize("has_graph", [False, True])
@pytest.mark.parametrize("name", ["", "linear"])
@pytest.mark.parametrize("precision", [Precision.BF16, Precision.INT8])
def test_a_model_can_be_one_layer(precision: Precision, name: str, has_graph: bool) -> None:
    model = nn.Linear(8, 4)
    graph = capture(model, BATCH, functional.cross_entropy) if has_graph else None
    if has_graph and not name:
        with pytest.raises(PlanError, match="operator of the graph"):
            convert(model, {name: precision}, graph=graph)
        return
    held = nn.Sequential(nn.Linear(8, 4))
    held[0].load_state_dict(model.state_dict())
    convert(held, {"0": precision})
    convert(model, {name: precision}, graph=graph)
    assert torch.equal(model(BATCH[0]), held(BATCH[0]))
    revert(model)
    assert type(model) is nn.Linear
    with pytest.raises(PlanError, match="precision"):
        convert(model, {"conv2d": precision})


@pytest.mark.parametrize("has_graph", [False, True])
@pytest.mark.parametrize("precision", HALVES)
def test_prelu_follows_what_it_reads(precision: Precision, has_graph: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.PReLU(8), nn.Linear(8, 4))
    exact = nn.Sequential(nn.Linear(8, 8), nn.PReLU(8), nn.Linear(8, 4)).double()
    exact.load_state_dict(model.state_dict())
    graph = capture(model, BATCH, functional.cross_entropy) if has_graph else None
    convert(model, {"0": precision, "2": precision}, graph=graph, emulate=True)
    handed: list[Tensor] = []
    model[1].register_forward_hook(lambda module, args, out: handed.append(out))
    out, expected = model(BATCH[0]), exact(BATCH[0].double())
    assert handed[0].dtype is out.dtype
    assert decibels(out, expected) > 30
    out.sum().backward()
    expected.sum().backward()
    assert model[1].weight.grad.dtype is torch.float32  # type: ignore[union-attr]
    assert decibels(model[1].weight.grad, exact[1].weight.grad) > 30  # type: ignore[arg-type]


@pytest.mark.parametrize("has_graph", [False, True])
@pytest.mark.parametrize("make", [*RECURRENT, *CELLS])
def test_recurrent_modules_run_in_fp32_unless_a_cell_is_planned(
    make: Callable[..., nn.Module], has_graph: bool
) -> None:
    model = Between(make(8, 8))
    graph = capture(model, BATCH, functional.cross_entropy) if has_graph else None
    plan = {"first": Precision.BF16, "last": Precision.BF16}
    if graph is not None:
        plan = uniform_plan(graph, Precision.BF16, available_precisions("cpu"))
    expected = model(BATCH[0])
    convert(model, plan, graph=graph)
    seen: list[Any] = []
    model.module.register_forward_hook(lambda module, args, out: seen.append(out))
    out = model(BATCH[0])
    assert decibels(out, expected) > 30
    out.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    made = seen[0][0] if isinstance(seen[0], tuple) else seen[0]
    planned = graph is not None and make in CELLS
    assert made.dtype is (torch.bfloat16 if planned else torch.float32)


@pytest.mark.parametrize("make", RECURRENT)
@pytest.mark.parametrize("precision", [p for p in Precision if p is not Precision.FP32])
def test_recurrent_modules_have_no_other_precision(
    make: Callable[..., nn.Module], precision: Precision
) -> None:
    plan = {"first": Precision.BF16, "last": Precision.BF16, "module": precision}
    with pytest.raises(PlanError, match="must be one of fp32"):
        convert(Between(make(8, 8)), plan, emulate=True)


@pytest.mark.parametrize(
    "module",
    [
        *(nn.Conv1d(6, 6, 3, padding=1), nn.ConvTranspose1d(6, 6, 3, padding=1)),
        *(nn.MultiheadAttention(8, 2), nn.Bilinear(8, 8, 8)),
    ],
    ids=lambda module: type(module).__name__,
)
def test_what_multiplies_and_is_not_planned_runs_in_fp32(module: nn.Module) -> None:
    model = Between(module)
    expected = model(BATCH[0])
    convert(model, {"first": Precision.BF16, "last": Precision.INT8})
    assert decibels(model(BATCH[0]), expected) > 25


class Encoder(nn.Module):
    """Torch's own transformer blocks, which have a fused function for inference."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
        self.blocks = nn.TransformerEncoder(block, 2)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        out = self.blocks(x, src_key_padding_mask=padding)
        return self.attention(out, out, out)[0]  # type: ignore[no-any-return]


def test_the_plan_holds_in_inference_too() -> None:
    torch.manual_seed(0)
    model = Encoder()
    batch = torch.randn(3, 5, 16), torch.randn(3, 5, 16)
    graph = capture(model, batch, functional.mse_loss)
    convert(model, uniform_plan(graph, Precision.INT8, available_precisions("cpu")), graph=graph)
    trained = model(batch[0])
    model.eval()
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[0, 3:] = True
    with torch.no_grad():
        assert torch.equal(model(batch[0]), trained)
        padded = model(batch[0], padding)
    assert padded.shape == trained.shape
    assert torch.equal(padded[1:], model(batch[0][1:], padding[1:]))
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("rounding", {"rounding": "stochastic"}),
        ("seed", {"seed": 2**63}),
        ("seed", {"seed": 1.5}),
        ("ignore", {"ignore": "10"}),
    ],
)
def test_options_are_looked_at_before_anything_is_changed(
    field: str, options: dict[str, Any]
) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(ParameterError, match=f"^{field}: must be"):
        convert(model, {"0": Precision.BF16}, **options)
    assert type(model[0]) is nn.Linear
    convert(model, {"0": Precision.BF16}, rounding=Rounding.STOCHASTIC, seed=-(2**63))


def test_models_and_names_are_of_the_right_type() -> None:
    with pytest.raises(ParameterError, match="^model: must be a module"):
        convert(torch.zeros(3), {"0": Precision.BF16})  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="names of operators as keys"):
        convert(nn.Sequential(nn.Linear(4, 4)), {0: Precision.BF16})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("layer", "shape", "rule"),
    [
        (nn.Linear(4, 4), (2, 5), "4 features"),
        (nn.Linear(4, 4), (), "must have dimensions"),
        (nn.Conv2d(4, 4, 1), (1, 1, 4, 2, 2), r"shape \[N, C, H, W\]"),
    ],
)
def test_inputs_of_another_shape_are_refused_by_name(
    layer: nn.Module, shape: tuple[int, ...], rule: str
) -> None:
    model = convert(nn.Sequential(layer), {"0": Precision.INT8})
    with pytest.raises(ParameterError, match=f"input of 0: .*{rule}"):
        model(torch.randn(shape))
