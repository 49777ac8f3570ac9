"""`evaluate`: what a plan costs, without any solver; the oracle that every method answers to.

Iteration time is the event recurrence over ranks and buckets (design, section 4, item 6):

    end_k = max(end_{k-1}, max_r ready[r, k]) + c_k,   ready[r, k] = optimizer + F_r + B_{r, k}

with F the forward and forward-cast time, B_k the backward and backward-cast time of the
operators from the last one down to the first operator whose gradients are in bucket k, and c_k
the time of bucket k in the bits that the plan sends it in (32 where the plan has none).
Peak memory is the largest, over every operator i, of

    fixed + (copies of the tensors whose first saver is at or before i) + transient of i

in whole bytes: a tensor is live from the forward of its first saver to the backward of its
first saver, so the live sets of an operator's forward and backward are the same.

This module does not import the formulation, so the two can disagree and tests can notice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from qsync_opt.errors import ParameterError, PlanError
from qsync_opt.optimize.arrays import BoolArray, FloatArray, IntArray
from qsync_opt.optimize.buckets import chosen
from qsync_opt.optimize.problem import AllocationProblem, DeviceKind
from qsync_opt.plan import PrecisionPlan
from qsync_opt.precision import PROMOTED

#: A time may exceed the deadline by this fraction. Sums of a few thousand floats differ by
#: about 1e-13 with the order of summation, and measured times carry errors above 1e-3, so a
#: tolerance between the two keeps the answer independent of units and order. Memory has none.
TIME_TOLERANCE = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class Violation:
    """A rule that a plan breaks.

    Attributes:
        device: the device kind.
        resource: `memory`, `deadline`, `pin`, `group` or `follower`.
        where: the operator at which it happens (for the deadline: the bucket).
        value, limit: the amount and what is allowed (bytes, seconds, or precisions).
    """

    device: str
    resource: str
    where: str
    value: object
    limit: object

    def __str__(self) -> str:
        if self.resource == "memory":
            text = f"peak memory {self.value} bytes at {self.where} exceeds {self.limit} bytes"
        elif self.resource == "deadline":
            text = f"iteration time {self.value} s ({self.where}) exceeds {self.limit} s"
        else:
            text = f"{self.resource} rule: {self.where} runs at {self.value}, not {self.limit}"
        return f"{self.device}: {text}"


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceEvaluation:
    """What a plan costs on one device kind.

    Attributes:
        forward_s, backward_s: sums over the operators, without casts.
        cast_forward_s, cast_backward_s: sums over the casts.
        ready_s: when each bucket's gradients are ready, from the start of the step, [K].
        compute_s: optimizer, forward, backward and casts: the step without any waiting.
        iteration_time_s: the step if every other kind were at least as fast.
        peak_memory_bytes: largest over all program points, fixed memory included.
        peak_operator: name of the operator at the peak.
        saved_bytes: bytes kept for backward at the end of the forward pass.
        perturbation: sum of the perturbations, not weighted.
    """

    forward_s: float
    backward_s: float
    cast_forward_s: float
    cast_backward_s: float
    ready_s: tuple[float, ...]
    compute_s: float
    iteration_time_s: float
    peak_memory_bytes: int
    peak_operator: str
    saved_bytes: int
    perturbation: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """What a plan costs, and which rules it breaks.

    Attributes:
        feasible: whether no rule is broken.
        violations: the rules broken, by device kind.
        iteration_time_s: of the whole job, by the event recurrence over all kinds.
        deadline_s: the deadline the plan was held to; None if none was given.
        peak_memory_bytes: largest over the device kinds.
        perturbation: objective (0), sum over kinds of n_r a_r^2 times the kind's sum, and
            over buckets of what sending them in fewer bits adds.
        devices: the parts, by device kind.
        communication_perturbation: the buckets' part of the perturbation.
    """

    feasible: bool
    violations: tuple[Violation, ...]
    iteration_time_s: float
    deadline_s: float | None
    peak_memory_bytes: int
    perturbation: float
    devices: Mapping[str, DeviceEvaluation]
    communication_perturbation: float = 0.0


def evaluate(
    problem: AllocationProblem, plan: PrecisionPlan, *, deadline_s: float | None = None
) -> Evaluation:
    """Iteration time, peak memory, perturbation and feasibility of a plan.

    Args:
        problem: the problem.
        plan: a plan for it.
        deadline_s: iteration time to hold the plan to; the problem's own by default. A
            problem that gives a slack instead has no deadline until `solve` has found the
            fastest feasible plan (`SolveResult.deadline_s`).

    Raises:
        PlanError: the plan is for another problem, or misses or invents an operator, or uses
            a precision that the operator does not have, or bits that a bucket does not have.
        ParameterError: the deadline is not a positive number.
    """
    deadline = problem.deadline_s if deadline_s is None else deadline_s
    if deadline is not None and not (np.isfinite(deadline) and deadline > 0):
        raise ParameterError("deadline_s", "must be a finite number > 0", deadline)
    columns = plan_columns(problem, plan)
    return evaluate_columns(problem, columns, deadline, plan.communication)


def evaluate_columns(
    problem: AllocationProblem,
    columns: list[IntArray],
    deadline_s: float | None,
    bits: Sequence[int] = (),
) -> Evaluation:
    """`evaluate` for a plan given as precision columns, one array [N] per device kind.

    Args:
        problem: the problem.
        columns: the plan.
        deadline_s: see `evaluate`.
        bits: in which every bucket is sent, [K]; empty for 32.
    """
    sent = problem.bits_perturbation(bits) if problem.has_codes else 0.0
    problem = problem.at_bits(bits)
    devices = {}
    violations: list[Violation] = []
    for device, column in zip(problem.devices, columns, strict=True):
        devices[device.name] = evaluate_device(problem, device, column)
        violations += broken_rules(problem, device, column)
    time_s = recurrence_s(problem, [part.ready_s for part in devices.values()])
    time_s = max(time_s, *(part.compute_s for part in devices.values()))
    for device in problem.devices:
        part = devices[device.name]
        if part.peak_memory_bytes > device.memory_bytes:
            violations.append(
                Violation(
                    device=device.name,
                    resource="memory",
                    where=part.peak_operator,
                    value=part.peak_memory_bytes,
                    limit=device.memory_bytes,
                )
            )
        if deadline_s is not None and part.iteration_time_s > deadline_s * (1 + TIME_TOLERANCE):
            violations.append(
                Violation(
                    device=device.name,
                    resource="deadline",
                    where=f"compute {part.compute_s} s",
                    value=part.iteration_time_s,
                    limit=deadline_s,
                )
            )
    return Evaluation(
        feasible=not violations,
        violations=tuple(violations),
        iteration_time_s=time_s,
        deadline_s=deadline_s,
        peak_memory_bytes=max(part.peak_memory_bytes for part in devices.values()),
        perturbation=sum(
            problem.weight(device) * devices[device.name].perturbation for device in problem.devices
        )
        + sent,
        devices=MappingProxyType(devices),
        communication_perturbation=sent,
    )


def plan_columns(problem: AllocationProblem, plan: PrecisionPlan) -> list[IntArray]:
    """A plan as precision columns, one array [N] per device kind; see `evaluate` for errors.

    Its bits are checked too, and stay with the plan (`PrecisionPlan.communication`).
    """
    if plan.problem != problem.sha256:
        raise PlanError(
            "problem",
            f"must be the hash of the problem it is used with ({problem.sha256[:12]}...)",
            plan.problem,
            "Solve again, or load the problem that the plan was made for",
        )
    names = {device.name for device in problem.devices}
    if set(plan.devices) != names:
        rule = "must name exactly the problem's device kinds " + ", ".join(sorted(names))
        raise PlanError("devices", rule, sorted(plan.devices))
    column_of = {precision: index for index, precision in enumerate(problem.precisions)}
    result = []
    for device in problem.devices:
        row = plan.for_device(device.name)
        where = f"devices.{device.name}"
        for name in row:
            if name not in problem.operator_index:
                raise PlanError(where, "must name operators of the problem", name)
        column = np.empty(len(problem.operators), dtype=np.int64)
        for index, operator in enumerate(problem.operators):
            if operator.name not in row:
                raise PlanError(where, "must list every operator", f"no {operator.name!r}")
            precision = row[operator.name]
            if precision not in column_of or not device.available[index, column_of[precision]]:
                rule = "must be a precision that the operator has on this kind"
                raise PlanError(f"{where}.{operator.name}", rule, precision.value)
            column[index] = column_of[precision]
        result.append(column)
    if plan.communication:
        chosen(problem.buckets, plan.communication)
    return result


def plan_from_columns(
    problem: AllocationProblem, columns: list[IntArray], bits: Sequence[int] = ()
) -> PrecisionPlan:
    """The plan that gives operator o of kind r the precision `precisions[columns[r][o]]`.

    Args:
        problem: the problem.
        columns: [N] per device kind.
        bits: in which every bucket is sent, [K]; empty for 32.
    """
    devices = {}
    for device, column in zip(problem.devices, columns, strict=True):
        picks = (problem.precisions[index] for index in column.tolist())
        names = (operator.name for operator in problem.operators)
        devices[device.name] = dict(zip(names, picks, strict=True))
    return PrecisionPlan(
        problem=problem.sha256, devices=devices, communication=tuple(map(int, bits))
    )


def first_operators(problem: AllocationProblem) -> IntArray:
    """Per bucket, the lowest operator index whose gradients are in it (N without any), [K]."""
    first = np.full(len(problem.buckets), len(problem.operators), dtype=np.int64)
    owned = np.flatnonzero(problem.operator_bucket >= 0)
    np.minimum.at(first, problem.operator_bucket[owned], owned)
    return first


def tails_s(problem: AllocationProblem) -> FloatArray:
    """Per bucket k, the all-reduce time of the buckets from k on, seconds, [K]."""
    times = np.array([bucket.all_reduce_s for bucket in problem.buckets], dtype=np.float64)
    return np.cumsum(times[::-1])[::-1]


def recurrence_s(problem: AllocationProblem, ready_s: list[tuple[float, ...]]) -> float:
    """End of the last all-reduce, by the event recurrence, given each rank's ready times."""
    end = 0.0
    for k, bucket in enumerate(problem.buckets):
        end = max(end, *(ready[k] for ready in ready_s)) + bucket.all_reduce_s
    return end


