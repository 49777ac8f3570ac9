"""Everything in the README that can be executed is."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest

from qsync_opt import cli

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)
    return [text for name, text in fenced if name == language]


def test_the_example_prints_what_the_readme_says() -> None:
    (code,) = blocks("python")
    (expected,) = blocks("text")
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        exec(compile(code, "README.md", "exec"), {})
    assert shown.getvalue() == expected


def test_the_files_to_read_exist() -> None:
    named = re.findall(r"^\d\. `([^`]+)`", README, flags=re.MULTILINE)
    assert len(named) == 6
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_the_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = set(re.findall(r"make ([a-z]+)\b", README))
    assert named
    assert named <= targets


def test_the_commands_run(
    problem_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [line for block in blocks("") for line in block.splitlines()]
    commands = [line for line in lines if line.startswith("qsync-opt ")]
    assert len(commands) == 7
    for command in commands:
        arguments = shlex.split(command.replace("PROBLEM", str(problem_file)))
        assert cli.main(arguments[1:]) == 0, command
        assert capsys.readouterr().err == ""


def test_the_commands_from_a_model_to_a_plan_fit_together() -> None:
    (block,) = blocks("sh")
    lines = block.replace("\\\n", " ").splitlines()
    made: set[str] = set()
    names = []
    for line in lines:
        program, *arguments = shlex.split(line)
        assert program == "qsync-opt"
        options = vars(cli.parser().parse_args(arguments))
        names.append(options["command"])
        wanted = [options.get(key) for key in ("graph", "perturbation", "all_reduce", "problem")]
        wanted += [options["plan"]] if options["command"] == "replay" else []
        wanted += [kind.split("=")[1] for kind in options.get("kind") or ()]
        assert {name for name in wanted if name} <= made, line
        made |= {options[key] for key in ("output", "trace") if options.get(key)}
        if model := options.get("model"):
            assert (ROOT / model).is_file()
    assert names == ["capture", "perturb", "measure", "measure", "build", "solve", "replay"]


def test_the_exit_codes_are_those_of_the_code() -> None:
    from qsync_opt import commands

    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", README, flags=re.MULTILINE)}
    assert listed == {v for k, v in vars(commands).items() if k.startswith("EXIT_")}
