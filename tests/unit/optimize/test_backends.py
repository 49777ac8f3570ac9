"""Every back end on small random programs against trying all values, and how each may fail."""

from __future__ import annotations

import importlib.util
import itertools
import math
import os
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from qsync_opt.errors import SolverUnavailableError
from qsync_opt.optimize import backends, cbc
from qsync_opt.optimize.arrays import FloatArray
from qsync_opt.optimize.backends import solve_program
from qsync_opt.optimize.formulation import formulate
from qsync_opt.optimize.generate import generate_problem
from qsync_opt.optimize.linear import LazyNames, LinearProgram, ProgramBuilder, without_plan
from qsync_opt.optimize.problem import AllocationProblem
from qsync_opt.optimize.result import SOLVERS, SolveParameters, SolveStatus
from qsync_opt.optimize.solve import solve

MATH_OPT = ("highs", "scip", "cp_sat")


def random_program(seed: int, *, scale: float = 1.0, columns: int = 7) -> LinearProgram:
    """Binary columns; rows of every sort: at most, at least, equal; some cannot be kept."""
    rng = np.random.default_rng(seed)
    builder = ProgramBuilder("random", named=False)
    x = builder.add_columns(
        LazyNames(columns, list), objective=rng.uniform(0, 10, size=columns) * scale, integer=True
    )
    point = rng.integers(0, 2, size=columns)

    def row(values: FloatArray, lower: float, upper: float) -> None:
        line = builder.add_rows(LazyNames(1, list), lower=lower, upper=upper)
        used = values != 0
        builder.add_entries(np.repeat(line, int(used.sum())), x[used], values[used])

    size = rng.integers(1, 2**20, size=columns).astype(np.float64)
    for _ in range(int(rng.integers(1, 3))):
        row(-size, -np.inf, -float(size @ point) + float(rng.integers(-1, 2)))
    for _ in range(int(rng.integers(0, 3))):
        some = (rng.random(columns) < 0.5).astype(np.float64)
        row(some, float(some @ point), np.inf)
    some = (rng.random(columns) < 0.3).astype(np.float64)
    row(some, float(some @ point), float(some @ point))
    if seed % 4 == 0:  # all columns are needed, but one must stay 0
        row(-size, -np.inf, -float(size.sum()))
        row(np.ones(columns), -np.inf, columns - 1.0)
    return builder.build()


def optimum(program: LinearProgram) -> float:
    """The least objective by trying all values of the (binary) columns; infinite for none."""
    best = math.inf
    for values in itertools.product([0.0, 1.0], repeat=len(program.objective)):
        x = np.array(values)
        activity = program.activity(x)
        if (activity <= program.row_upper).all() and (activity >= program.row_lower).all():
            best = min(best, float(program.objective @ x))
    return best


