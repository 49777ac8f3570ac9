"""`TimeCut`: a path through host and device of one kind, whose length no plan in time exceeds.

The rows of section 4 of the design hold the device's work against the deadline. A host that
launches what the device runs adds paths that begin on the host and change over to the device
(`simulate.paths`): each bounds the iteration time from below, and is linear in the plan.
`add_cuts` puts such paths into a program as rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qsync_opt.optimize.arrays import FloatArray, IntArray, freeze
from qsync_opt.optimize.linear import LazyNames, ProgramBuilder
from qsync_opt.optimize.problem import DeviceKind


@dataclass(frozen=True, kw_only=True, eq=False)
class TimeCut:
    """past + operators + casts on the path <= iteration time.

    Attributes:
        name: of the path, short.
        operator_s: what an operator adds at each precision, [N, P], >= 0.
        past_s: what the plan does not change: optimizer, and all-reduces after the path.
        forward_casts_from: forward casts count whose first consumer is this operator or a
            later one; N for none of them.
        backward_casts: backward casts count whose producer is in this range, [low, high).
    """

    name: str
    operator_s: FloatArray
    past_s: float
    forward_casts_from: int
    backward_casts: tuple[int, int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "operator_s", freeze(np.asarray(self.operator_s)))

    def length_s(self, device: DeviceKind, column: IntArray) -> float:
        """Length of the path under a plan, `column` its precision column per operator, [N]."""
        return float(lengths_s([self], device, column)[0])


def lengths_s(cuts: Sequence[TimeCut], device: DeviceKind, column: IntArray) -> FloatArray:
    """Lengths of paths under a plan, [C]; `column` is its precision column per operator, [N]."""
    rows = np.arange(len(column))
    found = np.array([cut.past_s + float(cut.operator_s[rows, column].sum()) for cut in cuts])
    tensors = device.tensors
    if not len(cuts) or not len(tensors):
        return found
    size = device.available.shape[1]
    owner = np.repeat(np.arange(len(tensors)), np.diff(tensors.consumer_start))
    paid, inverse = np.unique(owner * size + column[tensors.consumers], return_inverse=True)
    first = np.full(len(paid), len(column), dtype=np.int64)
    np.minimum.at(first, inverse, tensors.consumers)
    tensor, target = np.divmod(paid, size)
    producer = tensors.producer[tensor]
    forward = tensors.forward_s[tensor, column[producer], target]
    backward = tensors.backward_s[tensor, column[producer], target]
    for index, cut in enumerate(cuts):
        low, high = cut.backward_casts
        found[index] += float(forward[first >= cut.forward_casts_from].sum())
        found[index] += float(backward[(producer >= low) & (producer < high)].sum())
    return found


@dataclass(frozen=True, kw_only=True, eq=False)
class CastColumns:
    """The columns of a program that say which casts are made.

    Attributes:
        tensor, source, target, paid: a column `paid` per cast, [C].
        edge_tensor, edge_consumer, edge_source, edge_target, flow: a column `flow` per edge
            and cast, [E].
    """

    tensor: IntArray
    source: IntArray
    target: IntArray
    paid: IntArray
    edge_tensor: IntArray
    edge_consumer: IntArray
    edge_source: IntArray
    edge_target: IntArray
    flow: IntArray


def add_cuts(
    builder: ProgramBuilder,
    cuts: Sequence[TimeCut],
    device: DeviceKind,
    choices: IntArray,
    casts: CastColumns | None,
    *,
    deadline_s: float | None,
    scale: float,
    margin_s: float,
    clock: IntArray | None,
) -> None:
    """Rows for cuts: length <= deadline, or length <= clock where the time is minimised.

    Which forward casts lie on a path depends on the plan where a tensor has consumers before
    the path's change to the device and after it: w >= t[v, p, q] - sum of t[v', p, q] over
    the consumers v' before, for every v after, is 1 exactly where the cast is first asked for
    after the change (0 is best, so it is no larger than it must be).

    Args:
        builder: of the program.
        cuts: the paths.
        device: the kind.
        choices: columns x, [N, P], -1 without one.
        casts: None where no cast costs anything.
        deadline_s: None leaves time free.
        scale: what a second counts in the program.
        margin_s: allowed beyond the deadline.
        clock: the column of the iteration time, if it is the objective.
    """
    for cut in cuts:
        picked, option = np.nonzero((choices >= 0) & (cut.operator_s > 0))
        columns = [choices[picked, option]]
        seconds = [cut.operator_s[picked, option]]
        if casts is not None:
            for more, cost in _cast_entries(builder, cut, device, casts):
                columns.append(more)
                seconds.append(cost)
        entries, values = np.concatenate(columns), np.concatenate(seconds) * scale
        bounds = [] if deadline_s is None else [(deadline_s + margin_s - cut.past_s, False)]
        if clock is not None:
            bounds.append((-cut.past_s, True))
        for bound, with_clock in bounds:
            line = builder.add_rows(
                LazyNames(1, lambda name=cut.name: [f"cut[{device.name},{name}]"]),  # type: ignore[misc]
                lower=-np.inf,
                upper=bound * scale,
            )
            builder.add_entries(np.broadcast_to(line, entries.shape), entries, values)
            if with_clock and clock is not None:
                builder.add_entries(line, clock, -1.0)


def _cast_entries(
    builder: ProgramBuilder, cut: TimeCut, device: DeviceKind, casts: CastColumns
) -> list[tuple[IntArray, FloatArray]]:
    """Columns and seconds of the casts on a path."""
    tensors = device.tensors
    found = []
    low, high = cut.backward_casts
    producer = tensors.producer[casts.tensor]
    on_path = np.flatnonzero((producer >= low) & (producer < high))
    keys = (casts.tensor[on_path], casts.source[on_path], casts.target[on_path])
    found.append((casts.paid[on_path], tensors.backward_s[keys]))
    # Tensors all of whose consumers come after the change, and those that straddle it.
    starts = tensors.consumer_start[:-1]
    earliest = np.minimum.reduceat(tensors.consumers, starts)
    latest = np.maximum.reduceat(tensors.consumers, starts)
    whole = (earliest >= cut.forward_casts_from)[casts.tensor]
    keys = (casts.tensor[whole], casts.source[whole], casts.target[whole])
    found.append((casts.paid[whole], tensors.forward_s[keys]))
    straddles = (earliest < cut.forward_casts_from) & (latest >= cut.forward_casts_from)
    edges = np.flatnonzero(straddles[casts.edge_tensor])
    if not len(edges):
        return found
    size = device.available.shape[1]
    key = (casts.edge_tensor[edges] * size + casts.edge_source[edges]) * size
    key = key + casts.edge_target[edges]
    after = casts.edge_consumer[edges] >= cut.forward_casts_from
    unique = np.unique(key[after])
    label = f"{device.name},{cut.name}"
    first = builder.add_columns(
        LazyNames(len(unique), lambda: [f"w[{label},{number}]" for number in unique.tolist()])
    )
    for edge in np.flatnonzero(after).tolist():
        place = int(np.searchsorted(unique, key[edge]))
        before = np.flatnonzero(~after & (key == key[edge]))
        line = builder.add_rows(
            LazyNames(1, lambda e=edge: [f"first[{label},{e}]"]),  # type: ignore[misc]
            lower=0.0,
            upper=np.inf,
        )
        builder.add_entries(line, first[place : place + 1], 1.0)
        builder.add_entries(line, casts.flow[edges[edge : edge + 1]], -1.0)
        columns = np.unique(casts.flow[edges[before]])
        builder.add_entries(np.broadcast_to(line, columns.shape), columns, 1.0)
    tensor, rest = np.divmod(unique, size * size)
    source, target = np.divmod(rest, size)
    found.append((first, tensors.forward_s[tensor, source, target]))
    return found
