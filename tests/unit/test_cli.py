"""The command line: what it prints, its exit codes, and one clear line for every mistake."""

from __future__ import annotations

import contextlib
import csv
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from qsync_opt import cli, options
from qsync_opt.files import load_plan, load_problem, save_problem
from qsync_opt.optimize.evaluate import evaluate
from qsync_opt.optimize.interrupter import Interrupter
from qsync_opt.optimize.linear import LinearProgram, ProgramSolution
from qsync_opt.optimize.problem import AllocationProblem
from qsync_opt.optimize.result import METHODS, SOLVERS, SolveParameters, SolveResult, SolveStatus
from qsync_opt.optimize.solve import solve
from qsync_opt.plan import bits_text

Captured = pytest.CaptureFixture[str]


def run_json(capsys: Captured, *arguments: object) -> tuple[int, dict[str, object]]:
    """The exit code and the one JSON object of a command that also keeps standard error empty."""
    code = cli.main([*map(str, arguments), "--json"])
    captured = capsys.readouterr()
    assert captured.err == ""
    value = json.loads(captured.out)
    assert isinstance(value, dict)
    return code, value


def run_refused(capsys: Captured, *arguments: object) -> str:
    """The one line on standard error of a command that exits 2 and prints nothing else."""
    code = cli.main([*map(str, arguments)])
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert captured.err.endswith("\n")
    assert captured.err.count("\n") == 1
    assert "Traceback" not in captured.err
    return captured.err


def start(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "qsync_opt.cli", *map(str, arguments)]
    return subprocess.run(  # type: ignore[call-overload, no-any-return]
        command, text=True, check=False, stderr=subprocess.PIPE, **options
    )


@pytest.fixture
def infeasible_file(small_problem: AllocationProblem, tmp_path: Path) -> Path:
    """The fixed memory alone is one byte over the budget of the first kind."""
    first = small_problem.devices[0]
    short = replace(first, memory_bytes=first.fixed_bytes - 1)
    path = tmp_path / "infeasible.json"
    save_problem(replace(small_problem, devices=(short, *small_problem.devices[1:])), path)
    return path


# --- what the commands give -------------------------------------------------------------


def test_the_lists_of_names_are_those_of_the_library() -> None:
    assert options.METHODS == METHODS
    assert options.SOLVERS == SOLVERS


def test_solve_gives_what_the_library_gives(
    capsys: Captured, problem_file: Path, tmp_path: Path
) -> None:
    problem = load_problem(problem_file)
    expected = solve(problem, parameters=SolveParameters(seed=3))
    code, shown = run_json(
        capsys, "solve", problem_file, "--seed", 3, "--output", tmp_path / "plan.json"
    )
    assert code == 0
    assert shown["status"] == expected.status.name.lower()
    assert shown["objective"] == expected.objective
    assert shown["bound"] == expected.bound
    assert load_plan(tmp_path / "plan.json") == expected.plan
    written = json.loads((tmp_path / "plan.json").read_text())
    assert shown["plan"] == {key: written[key] for key in ("problem", "devices")}


def test_solve_shows_the_names_a_person_looks_for(capsys: Captured, problem_file: Path) -> None:
    assert cli.main(["solve", str(problem_file)]) == 0
    shown = capsys.readouterr().out
    problem = load_problem(problem_file)
    for text in (problem.name, "objective", "bound", *(kind.name for kind in problem.devices)):
        assert text in shown


def test_a_looser_pace_never_gives_a_worse_plan(capsys: Captured, problem_file: Path) -> None:
    objectives = []
    for slack in (0.0, 0.2, 1.0):
        code, shown = run_json(capsys, "solve", problem_file, "--slack", slack, "--gap", 0)
        assert code == 0
        assert isinstance(shown["objective"], float)
        objectives.append(shown["objective"])
    assert objectives == sorted(objectives, reverse=True)


def test_a_deadline_on_the_command_line_replaces_that_of_the_file(
    capsys: Captured, problem_file: Path
) -> None:
    deadline_s = 10 * (load_problem(problem_file).deadline_s or 0.0)
    _, shown = run_json(capsys, "solve", problem_file, "--deadline", deadline_s)
    assert shown["deadline_s"] == deadline_s