def evaluate_device(
    problem: AllocationProblem, device: DeviceKind, column: IntArray
) -> DeviceEvaluation:
    """What a plan costs on one device kind; `column` is its precision column per operator."""
    rows = np.arange(len(problem.operators))
    cast_forward, cast_backward = _casts_s(device, column)
    forward = device.forward_s[rows, column]
    # Entry o: backward time of the operators from the last down to o, casts included.
    backward = device.backward_s[rows, column]
    backward_from = np.append(np.cumsum((backward + cast_backward)[::-1])[::-1], 0.0)
    forward_total = float(forward.sum() + cast_forward)
    ready = device.optimizer_s + forward_total + backward_from[first_operators(problem)]
    compute = float(device.optimizer_s + forward_total + backward_from[0])
    saved = _saved_at(problem, device, column)
    held = device.fixed_bytes + np.cumsum(saved) + _transient(device)[rows, column]
    peak = int(held.argmax())
    finish = (ready + tails_s(problem)).tolist()
    return DeviceEvaluation(
        forward_s=float(forward.sum()),
        backward_s=float(backward.sum()),
        cast_forward_s=float(cast_forward),
        cast_backward_s=float(cast_backward.sum()),
        ready_s=tuple(ready.tolist()),
        compute_s=compute,
        iteration_time_s=max(compute, *finish) if finish else compute,
        peak_memory_bytes=int(held[peak]),
        peak_operator=problem.operators[peak].name,
        saved_bytes=int(saved.sum()),
        perturbation=float(device.perturbation[rows, column].sum()),
    )


