"""`find_core`: what the bounds leave open, as a multiple-choice knapsack.

Once most options are ruled out, the variables that still have a choice fall into small
components of the factor graph. Each component's near-minimal assignments are listed (all that
can be part of a plan below the threshold), those that another beats in every respect are
dropped, and the rest become the items of one class:

    minimise  sum of objective x item,   one item per class,
              sum of time x item <= limit for every time row that can be broken,
              sum of bytes x item <= budget for every memory point that can be broken.

Casts, shared copies and promotions are inside the items, so the program has one row a class
and a few more. (The multiple-choice knapsack with such a core: Pisinger, 1995.)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from qsync_opt.optimize.arrays import BoolArray, FloatArray, IntArray
from qsync_opt.optimize.byte_rows import add_byte_rows, power_of_two_near
from qsync_opt.optimize.evaluate import TIME_TOLERANCE
from qsync_opt.optimize.knapsack import Knapsack
from qsync_opt.optimize.lagrangian import Lagrangian
from qsync_opt.optimize.linear import LazyNames, LinearProgram, ProgramBuilder

#: Items of the largest program that is built; beyond it the edge-flow form is smaller.
_MOST_ITEMS = 40_000

#: Items compared with each other at once.
_BLOCK = 64

#: Items of the classes that are compared within many classes at once.
_SMALL_CLASS = 12

#: Entries of the largest table of items by rows.
_MOST_CELLS = 60_000_000


@dataclass(frozen=True, kw_only=True, eq=False)
class Core:
    """The knapsack that is left, and how to read a plan from its items.

    Attributes:
        knapsack: classes, items and the rows that can be broken. Costs are objectives of the
            items (0 where time is the objective); uses are in seconds and bytes, relative to
            the base plan.
        constant: objective of the variables without a choice.
        memory_rows: which rows of the knapsack are memory (whole bytes), [R].
        rows: which rows of the Lagrangian they are, [R].
        deadline_s: as in the Lagrangian; None where the time is the objective.
    """

    knapsack: Knapsack
    constant: float
    memory_rows: BoolArray
    rows: IntArray
    deadline_s: float | None
    _assignments: tuple[tuple[list[int], IntArray], ...]
    _number: IntArray
    _base: IntArray

    def options(self, items: IntArray) -> IntArray:
        """The option of every variable when each class takes this item, [V]."""
        options = self._base.copy()
        for (variables, table), item in zip(self._assignments, items.tolist(), strict=True):
            options[variables] = table[self._number[item]]
        return options

    def chosen(self, values: FloatArray) -> IntArray:
        """The item of every class in a solution of `program`: its largest column, [C]."""
        start = self.knapsack.start
        return np.array(
            [a + int(values[a:b].argmax()) for a, b in zip(start[:-1], start[1:], strict=True)],
            dtype=np.int64,
        )

    def program(self) -> tuple[LinearProgram, float]:
        """The knapsack as a mixed-integer program, and what one unit of its objective is.

        Its first columns are the items.
        """
        knapsack, builder = self.knapsack, ProgramBuilder("core", named=False)
        minimise_time = self.deadline_s is None
        count, start = len(knapsack.cost), knapsack.start[:-1]
        component = np.repeat(np.arange(len(start)), np.diff(knapsack.start))
        columns = builder.add_columns(
            LazyNames(count, list),
            objective=0.0 if minimise_time else knapsack.cost,
            integer=True,
        )
        one = builder.add_rows(LazyNames(len(start), list), lower=1.0, upper=1.0)
        builder.add_entries(one[component], columns, 1.0)
        clock, unit = None, 1.0
        if minimise_time:
            scale = power_of_two_near(1e4 / float(-knapsack.capacity[~self.memory_rows].min()))
            clock = builder.add_columns(
                LazyNames(1, list), objective=1.0, lower=-np.inf, upper=np.inf
            )
            unit = 1.0 / scale
        else:
            scale = power_of_two_near(1e4 / (self.deadline_s or 1.0))
        for row, memory in enumerate(self.memory_rows.tolist()):
            use = knapsack.use[:, row]
            # One item per class is taken, so a class may be shifted to start at zero.
            shift = np.minimum.reduceat(use, start)
            use = use - shift[component]
            limit = float(knapsack.capacity[row] - shift.sum())
            if memory:
                whole = np.rint(use).astype(np.int64)
                add_byte_rows(builder, "core", columns, whole, int(np.floor(limit)))
                continue
            limit -= 0.5 * TIME_TOLERANCE * (self.deadline_s or 0.0)
            line = builder.add_rows(LazyNames(1, list), lower=-np.inf, upper=limit * scale)
            builder.add_entries(np.broadcast_to(line, columns.shape), columns, use * scale)
            if clock is not None:
                builder.add_entries(line, clock, -1.0)
        return builder.build(), unit


class _Items:
    """The items of all components, flat, and what each uses of every row."""

    def __init__(
        self, lagrangian: Lagrangian, listed: list[tuple[list[int], IntArray]], component: IntArray
    ) -> None:
        self._lagrangian, self._listed = lagrangian, listed
        self._of_variable = component
        counts = np.array([len(table) for _, table in listed], dtype=np.int64)
        self.first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self.component = np.repeat(np.arange(len(listed)), counts)
        self.number = np.arange(len(self.component)) - self.first[self.component]
        self._place = np.zeros(len(component), dtype=np.int64)
        for variables, _ in listed:
            self._place[variables] = np.arange(len(variables))
        widths = np.array([table.shape[1] for _, table in listed], dtype=np.int64)
        self._row = np.concatenate([[0], np.cumsum(counts * widths)]).astype(np.int64)
        self._width = widths
        self._flat = np.concatenate([table.ravel() for _, table in listed])

    def _option(self, item: IntArray, variable: IntArray, base: IntArray) -> IntArray:
        """Option of a variable in an item: its own component's, or the fixed one."""
        component = self.component[item]
        mine = self._of_variable[variable] == component
        at = self._row[component] + self.number[item] * self._width[component]
        at = np.where(mine, at + self._place[variable], 0)
        return np.where(mine, self._flat[at], base[variable])

    def use(self, base: IntArray) -> tuple[FloatArray, FloatArray]:
        """Objective [I] and use of every row [I, R] of every item."""
        graph, lagrangian = self._lagrangian.graph, self._lagrangian
        count = len(self.component)
        rows = lagrangian.time_rows
        objective: FloatArray = np.zeros(count)
        use = np.zeros((count, len(lagrangian.limit)))
        operators = np.arange(len(graph.variable_of))
        item, operator = self._pairs(graph.variable_of[:, None], operators)
        option = self._option(item, graph.variable_of[operator], base)
        if lagrangian.deadline_s is not None:
            gained = graph.perturbation[operator, option]
            objective += np.bincount(item, weights=gained, minlength=count)
        self._add_time(
            use,
            item,
            operator,
            graph.forward_s[operator, option],
            graph.backward_s[operator, option],
        )
        place = np.searchsorted(lagrangian.points, operator)
        place = np.minimum(place, max(len(lagrangian.points) - 1, 0))
        if len(lagrangian.points):
            at = np.flatnonzero(lagrangian.points[place] == operator)
            np.add.at(use, (item[at], rows + place[at]), graph.transient[operator[at], option[at]])
        self._add_cuts(use, base)
        kept = np.zeros((count, len(lagrangian.points) + 1))
        for table, scope in lagrangian.scoped_tables():
            item, line = self._pairs(scope, np.arange(len(scope)))
            entry = np.zeros(len(item), dtype=np.int64)
            for position in range(table.arity):
                entry = entry * graph.columns + self._option(item, scope[line, position], base)
            where = table.operator[line]
            if table.forward_s is not None and table.backward_s is not None:
                self._add_time(
                    use, item, where, table.forward_s[line, entry], table.backward_s[line, entry]
                )
            elif table.kept_bytes is not None:
                np.add.at(
                    kept,
                    (item, np.searchsorted(lagrangian.points, where)),
                    table.kept_bytes[line, entry],
                )
        use[:, rows:] += np.cumsum(kept[:, :-1], axis=1)
        return objective, use

    def _add_cuts(self, use: FloatArray, base: IntArray) -> None:
        """What every item adds to each cut, by the cells of the elimination."""
        lagrangian, columns = self._lagrangian, self._lagrangian.graph.columns
        if not len(lagrangian.cut_cells):
            return
        variables = np.arange(len(lagrangian.graph.allowed))
        item, variable = self._pairs(variables[:, None], variables)
        found = [(item, 1 + variable * columns + self._option(item, variable, base))]
        for table, scope in lagrangian.scoped_tables():
            if table.arity > 1:  # others are in the cells of their variable
                item, line = self._pairs(scope, np.arange(len(scope)))
                entry = np.zeros(len(item), dtype=np.int64)
                for position in range(table.arity):
                    entry = entry * columns + self._option(item, scope[line, position], base)
                found.append((item, lagrangian.first_cells(table)[line] + entry))
        item, cell = (np.concatenate(parts) for parts in zip(*found, strict=True))
        for row, seconds in enumerate(lagrangian.cut_cells, start=len(lagrangian.first)):
            use[:, row] += np.bincount(item, weights=seconds[cell], minlength=len(use))

    def _pairs(self, scope: IntArray, label: IntArray) -> tuple[IntArray, IntArray]:
        """Every (item, label of a table) where the table is in the item's component."""
        owner = self._of_variable[scope].max(axis=1)
        mine = np.flatnonzero(owner >= 0)
        owner = owner[mine]
        counts = self.first[owner + 1] - self.first[owner]
        start = np.cumsum(counts) - counts
        item = np.arange(int(counts.sum())) - np.repeat(start - self.first[owner], counts)
        return item, np.repeat(label[mine], counts)

    def _add_time(
        self,
        use: FloatArray,
        item: IntArray,
        operator: IntArray,
        forward_s: FloatArray,
        backward_s: FloatArray,
    ) -> None:
        count = len(use)
        forward = np.bincount(item, weights=forward_s, minlength=count)
        for row, first in enumerate(self._lagrangian.first.tolist()):
            counts = operator >= first
            use[:, row] += forward
            use[:, row] += np.bincount(item[counts], weights=backward_s[counts], minlength=count)


