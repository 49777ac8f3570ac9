"""The benchmark of rivals runs on two processes, once and untimed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.benchmark

ROOT = Path(__file__).parents[2]


def test_every_method_is_in_the_table(tmp_path: Path) -> None:
    words = ["models/small_cnn.py:batch_size=4,width=4", "--steps", "6", "--turns", "1"]
    words += ["--budget", "0", "--samples", "2", "--precisions", "fp32,bf16"]
    words += ["--output", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.rivals", *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "rivals.md").read_text() == done.stdout
    (model,) = json.loads((tmp_path / "rivals.json").read_text())["models"]
    rows = {row["method"]: row for row in model["rows"]}
    assert set(rows) == {
        *("exact", "greedy", "uniform by kind", "batch sizing", "autocast bf16"),
        *("all fp32", "all bf16"),
    }
    for name, row in rows.items():
        assert row["failure"] is None, name
        assert sum(row["samples"]) == 8
        assert row["samples_per_s"] == pytest.approx(8 / row["step_s"])
    assert rows["all fp32"]["perturbation"] == 0
    told = [rows[name]["perturbation"] for name in ("exact", "greedy", "all bf16")]
    assert told == sorted(told)
    assert told[0] <= rows["uniform by kind"]["perturbation"]
