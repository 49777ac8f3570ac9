"""`qsync-opt train` in one process: results, files, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qsync_opt import cli
from qsync_opt.files import (
    load_graph,
    save_costs,
    save_perturbations,
    save_plan,
    save_problem,
)
from qsync_opt.optimize.generate import generate_problem
from qsync_opt.plan import PrecisionPlan
from qsync_opt.precision import Precision
from qsync_opt.runtime.metrics import read_metrics
from qsync_opt.train_commands import _without_ranks
from tests.cost_cases import made_up_costs, made_up_table

Captured = pytest.CaptureFixture[str]

MODEL = """
import torch
from torch import nn
from torch.nn import functional


def batches(step, rows, width=6):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(rows.stop, width, generator=generator)[rows.start:]
    return x, x[:, :2] * 0.5


def build(batch_size=4, width=6, seed=0):
    torch.manual_seed(seed)
    print("built by a user who prints")
    model = nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, 2))
    return model, batches(0, range(batch_size), width), functional.mse_loss
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    return path


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    row = {"0": Precision.INT8, "2": Precision.BF16}
    devices = {"strong": dict.fromkeys(row, Precision.FP32), "weak": row}
    path = tmp_path / "plan.json"
    save_plan(PrecisionPlan(problem="0" * 64, devices=devices), path)
    return path


def run(*words: object) -> int:
    return cli.main(["train", *map(str, words)])


def refused(capsys: Captured, *words: object) -> str:
    assert run(*words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.removeprefix("built by a user who prints\n")
    assert lines.count("\n") == 1
    return lines


def test_it_trains_keeps_and_goes_on(
    model: Path, plan: Path, tmp_path: Path, capsys: Captured
) -> None:
    folder = tmp_path / "job"
    words = [model, "--plan", plan, "--kind", "weak", "-o", folder, "--learning-rate", "0.05"]
    words += ["--set", "width=7"]
    assert run(*words, "--steps", 10, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["status"], told["first_step"], told["steps"]) == ("finished", 0, 10)
    assert told["checkpoint_step"] == 10
    assert run(*words, "--steps", 30) == 0
    text = capsys.readouterr().out
    assert "this run from 10" in text
    assert str(folder) in text
    rows = read_metrics(folder)[0]
    assert [row.step for row in rows] == list(range(30))
    assert {row.kind for row in rows} == {"weak"}
    assert rows[-1].loss < 0.5 * rows[0].loss


def test_a_kind_must_be_named_where_there_are_several(
    model: Path, plan: Path, tmp_path: Path, capsys: Captured
) -> None:
    words = (model, "--plan", plan, "--steps", 1, "-o", tmp_path / "job")
    assert "strong, weak" in refused(capsys, *words)
    assert "strong" in refused(capsys, *words, "--kind", "other")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--steps", "0"], "--steps"),
        (["--steps", "1", "--uniform", "fp4"], "--uniform"),
        (["--steps", "1", "--autocast", "int8"], "--autocast"),
        (["--steps", "1", "--shares", "weak"], "--shares"),
        (["--steps", "1", "--shares", "weak=0.5,weak=0.5"], "--shares: must name each"),
        (["--steps", "1", "--optimizer", "lion"], "--optimizer"),
        (["--steps", "1", "--ranks", "strong"], "--ranks"),
        (["--steps", "1", "--set", "depth=3"], "depth"),
    ],
)
def test_bad_options_are_one_line(
    words: list[str], said: str, model: Path, tmp_path: Path, capsys: Captured
) -> None:
    assert said in refused(capsys, model, "-o", tmp_path / "job", *words)


def test_a_folder_that_cannot_be_made_ends_it_early(
    model: Path, tmp_path: Path, capsys: Captured
) -> None:
    assert run(model, "--steps", 1, "-o", model / "job") == 1
    assert "cannot be written" in capsys.readouterr().err


def test_a_plan_that_does_not_fit_is_told_before_ranks_are_started(
    model: Path, plan: Path, tmp_path: Path, capsys: Captured
) -> None:
    problem = tmp_path / "problem.json"
    save_problem(generate_problem(operators=4, precisions=2, devices=1, seed=0), problem)
    words = (model, "--plan", plan, "--steps", 1, "-o", tmp_path / "job")
    for ranks in ([], ["--ranks", "strong:1,weak:1"], ["--kind", "weak"]):
        told = refused(capsys, *words, "--problem", problem, *ranks)
        assert f"{plan}: problem: must be" in told
    told = refused(capsys, *words, "--ranks", "strong:1,other:1")
    assert "--ranks: must be of the plan's kinds (strong, weak), got 'other'" in told
    assert not (tmp_path / "job").exists()


def test_ranks_get_every_other_option() -> None:
    words = ["train", "m.py", "--ranks", "a:1", "--steps", "3", "--ranks=b:1", "--json"]
    assert _without_ranks(words) == ["train", "m.py", "--steps", "3", "--json"]


def test_a_trace_of_training_has_operators_for_replay(
    model: Path, tmp_path: Path, capsys: Captured
) -> None:
    graph, costs, table, problem, plan, trace = (
        tmp_path / f"{name}.json"
        for name in ("graph", "costs", "table", "problem", "plan", "trace")
    )
    assert cli.main(["capture", str(model), "-o", str(graph)]) == 0
    save_costs(made_up_costs(load_graph(graph)), costs)
    save_perturbations(made_up_table(load_graph(graph)), table)
    words = ["build", graph, "--kind", f"device={costs}", "--perturbation", table, "-o", problem]
    assert cli.main([*map(str, words)]) == 0
    assert cli.main(["solve", str(problem), "--method", "greedy", "-o", str(plan)]) == 0
    given = ["--plan", plan, "--problem", problem, "--graph", graph, "--trace", trace]
    for end in (f"wrote {trace}\n", f"no step was left for {trace}\n"):
        assert run(model, *given, "--steps", 4, "-o", tmp_path / "job") == 0
        assert capsys.readouterr().out.endswith(end)
    words = ["replay", problem, plan, "--against", trace, "--json"]
    assert cli.main([*map(str, words)]) == 0
    rows = json.loads(capsys.readouterr().out)["differences"]
    assert {row["operator"] for row in rows} == {"0", "1", "2", "loss.mse_loss"}
    assert all(row["measured_s"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--refine-interval", "5"], "problem: must be given to refine the plan"),
        (["--refine-interval", "-1"], "--refine-interval"),
        (["--refine-samples", "0"], "--refine-samples"),
        (["--batch-sizing", "--shares", "strong=0.5,weak=0.5"], "--batch-sizing"),
        (["--communication", "g99"], "bits"),
        (["--communication", "eight"], "communication"),
        (["--trace", "missing/trace.json"], "must be in a folder"),
        (["--trace-steps", "0"], "--trace-steps"),
    ],
)
def test_options_of_refinement_and_rivals_are_checked(
    model: Path, plan: Path, tmp_path: Path, capsys: Captured, words: list[str], told: str
) -> None:
    common = [model, "--plan", plan, "--kind", "weak", "--steps", 2, "-o", tmp_path / "job"]
    assert told in refused(capsys, *common, *words)
    assert not list(tmp_path.glob("job/step-*"))
