"""From the raw records of a step to an `OperatorGraph`.

Views are folded, roles and names given, signatures, saved tensors and groups collected. A view
whose backward computes (a slice fills a gradient with zeros) stays an operator.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from qsync_opt.errors import CaptureError
from qsync_opt.graph import (
    GraphOperator,
    GraphParameter,
    GraphProvenance,
    GraphTensor,
    OperatorGraph,
    Origin,
    Role,
    SavedTensor,
    Signature,
)
from qsync_opt.measure.attribution import SequenceOwners, backward_of_calls, coverage_of
from qsync_opt.measure.autograd_graph import AutogradGraph
from qsync_opt.measure.naming import operator_names
from qsync_opt.measure.recorder import Recorder
from qsync_opt.measure.records import Call, Value, Work
from qsync_opt.measure.roles import operator_groups, role_of


@dataclass(slots=True)
class _Node:
    """An operator on its way into the graph; `inputs` and `outputs` are values."""

    call: Call
    inputs: list[int]
    outputs: list[int]
    backward: Work
    differentiable: bool
    sequence: int | None
    role: Role = Role.FIXED
    follows: tuple[int, ...] = ()


class Assembly:
    """Makes the graph of one recorded step.

    Args:
        recorder: the records.
        autograd: the graph that the backward went through.
        model: the model that ran.
        loss_value: the value of the loss among the records.
    """

    def __init__(
        self, recorder: Recorder, autograd: AutogradGraph, model: nn.Module, loss_value: int
    ) -> None:
        self._recorder = recorder
        self._values = recorder.tensors.values
        self._autograd = autograd
        self._model = model
        self._loss_value = loss_value
        self._modules = dict(model.named_modules())
        self._trainable = list(model.parameters())
        self._owner = SequenceOwners(recorder)
        self._backward = backward_of_calls(recorder, self._owner)
        self._kept = [
            call.computes or self._backward[index].computes
            for index, call in enumerate(recorder.calls)
        ]
        self._number = {
            call: number for number, call in enumerate(i for i, k in enumerate(self._kept) if k)
        }
        self._nodes = self._make_nodes()
        self._producer = {v: i for i, node in enumerate(self._nodes) for v in node.outputs}
        self._give_roles()

    def graph(self, name: str, provenance: GraphProvenance, batch_bytes: int) -> OperatorGraph:
        """The finished graph."""
        signatures: dict[Signature, int] = {}
        which = [signatures.setdefault(self._signature(n), len(signatures)) for n in self._nodes]
        tensors, tensor_index = self._tensors()
        parameters = self._parameters()
        readers = self._parameters_of_nodes()
        main = self._reaching_loss()
        names = operator_names(
            [node.call for node in self._nodes],
            [index in main for index in range(len(self._nodes))],
            [node.role is Role.ADJUSTABLE for node in self._nodes],
            [self._owns_parameter(node) for node in self._nodes],
            {name for name, module in self._modules.items() if not any(module.children())},
        )
        operators = tuple(
            GraphOperator(
                name=names[i],
                module=node.call.module,
                module_type=node.call.module_type,
                kind=node.call.kind,
                role=node.role,
                signature=which[i],
                inputs=tuple(tensor_index[value] for value in node.inputs),
                outputs=tuple(tensor_index[value] for value in node.outputs),
                follows=node.follows,
                parameters=readers[i],
                differentiable=node.differentiable,
                forward_flops=self._flops(node, backward=False),
                backward_flops=self._flops(node, backward=True),
                sequence_number=node.sequence,
            )
            for i, node in enumerate(self._nodes)
        )
        return OperatorGraph(
            name=name,
            operators=operators,
            signatures=tuple(signatures),
            tensors=tensors,
            saved=self._saved(tensor_index),
            parameters=parameters,
            gradient_order=tuple(self._autograd.gradient_order),
            backward_order=self._backward_order(),
            groups=operator_groups(
                [node.call for node in self._nodes], [node.role for node in self._nodes], readers
            ),
            buffer_bytes=sum(b.numel() * b.element_size() for b in self._model.buffers()),
            batch_bytes=batch_bytes,
            coverage=coverage_of(self._recorder, self._owner),
            provenance=provenance,
        )

    # Operators

    def _make_nodes(self) -> list[_Node]:
        reached: dict[int, int] = {}
        first = min(self._autograd.sequences)  # the count goes on from step to step
        for sequence in self._autograd.sequences:
            owner = self._owner.of(sequence)
            if owner is not None:
                reached[owner] = max(sequence - first, reached.get(owner, 0))
        return [
            _Node(
                call=call,
                inputs=[self._fold(value) for value in call.inputs],
                outputs=list(call.outputs),
                backward=self._backward[index],
                differentiable=index in reached,
                sequence=reached.get(index),
            )
            for index, call in enumerate(self._recorder.calls)
            if self._kept[index]
        ]

    def _fold(self, value: int) -> int:
        """The value that stands for this one: views of calls that are no operators go."""
        while True:
            entry = self._values[value]
            made_here = (
                entry.producer is not None
                and self._kept[entry.producer]
                and value in self._recorder.calls[entry.producer].outputs
            )
            if entry.view_of is None or made_here:
                return value
            value = entry.view_of

    def _reaching_loss(self) -> set[int]:
        """Operators whose outputs the loss depends on."""
        found: set[int] = set()
        waiting = [self._producer.get(self._fold(self._loss_value))]
        while waiting:
            index = waiting.pop()
            if index is None or index in found:
                continue
            found.add(index)
            waiting += [self._producer.get(value) for value in self._nodes[index].inputs]
        return found

    def _give_roles(self) -> None:
        main = self._reaching_loss()
        for index, node in enumerate(self._nodes):
            if node.differentiable and index not in main:
                call = node.call
                raise CaptureError(
                    f"{call.kind} in {call.module or 'the model itself'} gets a gradient, but"
                    " nothing seen hands its output on to the loss",
                    "Register the extension in between with torch.library, or write its forward"
                    " with torch functions",
                )
        for index, node in enumerate(self._nodes):
            if index in main:
                node.role, node.follows = self._role(node)

    def _role(self, node: _Node) -> tuple[Role, tuple[int, ...]]:
        inputs = [self._values[value] for value in node.inputs]
        role = role_of(node.call, inputs, node.differentiable)
        if role is not Role.FOLLOWER or node.call.probe is None:
            return role, ()
        producers = [self._producer.get(node.inputs[i]) for i in node.call.probe.deciding]
        if any(p is None or self._nodes[p].role is Role.FIXED for p in producers):
            return Role.FIXED, ()  # promotion with fp32 gives fp32
        return role, tuple(sorted({p for p in producers if p is not None}))

    def _signature(self, node: _Node) -> Signature:
        call = node.call
        origins = [self._values[value].origin for value in node.inputs]
        operands = [replace(o, origin=g) for o, g in zip(call.operands, origins, strict=True)]
        probed = call.probe.products if call.probe is not None else ()
        return Signature(
            function=call.function,
            kind=call.kind,
            arguments=call.arguments,
            operands=tuple(operands),
            outputs=tuple(call.output_specs),
            training=call.training,
            parts=tuple(call.work.products) or probed,
        )

    def _flops(self, node: _Node, *, backward: bool) -> int:
        """As counted; where attention ran in a form that torch cannot count, in its plain form."""
        counted = node.backward.flops if backward else node.call.work.flops
        probe = node.call.probe
        if node.call.work.products or probe is None or not node.differentiable:
            return counted
        return probe.backward_flops if backward else probe.forward_flops

    def _backward_order(self) -> tuple[int, ...]:
        owners = (self._owner.of(sequence) for sequence in self._autograd.order)
        numbers = (self._number[owner] for owner in owners if owner in self._number)
        return tuple(dict.fromkeys(numbers))

    # Tensors and parameters

    def _tensors(self) -> tuple[tuple[GraphTensor, ...], dict[int, int]]:
        consumers: dict[int, list[int]] = defaultdict(list)
        order: dict[int, None] = {}
        for index, node in enumerate(self._nodes):
            for value in node.inputs:
                consumers[value].append(index)
            order.update(dict.fromkeys([*node.inputs, *node.outputs]))
        for saved in self._recorder.saved:  # a batch that only views read is saved all the same
            if (kept := self._value_of_storage(saved.storage)) is not None:
                order[kept] = None
        storages: dict[int, int] = {}
        held = self._held()
        tensors = []
        for value in order:
            entry = self._values[value]
            tensors.append(
                GraphTensor(
                    shape=entry.shape,
                    dtype=entry.dtype,
                    size_bytes=entry.size_bytes,
                    storage=storages.setdefault(entry.storage, len(storages)),
                    origin=entry.origin if value not in self._producer else Origin.OPERATOR,
                    producer=self._producer.get(value),
                    parameter=entry.parameter,
                    consumers=tuple(dict.fromkeys(consumers[value])),
                    gradients=self._gradients(entry),
                    held_until=held[entry.storage] if value in self._producer else None,
                )
            )
        return tuple(tensors), {value: index for index, value in enumerate(order)}

    def _held(self) -> dict[int, int]:
        """For every storage the last operator during which the model holds a tensor in it."""
        last: dict[int, int] = {}
        for entry in self._values:
            call = len(self._recorder.calls) - 1 if entry.held is None else entry.held
            last[entry.storage] = max(last.get(entry.storage, 0), call)
        return {storage: self._saver(call) for storage, call in last.items()}

    def _gradients(self, entry: Value) -> int:
        if entry.parameter is not None:
            return self._autograd.parameter_edges[entry.parameter]
        if entry.node is None:
            return 0
        return self._autograd.edges[id(entry.node[0]), entry.node[1]]

    def _parameters(self) -> tuple[GraphParameter, ...]:
        names: dict[int, list[str]] = defaultdict(list)
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            names[id(parameter)].append(name)
        readers: dict[int, list[int]] = defaultdict(list)
        for index, parameters in enumerate(self._parameters_of_nodes()):
            for number in parameters:
                readers[number].append(index)
        return tuple(
            GraphParameter(
                name=names[id(parameter)][0],
                aliases=tuple(names[id(parameter)][1:]),
                shape=tuple(parameter.shape),
                dtype=str(parameter.dtype).removeprefix("torch."),
                requires_grad=parameter.requires_grad,
                operators=tuple(readers[number]),
            )
            for number, parameter in enumerate(self._model.parameters())
        )

    def _parameters_of_nodes(self) -> list[tuple[int, ...]]:
        rows = []
        for node in self._nodes:
            found = {self._values[value].parameter for value in node.inputs}
            rows.append(tuple(sorted(number for number in found if number is not None)))
        return rows

    def _owns_parameter(self, node: _Node) -> bool:
        """Whether an operator reads a parameter that its own module holds."""
        module = self._modules.get(node.call.module)
        if module is None:
            return False
        own = {id(parameter) for parameter in module.parameters(recurse=False)}
        numbers = [self._values[value].parameter for value in node.inputs]
        return any(id(self._trainable[n]) in own for n in numbers if n is not None)

    # What is kept for backward

    def _value_of_storage(self, storage: int) -> int | None:
        value = self._recorder.tensors.final(storage)
        return None if value is None else self._fold(value)

    def _saved(self, tensor_index: Mapping[int, int]) -> tuple[SavedTensor, ...]:
        entries: dict[int, list[Any]] = defaultdict(list)
        for saved in self._recorder.saved:
            entries[saved.storage].append(saved)
        rows = []
        for storage, group in entries.items():
            value = self._value_of_storage(storage)
            origin = None if value is None else self._values[value].origin
            if origin is Origin.PARAMETER:
                continue
            savers = sorted({self._saver(entry.call) for entry in group})
            first = group[0]
            if value is None:
                follows = self._depends_on_precision(first)
            else:
                follows = self._values[value].dtype == "float32" and origin is not Origin.BUFFER
            producer = None if value is None else self._producer.get(value)
            rows.append(
                SavedTensor(
                    tensor=None if value is None else tensor_index[value],
                    savers=tuple(savers),
                    kept_output=tuple(saver for saver in savers if saver == producer),
                    elements=first.size_bytes // first.item_bytes,
                    size_bytes=first.size_bytes,
                    follows_precision=follows,
                    resident=origin in (Origin.BATCH, Origin.BUFFER),
                )
            )
        return tuple(rows)

    def _saver(self, call: int) -> int:
        """The operator of a call; a folded view's is the one before it, or the first."""
        earlier = (self._number[c] for c in range(call, -1, -1) if c in self._number)
        return next(earlier, 0)

    def _depends_on_precision(self, saved: Any) -> bool:
        """Whether what only exists inside a call was kept smaller when the call ran low."""
        if saved.dtype != "float32":
            return False
        probe = self._recorder.calls[saved.call].probe
        kept = () if probe is None else probe.saved
        return (saved.shape, torch.bfloat16.itemsize) in kept
