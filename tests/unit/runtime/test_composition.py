"""Converted models under what people put around models."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from qsync_opt.kernels.rounding import Rounding
from qsync_opt.precision import Precision
from qsync_opt.runtime.convert import convert, set_step
from tests.low_precision import (
    Attention,
    TinyCnn,
    TinyGpt,
    gradients,
    language_loss,
    tokens,
    uniform_plan,
)

Step = tuple[Tensor, dict[str, Tensor]]


def model_at(
    precision: Precision, rounding: Rounding = Rounding.NEAREST, cls: type[TinyGpt] = TinyGpt
) -> TinyGpt:
    torch.manual_seed(0)
    model = cls()
    convert(model, uniform_plan(model, precision), rounding=rounding, emulate=True)
    set_step(model, 3)
    return model


def step(model: nn.Module, run: nn.Module | None = None) -> Step:
    model.zero_grad()
    out = (model if run is None else run)(tokens())
    language_loss(out, tokens()).backward()
    return out.detach(), dict(gradients(model))


def assert_equal(found: Step, expected: Step) -> None:
    assert torch.equal(found[0], expected[0])
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert torch.equal(found[1][name], gradient), name


class Checkpointed(TinyGpt):
    """Recomputes each block in backward."""

    reentrant = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class ReentrantlyCheckpointed(Checkpointed):
    """The same with the older kind of checkpoint."""

    reentrant = True


@pytest.mark.parametrize("cls", [Checkpointed, ReentrantlyCheckpointed])
@pytest.mark.parametrize("rounding", Rounding)
@pytest.mark.parametrize("precision", Precision)
def test_recomputation_gives_the_same_bits(
    precision: Precision, rounding: Rounding, cls: type[TinyGpt]
) -> None:
    expected = step(model_at(precision, rounding))
    assert_equal(step(model_at(precision, rounding, cls)), expected)
    assert_equal(step(model_at(precision, rounding)), expected)


@pytest.mark.parametrize("precision", Precision)
def test_the_plan_wins_over_autocast(precision: Precision) -> None:
    torch.manual_seed(0)
    model = TinyCnn()
    convert(model, uniform_plan(model, precision), emulate=True)
    images = torch.randn(4, 1, 8, 8)
    found = []
    for around_forward, around_backward in ((False, False), (True, False), (True, True)):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=around_forward):
            out = model(images)
        with torch.autocast("cpu", torch.bfloat16, enabled=around_backward):
            out.float().square().sum().backward()
        found.append((out.detach(), dict(gradients(model))))
    for other in found[1:]:
        assert_equal(other, found[0])


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.INT8, Precision.FP8])
def test_gradients_accumulate_in_fp32(precision: Precision) -> None:
    model = model_at(precision)
    _, once = step(model)
    out = model(tokens())
    language_loss(out, tokens()).backward()
    for name, gradient in gradients(model).items():
        assert torch.equal(gradient, 2 * once[name]), name


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.INT8, Precision.FP8])
def test_one_compiled_graph_gives_the_same_bits(precision: Precision) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    model = nn.Sequential(Attention(16, 4), nn.LayerNorm(16), nn.Unflatten(1, (1, 5)))
    model.append(nn.Conv2d(1, 2, 3, padding=1))
    convert(model, uniform_plan(model, precision), emulate=True)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x, found = torch.randn(2, 5, 16), []
    for run in (model, compiled):
        model.zero_grad()
        out = run(x)
        out.float().square().sum().backward()
        found.append((out.detach(), dict(gradients(model))))
    assert_equal(found[1], found[0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_stochastic_rounding_is_not_compiled_again_for_every_step() -> None:
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    convert(model, {"0": Precision.INT8}, rounding=Rounding.STOCHASTIC)
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend)
    x, outs = torch.randn(4, 8), []
    for number in range(12):
        set_step(model, number)
        outs.append(compiled(x))
        assert torch.equal(outs[-1], model(x))
        if number == 1:
            after_two = len(graphs)
    assert len(graphs) == after_two
    assert not torch.equal(outs[0], outs[1])


@pytest.mark.parametrize("precision", Precision)
def test_what_follows_may_write_in_place(precision: Precision) -> None:
    for layer, x in (
        (nn.Linear(6, 4), torch.randn(3, 6)),
        (nn.Linear(6, 4), torch.randn(2, 3, 6)),
        (nn.Conv2d(3, 4, 3), torch.randn(2, 3, 6, 6)),
        (nn.Conv2d(3, 4, 1), torch.randn(2, 3, 6, 6)),
    ):
        model = nn.Sequential(layer, nn.ReLU(inplace=True))
        convert(model, {"0": precision}, emulate=True)
        inner = x.clone().requires_grad_()
        model(inner).sum().backward()
        assert inner.grad is not None


def test_a_saved_input_that_is_overwritten_is_an_error_as_ever() -> None:
    layer = nn.Linear(4, 4)
    convert(nn.Sequential(layer), {"0": Precision.FP32})
    x = torch.randn(2, 4)
    out = layer(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
