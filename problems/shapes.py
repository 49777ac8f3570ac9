"""`Network`: the operators of a model with their shapes, worked out from its architecture alone.

A model is a list of `Layer`, in forward order, for one worker's batch. No tensor is made and
no framework is used: only the counts that a roofline needs (multiply-accumulates, elements,
parameters) and who reads and saves what, as torch.autocast and autograd have it:

- adjustable: convolutions, linear layers and batched products, which choose a precision;
- follower: batch norm, activations, additions, pooling, dropout, which take their inputs' dtype;
- fixed: layer norm, softmax, embeddings and losses, which autocast runs in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Role = Literal["adjustable", "follower", "fixed"]

_FIXED = ("input", "embedding", "layer_norm", "rms_norm", "softmax", "cross_entropy")
_PRODUCTS = ("conv2d", "linear", "matmul")
#: Kinds whose backward reads what the forward read.
_SAVES_INPUT = (*_PRODUCTS, "batch_norm", "layer_norm", "rms_norm", "gelu", "silu", "mul")
#: Kinds whose backward reads what the forward wrote.
_SAVES_OUTPUT = ("relu", "softmax", "cross_entropy")


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """One operator of a network, for one worker's batch.

    Attributes:
        name: unique name.
        kind: what it computes.
        reads: indices of the layers whose outputs it reads.
        input_elements: elements of all inputs together.
        output_elements: elements of its output.
        macs: multiply-accumulates of its output product; 0 for anything but a product.
        weight_elements: elements of the weight that its product reads.
        parameters: trainable elements that it owns (a tied weight counts once).
        mask_bytes: bytes kept for backward whatever the precision (dropout masks, indices).
        ranks: how many ranks a collective inside the model spans.
    """

    name: str
    kind: str
    reads: tuple[int, ...]
    input_elements: int
    output_elements: int
    macs: int = 0
    weight_elements: int = 0
    parameters: int = 0
    mask_bytes: int = 0
    ranks: int = 1

    @property
    def role(self) -> Role:
        """Who decides its precision: itself, its inputs, or nobody."""
        if self.kind in _PRODUCTS:
            return "adjustable"
        return "fixed" if self.kind in _FIXED else "follower"

    @property
    def saves_input(self) -> bool:
        """Whether its backward needs what it read."""
        return self.kind in _SAVES_INPUT or self.kind == "max_pool"

    @property
    def saves_output(self) -> bool:
        """Whether its backward needs what it wrote."""
        return self.kind in _SAVES_OUTPUT


@dataclass(kw_only=True)
class Network:
    """A model under construction, for a batch of `batch` samples.

    Attributes:
        name: name of the model.
        batch: samples that one worker handles in a step.
        layers: the operators, in forward order.
        groups: names of layers that share a precision because one kernel computes them.
        input_bytes: bytes of one batch of inputs and labels on the device.
    """

    name: str
    batch: int
    layers: list[Layer] = field(default_factory=list)
    groups: list[tuple[str, ...]] = field(default_factory=list)
    input_bytes: int = 0

    @property
    def parameters(self) -> int:
        """Trainable elements, tied ones once."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def macs(self) -> int:
        """Multiply-accumulates of one forward pass."""
        return sum(layer.macs for layer in self.layers)

    def add(
        self,
        name: str,
        kind: str,
        reads: Sequence[int],
        output_elements: int,
        *,
        macs: int = 0,
        weight_elements: int = 0,
        parameters: int = 0,
        mask_bytes: int = 0,
        ranks: int = 1,
    ) -> int:
        """Append a layer; returns its index. See `Layer` for the arguments."""
        self.layers.append(
            Layer(
                name=name,
                kind=kind,
                reads=tuple(reads),
                input_elements=sum(self.layers[index].output_elements for index in reads),
                output_elements=output_elements,
                macs=macs,
                weight_elements=weight_elements,
                parameters=parameters,
                mask_bytes=mask_bytes,
                ranks=ranks,
            )
        )
        return len(self.layers) - 1

    def linear(
        self, name: str, read: int, inputs: int, outputs: int, *, bias: bool, tied: bool = False
    ) -> int:
        """Append a linear layer over all rows of its input; a tied weight is not counted."""
        rows = self.layers[read].output_elements // inputs
        weight = inputs * outputs
        return self.add(
            name,
            "linear",
            [read],
            rows * outputs,
            macs=rows * weight,
            weight_elements=weight,
            parameters=(0 if tied else weight) + (outputs if bias else 0),
        )

    def pointwise(self, name: str, kind: str, reads: Sequence[int], parameters: int = 0) -> int:
        """Append an operator whose output has the shape of its first input."""
        elements = self.layers[reads[0]].output_elements
        mask = elements if kind == "dropout" else 0  # one byte an element
        return self.add(name, kind, reads, elements, parameters=parameters, mask_bytes=mask)
