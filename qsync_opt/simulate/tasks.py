"""`device_tasks`: what one rank computes in a step, in order, and what its host has to launch.

A step is the optimizer (of the step before), the forward pass, the backward pass. A cast is
paid once per tensor and pair of precisions: forward just before the first consumer that asks
for it, backward just before the backward of the producer (design, section 4, items 2 and 5).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

from qsync_opt.errors import ParameterError
from qsync_opt.optimize.arrays import FloatArray, IntArray, float_table, freeze
from qsync_opt.optimize.evaluate import first_operators
from qsync_opt.optimize.problem import AllocationProblem, DeviceKind


class Work(str, Enum):
    """What a task is."""

    OPTIMIZER = "optimizer"
    FORWARD = "forward"
    FORWARD_CAST = "forward cast"
    BACKWARD = "backward"
    BACKWARD_CAST = "backward cast"

    def __str__(self) -> str:
        return self.value


_WORKS = tuple(Work)


@dataclass(frozen=True, kw_only=True, eq=False)
class HostCosts:
    """What the host of one device kind takes to launch things, and what overlap costs it.

    Attributes:
        forward_s, backward_s: until the host has launched an operator, seconds, [N, P]; a
            cast is launched with the operator that asks for it.
        optimizer_s: until it has launched the optimizer step.
        overlap_slowdown: by how much an all-reduce that runs at the same time stretches
            compute, >= 1.
        waits: whether the host waits for its device in every step before it launches the
            optimizer, as scaling the loss or clipping by the norm makes it. A host that does
            not runs ahead, and limits only where it takes longer than a whole step.
        error: relative error of the iteration time measured on held-out plans; None if
            nobody measured it.
    """

    forward_s: FloatArray
    backward_s: FloatArray
    optimizer_s: float = 0.0
    overlap_slowdown: float = 1.0
    waits: bool = False
    error: float | None = None

    def __post_init__(self) -> None:
        for name in ("forward_s", "backward_s"):
            table = float_table(getattr(self, name), f"host.{name}", 2)
            if not (np.isfinite(table) & (table >= 0)).all():
                odd = table[~(np.isfinite(table) & (table >= 0))][0]
                raise ParameterError(f"host.{name}", "must be finite and >= 0", float(odd))
            object.__setattr__(self, name, freeze(table))
        if not 1.0 <= self.overlap_slowdown < np.inf:
            rule = "must be a finite number >= 1"
            raise ParameterError("host.overlap_slowdown", rule, self.overlap_slowdown)
        if not 0.0 <= self.optimizer_s < np.inf:
            raise ParameterError("host.optimizer_s", "must be >= 0", self.optimizer_s)
        if self.error is not None and not 0.0 <= self.error < np.inf:
            raise ParameterError("host.error", "must be a finite number >= 0", self.error)


@dataclass(frozen=True, kw_only=True, eq=False)
class Tasks:
    """The tasks of one rank, in the order in which its device runs them, T of them.

    Attributes:
        work: index into `WORKS`, [T].
        operator: which operator, -1 for the optimizer, [T].
        duration_s: on the device, [T].
        launch_s: on the host, [T].
        ready: for every bucket the number of tasks after which it can be reduced, [K].
    """

    WORKS = _WORKS

    work: IntArray
    operator: IntArray
    duration_s: FloatArray
    launch_s: FloatArray
    ready: IntArray


def device_tasks(
    problem: AllocationProblem, device: DeviceKind, column: IntArray, host: HostCosts | None
) -> Tasks:
    """The tasks of a rank of one kind under a plan.

    Args:
        problem: the problem.
        device: the kind.
        column: precision column of every operator, [N].
        host: what launching costs; None where it costs nothing.

    Raises:
        ParameterError: host tables of another size.
    """
    count = len(problem.operators)
    rows = np.arange(count)
    if host is not None and not host.forward_s.shape == host.backward_s.shape == (
        count,
        len(problem.precisions),
    ):
        rule = f"must be [{count}, {len(problem.precisions)}], operators by precisions"
        raise ParameterError("host", rule, list(host.forward_s.shape))
    cast_at, forward_casts, producer, backward_casts = _casts(device, column)
    # Sorting by (place, order) puts a cast before the operator that asks for it.
    forward = [
        (Work.FORWARD_CAST, cast_at, 2 * cast_at, forward_casts, None),
        (
            Work.FORWARD,
            rows,
            2 * rows + 1,
            device.forward_s[rows, column],
            None if host is None else host.forward_s[rows, column],
        ),
    ]
    turned = count - 1 - rows
    backward = [
        (Work.BACKWARD_CAST, producer, 2 * (count - 1 - producer), backward_casts, None),
        (
            Work.BACKWARD,
            rows,
            2 * turned + 1,
            device.backward_s[rows, column],
            None if host is None else host.backward_s[rows, column],
        ),
    ]
    parts = [
        (
            np.array([_WORKS.index(Work.OPTIMIZER)]),
            np.array([-1]),
            np.array([device.optimizer_s]),
            np.array([0.0 if host is None else host.optimizer_s]),
        )
    ]
    for half in (forward, backward):
        work = np.concatenate([np.full(len(o), _WORKS.index(w)) for w, o, _, _, _ in half])
        place = np.concatenate([p for _, _, p, _, _ in half])
        launch = np.concatenate([np.zeros(len(d)) if h is None else h for _, _, _, d, h in half])
        order = np.argsort(place, kind="stable")
        parts.append(
            (
                work[order],
                np.concatenate([o for _, o, _, _, _ in half])[order],
                np.concatenate([d for _, _, _, d, _ in half])[order],
                launch[order],
            )
        )
    work, operator, duration, launch = (np.concatenate(rows) for rows in zip(*parts, strict=True))
    # A bucket is ready after the backward of its lowest operator; the last task of nobody's.
    is_backward = work == _WORKS.index(Work.BACKWARD)
    after = np.empty(count + 1, dtype=np.int64)
    after[operator[is_backward]] = np.flatnonzero(is_backward) + 1
    after[count] = int(np.flatnonzero(~np.isin(work, _backward_works()))[-1]) + 1
    return Tasks(
        work=work,
        operator=operator,
        duration_s=duration,
        launch_s=launch,
        ready=after[first_operators(problem)],
    )


def _backward_works() -> list[int]:
    return [_WORKS.index(Work.BACKWARD), _WORKS.index(Work.BACKWARD_CAST)]


def _casts(
    device: DeviceKind, column: IntArray
) -> tuple[IntArray, FloatArray, IntArray, FloatArray]:
    """First consumer and time of forward casts; producer and time of backward casts."""
    tensors = device.tensors
    if not len(tensors):
        nothing = np.zeros(0, dtype=np.int64)
        return nothing, np.zeros(0), nothing, np.zeros(0)
    columns = device.available.shape[1]
    owner = np.repeat(np.arange(len(tensors)), np.diff(tensors.consumer_start))
    key = owner * columns + column[tensors.consumers]
    paid, inverse = np.unique(key, return_inverse=True)
    first = np.full(len(paid), len(column), dtype=np.int64)
    np.minimum.at(first, inverse, tensors.consumers)
    tensor, target = np.divmod(paid, columns)
    producer = tensors.producer[tensor]
    source = column[producer]
    forward = tensors.forward_s[tensor, source, target]
    backward = tensors.backward_s[tensor, source, target]
    casts, back = np.flatnonzero(forward > 0), np.flatnonzero(backward > 0)
    return first[casts], forward[casts], producer[back], backward[back]