def components(lagrangian: Lagrangian) -> IntArray:
    """Component of every variable that has a choice, -1 for the others, [V]."""
    graph = lagrangian.graph
    parent = list(range(len(graph.allowed)))

    def root(v: int) -> int:
        while parent[v] != v:
            parent[v] = parent[parent[v]]
            v = parent[v]
        return v

    for table, scope in lagrangian.scoped_tables():
        if table.arity > 1:
            for first, *others in scope.tolist():
                for other in others:
                    parent[root(other)] = root(first)
    result = np.full(len(parent), -1, dtype=np.int64)
    number: dict[int, int] = {}
    for v in np.flatnonzero(graph.allowed.sum(axis=1) > 1).tolist():
        result[v] = number.setdefault(root(v), len(number))
    return result


def find_core(lagrangian: Lagrangian, prices: FloatArray, threshold: float) -> Core | None:
    """The knapsack over the options left in a graph, or None where it would be too large.

    Args:
        lagrangian: of the graph with only these options; must be exact.
        prices: the best prices known.
        threshold: plans that cost at least this are not wanted.
    """
    costs = lagrangian.costs(prices)
    point = lagrangian.evaluate(prices)
    component = components(lagrangian)
    slack = threshold - point.value
    if not component.max(initial=-1) >= 0:
        return None
    listed = lagrangian.elimination.near_minima(
        costs, component, slack + 1e-9 * abs(slack), _MOST_ITEMS
    )
    if listed is None:
        return None
    base = point.options
    items = _Items(lagrangian, listed, component)
    if len(items.component) * len(lagrangian.limit) > _MOST_CELLS:
        return None
    objective, use = items.use(base)
    # Relative to the base plan: variables without a choice need not be counted.
    _, base_use = lagrangian.usage(base)
    reference = _base_items(items, listed, base)
    delta = use - use[reference][items.component]
    room = lagrangian.limit - base_use
    most = np.maximum.reduceat(delta, items.first[:-1], axis=0).sum(axis=0)
    rows = most > room
    if lagrangian.deadline_s is None:
        rows[: lagrangian.time_rows] = True
    binding = np.flatnonzero(rows)
    kept = _undominated(items, objective, delta[:, binding])
    counts = np.bincount(items.component[kept], minlength=len(listed))
    return Core(
        knapsack=Knapsack(
            start=np.concatenate([[0], np.cumsum(counts)]),
            cost=objective[kept],
            use=delta[kept][:, binding],
            capacity=room[binding],
        ),
        constant=point.objective - float(objective[reference].sum()),
        memory_rows=binding >= lagrangian.time_rows,
        rows=binding,
        deadline_s=lagrangian.deadline_s,
        _assignments=tuple(listed),
        _number=items.number[kept],
        _base=base,
    )


