"""`OperatorGraph`: what one training step of a model did, as capture recorded it.

Operators stand in forward order; the backward of the step is their reverse unless
`backward_order` says otherwise. Everything is referred to by index: operators, tensors,
signatures and parameters each have one tuple in the graph. Views cost nothing and are folded:
whoever reads a view reads the tensor it is a view of.

Names of operators: a module that runs one operator gives it its fully qualified name; else the
name is `<module>.<function>`, and `<function>` alone outside of every submodule. Calls in the
loss have `loss` for a module. A repeated name gets `.1`, `.2`, ... in the order of the calls.

Units: memory in whole bytes (`_bytes`), operations in whole floating-point operations
(`_flops`, a multiply-add counts as two), time in float seconds (`_s`). No torch here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from functools import cached_property
from math import prod
from types import MappingProxyType
from typing import Any

from qsync_opt.precision import Precision


class Role(str, Enum):
    """How the precision of an operator comes about.

    `adjustable`: it is chosen (the operator multiplies matrices, convolves, or looks up rows
    of a parameter). `follower`: it is the promotion of what the followed operators hand on,
    as under torch.autocast. `fixed`: always fp32.
    """

    ADJUSTABLE = "adjustable"
    FOLLOWER = "follower"
    FIXED = "fixed"

    def __str__(self) -> str:
        return self.value


class Origin(str, Enum):
    """Where a tensor comes from.

    `operator`: the output of one. `batch`, `parameter`, `buffer`: handed to the step.
    `constant`: a tensor that the model holds as neither, or that no torch function made.
    """

    OPERATOR = "operator"
    BATCH = "batch"
    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"

    def __str__(self) -> str:
        return self.value


class GroupReason(str, Enum):
    """Why operators share a precision.

    `shared_module`: one module was called more than once, so one layer runs them all.
    `tied_parameter`: different modules read the same parameter.
    """

    SHARED_MODULE = "shared_module"
    TIED_PARAMETER = "tied_parameter"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, kw_only=True, slots=True)
class Operand:
    """A tensor argument of a call, as the call reads it.

    Attributes:
        shape, stride: in elements; those of the view where a view is read.
        dtype: torch's name without the prefix, for example `float32` or `int64`.
        origin: of the tensor that is read.
        requires_grad: whether a gradient is computed for it.
        bounds: smallest and largest value of an integer tensor, so that indices can be made
            up that are valid; None for other dtypes and for empty tensors.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    origin: Origin
    requires_grad: bool
    bounds: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Signature:
    """What determines the cost of an operator: equal signatures cost the same on a device.

    Attributes:
        function: dotted name of the function called, for example
            `torch.nn.functional.linear` or `torch.Tensor.add`.
        kind: the function without its place, for example `linear`, `conv2d`, `add`.
        arguments: compact JSON text `[positional, keywords]`. An object with one key stands
            for what JSON has not: `{"operand": i}` the i-th of `operands`, `{"dtype": "int64"}`,
            `{"device": null}` the device of the step, `{"tuple": [...]}`,
            `{"slice": [start, stop, step]}`, `{"ellipsis": true}`, `{"float": "inf"}`,
            `{"memory_format": "channels_last"}`, `{"enum": ["dotted.Class", value]}`,
            `{"dict": {...}}`; `{"opaque": "class"}` cannot be read back.
        operands: the tensor arguments, in the order in which they stand in `arguments`.
        outputs: shape and dtype of every tensor that comes out (an in-place call: what it
            wrote).
        training: of the module that makes the call.
        parts: adjustable operators: the matrix products inside, as torch names the low-level
            operations (`addmm`, `convolution`, `_scaled_dot_product_flash_attention`);
            empty for a look-up and for every other operator.
    """

    function: str
    kind: str
    arguments: str
    operands: tuple[Operand, ...]
    outputs: tuple[tuple[tuple[int, ...], str], ...]
    training: bool
    parts: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphOperator:
    """A call of the step that computes something.

    Attributes:
        name: unique; see the module's docstring.
        module: fully qualified name of the innermost module that made the call; "" for the
            model itself, `loss` for the loss.
        module_type: class of that module, for example `torch.nn.modules.linear.Linear`.
        kind: `Signature.kind`.
        role: how its precision comes about.
        signature: index into `OperatorGraph.signatures`.
        inputs: the tensor of every operand of the signature, by index.
        outputs: tensors that it makes, by index. An in-place call makes a new tensor with the
            storage of the one it overwrites.
        follows: a follower: the operators whose outputs decide its precision, ascending.
        parameters: parameters that it reads, by index.
        differentiable: whether it has a backward.
        forward_flops, backward_flops: as torch.utils.flop_counter counts them.
        sequence_number: autograd's number of its last node, counted from the first of the
            step; None without backward.
    """

    name: str
    module: str
    module_type: str
    kind: str
    role: Role
    signature: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    follows: tuple[int, ...] = ()
    parameters: tuple[int, ...] = ()
    differentiable: bool
    forward_flops: int
    backward_flops: int
    sequence_number: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphTensor:
    """A tensor of the step; a view is the tensor it views.

    Attributes:
        shape: in elements.
        dtype: as captured, `float32` for what a precision can change.
        size_bytes: of its storage as captured.
        storage: number of its storage; tensors with equal numbers share memory (in place).
        origin: where it comes from.
        producer: the operator that makes it; None unless `origin` is `operator`.
        parameter: index of the parameter it is, else None.
        consumers: operators that read it, ascending, each once.
        gradients: how many gradients autograd adds up for it: one for every use that has a
            backward. One fewer is the number of additions of its size in the backward.
        held_until: the last operator during whose forward the code of the model still holds
            it or a view of it (a local variable lives until its function returns). What
            backward keeps does not count. None where no operator makes it, and where it is
            not known.
    """

    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    storage: int
    origin: Origin
    producer: int | None
    parameter: int | None = None
    consumers: tuple[int, ...]
    gradients: int
    held_until: int | None = None

    @property
    def elements(self) -> int:
        """How many numbers it holds."""
        return prod(self.shape)

    @property
    def is_float(self) -> bool:
        """Whether a precision can change its dtype."""
        return self.dtype == "float32"

    @property
    def last_needed(self) -> int | None:
        """The last operator during whose forward it is in memory, kept or not."""
        known = (*self.consumers[-1:], self.producer, self.held_until)
        return max((index for index in known if index is not None), default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedTensor:
    """A storage kept from forward to backward; parameters are not here.

    It lives from the forward of its first saver to the backward of its first saver.

    Attributes:
        tensor: the tensor it is, or None for one that only exists inside its saver (a mask,
            statistics, indices).
        savers: operators that keep it, ascending.
        kept_output: those of `savers` that made it and keep it as their output. They keep it
            in the dtype they hand on; the others keep an input, in their storage dtype.
        elements: of the whole storage.
        size_bytes: of the storage as captured.
        follows_precision: whether the bytes depend on the savers' precision; masks, indices
            and fp32 statistics stay as they are.
        resident: whether it is in memory anyway (the batch, a buffer), so that only copies in
            other dtypes take more.
    """

    tensor: int | None
    savers: tuple[int, ...]
    kept_output: tuple[int, ...] = ()
    elements: int
    size_bytes: int
    follows_precision: bool
    resident: bool = False

    def bytes_at(self, dtype: Precision) -> int:
        """Bytes that one copy in a storage dtype adds."""
        if self.resident and (not self.follows_precision or dtype.storage is Precision.FP32):
            return 0
        return self.elements * dtype.element_bytes if self.follows_precision else self.size_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphParameter:
    """A parameter of the model.

    Attributes:
        name: its first fully qualified name.
        aliases: its other names, where it is tied.
        shape: in elements.
        dtype: `float32` where it is trained.
        requires_grad: False where it is frozen.
        operators: operators that read it, ascending; its gradient is complete after the
            backward of the first of them that has one. Empty where the step does not use it.
    """

    name: str
    aliases: tuple[str, ...] = ()
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool
    operators: tuple[int, ...]

    @property
    def elements(self) -> int:
        """How many numbers it holds."""
        return prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorGroup:
    """Adjustable operators that share a precision.

    Attributes:
        operators: at least two, ascending.
        reason: why they do.
    """

    operators: tuple[int, ...]
    reason: GroupReason


@dataclass(frozen=True, kw_only=True, slots=True)
class Coverage:
    """How much of the step the graph explains.

    Time is what low-level operations took in the recorded step, on the device; time between
    them belongs to the host and is measured elsewhere.

    Attributes:
        forward_s, backward_s: all of it, forward with loss and backward.
        explained_s: the part inside captured operators.
        missing: what the rest is -> seconds, longest first.
    """

    forward_s: float
    backward_s: float
    explained_s: float
    missing: Mapping[str, float] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """The explained part, 0 to 1."""
        total = self.forward_s + self.backward_s
        return self.explained_s / total if total else 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphProvenance:
    """How a graph came about.

    Attributes:
        model: the model file, or the class of the model.
        sizes: what `build` was called with, name -> value as text.
        batch: leaf of the batch -> shape and dtype as text, for example `float32[8, 3, 32, 32]`.
        device_type: `cpu` or `cuda`: whose rules of promotion the roles follow.
        device: name of the device.
        versions: library -> version.
        date: ISO 8601, UTC.
    """

    model: str
    sizes: Mapping[str, str]
    batch: Mapping[str, str]
    device_type: str
    device: str
    versions: Mapping[str, str]
    date: str


@dataclass(frozen=True, kw_only=True, eq=False)
class OperatorGraph:
    """One training step as a graph of operators.

    Attributes:
        name: a short name.
        operators: in forward order.
        signatures: each different one once.
        tensors: what operators read and make.
        saved: what is kept for backward.
        parameters: of the model, in the order of `named_parameters`.
        gradient_order: parameters in the order in which their gradients were complete.
        backward_order: operators with a backward in the order in which it ran.
        groups: operators that share a precision.
        buffer_bytes: all buffers of the model.
        batch_bytes: all tensors of the batch.
        coverage: how much of the step's time the graph explains.
        provenance: how the graph came about.

    Raises:
        GraphError: an index, a name or an order that breaks a rule (`graph_validation`).
    """

    name: str
    operators: tuple[GraphOperator, ...]
    signatures: tuple[Signature, ...]
    tensors: tuple[GraphTensor, ...]
    saved: tuple[SavedTensor, ...]
    parameters: tuple[GraphParameter, ...]
    gradient_order: tuple[int, ...]
    backward_order: tuple[int, ...]
    groups: tuple[OperatorGroup, ...] = ()
    buffer_bytes: int
    batch_bytes: int
    coverage: Coverage
    provenance: GraphProvenance

    def __post_init__(self) -> None:
        from qsync_opt.graph_validation import validate_graph  # reads this module's classes

        validate_graph(self)

    @cached_property
    def operator_index(self) -> Mapping[str, int]:
        """Operator name -> index."""
        return MappingProxyType({op.name: index for index, op in enumerate(self.operators)})

    @cached_property
    def adjustable(self) -> tuple[int, ...]:
        """The operators whose precision is chosen, by index."""
        roles = enumerate(op.role for op in self.operators)
        return tuple(index for index, role in roles if role is Role.ADJUSTABLE)

    def signature_of(self, operator: int) -> Signature:
        """The signature of an operator."""
        return self.signatures[self.operators[operator].signature]

    @cached_property
    def completes(self) -> tuple[tuple[int, ...], ...]:
        """For every operator the trained parameters whose gradient its backward completes."""
        rows: list[list[int]] = [[] for _ in self.operators]
        for index in self.gradient_order:
            readers = self.parameters[index].operators
            rows[next(i for i in readers if self.operators[i].differentiable)].append(index)
        return tuple(map(tuple, rows))

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the step itself: neither names of graphs nor times nor provenance.

        How long the code of the model holds tensors is no part of it: nothing that is
        measured of operators depends on it.
        """
        skip = ("name", "coverage", "provenance")
        rows = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in skip}
        plain = {
            name: [_plain(row) if hasattr(row, "__dataclass_fields__") else row for row in value]
            if isinstance(value, tuple)
            else value
            for name, value in rows.items()
        }
        text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, OperatorGraph):
            return NotImplemented
        mine = (self.name, self.coverage, self.provenance, self.tensors, self.sha256)
        return mine == (other.name, other.coverage, other.provenance, other.tensors, other.sha256)

    def __hash__(self) -> int:
        return hash(self.sha256)


def _plain(row: Any) -> dict[str, object]:
    return {name: value for name, value in asdict(row).items() if name != "held_until"}
