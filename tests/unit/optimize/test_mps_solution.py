"""Solution files of HiGHS, SCIP and CBC: every style read, everything malformed refused.

The texts follow what HiGHS 1.16, SCIP 10 and CBC 2.10.3 write; `test_mps_solvers` reads files
that the solvers themselves have written.
"""

from __future__ import annotations

import gzip
import math
from pathlib import Path

import pytest

from qsync_opt.errors import FormatError
from qsync_opt.optimize.mps_solution import MpsSolution, read_solution

HIGHS = """\
Model status
Optimal

# Primal solution values
Feasible
Objective 2.5
# Columns 3
C0000001 1
C0000002 -0
C0000003 0.3333333333333
# Rows 1
R0000001 1

# Dual solution values
None

# Basis
HiGHS_basis_file v2
None
"""
HIGHS_SPARSE = """\
Model status
Time limit reached

# Primal solution values
Feasible
Objective 2.5
# Columns -2 sparse
C0000001 1 0
C0000003 0.3333333333333 2
# Rows -1 sparse
R0000001 1 0
"""
HIGHS_PRETTY = """\
Columns
    Index Status        Lower        Upper       Primal         Dual  Type        Name
        0                   0            1            1               Integer     C0000001
        1     LB            0            1           -0            2  Integer     C0000002
        2                   0          inf     0.333333               Continuous  C0000003
Rows
    Index Status        Lower        Upper       Primal         Dual  Name
        0                   1          inf            1               R0000001

Model status: Optimal

Objective value: 2.5
"""
SCIP = """\
solution status: gap limit reached
objective value:                                  2.5
C0000001                                            1 \t(obj:2.12345678901235)
C0000003                            0.333333333333333 \t(obj:-0.133333333333333)
"""
SCIP_ALONE = "\n" + SCIP.split("\n", 1)[1]
CBC = """\
Optimal - objective value 2.50000000
      0 C0000001               1               2.1234568
      1 C0000002               0                       3
      2 C0000003      0.33333333                       0
"""
CBC_ALL = """\
Stopped on time - objective value 2.50000000
**      0 R0000001               1                       0
      0 C0000001               1               2.1234568
      2 C0000003      0.33333333                       0
"""
STYLES = {
    "highs": HIGHS,
    "highs sparse": HIGHS_SPARSE,
    "highs pretty": HIGHS_PRETTY,
    "scip": SCIP,
    "scip alone": SCIP_ALONE,
    "cbc": CBC,
    "cbc all": CBC_ALL,
}


def read(folder: Path, text: str) -> MpsSolution:
    path = folder / "solution.sol"
    path.write_text(text)
    return read_solution(path, columns=3, rows=1)


@pytest.mark.parametrize("style", STYLES)
def test_style_is_found_by_content(tmp_path: Path, style: str) -> None:
    solution = read(tmp_path, STYLES[style])
    assert solution.values.tolist() == pytest.approx([1.0, 0.0, 1 / 3], abs=1e-6)
    assert solution.objective == 2.5
    assert style.startswith(solution.style)


def test_status_is_kept(tmp_path: Path) -> None:
    assert read(tmp_path, HIGHS_SPARSE).status == "Time limit reached"
    assert read(tmp_path, HIGHS_PRETTY).status == "Optimal"
    assert read(tmp_path, SCIP).status == "gap limit reached"
    assert read(tmp_path, CBC_ALL).status == "Stopped on time"


