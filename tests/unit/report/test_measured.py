"""Metrics summed up, and a step read back from a trace."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from qsync_opt.errors import FormatError
from qsync_opt.optimize.problem import AllocationProblem
from qsync_opt.optimize.solve import solve
from qsync_opt.report import read_run, read_trace
from qsync_opt.report.measured import Span
from qsync_opt.simulate.replay import Replay, replay
from qsync_opt.simulate.tasks import Tasks, Work
from qsync_opt.simulate.trace import save_trace
from tests.unit.report.jobs import STEPS, write_metrics


def test_medians_leave_out_the_first_steps(
    small_problem: AllocationProblem, tmp_path: Path
) -> None:
    write_metrics(tmp_path, small_problem)
    run = read_run(tmp_path)
    workers = sum(device.workers for device in small_problem.devices)
    assert [row.rank for row in run.ranks] == list(range(workers))
    assert [row.steps for row in run.ranks] == [STEPS] * workers
    for rank, row in enumerate(run.ranks):
        assert row.step_s == pytest.approx(1e-3 * (10 + rank))
        assert row.wait_s == pytest.approx(1e-3 * (2 + rank))
        assert row.memory_bytes == 2**20 * STEPS
    assert run.step_s == pytest.approx(1e-3 * (10 + workers - 1))
    samples = np.array([8 * (rank + 1) for rank in range(workers)])
    losses = [[2.0 + rank - 0.01 * step for rank in range(workers)] for step in range(STEPS)]
    assert run.losses == pytest.approx([float(np.average(row, weights=samples)) for row in losses])


def test_a_folder_without_metrics_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"rank-0\.jsonl"):
        read_run(tmp_path)


@pytest.fixture(scope="module")
def replayed(small_problem: AllocationProblem) -> Replay:
    return replay(small_problem, solve(small_problem, method="greedy").require_plan())


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_predicted_trace_reads_back_as_the_prediction(
    small_problem: AllocationProblem, replayed: Replay, tmp_path: Path, name: str
) -> None:
    save_trace(small_problem, replayed, tmp_path / name)
    steps = read_trace(small_problem, tmp_path / name)
    kinds = [device.name for device in small_problem.devices for _ in range(device.workers)]
    assert [step.kind for step in steps] == kinds
    for step in steps:
        part = replayed.kinds[step.kind]
        spans = [span for span in step.spans if span.work is not None]
        assert len(spans) == len(part.tasks.work)
        found = {(span.work, span.operator): span for span in spans}
        for work, operator, start, end in zip(
            part.tasks.work, part.tasks.operator, part.start_s, part.end_s, strict=True
        ):
            kind = Tasks.WORKS[work]
            if kind in (Work.FORWARD, Work.BACKWARD, Work.OPTIMIZER):
                label = small_problem.operators[operator].name if operator >= 0 else ""
                span = found[kind, label]
                assert (span.start_s, span.end_s) == pytest.approx((start, end), abs=1e-12)
        network = [span.end_s for span in step.spans if span.work is None]
        assert network == pytest.approx(replayed.reduce_end_s.tolist(), abs=1e-12)


def test_of_several_steps_the_median_one_is_shown(
    small_problem: AllocationProblem, tmp_path: Path
) -> None:
    name = small_problem.operators[0].name
    events: list[dict[str, object]] = []
    begin = 100.0
    for length in (50.0, 400.0, 60.0):
        events.append({"name": "step", "ph": "X", "tid": 0, "ts": begin, "dur": length})
        events.append(
            {"name": f"{name} backward", "ph": "X", "tid": 1, "ts": begin + 10, "dur": length / 2}
        )
        begin += length
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"distributedInfo": {"rank": 1}, "traceEvents": events}))
    (step,) = read_trace(small_problem, path)
    assert step.rank == 1
    assert step.step_s == pytest.approx(60e-6)
    (span,) = step.spans
    assert (span.work, span.operator) == (Work.BACKWARD, name)
    assert (span.start_s, span.end_s) == pytest.approx((10e-6, 40e-6))
    assert isinstance(span, Span)


def test_host_lanes_do_not_count_but_their_marks_do(
    small_problem: AllocationProblem, tmp_path: Path
) -> None:
    name = small_problem.operators[0].name
    lane = {"name": "thread_name", "ph": "M", "pid": 0, "tid": 0, "args": {"name": "host"}}
    events = [
        lane,
        {"name": "step", "ph": "X", "pid": 0, "tid": 0, "ts": 0, "dur": 100},
        {"name": f"{name} forward", "ph": "X", "pid": 0, "tid": 0, "ts": 0, "dur": 1},
        {"name": f"{name} forward", "ph": "X", "pid": 0, "tid": 1, "ts": 5, "dur": 7},
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(events))
    (step,) = read_trace(small_problem, path)
    assert [(span.start_s, span.end_s) for span in step.spans] == [pytest.approx((5e-6, 12e-6))]
    assert step.step_s == pytest.approx(100e-6)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("{", "Chrome trace"),
        ('{"other": []}', "Chrome trace"),
        ('{"traceEvents": []}', "named like operators"),
        ('[{"name": "unknown forward", "ph": "X", "ts": 0, "dur": 1}]', "named like operators"),
    ],
)
def test_what_is_no_trace_is_refused(
    small_problem: AllocationProblem, tmp_path: Path, content: str, named: str
) -> None:
    path = tmp_path / "trace.json"
    path.write_text(content)
    with pytest.raises(FormatError, match=named):
        read_trace(small_problem, path)


def test_a_rank_that_the_problem_lacks_is_refused(
    small_problem: AllocationProblem, tmp_path: Path
) -> None:
    name = small_problem.operators[0].name
    event = {"name": name, "ph": "X", "ts": 0, "dur": 1}
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"distributedInfo": {"rank": 99}, "traceEvents": [event]}))
    with pytest.raises(FormatError, match="ranks 0 to"):
        read_trace(small_problem, path)
