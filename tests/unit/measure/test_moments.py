"""How noise spreads, against Jacobians that torch computes whole; kinks against a closed form."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import pytest
import torch
from scipy.linalg import hadamard
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev

from qsync_opt.errors import CaptureError
from qsync_opt.graph import OperatorGraph
from qsync_opt.measure import moments
from qsync_opt.measure.capture import capture
from qsync_opt.measure.kinks import find_kinks
from qsync_opt.measure.moments import Observation, observe
from qsync_opt.measure.rounding_noise import Part

#: Signs of 26 parameters from a Hadamard matrix of this order: their products average to the
#: identity exactly, so the estimates are exact.
ORDER = 32


class Curved(nn.Module):
    """Two layers with a smooth curve between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))  # type: ignore[no-any-return]


def squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def curved() -> tuple[nn.Module, tuple[Tensor, Tensor], OperatorGraph]:
    model = Curved()
    torch.manual_seed(1)
    batch = torch.randn(5, 3), torch.randn(5, 2)
    return model, batch, capture(model, batch, squares, least_coverage=0.0)


@pytest.fixture(scope="module")
def observed() -> tuple[nn.Module, tuple[Tensor, Tensor], Observation]:
    model, batch, graph = curved()
    sizes = [parameter.numel() for parameter in model.parameters()]
    assert sum(sizes) <= ORDER
    rows = torch.tensor(hadamard(ORDER), dtype=torch.float32)
    drawn = iter([part for row in rows for part in row[: sum(sizes)].split(sizes)])

    def signs(like: Tensor, _: object) -> Tensor:
        drawn_signs: Tensor = next(drawn).view_as(like)
        return drawn_signs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moments, "_signs", signs)
        observation = observe(model, batch, graph, loss=squares, probes=ORDER)
    return model, batch, observation


def column_sums(jacobian: Any, like: Tensor) -> Tensor:
    """sum_p M_pi^2 of a Jacobian that is a dictionary over parameters."""
    total = torch.zeros_like(like)
    for block in jacobian.values():
        total += block.reshape(-1, *like.shape).square().sum(0)
    return total


def gradient_with(model: nn.Module, batch: tuple[Tensor, Tensor], shift: Any) -> Any:
    """The gradient for the parameters as a function of noise that `shift` lets in."""
    parameters = dict(model.named_parameters())

    def of_noise(noise: Tensor) -> Any:
        def loss(p: Any) -> Tensor:
            return squares(shift(p, batch[0], noise), batch[1])

        return grad(loss)(parameters)

    return of_noise


def test_noise_in_the_hidden_activation_spreads_as_its_jacobian_says(
    observed: tuple[nn.Module, tuple[Tensor, Tensor], Observation],
) -> None:
    model, batch, observation = observed
    hidden = torch.zeros(5, 4)

    def shift(p: Any, x: Tensor, noise: Tensor) -> Tensor:
        h = torch.tanh(x @ p["first.weight"].t() + p["first.bias"])
        y: Tensor = (h + noise) @ p["second.weight"].t() + p["second.bias"]
        return y

    exact = column_sums(jacrev(gradient_with(model, batch, shift))(hidden), hidden)
    tap = observation.products[max(observation.products)].operands[0]
    assert tap.part is Part.INPUT
    assert tap.value_power is not None
    torch.testing.assert_close(tap.value_power, exact)


def test_noise_in_a_weight_spreads_as_the_hessian_says(
    observed: tuple[nn.Module, tuple[Tensor, Tensor], Observation],
) -> None:
    model, batch, observation = observed
    weight = torch.zeros(4, 3)

    def shift(p: Any, x: Tensor, noise: Tensor) -> Tensor:
        moved = {**p, "first.weight": p["first.weight"] + noise}
        out: Tensor = functional_call(model, moved, (x,))
        return out

    exact = column_sums(jacrev(gradient_with(model, batch, shift))(weight), weight)
    product = observation.products[min(observation.products)]
    tap = product.operands[1]
    assert tap.part is Part.WEIGHT
    assert tap.value_power is not None
    torch.testing.assert_close(tap.value_power, exact)
    # The input needs no gradient, so the weight is used in the forward alone.
    assert product.weight_forward is not None
    assert product.weight_forward.value_power is not None
    torch.testing.assert_close(product.weight_forward.value_power, tap.value_power)
    assert product.weight_backward is not None
    assert product.weight_backward.value_power is not None
    assert not product.weight_backward.value_power.any()


