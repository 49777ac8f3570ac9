"""One training step of a rank: its micro-batches, the reduction, the optimizer, and the clock."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from qsync_opt.kernels.rounding import Rounding
from qsync_opt.measure.step import Loss, call_model, loss_of, split_batch, to_device
from qsync_opt.runtime.batches import Batches, MicroBatch
from qsync_opt.runtime.casts import cast_floats
from qsync_opt.runtime.convert import set_step
from qsync_opt.runtime.distributed import Ranks
from qsync_opt.runtime.parameters import TrainParameters
from qsync_opt.runtime.scaling import LossScale


@dataclass(frozen=True, kw_only=True)
class Taken:
    """A step that was launched; on a GPU its numbers come later.

    Attributes:
        step: number of the step.
        loss: mean over the rank's samples, a scalar.
        loss_scale: factor of the loss.
        skipped: whether gradients overflowed.
        marks: when it began, had its last gradient, had them all reduced, and ended.
    """

    step: int
    loss: Tensor
    loss_scale: float
    skipped: bool
    marks: Sequence[Any]

    def times(self) -> tuple[float, float]:
        """Seconds of computing and of waiting; see `StepMetrics`."""
        begin, ready, reduced, end = self.marks
        return _seconds(begin, ready) + _seconds(reduced, end), _seconds(ready, reduced)


class Stepper:
    """Takes the steps of one rank.

    Args:
        model: converted, on its device.
        ranks: of the job.
        parts: micro-batches of this rank.
        batches: where samples come from.
        loss: None if the model returns it.
        optimizer: of the model's parameters.
        scale: None where no rank multiplies in fp16.
        parameters: of the job.
    """

    def __init__(
        self,
        model: nn.Module,
        ranks: Ranks,
        *,
        parts: Sequence[MicroBatch],
        batches: Batches,
        loss: Loss | None,
        optimizer: torch.optim.Optimizer,
        scale: LossScale | None,
        parameters: TrainParameters,
    ) -> None:
        self._model = model
        self._ranks = ranks
        self._parts = parts
        self._samples = sum(len(part.rows) for part in parts)
        self._batches = batches
        self._loss = loss
        self._optimizer = optimizer
        self._scale = scale
        self._schedule = parameters.schedule
        self._rates = [group["lr"] for group in optimizer.param_groups]
        self._draws = parameters.rounding is Rounding.STOCHASTIC
        self._autocast = parameters.autocast_dtype()
        self._called = _Called(model, model)
        self._wrapped: Any = None
        self._ready: Any = None
        self._handle: Any = None
        if ranks.world > 1:
            device = ranks.device
            self._wrapped = DistributedDataParallel(
                model,
                device_ids=[device.index] if device.type == "cuda" else None,
                gradient_as_bucket_view=True,
                find_unused_parameters=parameters.find_unused_parameters,
            )
            self._called = _Called(model, self._wrapped)

    def rehearse(self, step: int) -> None:
        """Run a step that changes nothing, before the first one.

        DDP forms its buckets anew after its first backward, and how a sum over ranks is rounded
        depends on the buckets: without this, a restarted job would round its first step
        unlike one that went on. It also tells which gradient comes last.
        """
        if self._wrapped is None:
            return
        last: list[nn.Parameter] = []
        handles = [
            cast(Any, parameter).register_post_accumulate_grad_hook(last.append)
            for parameter in self._model.parameters()
            if parameter.requires_grad
        ]
        buffers = [(buffer, buffer.clone()) for buffer in self._model.buffers()]
        devices = [self._ranks.device] if self._ranks.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            self._run(step, 0, self._parts[0])
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        self._optimizer.zero_grad(set_to_none=True)
        for handle in handles:
            handle.remove()
        if last:
            watched: Any = last[-1]
            self._handle = watched.register_post_accumulate_grad_hook(self._on_last_gradient)

    def close(self) -> None:
        """Leave the model without hooks."""
        if self._handle is not None:
            self._handle.remove()

    def take(self, step: int) -> Taken:
        """Take one step."""
        factor = 1.0 if self._schedule is None else self._schedule(step)
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor  # not that of a checkpoint: it may have been changed
        self._ready = None
        begin = self._mark()
        self._optimizer.zero_grad(set_to_none=True)
        total: Tensor | None = None
        for number, part in enumerate(self._parts):
            with self._without_reduction(number < len(self._parts) - 1):
                loss = self._run(step, number, part)
            share = loss.detach().float()
            if len(self._parts) > 1:
                share = share * (len(part.rows) / self._samples)
            total = share if total is None else total + share
        reduced = self._mark()
        scale = 1.0 if self._scale is None else self._scale.scale
        is_taken = self._scale is None or self._scale.unscale(self._gradients())
        if is_taken:
            self._optimizer.step()
        ready = reduced if self._ready is None else self._ready
        return Taken(
            step=step,
            loss=cast(Tensor, total),
            loss_scale=scale,
            skipped=not is_taken,
            marks=(begin, ready, reduced, self._mark()),
        )

    def _run(self, step: int, number: int, part: MicroBatch) -> Tensor:
        """Forward and backward of a micro-batch; its mean loss."""
        batch = to_device(self._batches(step, part.rows), self._ranks.device)
        inputs, target = split_batch(batch, self._loss)
        if self._draws:
            set_step(self._model, step * len(self._parts) + number)
        with self._casting():
            output = call_model(cast(nn.Module, self._called), inputs)
        if self._loss is not None:
            output = cast_floats(output, torch.float32)
        loss = loss_of(output, target, self._loss)
        factor = part.weight * (1.0 if self._scale is None else self._scale.scale)
        (loss if factor == 1.0 else loss * factor).backward()  # type: ignore[no-untyped-call]
        return loss

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self._model.parameters() if p.grad is not None]

    def _without_reduction(self, is_early: bool) -> AbstractContextManager[object]:
        if not is_early or self._wrapped is None:
            return nullcontext()
        return cast(AbstractContextManager[object], self._wrapped.no_sync())

    def _casting(self) -> AbstractContextManager[object]:
        if self._autocast is None:
            return nullcontext()
        return torch.autocast(self._ranks.device.type, self._autocast)

    def _on_last_gradient(self, parameter: Tensor) -> None:
        self._ready = self._mark()

    def _mark(self) -> Any:
        if self._ranks.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._ranks.device))
        return event


class _Called:
    """DDP takes any arguments; how to call is told from the signature of the model inside."""

    def __init__(self, model: nn.Module, wrapped: nn.Module) -> None:
        self.forward = model.forward
        self._wrapped = wrapped

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._wrapped(*args, **kwargs)


def _seconds(start: Any, end: Any) -> float:
    if isinstance(start, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
