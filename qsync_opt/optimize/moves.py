"""Plans near a plan: the effect of every single change, and the best one or two together.

All changes of one variable are priced at once by reading each table with one option replaced.
Two changes of variables that share no table add up exactly; every combination that looks good
is checked by its true use, so that those that share one do no harm.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from qsync_opt.optimize.arrays import FloatArray, IntArray
from qsync_opt.optimize.lagrangian import Lagrangian

#: Changes that are combined in pairs, those of the least reduced cost.
_MOST_PAIRED = 400

#: Combinations whose true use is checked before giving up.
_MOST_CHECKED = 12

#: Steps from one plan.
_MOST_STEPS = 30


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
    time = rows[rows < lagrangian.time_rows]
    points = lagrangian.points[rows[rows >= lagrangian.time_rows] - lagrangian.time_rows]
    first = lagrangian.first[time]
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
                use[len(time) + line] += np.bincount(
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
        use[len(time) + line] += np.bincount(
            cell[point], weights=graph.transient[point], minlength=len(objective)
        )
    for table, scope in lagrangian.scoped_tables():
        if table.blocked is not None:
            continue
        entry = np.zeros(len(scope), dtype=np.int64)
        for position in range(table.arity):
            entry = entry * columns + options[scope[:, position]]
        lines = np.arange(len(scope))[:, None]
        for position in range(table.arity):
            stride = columns ** (table.arity - 1 - position)
            mine = scope[:, position]
            at = (entry - options[mine] * stride)[:, None] + every * stride
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


def descend(
    lagrangian: Lagrangian, options: IntArray, prices: FloatArray, below: float
) -> tuple[float, IntArray] | None:
    """From a plan that may break rows, by changes of one or two variables, to a good one.

    Args:
        lagrangian: exact, with perturbation as its objective.
        options: the plan, [V].
        prices: good prices; they say which changes are cheap.
        below: objectives that are not below this are of no use.

    Returns:
        Objective and options of the best plan found that keeps every row, or None.
    """
    graph, columns = lagrangian.graph, lagrangian.graph.columns
    variables = len(graph.allowed)
    best: tuple[float, IntArray] | None = None
    objective, use = lagrangian.usage(options)
    for _ in range(_MOST_STEPS):
        room = lagrangian.limit - use
        rows = np.flatnonzero((prices > 0) | (room < 0))
        if (room >= 0).all() and objective < below:
            best, below = (objective, options), objective
        changes = single_changes(lagrangian, options, rows)
        reduced = changes.objective + changes.use @ (prices[rows] / lagrangian.scale[rows])
        reduced[~graph.allowed] = np.inf
        reduced[np.arange(variables), options[:variables]] = np.inf
        order = np.argsort(reduced, axis=None, kind="stable")[:_MOST_PAIRED]
        order = order[np.isfinite(reduced.ravel()[order])]
        step = _best_step(
            lagrangian,
            options,
            order,
            changes.objective.ravel()[order],
            changes.use.reshape(-1, len(rows))[order],
            room[rows],
            below - objective,
            columns,
        )
        if step is None:
            break
        objective, use, options = step
    return best


def _best_step(
    lagrangian: Lagrangian,
    options: IntArray,
    cells: IntArray,
    gain: FloatArray,
    use: FloatArray,
    room: FloatArray,
    below: float,
    columns: int,
) -> tuple[float, FloatArray, IntArray] | None:
    """The change of one or two variables that keeps all rows at the least objective."""
    if not len(cells):
        return None
    # Change 0 is no change, so that pairs include single changes.
    gain = np.append(0.0, gain)
    use = np.vstack([np.zeros(use.shape[1]), use])
    variable = np.append(-1, cells // columns)
    pair = gain[:, None] + gain[None, :]
    fits = pair < below - 1e-12 * abs(below)
    fits &= variable[:, None] != variable[None, :]
    fits &= np.arange(len(gain))[:, None] < np.arange(len(gain))[None, :]
    for row in range(use.shape[1]):
        fits &= use[:, row][:, None] + use[:, row][None, :] <= room[row]
    first, second = np.nonzero(fits)
    if not len(first):
        return None
    value = pair[first, second]
    pick = np.argsort(value, kind="stable")[:_MOST_CHECKED]
    for index in pick.tolist():
        changed = options.copy()
        for change in (int(first[index]), int(second[index])):
            if change:
                cell = int(cells[change - 1])
                changed[cell // columns] = cell % columns
        if not lagrangian.allows(changed):
            continue
        objective, used = lagrangian.usage(changed)
        if (used <= lagrangian.limit).all():
            return objective, used, changed
    return None
