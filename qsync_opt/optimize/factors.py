"""`FactorGraph`: one device kind's problem as a sum of small tables over few variables.

A variable is a set of operators whose precisions move together: a group, or an operator with
the followers that have it as their only source. Its options are precision columns of its
leader. Every cost is a table over the options of the variables it depends on (its scope):

    operators      perturbation, forward and backward time, transient bytes      one variable
    casts          forward and backward time of the distinct pairs (p, q)        producer, consumers
    saved tensors  bytes of the distinct copies                                  savers
    promotions     0 where a follower runs at the promotion of its inputs, else infinite

Shared casts and shared copies are exact in such a table, where the linear program only bounds
them. A scope whose table would exceed `LARGEST_TABLE` entries is split into tables over one
or two variables that add up to at most the true cost: the graph then gives lower bounds only
(`exact` is False).

Given one price per second (by time row) and per byte (by memory point), all tables become
one sum of plain costs, which `elimination` minimises exactly: the Lagrangian of the program.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from qsync_opt.optimize.arrays import BoolArray, FloatArray, IntArray
from qsync_opt.optimize.cuts import TimeCut
from qsync_opt.optimize.elimination import LARGEST_TABLE, Elimination
from qsync_opt.optimize.problem import AllocationProblem, DeviceKind
from qsync_opt.optimize.rows import first_savers, transient_bytes
from qsync_opt.precision import PROMOTED


@dataclass(frozen=True, kw_only=True, eq=False)
class Tables:
    """n cost tables over `arity` variables each, flattened with the last variable fastest.

    Attributes:
        scope: variables, ascending, [n, arity].
        forward_s, backward_s, kept_bytes: [n, P ** arity]; None where there is none.
        blocked: entries that no plan may take, [n, P ** arity], or None.
        operator: the operator whose backward the seconds precede, or the first saver from
            which on the bytes are held, [n].
        tensor: the tensor that is cast, [n]; None where a cast is split or there is none.
    """

    scope: IntArray
    operator: IntArray
    forward_s: FloatArray | None = None
    backward_s: FloatArray | None = None
    kept_bytes: FloatArray | None = None
    blocked: BoolArray | None = None
    tensor: IntArray | None = None

    @property
    def arity(self) -> int:
        """How many variables each table is over."""
        return int(self.scope.shape[1])


def entries(scope: IntArray, options: IntArray, columns: int) -> IntArray:
    """Flat index of each table's entry under an assignment of options, [n]."""
    index = np.zeros(len(scope), dtype=np.int64)
    for position in range(scope.shape[1]):
        index = index * columns + options[scope[:, position]]
    return index


