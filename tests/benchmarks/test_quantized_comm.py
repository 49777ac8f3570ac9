"""The benchmark of coded communication runs, and its virtual ranks are what ranks are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from qsync_opt.runtime.communication import Coding, parse_communication
from qsync_opt.runtime.two_phase import Averaging, Memory
from tests.benchmarks.quantized_comm import main
from tests.benchmarks.quantized_training import SIZES, Board, CodedTraining, VirtualExchange
from tests.low_precision import TinyGpt


@pytest.mark.benchmark
def test_perplexity_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(SIZES["cpu"], text_bytes=2**18, evaluated=16, batch=8)
    monkeypatch.setitem(SIZES, "cpu", small)
    words = ["perplexity", "--steps", "2", "--variants", "fp32", "w8g8", "--output", str(tmp_path)]
    assert main([*words, "--name", "tiny"]) == 0
    rows = json.loads((tmp_path / "tiny.json").read_text())["perplexity"]
    assert [row["communication"] for row in rows] == ["fp32", "w8g8"]
    assert rows[1]["of_fp32"] == pytest.approx(1, abs=0.02)
    assert rows[1]["sent_bytes_a_step"] > 0
    assert "## perplexity" in (tmp_path / "tiny.md").read_text()


def test_virtual_ranks_end_with_the_same_mean() -> None:
    board = Board()
    given = torch.randn(3, 5000, generator=torch.Generator().manual_seed(0))
    values, exact = list(given.clone()), [torch.full((7,), float(rank)) for rank in range(3)]
    coding = Coding(bits=8)
    runs = [
        Averaging(
            exchange=VirtualExchange(rank, 3, board), coding=coding, bucket_size=1024, seed=0
        ).run(values[rank], exact[rank], Memory(), 0, 0)
        for rank in range(3)
    ]
    for _ in range(2):
        for run in runs:
            next(run)
        board.deliver()
    assert all(next(run, None) is None for run in runs)
    for rank in range(3):
        assert torch.equal(values[rank], values[0])
        assert torch.equal(exact[rank], torch.ones(7))
    error = values[0] - given.mean(0)
    assert 0 < float(error.abs().max()) < 2 * float(given.max() - given.min()) / 255


def test_weights_are_rounded_in_place_and_come_back() -> None:
    model = TinyGpt(width=64)
    before = [p.detach().clone() for p in model.parameters()]
    training = CodedTraining(model, parse_communication("w8g8"), 2)
    with torch.no_grad():
        kept = training.round_weights(0)
    changed = [not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]
    assert sum(changed) == len(training.coded) > 0
    assert all(torch.equal(p, old) for p, old in zip(kept, _coded(before, changed), strict=True))
    assert not any(torch.equal(p, old) for p, old in zip(training.coded, kept, strict=True))


def _coded(parts: list[torch.Tensor], changed: list[bool]) -> list[torch.Tensor]:
    return [part for part, is_changed in zip(parts, changed, strict=True) if is_changed]
