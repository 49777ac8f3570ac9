"""`qsync-opt report`: from files to a page, and one line for every mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qsync_opt import cli
from qsync_opt.files import load_problem, save_plan
from qsync_opt.optimize.evaluate import evaluate
from qsync_opt.report import ReportInputs
from qsync_opt.simulate.replay import replay
from qsync_opt.simulate.trace import save_trace
from tests.unit.report.jobs import write_metrics
from tests.unit.report.pages import read_page, table_of

Captured = pytest.CaptureFixture[str]


def test_every_file_that_is_given_is_shown(
    inputs: ReportInputs, problem_file: Path, tmp_path: Path, capsys: Captured
) -> None:
    problem = load_problem(problem_file)
    for name, plan in inputs.plans.items():
        save_plan(plan, tmp_path / f"plan-{name}.json")
    (tmp_path / "train-exact").mkdir()
    write_metrics(tmp_path / "train-exact", problem)
    exact = inputs.plans["exact"]
    save_trace(problem, replay(problem, exact), tmp_path / "trace.json")
    csv = tmp_path / "points.csv"
    words = ["pareto", problem_file, "--slacks", "0", "--methods", "greedy", "--csv", csv]
    assert cli.main([*map(str, words)]) == 0
    capsys.readouterr()
    words = ["report", problem_file, "--plan", tmp_path / "plan-exact.json"]
    words += ["--plan", f"rival={tmp_path / 'plan-uniform.json'}"]
    words += ["--metrics", tmp_path / "train-exact", "--pareto", csv]
    words += ["--trace", f"exact={tmp_path / 'trace.json'}"]
    words += ["-o", tmp_path / "out", "--json", "--no-open"]
    assert cli.main([*map(str, words)]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    shown = json.loads(captured.out)
    assert shown["report"] == str(tmp_path / "out" / "report.html")
    assert all(Path(name).stat().st_size for name in shown["files"])
    page = read_page(Path(shown["report"]).read_text())
    heads, rows = table_of(page, "plans")
    assert [row[0] for row in rows] == ["exact", "rival"]
    assert float(rows[0][heads.index("perturbation")]) == evaluate(problem, exact).perturbation
    assert len(page.find("figure")) == 6
    (told,) = [p.words() for p in page.find("p") if p.attributes.get("class") == "missing"]
    assert "--graph" in told


def test_solve_finds_plans_and_curve(
    problem_file: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []

    def note(url: str) -> bool:
        opened.append(url)
        return True

    monkeypatch.setattr("webbrowser.open", note)
    words = ["report", problem_file, "--solve", "--methods", "uniform,greedy", "--slacks", "0,0.1"]
    words += ["-o", tmp_path / "out", "--open"]
    assert cli.main([*map(str, words)]) == 0
    assert "report.html" in capsys.readouterr().out
    assert opened == [(tmp_path / "out" / "report.html").as_uri()]
    page = read_page((tmp_path / "out" / "report.html").read_text())
    assert [row[0] for row in table_of(page, "plans")[1]] == ["uniform", "greedy"]
    assert len(table_of(page, "pareto")[1]) == 4


def test_nobody_there_to_look_means_no_browser(
    problem_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    def refuse(url: str) -> bool:
        raise AssertionError(url)

    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr("webbrowser.open", refuse)
    assert cli.main(["report", str(problem_file), "-o", str(tmp_path)]) == 0
    capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--plan", "a="], "--plan"),
        (["--plan", "{plan}", "--plan", "{plan}"], "--plan: must have each name once"),
        (["--plan", "{folder}/none.json"], "none.json"),
        (["--metrics", "{folder}"], "rank-0.jsonl"),
        (["--trace", "exact={plan}"], "Chrome trace"),
        (["--pareto", "{plan}"], "columns"),
        (["--graph", "g.json"], "--kind"),
        (["--kind", "a=b"], "--graph"),
        (["-o", "{plan}/out"], "{plan}"),
        (["--methods", "best"], "--methods"),
        (["--open"], "--open"),
    ],
)
def test_mistakes_are_told_in_one_line(
    inputs: ReportInputs,
    problem_file: Path,
    tmp_path: Path,
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    named: str,
) -> None:
    monkeypatch.setattr("webbrowser.open", lambda url: False)
    monkeypatch.chdir(tmp_path)
    plan, folder = tmp_path / "plan-exact.json", tmp_path / "folder"
    save_plan(inputs.plans["exact"], plan)
    folder.mkdir()
    words = [word.format(plan=plan, folder=folder) for word in arguments]
    assert cli.main(["report", str(problem_file), *words]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert named.format(plan=plan) in captured.err
