"""The benchmark of indicators runs, once, on a model too small to take long."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from qsync_opt.measure.sensitivity import METHODS
from tests.benchmarks.indicators import AGAIN, TRUTH, IndicatorSpec, keep_all, tau

pytestmark = pytest.mark.benchmark


def test_every_indicator_gets_a_row(tmp_path: Path) -> None:
    spec = IndicatorSpec(model="small_cnn", sizes={"batch_size": 4, "width": 2}, batches=2, steps=1)
    shown: list[str] = []
    assert keep_all([spec], tmp_path / "tiny", "--models small_cnn", shown.append) == 0
    data = json.loads((tmp_path / "tiny.json").read_text())
    assert [row["method"] for row in data["rows"]] == [
        TRUTH,
        AGAIN,
        *(method for method in METHODS if method != TRUTH),
    ]
    truth = data["rows"][0]
    assert truth["tau_all"] == pytest.approx(1.0)
    assert truth["ratio"] == [1.0, 1.0, 1.0]
    for row in data["rows"]:
        assert row["operators"] == 4
        assert row["elapsed_s"] >= 0
    (text,) = shown
    assert text == (tmp_path / "tiny.md").read_text()
    assert "## small_cnn, 1 steps" in text


def test_tau_leaves_out_what_is_not_known() -> None:
    truth = np.array([1.0, 2.0, 3.0, np.inf])
    assert tau(np.array([5.0, 6.0, 7.0, 0.0]), truth) == pytest.approx(1.0)
    assert tau(np.array([7.0, 6.0, np.inf, 0.0]), truth) == pytest.approx(-1.0)
    assert tau(np.ones(4), truth) is None