def test_noise_in_the_gradient_of_an_output_reaches_its_layer_and_those_before(
    observed: tuple[nn.Module, tuple[Tensor, Tensor], Observation],
) -> None:
    model, batch, observation = observed
    parameters = dict(model.named_parameters())
    x = batch[0]

    def backward_of(noise: Tensor) -> Any:
        """The gradients are linear in the gradient of the output: noise alone goes back."""
        return grad(lambda p: (functional_call(model, p, (x,)) * noise).sum())(parameters)

    out = torch.zeros(5, 2)
    exact = column_sums(jacrev(backward_of)(out), out)
    tap = observation.products[max(observation.products)].output
    assert tap is not None
    assert tap.gradient_power is not None
    torch.testing.assert_close(tap.gradient_power, exact)


def test_the_two_uses_of_a_weight_add_up(
    observed: tuple[nn.Module, tuple[Tensor, Tensor], Observation],
) -> None:
    model, batch, observation = observed
    weight = torch.zeros(2, 4)
    linear = torch.nn.functional.linear

    def backward_use(noise: Tensor) -> Any:
        """The gradient of the input goes through weight + noise; all else as it is."""
        p = {name: value.detach() for name, value in model.named_parameters()}
        h = torch.tanh(linear(batch[0], p["first.weight"], p["first.bias"]))
        y = linear(h, p["second.weight"], p["second.bias"])
        grad_y = (y - batch[1]) * 2 / y.numel()
        grad_h = grad_y @ (p["second.weight"] + noise)
        before = grad_h * (1 - h.square())
        return {"weight": before.t() @ batch[0], "bias": before.sum(0)}

    exact = column_sums(jacrev(backward_use)(weight), weight)
    product = observation.products[max(observation.products)]
    assert product.weight_backward is not None
    assert product.weight_backward.value_power is not None
    torch.testing.assert_close(product.weight_backward.value_power, exact)


def test_the_trace_of_a_diagonal_hessian_is_exact() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)  # type: ignore[no-any-return]

    def energy(output: Tensor, _: Tensor) -> Tensor:
        return output.square().sum() / 2

    # One row per input: the Hessian of sum_k (a_k w_nk)^2 / 2 is diagonal, a_k^2 in column k.
    sizes = torch.tensor([1.0, 2.0, 3.0, 4.0])
    model, batch = Scale(), (torch.diag(sizes), torch.zeros(4, 3))
    graph = capture(model, batch, energy, least_coverage=0.0)
    observation = observe(model, batch, graph, loss=energy, probes=1)
    assert observation.traces == {0: pytest.approx(3 * float(sizes.square().sum()))}


class Bent(nn.Module):
    """A layer, then an operator that may have a kink, then a sum with unit weights."""

    def __init__(self, bend: Any, inplace: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 256, bias=False)
        self.bend = bend
        self.inplace = inplace

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return self.bend(h, inplace=True) if self.inplace else self.bend(h)  # type: ignore[no-any-return]


def total(output: Tensor, _: Tensor) -> Tensor:
    return output.sum()


def observe_bent(bend: Any, inplace: bool = False) -> Observation:
    torch.manual_seed(2)
    model, batch = Bent(bend, inplace), (torch.randn(128, 64), torch.zeros(()))
    graph = capture(model, batch, total, least_coverage=0.0)
    return observe(model, batch, graph, loss=total, probes=4, replays=True)


