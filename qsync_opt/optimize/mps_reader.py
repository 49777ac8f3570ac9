"""Reading back the MPS files that `mps` writes: strictly, and equal in every array."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from typing import NoReturn

import numpy as np

from qsync_opt.errors import FormatError
from qsync_opt.optimize.arrays import FloatArray, freeze
from qsync_opt.optimize.linear import LinearProgram
from qsync_opt.optimize.mps import NAME_LINE, OBJECTIVE, marker_line
from qsync_opt.optimize.mps_names import (
    MpsNames,
    generic_index,
    generic_name,
    names_of,
    read_text,
)

_NUMBER = re.compile(r"-?\d+(\.\d+)?(e[+-]?\d+)?\Z", re.ASCII)
_BOUNDS_WITH_VALUE = ("LO", "UP", "FX")
_BOUNDS_WITHOUT = ("BV", "FR", "MI", "PL")


def read_linear_program(
    path: str | os.PathLike[str], *, names_path: str | os.PathLike[str] | None = None
) -> LinearProgram:
    """Read a file that `write_linear_program` wrote; the program is equal in every array.

    Args:
        path: the MPS file, `.mps` or `.mps.gz`.
        names_path: its name map; `name.names.json` beside the file by default. Without one
            the comment lines serve.

    Raises:
        FormatError: anything that `write_linear_program` does not write, with the line.
    """
    text = read_text(path, "MPS")
    names = names_of(path, text, names_path)
    return _Reader(text, str(path), names).program()


class _Reader:
    """One pass over the lines; each section must follow the one before."""

    def __init__(self, text: str, where: str, names: MpsNames) -> None:
        self._where = where
        self._names = names
        self._lines = text.split("\n")
        self._at = 0
        while self._at < len(self._lines) and self._lines[self._at].startswith("*"):
            self._at += 1
        count = len(names.columns)
        self._objective = np.zeros(count)
        self._integer = np.zeros(count, dtype=np.bool_)
        self._lower, self._upper = np.full(count, np.nan), np.full(count, np.nan)
        self._senses: dict[str, str] = {}
        self._entries: dict[str, tuple[list[int], list[float]]] = {}
        self._sides: dict[str, float] = {}

    def program(self) -> LinearProgram:
        self._expect(NAME_LINE)
        self._expect("ROWS")
        self._expect(f" N  {OBJECTIVE:<8}")
        self._rows()
        self._columns()
        self._right_sides()
        self._bounds()
        if self._lines[self._at :] != [""]:
            self._refuse("must end after ENDATA")
        return self._built()

    def _refuse(self, rule: str) -> NoReturn:
        line = self._lines[self._at] if self._at < len(self._lines) else "end of file"
        raise FormatError(f"{self._where}, line {self._at + 1}", rule, line)

    def _expect(self, line: str) -> None:
        if self._at >= len(self._lines) or self._lines[self._at] != line:
            self._refuse(f"must be {line.strip()!r}")
        self._at += 1

    def _section(self, end: str) -> Iterator[list[str]]:
        """The words of each line up to the line `end`, which is taken too."""
        while self._at < len(self._lines) and self._lines[self._at] != end:
            line = self._lines[self._at]
            if not line.startswith(" ") or not line.isascii():
                self._refuse(f"must be a data line, or {end}")
            yield line.split()
            self._at += 1
        self._expect(end)

    def _number(self, text: str) -> float:
        if not _NUMBER.match(text) or math.isinf(float(text)):
            self._refuse("must end in a finite number")
        return float(text)

    def _column(self, name: str) -> int:
        index = generic_index(name, "C", len(self._names.columns))
        if index is None:
            self._refuse("must name a column of the name map")
        return index

    def _rows(self) -> None:
        count = 0
        for words in self._section("COLUMNS"):
            if len(words) != 2 or words[0] not in ("E", "G", "L"):
                self._refuse("must be a sense (E, G, L) and a row name")
            sense, name = words
            upper_side = count > 0 and name == generic_name("S", count - 1)
            if upper_side:
                lower_side = self._senses.get(generic_name("R", count - 1))
                if (lower_side, sense) != ("G", "L") or name in self._senses:
                    self._refuse("must be an L row after the G row of the same number")
            elif name != generic_name("R", count):
                self._refuse(f"must name row {generic_name('R', count)}")
            else:
                count += 1
            self._senses[name] = sense
            self._entries[name] = ([], [])
        if count != len(self._names.rows):
            self._refuse(f"must come after {len(self._names.rows)} rows, as in the name map")

    def _columns(self) -> None:
        inside, markers, last, used = False, 0, -1, set[str]()
        for words in self._section("RHS"):
            if len(words) == 3 and words[1] == "'MARKER'":
                inside, markers = not inside, markers + 1
                if self._lines[self._at] != marker_line(markers, inside):
                    self._refuse(f"must be {marker_line(markers, inside).strip()!r}")
                continue
            if len(words) != 3:
                self._refuse("must be a column, a row and a number")
            column, value = self._column(words[0]), self._number(words[2])
            if column != last:
                if column != last + 1:
                    self._refuse(f"must be of column {generic_name('C', last + 1)}")
                last, used = column, set()
                self._integer[column] = inside
            elif self._integer[column] != inside:
                self._refuse("must stand on the same side of the marker as its column")
            if words[1] in used:
                self._refuse("must not repeat an entry")
            used.add(words[1])
            if words[1] == OBJECTIVE:
                self._objective[column] = value
            elif words[1] in self._entries:
                indices, values = self._entries[words[1]]
                indices.append(column)
                values.append(value)
            else:
                self._refuse("must name a row of the ROWS section")
        if inside:
            self._refuse("must come after the last 'INTEND'")
        if last + 1 != len(self._names.columns):
            self._refuse(f"must come after {len(self._names.columns)} columns")

    def _right_sides(self) -> None:
        for words in self._section("BOUNDS"):
            if len(words) != 3 or words[0] != "RHS" or words[1] not in self._senses:
                self._refuse("must be RHS, a row and a number")
            if words[1] in self._sides:
                self._refuse("must not repeat a right side")
            self._sides[words[1]] = self._number(words[2])

    def _bounds(self) -> None:
        for words in self._section("ENDATA"):
            valued = words[0] in _BOUNDS_WITH_VALUE
            known = valued or words[0] in _BOUNDS_WITHOUT
            if not known or len(words) != 3 + valued or words[1] != "BND":
                self._refuse("must be a bound (BV FX FR MI LO PL UP), BND, a column, a number")
            kind, column = words[0], self._column(words[2])
            value = self._number(words[3]) if valued else math.inf
            if kind == "BV" and not self._integer[column]:
                self._refuse("must be of an integer column")
            if kind in ("BV", "FX", "FR", "LO", "MI"):
                fixed = {"BV": 0.0, "FR": -math.inf, "MI": -math.inf}
                self._set(self._lower, column, fixed.get(kind, value))
            if kind in ("BV", "FX", "FR", "UP", "PL"):
                self._set(self._upper, column, 1.0 if kind == "BV" else value)
        missing = np.flatnonzero(np.isnan(self._lower) | np.isnan(self._upper))
        if missing.size:
            name = generic_name("C", int(missing[0]))
            self._refuse(f"must come after both bounds of {name}")

    def _set(self, bounds: FloatArray, column: int, value: float) -> None:
        if not math.isnan(bounds[column]):
            self._refuse("must not give a bound twice")
        bounds[column] = value

    def _built(self) -> LinearProgram:
        count = len(self._names.rows)
        row_lower, row_upper = np.full(count, -np.inf), np.full(count, np.inf)
        start = np.zeros(count + 1, dtype=np.int64)
        columns: list[int] = []
        values: list[float] = []
        for row in range(count):
            name, twin = generic_name("R", row), generic_name("S", row)
            sense, side = self._senses[name], self._sides.get(name, 0.0)
            if sense in ("G", "E"):
                row_lower[row] = side
            if sense in ("L", "E"):
                row_upper[row] = side
            if twin in self._senses:
                row_upper[row] = self._sides.get(twin, 0.0)
                if self._entries[twin] != self._entries[name]:
                    rule = f"must have the same entries as {name}"
                    raise FormatError(f"{self._where}: {twin}", rule, self._entries[twin])
            columns += self._entries[name][0]
            values += self._entries[name][1]
            start[row + 1] = len(columns)
        return LinearProgram(
            name=self._names.program,
            objective=freeze(self._objective),
            lower=freeze(self._lower),
            upper=freeze(self._upper),
            integer=freeze(self._integer),
            column_names=self._names.columns,
            row_lower=freeze(row_lower),
            row_upper=freeze(row_upper),
            row_names=self._names.rows,
            row_start=freeze(start),
            columns=freeze(np.array(columns, dtype=np.int64)),
            values=freeze(np.array(values, dtype=np.float64)),
        )