def _transient(device: DeviceKind) -> IntArray:
    forward, backward = device.forward_transient_bytes, device.backward_transient_bytes
    return np.maximum(forward, backward)  # type: ignore[arg-type]  # set on construction


def _casts_s(device: DeviceKind, column: IntArray) -> tuple[float, FloatArray]:
    """Forward cast time, and backward cast time by producer [N]."""
    tensors = device.tensors
    backward = np.zeros(len(column))
    if not len(tensors):
        return 0.0, backward
    columns = device.available.shape[1]
    owner = np.repeat(np.arange(len(tensors)), np.diff(tensors.consumer_start))
    paid = np.unique(owner * columns + column[tensors.consumers])
    tensor, target = np.divmod(paid, columns)
    producer = tensors.producer[tensor]
    source = column[producer]
    np.add.at(backward, producer, tensors.backward_s[tensor, source, target])
    return float(tensors.forward_s[tensor, source, target].sum()), backward


def _saved_at(problem: AllocationProblem, device: DeviceKind, column: IntArray) -> IntArray:
    """Bytes of the copies of the tensors whose first saver is operator i, [N]."""
    saved = device.saved
    result = np.zeros(len(column), dtype=np.int64)
    if not len(saved):
        return result
    dtype_of = np.array(
        [saved.dtypes.index(s) if s in saved.dtypes else 0 for s in problem.storage]
    )
    owner = np.repeat(np.arange(len(saved)), np.diff(saved.saver_start))
    kept = np.unique(owner * len(saved.dtypes) + dtype_of[column[saved.savers]])
    tensor, dtype = np.divmod(kept, len(saved.dtypes))
    first = np.minimum.reduceat(saved.savers, saved.saver_start[:-1])
    np.add.at(result, first[tensor], saved.size_bytes[tensor, dtype])
    return result


