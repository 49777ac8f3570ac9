"""The format `qsync-opt/graph`: the keys of the file and their types.

`graph_conversion` turns the document into an `OperatorGraph` and back; what each key means
stands with the class of the same name in `graph`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from qsync_opt.strict_json import Document, Part, Whole


class OperandPart(Part, kw_only=True):
    """A tensor argument of a signature; see `graph.Operand`."""

    shape: list[Whole]
    stride: list[Whole]
    dtype: str
    origin: str
    requires_grad: bool
    bounds: list[int] | UnsetType = UNSET


class OutputPart(Part, kw_only=True):
    """A tensor that comes out of a signature."""

    shape: list[Whole]
    dtype: str


class SignaturePart(Part, kw_only=True):
    """What determines the cost of an operator; see `graph.Signature`."""

    function: str
    kind: str
    arguments: list[Any]
    operands: list[OperandPart]
    outputs: list[OutputPart]
    training: bool
    parts: list[str] | UnsetType = UNSET


class GraphOperatorPart(Part, kw_only=True):
    """An operator; see `graph.GraphOperator`."""

    name: str
    module: str
    module_type: str
    role: str
    signature: Whole
    inputs: list[Whole]
    outputs: list[Whole]
    follows: list[Whole] | UnsetType = UNSET
    parameters: list[Whole] | UnsetType = UNSET
    differentiable: bool
    forward_flops: Whole
    backward_flops: Whole
    sequence_number: Whole | None


class GraphTensorPart(Part, kw_only=True):
    """A tensor of the step; see `graph.GraphTensor`."""

    shape: list[Whole]
    dtype: str
    size_bytes: Whole = msgspec.field(name="bytes")
    storage: Whole
    origin: str
    producer: Whole | None
    parameter: Whole | UnsetType = UNSET
    consumers: list[Whole]
    gradients: Whole
    held_until: Whole | UnsetType = UNSET


class GraphSavedPart(Part, kw_only=True):
    """A storage kept for backward; see `graph.SavedTensor`."""

    tensor: Whole | None
    savers: list[Whole]
    kept_output: list[Whole] | UnsetType = UNSET
    elements: Whole
    size_bytes: Whole = msgspec.field(name="bytes")
    follows_precision: bool
    resident: bool


class GraphParameterPart(Part, kw_only=True):
    """A parameter; see `graph.GraphParameter`."""

    name: str
    aliases: list[str] | UnsetType = UNSET
    shape: list[Whole]
    dtype: str
    requires_grad: bool
    operators: list[Whole]


class GroupPart(Part, kw_only=True):
    """Operators that share a precision; see `graph.OperatorGroup`."""

    operators: list[Whole]
    reason: str


class CoveragePart(Part, kw_only=True):
    """How much of the step's time the graph explains; see `graph.Coverage`."""

    forward_s: float
    backward_s: float
    explained_s: float
    missing_s: dict[str, float]


class ProvenancePart(Part, kw_only=True):
    """How the graph came about; see `graph.GraphProvenance`."""

    model: str
    sizes: dict[str, str]
    batch: dict[str, str]
    device_type: str
    device: str
    versions: dict[str, str]
    date: str


class GraphDocument(Document, kw_only=True):
    """A whole `qsync-opt/graph` file."""

    FORMAT: ClassVar[str] = "qsync-opt/graph"

    name: str
    provenance: ProvenancePart
    coverage: CoveragePart
    operators: list[GraphOperatorPart]
    signatures: list[SignaturePart]
    tensors: list[GraphTensorPart]
    saved: list[GraphSavedPart]
    parameters: list[GraphParameterPart]
    gradient_order: list[Whole]
    backward_order: list[Whole]
    groups: list[GroupPart] | UnsetType = UNSET
    buffer_bytes: Whole
    batch_bytes: Whole
