"""One training step of any model: how a batch is handed over and where the loss comes from.

A batch is what the model's forward takes: a tensor, a tuple (positional arguments) or a
mapping (keyword arguments). With a loss function it is a pair `(inputs, target)`, and the
loss is `loss(model(inputs), target)`. Without one the model itself returns the loss: as a
scalar tensor, as the entry or attribute `loss`, or as the first element of a tuple.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from qsync_opt.errors import CaptureError

Loss = Callable[[Any, Any], Tensor]


def leaves(value: object, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor inside tuples, lists and mappings, with its path such as `inputs.0`."""
    if isinstance(value, Tensor):
        yield path or "tensor", value
    elif isinstance(value, Mapping):
        for key in value:
            yield from leaves(value[key], f"{path}.{key}" if path else str(key))
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}.{index}" if path else str(index))


def to_device(value: Any, device: torch.device) -> Any:
    """The same structure with every tensor on `device`."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: to_device(item, device) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(to_device(item, device) for item in value)
    return value


class CallForm(Enum):
    """How inputs are handed over to a model."""

    NAMED = "as keyword arguments"
    POSITIONAL = "as positional arguments"
    WHOLE = "as one argument"


def call_form(model: nn.Module, inputs: Any) -> CallForm:
    """How a model takes inputs.

    A mapping becomes keyword arguments and a tuple positional ones where the signature of
    forward takes them; else they are handed over whole.
    """
    if isinstance(inputs, Mapping) and all(isinstance(key, str) for key in inputs):
        if _binds(model, (), inputs):
            return CallForm.NAMED
    elif isinstance(inputs, tuple) and _binds(model, inputs, {}):
        return CallForm.POSITIONAL
    return CallForm.WHOLE


def call_as(form: CallForm, model: Callable[..., Any], inputs: Any) -> Any:
    """The model's output for the inputs, handed over in a form."""
    if form is CallForm.NAMED:
        return model(**inputs)
    if form is CallForm.POSITIONAL:
        return model(*inputs)
    return model(inputs)


def call_model(model: nn.Module, inputs: Any) -> Any:
    """The model's output for the inputs, handed over as `call_form` says."""
    return call_as(call_form(model, inputs), model, inputs)


def _binds(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def split_batch(batch: Any, loss: Loss | None) -> tuple[Any, Any]:
    """What goes into the model and what the loss compares its output with.

    Raises:
        CaptureError: a loss function is given and the batch is no pair.
    """
    if loss is None:
        return batch, None
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise CaptureError(
            f"a loss function needs a batch (inputs, target), and this one is a {_describe(batch)}",
            "Give a pair, or give no loss and let the model return it",
        )
    return batch[0], batch[1]


def _describe(value: object) -> str:
    name = type(value).__name__
    return f"{name} of {len(value)}" if isinstance(value, (tuple, list, Mapping)) else name


def loss_of(output: Any, target: Any, loss: Loss | None) -> Tensor:
    """The scalar that the step differentiates.

    Raises:
        CaptureError: there is no loss, or it is not a scalar, or it needs no gradient, or it
            is not finite.
    """
    value = _returned_loss(output) if loss is None else loss(output, target)
    if not isinstance(value, Tensor):
        raise CaptureError(
            f"the loss is a {type(value).__name__} and must be a tensor",
            "Let build() return a loss(output, target) that gives a scalar tensor",
        )
    if value.numel() != 1:
        raise CaptureError(
            f"the loss has shape {list(value.shape)} and must be a scalar",
            "Reduce it, for example with .mean()",
        )
    if not value.requires_grad:
        raise CaptureError(
            "the loss needs no gradient: no trained parameter reaches it",
            "Check requires_grad of the parameters, and that forward neither detaches nor runs"
            " under no_grad",
        )
    return value


def _returned_loss(output: Any) -> Any:
    if isinstance(output, Mapping):
        found = output.get("loss")
    elif isinstance(output, (tuple, list)) and not hasattr(output, "loss"):
        found = output[0] if output else None
    else:
        found = getattr(output, "loss", output)
    if found is None:
        raise CaptureError(
            f"the model returned a {type(output).__name__} without a loss",
            "Put the labels into the batch, or let build() return a loss(output, target)",
        )
    return found
