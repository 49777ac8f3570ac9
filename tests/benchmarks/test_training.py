"""The benchmark of training runs, once and untimed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benchmarks import training

pytestmark = pytest.mark.benchmark


def test_it_runs_and_keeps_what_it_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["models/small_gpt.py:batch_size=2,layers=1,width=16,length=8"]
    words += ["--steps", "5", "--turns", "1", "--output", str(tmp_path)]
    assert training.main(words) == 0
    assert (tmp_path / "training.md").read_text() == capsys.readouterr().out
    (row,) = json.loads((tmp_path / "training.json").read_text())["overhead"]
    assert row["by_hand_s"] > 0
    assert row["trainer_s"] > 0
    assert row["overhead"] == pytest.approx(row["trainer_s"] / row["by_hand_s"] - 1)