def test_packed_file_and_crlf(tmp_path: Path) -> None:
    path = tmp_path / "solution.sol.gz"
    path.write_bytes(gzip.compress(HIGHS.replace("\n", "\r\n").encode()))
    assert read_solution(path, columns=3).values[0] == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n \n",
        HIGHS.replace("Optimal", "Infeasible").replace("Feasible", "None"),
        HIGHS.replace("Feasible", "Infeasible"),
        HIGHS_PRETTY.replace("Optimal", "Infeasible"),
        HIGHS_PRETTY.replace("            1  ", "               ").replace("-0", "  "),
        "no solution available\n",
        "solution status: infeasible\nno solution available\n",
        "solution status: infeasible\nobjective value: 1\nC0000001 1 (obj:1)\n",
        "solution status: unknown\n",
        CBC.replace("Optimal", "Infeasible"),
        CBC.replace("Optimal", "Integer infeasible"),
        CBC.replace("Optimal", "Unbounded"),
        CBC.replace("Optimal", "Stopped on time (no integer solution - continuous used)"),
    ],
)
def test_file_without_a_solution_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(FormatError, match="must hold a feasible solution"):
        read(tmp_path, text)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("C0000003", "C0000004", "must name a column of the MPS file"),
        ("C0000003", "C0000000", "must name a column of the MPS file"),
        ("C0000003", "x[weak,a,int8]", "must name a column of the MPS file"),
        ("C0000003", "C\u0660\u0660\u0660\u0660\u0660\u0660\u0663", "must name a column"),
        ("C0000003", "C0000001", "must not list a column twice"),
        ("0.33333", "+infi", "must hold a finite number"),
        ("0.33333", "   nan", "must hold a finite number|must be one of|must be an index"),
        ("2.5", "nan", "must hold a finite number"),
    ],
)
def test_malformed_entry_is_refused(
    tmp_path: Path, style: str, old: str, new: str, message: str
) -> None:
    text = STYLES[style]
    # The pretty table of HiGHS is read by position, so a value keeps its width.
    at = text.index(old)
    changed = text[:at] + new + text[at + len(old) :]
    with pytest.raises(FormatError, match=message):
        read(tmp_path, changed)


@pytest.mark.parametrize("style", ["highs", "highs sparse", "highs pretty"])
def test_cut_before_the_last_column_is_refused(tmp_path: Path, style: str) -> None:
    lines = STYLES[style].splitlines(keepends=True)
    last = next(i for i, line in enumerate(lines) if "C0000003" in line)
    for count in range(last + 1):
        with pytest.raises(FormatError):
            read(tmp_path, "".join(lines[:count]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[C0000001]\n1\n", "must begin like a solution file of HiGHS, SCIP or CBC"),
        ("c Problem:    t\ns mip 4 3 o 2.0\n", "must begin like a solution file"),
        ('{"C0000001": 1}', "must begin like a solution file"),
        (HIGHS.replace("# Columns 3", "# Columns 2"), "must announce 3 columns"),
        (HIGHS.replace("# Columns 3", "# Columns"), "must announce 3 columns"),
        (HIGHS.replace("C0000002 -0\n", "C0000002\n"), "must be one of 3 columns"),
        (HIGHS.replace("# Primal", "# Prime"), "must be followed by '# Primal solution values'"),
        (HIGHS_PRETTY.replace("Model status: Optimal\n", ""), "must have a line 'Model status:'"),
        (HIGHS_PRETTY.replace("Upper", "Above"), "must head a table with Upper"),
        (HIGHS_PRETTY.replace("C0000002\n", "C0000002\n\n"), "must be a column, or 'Rows'"),
        (SCIP.replace("objective value:", "value:"), "must be a column and its value"),
        (SCIP.replace("C0000001  ", "C0000001 1 1"), "must be a column and its value"),
        (CBC.replace("  2 C0", "  C0"), "must be an index, a name, a value and a dual value"),
        (CBC_ALL.replace("R0000001", "R0000002"), "must name a column of the MPS file"),
    ],
)
def test_malformed_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        read(tmp_path, text)


def test_missing_and_binary_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="must be a file that can be read"):
        read_solution(tmp_path / "none.sol", columns=1)
    (tmp_path / "binary.sol").write_bytes(b"\xff\x00\xfe")
    with pytest.raises(FormatError, match="must be a solution file in UTF-8"):
        read_solution(tmp_path / "binary.sol", columns=1)


def test_sparse_styles_leave_zeros(tmp_path: Path) -> None:
    for style in ("highs sparse", "scip", "cbc all"):
        value = float(read(tmp_path, STYLES[style]).values[1])
        assert value == 0.0
        assert math.copysign(1.0, value) == 1.0
