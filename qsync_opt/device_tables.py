"""The tables of one device kind: from a graph and measured costs to a `DeviceKind`.

Where the pieces come from:

- time of an operator: its signature's, plus casts of inputs that no operator makes (the batch)
  and, in backward, the additions of gradients for what it made, its gradients' copies into
  DDP's buckets, and its share of the time between operators;
- casts: on the edge from producer to consumer (`costs` says who pays what). Layers share the
  forward cast of a tensor, so they are in one row; everybody else has a row of their own;
- memory: `device_memory`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from math import isnan

import numpy as np

from qsync_opt.costs import ClusterKind, DeviceCosts
from qsync_opt.device_memory import MemoryTables
from qsync_opt.graph import GraphTensor, OperatorGraph, Role
from qsync_opt.optimize.arrays import BoolArray, FloatArray, IntArray
from qsync_opt.optimize.problem import CastTensors, DeviceKind
from qsync_opt.perturbation import PerturbationTable
from qsync_opt.precision import HANDED_ON, Precision

#: What a cast costs where a combination cannot occur: the device lacks one of the dtypes.
_NEVER_S = 0.0


class DeviceTables:
    """Makes the `DeviceKind` of one kind.

    Args:
        graph: the graph.
        costs: measured on this kind.
        perturbation: of the operators.
        precisions: columns of the problem.
        workers: of the whole job; gradients are copied into buckets where there are several.
    """

    def __init__(
        self,
        graph: OperatorGraph,
        costs: DeviceCosts,
        perturbation: PerturbationTable,
        precisions: Sequence[Precision],
        workers: int,
    ) -> None:
        self._graph, self._costs, self._perturbation = graph, costs, perturbation
        self._precisions = tuple(precisions)
        self._workers = workers
        self._shape = (len(graph.operators), len(precisions))

    def kind(self, kind: ClusterKind, batch_share: float) -> DeviceKind:
        """The finished kind."""
        memory = self._costs.memory
        budget = kind.memory_bytes
        if budget is None:
            budget = memory.device_bytes - memory.context_bytes
        forward, backward = self.times()
        tables = MemoryTables(self._graph, self._costs, self._precisions, self.available)
        transients = tables.transients()
        return DeviceKind(
            name=kind.name,
            workers=kind.workers,
            batch_share=batch_share,
            memory_bytes=max(0, budget - self._unused_bytes()),
            fixed_bytes=self.fixed_bytes(),
            optimizer_s=self._costs.optimizer.step_s,
            available=self.available,
            forward_s=np.where(self.available, forward, 0.0),
            backward_s=np.where(self.available, backward, 0.0),
            perturbation=np.where(self.available, self._perturbations(), 0.0),
            tensors=self._casts(),
            saved=tables.saved,
            forward_transient_bytes=transients[0],
            backward_transient_bytes=transients[1],
            pins=kind.pins,
        )

    @cached_property
    def available(self) -> BoolArray:
        """Which precisions each operator has, [N, P]."""
        measured = self._of_signatures(self._costs.operators.forward_s, np.nan)
        allowed = np.zeros(self._shape, dtype=np.bool_)
        for index, row in enumerate(self._graph.operators):
            for column, precision in enumerate(self._precisions):
                if row.role is Role.ADJUSTABLE:
                    allowed[index, column] = True
                elif row.role is Role.FOLLOWER:
                    allowed[index, column] = precision in HANDED_ON
                else:
                    allowed[index, column] = precision is Precision.FP32
        return allowed & ~np.isnan(measured) & np.isfinite(self._perturbations())

    def times(self, *, between: bool = True) -> tuple[FloatArray, FloatArray]:
        """Forward and backward seconds, [N, P] each; NaN where not measured.

        Args:
            between: with each operator's share of the time between operators.
        """
        operators = self._costs.operators
        forward = self._of_signatures(operators.forward_s, np.nan)
        backward = self._of_signatures(operators.backward_s, np.nan)
        for index, row in enumerate(self._graph.operators):
            for column, precision in enumerate(self._precisions):
                forward[index, column] += self._given_casts_s(index, precision)
                dtype = self._handed_on(precision)
                for output in row.outputs:
                    tensor = self._graph.tensors[output]
                    if tensor.gradients > 1 and tensor.is_float:
                        extra = self._costs.casts.addition(tensor.elements, dtype)
                        backward[index, column] += _known(extra) * (tensor.gradients - 1)
            backward[index] += self._parameter_gradients_s(index)
        if between:
            gaps = self._gaps_s(forward, backward)
            forward += gaps[0]
            backward += gaps[1]
        return forward, backward

    def fixed_bytes(self) -> int:
        """What is taken whatever the plan."""
        memory = self._costs.memory
        parts = (
            *(memory.parameter_bytes, memory.gradient_bytes, memory.buffer_bytes),
            *(memory.batch_bytes, memory.workspace_bytes, self._costs.optimizer.state_bytes),
        )
        return sum(parts)

    # Operators

    def _of_signatures(self, table: FloatArray | IntArray, missing: float) -> FloatArray:
        """A table of signatures as one of operators, in the columns of the problem."""
        rows = [row.signature for row in self._graph.operators]
        result = np.full(self._shape, float(missing))
        for column, precision in enumerate(self._precisions):
            if precision in self._costs.precisions:
                result[:, column] = table[rows, self._costs.precisions.index(precision)]
        return result

    def _perturbations(self) -> FloatArray:
        """Values in the columns of the problem; infinite where the table has none."""
        table = self._perturbation
        result = np.full(self._shape, np.inf)
        rows = [table.operators.index(row.name) for row in self._graph.operators]
        for column, precision in enumerate(self._precisions):
            if precision in table.precisions:
                result[:, column] = table.values[rows, table.precisions.index(precision)]
        for index, row in enumerate(self._graph.operators):
            if row.role is not Role.ADJUSTABLE:
                result[index] = 0.0
        return result

    def _handed_on(self, precision: Precision) -> Precision:
        return self._costs.handed_on(precision)

    def _given_casts_s(self, operator: int, precision: Precision) -> float:
        """Casts of fp32 inputs that no operator makes: nobody else can pay for them."""
        row = self._graph.operators[operator]
        if row.role is not Role.ADJUSTABLE:
            return 0.0
        given = [i for i in row.inputs if self._graph.tensors[i].producer is None]
        given = [i for i in given if self._graph.tensors[i].parameter is None]
        if not any(self._graph.tensors[i].is_float for i in given):
            return 0.0
        return _known(self._input_cast_s(operator, precision, Precision.FP32))

    def _input_cast_s(self, operator: int, precision: Precision, source: Precision) -> float:
        if precision not in self._costs.precisions:
            return float("nan")
        signature = self._graph.operators[operator].signature
        column = self._costs.precisions.index(precision)
        table = self._costs.operators.input_cast_s
        return float(table[signature, column, HANDED_ON.index(source)])

    def _parameter_gradients_s(self, operator: int) -> float:
        """Adding the gradients of tied parameters, and copying them into DDP's buckets."""
        seconds = 0.0
        for parameter in self._graph.completes[operator]:
            elements = self._graph.parameters[parameter].elements
            uses = self._parameter_uses.get(parameter, 1)
            seconds += (uses - 1) * _known(self._costs.casts.addition(elements, Precision.FP32))
        return seconds + self._bucket_copies_s(operator)

    @cached_property
    def _parameter_uses(self) -> Mapping[int, int]:
        """Parameter -> how many gradients are added up for it."""
        tensors = self._graph.tensors
        return {t.parameter: t.gradients for t in tensors if t.parameter is not None}

    def _gaps_s(self, forward: FloatArray, backward: FloatArray) -> tuple[float, float]:
        """Seconds between two operators, forward and backward.

        On a CPU nothing hides what the host does between operators: it is the part of the
        measured fp32 step that its operators do not explain, in equal shares. On a GPU the
        host is a lane of its own, and there are no gaps where it does not limit.
        """
        step = self._costs.step_of.get(Precision.FP32)
        if step is None or self._costs.provenance.device_type != "cpu":
            return 0.0, 0.0
        if Precision.FP32 not in self._precisions:
            return 0.0, 0.0
        column = self._precisions.index(Precision.FP32)
        count = self._shape[0]
        # Measured steps ran without DDP, and paid for no copies into buckets.
        copies = sum(self._bucket_copies_s(index) for index in range(count))
        spare = (
            step.forward_s - float(np.nansum(forward[:, column])),
            step.backward_s - float(np.nansum(backward[:, column])) + copies,
        )
        return max(0.0, spare[0]) / count, max(0.0, spare[1]) / count

    def _bucket_copies_s(self, operator: int) -> float:
        """Copying the gradients that an operator completes into DDP's buckets."""
        if self._workers == 1:
            return 0.0
        return sum(
            self._costs.casts.copy(self._graph.parameters[parameter].elements)
            for parameter in self._graph.completes[operator]
        )

    # Casts

    def _casts(self) -> CastTensors:
        producers: list[int] = []
        consumers: list[list[int]] = []
        tables: tuple[list[FloatArray], list[FloatArray]] = ([], [])
        for producer, readers, forward, backward in self._cast_rows():
            if forward.any() or backward.any():
                producers.append(producer)
                consumers.append(readers)
                tables[0].append(forward)
                tables[1].append(backward)
        count = len(self._precisions)
        empty = np.zeros((0, count, count))
        return CastTensors.from_rows(
            producer=producers,
            consumers=consumers,
            forward_s=np.array(tables[0]) if producers else empty,
            backward_s=np.array(tables[1]) if producers else empty,
        )

    def _cast_rows(self) -> Iterator[tuple[int, list[int], FloatArray, FloatArray]]:
        """Producer, consumers, forward and backward table of every row."""
        for index, tensor in enumerate(self._graph.tensors):
            if tensor.producer is None or not tensor.is_float:
                continue
            alone: list[int] = []
            sharing: dict[str, list[int]] = defaultdict(list)
            for consumer in tensor.consumers:
                if self._shares_casts(consumer):
                    sharing[self._graph.operators[consumer].kind].append(consumer)
                else:
                    alone.append(consumer)
            for consumer in alone:
                yield (
                    tensor.producer,
                    [consumer],
                    self._forward_table(consumer, tensor),
                    self._backward_table(consumer, tensor, index),
                )
            for group in sharing.values():
                forward = self._forward_table(group[0], tensor)
                if len(group) == 1:
                    backward = self._backward_table(group[0], tensor, index)
                    yield tensor.producer, group, forward, backward
                    continue
                none = np.zeros_like(forward)
                yield tensor.producer, group, forward, none
                for consumer in group:
                    backward = self._backward_table(consumer, tensor, index)
                    yield tensor.producer, [consumer], none, backward

    def _shares_casts(self, operator: int) -> bool:
        signature = self._graph.operators[operator].signature
        return not bool(np.isnan(self._costs.operators.input_cast_s[signature]).all())

    def _pairs(self, consumer: int, producer: int) -> Iterator[tuple[int, int]]:
        """Columns (of the producer, of the consumer) that can occur."""
        for p in np.flatnonzero(self.available[producer]):
            for q in np.flatnonzero(self.available[consumer]):
                yield int(p), int(q)

    def _forward_table(self, consumer: int, tensor: GraphTensor) -> FloatArray:
        """Seconds of the cast of an activation, by producer's and consumer's precision."""
        table = np.zeros((len(self._precisions),) * 2)
        producer = tensor.producer
        shares = self._shares_casts(consumer)
        for p, q in self._pairs(consumer, producer if producer is not None else consumer):
            source = self._handed_on(self._precisions[p])
            precision = self._precisions[q]
            if shares:
                seconds = self._input_cast_s(consumer, precision, source)
            elif precision.output is not precision.storage:
                continue  # quantises its operands by itself
            else:
                target = precision.storage
                seconds = self._costs.casts.cast(tensor.elements, source, target)
            table[p, q] = _known(seconds)
        return table

    def _backward_table(self, consumer: int, tensor: GraphTensor, index: int) -> FloatArray:
        """Seconds of the cast of its gradient back to the dtype of the activation."""
        table = np.zeros((len(self._precisions),) * 2)
        row = self._graph.operators[consumer]
        operands = self._graph.signature_of(consumer).operands
        place = row.inputs.index(index)
        if not row.differentiable or not operands[place].requires_grad:
            return table
        producer = tensor.producer
        for p, q in self._pairs(consumer, producer if producer is not None else consumer):
            source = self._handed_on(self._precisions[q])
            target = self._handed_on(self._precisions[p])
            table[p, q] = _known(self._costs.casts.cast(tensor.elements, source, target))
        return table

    def _unused_bytes(self) -> int:
        """What the allocator holds without handing it out; it counts against the device."""
        return max((step.unused_bytes for step in self._costs.steps), default=0)


def _known(seconds: float) -> float:
    return _NEVER_S if isnan(seconds) else seconds
