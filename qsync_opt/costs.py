"""`DeviceCosts`: what one kind of device was measured to take; `Cluster`: the workers of a job.

Tables have one row per signature of the graph (`OperatorGraph.signatures`), one column per
precision; dtypes that tensors are handed on in (`HANDED_ON`: fp32, bf16, fp16) are the axes of
cast tables. NaN stands for what was not measured: a precision that the device lacks or that
ran out of memory. Arrays are read-only.

Who pays for a cast. An operator's own time starts from inputs in the dtype that it reads:
the cast of its weight, and every cast inside its backward but the last, are part of it. The
cast of an input belongs to the edge from producer to consumer (`OperatorCosts.input_cast_s`
for layers, which share it, else `ElementCosts.cast_s`), and so does the cast of the input's
gradient back to the dtype of the input. An operator that quantises operands by itself
whatever their dtype (a product of two activations from 8-bit codes) pays for that itself.

Units: seconds (`_s`) and whole bytes (`_bytes`). No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np

from qsync_opt.calibration import HeldOutRun, largest_error
from qsync_opt.costs_checks import AS_DTYPE as AS_DTYPE
from qsync_opt.costs_checks import interpolate as interpolate
from qsync_opt.costs_checks import own_arrays, require
from qsync_opt.costs_network import AllReduceCosts as AllReduceCosts
from qsync_opt.costs_network import GradientBucket as GradientBucket
from qsync_opt.optimize.arrays import FloatArray, IntArray
from qsync_opt.precision import HANDED_ON, Precision

#: Relative spread above which a device was busy with something else.
LARGEST_SPREAD = 0.2


@dataclass(frozen=True, kw_only=True, eq=False)
class OperatorCosts:
    """Costs of S signatures at P precisions.

    Attributes:
        forward_s, backward_s: device time, medians, [S, P]. Backward holds the sum of
            gradients into parameters' `grad`, not the addition of several gradients.
        forward_spread, backward_spread: distance of the quartiles over the median, [S, P].
        forward_host_s, backward_host_s: time until the host had launched it, [S, P]; zero on
            a CPU, where host and device are one.
        input_cast_s: cast of the input, by the dtype it arrives in, of operators whose cast
            is shared by all readers of the same kind, [S, P, 3]; NaN for other operators.
        input_bytes: size of the copy of the input that is kept for backward, `AS_DTYPE`
            where it has no extra parts such as scales, [S, P].
        own_saved_bytes: what is kept for backward besides inputs and outputs (masks,
            statistics, seeds), [S, P].
        forward_transient_bytes: memory that only the forward takes: its peak over what is
            left after it, [S, P].
        backward_transient_bytes: peak of the backward over what was there before it: its
            gradients, the casts and workspaces, [S, P].
    """

    forward_s: FloatArray
    backward_s: FloatArray
    forward_spread: FloatArray
    backward_spread: FloatArray
    forward_host_s: FloatArray
    backward_host_s: FloatArray
    input_cast_s: FloatArray
    input_bytes: IntArray
    own_saved_bytes: IntArray
    forward_transient_bytes: IntArray
    backward_transient_bytes: IntArray

    def __post_init__(self) -> None:
        own_arrays(self, "operators")
        shape = self.forward_s.shape
        for name in self.__dataclass_fields__:
            table = getattr(self, name)
            expected = (*shape, len(HANDED_ON)) if name == "input_cast_s" else shape
            rule = f"must have shape {list(expected)}"
            require(table.shape == expected, f"operators.{name}", rule, list(table.shape))
        require(
            bool((np.isnan(self.forward_s) == np.isnan(self.backward_s)).all()),
            "operators.backward_s",
            "must be missing exactly where forward_s is",
            "another pattern",
        )

    @property
    def available(self) -> Any:
        """Whether each signature has each precision, [S, P] of booleans."""
        return ~np.isnan(self.forward_s)


@dataclass(frozen=True, kw_only=True, eq=False)
class ElementCosts:
    """Costs of passing over a tensor element by element, for E sizes.

    Attributes:
        elements: the sizes, ascending, [E].
        cast_s: from a dtype (row) to another (column), [E, 3, 3]; NaN where the device lacks
            one of them, 0 on the diagonal.
        add_s: adding two tensors of a dtype, as autograd does with gradients, [E, 3].
        copy_s: copying fp32, as DDP does with gradients into buckets, [E].
    """

    elements: IntArray
    cast_s: FloatArray
    add_s: FloatArray
    copy_s: FloatArray

    def __post_init__(self) -> None:
        own_arrays(self, "casts")
        count, dtypes = len(self.elements), len(HANDED_ON)
        for name, shape in (
            ("elements", (count,)),
            ("cast_s", (count, dtypes, dtypes)),
            ("add_s", (count, dtypes)),
            ("copy_s", (count,)),
        ):
            found = getattr(self, name).shape
            require(found == shape, f"casts.{name}", f"must have shape {list(shape)}", found)
        rises = bool((np.diff(self.elements) > 0).all())
        require(count > 0 and rises, "casts.elements", "must ascend", self.elements.tolist()[:9])

    def cast(self, elements: int, source: Precision, target: Precision) -> float:
        """Seconds for a cast of so many elements; NaN where the device lacks a dtype."""
        pair = HANDED_ON.index(source), HANDED_ON.index(target)
        return self._at(elements, self.cast_s[:, pair[0], pair[1]])

    def addition(self, elements: int, dtype: Precision) -> float:
        """Seconds for one addition of so many elements."""
        return self._at(elements, self.add_s[:, HANDED_ON.index(dtype)])

    def copy(self, elements: int) -> float:
        """Seconds for a copy of so many fp32 elements."""
        return self._at(elements, self.copy_s)

    def _at(self, elements: int, times: FloatArray) -> float:
        return interpolate(self.elements, times, elements)


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerCosts:
    """One step of an optimizer over all parameters.

    Attributes:
        name: of the class in torch.optim.
        step_s: with setting the gradients to None.
        spread: distance of the quartiles over the median.
        state_bytes: what it keeps between steps.
        host_s: until the host had launched it; 0 on a CPU, and in files of early releases.
    """

    name: str
    step_s: float
    spread: float
    state_bytes: int
    host_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedMemory:
    """What is in memory whatever the plan.

    Attributes:
        rounding_bytes: the allocator gives multiples of this.
        parameter_bytes, gradient_bytes, buffer_bytes, batch_bytes: of the model and its batch,
            each tensor rounded up.
        workspace_bytes: what libraries allocated and kept (cuBLAS).
        context_bytes: what the process takes outside of the allocator.
        device_bytes: memory of the device.
    """

    rounding_bytes: int
    parameter_bytes: int
    gradient_bytes: int
    buffer_bytes: int
    batch_bytes: int
    workspace_bytes: int
    context_bytes: int
    device_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCosts:
    """A whole step of the model, measured without profiling, at one precision throughout.

    Attributes:
        precision: of every operator that has it; others run at the nearest they have.
        forward_s, backward_s: medians; the loss counts as forward. On a GPU the device's own
            times, with the host kept ahead of it.
        spread: distance of the quartiles over the median, of the whole.
        host_s: until the host had launched everything, which includes waiting for a GPU
            that it is far ahead of; equals the whole on a CPU.
        peak_bytes: largest allocation over what was there before the step, parameters'
            gradients among it; 0 on a CPU.
        unused_bytes: what the allocator held at most without handing it out; 0 on a CPU.
    """

    precision: Precision
    forward_s: float
    backward_s: float
    spread: float
    host_s: float
    peak_bytes: int
    unused_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Unavailable:
    """Why a signature has no costs at a precision.

    Attributes:
        signature: index; None for every one.
        precision: which.
        reason: for people.
    """

    signature: int | None
    precision: Precision
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CostsProvenance:
    """Where and how costs were measured.

    Attributes:
        device_type: `cpu` or `cuda`.
        device: its name.
        threads: of a CPU; 0 on a GPU.
        share: percentage of a GPU's multiprocessors that the process may use.
        driver: of the device, "" on a CPU.
        versions: library -> version.
        batch: leaf of the batch -> shape and dtype as text.
        date: ISO 8601, UTC.
    """

    device_type: str
    device: str
    threads: int
    share: int
    driver: str
    versions: Mapping[str, str]
    batch: Mapping[str, str]
    date: str


@dataclass(frozen=True, kw_only=True, eq=False)
class DeviceCosts:
    """Everything measured on one kind of device for one graph.

    Attributes:
        graph_sha256: of the graph (`OperatorGraph.sha256`).
        precisions: the columns.
        half: the 16-bit dtype that 8-bit products hand on here.
        operators, casts, optimizer, memory: see the classes.
        buckets: of the live DDP object, in launch order; empty where no model was given.
        all_reduce: None where no process group was given.
        steps: whole steps, for comparison; empty where no model was given.
        held_out: plans that were predicted from these costs, and run; see `hosts.calibrate`.
        unavailable: reasons of missing entries.
        warnings: what to know before these numbers are believed.
        provenance: where and how.

    Raises:
        CostsError: tables that do not fit together.
    """

    graph_sha256: str
    precisions: tuple[Precision, ...]
    half: Precision
    operators: OperatorCosts
    casts: ElementCosts
    optimizer: OptimizerCosts
    memory: FixedMemory
    buckets: tuple[GradientBucket, ...] = ()
    all_reduce: AllReduceCosts | None = None
    steps: tuple[StepCosts, ...] = ()
    held_out: tuple[HeldOutRun, ...] = ()
    unavailable: tuple[Unavailable, ...] = ()
    warnings: tuple[str, ...] = ()
    provenance: CostsProvenance

    def __post_init__(self) -> None:
        columns = self.operators.forward_s.shape[1]
        rule = f"must be one per column of the tables ({columns})"
        names = [str(precision) for precision in self.precisions]
        require(len(set(names)) == len(names) == columns, "precisions", rule, names)
        require(Precision.FP32 in self.precisions, "precisions", "must have fp32", names)

    @cached_property
    def step_of(self) -> Mapping[Precision, StepCosts]:
        """Precision -> the step measured at it."""
        return MappingProxyType({step.precision: step for step in self.steps})

    @property
    def error(self) -> float | None:
        """Relative error to expect of an iteration time: the largest of the plans held out."""
        return largest_error(self.held_out)

    def handed_on(self, precision: Precision) -> Precision:
        """The dtype that an operator at a precision hands on here."""
        return self.half if precision.output is not precision.storage else precision.output


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterKind:
    """The workers of one kind.

    Attributes:
        name: of the kind.
        workers: how many.
        memory_bytes: what one worker may use; None for all that the device has.
        batch_share: fraction of the global batch that one worker handles; None for equal
            shares.
        pins: operator -> precision it must have.
    """

    name: str
    workers: int = 1
    memory_bytes: int | None = None
    batch_share: float | None = None
    pins: Mapping[str, Precision] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """The workers of a job, and the network between them.

    Attributes:
        kinds: of devices, each with its workers.
        all_reduce: measured on the whole group; None to take the slowest that the kinds'
            costs hold.
    """

    kinds: tuple[ClusterKind, ...]
    all_reduce: AllReduceCosts | None = None

    @property
    def workers(self) -> int:
        """All of them."""
        return sum(kind.workers for kind in self.kinds)
