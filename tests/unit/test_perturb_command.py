"""`qsync-opt perturb`: from a model file and its graph to a table in a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qsync_opt import cli, model_commands
from qsync_opt.files import load_graph, load_perturbations
from qsync_opt.measure.sensitivity import METHODS
from qsync_opt.precision import Precision

Captured = pytest.CaptureFixture[str]

MODEL = """
import torch
from torch import nn
from torch.nn import functional


def build(batch_size=4, width=6, seed=0):
    torch.manual_seed(seed)
    print("built by a user who prints")
    model = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2))
    return model, (torch.randn(batch_size, 3), torch.randn(batch_size, 2)), functional.mse_loss
"""
WITHOUT_SEED = MODEL.replace(", seed=0", "").replace("torch.manual_seed(seed)", "pass")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    return path


@pytest.fixture
def graph(model: Path, tmp_path: Path, capsys: Captured) -> Path:
    path = tmp_path / "graph.json"
    arguments = ["capture", model, "-o", path, "--set", "width=5", "--json"]
    assert cli.main([*map(str, arguments)]) == 0
    capsys.readouterr()
    return path


def run(*arguments: object) -> int:
    return cli.main(["perturb", *map(str, arguments)])


def refused(capsys: Captured, *arguments: object) -> str:
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    *printed, message = captured.err.splitlines()
    assert all(line == "built by a user who prints" for line in printed)
    return message


def test_the_options_name_every_indicator() -> None:
    assert model_commands.INDICATORS == METHODS


def test_the_model_is_built_as_it_was_captured(
    model: Path, graph: Path, tmp_path: Path, capsys: Captured
) -> None:
    out = tmp_path / "table.json"
    assert run(model, graph, "-o", out, "--batches", 2, "--seed", 3) == 0
    captured = capsys.readouterr()
    assert str(out) in captured.out
    table = load_perturbations(out)
    found = load_graph(graph)
    assert table.graph == found.sha256
    assert table.operators == tuple(operator.name for operator in found.operators)
    assert table.precisions == tuple(Precision)
    assert table.method == "variance"
    told = table.provenance
    assert (told.batches, told.seed, told.rounding) == (2, 3, "nearest")
    assert told.sizes == {"width": "5"}


def test_json_is_one_object(model: Path, graph: Path, tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "table.json.gz"
    arguments = ("--method", "measured", "--precisions", "bf16,int8", "--json")
    assert run(model, graph, "-o", out, *arguments) == 0
    told = json.loads(capsys.readouterr().out)
    table = load_perturbations(out)
    assert table.precisions == (Precision.BF16, Precision.INT8)
    assert told["method"] == "measured"
    assert told["graph"] == table.graph
    assert told["totals"]["int8"] == pytest.approx(float(table.values[:, 1].sum()))


def test_a_smaller_batch_will_do(
    model: Path, graph: Path, tmp_path: Path, capsys: Captured
) -> None:
    out = tmp_path / "table.json"
    assert run(model, graph, "-o", out, "--set", "batch_size=2") == 0
    assert load_perturbations(out).provenance.sizes == {"width": "5", "batch_size": "2"}


def test_an_unknown_precision_is_refused(
    model: Path, graph: Path, tmp_path: Path, capsys: Captured
) -> None:
    out = tmp_path / "table.json"
    message = refused(capsys, model, graph, "-o", out, "--precisions", "fp4")
    assert "--precisions" in message
    assert not out.exists()


def test_a_graph_of_other_sizes_is_refused(
    model: Path, graph: Path, tmp_path: Path, capsys: Captured
) -> None:
    out = tmp_path / "table.json"
    message = refused(capsys, model, graph, "-o", out, "--set", "width=7")
    assert "as in the graph" in message
    assert not out.exists()


def test_further_batches_need_a_seed(
    model: Path, graph: Path, tmp_path: Path, capsys: Captured
) -> None:
    model.write_text(WITHOUT_SEED)
    out = tmp_path / "table.json"
    assert "seed" in refused(capsys, model, graph, "-o", out, "--batches", "2")
    assert "--batches" in refused(capsys, model, graph, "-o", out, "--batches", "0")


def test_a_file_that_is_no_graph_is_refused(model: Path, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "graph.json").write_text("{}")
    refused(capsys, model, tmp_path / "graph.json", "-o", tmp_path / "table.json")
