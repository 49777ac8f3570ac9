"""The format `qsync-opt/costs`: the keys of the file and their types.

`costs_conversion` turns the document into `DeviceCosts` and back; what each key means stands
with the class of the same name in `costs`. Null stands for what was not measured.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from qsync_opt.strict_json import Document, Part, Whole

FloatTable = list[list[float | None]]
ByteTable = list[list[int]]


class OperatorTablesPart(Part, kw_only=True):
    """Tables [signatures x precisions]; see `costs.OperatorCosts`."""

    forward_s: FloatTable
    backward_s: FloatTable
    forward_spread: FloatTable
    backward_spread: FloatTable
    forward_host_s: FloatTable
    backward_host_s: FloatTable
    input_cast_s: list[FloatTable]
    input_bytes: ByteTable
    own_saved_bytes: ByteTable
    forward_transient_bytes: ByteTable
    backward_transient_bytes: ByteTable


class ElementTablesPart(Part, kw_only=True):
    """Tables by number of elements; see `costs.ElementCosts`."""

    elements: list[Whole]
    cast_s: list[FloatTable]
    add_s: FloatTable
    copy_s: list[float | None]


class CodedTimesPart(Part, kw_only=True):
    """Times at other bits; see `costs_network.CodedTimes`."""

    bits: Whole
    time_s: list[float]
    spread: list[float]


class AllReducePart(Part, kw_only=True):
    """Times by size; see `costs_network.AllReduceCosts`."""

    ranks: Whole
    backend: str
    size_bytes: list[Whole] = msgspec.field(name="bytes")
    time_s: list[float]
    spread: list[float]
    codes: list[CodedTimesPart] | UnsetType = UNSET


class GradientBucketPart(Part, kw_only=True):
    """A bucket of DDP; see `costs_network.GradientBucket`."""

    size_bytes: Whole = msgspec.field(name="bytes")
    parameters: list[str]


class OptimizerPart(Part, kw_only=True):
    """The optimizer; see `costs.OptimizerCosts`."""

    name: str
    step_s: float
    spread: float
    state_bytes: Whole
    host_s: float = 0.0


class FixedMemoryPart(Part, kw_only=True):
    """Memory whatever the plan; see `costs.FixedMemory`."""

    rounding_bytes: Whole
    parameter_bytes: Whole
    gradient_bytes: Whole
    buffer_bytes: Whole
    batch_bytes: Whole
    workspace_bytes: Whole
    context_bytes: Whole
    device_bytes: Whole


class StepPart(Part, kw_only=True):
    """A whole step; see `costs.StepCosts`."""

    precision: str
    forward_s: float
    backward_s: float
    spread: float
    host_s: float
    peak_bytes: Whole
    unused_bytes: Whole


class HeldOutRunPart(Part, kw_only=True):
    """A plan that was predicted and run; see `calibration.HeldOutRun`."""

    plan: str
    ranks: Whole
    predicted_s: float
    measured_s: float
    date: str


class UnavailablePart(Part, kw_only=True):
    """A missing entry; see `costs.Unavailable`."""

    signature: Whole | None
    precision: str
    reason: str


class CostsProvenancePart(Part, kw_only=True):
    """Where and how; see `costs.CostsProvenance`."""

    device_type: str
    device: str
    threads: Whole
    share: Whole
    driver: str
    versions: dict[str, str]
    batch: dict[str, str]
    date: str


class CostsDocument(Document, kw_only=True):
    """A whole `qsync-opt/costs` file."""

    FORMAT: ClassVar[str] = "qsync-opt/costs"

    provenance: CostsProvenancePart
    graph_sha256: str
    precisions: list[str]
    half: str
    warnings: list[str]
    unavailable: list[UnavailablePart]
    steps: list[StepPart]
    optimizer: OptimizerPart
    memory: FixedMemoryPart
    buckets: list[GradientBucketPart]
    all_reduce: AllReducePart | UnsetType = UNSET
    held_out: list[HeldOutRunPart] | UnsetType = UNSET  # files of earlier releases lack it
    operators: OperatorTablesPart
    casts: ElementTablesPart


class PartialCostsDocument(Document, kw_only=True):
    """What an interrupted measurement has so far: measured thing -> its numbers, or a reason."""

    FORMAT: ClassVar[str] = "qsync-opt/partial-costs"

    key: str
    entries: dict[str, Any]
