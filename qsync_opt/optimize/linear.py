"""`LinearProgram`: a mixed-integer linear program as arrays, the same for every solver and file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from qsync_opt.optimize.arrays import BoolArray, FloatArray, IntArray, freeze


@dataclass(frozen=True, kw_only=True, eq=False)
class LinearProgram:
    """minimise objective . x  subject to  row_lower <= A x <= row_upper, lower <= x <= upper.

    C columns, R rows. There is no objective constant. A is stored by rows.

    Attributes:
        name: a short name.
        objective: [C].
        lower, upper: column bounds, [C]; upper may be infinite.
        integer: which columns must be whole numbers, [C].
        column_names: unique, [C].
        row_lower, row_upper: [R]; -inf or +inf where a side is free, equal for equations.
        row_names: unique, [R].
        row_start: row i has the entries `row_start[i]:row_start[i + 1]`, [R + 1].
        columns: column index of each entry.
        values: value of each entry.
    """

    name: str
    objective: FloatArray
    lower: FloatArray
    upper: FloatArray
    integer: BoolArray
    column_names: tuple[str, ...]
    row_lower: FloatArray
    row_upper: FloatArray
    row_names: tuple[str, ...]
    row_start: IntArray
    columns: IntArray
    values: FloatArray

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns)."""
        return len(self.row_lower), len(self.objective)

    def activity(self, x: FloatArray) -> FloatArray:
        """A x, [R]."""
        owner = np.repeat(np.arange(len(self.row_lower)), np.diff(self.row_start))
        terms = self.values * x[self.columns]
        # Without entries numpy counts instead of summing.
        return np.bincount(owner, terms, len(self.row_lower)).astype(np.float64, copy=False)


@dataclass(frozen=True, kw_only=True, eq=False)
class ProgramSolution:
    """What a solver said about a program.

    Attributes:
        status: `optimal` (within the gap asked for), `feasible` (stopped early with a
            solution), `infeasible`, or `unknown` (stopped early without one).
        values: one per column; None without a solution.
        objective: as the solver reports it; None without a solution.
        bound: proven lower bound; -inf if none.
        message: the solver's own words.
    """

    status: str
    values: FloatArray | None
    objective: float | None
    bound: float
    message: str


@dataclass(frozen=True, slots=True)
class LazyNames:
    """Names that are only made when the program is to carry them.

    Attributes:
        count: how many.
        make: makes them, in order.
    """

    count: int
    make: Callable[[], Iterable[str]]

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[str]:
        return iter(self.make())


Names = Sequence[str] | LazyNames


class ProgramBuilder:
    """Collects columns and rows in blocks and returns a `LinearProgram`.

    Args:
        name: of the program.
        named: whether to make the names of columns and rows; without, they are numbered,
            which is much faster for programs that are solved at once.
    """

    def __init__(self, name: str, *, named: bool = True) -> None:
        self._name = name
        self._named = named
        self._count = 0
        self._rows = 0
        self._columns: list[tuple[FloatArray, FloatArray, FloatArray, BoolArray]] = []
        self._column_names: list[Names] = []
        self._row_bounds: list[tuple[FloatArray, FloatArray]] = []
        self._row_names: list[Names] = []
        self._entries: list[tuple[IntArray, IntArray, FloatArray]] = []

    def add_columns(
        self,
        names: Names,
        *,
        objective: FloatArray | float = 0.0,
        lower: FloatArray | float = 0.0,
        upper: FloatArray | float = 1.0,
        integer: bool = False,
    ) -> IntArray:
        """Add columns; returns their indices, [len(names)]."""
        count = len(names)

        def full(value: FloatArray | float) -> FloatArray:
            return np.broadcast_to(np.asarray(value, dtype=np.float64), (count,))

        self._columns.append(
            (full(objective), full(lower), full(upper), np.full(count, integer, dtype=np.bool_))
        )
        self._column_names.append(names)
        self._count += count
        return np.arange(self._count - count, self._count)

    def add_rows(
        self,
        names: Names,
        *,
        lower: FloatArray | float,
        upper: FloatArray | float,
    ) -> IntArray:
        """Add rows without entries; returns their indices, [len(names)]."""
        count = len(names)
        self._row_bounds.append(
            (
                np.broadcast_to(np.asarray(lower, dtype=np.float64), (count,)),
                np.broadcast_to(np.asarray(upper, dtype=np.float64), (count,)),
            )
        )
        self._row_names.append(names)
        self._rows += count
        return np.arange(self._rows - count, self._rows)

    def _all_names(self, names: list[Names], letter: str, count: int) -> tuple[str, ...]:
        if not self._named:
            return tuple(f"{letter}{index}" for index in range(count))
        return tuple(chain.from_iterable(names))

    def add_entries(self, rows: IntArray, columns: IntArray, values: FloatArray | float) -> None:
        """Add matrix entries; entries of the same row and column are summed."""
        rows, columns = np.broadcast_arrays(rows, columns)
        values = np.broadcast_to(np.asarray(values, dtype=np.float64), rows.shape)
        self._entries.append((rows.ravel(), columns.ravel(), values.ravel()))

    def build(self) -> LinearProgram:
        """The program, with entries sorted by row and column, sums taken, zeros dropped."""

        def joined(parts: list[np.ndarray], dtype: type) -> np.ndarray:
            return np.concatenate(parts) if parts else np.zeros(0, dtype=dtype)

        rows = joined([entry[0] for entry in self._entries], np.int64)
        columns = joined([entry[1] for entry in self._entries], np.int64)
        values = joined([entry[2] for entry in self._entries], np.float64)
        key = rows * max(self._count, 1) + columns
        unique, inverse = np.unique(key, return_inverse=True)
        summed = np.bincount(inverse, weights=values, minlength=len(unique)).astype(np.float64)
        keep = summed != 0
        unique, summed = unique[keep], summed[keep]
        row = unique // max(self._count, 1)
        start = np.searchsorted(row, np.arange(self._rows + 1))
        return LinearProgram(
            name=self._name,
            objective=freeze(joined([c[0] for c in self._columns], np.float64)),
            lower=freeze(joined([c[1] for c in self._columns], np.float64)),
            upper=freeze(joined([c[2] for c in self._columns], np.float64)),
            integer=freeze(joined([c[3] for c in self._columns], np.bool_)),
            column_names=self._all_names(self._column_names, "c", self._count),
            row_lower=freeze(joined([b[0] for b in self._row_bounds], np.float64)),
            row_upper=freeze(joined([b[1] for b in self._row_bounds], np.float64)),
            row_names=self._all_names(self._row_names, "r", self._rows),
            row_start=freeze(start),
            columns=freeze(unique % max(self._count, 1)),
            values=freeze(summed),
        )


def without_plan(program: LinearProgram, chosen: IntArray) -> LinearProgram:
    """The program with one more row that cuts off the binaries `chosen` being 1 together."""
    return replace(
        program,
        row_lower=np.append(program.row_lower, -np.inf),
        row_upper=np.append(program.row_upper, float(len(chosen) - 1)),
        row_names=(*program.row_names, f"cut {len(program.row_names)}"),
        row_start=np.append(program.row_start, program.row_start[-1] + len(chosen)),
        columns=np.concatenate([program.columns, chosen]),
        values=np.concatenate([program.values, np.ones(len(chosen))]),
    )
