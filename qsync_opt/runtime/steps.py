"""One training step of a rank: its micro-batches, the reduction, the optimizer, and the clock."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from qsync_opt.errors import TrainError
from qsync_opt.measure.step import Loss
from qsync_opt.plan import PrecisionPlan
from qsync_opt.runtime.batches import Batches, MicroBatch
from qsync_opt.runtime.bucket_bits import PlannedBits
from qsync_opt.runtime.communication import parse_communication, ring_bytes
from qsync_opt.runtime.distributed import Ranks
from qsync_opt.runtime.host_reduction import Reduction, goes_by_host
from qsync_opt.runtime.parameters import TrainParameters
from qsync_opt.runtime.passes import Labels, Pass, leaving_no_trace
from qsync_opt.runtime.quantized_comm import GradientHook, compress_gradients, send_at_bits
from qsync_opt.runtime.quantized_sharding import QuantizedSharding
from qsync_opt.runtime.scaling import LossScale
from qsync_opt.runtime.sharded_model import ShardedModel
from qsync_opt.runtime.shared_reduction import reduce_beside

#: How DDP begins to say that a gradient it waited for did not come.
_UNUSED = "Expected to have finished reduction in the prior iteration"


@dataclass(frozen=True, kw_only=True)
class Taken:
    """A step that was launched; on a GPU its numbers come later.

    Attributes:
        step: number of the step.
        loss: mean over the rank's samples, a scalar on the CPU; there once the step has ended.
        loss_scale: factor of the loss.
        skipped: whether gradients overflowed.
        sent_bytes: gradients, and sharded weights, that this rank sent.
        marks: when it began, had its last gradient, had them all reduced, and ended.
    """

    step: int
    loss: Tensor
    loss_scale: float
    skipped: bool
    sent_bytes: int
    marks: Sequence[Any]

    @property
    def has_ended(self) -> bool:
        """Whether its numbers are there."""
        end = self.marks[-1]
        return isinstance(end, float) or bool(end.query())

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
        sharded: what `model` is the sharded copy of; None where ranks have whole replicas.
        bits: of the plan's buckets; None where all are sent alike.

    Attributes:
        hook: that codes what is sent; None where it is sent as it is.

    Raises:
        ParameterError: what `communication` asks for is not for DDP.
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
        sharded: ShardedModel | None = None,
        bits: PlannedBits | None = None,
    ) -> None:
        self._model = model
        self._sharded = sharded
        self._ranks = ranks
        self._parts = parts
        self._samples = sum(len(part.rows) for part in parts)
        self._optimizer = optimizer
        self._scale = scale
        self._schedule = parameters.schedule
        self._rates = [group["lr"] for group in optimizer.param_groups]
        self._pass = Pass(model, batches=batches, loss=loss, parameters=parameters)
        self._wrapped: DistributedDataParallel | None = None
        self.hook: GradientHook | QuantizedSharding | None = None
        self._ready: Any = None
        self._handle: Any = None
        self._bits = bits
        self._reduction: Reduction | None = None
        self._ring_bytes = 0  # what DDP sends in a step where no hook counts it
        if sharded is not None:
            self.hook = sharded.sharding
        elif ranks.world > 1:
            device = ranks.device
            self._wrapped = DistributedDataParallel(
                model,
                device_ids=[device.index] if device.type == "cuda" else None,
                gradient_as_bucket_view=True,
                find_unused_parameters=parameters.find_unused_parameters,
            )
            self._pass.called = self._wrapped
            trained = [p for p in model.parameters() if p.requires_grad]
            size_bytes = sum(p.numel() * p.element_size() for p in trained)
            self._ring_bytes = ring_bytes(size_bytes, ranks.world)
            if bits is not None:
                self.hook = send_at_bits(self._wrapped, bits, seed=parameters.seed)
            elif parameters.communication is not None:
                wanted = parse_communication(parameters.communication)
                self.hook = compress_gradients(self._wrapped, wanted, seed=parameters.seed)
            if self.hook is None and goes_by_host(trained[0]):
                self._reduction = reduce_beside(self._wrapped, device)

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
        with leaving_no_trace(self._model):
            self._run(step, 0, self._parts[0])
        if self.hook is not None:
            self.hook.load_state({})  # what rounding took away here is of no step
        for handle in handles:
            handle.remove()
        if last:
            watched: Any = last[-1]
            self._handle = watched.register_post_accumulate_grad_hook(self._on_last_gradient)

    def converted_anew(self) -> None:
        """Take note that the model was converted, at the same plan or at another."""
        self._pass.precisions_changed()

    def plan_changed(self, plan: PrecisionPlan) -> None:
        """Take note that the model was converted anew, and send at the bits of the new plan."""
        self.converted_anew()
        if self._bits is not None and isinstance(self.hook, GradientHook):
            self.hook.change(self._bits.at(plan.communication))

    def label(self, labels: Labels) -> None:
        """Put names on what steps run from now on."""
        self._pass.labels = labels

    def close(self) -> None:
        """Leave the model without hooks."""
        if self._handle is not None:
            self._handle.remove()
        for part in (self._reduction, self.hook):
            if isinstance(part, (Reduction, GradientHook)):
                part.close()

    def take(self, step: int) -> Taken:
        """Take one step."""
        with self._pass.labels.other("step"):
            return self._take(step)

    def _take(self, step: int) -> Taken:
        factor = 1.0 if self._schedule is None else self._schedule(step)
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor  # not that of a checkpoint: it may have been changed
        self._ready = None
        begin = self._mark()
        sent_before = 0 if self.hook is None else self.hook.sent_bytes
        scale = 1.0 if self._scale is None else self._scale.scale
        if isinstance(self.hook, GradientHook):
            self.hook.begin(step, scale)
        elif self.hook is not None:
            self.hook.begin(step * len(self._parts))  # it counts forward passes
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
        is_taken = self._scale is None or self._scale.unscale(self._gradients())
        if is_taken:
            with self._pass.labels.other("optimizer"):
                self._optimizer.step()
        elif isinstance(self.hook, GradientHook):
            self.hook.leave_out()
        ready = reduced if self._ready is None else self._ready
        sent = self._ring_bytes if self.hook is None else self.hook.sent_bytes - sent_before
        return Taken(
            step=step,
            loss=_on_host(cast(Tensor, total)),
            loss_scale=scale,
            skipped=not is_taken,
            sent_bytes=sent,
            marks=(begin, ready, reduced, self._mark()),
        )

    def _run(self, step: int, number: int, part: MicroBatch) -> Tensor:
        """Forward and backward of a micro-batch; its mean loss."""
        factor = part.weight * (1.0 if self._scale is None else self._scale.scale)
        count = step * len(self._parts) + number
        try:
            return self._pass.run(step, part.rows, count=count, factor=factor)
        except RuntimeError as error:
            if _UNUSED not in str(error):
                raise
            raise TrainError(
                "the model leaves parameters out of a step, and ranks wait for their gradients",
                "Give find_unused_parameters (on the command line --find-unused-parameters)",
            ) from error

    def _gradients(self) -> list[Tensor]:
        found = [p.grad for p in self._model.parameters() if p.grad is not None]
        return [grad.to_local() if isinstance(grad, DTensor) else grad for grad in found]

    def _without_reduction(self, is_early: bool) -> AbstractContextManager[object]:
        if self._sharded is not None:
            self._sharded.module.set_requires_gradient_sync(not is_early)
        if not is_early or self._wrapped is None:
            return nullcontext()
        return cast(AbstractContextManager[object], self._wrapped.no_sync())

    def _on_last_gradient(self, parameter: Tensor) -> None:
        self._ready = self._mark()

    def _mark(self) -> Any:
        if self._ranks.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._ranks.device))
        return event


def _on_host(value: Tensor) -> Tensor:
    """A copy in the memory of the host, on its way.

    Reading the tensor itself would wait for all that was launched since, and the GPU would
    then wait for the host.
    """
    if value.device.type != "cuda":
        return value
    copy = torch.empty((), dtype=value.dtype, pin_memory=True)
    return copy.copy_(value, non_blocking=True)


def _seconds(start: Any, end: Any) -> float:
    if isinstance(start, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
