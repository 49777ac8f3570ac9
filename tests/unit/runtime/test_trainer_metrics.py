"""Metrics files: lines parse, a half one at the end is left out, a restart repeats none."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from qsync_opt.errors import FormatError
from qsync_opt.runtime.metrics import MetricsFile, StepMetrics, global_losses, read_metrics


def row(step: int, rank: int = 0, loss: float = 1.0, samples: int = 4) -> StepMetrics:
    return StepMetrics(
        step=step,
        rank=rank,
        kind="strong",
        loss=loss,
        samples=samples,
        step_s=0.1,
        compute_s=0.08,
        wait_s=0.02,
        memory_bytes=1,
        loss_scale=1.0,
        skipped=False,
    )


def write(folder: Path, rank: int, rows: list[StepMetrics], first_step: int = 0) -> Path:
    file = MetricsFile(folder, rank, first_step)
    for one in rows:
        file.write(one)
    file.close()
    return file.path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    rows = {rank: [row(step, rank, step + rank) for step in range(3)] for rank in (0, 1)}
    for rank, own in rows.items():
        write(tmp_path, rank, own)
    assert read_metrics(tmp_path) == rows


def test_files_of_early_releases_are_read(tmp_path: Path) -> None:
    path = write(tmp_path, 0, [replace(row(0), sent_bytes=7), row(1)])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line.pop("sent_bytes") for line in lines] == [7, 0]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_metrics(tmp_path)[0] == [row(0), row(1)]


def test_every_prefix_of_a_file_parses(tmp_path: Path) -> None:
    path = write(tmp_path, 0, [row(0), row(1)])
    raw = path.read_bytes()
    whole = raw.index(b"\n") + 1
    for length in range(len(raw)):
        path.write_bytes(raw[:length])
        assert len(read_metrics(tmp_path)[0]) == (length >= whole)


def test_a_restart_removes_the_steps_that_it_repeats(tmp_path: Path) -> None:
    path = write(tmp_path, 0, [row(step) for step in range(5)])
    path.write_bytes(path.read_bytes()[:-9])
    write(tmp_path, 0, [row(2, loss=7.0)], first_step=2)
    assert [(one.step, one.loss) for one in read_metrics(tmp_path)[0]] == [
        (0, 1.0),
        (1, 1.0),
        (2, 7.0),
    ]


def test_a_loss_that_is_not_finite_is_null(tmp_path: Path) -> None:
    path = write(tmp_path, 0, [row(0, loss=math.inf)])
    assert json.loads(path.read_text(), parse_constant=pytest.fail)["loss"] is None
    assert math.isnan(read_metrics(tmp_path)[0][0].loss)


def test_a_broken_line_in_the_middle_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, 0, [row(0)])
    for bad in (b'{"step":', b'{"step": 0}', b"3"):
        path.write_bytes(bad + b"\n" + path.read_bytes())
        with pytest.raises(FormatError, match=r"rank-0.jsonl:1"):
            read_metrics(tmp_path)


def test_losses_are_weighted_by_samples() -> None:
    found = global_losses({0: [row(0, 0, 1.0, 3), row(1)], 1: [row(0, 1, 5.0, 1)]})
    assert found == [2.0]


def test_losses_of_a_job_that_went_on_with_other_ranks_belong_to_their_steps() -> None:
    """Two ranks for five steps, one for three, three for four, of which one is still to come."""
    first = [row(step, 0, float(step)) for step in range(12)]
    second = [row(step, 1, float(step)) for step in (*range(5), 8, 9, 10)]
    third = [row(step, 2, float(step)) for step in range(8, 11)]
    found = global_losses({0: first, 1: second, 2: third})
    assert found == [float(step) for step in range(11)]
    assert global_losses({}) == []
    shrunk = {
        0: [row(s, 0, float(s)) for s in range(9)],
        1: [row(s, 1, float(s)) for s in range(3)],
    }
    assert global_losses(shrunk) == [float(step) for step in range(9)]
