"""The formats `qsync-opt/problem` and `qsync-opt/plan`: the keys of the files and their types.

Keys are written in the order in which they stand here. `conversion` turns the documents into
problems and plans.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from qsync_opt.strict_json import Document, Part, Whole


class OperatorPart(Part, kw_only=True):
    """An operator; see `optimize.problem.Operator`."""

    name: str
    kind: str
    bucket: Whole | None
    follows: list[Whole] | UnsetType = UNSET


class CodePart(Part, kw_only=True):
    """Another way to send a bucket; see `optimize.problem.BucketCode`."""

    bits: Whole
    all_reduce_s: float
    perturbation: float


class BucketPart(Part, kw_only=True):
    """A gradient bucket; see `optimize.problem.Bucket`."""

    all_reduce_s: float
    size_bytes: Whole = msgspec.field(name="bytes")
    codes: list[CodePart] | UnsetType = UNSET


class TensorPart(Part, kw_only=True):
    """A tensor handed on; cast tables have the producer's precision as row."""

    producer: Whole
    consumers: list[Whole]
    forward_s: list[list[float]]
    backward_s: list[list[float]]


class SavedPart(Part, kw_only=True):
    """A tensor kept for backward, with its bytes by storage dtype."""

    savers: list[Whole]
    size_bytes: dict[str, Whole] = msgspec.field(name="bytes")


class DevicePart(Part, kw_only=True):
    """A device kind; tables are [operators x precisions], null where not available."""

    name: str
    workers: Whole
    batch_share: float
    memory_bytes: Whole
    fixed_bytes: Whole
    optimizer_s: float
    forward_s: list[list[float | None]]
    backward_s: list[list[float | None]]
    perturbation: list[list[float | None]]
    forward_transient_bytes: list[list[Whole | None]] | UnsetType = UNSET
    backward_transient_bytes: list[list[Whole | None]] | UnsetType = UNSET
    tensors: list[TensorPart]
    saved: list[SavedPart]
    pins: dict[str, str] | UnsetType = UNSET


class ProblemDocument(Document, kw_only=True):
    """A whole `qsync-opt/problem` file."""

    FORMAT: ClassVar[str] = "qsync-opt/problem"

    name: str
    provenance: str
    precisions: list[str]
    storage: list[str]
    output: list[str]
    operators: list[OperatorPart]
    buckets: list[BucketPart]
    groups: list[list[str]] | UnsetType = UNSET
    devices: list[DevicePart]
    deadline_s: float | None | UnsetType = UNSET
    slack: float | UnsetType = UNSET

    def strings(self) -> int:
        """How many strings the text has, keys included."""
        labels = (self.precisions, self.storage, self.output, *(self.groups or ()))
        count = _present(self) + len((self.format, self.name, self.provenance))
        count += sum(map(len, labels))
        for bucket in self.buckets:
            count += _present(bucket) + len(CodePart.__struct_fields__) * len(bucket.codes or ())
        for operator in self.operators:
            count += _present(operator) + len((operator.name, operator.kind))
        for device in self.devices:
            count += _present(device) + len((device.name,)) + 2 * len(device.pins or ())
            count += len(TensorPart.__struct_fields__) * len(device.tensors)
            count += len(SavedPart.__struct_fields__) * len(device.saved)
            count += sum(len(saved.size_bytes) for saved in device.saved)
        return count


class PlanDocument(Document, kw_only=True):
    """A whole `qsync-opt/plan` file."""

    FORMAT: ClassVar[str] = "qsync-opt/plan"

    problem: str
    devices: dict[str, dict[str, str]]
    communication: list[Whole] | UnsetType = UNSET

    def strings(self) -> int:
        """How many strings the text has, keys included."""
        rows = sum(1 + 2 * len(row) for row in self.devices.values())
        return _present(self) + len((self.format, self.problem)) + rows


def _present(part: Part) -> int:
    """How many keys of an object are given."""
    return sum(getattr(part, name) is not UNSET for name in part.__struct_fields__)
