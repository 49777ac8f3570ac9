"""Linear programs as MPS: round trips, reproducible bytes, names, and what is refused."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qsync_opt.errors import FormatError, ParameterError
from qsync_opt.optimize.linear import LinearProgram, ProgramBuilder
from qsync_opt.optimize.mps import write_linear_program
from qsync_opt.optimize.mps_names import ProgramOrigin, names_of, sidecar_path
from qsync_opt.optimize.mps_reader import read_linear_program

_ARRAYS = (
    "objective",
    "lower",
    "upper",
    "integer",
    "row_lower",
    "row_upper",
    "row_start",
    "columns",
    "values",
)


def assert_same(first: LinearProgram, second: LinearProgram) -> None:
    for name in _ARRAYS:
        mine, other = getattr(first, name), getattr(second, name)
        assert mine.dtype == other.dtype, name
        np.testing.assert_array_equal(mine, other, err_msg=name)
    assert first.name == second.name
    assert first.row_names == second.row_names
    assert first.column_names == second.column_names


_side = st.floats(min_value=-1e20, max_value=1e20, exclude_min=True, exclude_max=True)
_any_number = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def linear_programs(draw: st.DrawFn) -> LinearProgram:
    columns, rows = draw(st.integers(0, 5)), draw(st.integers(0, 4))
    builder = ProgramBuilder(draw(st.text(max_size=20)))
    for _ in range(columns):
        low, high = sorted(draw(st.lists(_side, min_size=2, max_size=2)))
        form = draw(st.sampled_from(["both", "low", "high", "free", "fixed", "unit"]))
        lower = {"free": -np.inf, "high": -np.inf, "unit": 0.0}.get(form, low)
        upper = {"free": np.inf, "low": np.inf, "unit": 1.0, "fixed": low}.get(form, high)
        builder.add_columns(
            [draw(st.text(max_size=300))],
            objective=draw(_any_number),
            lower=lower,
            upper=upper,
            integer=draw(st.booleans()),
        )
    for row in range(rows):
        first, second = draw(st.tuples(_side, _side))
        form = draw(st.sampled_from(["two", "equal", "low", "high"]))
        lower = -np.inf if form == "high" else first
        upper = {"low": np.inf, "equal": first}.get(form, second)
        index = builder.add_rows([draw(st.text(max_size=300))], lower=lower, upper=upper)
        for column in range(columns):
            if draw(st.booleans()):
                value = draw(_any_number)
                builder.add_entries(index, np.array([column]), value)
        assert index.tolist() == [row]
    return builder.build()


@settings(max_examples=150, deadline=None)
@given(program=linear_programs(), packed=st.booleans(), keep_map=st.booleans())
def test_write_then_read_is_the_identity(
    tmp_path_factory: pytest.TempPathFactory, program: LinearProgram, packed: bool, keep_map: bool
) -> None:
    path = tmp_path_factory.mktemp("mps") / ("program.mps.gz" if packed else "program.mps")
    write_linear_program(program, path, comments=("a comment", "\u00e9\n> two lines"))
    if not keep_map:
        sidecar_path(path).unlink()  # the comment lines carry the same map
    assert_same(program, read_linear_program(path))


def small_program() -> LinearProgram:
    builder = ProgramBuilder("small")
    builder.add_columns(["x", "y"], objective=np.array([1.5, 0.1 + 0.2]), integer=True)
    builder.add_columns(["z"], objective=-1 / 3, lower=-2.5, upper=np.inf)
    rows = builder.add_rows(["a", "b"], lower=np.array([1.0, -4.0]), upper=np.array([1.0, 4.5]))
    builder.add_entries(rows[:1], np.array([0, 1]), 1.0)
    builder.add_entries(rows[1:], np.array([0, 2]), np.array([1e-17, 1 / 7]))
    return builder.build()


def test_text_has_the_columns_of_fixed_mps(tmp_path: Path) -> None:
    path = tmp_path / "small.mps"
    write_linear_program(small_program(), path)
    body = [line for line in path.read_text().splitlines() if not line.startswith("*")]
    assert body == [
        "NAME          QSYNCOPT",
        "ROWS",
        " N  COST    ",
        " E  R0000001",
        " G  R0000002",
        " L  S0000002",
        "COLUMNS",
        "    M0000001  'MARKER'                 'INTORG'",
        "    C0000001  COST      1.5",
        "    C0000001  R0000001  1.0",
        "    C0000001  R0000002  1e-17",
        "    C0000001  S0000002  1e-17",
        "    C0000002  COST      0.30000000000000004",
        "    C0000002  R0000001  1.0",
        "    M0000002  'MARKER'                 'INTEND'",
        "    C0000003  COST      -0.3333333333333333",
        "    C0000003  R0000002  0.14285714285714285",
        "    C0000003  S0000002  0.14285714285714285",
        "RHS",
        "    RHS       R0000001  1.0",
        "    RHS       R0000002  -4.0",
        "    RHS       S0000002  4.5",
        "BOUNDS",
        " BV BND       C0000001",
        " BV BND       C0000002",
        " LO BND       C0000003  -2.5",
        " PL BND       C0000003",
        "ENDATA",
    ]


def test_packed_bytes_depend_on_the_program_alone(tmp_path: Path) -> None:
    first, second = tmp_path / "one.mps.gz", tmp_path / "other name.mps.gz"
    for path in (first, second):
        write_linear_program(small_program(), path)
    raw = first.read_bytes()
    assert raw == second.read_bytes()
    flags, modified = raw[3], int.from_bytes(raw[4:8], "little")
    assert (flags, modified) == (0, 0)  # RFC 1952: no file name, no time
    write_linear_program(small_program(), tmp_path / "plain.mps")
    assert gzip.decompress(raw) == (tmp_path / "plain.mps").read_bytes()


def test_odd_names_stay_in_the_map_and_out_of_the_file(tmp_path: Path) -> None:
    names = [
        "a b",
        "a_b",
        "\u6ce8\u610f[0]/q;@:",
        "x" * 300,
        "",
        '"\\\n\t',
        "RHS",
        "\U0001f600" * 90,
    ]
    builder = ProgramBuilder("a name with blanks")
    builder.add_columns(names, objective=1.0)
    path = tmp_path / "names.mps"
    origin = ProgramOrigin(problem="f" * 64, deadline_s=0.1, device="wei\u00df 1")
    write_linear_program(builder.build(), path, origin=origin)
    raw = path.read_bytes()
    assert raw.isascii()
    assert max(len(line) for line in raw.splitlines()) <= 80
    found = names_of(path, path.read_text())
    assert found.columns == tuple(names)
    assert found.origin == origin
    data = json.loads(sidecar_path(path).read_text())
    assert (data["format"], data["version"]) == ("qsync-opt/mps-names", 1)
    assert list(data["columns"]) == [f"C{i:07d}" for i in range(1, len(names) + 1)]


def test_map_of_another_export_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "small.mps"
    write_linear_program(small_program(), path)
    beside = sidecar_path(path)
    beside.write_text(beside.read_text().replace('"x"', '"other"'))
    with pytest.raises(FormatError, match="must agree with the comment lines"):
        read_linear_program(path)


def test_file_without_any_map_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "small.mps"
    write_linear_program(small_program(), path)
    text = "".join(x for x in path.read_text().splitlines(True) if not x.startswith("*"))
    path.write_text(text)
    read_linear_program(path)  # the map beside it serves
    sidecar_path(path).unlink()
    with pytest.raises(FormatError, match="must exist, or the MPS file must carry the map"):
        read_linear_program(path)


@pytest.mark.parametrize(
    ("field", "index", "value", "message"),
    [
        ("objective", 0, np.nan, r"program\.objective\[0\]: must be finite, got nan"),
        ("objective", 2, np.inf, r"program\.objective\[2\]: must be finite, got inf"),
        ("values", 1, -np.inf, r"program\.values\[1\]: must be finite"),
        ("lower", 1, np.nan, r"program\.lower\[1\]: must not be NaN or crossed"),
        ("lower", 1, np.inf, r"program\.lower\[1\]: must not be NaN or crossed"),
        ("lower", 1, 1.5, r"program\.lower\[1\]: must be at most the upper bound, got 1\.5"),
        ("upper", 0, -np.inf, r"program\.upper\[0\]: must not be NaN or crossed"),
        ("upper", 0, 1e20, r"program\.upper\[0\]: must be below 1e20"),
        ("row_lower", 1, np.nan, r"program\.row_lower\[1\]"),
        ("row_upper", 1, -np.inf, r"program\.row_upper\[1\]"),
        ("row_upper", 1, 1e30, r"program\.row_upper\[1\]: must be below 1e20"),
        ("columns", 1, 0, r"program\.columns: must be sorted and without repetition"),
    ],
)
def test_program_that_readers_would_change_is_refused(
    tmp_path: Path, field: str, index: int, value: float, message: str
) -> None:
    program = small_program()
    array = getattr(program, field).copy()
    array[index] = value
    changes: dict[str, Any] = {field: array}
    path = tmp_path / "bad.mps"
    with pytest.raises(ParameterError, match=message):
        write_linear_program(replace(program, **changes), path)
    assert list(tmp_path.iterdir()) == []


def test_row_without_a_side_is_refused(tmp_path: Path) -> None:
    program = small_program()
    free = replace(program, row_lower=np.array([-np.inf, 0]), row_upper=np.array([np.inf, 0]))
    with pytest.raises(ParameterError, match=r"program\.row_lower\[0\]: must be finite where"):
        write_linear_program(free, tmp_path / "bad.mps")


@pytest.mark.parametrize("name", ["model.lp", "model", ".mps", "model.mps.bz2"])
def test_other_suffixes_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ParameterError, match=r"must end in \.mps or \.mps\.gz"):
        write_linear_program(small_program(), tmp_path / name)


def test_unwritable_folder_is_an_error_of_the_family(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="must be a path that can be written"):
        write_linear_program(small_program(), tmp_path / "missing" / "small.mps")


def written_lines(path: Path) -> list[str]:
    write_linear_program(small_program(), path)
    return path.read_text().splitlines(keepends=True)


def test_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "small.mps"
    lines = written_lines(path)
    for count in range(len(lines)):
        path.write_text("".join(lines[:count]))
        with pytest.raises(FormatError):
            read_linear_program(path)


def test_doubled_line_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "small.mps"
    lines = written_lines(path)
    for index, line in enumerate(lines):
        if not line.startswith("*"):
            path.write_text("".join([*lines[: index + 1], *lines[index:]]))
            with pytest.raises(FormatError):
                read_linear_program(path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("0.14285714285714285", "nan", "must end in a finite number"),
        ("COST      1.5", "COST      1e999", "must end in a finite number"),
        ("COST      1.5", "COST      1_5.0", "must end in a finite number"),
        ("COST      1.5", "COST      1.5  R0000001  1.0", "must be a column, a row and a number"),
        ("C0000002  COST", "C0000009  COST", "must name a column of the name map"),
        ("C0000002  R0000001", "C0000001  R0000001", "must be of column C0000003"),
        ("C0000002  R0000001", "C0000002  R0000007", "must name a row of the ROWS section"),
        ("S0000002  0.14285714285714285", "S0000002  0.5", "same entries as R0000002"),
        (" G  R0000002", " L  R0000002", "L row after the G row"),
        (" E  R0000001", " N  R0000001", r"must be a sense \(E, G, L\)"),
        ("RHS\n", "RANGES\n", "must be a data line, or RHS"),
        ("NAME          QSYNCOPT", "NAME", "must be 'NAME          QSYNCOPT'"),
        ("'INTEND'", "'INTORG'", "must be .*INTEND"),
        ("    RHS       R", "    RHS2      R", "must be RHS, a row and a number"),
        (" BV BND       C0000002\n", "", "must come after both bounds of C0000002"),
        (" PL BND", " BV BND", "must be of an integer column"),
        (" PL BND", " SC BND", "must be a bound"),
        ("ENDATA\n", "ENDATA\nmore\n", "must end after ENDATA"),
    ],
)
def test_anything_else_is_refused_with_its_line(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    path = tmp_path / "small.mps"
    text = "".join(written_lines(path))
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(FormatError, match=message):
        read_linear_program(path)


def test_unreadable_files_are_errors_of_the_family(tmp_path: Path) -> None:
    missing, binary, broken = (tmp_path / n for n in ("no.mps", "binary.mps", "broken.mps.gz"))
    binary.write_bytes(b"\xff\xfe\x00")
    broken.write_bytes(gzip.compress(b"* text\n" * 1000)[:20] + b"\x00" * 30)
    for path in (missing, binary, broken):
        with pytest.raises(FormatError, match="must be a"):
            read_linear_program(path)
