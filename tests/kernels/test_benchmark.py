"""Every case of the kernel benchmark runs, on sizes too small to take long."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benchmarks import kernels as benchmark

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.benchmark,
    pytest.mark.usefixtures("device", "kernels"),
]


def test_every_case_runs_and_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmark, "_SETTLE_S", 0.0)
    words = ["--divisor", "16", "--name", "dry", "--output", str(tmp_path)]
    assert benchmark.main(words) == 0
    data = json.loads((tmp_path / "dry.json").read_text())
    assert capsys.readouterr().out == (tmp_path / "dry.md").read_text()
    shapes = {row["shape"] for row in data["rows"] if row["section"].startswith("convolution")}
    assert len(shapes) == len(benchmark.CONVOLUTIONS)
    for row in data["rows"]:
        assert row["device_s"] > 0
        if row["name"] == row["against"]:
            assert row["ratio"] == 1
    assert {choice.split()[0] for choice in data["choices"]} == {"int8_matmul", "int8_conv2d"}
