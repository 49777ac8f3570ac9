"""`Lagrangian`: prices on time and memory turn one device kind's problem into an easy one.

With prices mu_k >= 0 on the time rows and nu_i >= 0 on the memory points,

    L(mu, nu) = min over plans of  objective + sum_k mu_k (time_k - limit_k)
                                             + sum_i nu_i (bytes_i - budget)

is a lower bound of the optimum for every choice of prices (Geoffrion, 1974), and the minimum
is found exactly by elimination. The best prices are climbed to as in `climb`.

With `objective="time"` the time itself is minimised: the rows' prices then sum to one and
limits are the constant parts of the rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from qsync_opt.optimize.arrays import FloatArray, IntArray
from qsync_opt.optimize.climb import Point, PriceClimb
from qsync_opt.optimize.cuts import TimeCut
from qsync_opt.optimize.evaluate import TIME_TOLERANCE
from qsync_opt.optimize.factors import FactorGraph, Tables, entries
from qsync_opt.optimize.rows import memory_points, time_rows

#: Relative error of a sum over the tables: elimination adds in a tree, about 2 log2(N) deep.
_ROUNDING = 1e-14


class Lagrangian(PriceClimb):
    """The Lagrangian of one device kind; see the module.

    Args:
        graph: the kind's tables.
        deadline_s: iteration time to keep; None minimises the time instead.
        points: memory points to hold rows for; by default those that can be the peak.
        cuts: paths that must not be longer than the iteration time either.

    Attributes:
        exact: whether L at zero prices is the true minimum, not only a lower bound of it.
        limit: right side of every row (time rows, cuts among them, then memory points), [R].
        time_rows: how many rows are of time: those of `first`, then the cuts.
        first: lowest operator whose backward counts, of every time row that is no cut.
        cut_cells: what each cell of the elimination adds to each cut, seconds, [cuts, cells].
        points: operators whose program point is a memory row, ascending.
        scale: unit of each row's price: the deadline, or the memory budget, [R].
        reference: by how much the objective can vary, or no plan's time exceeds.
    """

    def __init__(
        self,
        graph: FactorGraph,
        deadline_s: float | None,
        points: IntArray | None = None,
        cuts: Sequence[TimeCut] = (),
    ) -> None:
        problem, device = graph.problem, graph.device
        self.graph, self.deadline_s = graph, deadline_s
        self._cuts = tuple(cuts)
        self.elimination = graph.elimination
        self.exact = graph.exact and self.elimination.exact
        rows = time_rows(problem)
        self.first = np.array([row.first_operator for row in rows], dtype=np.int64)
        past = np.array(
            [
                *(device.optimizer_s + row.tail_s for row in rows),
                *(cut.past_s for cut in self._cuts),
            ]
        )
        domain = np.zeros((len(problem.operators), graph.columns), dtype=np.bool_)
        for option in range(graph.columns):
            live = graph.column_of[:, option] >= 0
            domain[np.flatnonzero(live), graph.column_of[live, option]] = True
        self.points = memory_points(problem, device, domain) if points is None else points
        budget = float(device.memory_bytes - device.fixed_bytes)
        self.time_rows = len(past)
        self.limit = np.concatenate(
            [
                -past if deadline_s is None else deadline_s * (1 + TIME_TOLERANCE) - past,
                np.full(len(self.points), budget),
            ]
        )
        time_scale = 1.0 if deadline_s is None else deadline_s
        self.scale = np.concatenate(
            [np.full(len(past), time_scale), np.full(len(self.points), max(budget, 1.0))]
        )
        self.reference = self._spread() if deadline_s is not None else self._longest(past)
        self._lay_out()

    def _longest(self, past: FloatArray) -> float:
        """An iteration time that no plan exceeds, casts and all-reduces included, seconds."""
        graph = self.graph
        total = float(past.max()) + float(graph.forward_s.max(axis=1).sum())
        total += float(graph.backward_s.max(axis=1).sum())
        for table in (*graph.lone, *graph.tables):
            if table.forward_s is not None and table.backward_s is not None:
                total += float((table.forward_s + table.backward_s).max(axis=1).sum())
        # A path adds what its host takes.
        host = [float(graph.cut_operators_s(cut).max(axis=1).sum()) for cut in self._cuts]
        total += max(host, default=0.0)
        return total if total > 0 else 1.0

    def _spread(self) -> float:
        """By how much the objective can vary: the natural size of a price."""
        live = self.graph.column_of >= 0
        low = np.where(live, self.graph.perturbation, np.inf).min(axis=1)
        high = np.where(live, self.graph.perturbation, 0).max(axis=1)
        spread = float((high - low)[np.isfinite(low)].sum())
        return spread if spread > 0 else 1.0

    def _lay_out(self) -> None:
        """Indices that place every table's entries into the cells of the elimination."""
        graph, columns = self.graph, self.graph.columns
        options = np.arange(columns)
        unary = 1 + graph.variable_of[:, None] * columns + options
        parts = [unary.ravel()]
        parts += [(1 + t.scope * columns + options).ravel() for t in graph.lone]
        self._scopes: list[IntArray] = []
        start = 0
        for table in graph.tables:
            stop = start + len(table.scope)
            first = self.elimination.first_cell[start:stop]
            parts.append((first[:, None] + np.arange(columns**table.arity)).ravel())
            self._scopes.append(np.array(self.elimination.scopes[start:stop], dtype=np.int64))
            start = stop
        self._cells = np.concatenate(parts)
        self.cut_cells = np.zeros((len(self._cuts), self.elimination.cells))
        for index, cut in enumerate(self._cuts):
            seconds = [graph.cut_operators_s(cut).ravel()]
            seconds += [graph.cut_casts_s(cut, t).ravel() for t in (*graph.lone, *graph.tables)]
            self.cut_cells[index] = np.bincount(
                self._cells, weights=np.concatenate(seconds), minlength=self.elimination.cells
            )
        blocked = np.zeros(self.elimination.cells)
        variable, option = np.nonzero(~graph.allowed)
        blocked[1 + variable * columns + option] = np.inf
        self._blocked = blocked
        for table, scope in self.scoped_tables():
            if table.blocked is not None:
                cells = self._table_cells(table, scope)
                blocked[cells[table.blocked]] = np.inf

    def scoped_tables(self) -> Iterator[tuple[Tables, IntArray]]:
        """Every table over one variable or more, with its scope (copies in their place)."""
        yield from ((table, table.scope) for table in self.graph.lone)
        yield from zip(self.graph.tables, self._scopes, strict=True)

    def _table_cells(self, table: Tables, scope: IntArray) -> IntArray:
        columns = self.graph.columns
        if table.arity == 1:
            return 1 + table.scope * columns + np.arange(columns)
        return self.first_cells(table)[:, None] + np.arange(columns**table.arity)

    # -- one evaluation --------------------------------------------------------------------

    def costs(self, prices: FloatArray, closed: FloatArray | None = None) -> FloatArray:
        """The one sum of plain costs that these prices make of all tables, by cell."""
        graph = self.graph
        count = len(graph.variable_of)
        per_unit = prices / self.scale
        mu, nu = per_unit[: len(self.first)], per_unit[self.time_rows :]
        alpha = float(mu.sum())
        beta = np.cumsum(np.bincount(self.first, weights=mu, minlength=count + 1))[:count]
        at_point = np.bincount(self.points, weights=nu, minlength=count)
        gamma = np.cumsum(at_point[::-1])[::-1]
        operators = alpha * graph.forward_s + beta[:, None] * graph.backward_s
        if at_point.any():
            operators += at_point[:, None] * graph.transient
        if self.deadline_s is not None:
            operators += graph.perturbation
        parts = [operators.ravel()]
        for table, _ in self.scoped_tables():
            where = table.operator
            if table.forward_s is not None and table.backward_s is not None:
                cost = alpha * table.forward_s + beta[where][:, None] * table.backward_s
            elif table.kept_bytes is not None:
                cost = gamma[where][:, None] * table.kept_bytes
            else:  # a promotion: only blocks
                cost = np.zeros((len(table.scope), graph.columns**table.arity))
            parts.append(cost.ravel())
        summed = np.bincount(
            self._cells, weights=np.concatenate(parts), minlength=self.elimination.cells
        )
        result: FloatArray = summed + self._blocked
        if self._cuts:
            result += per_unit[len(self.first) : self.time_rows] @ self.cut_cells
        if closed is not None:
            result[1 : 1 + closed.size] += closed.ravel()
        return result

    def constant(self, prices: FloatArray) -> float:
        """What the limits subtract from the minimum at these prices."""
        return float((prices / self.scale) @ self.limit)

    def rounding(self, prices: FloatArray, value: float) -> float:
        """How far sums of this size may be off."""
        weighed = float((prices / self.scale) @ np.abs(self.limit))
        return _ROUNDING * (weighed + abs(value)) if math.isfinite(value) else 0.0

    def evaluate(self, prices: FloatArray, closed: FloatArray | None = None) -> Point:
        """Value, slope and minimising plan at some prices.

        Args:
            prices: see `Point`.
            closed: per option, 0, or infinity for an option that may not be taken, [V, P].
        """
        value, options = self.elimination.minimise(self.costs(prices, closed))
        objective, usage = self.usage(options)
        constant = self.constant(prices)
        # High prices make both parts large; what their difference may be off by is given up.
        return Point(
            prices=prices,
            value=value - constant - self.rounding(prices, value),
            objective=objective,
            excess=(usage - self.limit) / self.scale,
            options=options,
        )

    def usage(self, options: IntArray) -> tuple[float, FloatArray]:
        """Objective, and the value of every row, of an assignment (copies included), [R]."""
        graph, columns = self.graph, self.graph.columns
        count = len(graph.variable_of)
        rows = np.arange(count)
        option = options[graph.variable_of]
        forward = float(graph.forward_s[rows, option].sum())
        backward = graph.backward_s[rows, option]
        kept = np.zeros(count)
        for table, scope in self.scoped_tables():
            entry = entries(scope, options, columns)
            lines = np.arange(len(scope))
            if table.forward_s is not None and table.backward_s is not None:
                forward += float(table.forward_s[lines, entry].sum())
                backward = backward + np.bincount(
                    table.operator, weights=table.backward_s[lines, entry], minlength=count
                )
            elif table.kept_bytes is not None:
                kept += np.bincount(
                    table.operator, weights=table.kept_bytes[lines, entry], minlength=count
                )
        backward_from = np.append(np.cumsum(backward[::-1])[::-1], 0.0)
        time = forward + backward_from[self.first]
        memory = np.cumsum(kept)[self.points]
        memory += graph.transient[self.points, option[self.points]]
        objective = 0.0
        if self.deadline_s is not None:
            objective = float(graph.perturbation[rows, option].sum())
        return objective, np.concatenate([time, self._cut_use(options), memory])

    def _cut_use(self, options: IntArray) -> FloatArray:
        """What every cut's path takes under an assignment, without what is constant, [cuts]."""
        if not self._cuts:
            return np.zeros(0)
        columns, variables = self.graph.columns, len(self.graph.allowed)
        cells = [1 + np.arange(variables) * columns + options[:variables]]
        for table, scope in zip(self.graph.tables, self._scopes, strict=True):
            cells.append(self.first_cells(table) + entries(scope, options, columns))
        used: FloatArray = self.cut_cells[:, np.concatenate(cells)].sum(axis=1)
        return used

    def first_cells(self, table: Tables) -> IntArray:
        """The first cell of each table over two variables or more, [n]; others follow in order."""
        start = 0
        for other in self.graph.tables:
            if other is table:
                break
            start += len(other.scope)
        cells: IntArray = self.elimination.first_cell[start : start + len(table.scope)]
        return cells

    def allows(self, options: IntArray) -> bool:
        """Whether an assignment keeps every promotion and takes allowed options only."""
        graph, columns = self.graph, self.graph.columns
        if not graph.allowed[np.arange(len(graph.allowed)), options[: len(graph.allowed)]].all():
            return False
        for table, scope in self.scoped_tables():
            if table.blocked is not None:
                entry = entries(scope, options, columns)
                if table.blocked[np.arange(len(scope)), entry].any():
                    return False
        return True

    def ceiling(self) -> float:
        """What no objective exceeds."""
        if self.deadline_s is None:
            return self.reference * (1 + 1e-6)
        live = self.graph.column_of >= 0
        least = np.where(live, self.graph.perturbation, np.inf).min(axis=1).sum()
        return self.reference * (1 + 1e-6) + float(least)
