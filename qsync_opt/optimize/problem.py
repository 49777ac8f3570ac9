"""`AllocationProblem`: which precision each operator may run at, and what that costs.

Sets: device kinds r with n_r workers and batch share a_r, operators o = 1..N in forward
order, precisions p = 1..P, gradient buckets k = 1..K in launch order. The data is columnar:
one array per quantity, one row per operator (or tensor), one column per precision. Arrays
are read-only, the classes frozen, and everything is validated once, on construction, by
`validation.validate`.

Units: times in float seconds (`_s`), memory in whole bytes (`_bytes`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType

import numpy as np

from qsync_opt.optimize.arrays import (
    BoolArray,
    FloatArray,
    IntArray,
    bool_table,
    finite_number,
    float_table,
    freeze,
    int_table,
    whole_number,
)
from qsync_opt.optimize.buckets import Bucket as Bucket
from qsync_opt.optimize.buckets import BucketCode as BucketCode
from qsync_opt.optimize.buckets import chosen
from qsync_opt.optimize.canonical import problem_sha256
from qsync_opt.optimize.fields import (
    as_members,
    as_precision,
    as_precisions,
    as_sequence,
    require_type,
)
from qsync_opt.optimize.tensors import NOT_GIVEN as NOT_GIVEN
from qsync_opt.optimize.tensors import CastTensors as CastTensors
from qsync_opt.optimize.tensors import SavedTensors as SavedTensors
from qsync_opt.precision import Precision


@dataclass(frozen=True, kw_only=True, slots=True)
class Operator:
    """A node of the forward graph.

    Attributes:
        name: unique name, usually the module's fully qualified name.
        kind: what it computes (`conv2d`, `linear`, `relu`, ...); a label for people.
        bucket: index of the gradient bucket its parameters are in, None without parameters.
        follows: indices of the operators whose outputs decide its precision (a follower);
            empty for an operator with a choice of its own, or with one option only.
    """

    name: str
    kind: str
    bucket: int | None = None
    follows: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.follows, list):
            object.__setattr__(self, "follows", tuple(self.follows))


@dataclass(frozen=True, kw_only=True, eq=False)
class DeviceKind:
    """A kind of device: how many workers are of it and what each operator costs there.

    Attributes:
        name: unique name.
        workers: how many ranks are of this kind.
        batch_share: fraction of the global batch that one worker handles.
        memory_bytes: memory a worker may use.
        fixed_bytes: what is always taken: context, parameters, gradients, optimizer state.
        optimizer_s: time of the optimizer step.
        available: which precisions each operator has here, [N, P].
        forward_s, backward_s: time of the operator, [N, P]; 0 where not available.
        perturbation: variance the operator adds to this kind's gradient, [N, P].
        forward_transient_bytes, backward_transient_bytes: memory held only while the
            operator runs, [N, P]; None means none.
        tensors: what is handed from operator to operator, with cast times.
        saved: what is kept for backward.
        pins: operator name -> precision it must have.
    """

    name: str
    workers: int
    batch_share: float
    memory_bytes: int
    fixed_bytes: int
    optimizer_s: float
    available: BoolArray
    forward_s: FloatArray
    backward_s: FloatArray
    perturbation: FloatArray
    tensors: CastTensors
    saved: SavedTensors
    forward_transient_bytes: IntArray | None = None
    backward_transient_bytes: IntArray | None = None
    pins: Mapping[str, Precision] = field(default_factory=dict)

    def __post_init__(self) -> None:
        where = f"devices.{self.name}"
        put = object.__setattr__
        put(self, "workers", whole_number(self.workers, f"{where}.workers", least=1))
        share = finite_number(self.batch_share, f"{where}.batch_share", positive=True)
        put(self, "batch_share", share)
        for name in ("memory_bytes", "fixed_bytes"):
            put(self, name, whole_number(getattr(self, name), f"{where}.{name}", least=0))
        put(self, "optimizer_s", finite_number(self.optimizer_s, f"{where}.optimizer_s"))
        available = bool_table(self.available, f"{where}.available", 2)
        put(self, "available", available)
        for name in ("forward_s", "backward_s", "perturbation"):
            table = float_table(getattr(self, name), f"{where}.{name}", 2)
            if table.shape == available.shape:
                table = freeze(np.where(available, table, 0.0))
            put(self, name, table)
        for name in ("forward_transient_bytes", "backward_transient_bytes"):
            value = getattr(self, name)
            if value is None:
                value = np.zeros(available.shape, dtype=np.int64)
            sizes = int_table(value, f"{where}.{name}", 2)
            if sizes.shape == available.shape:
                sizes = freeze(np.where(available, sizes, 0))
            put(self, name, sizes)
        require_type(self.tensors, CastTensors, f"{where}.tensors")
        require_type(self.saved, SavedTensors, f"{where}.saved")
        if not len(self.tensors):  # of no tensors, every shape says the same
            none = freeze(np.zeros((0, available.shape[1], available.shape[1])))
            put(self, "tensors", replace(self.tensors, forward_s=none, backward_s=none))
        require_type(self.pins, Mapping, f"{where}.pins")
        pins = {
            operator: as_precision(precision, f"{where}.pins.{operator}")
            for operator, precision in self.pins.items()
        }
        put(self, "pins", MappingProxyType(pins))

    def __reduce__(self) -> tuple[object, ...]:
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        fields["pins"] = dict(self.pins)
        return (_rebuild_device, (fields,))


def _rebuild_device(fields: dict[str, object]) -> DeviceKind:
    return DeviceKind(**fields)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True, eq=False)
class AllocationProblem:
    """One allocation problem: operators, buckets, device kinds, and the pace to keep.

    Attributes:
        name: a short name.
        provenance: how the numbers came about.
        precisions: the P columns of every table.
        storage: dtype in which a saved tensor is kept at each precision, [P].
        output: dtype that an operator at each precision hands on, [P].
        operators: in forward order; backward order is its reverse.
        buckets: in launch order.
        groups: names of operators that must share a precision (tied or fused layers).
        devices: the device kinds.
        deadline_s: iteration time to keep; None asks for (1 + slack) x the fastest feasible.
        slack: see `deadline_s`.

    Raises:
        ProblemError: any rule of the format is broken; names field, rule and value.
    """

    name: str
    provenance: str
    precisions: tuple[Precision, ...]
    storage: tuple[Precision, ...]
    output: tuple[Precision, ...]
    operators: tuple[Operator, ...]
    buckets: tuple[Bucket, ...]
    devices: tuple[DeviceKind, ...]
    groups: tuple[tuple[str, ...], ...] = ()
    deadline_s: float | None = None
    slack: float = 0.0

    def __post_init__(self) -> None:
        put = object.__setattr__
        for name in ("precisions", "storage", "output"):
            put(self, name, as_precisions(getattr(self, name), name))
        put(self, "operators", as_members(self.operators, Operator, "operators"))
        put(self, "buckets", as_members(self.buckets, Bucket, "buckets"))
        for index, bucket in enumerate(self.buckets):
            as_members(bucket.codes, BucketCode, f"buckets[{index}].codes")
        put(self, "devices", as_members(self.devices, DeviceKind, "devices"))
        groups = enumerate(as_sequence(self.groups, "groups"))
        put(self, "groups", tuple(as_sequence(group, f"groups[{i}]") for i, group in groups))
        from qsync_opt.optimize.validation import validate  # reads this module's classes

        validate(self)

    @cached_property
    def operator_index(self) -> Mapping[str, int]:
        """Operator name -> index."""
        return MappingProxyType({op.name: index for index, op in enumerate(self.operators)})

    @cached_property
    def operator_bucket(self) -> IntArray:
        """Bucket index of every operator, -1 without one, [N]."""
        buckets = (-1 if op.bucket is None else op.bucket for op in self.operators)
        return freeze(np.fromiter(buckets, dtype=np.int64, count=len(self.operators)))

    @cached_property
    def device_index(self) -> Mapping[str, int]:
        """Device kind -> index."""
        return MappingProxyType({kind.name: index for index, kind in enumerate(self.devices)})

    @cached_property
    def has_codes(self) -> bool:
        """Whether the bits of some bucket are a decision."""
        return any(bucket.codes for bucket in self.buckets)

    @cached_property
    def fastest_bits(self) -> tuple[int, ...]:
        """Bits of every bucket in which it is reduced soonest, more bits among equals, [K]."""
        return tuple(min(b.choices, key=lambda c: c.all_reduce_s).bits for b in self.buckets)

    def at_bits(self, bits: Sequence[int]) -> AllocationProblem:
        """The problem in which every bucket is sent in given bits: no codes, constant times.

        What the codes add to the variance is no part of it (`bits_perturbation`), and its
        plans are not plans of this problem: their hashes differ.

        Args:
            bits: of every bucket in launch order; empty for 32 bits everywhere.

        Raises:
            PlanError: another number of buckets, or bits that a bucket does not have.
        """
        if not (self.has_codes or len(bits)):
            return self
        picks = chosen(self.buckets, bits)
        if not self.has_codes:
            return self
        fixed = (
            Bucket(all_reduce_s=code.all_reduce_s, size_bytes=bucket.size_bytes)
            for bucket, code in zip(self.buckets, picks, strict=True)
        )
        return replace(self, buckets=tuple(fixed))

    def bits_perturbation(self, bits: Sequence[int]) -> float:
        """Variance that sending in given bits adds to the averaged gradient, with weight 1.

        Args:
            bits: of every bucket in launch order; empty for 32 bits everywhere.

        Raises:
            PlanError: another number of buckets, or bits that a bucket does not have.
        """
        return math.fsum(code.perturbation for code in chosen(self.buckets, bits))

    def weight(self, device: DeviceKind) -> float:
        """n_r a_r^2: what one unit of this kind's perturbation adds to the objective.

        The averaged gradient is sum_r n_r a_r g_r; independent noise of variance v on each
        worker of kind r therefore adds n_r a_r^2 v (design, objective (0)).
        """
        return device.workers * device.batch_share**2

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the canonical form: what the meaning of a plan depends on (`canonical`)."""
        return problem_sha256(self)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AllocationProblem):
            return NotImplemented
        mine = (self.name, self.provenance, self.deadline_s, self.slack, self.sha256)
        return mine == (other.name, other.provenance, other.deadline_s, other.slack, other.sha256)

    def __hash__(self) -> int:
        return hash(self.sha256)