@pytest.mark.parametrize("operators", [1, 6])
def test_with_one_precision_every_method_gives_the_only_plan(
    capsys: Captured, tmp_path: Path, operators: int
) -> None:
    path = tmp_path / "single.json"
    words = ["generate", str(path), "--operators", str(operators), "--precisions", "1"]
    assert cli.main(words) == 0
    capsys.readouterr()
    plans = []
    for method in METHODS:
        code, shown = run_json(capsys, "solve", path, "--method", method)
        assert code == 0
        plans.append(shown["plan"])
    assert all(plan == plans[0] for plan in plans)


def test_evaluate_gives_what_the_library_gives(
    capsys: Captured, problem_file: Path, tmp_path: Path
) -> None:
    plan_file = tmp_path / "plan.json"
    assert cli.main(["solve", str(problem_file), "-o", str(plan_file)]) == 0
    capsys.readouterr()
    code, shown = run_json(capsys, "evaluate", problem_file, plan_file)
    expected = evaluate(load_problem(problem_file), load_plan(plan_file))
    assert code == 0
    assert shown["feasible"] is True
    assert shown["iteration_time_s"] == expected.iteration_time_s
    assert shown["peak_memory_bytes"] == expected.peak_memory_bytes
    assert shown["perturbation"] == expected.perturbation


def test_evaluate_exits_1_and_names_the_broken_rule(
    capsys: Captured, problem_file: Path, tmp_path: Path
) -> None:
    plan_file = tmp_path / "plan.json"
    assert cli.main(["solve", str(problem_file), "-o", str(plan_file)]) == 0
    capsys.readouterr()
    assert cli.main(["evaluate", str(problem_file), str(plan_file), "--deadline", "1e-9"]) == 1
    assert "iteration time" in capsys.readouterr().out


def test_a_hint_is_read_and_checked(capsys: Captured, problem_file: Path, tmp_path: Path) -> None:
    plan_file = tmp_path / "plan.json"
    assert cli.main(["solve", str(problem_file), "-o", str(plan_file)]) == 0
    capsys.readouterr()
    code, _ = run_json(capsys, "solve", problem_file, "--hint", plan_file)
    assert code == 0
    other = tmp_path / "other.json"
    assert cli.main(["generate", str(other), "--operators", "5"]) == 0
    capsys.readouterr()
    assert "hash" in run_refused(capsys, "solve", other, "--hint", plan_file)


def test_compare_has_one_row_per_method_in_the_order_asked(
    capsys: Captured, problem_file: Path
) -> None:
    code, shown = run_json(
        capsys, "compare", problem_file, "--methods", "exact,uniform,greedy", "--gap", 0
    )
    rows = shown["rows"]
    assert isinstance(rows, list)
    assert code == 0
    assert [row["method"] for row in rows] == ["exact", "uniform", "greedy"]
    exact, uniform, greedy = (row["objective"] for row in rows)
    assert exact <= greedy <= uniform


def test_pareto_writes_curve_and_points(
    capsys: Captured, problem_file: Path, tmp_path: Path
) -> None:
    image, points = tmp_path / "curve.svg", tmp_path / "points.csv"
    options = ["--slacks", "0.5,0", "--methods", "greedy,exact"]
    code, shown = run_json(
        capsys, "pareto", problem_file, *options, "--plot", image, "--csv", points
    )
    assert code == 0
    curve = shown["points"]
    assert isinstance(curve, list)
    assert [point["slack"] for point in curve] == [0.0, 0.5]
    with points.open() as stream:
        rows = list(csv.DictReader(stream))
    objectives = [row["objective"] for point in curve for row in point["rows"]]
    assert [float(row["objective"]) for row in rows] == objectives
    assert b"<svg" in image.read_bytes()


def test_explain_exits_1_and_names_kind_and_shortfall(
    capsys: Captured, infeasible_file: Path
) -> None:
    code, shown = run_json(capsys, "explain", infeasible_file)
    assert code == 1
    assert shown["feasible"] is False
    causes = shown["causes"]
    assert isinstance(causes, list)
    kind = load_problem(infeasible_file).devices[0].name
    assert [cause["device"] for cause in causes] == [kind]
    assert causes[0]["shortfall"] > 0
    assert cli.main(["explain", str(infeasible_file)]) == 1
    assert kind in capsys.readouterr().out