def follower_columns(problem: AllocationProblem, column: IntArray) -> IntArray:
    """`column` with every follower set to the promotion of what its inputs hand on, [N].

    Equal dtypes stay, unequal ones give fp32.
    """
    result = column.copy()
    precisions = problem.precisions
    column_of = {precision: index for index, precision in enumerate(precisions)}
    for index, operator in enumerate(problem.operators):
        if operator.follows:
            handed = {problem.output[result[source]] for source in operator.follows}
            dtype = handed.pop() if len(handed) == 1 else PROMOTED
            result[index] = column_of.get(dtype, 0)
    return result


def broken_rules(
    problem: AllocationProblem, device: DeviceKind, column: IntArray
) -> list[Violation]:
    """The pins, groups and followers that a plan of one device kind does not obey."""

    def broken(resource: str, index: int, limit: object) -> Violation:
        return Violation(
            device=device.name,
            resource=resource,
            where=problem.operators[index].name,
            value=problem.precisions[column[index]].value,
            limit=limit,
        )

    result = []
    followed = follower_columns(problem, column)
    for index in np.flatnonzero(followed != column).tolist():
        result.append(broken("follower", index, problem.precisions[followed[index]].value))
    for name, precision in device.pins.items():
        index = problem.operator_index[name]
        if problem.precisions[column[index]] is not precision:
            result.append(broken("pin", index, precision.value))
    for group in problem.groups:
        first = problem.operator_index[group[0]]
        for name in group[1:]:
            index = problem.operator_index[name]
            if column[index] != column[first]:
                limit = f"{problem.precisions[column[first]].value} like {group[0]}"
                result.append(broken("group", index, limit))
    return result


def allowed_columns(problem: AllocationProblem, device: DeviceKind) -> BoolArray:
    """Which precisions each operator may take: available, pinned, shared by its group, [N, P].

    What followers force on their inputs is not worked out here.
    """
    allowed = device.available.copy()
    for name, precision in device.pins.items():
        row = problem.operator_index[name]
        allowed[row] &= np.array([p is precision for p in problem.precisions])
    for group in problem.groups:
        rows = [problem.operator_index[name] for name in group]
        allowed[rows] = allowed[rows].all(axis=0)
    return allowed