def gap(solver: str) -> float:
    """The finest gap that a solver can prove: CP-SAT's objective has 2^30 whole steps."""
    return 1e-6 if solver == "cp_sat" else 0.0


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30], ids=str)
@pytest.mark.parametrize("solver", SOLVERS)
def test_each_back_end_finds_the_optimum(solver: str, scale: float) -> None:
    found = set()
    for seed in range(6 if solver == "cbc" else 20):
        program = random_program(seed, scale=scale)
        best = optimum(program)
        answer = solve_program(program, solver=solver, relative_gap=gap(solver))
        if best == math.inf:
            assert answer.status == "infeasible", seed
            assert answer.values is None
        else:
            assert answer.status == "optimal", (seed, answer.message)
            assert answer.values is not None
            value = float(program.objective @ np.rint(answer.values))
            assert value == pytest.approx(best, rel=1e-6 if solver == "cp_sat" else 1e-9)
            assert answer.bound <= best * (1 + 1e-9)
            assert answer.bound >= best * (1 - 2e-6)
        found.add(answer.status)
    assert found == {"optimal", "infeasible"}


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_plan_that_is_cut_off_does_not_come_back(solver: str) -> None:
    builder = ProgramBuilder("choices", named=False)
    x = builder.add_columns(
        LazyNames(6, list), objective=np.array([1.0, 2.0, 4.0, 1.0, 3.0, 9.0]), integer=True
    )
    one = builder.add_rows(LazyNames(2, list), lower=1.0, upper=1.0)
    builder.add_entries(np.repeat(one, 3), x, 1.0)
    program = builder.build()
    seen = []
    for _ in range(4):
        answer = solve_program(program, solver=solver, relative_gap=0.0)
        assert answer.values is not None
        chosen = np.flatnonzero(answer.values > 0.5)
        seen.append((tuple(chosen.tolist()), float(program.objective @ np.rint(answer.values))))
        program = without_plan(program, chosen)
    assert len({plan for plan, _ in seen}) == 4
    assert [value for _, value in seen] == [2.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_program_without_an_objective_is_solved(solver: str) -> None:
    builder = ProgramBuilder("any", named=False)
    x = builder.add_columns(LazyNames(3, list), integer=True)
    line = builder.add_rows(LazyNames(1, list), lower=2.0, upper=2.0)
    builder.add_entries(np.repeat(line, 3), x, 1.0)
    answer = solve_program(builder.build(), solver=solver)
    assert answer.status == "optimal"
    assert answer.values is not None
    assert np.rint(answer.values).sum() == 2


@pytest.mark.parametrize("solver", MATH_OPT)
def test_no_time_leaves_no_proof(solver: str) -> None:
    problem = generate_problem(operators=200, precisions=4, devices=1, seed=0, tightness=0.3)
    program = formulate(problem, deadline_s=problem.deadline_s, named=False).program
    answer = solve_program(program, solver=solver, time_limit_s=0.0, relative_gap=0.0)
    assert answer.status in ("unknown", "feasible")
    assert answer.values is None or answer.status == "feasible"


# -- a solver that is missing, refuses or crashes -----------------------------------------------


def broken_math_opt(monkeypatch: pytest.MonkeyPatch) -> None:
    """MathOpt dies in the middle of a solve, as it does for a model it refuses."""
    from ortools.math_opt.python import mathopt

    def refuse(*_: object, **__: object) -> None:
        try:
            raise ValueError("the column is on fire")
        except ValueError:
            raise AttributeError("canonical_code")  # noqa: B904  # that is how MathOpt does it

    monkeypatch.setattr(mathopt, "solve", refuse)


def broken_cbc(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    """Put a script in the place of CBC's binary."""
    binary = folder / "cbc"
    binary.write_text(f"#!/bin/sh\n{script}\n")
    binary.chmod(binary.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(cbc, "_binary", lambda: str(binary))


def missing_pulp(monkeypatch: pytest.MonkeyPatch) -> None:
    cbc._binary.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


@pytest.mark.parametrize("solver", MATH_OPT)
def test_a_refusal_is_reported_with_its_cause(solver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken_math_opt(monkeypatch)
    with pytest.raises(SolverUnavailableError, match=f"solver {solver}: the column is on fire"):
        solve_program(random_program(0), solver=solver)


@pytest.mark.parametrize("solver", MATH_OPT)
def test_a_missing_package_is_reported_by_name(
    solver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ortools.math_opt.python", None)
    with pytest.raises(SolverUnavailableError, match=f"solver {solver}: .*Install ortools"):
        solve_program(random_program(0), solver=solver)


def test_a_missing_cbc_is_reported_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    missing_pulp(monkeypatch)
    with pytest.raises(SolverUnavailableError, match="solver cbc: pulp is not installed"):
        solve_program(random_program(0), solver="cbc")


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("kill -SEGV $$", "exit code -11"),
        ("echo no licence; exit 3", "exit code 3: no licence"),
        ("exit 0", "exit code 0: no output"),
    ],
)
def test_a_crash_of_cbc_is_reported(
    script: str, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken_cbc(monkeypatch, tmp_path, script)
    with pytest.raises(SolverUnavailableError, match=f"solver cbc: {reason}"):
        solve_program(random_program(0), solver="cbc")


def test_cbc_that_is_no_program_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cbc, "_binary", lambda: os.fspath(tmp_path / "nothing"))
    with pytest.raises(SolverUnavailableError, match="solver cbc: "):
        solve_program(random_program(0), solver="cbc")


@pytest.mark.parametrize("first", ["pulp", "highspy"])
def test_packages_that_crash_math_opt_are_refused_before_it_is_loaded(first: str) -> None:
    code = f"""
import sys, {first}
import numpy as np
from qsync_opt.errors import SolverUnavailableError
from qsync_opt.optimize.backends import solve_program
from qsync_opt.optimize.linear import LazyNames, ProgramBuilder
builder = ProgramBuilder("one", named=False)
builder.add_columns(LazyNames(1, list), objective=1.0, integer=True)
try:
    solve_program(builder.build())
except SolverUnavailableError as error:
    sys.stdout.write(str(error))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"solver highs: {first} was imported before OR-Tools" in done.stdout
    assert "Import ortools.math_opt.python.mathopt first" in done.stdout


# -- what `solve` makes of it -------------------------------------------------------------------


def needs_a_program() -> AllocationProblem:
    """A problem on which greedy is not optimal, given to a back end whole."""
    return generate_problem(
        operators=30, precisions=3, devices=2, seed=1, tightness=0.3, costs="correlated"
    )


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_crash_is_named_and_auto_falls_back_to_greedy(
    solver: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    problem = needs_a_program()
    greedy = solve(problem, method="greedy")
    assert greedy.objective is not None
    broken_math_opt(monkeypatch)
    broken_cbc(monkeypatch, tmp_path, "kill -SEGV $$")
    parameters = SolveParameters(solver=solver, plain=True, relative_gap=0.0)
    exact = solve(problem, method="exact", parameters=parameters)
    assert exact.status is SolveStatus.SOLVER_ERROR
    assert exact.fallback_reason is not None
    assert f"solver {solver}: " in exact.fallback_reason
    auto = solve(problem, method="auto", parameters=parameters)
    assert auto.method == "greedy"
    assert auto.status is SolveStatus.HEURISTIC
    assert auto.objective == pytest.approx(greedy.objective, rel=1e-12)
    assert auto.fallback_reason is not None
    assert f"solver {solver}: " in auto.fallback_reason


def test_an_unknown_solver_never_gets_that_far() -> None:
    with pytest.raises(ValueError, match="solver: must be one of highs, scip, cp_sat, cbc"):
        SolveParameters(solver="gurobi")


def test_glop_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    broken_math_opt(monkeypatch)
    with pytest.raises(SolverUnavailableError, match="solver glop: the column is on fire"):
        backends.solve_linear(random_program(0))
