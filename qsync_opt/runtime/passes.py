"""Forward and backward of some samples on one rank, with what every step of a job shares."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from qsync_opt.kernels.rounding import Rounding
from qsync_opt.measure.step import (
    CallForm,
    Loss,
    call_as,
    call_form,
    loss_of,
    split_batch,
    to_device,
)
from qsync_opt.runtime.batches import Batches
from qsync_opt.runtime.casts import cast_floats
from qsync_opt.runtime.convert import sessions_of
from qsync_opt.runtime.parameters import TrainParameters


class Labels(Protocol):
    """Puts names on what a step runs; see `tracing`."""

    def forward(self) -> AbstractContextManager[object]:
        """Of the forward that runs inside."""

    def loss(self) -> AbstractContextManager[object]:
        """Of the loss that runs inside."""

    def other(self, name: str) -> AbstractContextManager[object]:
        """Of anything else."""


class _NoLabels:
    """What a step has that nobody traces."""

    _nothing = nullcontext()

    def forward(self) -> AbstractContextManager[object]:
        return self._nothing

    def loss(self) -> AbstractContextManager[object]:
        return self._nothing

    def other(self, name: str) -> AbstractContextManager[object]:
        return self._nothing


NO_LABELS: Labels = _NoLabels()


class Pass:
    """Runs forward and backward.

    Args:
        model: converted or not, on its device.
        batches: where samples come from.
        loss: None if the model returns it.
        parameters: of the job.

    Attributes:
        labels: put names on what runs, where somebody traces.
        called: what is called with the inputs: the model, or what it is wrapped in.
    """

    def __init__(
        self, model: nn.Module, *, batches: Batches, loss: Loss | None, parameters: TrainParameters
    ) -> None:
        self.labels: Labels = NO_LABELS
        self.called: Callable[..., Any] = model
        self._model = model
        self._device = next(model.parameters()).device
        self._batches = batches
        self._loss = loss
        self._draws = parameters.rounding is Rounding.STOCHASTIC
        self._autocast = parameters.autocast_dtype()
        self._sessions = sessions_of(model)
        self._forms: dict[object, CallForm] = {}

    def precisions_changed(self) -> None:
        """Take note that the model was converted anew."""
        self._sessions = sessions_of(self._model)

    def run(self, step: int, rows: range, *, count: int, factor: float) -> Tensor:
        """Forward and backward of samples.

        Args:
            step: whose samples.
            rows: their numbers in the global batch.
            count: a number that no other pass has, for the random bits of rounding.
            factor: of the loss that is differentiated.

        Returns:
            The mean loss, without the factor.
        """
        batch = to_device(self._batches(step, rows), self._device)
        inputs, target = split_batch(batch, self._loss)
        if self._draws:
            for session in self._sessions:
                session.step = count
        with self._casting(), self.labels.forward():
            output = call_as(self._form(inputs), self.called, inputs)
        with self.labels.loss():
            if self._loss is not None:
                output = cast_floats(output, torch.float32)
            loss = loss_of(output, target, self._loss)
        (loss if factor == 1.0 else loss * factor).backward()  # type: ignore[no-untyped-call]
        return loss

    def _form(self, inputs: Any) -> CallForm:
        """How to call is told from the signature, which takes longer to read than to keep."""
        key: object = type(inputs)
        if isinstance(inputs, Mapping):
            key = tuple(inputs)
        elif isinstance(inputs, tuple):
            key = len(inputs)
        if key not in self._forms:
            self._forms[key] = call_form(self._model, inputs)
        return self._forms[key]

    def _casting(self) -> AbstractContextManager[object]:
        if self._autocast is None:
            return nullcontext()
        return torch.autocast(self._device.type, self._autocast)


@contextmanager
def leaving_no_trace(model: nn.Module) -> Iterator[None]:
    """Run passes inside that change nothing: buffers and random numbers are put back.

    Gradients are dropped, as at the beginning of a step.
    """
    device = next(model.parameters()).device
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    python, numpy = random.getstate(), np.random.get_state(legacy=True)
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        for parameter in model.parameters():
            parameter.grad = None
