"""`measure` and `build` on the command line, from a model file to a problem that is solved."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from qsync_opt import cli
from qsync_opt.files import load_costs, load_graph, load_problem, save_costs
from tests.cost_cases import made_up_costs

MODEL = """
import torch
from torch import nn

def build(batch_size=4, width=8, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 3))
    batch = torch.randn(batch_size, 6), torch.randint(0, 3, (batch_size,))
    return model, batch, nn.functional.cross_entropy
"""


def run(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, object]:
    code = cli.main([*map(str, words), "--json"])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    value = json.loads(captured.out)
    assert isinstance(value, dict)
    return value


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert cli.main([*map(str, words)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, its graph and a table of perturbations."""
    path = tmp_path_factory.mktemp("commands")
    (path / "net.py").write_text(MODEL)
    model, graph = path / "net.py", path / "graph.json"
    capture = ["capture", str(model), "-o", str(graph), "--set", "width=16"]
    perturb = ["perturb", str(model), str(graph), "-o", str(path / "table.json")]
    assert cli.main(capture) == 0
    assert cli.main([*perturb, "--method", "random"]) == 0
    return path


def test_from_a_graph_to_a_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph, costs, problem = (folder / name for name in ("graph.json", "costs.json", "problem.json"))
    told = run(capsys, "measure", graph, "-o", costs, "--precisions", "fp32,bf16", "--threads", "1")
    assert told["precisions"] == ["fp32", "bf16"]
    assert told["buckets"] == [4 * (16 * 6 + 16 + 3 * 16 + 3)]
    assert not (folder / "costs.json.partial").exists()
    assert (
        load_costs(costs).graph_sha256
        == run(
            capsys, "capture", folder / "net.py", "-o", folder / "again.json", "--set", "width=16"
        )["sha256"]
    )
    run(
        capsys,
        "build",
        graph,
        "--kind",
        f"one={costs},memory_gb=0.5",
        "--perturbation",
        folder / "table.json",
        "-o",
        problem,
        "--slack",
        "0.1",
    )
    built = load_problem(problem)
    assert built.slack == 0.1
    assert built.devices[0].memory_bytes == 500_000_000
    assert run(capsys, "solve", problem)["status"] == "optimal"


def test_a_problem_whose_buckets_have_other_bits(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph, costs, problem = (folder / n for n in ("graph.json", "made-up.json", "bits.json"))
    table = folder / "gradients.json"
    save_costs(made_up_costs(load_graph(graph)), costs)
    perturb = ("perturb", folder / "net.py", graph, "-o", table)
    run(capsys, *perturb, "--gradients", "--batches", "2", "--set", "width=16", "--set", "seed=1")
    build = ("build", graph, "--kind", f"one={costs},workers=2", "-o", problem)
    with_table = (*build, "--perturbation", table)
    told = run(capsys, *with_table, "--bits", "8,16")
    assert told["bits"] == [[32, 16, 8]] * 2
    built = load_problem(problem)
    assert [code.bits for code in built.buckets[0].codes] == [16, 8]
    # Nothing in it fills a quantisation bucket: a code has nothing to lose.
    assert [code.perturbation == 0.0 for code in built.buckets[0].codes] == [False, True]
    run(capsys, *with_table)
    assert not load_problem(problem).has_codes
    without = (*build, "--perturbation", folder / "table.json", "--bits", "8")
    assert "Compute it with --gradients" in refused(capsys, *without)
    assert "Measure on the group of the job with --codes 6" in refused(
        capsys, *with_table, "--bits", "6"
    )
    alone = folder / "alone.json"
    save_costs(replace(load_costs(costs), all_reduce=None), alone)
    assert f"--all-reduce: must be costs that hold times of all-reduces, got '{alone}'" in refused(
        capsys, *with_table, "--all-reduce", alone
    )
    wrong = refused(capsys, *with_table, "--bits", "eight")
    assert "--bits: must be whole numbers, separated by commas" in wrong


def test_what_is_wrong_is_told_in_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph, costs = folder / "graph.json", folder / "none.json"
    measure = ("measure", graph, "-o", costs)
    assert "--precisions: must be of" in refused(capsys, *measure, "--precisions", "fp64")
    assert "--threads: must be at least 1" in refused(capsys, *measure, "--threads", "0")
    assert "--model" in refused(capsys, *measure, "--model", folder / "gone.py")
    assert "--codes: must be given with --ranks" in refused(capsys, *measure, "--codes", "8")
    assert "--codes: must be 2 to 8, 16 or 32, got 9" in refused(
        capsys, *measure, "--ranks", "2", "--codes", "9"
    )
    build = ("build", graph, "--perturbation", folder / "table.json", "-o", costs)
    assert "--kind: must be NAME=COSTS" in refused(capsys, *build, "--kind", "weak")
    assert "must be a file" in refused(capsys, *build, "--kind", f"weak={costs}")
    assert not costs.exists()