class FactorGraph:
    """The variables and tables of one device kind; see the module for their meaning.

    Attributes:
        columns: P.
        variable_of: variable of every operator, [N].
        column_of: precision column of every operator under each option of its variable,
            [N, P]; -1 where the option is not allowed.
        allowed: options of every variable, [V, P].
        tables: cost tables over two or more variables.
        perturbation, forward_s, backward_s, transient: of every operator under each option
            of its variable, [N, P]; 0 where not allowed.
        lone: tables over one variable that come from casts and saved tensors.
        exact: whether the tables give true costs, not only lower bounds.
    """

    def __init__(self, problem: AllocationProblem, device: DeviceKind, domain: BoolArray) -> None:
        self.problem, self.device = problem, device
        self.columns = len(problem.precisions)
        self._make_variables(domain)
        self._make_tables()

    def restricted(self, keep: BoolArray) -> FactorGraph:
        """The same variables with only some options left, [V, P]."""
        graph = object.__new__(FactorGraph)
        graph.problem, graph.device, graph.columns = self.problem, self.device, self.columns
        graph.variable_of, graph._raw_column_of = self.variable_of, self._raw_column_of
        graph._promotions = self._promotions
        graph._take(self.allowed & keep)
        graph._make_tables()
        return graph

    @cached_property
    def elimination(self) -> Elimination:
        """The order in which the tables are minimised, planned once."""
        scopes = [tuple(scope) for table in self.tables for scope in table.scope.tolist()]
        everything = np.ones(len(self.allowed), dtype=np.bool_)
        return Elimination(len(self.allowed), self.columns, everything, scopes)

    def _make_tables(self) -> None:
        self.exact = True
        device = self.device
        rows = np.arange(len(self.variable_of))[:, None]
        pick = np.maximum(self.column_of, 0)
        live = self.column_of >= 0

        def at(table: np.ndarray) -> FloatArray:
            return np.where(live, table[rows, pick], 0).astype(np.float64)

        self.perturbation = at(device.perturbation)
        self.forward_s, self.backward_s = at(device.forward_s), at(device.backward_s)
        self.transient = at(transient_bytes(device))
        self._tables: list[Tables] = []
        self._add_casts()
        self._add_copies()
        self._add_promotions()
        self.lone = tuple(table for table in self._tables if table.arity == 1)
        self.tables = tuple(table for table in self._tables if table.arity > 1)

    # -- variables -------------------------------------------------------------------------

    def _make_variables(self, domain: BoolArray) -> None:
        problem, size = self.problem, self.columns
        count = len(problem.operators)
        column_of_dtype = {dtype: index for index, dtype in enumerate(problem.precisions)}
        promoted = column_of_dtype.get(PROMOTED, -1)
        handed = np.array([column_of_dtype.get(dtype, -1) for dtype in problem.output])
        leader = np.arange(count)
        in_group = np.zeros(count, dtype=np.bool_)
        for group in problem.groups:
            rows = [problem.operator_index[name] for name in group]
            leader[rows] = min(rows)
            in_group[rows] = len(rows) > 1
        variable_of = np.full(count, -1, dtype=np.int64)
        column_of = np.empty((count, size), dtype=np.int64)
        identity = np.arange(size)
        allowed: list[BoolArray] = []
        self._promotions: list[int] = []
        for o, operator in enumerate(problem.operators):
            sources = operator.follows
            owners = {int(variable_of[u]) for u in sources}
            if sources and len(owners) == 1 and not in_group[o]:
                variable = owners.pop()
                codes = handed[column_of[list(sources)]]
                codes[column_of[list(sources)] < 0] = -1
                column = np.where((codes == codes[0]).all(axis=0), codes[0], promoted)
                column = np.where((codes < 0).any(axis=0), -1, column)
            else:
                if leader[o] == o:
                    allowed.append(np.ones(size, dtype=np.bool_))
                    variable = len(allowed) - 1
                else:
                    variable = int(variable_of[leader[o]])
                column = identity
                if sources:
                    self._promotions.append(o)
            fits = (column >= 0) & domain[o, np.maximum(column, 0)]
            allowed[variable] = allowed[variable] & fits
            variable_of[o], column_of[o] = variable, column
        self.variable_of, self.allowed = variable_of, np.array(allowed)
        self._narrow(column_of, handed, promoted)
        self._raw_column_of = column_of
        self._take(self.allowed)

    def _take(self, allowed: BoolArray) -> None:
        """Set the options left and what follows from them."""
        self.allowed = allowed
        self.column_of = np.where(allowed[self.variable_of], self._raw_column_of, -1)
        self._options = allowed.sum(axis=1)
        #: The only option of a variable without a choice.
        self.only = allowed.argmax(axis=1)

    def _narrow(self, column_of: IntArray, handed: IntArray, promoted: int) -> None:
        """Drop options of a promoted follower that its inputs can never hand on together."""
        for o in self._promotions:
            reach = []
            for u in self.problem.operators[o].follows:
                options = self.allowed[self.variable_of[u]]
                reach.append(set(handed[column_of[u, options]].tolist()))
            possible = set.intersection(*reach)
            if len(reach) > 1 and len(set.union(*reach)) > 1:
                possible.add(promoted)
            mask = np.zeros(self.columns, dtype=np.bool_)
            mask[[p for p in possible if p >= 0]] = True
            self.allowed[self.variable_of[o]] &= mask

    @property
    def feasible(self) -> bool:
        """Whether every variable has an option left (the tables may still rule plans out)."""
        return bool((self._options > 0).all())

    # -- tables ----------------------------------------------------------------------------

    def _scopes(self, members: list[IntArray]) -> list[tuple[IntArray, IntArray]]:
        """Rows by scope size: (row indices, scopes [n, arity]) over variables with a choice.

        `members` are operator indices by position, [rows] each, -1 for none. A row without
        any choice gets the variable of its first member, so that its cost is not lost.
        """
        first = self.variable_of[members[0]]
        variables = np.stack(members, axis=1)
        variables = np.where(variables >= 0, self.variable_of[np.maximum(variables, 0)], -1)
        variables = np.where(
            (variables >= 0) & (self._options[np.maximum(variables, 0)] > 1), variables, -1
        )
        variables = np.sort(variables, axis=1)
        fresh = np.ones(variables.shape, dtype=np.bool_)
        fresh[:, 1:] = variables[:, 1:] != variables[:, :-1]
        variables = np.where(fresh, variables, -1)
        variables[:, 0] = np.where((variables < 0).all(axis=1), first, variables[:, 0])
        arity = (variables >= 0).sum(axis=1)
        variables = np.sort(variables, axis=1)
        width = variables.shape[1]
        result = []
        for size in np.unique(arity).tolist():
            rows = np.flatnonzero(arity == size)
            result.append((rows, variables[rows, width - size :]))
        return result

    def _column_in(self, operator: IntArray, scope: IntArray) -> IntArray:
        """Precision column of one operator per row under every assignment, [n, P ** arity]."""
        size, (count, arity) = self.columns, scope.shape
        digits = np.indices((size,) * arity).reshape(arity, -1) if arity else np.zeros((0, 1), int)
        variable = self.variable_of[operator]
        option = np.broadcast_to(self.only[variable][:, None], (count, digits.shape[1])).copy()
        for position in range(arity):
            mine = scope[:, position] == variable
            option[mine] = digits[position]
        column: IntArray = np.maximum(self._raw_column_of[operator[:, None], option], 0)
        return column

    def _by_length(self, start: IntArray, flat: IntArray) -> list[IntArray]:
        """A ragged list as columns padded with -1, [rows] each."""
        lengths = np.diff(start)
        result = []
        for position in range(int(lengths.max(initial=0))):
            has = lengths > position
            column = np.full(len(lengths), -1, dtype=np.int64)
            column[has] = flat[start[:-1][has] + position]
            result.append(column)
        return result

    def _add_casts(self) -> None:
        tensors = self.device.tensors
        priced = (tensors.forward_s + tensors.backward_s).any(axis=(1, 2))
        if not priced.any():
            return
        rows = np.flatnonzero(priced)
        consumers = [c[rows] for c in self._by_length(tensors.consumer_start, tensors.consumers)]
        consumers = [c for c in consumers if (c >= 0).any()]
        producer = tensors.producer[rows]
        for picked, scope in self._scopes([producer, *consumers]):
            if self.columns ** scope.shape[1] > LARGEST_TABLE:
                self._split_casts(rows[picked])
                continue
            mine = rows[picked]
            self._cast_tables(mine, producer[picked], [c[picked] for c in consumers], scope)

    def _cast_tables(
        self,
        tensor: IntArray,
        producer: IntArray,
        consumers: list[IntArray],
        scope: IntArray,
        share: FloatArray | None = None,
    ) -> None:
        """Tables of the casts of some tensors, each times `share` [n]."""
        tensors, size = self.device.tensors, self.columns
        source = self._column_in(producer, scope)
        forward, backward = np.zeros(source.shape), np.zeros(source.shape)
        paid = np.zeros((size, *source.shape), dtype=np.bool_)
        for consumer in consumers:
            has = np.flatnonzero(consumer >= 0)
            target = self._column_in(consumer[has], scope[has])
            for q in range(size):
                paid[q][has] |= target == q
        for q in range(size):
            forward += paid[q] * tensors.forward_s[tensor[:, None], source, q]
            backward += paid[q] * tensors.backward_s[tensor[:, None], source, q]
        if share is not None:
            forward, backward = forward * share[:, None], backward * share[:, None]
        self._tables.append(
            Tables(
                scope=scope,
                operator=producer,
                forward_s=forward,
                backward_s=backward,
                tensor=tensor if share is None else None,
            )
        )

    def _split_casts(self, rows: IntArray) -> None:
        """Many consumers: each bears an equal share of every cast it asks for (a lower bound)."""
        self.exact = False
        tensors = self.device.tensors
        counts = np.diff(tensors.consumer_start)[rows]
        tensor = np.repeat(rows, counts)
        consumer = np.concatenate([tensors.consumers_of(row) for row in rows.tolist()])
        share = np.repeat(1.0 / counts, counts)
        producer = tensors.producer[tensor]
        for picked, scope in self._scopes([producer, consumer]):
            self._cast_tables(
                tensor[picked], producer[picked], [consumer[picked]], scope, share[picked]
            )

    def _add_copies(self) -> None:
        saved = self.device.saved
        if not len(saved):
            return
        first = first_savers(self.device)
        savers = self._by_length(saved.saver_start, saved.savers)
        every = np.arange(len(saved))
        for picked, scope in self._scopes(savers):
            if self.columns ** scope.shape[1] > LARGEST_TABLE:
                self._split_copies(picked, first)
                continue
            self._copy_tables(every[picked], first, [s[picked] for s in savers], scope)

    def _copy_tables(
        self,
        tensor: IntArray,
        first: IntArray,
        savers: list[IntArray],
        scope: IntArray,
        share: FloatArray | None = None,
    ) -> None:
        saved, problem = self.device.saved, self.problem
        stored = np.array(
            [
                saved.dtypes.index(s) if s in saved.dtypes else len(saved.dtypes)
                for s in problem.storage
            ]
        )
        shape = (len(tensor), self.columns ** scope.shape[1])
        kept = np.zeros((len(saved.dtypes) + 1, *shape), dtype=np.bool_)
        for saver in savers:
            has = np.flatnonzero(saver >= 0)
            dtype = stored[self._column_in(saver[has], scope[has])]
            for d in range(len(saved.dtypes)):
                kept[d][has] |= dtype == d
        size = np.zeros(shape)
        for d in range(len(saved.dtypes)):
            size += kept[d] * np.maximum(saved.size_bytes[tensor, d], 0)[:, None]
        if share is not None:
            size = size * share[:, None]
        self._tables.append(Tables(scope=scope, operator=first[tensor], kept_bytes=size))

    def _split_copies(self, rows: IntArray, first: IntArray) -> None:
        """Many savers: each bears an equal share of its copy (a lower bound)."""
        self.exact = False
        saved = self.device.saved
        counts = np.diff(saved.saver_start)[rows]
        tensor = np.repeat(rows, counts)
        saver = np.concatenate([saved.savers_of(row) for row in rows.tolist()])
        share = np.repeat(1.0 / counts, counts)
        for picked, scope in self._scopes([saver]):
            self._copy_tables(tensor[picked], first, [saver[picked]], scope, share[picked])

    def _add_promotions(self) -> None:
        problem, size = self.problem, self.columns
        column_of_dtype = {dtype: index for index, dtype in enumerate(problem.precisions)}
        handed = np.array([column_of_dtype.get(dtype, -1) for dtype in problem.output])
        promoted = column_of_dtype.get(PROMOTED, -1)
        by_fan_in: dict[int, list[int]] = {}
        for o in self._promotions:
            by_fan_in.setdefault(len(problem.operators[o].follows), []).append(o)
        for fan_in, operators in by_fan_in.items():
            followers = np.array(operators)
            sources = np.array([problem.operators[o].follows for o in operators]).T
            for picked, scope in self._scopes([followers, *sources]):
                if size ** scope.shape[1] > LARGEST_TABLE:
                    self.exact = False  # leaving the rule out can only lower the minimum
                    continue
                codes = np.stack(
                    [handed[self._column_in(sources[j][picked], scope)] for j in range(fan_in)]
                )
                result = np.where((codes == codes[0]).all(axis=0), codes[0], promoted)
                blocked = result != self._column_in(followers[picked], scope)
                self._tables.append(
                    Tables(scope=scope, operator=followers[picked], blocked=blocked)
                )

    # -- paths through the host ------------------------------------------------------------

    def cut_operators_s(self, cut: TimeCut) -> FloatArray:
        """What each operator adds to a path under each option of its variable, [N, P]."""
        rows = np.arange(len(self.variable_of))[:, None]
        at = cut.operator_s[rows, np.maximum(self.column_of, 0)]
        result: FloatArray = np.where(self.column_of >= 0, at, 0.0)
        return result

    def cut_casts_s(self, cut: TimeCut, table: Tables) -> FloatArray:
        """What the casts of a table add to a path, [n, P ** arity]; nothing where they are split.

        A forward cast is on it where no consumer before the path's change asks for it.
        """
        total = np.zeros((len(table.scope), self.columns**table.arity))
        if table.tensor is None:
            return total
        tensors, tensor = self.device.tensors, table.tensor
        producer = tensors.producer[tensor]
        source = self._column_in(producer, table.scope)
        asked = np.zeros((self.columns, *total.shape), dtype=np.bool_)
        before = asked.copy()
        for consumers in self._by_length(tensors.consumer_start, tensors.consumers):
            consumer = consumers[tensor]
            has = np.flatnonzero(consumer >= 0)
            target = self._column_in(consumer[has], table.scope[has])
            early = (consumer[has] < cut.forward_casts_from)[:, None]
            for q in range(self.columns):
                asked[q][has] |= target == q
                before[q][has] |= (target == q) & early
        low, high = cut.backward_casts
        within = ((producer >= low) & (producer < high))[:, None]
        for q in range(self.columns):
            pair = (tensor[:, None], source, q)
            total += (asked[q] & ~before[q]) * tensors.forward_s[pair]
            total += (asked[q] & within) * tensors.backward_s[pair]
        return total

    # -- reading ---------------------------------------------------------------------------

    def operator_columns(self, options: IntArray) -> IntArray:
        """The precision column of every operator under an option per variable, [N]."""
        picked: IntArray = self._raw_column_of[
            np.arange(len(self.variable_of)), options[self.variable_of]
        ]
        return picked

    def operator_options(self, options: BoolArray) -> BoolArray:
        """Sets of options of the variables, [V, P], as precision columns of operators, [N, P]."""
        columns = np.zeros((len(self.variable_of), self.columns), dtype=np.bool_)
        for option in range(self.columns):
            live = np.flatnonzero(options[self.variable_of, option])
            columns[live, self.column_of[live, option]] = True
        return columns

    def options_of(self, column: IntArray) -> IntArray:
        """The option of every variable in a plan that keeps the rules, [V]."""
        first = np.full(len(self.allowed), -1, dtype=np.int64)
        operators = np.arange(len(self.variable_of))[::-1]
        first[self.variable_of[operators]] = operators  # the one that its followers follow
        options: IntArray = (self._raw_column_of[first] == column[first][:, None]).argmax(axis=1)
        return options
