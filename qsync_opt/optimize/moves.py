"""`single_changes`: the effect of every single change of a plan, all priced at once.

Each table is read with one option replaced, and the differences are summed by variable.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from qsync_opt.optimize.arrays import FloatArray, IntArray
from qsync_opt.optimize.factors import entries
from qsync_opt.optimize.lagrangian import Lagrangian


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
        entry = entries(scope, options, columns)
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
