"""Whole steps of a model with one precision throughout, unprofiled: what predictions answer to."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from qsync_opt.costs import OptimizerCosts, StepCosts
from qsync_opt.errors import ParameterError
from qsync_opt.graph import OperatorGraph
from qsync_opt.measure.clock import Clock, keep_busy, spread_of
from qsync_opt.measure.memory import tensor_bytes
from qsync_opt.measure.step import Loss, call_model, loss_of, split_batch
from qsync_opt.precision import Precision
from qsync_opt.runtime.availability import supported_precisions
from qsync_opt.runtime.casts import cast_floats
from qsync_opt.runtime.convert import convert, revert

#: Name -> how to make it. All of torch.optim that training here offers.
OPTIMIZERS: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-6),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-6),
}

_STEPS, _WARM_UP, _LEAST_S = 7, 3, 0.3
_MOST_STEPS = 50

#: Fewer steps than `_STEPS` will do where one takes longer than this.
_LONG_S, _FEW_STEPS = 0.3, 3

#: How much longer a GPU waits than the host took to launch a step before.
_HEAD_START = 1.2


class Step(Protocol):
    """One step of a model: seconds of forward and backward, and the host's."""

    def __call__(self, ahead_s: float = 0.0) -> tuple[float, float, float]:
        """Run it.

        Args:
            ahead_s: keep a GPU busy so long before the step, so that the host, if it takes no
                longer than this, is ahead of it all the time. The seconds are the device's own
                then; without it a GPU also waits for the host. Nothing on a CPU.
        """


def uniform_plan(
    graph: OperatorGraph, precision: Precision, available: frozenset[Precision]
) -> dict[str, Precision]:
    """Every adjustable operator at a precision, or at the nearest that it has.

    Where an operator has no 8-bit form, that is the 16-bit dtype that 8-bit products hand on.
    """
    half = Precision.BF16 if Precision.BF16 in available else Precision.FP16
    plan = {}
    for index in graph.adjustable:
        row = graph.operators[index]
        has = supported_precisions(row.kind) & available
        in_loss = row.module.split(".")[0] == "loss"
        wanted = [Precision.FP32] if in_loss else [precision, half, Precision.FP32]
        plan[row.name] = next(p for p in wanted if p in has)
    return plan


@contextmanager
def converted(
    model: nn.Module, graph: OperatorGraph, plan: Mapping[str, Precision]
) -> Iterator[None]:
    """The model at a plan, inside."""
    convert(model, plan, graph=graph)
    try:
        yield
    finally:
        revert(model)


def run_loss(model: nn.Module, inputs: Any, target: Any, loss: Loss | None) -> torch.Tensor:
    """The loss of a converted model: a loss outside of the model gets fp32, as fixed operators do.

    Args:
        model: converted or not.
        inputs: see `step.split_batch`.
        target: see there.
        loss: None if the model returns it.
    """
    output = call_model(model, inputs)
    if loss is not None:
        output = cast_floats(output, torch.float32)
    return loss_of(output, target, loss)


def step_of(model: nn.Module, batch: Any, loss: Loss | None, clock: Clock) -> Step:
    """One step of a model on the device of a clock; gradients are set to None first."""
    inputs, target = split_batch(batch, loss)
    is_cuda = clock.device.type == "cuda"

    def run(ahead_s: float = 0.0) -> tuple[float, float, float]:
        for parameter in model.parameters():
            parameter.grad = None
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)] if is_cuda else []  # type: ignore[no-untyped-call]
        clock.synchronize()
        if is_cuda and ahead_s > 0:
            keep_busy(ahead_s, clock.device)
        begin = clock.timer()
        if is_cuda:
            marks[0].record()
        value = run_loss(model, inputs, target, loss)
        middle = clock.timer()
        if is_cuda:
            marks[1].record()
        value.backward()  # type: ignore[no-untyped-call]
        end = clock.timer()
        if not is_cuda:
            return middle - begin, end - middle, end - begin
        marks[2].record()
        marks[2].synchronize()
        forward_s, backward_s = (
            first.elapsed_time(second) / 1e3
            for first, second in zip(marks, marks[1:], strict=False)
        )
        return forward_s, backward_s, end - begin

    return run


def warmed_up(step: Step) -> float:
    """Run a step some times; the seconds that the host should be ahead of a GPU with it."""
    hosts = [step()[2] for _ in range(_WARM_UP)]
    return _HEAD_START * min(hosts[1:])


def measure_step(
    step: Step, precision: Precision, device: torch.device, *, least_s: float = _LEAST_S
) -> StepCosts:
    """Time steps, after some that warm the device up.

    On a GPU the host is kept ahead, so that forward and backward are the device's own times.

    Args:
        step: see `step_of`.
        precision: for the record.
        device: where it runs.
        least_s: go on at least so long.
    """
    is_cuda = device.type == "cuda"
    if is_cuda:
        gc.collect()  # what others left behind is not this step's
        torch.cuda.empty_cache()
    ahead_s = warmed_up(step)
    if is_cuda:
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
    rows: list[tuple[float, float, float]] = []
    end = time.perf_counter() + least_s
    needed = _STEPS
    while len(rows) < needed or (time.perf_counter() < end and len(rows) < _MOST_STEPS):
        rows.append(step(ahead_s))
        needed = _FEW_STEPS if sum(rows[0]) > _LONG_S else _STEPS
    forward_s, backward_s, host_s = (
        statistics.median(column) for column in zip(*rows, strict=True)
    )
    if is_cuda:  # what was launched while the device was made to wait may have waited too
        host_s = statistics.median(step()[2] for _ in range(needed))
    peak = unused = 0
    if is_cuda:
        most = torch.cuda.max_memory_allocated(device)
        peak, unused = most - before, torch.cuda.max_memory_reserved(device) - most
    return StepCosts(
        precision=precision,
        forward_s=forward_s,
        backward_s=backward_s,
        spread=spread_of([forward + backward for forward, backward, _ in rows]),
        host_s=host_s,
        peak_bytes=peak,
        unused_bytes=unused,
    )


def measure_optimizer(graph: OperatorGraph, name: str, clock: Clock, unit: int) -> OptimizerCosts:
    """Time an optimizer on parameters of the graph's shapes.

    Args:
        graph: the graph.
        name: one of `OPTIMIZERS`.
        clock: of the device.
        unit: bytes that the allocator rounds up to.

    Raises:
        ParameterError: no such optimizer.
    """
    make = OPTIMIZERS.get(name)
    if make is None:
        raise ParameterError("optimizer", f"must be one of {', '.join(OPTIMIZERS)}", name)
    parameters = [
        nn.Parameter(torch.zeros(row.shape, device=clock.device))
        for row in graph.parameters
        if row.requires_grad
    ]
    if not parameters:
        return OptimizerCosts(name=name, step_s=0.0, spread=0.0, state_bytes=0)
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer = make(parameters)
    timing = clock.time(optimizer.step)
    return OptimizerCosts(
        name=name,
        step_s=timing.time_s,
        spread=timing.spread,
        state_bytes=tensor_bytes(optimizer.state, unit, clock.device.type),
        host_s=timing.host_s,
    )
