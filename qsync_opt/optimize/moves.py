"""Changes of a plan: what every single one does, and exchanges of two that make it better.

Each table is read with one option replaced, and the differences are summed by variable. Two
changes add up where no table holds both variables, which is nearly always so; whoever uses
`exchanged` has the result evaluated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from qsync_opt.optimize.arrays import BoolArray, FloatArray, IntArray
from qsync_opt.optimize.exchange import exchange
from qsync_opt.optimize.factors import entries
from qsync_opt.optimize.lagrangian import Lagrangian

#: Options that are exchanged, those of least reduced cost, and the memory rows looked at, those
#: with the least room.
_MOST_OPTIONS = 2_500
_MEMORY_ROWS = 16


@dataclass(frozen=True, kw_only=True, eq=False)
class Changes:
    """What each single change does.

    Attributes:
        objective: by how much the objective changes, [V, P].
        use: by how much each row's use changes, [V, P, rows].
    """

    objective: FloatArray
    use: FloatArray


def single_changes(lagrangian: Lagrangian, options: IntArray, rows: IntArray) -> Changes:
    """The effect of every single change of a plan on the objective and some rows."""
    graph, columns = lagrangian.graph, lagrangian.graph.columns
    variables = len(graph.allowed)
    every = np.arange(columns)
    time = rows[rows < len(lagrangian.first)]
    cuts = rows[(rows >= len(lagrangian.first)) & (rows < lagrangian.time_rows)]
    points = lagrangian.points[rows[rows >= lagrangian.time_rows] - lagrangian.time_rows]
    first = lagrangian.first[time]
    cut_cells = lagrangian.cut_cells[cuts - len(lagrangian.first)]
    before_points = len(time) + len(cuts)
    objective = np.zeros(variables * columns)
    use = np.zeros((len(rows), variables * columns))

    def add(
        cell: IntArray,
        forward: FloatArray | None,
        backward: FloatArray | None,
        kept: FloatArray | None,
        operator: IntArray,
    ) -> None:
        size = variables * columns
        if forward is not None and backward is not None:
            total = np.bincount(cell.ravel(), weights=forward.ravel(), minlength=size)
            for line, lowest in enumerate(first.tolist()):
                use[line] += total
                counts = operator >= lowest
                use[line] += np.bincount(
                    cell[counts].ravel(), weights=backward[counts].ravel(), minlength=size
                )
        if kept is not None:
            for line, point in enumerate(points.tolist()):
                counts = operator <= point
                use[before_points + line] += np.bincount(
                    cell[counts].ravel(), weights=kept[counts].ravel(), minlength=size
                )

    operators = np.arange(len(graph.variable_of))
    cell = graph.variable_of[:, None] * columns + every
    add(cell, graph.forward_s, graph.backward_s, None, operators)
    if lagrangian.deadline_s is not None:
        objective += np.bincount(
            cell.ravel(), weights=graph.perturbation.ravel(), minlength=len(objective)
        )
    for line, point in enumerate(points.tolist()):
        use[before_points + line] += np.bincount(
            cell[point], weights=graph.transient[point], minlength=len(objective)
        )
    use[len(time) : before_points] += cut_cells[:, 1 : 1 + len(objective)]
    for table, scope in lagrangian.scoped_tables():
        if table.blocked is not None:
            continue
        entry = entries(scope, options, columns)
        lines = np.arange(len(scope))[:, None]
        for position in range(table.arity):
            stride = columns ** (table.arity - 1 - position)
            mine = scope[:, position]
            at = (entry - options[mine] * stride)[:, None] + every * stride
            if len(cuts) and table.arity > 1:  # others are in the cells of their variable
                where = (mine[:, None] * columns + every).ravel()
                cells = (lagrangian.first_cells(table)[:, None] + at).ravel()
                for line, seconds in enumerate(cut_cells, start=len(time)):
                    use[line] += np.bincount(
                        where, weights=seconds[cells], minlength=len(objective)
                    )
            add(
                mine[:, None] * columns + every,
                None if table.forward_s is None else table.forward_s[lines, at],
                None if table.backward_s is None else table.backward_s[lines, at],
                None if table.kept_bytes is None else table.kept_bytes[lines, at],
                table.operator,
            )
    here = np.arange(variables) * columns + options[:variables]
    objective = objective.reshape(variables, columns) - objective[here][:, None]
    use = use.reshape(len(rows), variables, columns) - use[:, here][:, :, None]
    return Changes(objective=objective, use=use.transpose(1, 2, 0))


def exchanged(
    lagrangian: Lagrangian,
    options: IntArray,
    prices: FloatArray,
    *,
    rounds: int,
    stop: Callable[[], bool],
) -> IntArray:
    """A plan after the best exchanges of one or two options, as if no two of them met.

    Args:
        lagrangian: exact, with the perturbation as the objective.
        options: of every variable, [V]; a plan that keeps every row.
        prices: by which options near to a tie are known, [R].
        rounds: most exchanges.
        stop: whether to give up now.

    Returns:
        Options of every variable, [V]; those given where no exchange helps.
    """
    graph = lagrangian.graph
    _, used = lagrangian.usage(options)
    room = np.maximum(lagrangian.limit - used, 0.0)
    rows = np.union1d(_tight_rows(lagrangian, room), np.flatnonzero(prices > 0))
    changes = single_changes(lagrangian, options, rows)
    weight = (prices / lagrangian.scale)[rows]
    reduced = changes.objective + np.einsum("vpr,r->vp", changes.use, weight)
    variables = np.arange(len(graph.allowed))
    other = graph.allowed & ~_blocked(lagrangian, options)
    other[variables, options[: len(variables)]] = False
    variable, option = np.nonzero(other)
    if len(variable) > _MOST_OPTIONS:
        near = np.argpartition(reduced[variable, option], _MOST_OPTIONS)[:_MOST_OPTIONS]
        variable, option = variable[near], option[near]
    # The options that the plan has stand first in their classes.
    classes, owner = np.unique(variable, return_inverse=True)
    owner = np.concatenate([np.arange(len(classes)), owner])
    variable = np.concatenate([classes, variable])
    option = np.concatenate([options[classes], option])
    items = exchange(
        np.arange(len(classes)),
        owner=owner,
        cost=changes.objective[variable, option],
        use=changes.use[variable, option],
        capacity=room[rows],
        rounds=rounds,
        stop=stop,
    )
    result = options.copy()
    result[variable[items]] = option[items]
    return result if lagrangian.allows(result) else options


def worthwhile(lagrangian: Lagrangian, options: IntArray, tolerance: float) -> BoolArray:
    """The single changes that may be worth making: none other keeps the rows at no more cost.

    Args:
        lagrangian: exact, with the perturbation as the objective.
        options: of every variable, [V]; a plan that keeps every row.
        tolerance: relative error of sums; changes this close to a limit count.

    Returns:
        [V, P]. Changes that a promotion forbids by themselves count: with the followers that
        change along they may be allowed.
    """
    graph = lagrangian.graph
    objective, used = lagrangian.usage(options)
    room = np.maximum(lagrangian.limit - used, 0.0)
    rows = _tight_rows(lagrangian, room)
    changes = single_changes(lagrangian, options, rows)
    most = (room + tolerance * (np.abs(lagrangian.limit) + np.abs(used)))[rows]
    fits = (changes.use <= most).all(axis=2) & (changes.objective <= tolerance * abs(objective))
    result: BoolArray = graph.allowed & (fits | _blocked(lagrangian, options))
    variables = np.arange(len(graph.allowed))
    result[variables, options[: len(variables)]] = False
    return result


def _tight_rows(lagrangian: Lagrangian, room: FloatArray) -> IntArray:
    """The rows of time, and those of memory with the least room."""
    spare = room[lagrangian.time_rows :] / lagrangian.scale[lagrangian.time_rows :]
    tightest = lagrangian.time_rows + np.argsort(spare, kind="stable")[:_MEMORY_ROWS]
    return np.union1d(np.arange(lagrangian.time_rows), tightest)


def _blocked(lagrangian: Lagrangian, options: IntArray) -> BoolArray:
    """Single changes that a promotion forbids, [V, P]."""
    graph, columns = lagrangian.graph, lagrangian.graph.columns
    blocked: BoolArray = np.zeros(graph.allowed.shape, dtype=np.bool_)
    every = np.arange(columns)
    for table, scope in lagrangian.scoped_tables():
        if table.blocked is None:
            continue
        entry = entries(scope, options, columns)
        for position in range(table.arity):
            stride = columns ** (table.arity - 1 - position)
            mine = scope[:, position]
            at = (entry - options[mine] * stride)[:, None] + every * stride
            np.logical_or.at(blocked, mine, table.blocked[np.arange(len(scope))[:, None], at])
    return blocked