@pytest.mark.parametrize("inplace", [False, True])
def test_the_slope_of_a_rectifier_is_its_density_at_zero(inplace: bool) -> None:
    observation = observe_bent(nn.functional.relu, inplace)
    (kink,) = observation.kinks
    # Normal inputs with standard deviation d: noise s flips a share density(0) * E|e| of them,
    # each moves the gradient by 1, and that spreads with the mean power of the rectifier's input.
    replayable = observation.replayables[kink.operator]
    power = replayable.inputs[0].gradient_power
    assert power is not None
    density = 1 / math.sqrt(2 * math.pi) / kink.size
    share = density * math.sqrt(2 / math.pi)
    assert kink.slope == pytest.approx(share * float(power.sum()), rel=0.15)


@pytest.mark.parametrize("bend", [torch.tanh, nn.functional.gelu, torch.sigmoid])
def test_smooth_operators_have_no_kink(bend: Any) -> None:
    assert observe_bent(bend).kinks == []


def test_noise_reaches_a_kink_in_its_full_size() -> None:
    observation = observe_bent(nn.functional.relu)
    (kink,) = observation.kinks
    output = observation.products[min(observation.products)].output
    assert output is not None
    # The layer's output is the kink's input: weights c^2 = slope^2 / elements, exactly.
    expected = torch.full_like(output.value, kink.slope**2 / output.value.numel())
    assert output.spread_power is not None
    torch.testing.assert_close(output.spread_power, expected)


def test_an_operator_without_gradient_has_no_kinks() -> None:
    observation = observe_bent(nn.functional.relu)
    (kink,) = observation.kinks
    replayable = observation.replayables[kink.operator]
    for tap in replayable.inputs:
        tap.gradient_power = None
    assert find_kinks(replayable, torch.Generator()) == []


def test_a_step_that_cannot_be_differentiated_twice_is_refused() -> None:
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.square()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            product: Tensor = gradient * 2 * x
            return product

    model = Bent(Once.apply)
    batch = torch.randn(3, 64), torch.zeros(())
    batch = batch[0], torch.zeros(3, 256)
    graph = capture(model, batch, squares, least_coverage=0.0)
    with pytest.raises(CaptureError, match="measured"):
        observe(model, batch, graph, loss=squares, probes=1)


def test_a_batch_may_be_smaller_than_that_of_the_graph() -> None:
    model, batch, graph = curved()
    observation = observe(model, (batch[0][:2], batch[1][:2]), graph, loss=squares)
    assert sorted(observation.products) == list(graph.adjustable)
    assert observation.products[0].operands[0].value.shape == (2, 3)


def test_a_model_that_skips_an_operator_is_refused() -> None:
    model, batch, graph = curved()

    class Skipping(Curved):
        def forward(self, x: Tensor) -> Tensor:
            return self.first(x)[:, :2]  # type: ignore[no-any-return]

    with pytest.raises(CaptureError, match="second of the graph did not run"):
        observe(Skipping(), batch, graph, loss=squares)


def test_running_out_of_memory_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch, graph = curved()

    def fail(*_: object) -> Tensor:
        raise torch.OutOfMemoryError("tried to allocate 1 TiB")

    monkeypatch.setattr(model, "forward", fail)
    with pytest.raises(CaptureError, match="smaller batch"):
        observe(model, batch, graph, loss=squares)


def test_a_loss_that_is_not_finite_is_refused() -> None:
    model, batch, graph = curved()
    with pytest.raises(CaptureError, match="loss is inf"):
        observe(model, (batch[0], batch[1] * math.inf), graph, loss=squares)


def test_an_observation_does_not_keep_the_graph_of_the_step() -> None:
    nodes: list[weakref.ref[Any]] = []

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            nodes.append(weakref.ref(ctx))
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * 2

    def bend(x: Tensor) -> Tensor:
        function: Any = Noted
        out: Tensor = function.apply(nn.functional.relu(x))
        return out

    observation = observe_bent(bend)
    gc.collect()
    assert observation.products
    assert nodes[-1]() is None
