"""`Elimination`: the exact minimum of a sum of small tables, by eliminating variables in rounds.

Nonserial dynamic programming (Bertele and Brioschi, 1972): eliminating a variable v adds the
tables over v, takes the minimum over v's options, and leaves one table over v's neighbours.
Chains, residual blocks and attention have small neighbourhoods throughout. Each round takes
an independent set of variables, so that all of one neighbourhood size are done by a few numpy
operations; a chain of N variables takes about log N rounds.

Where a neighbourhood would be too large, a variable is split into copies that are minimised
apart (mini-buckets, Dechter and Rish, 2003): the value is then a lower bound.

The order is planned once per graph; a run costs a few microseconds per variable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qsync_opt.optimize.arrays import BoolArray, FloatArray, IntArray

#: Entries of the largest table made while eliminating one variable.
LARGEST_TABLE = 4096


@dataclass(frozen=True, kw_only=True, eq=False)
class _Batch:
    """n variables eliminated at once, each with `len(neighbours[0])` neighbours.

    Attributes:
        variable: [n].
        neighbours: [n, d].
        cells: per table slot, the cell of every combination, [P, n * P ** d]; option first.
            Cell 0 is always zero and pads variables with fewer tables.
        target: first cell of the tables made, [n * P ** d] in all.
    """

    variable: IntArray
    neighbours: IntArray
    cells: tuple[IntArray, ...]
    target: int


class Elimination:
    """An elimination order for given scopes, and the runs over it.

    Args:
        variables: how many variables there are, V.
        columns: P, options per variable.
        active: which variables take part (others have no table and no choice), [V].
        scopes: tables as lists of variables in ascending order; table i occupies
            P ** len(scopes[i]) consecutive cells, in order, from `first_cell[i]`; before
            them come one zero cell and P cells for every variable.

    Attributes:
        cells: how many input cells there are (zero cell, unary cells, table cells).
        first_cell: first cell of every table, [len(scopes)].
        exact: whether no variable had to be split.
        copy_of: original variable of every variable, copies included.
    """

    def __init__(
        self, variables: int, columns: int, active: BoolArray, scopes: Sequence[tuple[int, ...]]
    ) -> None:
        self.columns = columns
        sizes = np.array([columns ** len(scope) for scope in scopes], dtype=np.int64)
        start = 1 + variables * columns
        self.first_cell = start + np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)
        if not len(scopes):
            self.first_cell = np.zeros(0, dtype=np.int64)
        self.cells = int(start + sizes.sum())
        self.exact = True
        self._variables = variables
        self.copy_of = list(range(variables))
        #: The scopes after splitting: a copy stands where it took a variable's place.
        self.scopes = list(scopes)
        self._digits: dict[int, IntArray] = {}
        self._plan(active, scopes)

    # -- planning --------------------------------------------------------------------------

    def _plan(self, active: BoolArray, scopes: Sequence[tuple[int, ...]]) -> None:
        columns = self.columns
        widest = 1 if columns > 1 else self._variables  # tables of one option have one cell
        while columns > 1 and columns ** (widest + 2) <= LARGEST_TABLE:
            widest += 1
        next_table, next_cell = len(scopes), self.cells
        self._batches: list[_Batch] = []
        alone = active.copy()
        for scope in scopes:
            alone[list(scope)] = False
        if alone.any():  # most variables of a core have no choice, and so no table
            self._batches.append(self._lone_batch(np.flatnonzero(alone), next_cell))
            next_cell += int(alone.sum())
        alive = dict.fromkeys(np.flatnonzero(active & ~alone).tolist())
        # Tables by variable: table id -> (scope, first cell).
        tables: dict[int, tuple[tuple[int, ...], int]] = {}
        of: dict[int, dict[int, None]] = {v: {} for v in alive}
        for index, scope in enumerate(scopes):
            tables[index] = (scope, int(self.first_cell[index]))
            for v in scope:
                of[v][index] = None
        for v in alive:  # unary tables: ids below zero
            tables[-1 - v] = ((v,), 1 + v * columns)
            of[v][-1 - v] = None
        neighbours: dict[int, set[int]] = {v: self._around(v, of[v], tables) for v in alive}
        while alive:
            degree = {v: len(neighbours[v]) for v in alive}
            least = min(degree.values())
            if least > widest:
                self._split(
                    min(alive, key=lambda v: (degree[v], v)), widest, of, tables, alive, neighbours
                )
                continue
            limit = min(max(least, 2), widest)
            taken: list[int] = []
            blocked: set[int] = set()
            for wanted in range(least, limit + 1):
                for v in alive:
                    if degree[v] == wanted and v not in blocked:
                        taken.append(v)
                        blocked.add(v)
                        blocked |= neighbours[v]
            by_degree: dict[int, list[int]] = {}
            for v in taken:
                by_degree.setdefault(degree[v], []).append(v)
            for size, members in sorted(by_degree.items()):
                around = [tuple(sorted(neighbours[v])) for v in members]
                self._batches.append(self._batch(members, around, of, tables, next_cell))
                for v, scope in zip(members, around, strict=True):
                    for table in of.pop(v):
                        for other in tables.pop(table)[0]:
                            if other != v:
                                of[other].pop(table, None)
                    del alive[v], neighbours[v]
                    if scope:
                        tables[next_table] = (scope, next_cell)
                        for other in scope:
                            of[other][next_table] = None
                            neighbours[other].discard(v)
                            neighbours[other].update(scope)
                            neighbours[other].discard(other)
                        next_table += 1
                    next_cell += columns**size
        self._all_cells = next_cell

    def _lone_batch(self, variable: IntArray, target: int) -> _Batch:
        """Variables that only have their unary table."""
        return _Batch(
            variable=variable,
            neighbours=np.zeros((len(variable), 0), dtype=np.int64),
            cells=(1 + variable * self.columns + np.arange(self.columns)[:, None],),
            target=target,
        )

    @staticmethod
    def _around(
        v: int, mine: dict[int, None], tables: dict[int, tuple[tuple[int, ...], int]]
    ) -> set[int]:
        around = {other for table in mine for other in tables[table][0]}
        around.discard(v)
        return around

    def _split(
        self,
        v: int,
        widest: int,
        of: dict[int, dict[int, None]],
        tables: dict[int, tuple[tuple[int, ...], int]],
        alive: dict[int, None],
        neighbours: dict[int, set[int]],
    ) -> None:
        """Move tables of `v` to copies of it until no copy has too many neighbours."""
        self.exact = False
        buckets: list[tuple[set[int], list[int]]] = []
        for table in sorted(of[v], key=lambda t: (-len(tables[t][0]), t)):
            scope = set(tables[table][0]) - {v}
            for around, members in buckets:
                if len(around | scope) <= widest:
                    around |= scope
                    members.append(table)
                    break
            else:
                buckets.append((scope, [table]))
        for around, members in buckets:
            if -1 - self.copy_of[v] in members:
                continue  # this bucket stays with the original, as does the unary table
            copy = len(self.copy_of)
            self.copy_of.append(self.copy_of[v])
            of[copy] = {}
            for table in members:
                before, cell = tables[table]
                # The copy takes v's place; cells keep their order, so the position must too.
                tables[table] = (tuple(copy if u == v else u for u in before), cell)
                if 0 <= table < len(self.scopes):
                    self.scopes[table] = tables[table][0]
                del of[v][table]
                of[copy][table] = None
            alive[copy] = None
            neighbours[copy] = set(around)
            for other in around:
                neighbours[other].add(copy)
        neighbours[v] = self._around(v, of[v], tables)
        for other in list(neighbours):
            if other != v and v in neighbours[other] and other not in neighbours[v]:
                neighbours[other].discard(v)

    def _batch(
        self,
        members: list[int],
        around: list[tuple[int, ...]],
        of: dict[int, dict[int, None]],
        tables: dict[int, tuple[tuple[int, ...], int]],
        target: int,
    ) -> _Batch:
        columns, size = self.columns, len(around[0])
        digits = self._digits.get(size)
        if digits is None:  # option of v first, then the neighbours
            digits = np.indices((columns,) * (size + 1), dtype=np.int64).reshape(size + 1, -1)
            self._digits[size] = digits
        # The cell of a combination is first + sum over positions of stride x digit.
        slots = max(len(of[v]) for v in members)
        first = np.zeros((slots, len(members)), dtype=np.int64)
        stride = np.zeros((slots, len(members), size + 1), dtype=np.int64)
        for row, (v, scope) in enumerate(zip(members, around, strict=True)):
            for slot, table in enumerate(of[v]):
                variables, cell = tables[table]
                first[slot, row] = cell
                step = 1
                for u in reversed(variables):
                    stride[slot, row, 0 if u == v else 1 + scope.index(u)] = step
                    step *= columns
        cells = []
        for slot in range(slots):
            cell = first[slot][:, None] + stride[slot] @ digits  # [n, P * P ** size]
            cell = cell.reshape(len(members), columns, -1).transpose(1, 0, 2)
            cells.append(np.ascontiguousarray(cell.reshape(columns, -1)))
        return _Batch(
            variable=np.array(members),
            neighbours=np.array(around, dtype=np.int64).reshape(len(members), size),
            cells=tuple(cells),
            target=target,
        )

    # -- running ---------------------------------------------------------------------------

    def minimise(self, costs: FloatArray) -> tuple[float, IntArray]:
        """Minimum of the sum of all tables, and an assignment that attains it.

        Args:
            costs: value of every input cell, [cells]; cell 0 must be 0; may be infinite.

        Returns:
            The minimum (infinite where nothing is allowed) and the option of every variable,
            copies included, [variables + copies].
        """
        buffer = self._buffer(costs)
        choices, value = [], 0.0
        for batch in self._batches:
            table = self._combined(batch, buffer)
            best, choice = table[0].copy(), np.zeros(table.shape[1], dtype=np.int8)
            for option in range(1, self.columns):
                better = table[option] < best
                choice[better] = option
                np.minimum(best, table[option], out=best)
            choices.append(choice)
            buffer[batch.target : batch.target + len(best)] = best
            if not batch.neighbours.shape[1]:
                value += float(best.sum())
        options = np.zeros(len(self.copy_of), dtype=np.int64)
        for batch, choice in zip(reversed(self._batches), reversed(choices), strict=True):
            at = np.zeros(len(batch.variable), dtype=np.int64)
            for position in range(batch.neighbours.shape[1]):
                at = at * self.columns + options[batch.neighbours[:, position]]
            width = self.columns ** batch.neighbours.shape[1]
            options[batch.variable] = choice[np.arange(len(at)) * width + at]
        return value, options

    def conditional_minima(self, costs: FloatArray) -> FloatArray:
        """For every variable and option, the minimum of the sum with that option fixed.

        Where a variable was split this is the largest over its copies: still a lower bound.

        Args:
            costs: as for `minimise`.

        Returns:
            [V, P]; infinite where an option is impossible.
        """
        buffer, tables, value = self._tables(costs)
        # Cost of everything outside a table's own branch, for every cell of every table.
        outside = np.full(self._all_cells, np.inf)
        result = np.full((len(self.copy_of), self.columns), -np.inf)
        for batch, table in zip(reversed(self._batches), reversed(tables), strict=True):
            size = table.shape[1]
            if batch.neighbours.shape[1]:
                rest = outside[batch.target : batch.target + size]
            else:
                own = buffer[batch.target : batch.target + size]
                live = np.isfinite(own)
                rest = np.where(live, value - np.where(live, own, 0), np.inf)
            belief = table + rest
            shaped = belief.reshape(self.columns, len(batch.variable), -1)
            result[batch.variable] = shaped.min(axis=2).T
            possible = np.isfinite(belief)
            for cells in batch.cells:
                own = buffer[cells]
                without = np.where(possible, belief - np.where(possible, own, 0.0), np.inf)
                np.minimum.at(outside, cells.ravel(), without.ravel())
        merged = np.full((self._variables, self.columns), -np.inf)
        np.maximum.at(merged, np.array(self.copy_of), result)
        return merged

    def near_minima(
        self, costs: FloatArray, component: IntArray, slack: float, limit: int
    ) -> list[tuple[list[int], IntArray]] | None:
        """All assignments of each component that cost less than `slack` above its minimum.

        Going back through the elimination, the options of a variable, given its neighbours,
        each add an amount >= 0, and these amounts sum to the excess over the minimum: what is
        within the slack is enumerated without ever following a branch that ends outside it.

        Args:
            costs: as for `minimise`; the elimination must be exact.
            component: component of every variable, -1 for variables that have no choice, [V].
                Variables of different components must share no table.
            slack: the excess allowed.
            limit: give up (None) beyond this many assignments in all.

        Returns:
            Per component, its variables and the option of each, [assignments, variables].
        """
        _, tables, _ = self._tables(costs)
        count = int(component.max(initial=-1)) + 1
        variables: list[list[int]] = [[] for _ in range(count)]
        options: list[dict[int, IntArray]] = [{} for _ in range(count)]
        excess = [np.zeros(1) for _ in range(count)]
        total = count
        for batch, table in zip(reversed(self._batches), reversed(tables), strict=True):
            width = self.columns ** batch.neighbours.shape[1]
            best = table.min(axis=0)
            for row in np.flatnonzero(component[batch.variable] >= 0).tolist():
                v = int(batch.variable[row])
                c = int(component[v])
                at = np.zeros(len(excess[c]), dtype=np.int64)
                for u in batch.neighbours[row].tolist():
                    at = at * self.columns + options[c][u]
                at += row * width
                sums = excess[c] + (table[:, at] - best[at])
                option, source = np.nonzero(sums < slack)
                total += len(source) - len(excess[c])
                if total > limit:
                    return None
                options[c] = {u: chosen[source] for u, chosen in options[c].items()}
                options[c][v] = option
                variables[c].append(v)
                excess[c] = sums[option, source]
        return [
            (mine, np.stack([chosen[v] for v in mine], axis=1))
            for mine, chosen in zip(variables, options, strict=True)
        ]

    def _tables(self, costs: FloatArray) -> tuple[FloatArray, list[FloatArray], float]:
        """The cells, every batch's combined tables, and the minimum."""
        buffer = self._buffer(costs)
        tables, value = [], 0.0
        for batch in self._batches:
            table = self._combined(batch, buffer)
            tables.append(table)
            best = table.min(axis=0)
            buffer[batch.target : batch.target + len(best)] = best
            if not batch.neighbours.shape[1]:
                value += float(best.sum())
        return buffer, tables, value

    def _buffer(self, costs: FloatArray) -> FloatArray:
        buffer = np.zeros(self._all_cells)
        buffer[: self.cells] = costs
        return buffer

    @staticmethod
    def _combined(batch: _Batch, buffer: FloatArray) -> FloatArray:
        total: FloatArray = buffer[batch.cells[0]]
        for cells in batch.cells[1:]:
            total += buffer[cells]
        return total
