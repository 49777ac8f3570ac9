"""From a `qsync-opt/graph` document to an `OperatorGraph`, and back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import Enum
from typing import TypeVar

from msgspec import UNSET, UnsetType

from qsync_opt.errors import FormatError
from qsync_opt.graph import (
    Coverage,
    GraphOperator,
    GraphParameter,
    GraphProvenance,
    GraphTensor,
    GroupReason,
    Operand,
    OperatorGraph,
    OperatorGroup,
    Origin,
    Role,
    SavedTensor,
    Signature,
)
from qsync_opt.graph_schema import (
    CoveragePart,
    GraphDocument,
    GraphOperatorPart,
    GraphParameterPart,
    GraphSavedPart,
    GraphTensorPart,
    GroupPart,
    OperandPart,
    OutputPart,
    ProvenancePart,
    SignaturePart,
)

E = TypeVar("E", bound=Enum)
T = TypeVar("T")


def to_graph(document: GraphDocument) -> OperatorGraph:
    """The graph in a file.

    Raises:
        FormatError: an unknown role, origin or reason, or bounds that are not two numbers.
        GraphError: the graph breaks a rule.
    """
    signatures = tuple(
        _to_signature(row, f"signatures[{i}]") for i, row in enumerate(document.signatures)
    )
    return OperatorGraph(
        name=document.name,
        operators=tuple(
            _to_operator(row, signatures, f"operators[{i}]")
            for i, row in enumerate(document.operators)
        ),
        signatures=signatures,
        tensors=tuple(
            GraphTensor(
                shape=tuple(row.shape),
                dtype=row.dtype,
                size_bytes=row.size_bytes,
                storage=row.storage,
                origin=_member(Origin, row.origin, f"tensors[{i}].origin"),
                producer=row.producer,
                parameter=None if row.parameter is UNSET else row.parameter,
                consumers=tuple(row.consumers),
                gradients=row.gradients,
                held_until=None if row.held_until is UNSET else row.held_until,
            )
            for i, row in enumerate(document.tensors)
        ),
        saved=tuple(
            SavedTensor(
                tensor=row.tensor,
                savers=tuple(row.savers),
                kept_output=_given(row.kept_output),
                elements=row.elements,
                size_bytes=row.size_bytes,
                follows_precision=row.follows_precision,
                resident=row.resident,
            )
            for row in document.saved
        ),
        parameters=tuple(
            GraphParameter(
                name=row.name,
                aliases=_given(row.aliases),
                shape=tuple(row.shape),
                dtype=row.dtype,
                requires_grad=row.requires_grad,
                operators=tuple(row.operators),
            )
            for row in document.parameters
        ),
        gradient_order=tuple(document.gradient_order),
        backward_order=tuple(document.backward_order),
        groups=tuple(
            OperatorGroup(
                operators=tuple(row.operators),
                reason=_member(GroupReason, row.reason, f"groups[{i}].reason"),
            )
            for i, row in enumerate(document.groups or ())
        ),
        buffer_bytes=document.buffer_bytes,
        batch_bytes=document.batch_bytes,
        coverage=Coverage(
            forward_s=document.coverage.forward_s,
            backward_s=document.coverage.backward_s,
            explained_s=document.coverage.explained_s,
            missing=document.coverage.missing_s,
        ),
        provenance=GraphProvenance(
            model=document.provenance.model,
            sizes=document.provenance.sizes,
            batch=document.provenance.batch,
            device_type=document.provenance.device_type,
            device=document.provenance.device,
            versions=document.provenance.versions,
            date=document.provenance.date,
        ),
    )


def _to_signature(row: SignaturePart, where: str) -> Signature:
    operands = []
    for i, operand in enumerate(row.operands):
        bounds = _given(operand.bounds)
        if len(bounds) not in (0, 2):
            rule = "must be the smallest and the largest value"
            raise FormatError(f"{where}.operands[{i}].bounds", rule, list(bounds))
        operands.append(
            Operand(
                shape=tuple(operand.shape),
                stride=tuple(operand.stride),
                dtype=operand.dtype,
                origin=_member(Origin, operand.origin, f"{where}.operands[{i}].origin"),
                requires_grad=operand.requires_grad,
                bounds=(bounds[0], bounds[1]) if bounds else None,
            )
        )
    return Signature(
        function=row.function,
        kind=row.kind,
        arguments=json.dumps(row.arguments, separators=(",", ":")),
        operands=tuple(operands),
        outputs=tuple((tuple(output.shape), output.dtype) for output in row.outputs),
        training=row.training,
        parts=_given(row.parts),
    )


def _to_operator(
    row: GraphOperatorPart, signatures: Sequence[Signature], where: str
) -> GraphOperator:
    if row.signature >= len(signatures):
        rule = f"must be indices from 0 to {len(signatures) - 1}"
        raise FormatError(f"{where}.signature", rule, row.signature)
    return GraphOperator(
        name=row.name,
        module=row.module,
        module_type=row.module_type,
        kind=signatures[row.signature].kind,
        role=_member(Role, row.role, f"{where}.role"),
        signature=row.signature,
        inputs=tuple(row.inputs),
        outputs=tuple(row.outputs),
        follows=_given(row.follows),
        parameters=_given(row.parameters),
        differentiable=row.differentiable,
        forward_flops=row.forward_flops,
        backward_flops=row.backward_flops,
        sequence_number=row.sequence_number,
    )


def _member(kind: type[E], value: str, field: str) -> E:
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(str(member.value) for member in kind)
        raise FormatError(field, f"must be one of {known}", value) from None


def _given(values: list[T] | UnsetType) -> tuple[T, ...]:
    return () if isinstance(values, UnsetType) else tuple(values)


def from_graph(graph: OperatorGraph) -> GraphDocument:
    """The file of a graph."""
    return GraphDocument(
        format=GraphDocument.FORMAT,
        version=GraphDocument.VERSION,
        name=graph.name,
        provenance=ProvenancePart(
            model=graph.provenance.model,
            sizes=dict(graph.provenance.sizes),
            batch=dict(graph.provenance.batch),
            device_type=graph.provenance.device_type,
            device=graph.provenance.device,
            versions=dict(graph.provenance.versions),
            date=graph.provenance.date,
        ),
        coverage=CoveragePart(
            forward_s=graph.coverage.forward_s,
            backward_s=graph.coverage.backward_s,
            explained_s=graph.coverage.explained_s,
            missing_s=dict(graph.coverage.missing),
        ),
        operators=[
            GraphOperatorPart(
                name=op.name,
                module=op.module,
                module_type=op.module_type,
                role=op.role.value,
                signature=op.signature,
                inputs=list(op.inputs),
                outputs=list(op.outputs),
                follows=list(op.follows) or UNSET,
                parameters=list(op.parameters) or UNSET,
                differentiable=op.differentiable,
                forward_flops=op.forward_flops,
                backward_flops=op.backward_flops,
                sequence_number=op.sequence_number,
            )
            for op in graph.operators
        ],
        signatures=[_from_signature(signature) for signature in graph.signatures],
        tensors=[
            GraphTensorPart(
                shape=list(tensor.shape),
                dtype=tensor.dtype,
                size_bytes=tensor.size_bytes,
                storage=tensor.storage,
                origin=tensor.origin.value,
                producer=tensor.producer,
                parameter=UNSET if tensor.parameter is None else tensor.parameter,
                consumers=list(tensor.consumers),
                gradients=tensor.gradients,
                held_until=UNSET if tensor.held_until is None else tensor.held_until,
            )
            for tensor in graph.tensors
        ],
        saved=[
            GraphSavedPart(
                tensor=saved.tensor,
                savers=list(saved.savers),
                kept_output=list(saved.kept_output) or UNSET,
                elements=saved.elements,
                size_bytes=saved.size_bytes,
                follows_precision=saved.follows_precision,
                resident=saved.resident,
            )
            for saved in graph.saved
        ],
        parameters=[
            GraphParameterPart(
                name=parameter.name,
                aliases=list(parameter.aliases) or UNSET,
                shape=list(parameter.shape),
                dtype=parameter.dtype,
                requires_grad=parameter.requires_grad,
                operators=list(parameter.operators),
            )
            for parameter in graph.parameters
        ],
        gradient_order=list(graph.gradient_order),
        backward_order=list(graph.backward_order),
        groups=[
            GroupPart(operators=list(group.operators), reason=group.reason.value)
            for group in graph.groups
        ]
        or UNSET,
        buffer_bytes=graph.buffer_bytes,
        batch_bytes=graph.batch_bytes,
    )


def _from_signature(signature: Signature) -> SignaturePart:
    return SignaturePart(
        function=signature.function,
        kind=signature.kind,
        arguments=json.loads(signature.arguments),
        operands=[
            OperandPart(
                shape=list(operand.shape),
                stride=list(operand.stride),
                dtype=operand.dtype,
                origin=operand.origin.value,
                requires_grad=operand.requires_grad,
                bounds=UNSET if operand.bounds is None else list(operand.bounds),
            )
            for operand in signature.operands
        ],
        outputs=[OutputPart(shape=list(shape), dtype=dtype) for shape, dtype in signature.outputs],
        training=signature.training,
        parts=list(signature.parts) or UNSET,
    )
