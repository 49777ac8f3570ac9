"""Solution files of HiGHS, SCIP and CBC for the MPS files that `mps` writes.

The style is found by content:

- HiGHS raw (`Model status` first; with `# Columns n`, or `# Columns -n sparse`),
- HiGHS pretty (a table headed `Index Status ... Primal ... Name`),
- SCIP (`solution status:`, `objective value:`, then the variables that are not 0),
- CBC (`Optimal - objective value ...`, then index, name, value, reduced cost).

A file that holds no feasible solution is refused, whatever values it lists.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

import numpy as np

from qsync_opt.errors import FormatError
from qsync_opt.optimize.arrays import FloatArray, freeze
from qsync_opt.optimize.mps_names import generic_index, read_text

_NO_SOLUTION = "must hold a feasible solution"
_NO_SOLUTION_REMEDY = "Solve again with a longer time limit, or see qsync_opt.explain(problem)"
_CBC_STATUS = re.compile(r"(?P<status>\S.*?) - objective value\s+(?P<objective>\S+)\s*\Z")
_SPARSE = re.compile(r"# Columns -(?P<count>\d+) sparse\s*\Z")


@dataclass(frozen=True, kw_only=True, eq=False)
class MpsSolution:
    """What a solution file says.

    Attributes:
        style: `highs`, `highs pretty`, `scip` or `cbc`.
        status: the solver's words; empty where the file has none (SCIP without its status).
        objective: the objective as printed; None where it is not.
        values: of every column, 0 where a sparse style lists none, [C].
    """

    style: str
    status: str
    objective: float | None
    values: FloatArray


def read_solution(
    path: str | os.PathLike[str], *, columns: int, rows: int | None = None
) -> MpsSolution:
    """Read a solution file of HiGHS, SCIP or CBC.

    Args:
        path: the solution file; unpacked where its name ends in `.gz`.
        columns: how many columns the MPS file has.
        rows: how many rows its program has; None skips the check of row names.

    Raises:
        FormatError: unknown style, no feasible solution, unknown or repeated names, or a
            truncated file.
    """
    text = read_text(path, "solution")
    return _Parser(str(path), text.splitlines(), columns, rows).solution()


class _Parser:
    def __init__(self, where: str, lines: list[str], columns: int, rows: int | None) -> None:
        self._where = where
        self._lines = lines
        self._rows = rows
        self._values = np.full(columns, np.nan)

    def solution(self) -> MpsSolution:
        start = next((i for i, line in enumerate(self._lines) if line.strip()), None)
        if start is None:
            raise FormatError(self._where, _NO_SOLUTION, "an empty file", _NO_SOLUTION_REMEDY)
        first = self._lines[start].strip()
        if first == "Model status":
            return self._highs_raw(start)
        if first == "Columns" and "Primal" in "".join(self._lines[start + 1 : start + 2]):
            return self._highs_pretty(start)
        if first.startswith(("solution status:", "objective value:", "no solution available")):
            return self._scip(start)
        if _CBC_STATUS.match(first):
            return self._cbc(start)
        raise FormatError(
            f"{self._where}, line {start + 1}",
            "must begin like a solution file of HiGHS, SCIP or CBC",
            first,
            "HiGHS: --solution_file (style 0, 1 or 4); SCIP: write solution; CBC: solution",
        )

    def _no_solution(self, status: str) -> FormatError:
        return FormatError(f"{self._where}: status", _NO_SOLUTION, status, _NO_SOLUTION_REMEDY)

    def _bad(self, line: int, rule: str) -> FormatError:
        text = self._lines[line] if line < len(self._lines) else "end of file"
        return FormatError(f"{self._where}, line {line + 1}", rule, text)

    def _number(self, text: str, line: int) -> float:
        try:
            value = float(text)
        except ValueError:
            value = np.nan
        if not np.isfinite(value):
            raise self._bad(line, "must hold a finite number where the value stands")
        return value

    def _put(self, name: str, text: str, line: int) -> None:
        index = generic_index(name, "C", len(self._values))
        if index is None:
            raise self._bad(line, "must name a column of the MPS file")
        if not np.isnan(self._values[index]):
            raise self._bad(line, "must not list a column twice")
        self._values[index] = self._number(text, line)

    def _is_row(self, name: str) -> bool:
        return generic_index(name, "RS", 10**7 if self._rows is None else self._rows) is not None

    def _filled(self, style: str, status: str, objective: float | None, dense: bool) -> MpsSolution:
        missing = np.flatnonzero(np.isnan(self._values))
        if dense and missing.size:
            rule = f"must list all {len(self._values)} columns"
            found = len(self._values) - int(missing.size)
            raise FormatError(self._where, rule, found, "The file is cut short: write it again")
        values = np.where(np.isnan(self._values), 0.0, self._values)
        return MpsSolution(style=style, status=status, objective=objective, values=freeze(values))

    def _highs_raw(self, start: int) -> MpsSolution:
        lines = self._lines
        status = lines[start + 1].strip() if start + 1 < len(lines) else ""
        at = next((i for i, line in enumerate(lines) if line == "# Primal solution values"), None)
        if at is None or at + 1 >= len(lines):
            raise self._bad(len(lines), "must be followed by '# Primal solution values'")
        if lines[at + 1].strip() != "Feasible":
            raise self._no_solution(f"{status}, primal solution {lines[at + 1].strip()}")
        objective, at = None, at + 2
        while at < len(lines) and not lines[at].startswith("# Columns"):
            words = lines[at].split()
            if len(words) == 2 and words[0] == "Objective":
                objective = self._number(words[1], at)
            at += 1
        if at >= len(lines):
            raise self._bad(at, "must be '# Columns' and their number")
        sparse = _SPARSE.match(lines[at])
        words = lines[at].split()
        if not sparse and words[2:] != [str(len(self._values))]:
            raise self._bad(at, f"must announce {len(self._values)} columns, as the MPS file has")
        # Raw lines are (name, value); sparse ones (name, value, index).
        count = int(sparse["count"]) if sparse else len(self._values)
        for line in range(at + 1, at + 1 + count):
            words = lines[line].split() if line < len(lines) else []
            if len(words) != (3 if sparse else 2):
                raise self._bad(line, f"must be one of {count} columns with its value")
            self._put(words[0], words[1], line)
        return self._filled("highs", status, objective, dense=not sparse)

    def _highs_pretty(self, start: int) -> MpsSolution:
        lines = self._lines
        status = next((line[13:].strip() for line in lines if line.startswith("Model status:")), "")
        if not status:
            raise self._bad(len(lines), "must have a line 'Model status:'")
        header = lines[start + 1]
        # Numbers end below the end of their heading; empty cells leave no word to count.
        if not {"Upper", "Primal"} <= set(header.split()) or not header.rstrip().endswith("Name"):
            raise self._bad(start + 1, "must head a table with Upper, Primal and Name")
        left, right = (header.index(word) + len(word) for word in ("Upper", "Primal"))
        at = start + 2
        while at < len(lines) and lines[at].strip() != "Rows":
            words = lines[at].split()
            value = lines[at][left:right].strip()
            if not words:
                raise self._bad(at, "must be a column, or 'Rows'")
            if not value:
                raise self._no_solution(f"{status}, no primal values")
            self._put(words[-1], value, at)
            at += 1
        if status.startswith(("Infeasible", "Unbounded", "Primal infeasible")):
            raise self._no_solution(status)
        objective = None
        for line in range(at, len(lines)):
            if lines[line].startswith("Objective value:"):
                objective = self._number(lines[line].split(":")[1].strip(), line)
        return self._filled("highs pretty", status, objective, dense=True)

    def _scip(self, start: int) -> MpsSolution:
        status, objective = "", None
        for line in range(start, len(self._lines)):
            text = self._lines[line].strip()
            if text.startswith("solution status:"):
                status = text.split(":", 1)[1].strip()
            elif text.startswith("no solution available"):
                raise self._no_solution(status or text)
            elif text.startswith("objective value:"):
                objective = self._number(text.split(":", 1)[1].strip(), line)
            elif text:
                words = text.split()
                if objective is None or len(words) not in (2, 3):
                    raise self._bad(line, "must be a column and its value")
                self._put(words[0], words[1], line)
        if status.startswith(("infeasible", "unbounded")) or objective is None:
            raise self._no_solution(status or "no objective value")
        return self._filled("scip", status, objective, dense=False)

    def _cbc(self, start: int) -> MpsSolution:
        found = _CBC_STATUS.match(self._lines[start].strip())
        status = found["status"] if found else ""
        stopped = status.startswith("Stopped on") and "no integer solution" not in status
        if not (status.startswith("Optimal") or stopped):
            raise self._no_solution(status)
        for line in range(start + 1, len(self._lines)):
            words = self._lines[line].split()
            if words[:1] == ["**"]:  # beyond CBC's absolute tolerance: left to `evaluate`
                words = words[1:]
            if len(words) != 4 or not words[0].isdecimal():
                raise self._bad(line, "must be an index, a name, a value and a dual value")
            if not self._is_row(words[1]):
                self._put(words[1], words[2], line)
        objective = self._number(found["objective"] if found else "", start)
        return self._filled("cbc", status, objective, dense=False)
