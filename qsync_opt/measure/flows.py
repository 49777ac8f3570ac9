"""What flows through the operators of a step: taps on tensors, products, and other operators.

A tap keeps the value of a tensor and its gradient and, in further passes through the step, how
strongly some function depends on either. `taps` puts them in place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function

from qsync_opt.measure.calls import replace_tensors, tensors_in
from qsync_opt.measure.draws import SameDraws, set_random_state
from qsync_opt.measure.rounding_noise import Layout, Part

if TYPE_CHECKING:
    from torch.autograd.graph import GradientEdge


class Pass(Enum):
    """Which way the step is going, for the taps."""

    BACKWARD = "backward"
    PROBE = "probe"  # through the gradient: what depends on values and on gradients
    SPREAD = "spread"  # from kinks backwards: what reaches them


@dataclass(slots=True)
class Passes:
    """The pass that is running; all taps of a step share it."""

    now: Pass = Pass.BACKWARD


@dataclass(slots=True, eq=False)
class Tap:
    """What flows through one tensor of an operator, each of its shape.

    Attributes:
        part: what the tensor is to the operator.
        value: the tensor.
        gradient: of the loss for it; None where no gradient reaches it.
        value_power: sum over probes of the squared derivative for the value.
        gradient_power: sum over probes of the squared derivative for the gradient.
        spread_power: sum over the passes from kinks of the squared derivative for the value.
    """

    part: Part
    passes: Passes
    value: Tensor
    gradient: Tensor | None = None
    value_power: Tensor | None = None
    gradient_power: Tensor | None = None
    spread_power: Tensor | None = None

    def arrived(self, gradient: Tensor) -> Tensor:
        """Take note of what comes back through the tap, and hand it on."""
        if self.passes.now is Pass.PROBE:
            self.value_power = _plus_square(self.value_power, gradient)
        elif self.passes.now is Pass.SPREAD:
            self.spread_power = _plus_square(self.spread_power, gradient)
        else:
            self.gradient = gradient.detach()
            if torch.is_grad_enabled():
                return apply(_GradientTap, gradient, self)
        return gradient

    def arrived_for_gradient(self, derivative: Tensor) -> None:
        """Take note of the derivative of the probed function for the gradient."""
        self.gradient_power = _plus_square(self.gradient_power, derivative)


@dataclass(kw_only=True, eq=False)
class Product:
    """An adjustable operator as it ran.

    Attributes:
        operator: index in the graph.
        layout: what its tensors are.
        operands: taps of those that are rounded, each for this use alone, in the order of
            `layout.parts`.
        run: the call with other tensors, by number, in place of its own.
        output: tap of what it made.
        weight_forward, weight_backward: taps of the weight where it is multiplied in the
            forward and where it is multiplied into the gradient of the input; both are in
            the weight's tap in `operands`. None where they are not told apart.
    """

    operator: int
    layout: Layout
    operands: list[Tap]
    run: Callable[[dict[int, Tensor]], Any]
    output: Tap | None = None
    weight_forward: Tap | None = None
    weight_backward: Tap | None = None


@dataclass(kw_only=True, eq=False)
class Replayable:
    """A differentiable operator without a choice of precision, so that it can run again.

    Attributes:
        operator: index in the graph.
        function, args, kwargs: the call; tensors as they were before it.
        activations: numbers of the tensor arguments that operators made, in floats.
        inputs: taps of the activations.
        outputs: taps of what came out.
        edges: of the activations in autograd's graph.
        random_state: of the generator of the device before the call.
    """

    operator: int
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    activations: list[int]
    inputs: list[Tap]
    edges: list[GradientEdge]
    random_state: Tensor
    outputs: list[Tap] = field(default_factory=list)

    def run(self, change: Callable[[int, Tensor], Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Run the call again with activations changed.

        Args:
            change: from the place among `activations` and the value to the value to use.

        Returns:
            The activations as used, ready to be differentiated for, and the outputs.
        """
        device = self.inputs[0].value.device
        numbers = iter(range(len(tensors_in((self.args, self.kwargs)))))
        used: list[Tensor] = []

        def make(x: Tensor) -> Tensor:
            number = next(numbers)
            if number not in self.activations:
                return x.clone()  # running statistics, for example, are written into
            changed = change(len(used), x).detach().requires_grad_()
            used.append(changed)
            return changed.clone()  # an operator in place must not write into a leaf

        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), torch.enable_grad(), SameDraws():
            set_random_state(device, self.random_state)
            args, kwargs = replace_tensors((self.args, self.kwargs), make)
            result = self.function(*args, **kwargs)
        return used, [x for x in tensors_in(result) if x.is_floating_point()]

    def gradients(
        self, used: list[Tensor], outputs: list[Tensor], scale: float = 1.0
    ) -> list[Tensor]:
        """The gradients of the step's loss for the activations that a run used, in float32.

        Args:
            used: from `run`.
            outputs: from `run`.
            scale: of the loss while the gradients are in the dtype of the outputs.
        """
        pairs = [
            (output, (tap.gradient * scale).to(output.dtype))
            for output, tap in zip(outputs, self.outputs, strict=True)
            if tap.gradient is not None and output.requires_grad
        ]
        if not pairs:
            return [torch.zeros_like(x, dtype=torch.float32) for x in used]
        found = torch.autograd.grad(
            [output for output, _ in pairs], used, [g for _, g in pairs], allow_unused=True
        )
        return [
            torch.zeros_like(x, dtype=torch.float32) if g is None else g.float() / scale
            for x, g in zip(used, found, strict=True)
        ]


class _GradientTap(Function):
    """The identity on a gradient."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, tap: Tap) -> Tensor:
        """The gradient as it is."""
        ctx.tap = tap
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, derivative: Tensor) -> tuple[Tensor, None]:
        """The derivative as it comes."""
        ctx.tap.arrived_for_gradient(derivative)
        return derivative, None


def apply(function: Any, *arguments: Any) -> Tensor:
    """Apply a function of autograd."""
    out: Tensor = function.apply(*arguments)
    return out


def _plus_square(total: Tensor | None, x: Tensor) -> Tensor:
    square = x.detach().float().square()
    return square if total is None else total.add_(square)
