"""Linear programs as MPS files, exact to the last digit; `mps_reader` reads them back.

The text is valid as fixed and as free MPS and uses only what HiGHS, SCIP, CBC and OR-Tools
read alike: minimise; one pair a line; 17 digits; every bound written out; generic names of 8
characters; no RANGES, OBJSENSE or objective constant. A row with two finite sides becomes two:
`R0000007` (its lower side) and `S0000007` (its upper side). What the names mean is in the map
(`mps_names`) beside the file and in its comment lines.

OR-Tools' own exporters print 6 digits, which is enough to change an optimum; they are not used.
"""

from __future__ import annotations

import gzip
import io
import math
import os
from collections.abc import Iterator, Sequence

import numpy as np

from qsync_opt.errors import ParameterError
from qsync_opt.files import write_atomically
from qsync_opt.optimize.arrays import BoolArray
from qsync_opt.optimize.linear import LinearProgram
from qsync_opt.optimize.mps_names import (
    LARGEST_COUNT,
    MpsNames,
    ProgramOrigin,
    comment_lines,
    generic_name,
    names_text,
    sidecar_path,
)

#: HiGHS and SCIP read a bound or a right side of this size or more as infinite.
INFINITE = 1e20

#: The program's own name is in the name map.
NAME_LINE = "NAME          QSYNCOPT"

#: Name of the objective row.
OBJECTIVE = "COST"


def write_linear_program(
    program: LinearProgram,
    path: str | os.PathLike[str],
    *,
    comments: Sequence[str] = (),
    names_path: str | os.PathLike[str] | None = None,
    origin: ProgramOrigin | None = None,
) -> None:
    """Write a linear program as MPS, with its name map beside it.

    Args:
        program: what to write; entries sorted by row and column, as `ProgramBuilder` gives.
        path: ends in `.mps` or `.mps.gz`; the latter is packed, the same bytes every time.
        comments: lines to put at the top.
        names_path: where the map goes; `name.names.json` beside the file by default.
        origin: where the program came from, kept in the map.

    Raises:
        ParameterError: NaN, an infinite coefficient, a row without a finite side, crossed
            column bounds, finite bounds beyond 1e20 (which readers take for infinite), or
            entries that are out of order.
        FormatError: the path cannot be written.
    """
    beside = sidecar_path(path) if names_path is None else names_path
    _check(program)
    names = MpsNames(
        program=program.name,
        origin=origin or ProgramOrigin(),
        rows=program.row_names,
        columns=program.column_names,
    )
    mapped = names_text(names)
    head = [f"* {_ascii(part)}" for comment in comments for part in comment.splitlines()]
    lines = [*head, *comment_lines(mapped), *_mps_lines(program), ""]
    raw = "\n".join(lines).encode("ascii")
    write_atomically(path, _packed(raw) if str(path).endswith(".gz") else raw)
    write_atomically(beside, mapped.encode("ascii"))


