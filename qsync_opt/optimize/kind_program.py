"""`KindPart`: the columns and rows of one device kind in a program; `formulation` states them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import repeat

import numpy as np

from qsync_opt.optimize.arrays import BoolArray, FloatArray, IntArray
from qsync_opt.optimize.bit_columns import BitColumns
from qsync_opt.optimize.byte_rows import add_byte_rows, power_of_two_near
from qsync_opt.optimize.cuts import CastColumns, TimeCut, add_cuts
from qsync_opt.optimize.evaluate import TIME_TOLERANCE
from qsync_opt.optimize.linear import LazyNames, ProgramBuilder
from qsync_opt.optimize.problem import AllocationProblem, DeviceKind
from qsync_opt.optimize.rows import first_savers, memory_points, time_rows, transient_bytes
from qsync_opt.precision import PROMOTED

#: The peak-memory column counts MiB, so that it is of the size solvers are built for.
_MEMORY_UNIT = float(2**20)

_NO_COLUMN = -1


class KindPart:
    """Adds one device kind's columns and rows to a builder.

    Args:
        problem: the problem.
        device: the kind.
        domain: options left to each operator, [N, P].
        builder: takes the columns and rows.
        weight: of the kind's perturbation in the objective.

    Attributes:
        x: the column of every operator at every precision, -1 without one, [N, P].
        objective_unit: what one unit of the objective is worth where it is a time or bytes.
    """

    def __init__(
        self,
        problem: AllocationProblem,
        device: DeviceKind,
        domain: BoolArray,
        builder: ProgramBuilder,
        weight: float,
    ) -> None:
        self._problem, self._device = problem, device
        self._builder, self._weight = builder, weight
        self.objective_unit = 1.0
        self._lead = self._representatives()
        self._domain = domain
        self._count = domain.sum(axis=1)
        self.x = self._add_choices()
        self._add_followers()
        # Costs that hang on columns: (column, seconds, operator whose backward it precedes).
        self._forward: list[tuple[IntArray, FloatArray]] = []
        self._backward: list[tuple[IntArray, FloatArray, IntArray]] = []
        self._casts: CastColumns | None = None
        rows, columns = np.nonzero(domain)
        self._forward.append((self.x[rows, columns], device.forward_s[rows, columns]))
        self._backward.append((self.x[rows, columns], device.backward_s[rows, columns], rows))
        self._add_casts()
        # Bytes that hang on columns: (column, bytes, first saver).
        self._kept: list[tuple[IntArray, IntArray, IntArray]] = []
        self._add_copies()

    def _name(self, letter: str, *parts: object) -> str:
        return f"{letter}[{self._device.name},{','.join(str(part) for part in parts)}]"

    def _names(self, letter: str, *parts: IntArray | str) -> Iterator[str]:
        """One name per entry of the arrays; bound by `partial`, made in `build`."""
        lists = [repeat(part) if isinstance(part, str) else part.tolist() for part in parts]
        for row in zip(*lists, strict=False):
            yield self._name(letter, *row)

    def _row(self, parts: tuple[object, ...], *, lower: float, upper: float) -> IntArray:
        letter, *rest = parts
        return self._builder.add_rows(
            LazyNames(1, lambda: [self._name(str(letter), *rest)]), lower=lower, upper=upper
        )

    def _column(self, letter: str) -> IntArray:
        """A column >= 0 whose value is the objective."""
        return self._builder.add_columns(
            LazyNames(1, lambda: [self._name(letter)]), objective=1.0, upper=np.inf
        )

    def _representatives(self) -> IntArray:
        lead = np.arange(len(self._problem.operators))
        for group in self._problem.groups:
            rows = [self._problem.operator_index[name] for name in group]
            lead[rows] = min(rows)
        return lead

    def _add_choices(self) -> IntArray:
        """Columns x and rows (1)."""
        problem, domain = self._problem, self._domain
        leaders = self._lead == np.arange(len(self._lead))
        objective = np.zeros(domain.shape)
        np.add.at(objective, self._lead, self._weight * self._device.perturbation)
        x = np.full(domain.shape, _NO_COLUMN, dtype=np.int64)
        rows, columns = np.nonzero(domain & leaders[:, None])
        x[rows, columns] = self._builder.add_columns(
            LazyNames(
                len(rows),
                lambda: (
                    self._name("x", problem.operators[o].name, problem.precisions[p].value)
                    for o, p in zip(rows.tolist(), columns.tolist(), strict=True)
                ),
            ),
            objective=objective[rows, columns],
            integer=True,
        )
        owners = np.flatnonzero(leaders)
        one = self._builder.add_rows(
            LazyNames(
                len(owners),
                lambda: (self._name("one", problem.operators[o].name) for o in owners.tolist()),
            ),
            lower=1.0,
            upper=1.0,
        )
        row_of = np.zeros(len(leaders), dtype=np.int64)
        row_of[owners] = one
        self._builder.add_entries(row_of[rows], x[rows, columns], 1.0)
        shared: IntArray = np.where(domain, x[self._lead], _NO_COLUMN)
        return shared

    def _add_followers(self) -> None:
        """Rows (2f)."""
        problem = self._problem
        output = problem.output
        for f, operator in enumerate(problem.operators):
            inputs = operator.follows
            if not inputs:
                continue
            for position, dtype in enumerate(problem.precisions):
                column = self.x[f, position]
                if dtype is PROMOTED:
                    continue  # fp32 is the rest, by row (1)
                handing = [p for p in range(len(output)) if output[p] is dtype]
                asked = [self.x[u, handing] for u in inputs]
                sums = [columns[columns >= 0] for columns in asked]
                if column < 0 and any(len(columns) == 0 for columns in sums):
                    continue  # some input never hands this dtype on
                label = (operator.name, dtype.value)
                if column >= 0:
                    for index, columns in enumerate(sums):
                        row = self._row(("follow", *label, index), lower=-np.inf, upper=0.0)
                        self._builder.add_entries(row, np.array([column]), 1.0)
                        self._builder.add_entries(np.repeat(row, len(columns)), columns, -1.0)
                row = self._row(("promote", *label), lower=-np.inf, upper=float(len(inputs) - 1))
                if column >= 0:
                    self._builder.add_entries(row, np.array([column]), -1.0)
                for columns in sums:
                    self._builder.add_entries(np.repeat(row, len(columns)), columns, 1.0)

    def _add_casts(self) -> None:
        """Columns t and z, rows (2)."""
        tensors, size = self._device.tensors, len(self._problem.precisions)
        if not len(tensors):
            return
        owner = np.repeat(np.arange(len(tensors)), np.diff(tensors.consumer_start))
        u, v = tensors.producer[owner], tensors.consumers
        pairs = self._domain[u][:, :, None] & self._domain[v][:, None, :]
        same = self._lead[u] == self._lead[v]
        pairs &= ~same[:, None, None] | np.eye(size, dtype=np.bool_)
        priced = (tensors.forward_s + tensors.backward_s) > 0
        useful = np.asarray((pairs & priced[owner]).any(axis=(1, 2)), dtype=np.bool_)
        pairs &= useful[:, None, None]
        edge, p, q = np.nonzero(pairs)
        by_consumer = (self._count[u] == 1)[edge] | same[edge]
        by_producer = ~by_consumer & (self._count[v] == 1)[edge]
        column = np.where(by_consumer, self.x[v[edge], q], self.x[u[edge], p])
        flows = np.flatnonzero(~by_consumer & ~by_producer)
        if len(flows):
            column[flows] = self._add_flows(owner, u, v, edge[flows], p[flows], q[flows])
        paid = priced[owner[edge], p, q]
        edge, p, q, flow = edge[paid], p[paid], q[paid], column[paid]
        key, column = self._covering((owner[edge] * size + p) * size + q, flow)
        tensor, rest = np.divmod(key, size * size)
        source, target = np.divmod(rest, size)
        self._casts = CastColumns(
            tensor=tensor,
            source=source,
            target=target,
            paid=column,
            edge_tensor=owner[edge],
            edge_consumer=v[edge],
            edge_source=p,
            edge_target=q,
            flow=flow,
        )
        self._forward.append((column, tensors.forward_s[tensor, source, target]))
        self._backward.append(
            (column, tensors.backward_s[tensor, source, target], tensors.producer[tensor])
        )

    def _add_flows(
        self, owner: IntArray, u: IntArray, v: IntArray, edge: IntArray, p: IntArray, q: IntArray
    ) -> IntArray:
        size = len(self._problem.precisions)
        column = self._builder.add_columns(
            LazyNames(
                len(edge),
                lambda: (
                    self._name("t", owner[e], v[e], a, b)
                    for e, a, b in zip(edge.tolist(), p.tolist(), q.tolist(), strict=True)
                ),
            ),
        )
        for side, end, letter in ((p, u, "out"), (q, v, "in")):
            key, inverse = np.unique(edge * size + side, return_inverse=True)
            line, choice = np.divmod(key, size)
            rows = self._builder.add_rows(
                LazyNames(
                    len(line),
                    partial(self._names, letter, owner[line], v[line], choice),
                ),
                lower=0.0,
                upper=0.0,
            )
            self._builder.add_entries(rows[inverse], column, 1.0)
            self._builder.add_entries(rows, self.x[end[line], choice], -1.0)
        return column

    def _covering(self, key: IntArray, column: IntArray) -> tuple[IntArray, IntArray]:
        """Per distinct cast (tensor, p, q), a column that is at least each of its columns.

        A key with one distinct column is that column; others get a new column and rows.
        """
        if not len(key):
            return key, column
        order = np.lexsort((column, key))
        key, column = key[order], column[order]
        fresh = np.append(True, (np.diff(key) != 0) | (np.diff(column) != 0))
        key, column = key[fresh], column[fresh]
        unique, start, inverse, counts = np.unique(
            key, return_index=True, return_inverse=True, return_counts=True
        )
        cover = column[start].copy()
        many = np.flatnonzero(counts > 1)
        if len(many):
            size = len(self._problem.precisions)

            def name(letter: str, k: int, *more: int) -> str:
                return self._name(letter, k // (size * size), k // size % size, k % size, *more)

            cover[many] = self._builder.add_columns(
                LazyNames(len(many), lambda: (name("z", k) for k in unique[many].tolist()))
            )
            lines = np.flatnonzero(counts[inverse] > 1)
            rows = self._builder.add_rows(
                LazyNames(
                    len(lines),
                    lambda: (name("pay", int(key[i]), int(column[i])) for i in lines.tolist()),
                ),
                lower=0.0,
                upper=np.inf,
            )
            self._builder.add_entries(rows, cover[inverse[lines]], 1.0)
            self._builder.add_entries(rows, column[lines], -1.0)
        return unique, cover

    def _add_copies(self) -> None:
        """Columns k and rows (3)."""
        problem, saved = self._problem, self._device.saved
        if not len(saved):
            return
        first = first_savers(self._device)
        owner = np.repeat(np.arange(len(saved)), np.diff(saved.saver_start))
        lead = self._lead[saved.savers]
        order = np.unique(owner * len(self._lead) + lead)
        owner, saver = np.divmod(order, len(self._lead))
        for position, dtype in enumerate(saved.dtypes):
            stored = [p for p, storage in enumerate(problem.storage) if storage is dtype]
            columns = np.where(self._domain[saver][:, stored], self.x[saver][:, stored], _NO_COLUMN)
            asks = (columns >= 0).any(axis=1)
            who, lines = owner[asks], columns[asks]
            several = np.bincount(who, minlength=len(saved)) > 1
            size = saved.size_bytes[:, position]
            alone = ~several[who]
            for line in lines[alone].T:
                has = line >= 0
                tensor = who[alone][has]
                self._kept.append((line[has], size[tensor], first[tensor]))
            shared = np.flatnonzero(several)
            if not len(shared):
                continue
            copies = np.full(len(saved), _NO_COLUMN, dtype=np.int64)
            copies[shared] = self._builder.add_columns(
                LazyNames(len(shared), partial(self._names, "k", shared, dtype.value)),
            )
            both = np.flatnonzero(~alone)
            rows = self._builder.add_rows(
                LazyNames(len(both), partial(self._names, "keep", who[both], dtype.value, both)),
                lower=0.0,
                upper=np.inf,
            )
            self._builder.add_entries(rows, copies[who[both]], 1.0)
            for line in lines[both].T:
                has = line >= 0
                self._builder.add_entries(rows[has], line[has], -1.0)
            self._kept.append((copies[shared], size[shared], first[shared]))

    def add_time(
        self,
        deadline_s: float | None,
        *,
        minimise: bool,
        cuts: Sequence[TimeCut] = (),
        sent: BitColumns | None = None,
    ) -> None:
        """Rows (5, 6, 7); with `minimise` the iteration time is a column and the objective.

        Args:
            deadline_s: iteration time to keep; None for none.
            minimise: see above.
            cuts: paths that must be no longer either.
            sent: where bits are chosen, their columns, which the tails are then made of.
        """
        if deadline_s is None and not minimise:
            return
        problem, device = self._problem, self._device
        rows = time_rows(problem) if sent is None else sent.rows
        whole = device.optimizer_s + sum(
            float(seconds.max(initial=0)) for _, seconds in self._forward
        )
        scale = power_of_two_near(1e4 / (deadline_s or whole or 1.0))
        margin = 0.0 if deadline_s is None else 0.5 * TIME_TOLERANCE * deadline_s
        clock = None
        if minimise:
            clock = self._column("T")
            self.objective_unit = 1.0 / scale
        for row in rows:
            past = device.optimizer_s + row.tail_s
            bound = np.inf if deadline_s is None else (deadline_s + margin - past) * scale
            targets = [] if deadline_s is None else [("time", bound, False)]
            if clock is not None:
                targets.append(("least", -past * scale, True))
            for label, upper, with_clock in targets:
                line = self._row((label, row.name), lower=-np.inf, upper=upper)
                for columns, seconds in self._forward:
                    self._builder.add_entries(
                        np.broadcast_to(line, columns.shape), columns, seconds * scale
                    )
                for columns, seconds, where in self._backward:
                    counts = where >= row.first_operator
                    self._builder.add_entries(
                        np.broadcast_to(line, int(counts.sum())),
                        columns[counts],
                        seconds[counts] * scale,
                    )
                if sent is not None:
                    bits, seconds = sent.from_bucket(row.bucket)
                    self._builder.add_entries(
                        np.broadcast_to(line, bits.shape), bits, seconds * scale
                    )
                if with_clock and clock is not None:
                    self._builder.add_entries(line, clock, -1.0)
        add_cuts(
            self._builder,
            cuts,
            device,
            self.x,
            self._casts,
            deadline_s=deadline_s,
            scale=scale,
            margin_s=margin,
            clock=clock,
        )

    def add_memory(self, *, minimise: bool) -> None:
        """Rows (4); with `minimise` the peak memory is a column and the objective."""
        device = self._device
        points = memory_points(self._problem, device, self._domain)
        transient = transient_bytes(device)
        column = np.concatenate([part[0] for part in self._kept] or [np.zeros(0, dtype=np.int64)])
        size = np.concatenate([part[1] for part in self._kept] or [np.zeros(0, dtype=np.int64)])
        first = np.concatenate([part[2] for part in self._kept] or [np.zeros(0, dtype=np.int64)])
        budget = device.memory_bytes - device.fixed_bytes
        peak = None
        if minimise:
            peak = self._column("M")
        for point in points.tolist():
            live = first <= point
            choices = np.flatnonzero(self._domain[point])
            columns = np.concatenate([column[live], self.x[point, choices]])
            sizes = np.concatenate([size[live], transient[point, choices]])
            label = ("memory", self._problem.operators[point].name)
            if peak is not None:
                self.objective_unit = _MEMORY_UNIT
                line = self._row(label, lower=-np.inf, upper=0.0)
                self._builder.add_entries(
                    np.broadcast_to(line, columns.shape), columns, sizes / _MEMORY_UNIT
                )
                self._builder.add_entries(line, peak, -1.0)
            else:
                add_byte_rows(self._builder, self._name(*label), columns, sizes, budget)