def test_explain_of_a_feasible_problem_exits_0(capsys: Captured, problem_file: Path) -> None:
    code, shown = run_json(capsys, "explain", problem_file)
    assert (code, shown["feasible"]) == (0, True)


@pytest.mark.parametrize("method", ["auto", "exact", "greedy", "uniform"])
def test_solve_exits_1_where_no_plan_exists(
    capsys: Captured, infeasible_file: Path, tmp_path: Path, method: str
) -> None:
    plan_file = tmp_path / "plan.json"
    code = cli.main(["solve", str(infeasible_file), "--method", method, "-o", str(plan_file)])
    assert code == 1
    assert not plan_file.exists()


def test_export_writes_one_kind_or_all(
    capsys: Captured, problem_file: Path, tmp_path: Path
) -> None:
    kind = load_problem(problem_file).devices[0].name
    joint, single = tmp_path / "joint.mps", tmp_path / "single.mps"
    assert run_json(capsys, "export", problem_file, joint)[0] == 0
    assert run_json(capsys, "export", problem_file, single, "--device", kind)[0] == 0
    assert 0 < single.stat().st_size < joint.stat().st_size
    assert "--device" in run_refused(capsys, "export", problem_file, single, "--device", "none")


def test_a_solution_read_back_is_the_plan_of_solve(
    capsys: Captured, problem_file: Path, tmp_path: Path
) -> None:
    mps, solution, plan_file = (tmp_path / name for name in ("p.mps", "p.sol", "plan.json"))
    assert run_json(capsys, "export", problem_file, mps)[0] == 0
    # In a process of its own: a second HiGHS in this one can crash (google/or-tools#5246).
    script = (
        "import sys, highspy; h = highspy.Highs(); h.setOptionValue('output_flag', False);"
        "h.setOptionValue('mip_rel_gap', 0.0); h.readModel(sys.argv[1]); h.run();"
        "h.writeSolution(sys.argv[2], 0)"
    )
    subprocess.run([sys.executable, "-c", script, mps, solution], check=True, stdout=-3)
    code, shown = run_json(
        capsys, "export", problem_file, mps, "--solution", solution, "--plan", plan_file
    )
    assert code == 0
    problem = load_problem(problem_file)
    best = solve(problem, method="exact", parameters=SolveParameters(relative_gap=0.0))
    evaluation = shown["evaluation"]
    assert isinstance(evaluation, dict)
    assert evaluation["perturbation"] == pytest.approx(best.objective, rel=1e-9)
    assert evaluate(problem, load_plan(plan_file)).feasible


def test_bits_are_shown_wherever_a_plan_is(capsys: Captured, tmp_path: Path) -> None:
    made, plan_file = tmp_path / "coded.json", tmp_path / "plan.json"
    arguments = ("--operators", 20, "--communication", "16,8,4", "--seed", 4)
    run_json(capsys, "generate", made, *arguments)
    problem = load_problem(made)
    assert [code.bits for code in problem.buckets[0].codes] == [16, 8, 4]
    code, shown = run_json(capsys, "solve", made, "--slack", 0, "--output", plan_file)
    plan = load_plan(plan_file)
    assert code == 0
    assert plan.communication
    assert shown["plan"]["communication"] == list(plan.communication)  # type: ignore[index]
    told = bits_text(plan.communication)
    assert cli.main(["solve", str(made), "--slack", "0"]) == 0
    assert f"note: gradients are sent in {told}" in capsys.readouterr().out
    assert cli.main(["evaluate", str(made), str(plan_file)]) in (0, 1)
    assert f"gradients in {told}, which adds" in capsys.readouterr().out
    assert cli.main(["compare", str(made), "--slack", "0", "--methods", "greedy,exact"]) == 0
    table = capsys.readouterr().out
    assert "gradients" in table
    assert told in " ".join(table.split())
    _, rows = run_json(capsys, "compare", made, "--slack", 0, "--methods", "exact")
    assert rows["rows"][0]["communication"] == list(plan.communication)  # type: ignore[index]
    line = run_refused(capsys, "export", made, tmp_path / "x.mps", "--device", "kind0")
    assert "must be None where buckets have codes" in line
    line = run_refused(capsys, "generate", made, "--communication", "64")
    assert "communication: must be whole numbers from 2 to 16" in line