def _ascii(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode()


def _packed(raw: bytes) -> bytes:
    """The gzip form, with neither time, file name nor operating system in the header."""
    buffer = io.BytesIO()
    level = 6  # 9 takes several times as long and saves little
    with gzip.GzipFile("", "wb", compresslevel=level, fileobj=buffer, mtime=0) as stream:
        stream.write(raw)
    return buffer.getvalue()


def _check(program: LinearProgram) -> None:
    """Refuse what would be read back as something else."""
    rows, columns = program.shape
    for field, count in (("rows", rows), ("columns", columns)):
        if count > LARGEST_COUNT:
            raise ParameterError(f"program.{field}", f"must be at most {LARGEST_COUNT}", count)
    for field in ("objective", "values"):
        _refuse(field, ~np.isfinite(getattr(program, field)), "must be finite", program)
    for field in ("lower", "upper", "row_lower", "row_upper"):
        side = getattr(program, field)
        sign = np.inf if field.endswith("lower") else -np.inf
        _refuse(field, np.isnan(side) | (side == sign), "must not be NaN or crossed", program)
        beyond = np.isfinite(side) & (np.abs(side) >= INFINITE)
        _refuse(field, beyond, "must be below 1e20 (readers take more as infinite)", program)
    _refuse("lower", program.lower > program.upper, "must be at most the upper bound", program)
    free = np.isinf(program.row_lower) & np.isinf(program.row_upper)
    _refuse("row_lower", free, "must be finite where row_upper is not", program)
    owner = np.repeat(np.arange(rows), np.diff(program.row_start))
    key = owner * max(columns, 1) + program.columns
    if (np.diff(key) <= 0).any():
        raise ParameterError(
            "program.columns",
            "must be sorted and without repetition in each row",
            program.columns[int(np.flatnonzero(np.diff(key) <= 0)[0])].item(),
            "Build the program with ProgramBuilder",
        )


def _refuse(field: str, bad: BoolArray, rule: str, program: LinearProgram) -> None:
    if bad.any():
        index = int(np.flatnonzero(bad)[0])
        value = getattr(program, field)[index].item()
        raise ParameterError(f"program.{field}[{index}]", rule, value)


def _mps_lines(program: LinearProgram) -> Iterator[str]:
    rows, columns = program.shape
    below, above = np.isfinite(program.row_lower), np.isfinite(program.row_upper)
    equal = below & (program.row_lower == program.row_upper)
    ranged = below & above & ~equal
    # Per row of the program: the row or rows of the file, as (sense, name, right side).
    written: list[tuple[tuple[str, str, float], ...]] = []
    for row in range(rows):
        first, low, high = generic_name("R", row), program.row_lower[row], program.row_upper[row]
        if equal[row]:
            written.append((("E", first, low),))
        elif ranged[row]:
            written.append((("G", first, low), ("L", generic_name("S", row), high)))
        else:
            written.append((("G", first, low),) if below[row] else (("L", first, high),))
    yield NAME_LINE
    yield "ROWS"
    yield f" N  {OBJECTIVE:<8}"
    for parts in written:
        for sense, name, _ in parts:
            yield f" {sense}  {name}"
    yield "COLUMNS"
    yield from _column_lines(program, written)
    yield "RHS"
    for parts in written:
        for _, name, side in parts:
            if side != 0:
                yield f"    {'RHS':<8}  {name}  {float(side)!r}"
    yield "BOUNDS"
    bounds = zip(
        program.lower.tolist(), program.upper.tolist(), program.integer.tolist(), strict=True
    )
    for column, (lower, upper, integer) in enumerate(bounds):
        name = generic_name("C", column)
        for kind, value in _bounds(lower, upper, integer):
            number = "" if value is None else f"  {value!r}"
            yield f" {kind} {'BND':<8}  {name}{number}"
    yield "ENDATA"


def _bounds(lower: float, upper: float, integer: bool) -> tuple[tuple[str, float | None], ...]:
    """Bound lines of a column, in forms that no reader completes with a default of its own."""
    if integer and (lower, upper) == (0.0, 1.0):
        return (("BV", None),)
    if lower == upper:
        return (("FX", lower),)
    if math.isinf(lower) and math.isinf(upper):
        return (("FR", None),)
    first = ("MI", None) if math.isinf(lower) else ("LO", lower)
    return (first, ("PL", None) if math.isinf(upper) else ("UP", upper))


def _column_lines(
    program: LinearProgram, written: Sequence[tuple[tuple[str, str, float], ...]]
) -> Iterator[str]:
    rows, columns = program.shape
    owner = np.repeat(np.arange(rows), np.diff(program.row_start))
    order = np.argsort(program.columns, kind="stable")
    start = np.searchsorted(program.columns[order], np.arange(columns + 1)).tolist()
    owners, values = owner[order].tolist(), program.values[order].tolist()
    objective, integer = program.objective.tolist(), program.integer.tolist()
    inside, markers = False, 0
    for column in range(columns):
        if integer[column] != inside:
            inside, markers = integer[column], markers + 1
            yield marker_line(markers, inside)
        name = generic_name("C", column)
        entries = range(start[column], start[column + 1])
        if objective[column] != 0 or not entries:  # a column must have a line to exist
            yield f"    {name}  {OBJECTIVE:<8}  {objective[column]!r}"
        for entry in entries:
            number = repr(values[entry])
            for _, row, _ in written[owners[entry]]:
                yield f"    {name}  {row}  {number}"
    if inside:
        yield marker_line(markers + 1, False)


def marker_line(number: int, opens: bool) -> str:
    """The line that opens or closes the `number`-th (from 1) stretch of integer columns."""
    kind = "'INTORG'" if opens else "'INTEND'"
    return f"    {generic_name('M', number - 1)}  'MARKER'                 {kind}"
