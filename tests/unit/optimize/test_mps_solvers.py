"""HiGHS, SCIP, CBC and MathOpt read the same program, and their solutions read back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from ortools.math_opt.python import mathopt

from qsync_opt.optimize.arrays import FloatArray
from qsync_opt.optimize.linear import LinearProgram, ProgramBuilder
from qsync_opt.optimize.mps import write_linear_program
from qsync_opt.optimize.mps_solution import read_solution

#: Given MPS files, the optimal objectives by solver; see `conftest`.
MpsSolvers = Callable[[Sequence[Path]], Mapping[str, list[float]]]

RELATIVE = 1e-9

#: Suffixes of the solution files, and how exact each style prints.
STYLES = {"highs": 1e-9, "pretty": 1e-5, "sparse": 1e-9, "scip": 1e-9, "cbc": 1e-7, "cbc-all": 1e-7}


def solve_arrays(program: LinearProgram) -> tuple[float, FloatArray]:
    """Objective and values by MathOpt's HiGHS, from the arrays and not from a file.

    Without presolve: the release of HiGHS inside OR-Tools 9.15 otherwise stops at a worse
    point as optimal on seed 11 (of the kind of ERGO-Code/HiGHS#3043 and #3073).
    """
    model = mathopt.Model()
    x = [
        model.add_variable(lb=low, ub=high, is_integer=integer)
        for low, high, integer in zip(
            program.lower.tolist(), program.upper.tolist(), program.integer.tolist(), strict=True
        )
    ]
    for row, (low, high) in enumerate(
        zip(program.row_lower.tolist(), program.row_upper.tolist(), strict=True)
    ):
        line = model.add_linear_constraint(lb=low, ub=high)
        for entry in range(program.row_start[row], program.row_start[row + 1]):
            line.set_coefficient(x[program.columns[entry]], float(program.values[entry]))
    for variable, cost in zip(x, program.objective.tolist(), strict=True):
        model.objective.set_linear_coefficient(variable, cost)
    parameters = mathopt.SolveParameters(
        relative_gap_tolerance=0.0, absolute_gap_tolerance=0.0, presolve=mathopt.Emphasis.OFF
    )
    parameters.highs.double_options["primal_feasibility_tolerance"] = 1e-9
    parameters.highs.double_options["mip_feasibility_tolerance"] = 1e-9
    result = mathopt.solve(model, mathopt.SolverType.HIGHS, params=parameters)
    assert result.termination.reason == mathopt.TerminationReason.OPTIMAL
    values = np.array(result.variable_values(x))
    return result.objective_value(), values


#: (lower, upper, integer) of the columns of every random program; None is drawn at random.
_FORMS = (
    (-np.inf, np.inf, False),
    (0.0, 1.0, True),
    (0.0, 1.0, True),
    (0.0, 1.0, True),
    (-5.0, 7.0, True),
    (2.0, np.inf, True),
    (-np.inf, -3.0, True),
    (-np.inf, np.inf, True),
    (-9.123456789012345, -3.1234567890123457, False),
    (-np.inf, -2.0000000000000004, False),
    (-7.7, np.inf, False),
    (0.0, 1.0, False),
    (0.0, 0.0, False),
    (-4.0, -4.0, True),
    (0.0, 25.0, True),
)


def random_program(seed: int) -> LinearProgram:
    """A program with 17-digit data, feasible by a point and bounded by a dual point.

    Rows are built round a point x0 that keeps the bounds, and the objective is A'y + z with y
    of the sign that each row allows and z of the sign that each column's bounds allow, so by
    weak duality the relaxation is bounded. Equations hold the free continuous column, or no
    whole-number point might meet them.
    """
    rng = np.random.default_rng(seed)
    lower, upper = (np.array([form[i] for form in _FORMS], dtype=np.float64) for i in (0, 1))
    integer = np.array([form[2] for form in _FORMS])
    count, rows = len(_FORMS), 8
    low = np.where(np.isfinite(lower), lower, np.where(np.isfinite(upper), upper - 9, -6.0))
    high = np.where(np.isfinite(upper), upper, low + 12)
    point = rng.uniform(low, high)
    point[integer] = np.rint(point[integer])
    matrix = rng.uniform(-9, 9, size=(rows, count)) * (rng.random((rows, count)) < 0.6)
    matrix[:, -1] = 0.0  # a column that is in the objective alone
    matrix[:, 12] = 0.0  # and one that is in neither
    sense = rng.permutation(["E", "E", "G", "G", "L", "L", "two", "two"])
    matrix[sense == "E", 0] = rng.uniform(1, 9, size=2)
    activity = matrix @ point
    slack = rng.uniform(0, 20, size=(2, rows))
    row_lower = np.where(sense == "L", -np.inf, activity - slack[0] * (sense != "E"))
    row_upper = np.where(sense == "G", np.inf, activity + slack[1] * (sense != "E"))
    dual = rng.uniform(10, 900, size=rows) * np.select([sense == "G", sense == "L"], [1, -1], 0)
    dual += rng.uniform(-900, 900, size=rows) * np.isin(sense, ["E", "two"])
    reduced = rng.uniform(10, 900, size=count)
    reduced[np.isinf(lower)] *= -1.0
    reduced[np.isinf(lower) & np.isinf(upper)] = 0.0
    objective = matrix.T @ dual + reduced
    objective[12] = 0.0
    builder = ProgramBuilder(f"random {seed}")
    for column in range(count):
        builder.add_columns(
            [f"column {column}"],
            objective=objective[column],
            lower=lower[column],
            upper=upper[column],
            integer=bool(integer[column]),
        )
    builder.add_rows([f"row {i}" for i in range(rows)], lower=row_lower, upper=row_upper)
    owner, touched = np.nonzero(matrix)
    builder.add_entries(owner, touched, matrix[owner, touched])
    return builder.build()


def check_values(program: LinearProgram, path: Path, expected: FloatArray) -> None:
    """Every solution file read back gives the one optimal point, to the digits it prints."""
    rows, columns = program.shape
    for style, digits in STYLES.items():
        if path.suffix == ".gz" and style.startswith("cbc"):
            continue
        solution = read_solution(f"{path}.{style}.sol", columns=columns, rows=rows)
        np.testing.assert_allclose(
            solution.values, expected, rtol=digits, atol=1e-6, err_msg=f"{path.name} {style}"
        )


def test_all_readers_find_the_same_optimum(tmp_path: Path, mps_solvers: MpsSolvers) -> None:
    programs = [random_program(seed) for seed in range(12)]
    paths = [tmp_path / f"random{seed}.mps" for seed in range(len(programs))]
    for program, path in zip(programs, paths, strict=True):
        write_linear_program(program, path)
    found = mps_solvers(paths)
    for index, program in enumerate(programs):
        objective, values = solve_arrays(program)
        assert abs(objective) > 10  # CBC prints 8 decimals: 1e-9 relative needs this size
        for name, objectives in found.items():
            assert objectives[index] == pytest.approx(objective, rel=RELATIVE), (name, index)
        check_values(program, paths[index], values)


def test_packed_files_are_read_by_those_that_can(tmp_path: Path, mps_solvers: MpsSolvers) -> None:
    program = random_program(99)
    path = tmp_path / "random.mps.gz"
    write_linear_program(program, path)
    objective, values = solve_arrays(program)
    found = mps_solvers([path])
    assert sorted(found) == ["highs", "scip"]  # PuLP's CBC is built without zlib
    for name, objectives in found.items():
        assert objectives == [pytest.approx(objective, rel=RELATIVE)], name
    check_values(program, path, values)


def byte_budget(first_bytes: int, second_bytes: int) -> LinearProgram:
    """Two operators, each large for nothing or small for a price; the budget is tight."""
    builder = ProgramBuilder("bytes")
    names = ["a large", "a small", "b large", "b small"]
    builder.add_columns(names, objective=np.array([0.0, 2.0, 0.0, 3.0]), integer=True)
    one = builder.add_rows(["a", "b"], lower=1.0, upper=1.0)
    builder.add_entries(np.repeat(one, 2), np.arange(4), 1.0)
    sizes = np.array([first_bytes, second_bytes] * 2, dtype=np.float64)
    budget = builder.add_rows(["memory"], lower=-np.inf, upper=float(first_bytes + second_bytes))
    builder.add_entries(np.repeat(budget, 4), np.arange(4), sizes)
    return builder.build()


def test_eleven_digits_of_a_byte_budget_survive(tmp_path: Path, mps_solvers: MpsSolvers) -> None:
    """Six digits, as OR-Tools' exporters print, turn the optimum of this program from 2 to 5."""
    sizes = (8_590_025_500, 4_295_014_500)
    path = tmp_path / "bytes.mps"
    write_linear_program(byte_budget(*sizes), path)
    found = mps_solvers([path])
    assert {name: objectives[0] for name, objectives in found.items()} == {
        "highs": pytest.approx(2.0, rel=RELATIVE),
        "scip": pytest.approx(2.0, rel=RELATIVE),
        "cbc": pytest.approx(2.0, rel=RELATIVE),
    }
    check_values(byte_budget(*sizes), path, np.array([0.0, 1.0, 1.0, 0.0]))
    rounded = [float(f"{size:.6g}") for size in (*sizes, sum(sizes))]
    assert rounded[0] + rounded[1] > rounded[2]  # what six digits would have done


def test_solution_files_of_an_infeasible_program_are_refused(
    tmp_path: Path, mps_solvers: MpsSolvers
) -> None:
    builder = ProgramBuilder("infeasible")
    builder.add_columns(["x", "y"], objective=1.0, integer=True)
    row = builder.add_rows(["sum"], lower=3.0, upper=np.inf)
    builder.add_entries(np.repeat(row, 2), np.arange(2), 1.0)
    path = tmp_path / "infeasible.mps"
    write_linear_program(builder.build(), path)
    mps_solvers([path])
    for style in STYLES:
        with pytest.raises(ValueError, match="must hold a feasible solution"):
            read_solution(f"{path}.{style}.sol", columns=2, rows=1)
