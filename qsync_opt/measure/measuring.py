"""`measure`: everything that a step of a graph costs on the device at hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import distributed, nn

from qsync_opt.costs import (
    AS_DTYPE,
    LARGEST_SPREAD,
    AllReduceCosts,
    DeviceCosts,
    ElementCosts,
    GradientBucket,
    OperatorCosts,
    OptimizerCosts,
    StepCosts,
    Unavailable,
)
from qsync_opt.errors import MeasureError, ParameterError, QsyncError
from qsync_opt.graph import OperatorGraph, Role
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
from qsync_opt.measure.operators import OperatorMeasurement, OperatorMeter
from qsync_opt.measure.provenance import provenance_of
from qsync_opt.measure.step import Loss
from qsync_opt.measure.uniform import (
    converted,
    measure_optimizer,
    measure_step,
    step_of,
    uniform_plan,
)
from qsync_opt.precision import HANDED_ON, Precision
from qsync_opt.runtime.availability import available_precisions, supported_precisions
from qsync_opt.runtime.casts import half_dtype
from qsync_opt.runtime.host_memory import keep_freed_memory

#: Spreads of what takes less than this share of the whole do not matter.
_NEGLIGIBLE = 0.005

_WORST_SHOWN = 3


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
        self._entries = self._operator_entries()
        self._sizes = element_counts(graph)
        self._done = 0
        steps = len(self._precisions) + 1 if trained is not None else 0
        self._total = len(self._entries) + len(self._sizes) + steps + 2

    def run(self) -> DeviceCosts:
        try:
            costs = self._run()
        finally:
            self._notebook.close()  # what was measured is not lost
        return costs

    def _run(self) -> DeviceCosts:
        operators = self._operators()
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
            unavailable=tuple(self._unavailable),
            warnings=tuple(self._warnings),
            provenance=provenance_of(self._graph, self._device),
        )

    # Operators

    def _handed_on(self, precision: Precision) -> Precision:
        return self._half if precision.output is not precision.storage else precision.output

    def _operator_entries(self) -> dict[tuple[int, Precision], int]:
        """What is measured: (signature, precision) -> an operator of that signature."""
        entries: dict[tuple[int, Precision], int] = {}
        for index, row in enumerate(self._graph.operators):
            for precision in self._precisions:
                if row.role is Role.FIXED and precision is not Precision.FP32:
                    continue
                if row.role is Role.FOLLOWER and precision not in self._dtypes:
                    continue
                entries.setdefault((row.signature, precision), index)
        return entries

    def _operators(self) -> OperatorCosts:
        meter = OperatorMeter(self._graph, self._clock, self._dtypes)
        found: dict[tuple[int, Precision], OperatorMeasurement] = {}
        for (signature, precision), operator in self._entries.items():
            row = self._graph.operators[operator]
            self._tell(f"{row.kind} of {row.name} at {precision}")
            try:
                found[signature, precision] = OperatorMeasurement.from_list(
                    self._notebook.numbers(
                        f"operator {signature} {precision}",
                        lambda o=operator, p=precision: self._take(meter, o, p),  # type: ignore[misc]
                    )
                )
            except Refusal as refusal:
                if precision is Precision.FP32:
                    raise MeasureError(
                        f"{row.kind} of {row.name} cannot be run in fp32: {refusal}",
                        "Register what it uses with torch.library, or capture a smaller batch",
                    ) from None
                self._unavailable.append(
                    Unavailable(signature=signature, precision=precision, reason=str(refusal))
                )
        self._again(meter, found)
        return self._tables(found)

    def _take(self, meter: OperatorMeter, operator: int, precision: Precision) -> list[float]:
        """The numbers of one operator.

        Raises:
            Refusal: it has no form at this precision, ran out of memory, or is refused.
        """
        row = self._graph.operators[operator]
        if row.role is Role.ADJUSTABLE and precision not in supported_precisions(row.kind):
            raise Refusal(f"{row.kind} has no form at {precision}")
        try:
            return meter.measure(operator, precision).to_list()
        except QsyncError as error:
            raise Refusal(str(error)) from None
        except (RuntimeError, TypeError, ValueError, NotImplementedError, AttributeError) as error:
            short = (str(error).strip() or type(error).__name__).splitlines()[0]
            if isinstance(error, torch.OutOfMemoryError) or "not enough memory" in short:
                short = f"out of memory: {short}"
            raise Refusal(short) from None
        finally:
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    def _again(
        self, meter: OperatorMeter, found: dict[tuple[int, Precision], OperatorMeasurement]
    ) -> None:
        """Measure again, with more time between, what was disturbed; tell what stays disturbed."""
        total = sum(row.forward_s + row.backward_s for row in found.values())
        for key in [key for key, row in found.items() if _is_disturbed(row, total)]:
            operator = self._entries[key]
            with suppress(Refusal):
                numbers = self._take(meter, operator, key[1])
                once_more = OperatorMeasurement.from_list(numbers)
                if _worst(once_more) < _worst(found[key]):
                    found[key] = once_more
                    self._notebook.put(f"operator {key[0]} {key[1]}", numbers)
        disturbed = [key for key, row in found.items() if _is_disturbed(row, total)]
        if disturbed:
            disturbed.sort(key=lambda key: -_worst(found[key]))
            worst = ", ".join(
                f"{self._graph.operators[self._entries[key]].name} at {key[1]}"
                f" {_worst(found[key]):.0%}"
                for key in disturbed[:_WORST_SHOWN]
            )
            self._warnings.append(
                f"{len(disturbed)} of {len(found)} timings spread by more than"
                f" {LARGEST_SPREAD:.0%} ({worst}): the device was busy; measure again alone"
            )

    def _tables(self, found: Mapping[tuple[int, Precision], OperatorMeasurement]) -> OperatorCosts:
        shape = (len(self._graph.signatures), len(self._precisions))
        tables: dict[str, Any] = {}
        for name in OperatorCosts.__dataclass_fields__:
            if name == "input_cast_s":
                tables[name] = np.full((*shape, len(HANDED_ON)), np.nan)
            elif name.endswith("bytes"):
                empty = AS_DTYPE if name == "input_bytes" else 0
                tables[name] = np.full(shape, empty, dtype=np.int64)
            else:
                tables[name] = np.full(shape, np.nan)
        for (signature, precision), row in found.items():
            column = self._precisions.index(precision)
            for name, table in tables.items():
                table[signature, column] = getattr(row, name)
        return OperatorCosts(**tables)

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
    parts = (graph.sha256, row.device, row.threads, row.share, row.driver, row.versions["torch"])
    return " ".join(map(str, (*parts, *precisions, optimizer)))


def _columns(
    precisions: Iterable[Precision] | None, has: frozenset[Precision]
) -> tuple[Precision, ...]:
    wanted = set(has if precisions is None else precisions) | {Precision.FP32}
    for precision in wanted - has:
        known = ", ".join(p for p in Precision if p in has)
        raise ParameterError("precisions", f"must be of {known}, which the device has", precision)
    return tuple(p for p in Precision if p in wanted)


def _worst(row: OperatorMeasurement) -> float:
    return max(row.forward_spread, row.backward_spread)


def _is_disturbed(row: OperatorMeasurement, total_s: float) -> bool:
    return any(
        spread > LARGEST_SPREAD and time_s > _NEGLIGIBLE * total_s
        for time_s, spread in (
            (row.forward_s, row.forward_spread),
            (row.backward_s, row.backward_spread),
        )
    )


def _optimizer_list(costs: OptimizerCosts) -> list[float]:
    return [costs.step_s, costs.spread, float(costs.state_bytes), costs.host_s]