def test_generate_gives_the_same_file_for_the_same_seed(capsys: Captured, tmp_path: Path) -> None:
    paths = [tmp_path / "a.json", tmp_path / "b.json", tmp_path / "c.json"]
    for path, seed in zip(paths, (7, 7, 8), strict=True):
        arguments = ["generate", path, "--operators", 20, "--devices", 1, "--seed", seed]
        code, shown = run_json(capsys, *arguments)
        assert code == 0
        assert shown["sha256"] == load_problem(path).sha256
    first, again, other = (path.read_bytes() for path in paths)
    assert first == again != other


# --- what is refused --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["solve", "{problem}", "--time-limit", "-1"], "--time-limit"),
        (["solve", "{problem}", "--time-limit", "nan"], "--time-limit"),
        (["solve", "{problem}", "--time-limit", "soon"], "--time-limit"),
        (["solve", "{problem}", "--gap", "1"], "--gap"),
        (["solve", "{problem}", "--threads", "0"], "--threads"),
        (["solve", "{problem}", "--threads", "two"], "--threads"),
        (["solve", "{problem}", "--seed", "-1"], "--seed"),
        (["solve", "{problem}", "--method", "best"], "--method"),
        (["solve", "{problem}", "--solver", "cplex"], "--solver"),
        (["solve", "{problem}", "--deadline", "nan"], "deadline"),
        (["solve", "{problem}", "--deadline", "-1"], "deadline"),
        (["solve", "{problem}", "--slack", "-1"], "slack"),
        (["solve", "{problem}", "--deadline", "1", "--slack", "1"], "not allowed with"),
        (["solve", "{problem}", "--output", "{missing}/plan.json"], "{missing}"),
        (["solve", "{problem}", "--hint", "{missing}"], "{missing}"),
        (["solve", "{problem}", "--tim", "1"], "--tim"),
        (["solve", "{missing}"], "{missing}"),
        (["solve", "{folder}"], "{folder}"),
        (["solve"], "PROBLEM"),
        (["sovle", "{problem}"], "sovle"),
        ([], "COMMAND"),
        (["evaluate", "{problem}", "{problem}"], "qsync-opt/plan"),
        (["compare", "{problem}", "--methods", "exact,best"], "best"),
        (["compare", "{problem}", "--methods", ""], "--methods"),
        (["compare", "{problem}", "--methods", "exact,exact"], "--methods"),
        (["pareto", "{problem}", "--slacks", "0,x"], "--slacks"),
        (["pareto", "{problem}", "--slacks", "-1"], "--slacks"),
        (["pareto", "{problem}", "--plot", "{folder}/curve.bmp"], "--plot"),
        (["pareto", "{problem}", "--csv", "{missing}/points.csv"], "{missing}"),
        (["export", "{problem}", "{folder}/p.lp"], "p.lp"),
        (["export", "{problem}", "{missing}/p.mps"], "{missing}"),
        (["export", "{problem}", "{folder}/p.mps", "--solution", "s.sol"], "--plan"),
        (["export", "{problem}", "{folder}/p.mps", "--plan", "p.json"], "--solution"),
        (["generate", "{folder}/g.json", "--operators", "0"], "--operators"),
        (["generate", "{folder}/g.json", "--precisions", "7"], "--precisions"),
        (["generate", "{folder}/g.json", "--tightness", "nan"], "--tightness"),
        (["generate", "{folder}/g.json", "--graph", "ring"], "--graph"),
        (["generate", "{folder}/g.json", "--costs", "free"], "--costs"),
        (["generate", "{missing}/g.json"], "{missing}"),
        (["demo", "{problem}", "--output", "{problem}/out"], "{problem}"),
        (["demo", "--steps", "0"], "--steps"),
        (["demo", "--task", "chess"], "--task"),
    ],
)
def test_bad_usage_is_one_line_that_names_it(
    capsys: Captured, problem_file: Path, tmp_path: Path, arguments: list[str], named: str
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    places = {"problem": problem_file, "missing": tmp_path / "missing", "folder": folder}
    line = run_refused(capsys, *(argument.format(**places) for argument in arguments))
    assert named.format(**places) in line
    assert not list(folder.iterdir())


@pytest.mark.parametrize("command", ["solve", "compare", "pareto", "explain"])
@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "bad.json"),
        (b"{", "bad.json"),
        (b"[]", "bad.json"),
        (b"\xff\xfe", "bad.json"),
        (b"[" * 100_000, "bad.json"),
        (b'{"format": "qsync-opt/problem", "version": 99}', "version"),
        (b'{"format": "something/else", "version": 1}', "format"),
        (b'{"format": NaN}', "bad.json"),
    ],
)
def test_a_bad_file_is_one_line(
    capsys: Captured, tmp_path: Path, command: str, content: bytes, named: str
) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    assert named in run_refused(capsys, command, path)