def _base_items(
    items: _Items, listed: list[tuple[list[int], IntArray]], base: IntArray
) -> IntArray:
    """The item of each component that the base plan takes."""
    result = np.zeros(len(listed), dtype=np.int64)
    for c, (variables, table) in enumerate(listed):
        result[c] = items.first[c] + int((table == base[variables]).all(axis=1).argmax())
    return result


def _undominated(items: _Items, objective: FloatArray, use: FloatArray) -> IntArray:
    """Items that no other of their class matches or beats in objective and every row."""
    cost = np.column_stack([objective, use])
    sizes = np.diff(items.first)
    kept = [items.first[:-1][sizes == 1]]
    for size in range(2, _SMALL_CLASS + 1):
        classes = np.flatnonzero(sizes == size)
        if len(classes):  # most classes are small: all of one size at once
            rows = items.first[classes][:, None] + np.arange(size)
            kept.append(rows[_free(cost[rows])])
    for c in np.flatnonzero(sizes > _SMALL_CLASS).tolist():
        rows = np.arange(items.first[c], items.first[c + 1])
        kept.append(rows[_front(cost[rows])])
    return np.sort(np.concatenate(kept))


def _free(cost: FloatArray) -> BoolArray:
    """Which of the items of some classes, [C, n, R], none of the others replaces, [C, n].

    Of items that are equal the first is left.
    """
    size = cost.shape[1]
    no_worse = np.ones((len(cost), size, size), dtype=np.bool_)  # [c, i, j]: j for i
    for row in range(cost.shape[2]):
        no_worse &= cost[:, None, :, row] <= cost[:, :, None, row]
    better: BoolArray = ~no_worse.transpose(0, 2, 1)
    better |= np.tri(size, k=-1, dtype=np.bool_)  # or as good, and earlier
    better &= no_worse
    free: BoolArray = np.logical_not(np.logical_or.reduce(better, axis=2))
    return free


