"""Costs of one operator at one precision: time, the cast of its input, and memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from qsync_opt.costs import AS_DTYPE
from qsync_opt.graph import OperatorGraph, Origin
from qsync_opt.measure.calls import tensors_in
from qsync_opt.measure.clock import Clock, Timing
from qsync_opt.measure.execution import Execution, RecordingCache, handed
from qsync_opt.measure.memory import addresses, metered, saved_storages
from qsync_opt.measure.operands import DTYPES
from qsync_opt.precision import HANDED_ON, Precision

#: How much a step keeps from its forward, for graphs of any size.
_LEAST_KEPT_BYTES, _MOST_KEPT_BYTES = 2**20, 2**28
_MOST_HELD = 256

_NO_TIME = Timing(time_s=0.0, spread=0.0)


@dataclass(frozen=True, kw_only=True)
class OperatorMeasurement:
    """What `costs.OperatorCosts` holds of one signature at one precision."""

    forward_s: float
    backward_s: float
    forward_spread: float
    backward_spread: float
    forward_host_s: float
    backward_host_s: float
    input_cast_s: tuple[float, ...]
    input_bytes: int
    own_saved_bytes: int
    forward_transient_bytes: int
    backward_transient_bytes: int

    def to_list(self) -> list[float]:
        """As plain numbers, in the order of the fields; NaN as -1."""
        flat: list[float] = []
        for field in fields(self):
            value = getattr(self, field.name)
            flat += value if isinstance(value, tuple) else (value,)
        return [-1.0 if math.isnan(value) else value for value in flat]

    @staticmethod
    def from_list(values: list[float]) -> OperatorMeasurement:
        """The inverse of `to_list`."""
        casts = len(HANDED_ON)
        row: dict[str, Any] = dict(zip(_TIMES, values, strict=False))
        times = values[len(_TIMES) : len(_TIMES) + casts]
        row["input_cast_s"] = tuple(math.nan if value < 0 else value for value in times)
        row |= dict(zip(_SIZES, map(int, values[len(_TIMES) + casts :]), strict=True))
        return OperatorMeasurement(**row)


_TIMES = tuple(f.name for f in fields(OperatorMeasurement) if f.type == "float")
_SIZES = tuple(f.name for f in fields(OperatorMeasurement) if f.type == "int")


class OperatorMeter:
    """Measures operators of one graph on one device.

    Args:
        graph: the graph.
        clock: of the device.
        dtypes: what tensors are handed on in on this device.
    """

    def __init__(self, graph: OperatorGraph, clock: Clock, dtypes: tuple[Precision, ...]) -> None:
        self._graph, self._dtypes = graph, dtypes
        kept = sum(row.size_bytes for row in graph.saved if not row.resident)
        self._kept_bytes = min(max(kept, _LEAST_KEPT_BYTES), _MOST_KEPT_BYTES)
        # The backward writes about as much again: gradients of what was kept.
        step_bytes = 2 * kept
        self._clock = Clock(clock.device, clock.effort, clock.timer, step_bytes)
        patient = replace(clock.effort, samples=50, most_calls=100)
        self._patient = Clock(clock.device, patient, clock.timer, step_bytes)
        self._engine = self._empty_backward()
        self._hand_over = self._parameter_gradient()

    def measure(self, operator: int, precision: Precision) -> OperatorMeasurement:
        """Measure one operator at one precision.

        Raises:
            RuntimeError: torch refuses the call; out of memory is one of them.
        """
        device = self._clock.device
        execution = Execution(self._graph, operator, precision, device)
        made_bytes = _bytes_of(execution.forward())
        held = max(1, self._kept_bytes // max(made_bytes, 1))
        forward = self._clock.time(
            execution.forward,
            results=min(held, _MOST_HELD),
            warm=execution.just_written(self._clock.cache_bytes),
        )
        # What was overwritten in place has no backward any more.
        execution = Execution(self._graph, operator, precision, device)
        backward = _NO_TIME
        if execution.prepare_backward():
            timing = self._clock.time(execution.backward, warm=execution.gradients)
            backward = self._in_step(timing, len(execution.parameters))
        del execution
        memory = self._memory(operator, precision)
        return OperatorMeasurement(
            forward_s=forward.time_s,
            backward_s=backward.time_s,
            forward_spread=forward.spread,
            backward_spread=backward.spread,
            forward_host_s=forward.host_s,
            backward_host_s=backward.host_s,
            input_cast_s=tuple(self._input_cast(operator, precision, d) for d in HANDED_ON),
            **memory,
        )

    def _empty_backward(self) -> Timing:
        """A backward that computes nothing: what starting the engine takes."""
        leaf = torch.ones(1, device=self._clock.device).requires_grad_()
        out, gradient = handed(leaf), torch.ones(1, device=self._clock.device)
        return self._patient.time(
            lambda: torch.autograd.grad(out, out, gradient, retain_graph=True)
        )

    def _parameter_gradient(self) -> Timing:
        """What handing one gradient over to a parameter takes."""
        leaf = torch.ones(1, device=self._clock.device).requires_grad_()
        out, gradient = handed(leaf), torch.ones(1, device=self._clock.device)

        def run() -> None:
            leaf.grad = None
            torch.autograd.backward(out, gradient, retain_graph=True)

        found = self._patient.time(run)
        return Timing(
            time_s=max(0.0, found.time_s - self._engine.time_s),
            spread=found.spread,
            host_s=max(0.0, found.host_s - self._engine.host_s),
        )

    def _in_step(self, timing: Timing, parameters: int) -> Timing:
        """A backward as part of a step, which starts the engine once."""
        time_s = timing.time_s - self._engine.time_s + parameters * self._hand_over.time_s
        host_s = timing.host_s - self._engine.host_s + parameters * self._hand_over.host_s
        return Timing(time_s=max(0.0, time_s), spread=timing.spread, host_s=max(0.0, host_s))

    def _input_cast(self, operator: int, precision: Precision, source: Precision) -> float:
        """Seconds of the casts that readers of the input share; NaN without such a cast."""
        if source not in self._dtypes:
            return math.nan
        device, cache = self._clock.device, RecordingCache()
        dtype = DTYPES[source]
        execution = Execution(self._graph, operator, precision, device, dtype, cache)
        execution.forward()
        if not cache.requests:
            is_shared = self._shares_cast(operator, precision)
            return 0.0 if is_shared else math.nan
        makers = [make for make, _ in cache.requests]

        def cast() -> list[object]:
            with torch.no_grad():
                return [make() for make in makers]

        held = max(1, self._kept_bytes // max(_bytes_of(cast()), 1))
        warm = execution.just_written(self._clock.cache_bytes, casts=False)
        return self._clock.time(cast, results=min(held, _MOST_HELD), warm=warm).time_s

    def _shares_cast(self, operator: int, precision: Precision) -> bool:
        """Whether the operator casts its input through the cache where it has to cast it."""
        device = self._clock.device
        for source in self._dtypes:
            cache = RecordingCache()
            Execution(self._graph, operator, precision, device, DTYPES[source], cache).forward()
            if cache.requests:
                return True
        return False

    def _memory(self, operator: int, precision: Precision) -> dict[str, int]:
        device, cache = self._clock.device, RecordingCache()
        execution = Execution(self._graph, operator, precision, device, None, cache)
        with metered(device) as forward:
            outputs, saved = saved_storages(execution.forward)
        given = addresses(execution.operands)
        casts = addresses([part for _, found in cache.requests for part in found])
        made = addresses(tensors_in(outputs))
        copies = sum(size for key, size in saved.items() if key in casts - given)
        own = sum(size for key, size in saved.items() if key not in given | casts | made)
        known, unknown = self._known_to_graph(operator, execution)
        own += sum(saved[key] for key in unknown & saved.keys())
        if not casts and not known & saved.keys():  # the graph counts copies that are others here
            own = max(0, own - self._expected_copies(operator, precision))
        if not known:  # the graph counts no copy of an input for this operator
            own, copies = own + copies, 0
        del outputs
        backward_peak = 0
        if execution.prepare_backward():
            execution.outputs.clear()
            with metered(device) as backward:
                execution.backward(retain=False)
            backward_peak = backward.peak_bytes
        return {
            "input_bytes": copies if copies else AS_DTYPE,
            "own_saved_bytes": own,
            "forward_transient_bytes": max(0, forward.peak_bytes - forward.left_bytes),
            "backward_transient_bytes": backward_peak,
        }

    def _known_to_graph(self, operator: int, execution: Execution) -> tuple[set[int], set[int]]:
        """Addresses of activations that the operator keeps according to the graph, and others.

        A layer keeps its input as it gets it; where the captured call kept a contiguous copy
        instead, the graph knows the copy only.
        """
        graph = self._graph
        kept = [row.tensor for row in graph.saved if operator in row.savers]
        storages = {graph.tensors[tensor].storage for tensor in kept if tensor is not None}
        known: set[int] = set()
        unknown: set[int] = set()
        inputs = graph.operators[operator].inputs
        for tensor, operand in zip(inputs, execution.operands, strict=True):
            row = graph.tensors[tensor]
            if row.origin in (Origin.OPERATOR, Origin.BATCH):
                (known if row.storage in storages else unknown).update(addresses([operand]))
        return known, unknown - known

    def _expected_copies(self, operator: int, precision: Precision) -> int:
        """Bytes that the graph's saved inputs account for."""
        rows = (
            row
            for row in self._graph.saved
            if row.tensor is not None and operator in row.savers and row.follows_precision
        )
        return sum(
            row.bytes_at(precision.storage) for row in rows if operator not in row.kept_output
        )


def _bytes_of(results: object) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors_in(results)}
    return sum(storage.nbytes() for storage in storages.values())