def test_control_characters_of_a_file_do_not_reach_the_terminal(
    capsys: Captured, problem_file: Path, tmp_path: Path
) -> None:
    data = json.loads(problem_file.read_text())
    data["name"] = "bad\x1b[31m\nname [red]"
    path = tmp_path / "named.json"
    path.write_text(json.dumps(data))
    assert cli.main(["solve", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "[red]" in shown
    data["operators"][0]["kind"] = 3
    data["operators"][0]["name"] = "bad\x1b[31m\nname"
    data["operators"][1]["name"] = "bad\x1b[31m\nname"
    path.write_text(json.dumps(data))
    assert "\x1b" not in run_refused(capsys, "solve", path)


# --- the process ------------------------------------------------------------------------


def test_help_and_version_exit_0(capsys: Captured) -> None:
    for arguments in (["--help"], ["--version"], ["solve", "--help"]):
        assert cli.main(arguments) == 0
    assert "130" in capsys.readouterr().out


def test_a_process_reports_bad_input_without_a_traceback(tmp_path: Path) -> None:
    done = start("solve", tmp_path / "missing.json", stdout=subprocess.PIPE)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "missing.json" in done.stderr


@pytest.mark.parametrize("form", [["--json"], []])
def test_a_reader_that_goes_away_is_no_error(form: list[str], tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        path = tmp_path / "problem.json"
        done = start("generate", path, "--operators", 5, *form, stdout=write_end)
    finally:
        os.close(write_end)
    assert (done.returncode, done.stderr) == (141, "")
    assert len(load_problem(path).operators) == 5


def test_a_closed_standard_output_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "problem.json"
    done = start(
        "generate", path, "--operators", 5, stdout=subprocess.DEVNULL, preexec_fn=_close_stdout
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(load_problem(path).operators) == 5


def _close_stdout() -> None:
    os.close(1)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_under_standard_output_is_one_line(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = start("generate", tmp_path / "p.json", "--operators", 5, stdout=full)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "standard output" in done.stderr


def test_progress_goes_to_the_terminal_and_never_into_the_result(problem_file: Path) -> None:
    terminal, device = os.openpty()
    environment = {**os.environ, "TERM": "xterm", "NO_COLOR": ""}
    command = [sys.executable, "-m", "qsync_opt.cli", "solve", str(problem_file), "--json"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=device, env=environment
    ) as process:
        os.close(device)
        shown = b""
        # Read while it runs: a full terminal buffer would stop it. Linux ends it with EIO.
        with contextlib.suppress(OSError):
            while part := os.read(terminal, 4096):
                shown += part
        assert process.stdout is not None
        result = process.stdout.read()
    os.close(terminal)
    assert process.returncode == 0
    assert json.loads(result)["plan"] is not None
    assert b"\x1b[" in shown


#: Solvers that print, through C's buffered stdout and straight to the descriptor.
NOISY = """
import ctypes, importlib, os, sys

def noisy(plain):
    def call(*arguments):
        ctypes.CDLL(None).printf(b"a line of a solver\\n")
        os.write(1, b"another line\\n")
        return plain(*arguments)
    return call

for name in ("incumbent", "minima", "kind"):
    module = importlib.import_module(f"qsync_opt.optimize.{name}")
    module.evaluate_device = noisy(module.evaluate_device)
from qsync_opt import cli, options
code = cli.main(sys.argv[1:])
ctypes.CDLL(None).printf(b"after the command\\n")
sys.exit(code)
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["solve", "{problem}"],
        ["compare", "{problem}"],
        ["pareto", "{problem}", "--slacks", "0", "--methods", "exact"],
        ["explain", "{problem}"],
        ["export", "{problem}", "{folder}/p.mps"],
        ["demo", "{problem}", "--output", "{folder}", "--slacks", "0"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_what_solvers_print_stays_out_of_the_result(
    small_problem: AllocationProblem, tmp_path: Path, arguments: list[str]
) -> None:
    path = tmp_path / "problem.json"
    save_problem(replace(small_problem, deadline_s=None, slack=0.1), path)  # so export solves
    words = [argument.format(problem=path, folder=tmp_path) for argument in arguments]
    done = subprocess.run(
        [sys.executable, "-c", NOISY, *words, "--json"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    result, after = done.stdout.splitlines()
    assert isinstance(json.loads(result), dict)
    assert after == "after the command"  # standard output is whole again


@pytest.mark.parametrize("binary", ["/bin/false", "/bin/true", "/missing/cbc"])
def test_a_solver_that_fails_is_named_and_auto_falls_back(
    capsys: Captured, problem_file: Path, monkeypatch: pytest.MonkeyPatch, binary: str
) -> None:
    monkeypatch.setattr("qsync_opt.optimize.cbc._binary", lambda: binary)
    words = ["solve", problem_file, "--solver", "cbc", "--plain", "--method"]
    code, shown = run_json(capsys, *words, "exact")
    assert (code, shown["status"], shown["plan"]) == (1, "solver_error", None)
    code, shown = run_json(capsys, *words, "auto")
    assert (code, shown["method"], shown["status"]) == (0, "greedy", "heuristic")
    assert str(shown["fallback_reason"]).count("solver cbc: ") == 1
    assert shown["plan"] is not None


def test_an_interrupted_solve_shows_its_plan_and_exits_130(
    capsys: Captured, problem_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = replace(solve(load_problem(problem_file)), status=SolveStatus.INTERRUPTED)

    def interrupted(problem: AllocationProblem, **options: object) -> SolveResult:
        return result

    monkeypatch.setattr("qsync_opt.optimize.solve.solve", interrupted)
    code, shown = run_json(capsys, "solve", problem_file)
    assert code == 130
    assert shown["status"] == "interrupted"
    assert shown["plan"] is not None


@pytest.mark.parametrize("threads", [1, 2])
def test_ctrl_c_while_a_solver_runs_ends_with_what_is_there(
    capsys: Captured, problem_file: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    """The program of the first kind sends Ctrl-C and goes on until it is told to stop."""
    begun: list[str] = []

    def endless(
        program: LinearProgram, *, interrupter: Interrupter, **options: object
    ) -> ProgramSolution:
        begun.append(program.name)
        if len(begun) == 1:
            os.kill(os.getpid(), signal.SIGINT)
        while not interrupter.stopped:
            time.sleep(0.01)
        return ProgramSolution(
            status="unknown", values=None, objective=None, bound=-math.inf, message=""
        )

    monkeypatch.setattr("qsync_opt.optimize.proposals.solve_program", endless)
    words = ["solve", problem_file, "--plain", "--time-limit", "none", "--threads", threads]
    code, shown = run_json(capsys, *words)
    assert (code, shown["status"]) == (130, "interrupted")
    assert 1 <= len(begun) <= threads  # and none to start with, or to fall back on


def test_ctrl_c_before_there_is_anything_exits_130(
    capsys: Captured, problem_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(path: str) -> AllocationProblem:
        signal.raise_signal(signal.SIGINT)
        return load_problem(path)

    monkeypatch.setattr("qsync_opt.files.load_problem", interrupt)
    assert cli.main(["solve", str(problem_file)]) == 130
    assert capsys.readouterr().err == "qsync-opt: interrupted\n"


def test_no_result_is_written_over_what_is_read(
    capsys: Captured, problem_file: Path, tmp_path: Path
) -> None:
    before = problem_file.read_bytes()
    link = tmp_path / "link.json"
    link.symlink_to(problem_file)
    for output in (problem_file, link):
        told = run_refused(capsys, "solve", problem_file, "--output", output)
        assert "--output: must not be a file that the command reads" in told
    assert problem_file.read_bytes() == before
    assert cli.main(["solve", str(problem_file), "-o", str(tmp_path / "plan.json")]) == 0
    assert cli.main(["solve", str(problem_file), "-o", str(tmp_path / "plan.json")]) == 0