def _front(cost: FloatArray) -> IntArray:
    """The items of one class, [n, R], that none of the others replaces."""
    order = np.lexsort(cost.T[::-1])
    cost = cost[order]
    # Sorted so, an item can only be beaten by one before it.
    front = np.zeros((0, cost.shape[1]))
    chosen: list[IntArray] = []
    for start in range(0, len(order), _BLOCK):
        block, mine = cost[start : start + _BLOCK], order[start : start + _BLOCK]
        free = ~_beaten(front, block)
        block, mine = block[free], mine[free]
        inner = (block[None, :, :] <= block[:, None, :]).all(axis=2)
        free = np.tril(inner, -1).sum(axis=1) == 0
        front = np.vstack([front, block[free]])
        chosen.append(mine[free])
    return np.concatenate(chosen)


def _beaten(front: FloatArray, block: FloatArray) -> BoolArray:
    """Which rows of `block` are matched or beaten by a row of `front`, [len(block)]."""
    beaten: BoolArray = np.zeros(len(block), dtype=np.bool_)
    for start in range(0, len(front), 8 * _BLOCK):
        part = front[start : start + 8 * _BLOCK]
        no_worse: BoolArray = np.all(part[None, :, :] <= block[:, None, :], axis=2)
        beaten |= no_worse.any(axis=1)
    return beaten
