"""Every kind of bad input through the command line: exit code 2, one line that names the fault.

The rules themselves are tested with the modules that hold them; here it counts that none of
them ends in a traceback, a hang or half a file on the way to the user.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qsync_opt import cli, files

Captured = pytest.CaptureFixture[str]
Change = Callable[[dict[str, Any]], object]


def refused(capsys: Captured, *arguments: object) -> str:
    """The one line of a command that exits 2 and shows nothing else."""
    code = cli.main([*map(str, arguments)])
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    assert captured.err.startswith("qsync-opt")
    assert captured.err.count("\n") == 1
    assert captured.err.endswith("\n")
    return captured.err


def put(*steps: str | int, value: object) -> Change:
    def change(data: Any) -> None:
        for step in steps[:-1]:
            data = data[step]
        data[steps[-1]] = value

    return change


def cycle_of_followers(data: dict[str, Any]) -> None:
    data["operators"][3]["follows"], data["operators"][4]["follows"] = [4], [3]


def no_precision(data: dict[str, Any]) -> None:
    device = data["devices"][0]
    for name in ("forward_s", "backward_s", "perturbation"):
        device[name][2] = [None] * len(data["precisions"])


def contradictory_pins(data: dict[str, Any]) -> None:
    names = [operator["name"] for operator in data["operators"] if not operator.get("follows")]
    data["groups"] = [names[:2]]
    data["devices"][0]["pins"] = dict(zip(names[:2], data["precisions"][:2], strict=True))


D0 = ("devices", 0)
CHANGES: list[tuple[Change, str]] = [
    (put(*D0, "forward_s", 0, 0, value=-1), "devices.kind0.forward_s[0][0]"),
    (put(*D0, "memory_bytes", value=-5), "devices[0].memory_bytes"),
    (put(*D0, "memory_bytes", value=1.5), "devices[0].memory_bytes"),
    (put(*D0, "memory_bytes", value="12"), "devices[0].memory_bytes"),
    (put(*D0, "memory_bytes", value=10**4000), "devices[0].memory_bytes"),
    (put(*D0, "workers", value=0), "devices.kind0.workers"),
    (put(*D0, "workers", value=True), "devices[0].workers"),
    (put(*D0, "batch_share", value=0.9), "devices[*].batch_share"),
    (lambda data: data["devices"][0]["forward_s"][0].pop(), "devices[0].forward_s[0]"),
    (lambda data: data["devices"][0]["forward_s"].pop(), "devices.kind0"),
    (put("precisions", 0, value="fp33"), "precisions[0]"),
    (put("version", value=2), "version"),
    (put("version", value="1"), "version"),
    (put("format", value="qsync-opt/plan"), "format"),
    (put("extra", value=1), "extra"),
    (put(*D0, "extra", value=1), "devices[0]"),
    (lambda data: data.pop("operators"), "operators"),
    (put("operators", value=[]), "operators"),
    (put("devices", value=[]), "devices"),
    (put("operators", 0, "bucket", value=99), "operators[0].bucket"),
    (put("operators", 0, "name", value=None), "operators[0].name"),
    (put("deadline_s", value=0), "deadline_s"),
    (put("slack", value=0.5), "slack"),
    (cycle_of_followers, "operators[3].follows"),
    (lambda data: data["devices"][0]["tensors"][0].update(producer=7), "tensors[0].consumers"),
    (no_precision, "at least one precision"),
    (contradictory_pins, "devices.kind0.pins"),
    (put(*D0, "pins", value={"nobody": "fp32"}), "devices.kind0.pins"),
    (put("groups", value=[["nobody"]]), "groups[0]"),
]


@pytest.mark.parametrize(("change", "named"), CHANGES)
def test_a_problem_that_breaks_a_rule(
    capsys: Captured, problem_file: Path, tmp_path: Path, change: Change, named: str
) -> None:
    data = json.loads(problem_file.read_text())
    change(data)
    path, plan = tmp_path / "changed.json", tmp_path / "plan.json"
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)  # a file may hold longer numbers than Python cares to print
    try:
        path.write_text(json.dumps(data))
    finally:
        sys.set_int_max_str_digits(limit)
    assert named in refused(capsys, "solve", path, "--output", plan)
    assert not plan.exists()


@pytest.mark.parametrize(
    "edit",
    [
        lambda text: text.replace('"slack":0.0', '"slack":NaN'),
        lambda text: text.replace('"slack":0.0', '"slack":-Infinity'),
        lambda text: text.replace('"slack":0.0', '"slack":1e400'),
        lambda text: text.replace('"slack":0.0', '"slack":' + "9" * 100_000),
        lambda text: text.replace('"slack":0.0', '"slack":' + "[" * 100_000 + "]" * 100_000),
        lambda text: text.replace("{", '{"slack":0.0,', 1),
        lambda text: text[: len(text) // 2],
        lambda text: text + "x",
        lambda text: text + "\0",
        lambda text: "\ufeff" + text,
        lambda text: "",
    ],
    ids=[
        "nan",
        "inf",
        "1e400",
        "digits",
        "deep",
        "twice",
        "truncated",
        "trailing",
        "nul",
        "bom",
        "empty",
    ],
)
def test_a_file_that_is_no_json_of_ours(
    capsys: Captured, problem_file: Path, tmp_path: Path, edit: Callable[[str], str]
) -> None:
    text = json.dumps(json.loads(problem_file.read_text()), separators=(",", ":"))
    path = tmp_path / "changed.json"
    path.write_text(edit(text))
    assert path.read_text() != text
    line = refused(capsys, "solve", path)
    assert str(path) in line or "slack" in line
    assert len(line) < 1000


def test_an_enormous_file_is_refused_by_its_size(capsys: Captured, tmp_path: Path) -> None:
    path = tmp_path / "enormous.json"
    with path.open("wb") as stream:
        stream.truncate(files.LARGEST_FILE_BYTES * 1000)  # sparse: takes no room
    assert str(path) in refused(capsys, "solve", path)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--time-limit", "-1"], "--time-limit"),
        (["--time-limit", "inf"], "--time-limit"),
        (["--gap", "2"], "--gap"),
        (["--gap", "nan"], "--gap"),
        (["--threads", "0"], "--threads"),
        (["--threads", "1.5"], "--threads"),
        (["--seed", "-1"], "--seed"),
        (["--solver", "none"], "--solver"),
        (["--method", "none"], "--method"),
        (["--slack", "-1"], "slack"),
        (["--slack", "nan"], "slack"),
        (["--slack", "1e7"], "slack"),
        (["--deadline", "0"], "deadline"),
        (["--deadline", "inf"], "deadline"),
        (["--deadline", "1", "--slack", "1"], "--slack"),
        (["--hint", ""], "must be a regular file"),
        (["--output", ""], "must be a regular file"),
        (["--output", "{folder}"], "{folder}"),
        (["--output", "{folder}/missing/plan.json"], "{folder}/missing"),
        (["--output", "/dev/null"], "/dev/null"),
    ],
)
def test_an_option_out_of_range(
    capsys: Captured,
    problem_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    named: str,
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("a solve was started")

    monkeypatch.setattr("qsync_opt.optimize.solve.solve", never)
    folder = tmp_path / "folder"
    folder.mkdir()
    words = [option.format(folder=folder) for option in options]
    assert named.format(folder=folder) in refused(capsys, "solve", problem_file, *words)
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (put("devices", "kind0", value={}), "kind0"),
        (lambda data: data["devices"].pop("kind0"), "kind0"),
        (lambda data: data["devices"].update(kind9=data["devices"]["kind0"]), "kind9"),
        (lambda data: data["devices"]["kind0"].popitem(), "kind0"),
        (lambda data: data["devices"]["kind0"].update(nobody="fp32"), "nobody"),
        (lambda data: data["devices"]["kind0"].update(linear_0="fp33"), "fp33"),
        (lambda data: data["devices"]["kind0"].update(linear_0="fp8"), "fp8"),
        (lambda data: data["devices"]["kind0"].update(linear_0=None), "linear_0"),
        (put("problem", value="0" * 64), "hash"),
        (put("problem", value=3), "problem"),
        (put("version", value=0), "version"),
    ],
)
def test_a_plan_that_does_not_fit(
    capsys: Captured, problem_file: Path, tmp_path: Path, change: Change, named: str
) -> None:
    path = tmp_path / "plan.json"
    assert cli.main(["solve", str(problem_file), "-o", str(path)]) == 0
    capsys.readouterr()
    data = json.loads(path.read_text())
    assert "linear_0" in data["devices"]["kind0"]
    change(data)
    path.write_text(json.dumps(data))
    assert named in refused(capsys, "evaluate", problem_file, path)
    assert named in refused(capsys, "solve", problem_file, "--hint", path)


@pytest.mark.parametrize("content", [b"", b"\0" * 100, b"x1 1\n", b"Optimal\nx nan\n", b"\xff\xfe"])
def test_a_solution_file_that_is_none(
    capsys: Captured, problem_file: Path, tmp_path: Path, content: bytes
) -> None:
    mps, solution, plan = (tmp_path / name for name in ("p.mps", "p.sol", "plan.json"))
    assert cli.main(["export", str(problem_file), str(mps)]) == 0
    capsys.readouterr()
    solution.write_bytes(content)
    words = ["export", problem_file, mps, "--solution", solution, "--plan", plan]
    assert str(solution) in refused(capsys, *words)
    assert not plan.exists()


@pytest.mark.parametrize("deadline_s", ["5e-324", "1e-300", "1e-9"])
def test_a_deadline_that_is_hopeless_is_infeasible(
    capsys: Captured, problem_file: Path, deadline_s: str
) -> None:
    for method in ("exact", "greedy", "uniform", "random", "brute_force", "auto"):
        words = ["solve", str(problem_file), "--deadline", deadline_s, "--method", method, "--json"]
        assert cli.main(words) == 1
        shown = json.loads(capsys.readouterr().out)
        assert shown["status"] == "infeasible"
    assert cli.main(["explain", str(problem_file), "--deadline", deadline_s]) == 1
    assert "late by" in capsys.readouterr().out


def test_a_process_ends_with_one_line_and_no_traceback(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text('{"format": "qsync-opt/problem", "version": 1, "slack": NaN}')
    for command in ("solve", "compare", "pareto", "explain"):
        done = subprocess.run(
            [sys.executable, "-m", "qsync_opt.cli", command, str(path)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.count("\n") == 1
        assert str(path) in done.stderr
