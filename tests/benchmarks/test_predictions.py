"""The benchmark of predictions runs, and its table holds every plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benchmarks import predictions
from tests.unit.test_cost_commands import MODEL


@pytest.mark.benchmark
def test_every_uniform_plan_and_the_mixed_ones_are_in_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net.py").write_text(MODEL)
    words = [str(tmp_path / "net.py") + ":width=16", "--plans", "2", "--seconds", "0"]
    assert predictions.main([*words, "--budget", "0", "--output", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    data = json.loads((tmp_path / "predictions.json").read_text())
    (model,) = data["models"]
    plans = [row["plan"] for row in model["rows"]]
    assert plans == ["all fp32", "all bf16", "all int8", "mixed 0", "mixed 1"]
    assert (tmp_path / "predictions.md").read_text() == shown
    for row in model["rows"]:
        assert row["plan"] in shown
        assert row["memory_ratio"] == 1.0
        told = row["predicted_forward_s"] + row["predicted_backward_s"]
        assert row["time_ratio"] == pytest.approx(told / (row["forward_s"] + row["backward_s"]))
