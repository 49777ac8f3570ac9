"""Every benchmark runs, once and untimed, on problems too small to take long."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import __main__ as command
from tests.benchmarks.runner import measure_apart, run_solvers, run_start_up
from tests.benchmarks.specs import (
    COSTS,
    GRAPHS,
    OWN,
    PEERS,
    RELATIVE_GAP,
    SIZES,
    SolverSpec,
    measure,
    not_measured,
    solver_specs,
)
from tests.benchmarks.tables import (
    ablation_table,
    describe_machine,
    solver_table,
    to_markdown,
    without_output,
)

pytestmark = pytest.mark.benchmark

TINY = 10
Row = dict[str, Any]


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return run_solvers(solver_specs([TINY]), run=measure)


def test_the_sizes_and_solvers_are_those_the_goal_names() -> None:
    assert SIZES == (54, 100, 300, 1_000, 3_000, 10_000)
    assert len(solver_specs()) == len(SIZES) * len(GRAPHS) * len(COSTS) * (1 + len(PEERS))


def test_every_spec_is_proven_and_no_bound_passes_another_plan(rows: list[Row]) -> None:
    assert len(rows) == len(GRAPHS) * len(COSTS) * (1 + len(PEERS))
    assert {row["status"] for row in rows} == {"OPTIMAL"}
    for row in rows:
        assert row["gap"] <= RELATIVE_GAP
        assert row["peak_rss_bytes"] > 2**20
        for other in rows:
            if other["problem"] == row["problem"]:
                assert row["bound"] <= other["objective"] * (1 + 1e-9)


def test_solvers_of_a_family_are_given_the_same_problem(rows: list[Row]) -> None:
    assert len({row["problem"] for row in rows}) == len(GRAPHS) * len(COSTS)
    for row in rows:
        spec = SolverSpec(
            operators=TINY, graph=row["graph"], costs=row["costs"], solver=row["solver"]
        )
        assert spec.problem().sha256 == row["problem"]


def test_the_own_method_is_not_plain_and_the_peers_are() -> None:
    for spec in solver_specs([TINY]):
        parameters = spec.parameters()
        assert parameters.plain == (spec.solver != OWN)
        assert parameters.relative_gap == RELATIVE_GAP
        if spec.solver != OWN:
            assert parameters.solver == spec.solver


def test_tables_hold_every_row(rows: list[Row]) -> None:
    data = {
        "arguments": "",
        "machine": describe_machine(),
        "rows": rows,
        "start_up": {"repeats": 1, "import_s": 0.1, "command_line_54_s": 1.0},
    }
    text = to_markdown(data)
    assert text.count(f"\n| {TINY} | plain ") == len(GRAPHS) * len(COSTS) * len(PEERS)
    assert text.count(f"\n| {TINY} | exact ") == len(GRAPHS) * len(COSTS)
    lines = ablation_table(rows).splitlines()
    assert len(lines) - 2 == 2 * len(GRAPHS) * len(COSTS)  # two device kinds
    for table in (ablation_table(rows), solver_table(rows)):
        assert len({line.count("|") for line in table.splitlines()}) == 1


def test_the_ratio_is_to_the_own_time_and_a_limit_makes_it_a_bound(rows: list[Row]) -> None:
    own = {**rows[0], "wall_s": 2.0}
    peer = {**rows[1], "wall_s": 60.0, "status": "TIME_LIMIT"}
    assert "| 60.00 | >= 30.0 | time_limit |" in solver_table([own, peer])
    assert "| 60.00 | 30.0 | optimal |" in solver_table([own, {**peer, "status": "OPTIMAL"}])
    missing = not_measured(solver_specs([TINY])[1], "KILLED", "went on after 300 s")
    assert "| - | - | killed: went on after 300 s |" in solver_table([own, missing])


def test_a_solver_without_a_plan_is_not_run_on_larger_problems() -> None:
    run: list[tuple[int, str]] = []

    def scripted(spec: SolverSpec) -> Row:
        run.append((spec.operators, spec.solver))
        row = not_measured(spec, "TIME_LIMIT", "")
        return row if (spec.operators, spec.solver) == (20, "scip") else {**row, "objective": 1.0}

    specs = solver_specs([10, 20, 30], graphs=["chain"], costs=["correlated"])
    found = run_solvers(specs, run=scripted)
    assert (30, "scip") not in run
    assert len(run) == len(specs) - 1
    (left_out,) = (row for row in found if row["status"] == "NOT_RUN")
    assert left_out["reason"] == "no plan at 20 operators"


def test_a_process_of_its_own_finds_the_same(rows: list[Row]) -> None:
    apart = measure_apart(solver_specs([TINY])[0])
    for key in ("problem", "status", "objective", "bound"):
        assert apart[key] == rows[0][key]


def test_a_process_that_will_not_stop_or_crashes_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = solver_specs([TINY])[0]
    monkeypatch.setattr("tests.benchmarks.runner._PATIENCE_S", 0.0)
    assert measure_apart(replace(spec, limit_s=1e-3))["status"] == "KILLED"
    assert measure_apart(replace(spec, limit_s=None, graph="ring"))["status"] == "CRASHED"


def test_start_up_is_measured() -> None:
    figures = run_start_up(repeats=1)
    assert 0 < figures["import_s"] < figures["command_line_54_s"]


def test_the_command_keeps_what_it_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = {"repeats": 1, "import_s": 1.0, "command_line_54_s": 1.0}
    monkeypatch.setattr(command, "run_start_up", lambda: figures)
    words = ["--sizes", str(TINY), "--output", str(tmp_path), "--limit", "30"]
    words += ["--graphs", "chain", "--costs", "correlated", "--peers", "highs"]
    assert command.main(words) == 0
    assert (tmp_path / "solvers.md").read_text() == capsys.readouterr().out
    data = json.loads((tmp_path / "solvers.json").read_text())
    assert [row["operators"] for row in data["rows"]] == [TINY, TINY]
    assert data["machine"]["cores"] >= 1
    assert data["machine"]["memory_bytes"] > 2**20


def test_the_module_is_a_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks", "--help"],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert "--limit" in done.stdout


def test_where_files_went_is_not_kept() -> None:
    words = ["--sizes", "54,100", "--peers", "--limit", "6", "--name", "a"]
    for place in (["--output", "x y"], ["--output=z"]):
        assert without_output([*words[:2], *place, *words[2:]]) == words
    assert without_output(words) == words
