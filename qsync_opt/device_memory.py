"""What a step keeps and passes on, in bytes by precision: the memory tables of one device kind.

- Saved tensors: per storage dtype, as captured; copies with scales as measured; what only exists
  inside an operator as measured.
- Transients: what is in memory only while an operator runs, from the lifetimes in the graph. A
  transient knows the precision of one operator. What others made and nobody keeps is counted in
  fp32 where its maker is fixed, else in the dtype that the running operator hands on.
- Tensors that the code of the model holds longer than anybody reads them. Whether they take
  anything beside what backward keeps depends on precisions (an 8-bit layer keeps codes, and
  its input stays beside them), and often the operators that run meanwhile have no choice.
  So each adjustable operator answers for itself and for the operators up to the next
  adjustable one, as if the step were at its precision throughout.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np

from qsync_opt.costs import DeviceCosts
from qsync_opt.graph import OperatorGraph, Role
from qsync_opt.optimize.arrays import BoolArray, FloatArray, IntArray
from qsync_opt.optimize.problem import SavedTensors
from qsync_opt.precision import PROMOTED, Precision

_CODES = (Precision.INT8, Precision.FP8)


class MemoryTables:
    """Makes the saved tensors and the transients of a `DeviceKind`.

    Args:
        graph: the graph.
        costs: measured on this kind.
        precisions: columns of the problem.
        available: which of them each operator has, [N, P].
    """

    def __init__(
        self,
        graph: OperatorGraph,
        costs: DeviceCosts,
        precisions: Sequence[Precision],
        available: BoolArray,
    ) -> None:
        self._graph, self._costs, self._available = graph, costs, available
        self._precisions = tuple(precisions)
        self._storages = tuple(dict.fromkeys(p.storage for p in precisions))

    @cached_property
    def saved(self) -> SavedTensors:
        """What is kept from forward to backward."""
        savers: list[list[int]] = []
        sizes: list[list[int]] = []
        for row_savers, row in (*self._kept_tensors(), *self._kept_inside()):
            if any(row):
                savers.append(row_savers)
                sizes.append([self._rounded(size) for size in row])
        return SavedTensors.from_rows(
            savers=savers,
            size_bytes=np.array(sizes, dtype=np.int64).reshape(len(savers), len(self._storages)),
            dtypes=self._storages,
        )

    def transients(self) -> tuple[IntArray, IntArray]:
        """What only a running operator takes, forward and backward, [N, P] each."""
        operators = self._costs.operators
        forward = self._of_signatures(operators.forward_transient_bytes)
        backward = self._of_signatures(operators.backward_transient_bytes)
        width = np.array([self._handed_on(p).element_bytes for p in self._precisions])
        passing, pending = self._passing_elements()
        for table, (fixed, other) in ((forward, passing), (backward, pending)):
            table += fixed[:, None] * PROMOTED.element_bytes + other[:, None] * width
        backward += self._widened_elements()[:, None] * (PROMOTED.element_bytes - width)
        for column, precision in enumerate(self._precisions):
            held = self._held_bytes(precision)
            forward[:, column] = np.maximum(forward[:, column], held)
        return (
            np.where(self._available, forward, 0).astype(np.int64),
            np.where(self._available, backward, 0).astype(np.int64),
        )

    def _of_signatures(self, table: IntArray) -> FloatArray:
        """A table of signatures as one of operators, in the columns of the problem."""
        rows = [row.signature for row in self._graph.operators]
        result = np.zeros((len(rows), len(self._precisions)))
        for column, precision in enumerate(self._precisions):
            if precision in self._costs.precisions:
                result[:, column] = table[rows, self._costs.precisions.index(precision)]
        return result

    def _handed_on(self, precision: Precision) -> Precision:
        return self._costs.handed_on(precision)

    def _rounded(self, size: int) -> int:
        unit = self._costs.memory.rounding_bytes
        return -(-size // unit) * unit

    # Kept for backward

    def _kept_tensors(self) -> Iterator[tuple[list[int], list[int]]]:
        """Rows of captured tensors: savers, and bytes by storage dtype.

        A storage is counted whole. Who reads a part of it and casts that part keeps less than
        is counted here.
        """
        for saved in self._graph.saved:
            if saved.tensor is None:
                continue
            if not saved.follows_precision:  # one copy, whatever the precision of who keeps it
                size = saved.bytes_at(Precision.FP32)
                yield [saved.savers[0]], [size] * len(self._storages)
                continue
            sizes = [saved.bytes_at(dtype) for dtype in self._storages]
            readers = [saver for saver in saved.savers if saver not in saved.kept_output]
            for column, dtype in enumerate(self._storages):
                if not readers and dtype in _CODES:
                    sizes[column] = saved.bytes_at(self._costs.half)
                measured = [self._input_bytes(reader, dtype) for reader in readers]
                if max(measured, default=-1) >= 0:
                    sizes[column] = max(measured)
            yield list(saved.savers), sizes

    def _input_bytes(self, operator: int, dtype: Precision) -> int:
        """Measured size of the copy of its input that an operator keeps; -1 where unknown."""
        if dtype not in _CODES or dtype not in self._costs.precisions:
            return -1
        signature = self._graph.operators[operator].signature
        column = self._costs.precisions.index(dtype)
        return int(self._costs.operators.input_bytes[signature, column])

    def _kept_inside(self) -> Iterator[tuple[list[int], list[int]]]:
        table = self._costs.operators.own_saved_bytes
        for index, row in enumerate(self._graph.operators):
            sizes = [0] * len(self._storages)
            for column, precision in enumerate(self._precisions):
                if self._available[index, column]:
                    place = self._storages.index(precision.storage)
                    own = int(table[row.signature, self._costs.precisions.index(precision)])
                    sizes[place] = max(sizes[place], own)
            yield [index], sizes

    # Passing

    def _passing_elements(self) -> tuple[list[FloatArray], list[FloatArray]]:
        """Elements alive while each operator runs that nobody keeps, and gradients under way.

        Forward and backward, each of tensors of fixed operators and of others, [N].
        """
        graph, count = self._graph, len(self._graph.operators)
        first_saver = {
            graph.tensors[row.tensor].storage: row.savers[0]
            for row in reversed(graph.saved)
            if row.tensor is not None
        }
        passing, pending = ([np.zeros(count), np.zeros(count)] for _ in range(2))
        spans: dict[int, list[int]] = {}
        for tensor in graph.tensors:
            if tensor.producer is None or not tensor.is_float:
                continue
            last = max(tensor.consumers, default=tensor.producer)
            span = spans.setdefault(tensor.storage, [tensor.producer, last, tensor.elements])
            span[1] = max(span[1], last)
            if tensor.gradients:
                pending[self._kind(tensor.producer)][tensor.producer : last] += tensor.elements
        for storage, (producer, last, elements) in spans.items():
            end = min(last + 1, first_saver.get(storage, count))
            passing[self._kind(producer)][producer : max(end, producer)] += elements
        return passing, pending

    def _kind(self, producer: int) -> int:
        """0 for a fixed operator, 1 for others."""
        return int(self._graph.operators[producer].role is not Role.FIXED)

    def _widened_elements(self) -> FloatArray:
        """Elements of inputs of adjustable operators whose gradients are wanted in fp32, [N].

        They are widened there where the operator multiplies in less; costs are measured
        without that.
        """
        widened = np.zeros(len(self._graph.operators))
        for index in self._graph.adjustable:
            row = self._graph.operators[index]
            operands = self._graph.signature_of(index).operands
            for operand, place in zip(operands, row.inputs, strict=True):
                tensor = self._graph.tensors[place]
                made = tensor.producer is not None and not self._kind(tensor.producer)
                if row.differentiable and made and tensor.is_float and operand.requires_grad:
                    widened[index] += tensor.elements
        return widened

    # Held by the code of the model

    def _held_bytes(self, precision: Precision) -> FloatArray:
        """Forward transient of adjustable operators with what they answer for, [N]; else 0."""
        at = self._throughout(precision)
        kept = np.cumsum(self._kept_at(at))
        needed = kept + self._beside_kept(at)
        for column, measured in enumerate(self._costs.precisions):
            rows = [index for index, own in enumerate(at) if own is measured]
            signatures = [self._graph.operators[index].signature for index in rows]
            needed[rows] += self._costs.operators.forward_transient_bytes[signatures, column]
        result = np.zeros(len(at))
        adjustable = self._graph.adjustable
        for index, following in zip(adjustable, (*adjustable[1:], len(at)), strict=True):
            if at[index] is precision:
                result[index] = needed[index:following].max() - kept[index]
        return result

    def _throughout(self, precision: Precision) -> list[Precision]:
        """What every operator runs at where as many as can run at one precision."""
        at: list[Precision] = []
        for index, row in enumerate(self._graph.operators):
            if row.role is Role.ADJUSTABLE:
                has = [p for c, p in enumerate(self._precisions) if self._available[index, c]]
                wanted = (precision, self._handed_on(precision))
                at.append(next((p for p in wanted if p in has), PROMOTED))
            else:
                followed = {self._handed_on(at[source]) for source in row.follows}
                at.append(followed.pop() if len(followed) == 1 else PROMOTED)
        return at

    def _kept_at(self, at: Sequence[Precision]) -> IntArray:
        """Bytes that are kept from the forward of each operator on, [N]."""
        saved, result = self.saved, np.zeros(len(at), dtype=np.int64)
        for row, size in enumerate(saved.size_bytes):
            savers = saved.savers[saved.saver_start[row] : saved.saver_start[row + 1]]
            dtypes = {at[saver].storage for saver in savers} & set(self._storages)
            result[savers.min()] += sum(size[self._storages.index(dtype)] for dtype in dtypes)
        return result

    def _beside_kept(self, at: Sequence[Precision]) -> FloatArray:
        """Bytes in memory in the forward of each operator that backward does not keep, [N]."""
        changes = np.zeros(len(at) + 1)
        tensors = [t for t in self._graph.tensors if t.producer is not None and t.is_float]
        sharing = defaultdict(list)
        for tensor in tensors:
            sharing[tensor.storage].append(tensor)
        keepers = self._keepers()
        for storage, group in sharing.items():
            producer = min(t.producer for t in group if t.producer is not None)
            end = 1 + max(t.last_needed for t in group if t.last_needed is not None)
            dtype = self._handed_on(at[producer])
            for saver, is_output in keepers[storage]:
                kept = self._handed_on(at[saver]) if is_output else at[saver].storage
                if kept is dtype:  # the tensor itself is kept
                    end = min(end, saver)
            size = self._rounded(group[0].elements * dtype.element_bytes)
            changes[producer] += size
            changes[max(end, producer)] -= size
        return np.cumsum(changes)[:-1]

    def _keepers(self) -> defaultdict[int, list[tuple[int, bool]]]:
        """Storage -> its savers, and whether as the output that they made."""
        keepers: defaultdict[int, list[tuple[int, bool]]] = defaultdict(list)
        for row in self._graph.saved:
            if row.tensor is not None:
                storage = self._graph.tensors[row.tensor].storage
                keepers[storage] += [(saver, saver in row.kept_output) for saver in row.savers]
        return keepers
