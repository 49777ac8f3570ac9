"""`measure`: everything that a step of a graph costs on the device at hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import distributed, nn

from qsync_opt.costs import (
    AllReduceCosts,
    DeviceCosts,
    ElementCosts,
    GradientBucket,
    OptimizerCosts,
    StepCosts,
    Unavailable,
)
from qsync_opt.errors import MeasureError, ParameterError
from qsync_opt.graph import OperatorGraph
from qsync_opt.measure.casts import element_counts, measure_elements
from qsync_opt.measure.clock import Clock
from qsync_opt.measure.communication import (
    code_bits,
    measure_all_reduce,
    read_buckets,
    sizes_to_measure,
)
from qsync_opt.measure.memory import CUDA_ROUNDING_BYTES, fixed_memory
from qsync_opt.measure.notebook import Notebook, Refusal
from qsync_opt.measure.provenance import provenance_of
from qsync_opt.measure.step import Loss
from qsync_opt.measure.survey import OperatorSurvey
from qsync_opt.measure.uniform import (
    converted,
    measure_optimizer,
    measure_step,
    step_of,
    uniform_plan,
)
from qsync_opt.precision import HANDED_ON, Precision
from qsync_opt.runtime.availability import available_precisions
from qsync_opt.runtime.casts import half_dtype
from qsync_opt.runtime.host_memory import keep_freed_memory
from qsync_opt.runtime.product_check import require_right_products


@dataclass(frozen=True, kw_only=True)
class MeasureProgress:
    """How far a measurement is.

    Attributes:
        done, total: things to measure.
        what: the one that begins now.
    """

    done: int
    total: int
    what: str


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """What whole steps are run with.

    Attributes:
        model: that the graph was captured from, on the device; it is left as it is, except
            that gradients are dropped and buffers go on.
        batch, loss: see `step`.
    """

    model: nn.Module
    batch: Any
    loss: Loss | None


def measure(
    graph: OperatorGraph,
    *,
    trained: TrainedModel | None = None,
    device: torch.device | str = "cpu",
    precisions: Iterable[Precision] | None = None,
    optimizer: str = "adamw",
    group: Any = None,
    codes: Sequence[int] = (),
    clock: Clock | None = None,
    notebook: Notebook | None = None,
    progress: Callable[[MeasureProgress], None] | None = None,
) -> DeviceCosts:
    """Measure every operator, cast, bucket and step of a graph on one device.

    Equal signatures are measured once. What the device lacks, and what runs out of memory or
    is refused by torch at one precision, is left out with the reason.

    On a CPU the process keeps the memory that it frees from here on, as `train` has it do.

    Args:
        graph: the graph.
        trained: the model; without it neither buckets nor whole steps are measured.
        device: where; the graph's rules of promotion are those of its type.
        precisions: columns; default: all that the device has.
        optimizer: one of `uniform.OPTIMIZERS`.
        group: process group on which all-reduces are timed (every rank of it must call this);
            None for the default group, and none where there is no default group.
        codes: bits at which averages of gradients are timed there too.
        clock: of the device; default: one that tries as hard as is usual.
        notebook: what is known from an interrupted measurement, and who keeps it.
        progress: called before each thing that is measured.

    Raises:
        MeasureError: an operator that cannot be run even in fp32, or a graph for another type
            of device.
        KernelError: the device multiplies wrong in one of the precisions.
        ParameterError: an unknown optimizer, a precision that is not available, or bits that
            nothing is sent at.
    """
    return _Measurement(
        graph,
        trained,
        torch.device(device),
        precisions,
        optimizer,
        group,
        code_bits(codes),
        clock,
        notebook or Notebook(),
        progress,
    ).run()


class _Measurement:
    """One run of `measure`; see there."""

    def __init__(
        self,
        graph: OperatorGraph,
        trained: TrainedModel | None,
        device: torch.device,
        precisions: Iterable[Precision] | None,
        optimizer: str,
        group: Any,
        codes: tuple[int, ...],
        clock: Clock | None,
        notebook: Notebook,
        progress: Callable[[MeasureProgress], None] | None,
    ) -> None:
        if graph.provenance.device_type != device.type:
            raise MeasureError(
                f"the graph was captured on {graph.provenance.device_type}, and {device.type} is"
                " to be measured: which operators follow their inputs differs",
                f"Capture the model with device {device.type}",
            )
        if device.type == "cpu":
            keep_freed_memory()
        self._graph, self._trained, self._device = graph, trained, device
        self._clock = clock or Clock(device)
        self._group, self._notebook, self._progress = group, notebook, progress
        self._optimizer, self._codes = optimizer, codes
        self._has = available_precisions(device)
        self._precisions = _columns(precisions, self._has)
        self._half = Precision.BF16 if half_dtype(device) is torch.bfloat16 else Precision.FP16
        outputs = {self._handed_on(p) for p in self._precisions}
        self._dtypes = tuple(dtype for dtype in HANDED_ON if dtype in outputs)
        self._unavailable: list[Unavailable] = [
            Unavailable(signature=None, precision=p, reason=f"{device} does not have it")
            for p in Precision
            if p not in self._has
        ]
        self._warnings: list[str] = []
        self._survey = OperatorSurvey(
            graph, self._clock, self._precisions, self._dtypes, self._notebook, self._tell
        )
        self._sizes = element_counts(graph)
        self._done = 0
        steps = len(self._precisions) + 1 if trained is not None else 0
        self._total = len(self._survey) + len(self._sizes) + steps + 2

    def run(self) -> DeviceCosts:
        try:
            costs = self._run()
        finally:
            self._notebook.close()  # what was measured is not lost
        return costs

    def _run(self) -> DeviceCosts:
        require_right_products(self._device, self._precisions)
        operators = self._survey.run()
        casts = self._casts()
        buckets, steps = self._buckets(), self._steps()
        unit = CUDA_ROUNDING_BYTES if self._device.type == "cuda" else 1
        self._tell("optimizer")
        made = self._noted(
            "optimizer with host",
            lambda: _optimizer_list(
                measure_optimizer(self._graph, self._optimizer, self._clock, unit)
            ),
        )
        self._tell("memory")
        return DeviceCosts(
            graph_sha256=self._graph.sha256,
            precisions=self._precisions,
            half=self._half,
            operators=operators,
            casts=casts,
            optimizer=OptimizerCosts(
                name=self._optimizer,
                step_s=made[0],
                spread=made[1],
                state_bytes=int(made[2]),
                host_s=made[3],
            ),
            memory=fixed_memory(self._graph, self._device),
            buckets=buckets,
            all_reduce=self._all_reduce(buckets),
            steps=steps,
            unavailable=(*self._unavailable, *self._survey.unavailable),
            warnings=(*self._survey.warnings, *self._warnings),
            provenance=provenance_of(self._graph, self._device),
        )

    def _handed_on(self, precision: Precision) -> Precision:
        return self._half if precision.output is not precision.storage else precision.output

    # The rest

    def _casts(self) -> ElementCosts:
        casts, additions, copies = [], [], []
        count = len(HANDED_ON)
        for size in self._sizes:
            self._tell(f"casts of {size} elements")
            flat = self._noted(f"elements {size}", lambda s=size: self._element_list(s))  # type: ignore[misc]
            values = [math.nan if value < 0 else value for value in flat]
            casts.append([values[i * count : (i + 1) * count] for i in range(count)])
            additions.append(values[count**2 : count**2 + count])
            copies.append(values[-1])
        return ElementCosts(
            elements=np.array(self._sizes),
            cast_s=np.array(casts),
            add_s=np.array(additions),
            copy_s=np.array(copies),
        )

    def _element_list(self, size: int) -> list[float]:
        casts, additions, copy = measure_elements(self._clock, size, self._dtypes)
        flat = [*(value for row in casts for value in row), *additions, copy]
        return [-1.0 if math.isnan(value) else value for value in flat]

    def _buckets(self) -> tuple[GradientBucket, ...]:
        if self._trained is None:
            return ()
        self._tell("buckets")
        trained, graph = self._trained, self._graph
        used = {graph.parameters[index].name for index in graph.gradient_order}
        unused = any(row.requires_grad and row.name not in used for row in graph.parameters)
        return read_buckets(
            trained.model, trained.batch, trained.loss, find_unused_parameters=unused
        )

    def _steps(self) -> tuple[StepCosts, ...]:
        if self._trained is None:
            return ()
        trained, rows = self._trained, []
        step = step_of(trained.model, trained.batch, trained.loss, self._clock)
        for precision in self._precisions:
            self._tell(f"a step at {precision}")
            plan = uniform_plan(self._graph, precision, self._has)
            try:
                with converted(trained.model, self._graph, plan):
                    rows.append(measure_step(step, precision, self._device))
                lost = _not_finite(trained.model)
                if lost is not None:
                    reason = f"the gradient of {lost} is not finite in a step of it throughout"
                    self._warnings.append(f"{precision}: {reason}")
            except torch.OutOfMemoryError as error:
                reason = f"a whole step runs out of memory: {str(error).splitlines()[0]}"
                self._warnings.append(f"{precision}: {reason}")
            for parameter in trained.model.parameters():
                parameter.grad = None
        return tuple(rows)

    def _all_reduce(self, buckets: tuple[GradientBucket, ...]) -> AllReduceCosts | None:
        if self._group is None and not (
            distributed.is_available() and distributed.is_initialized()
        ):
            return None
        sizes = sizes_to_measure(buckets)
        return measure_all_reduce(sizes, self._device, self._group, self._codes)

    def _noted(self, name: str, take: Callable[[], list[float]]) -> list[float]:
        try:
            return self._notebook.numbers(name, take)
        except Refusal as refusal:
            raise MeasureError(
                f"{name} cannot be measured: {refusal}", "Measure on a device with more memory"
            ) from None

    def _tell(self, what: str) -> None:
        if self._progress is not None:
            self._progress(MeasureProgress(done=self._done, total=self._total, what=what))
        self._done += 1


def measurement_key(
    graph: OperatorGraph, device: torch.device, precisions: Iterable[Precision], optimizer: str
) -> str:
    """What must agree for a measurement to go on where another was interrupted."""
    row = provenance_of(graph, device)
    versions = row.versions["torch"], row.versions["layers"]
    parts = (graph.sha256, row.device, row.threads, row.share, row.driver, *versions)
    return " ".join(map(str, (*parts, *precisions, optimizer)))


def _columns(
    precisions: Iterable[Precision] | None, has: frozenset[Precision]
) -> tuple[Precision, ...]:
    wanted = set(has if precisions is None else precisions) | {Precision.FP32}
    for precision in wanted - has:
        known = ", ".join(p for p in Precision if p in has)
        raise ParameterError("precisions", f"must be of {known}, which the device has", precision)
    return tuple(p for p in Precision if p in wanted)


def _optimizer_list(costs: OptimizerCosts) -> list[float]:
    return [costs.step_s, costs.spread, float(costs.state_bytes), costs.host_s]


def _not_finite(model: nn.Module) -> str | None:
    """The first parameter whose gradient has an infinity or a NaN; None where all are numbers."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
            return name
    return None
