"""Traces: what a replay writes is what it says, and a measured trace is matched by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qsync_opt.cli import main
from qsync_opt.errors import FormatError
from qsync_opt.files import save_plan, save_problem
from qsync_opt.optimize.evaluate import plan_from_columns
from qsync_opt.optimize.problem import AllocationProblem
from qsync_opt.simulate.replay import Replay, replay
from qsync_opt.simulate.trace import (
    DEVICE,
    HOST,
    compare_traces,
    overlaid,
    read_trace,
    save_trace,
    to_trace,
)
from tests.host_cases import random_hosts
from tests.tiny_problems import random_column, tiny_problem


def replayed(seed: int) -> tuple[AllocationProblem, Replay]:
    problem = tiny_problem(seed)
    rng = np.random.default_rng(seed)
    columns = [random_column(problem, device, rng) for device in problem.devices]
    return problem, replay(problem, plan_from_columns(problem, columns))


def spans(trace: dict[str, Any], rank: int, lane: int) -> list[tuple[str, float, float]]:
    return [
        (event["name"], event["ts"], event["dur"])
        for event in trace["traceEvents"]
        if event["ph"] == "X" and (event["pid"], event["tid"]) == (rank, lane)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_a_trace_has_every_rank_and_adds_up(seed: int) -> None:
    problem, shown = replayed(seed)
    trace = to_trace(problem, shown)
    ranks = {event["pid"] for event in trace["traceEvents"]}
    assert ranks == set(range(sum(device.workers for device in problem.devices)))
    rank = 0
    for device in problem.devices:
        part = shown.kinds[device.name]
        for _ in range(device.workers):
            on_device = spans(trace, rank, 1)
            spent = part.compute_s + part.cast_s + part.optimizer_s
            assert sum(dur for _, _, dur in on_device) == pytest.approx(spent * 1e6)
            ends = [ts + dur for _, ts, dur in on_device]
            assert all(b >= a - 1e-6 * ends[-1] for a, b in zip(ends, ends[1:], strict=False))
            reduced = spans(trace, rank, 2)
            assert [name for name, _, _ in reduced] == [
                f"all-reduce {k}" for k in range(len(problem.buckets))
            ]
            assert sum(dur for _, _, dur in reduced) == pytest.approx(shown.communication_s * 1e6)
            peak = max(
                event["args"]["bytes"]
                for event in trace["traceEvents"]
                if event["ph"] == "C" and event["pid"] == rank
            )
            assert peak == part.memory.peak_bytes
            rank += 1


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_a_replay_differs_from_itself_in_nothing(tmp_path: Path, suffix: str) -> None:
    problem, shown = replayed(3)
    path = tmp_path / f"trace{suffix}"
    save_trace(problem, shown, path)
    rows = compare_traces(problem, shown, path)
    assert {row.name for row in rows} == {operator.name for operator in problem.operators}
    for row in rows:
        assert row.measured_s == pytest.approx(row.predicted_s, rel=1e-9, abs=1e-15)


def test_steps_are_averaged_and_nested_events_count_once(tmp_path: Path) -> None:
    problem, shown = replayed(3)
    name = problem.operators[1].name
    events = []
    for step in range(2):
        at = 1000.0 * step
        events.append({"ph": "X", "name": f"ProfilerStep#{step}", "ts": at, "dur": 900.0})
        events.append({"ph": "X", "name": f"{name} forward", "ts": at, "dur": 100.0})
        events.append({"ph": "X", "name": name, "ts": at + 20, "dur": 50.0})
        events.append({"ph": "X", "name": f"{name} backward", "ts": at + 500, "dur": 30.0})
        events.append({"ph": "X", "name": "something else", "ts": at, "dur": 800.0})
    path = tmp_path / "measured.json"
    path.write_text(json.dumps({"traceEvents": events}))
    (row,) = compare_traces(problem, shown, path)
    assert row.name == name
    assert row.measured_s == pytest.approx(130e-6)
    assert row.extra_s == pytest.approx(130e-6 - row.predicted_s)


def test_the_process_of_a_rank_is_told_by_its_name(tmp_path: Path) -> None:
    """Processes of ranks count apart; where they bear no names of ranks, all events count."""
    problem, shown = next(
        case
        for case in map(replayed, range(20))
        if sum(device.workers for device in case[0].devices) > 1
    )
    name = problem.operators[1].name
    events: list[dict[str, Any]] = [
        {"ph": "X", "name": f"{name} forward", "pid": pid, "ts": 0.0, "dur": 10.0 * pid}
        for pid in (40, 50)
    ]
    path = tmp_path / "measured.json"
    path.write_text(json.dumps({"traceEvents": events}))
    assert compare_traces(problem, shown, path, 1)[0].measured_s == pytest.approx(500e-6)
    events += [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"rank {rank} (weak)"}}
        for rank, pid in ((1, 40), (0, 50))
    ]
    path.write_text(json.dumps({"traceEvents": events}))
    for rank, microseconds in ((0, 500), (1, 400)):
        (row,) = compare_traces(problem, shown, path, rank)
        assert row.measured_s == pytest.approx(microseconds / 1e6)
    path.write_text(json.dumps({"traceEvents": events[:-1]}))
    with pytest.raises(FormatError, match="must be one of the measured trace's: 1"):
        compare_traces(problem, shown, path, 0)


def with_hosts(seed: int) -> tuple[AllocationProblem, Replay]:
    """A replay whose hosts launch before the step begins on the device."""
    problem, _ = replayed(seed)
    rng = np.random.default_rng(seed)
    columns = [random_column(problem, device, rng) for device in problem.devices]
    plan = plan_from_columns(problem, columns)
    return problem, replay(problem, plan, hosts=random_hosts(problem, seed, slowdowns=(1.0,)))


def test_hosts_are_shown_and_do_not_count(tmp_path: Path) -> None:
    ahead = 0
    for seed in range(8):
        problem, shown = with_hosts(seed)
        document = to_trace(problem, shown)
        spans = [event for event in document["traceEvents"] if event["ph"] == "X"]
        assert min(event["ts"] for event in spans) >= 0.0, "viewers leave out what is before 0"
        hosts = [event for event in spans if event["tid"] == HOST]
        assert hosts
        ahead += min(event["ts"] for event in hosts) < min(
            event["ts"] for event in spans if event["tid"] == DEVICE
        )
        path = tmp_path / "trace.json"
        save_trace(problem, shown, path)
        for row in compare_traces(problem, shown, path):
            assert row.measured_s == pytest.approx(row.predicted_s, rel=1e-9, abs=1e-15)
    assert ahead > 2


def test_of_a_profile_of_a_gpu_the_gpu_counts(tmp_path: Path) -> None:
    """A named region is there twice, and so is every step: as the host and the GPU ran it."""
    problem, shown = replayed(3)
    name = problem.operators[1].name
    events = []
    for step in range(3):
        for category, late, length in (("user_annotation", 0, 900), ("gpu_user_annotation", 7, 40)):
            at = 1000.0 * step + late
            common = {"ph": "X", "cat": category, "pid": category, "tid": 1}
            events.append({**common, "name": f"ProfilerStep#{step}", "ts": at, "dur": 950.0})
            events.append({**common, "name": f"{name} forward", "ts": at, "dur": float(length)})
    path = tmp_path / "measured.json"
    path.write_text(json.dumps(events))
    (row,) = compare_traces(problem, shown, path)
    assert row.measured_s == pytest.approx(40e-6)


@pytest.mark.parametrize("key", ["ts", "dur"])
@pytest.mark.parametrize("value", ["abc", None, [1], True, 10**400, float("inf"), float("nan")])
def test_times_that_are_none_are_named(key: str, value: object, tmp_path: Path) -> None:
    problem, shown = replayed(3)
    event = {"ph": "X", "name": problem.operators[0].name, "ts": 1.0, "dur": 1.0, key: value}
    path = tmp_path / "odd.json"
    path.write_text(json.dumps([event]))
    with pytest.raises(FormatError, match=rf"odd\.json: must have events whose {key} is a number"):
        compare_traces(problem, shown, path)
    path.write_text("[" * 100_000)
    with pytest.raises(FormatError, match="must be complete, valid JSON"):
        compare_traces(problem, shown, path)


def test_both_are_shown_in_one_trace(tmp_path: Path) -> None:
    problem, shown = replayed(3)
    name = problem.operators[0].name
    events = [
        {"ph": "M", "name": "process_name", "pid": 7, "args": {"name": "rank 0 (strong)"}},
        {"ph": "X", "name": f"{name} forward", "pid": 7, "tid": 1, "ts": 5e6, "dur": 3.0},
        {"ph": "X", "name": f"{name} backward", "pid": 7, "tid": 1, "ts": 5e6 + 9, "dur": 4.0},
    ]
    path = tmp_path / "measured.json"
    path.write_text(json.dumps(events))
    document = to_trace(problem, shown)
    both = overlaid(document, read_trace(path))["traceEvents"]
    own = document["traceEvents"]
    assert both[: len(own)] == own
    added = both[len(own) :]
    assert {event["pid"] for event in added}.isdisjoint(event["pid"] for event in own)
    assert added[0]["args"]["name"] == "measured: rank 0 (strong)"
    assert [(event["ts"], event["dur"]) for event in added[1:]] == [(0.0, 3.0), (9.0, 4.0)]


@pytest.mark.parametrize(
    "text", ["", "[1, 2]", "{}", '{"traceEvents": 3}', '{"traceEvents": []}', "not json"]
)
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    problem, shown = replayed(0)
    path = tmp_path / "odd.json"
    path.write_text(text)
    with pytest.raises(FormatError, match=r"odd\.json"):
        compare_traces(problem, shown, path)
    with pytest.raises(FormatError, match="rank"):
        compare_traces(problem, shown, path, rank=99)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ('{"graph": 1}', "must be a Chrome trace.*got 'something else'"),
        ('{"traceEvents": [3]}', "must be a Chrome trace.*got 'something else'"),
        ("[[]]", "must be a Chrome trace.*got 'something else'"),
        ('{"traceEvents": [', "must be complete, valid JSON"),
        ("", "must be complete, valid JSON"),
    ],
)
def test_what_is_no_trace_is_named_with_its_file(text: str, rule: str, tmp_path: Path) -> None:
    problem = tiny_problem(3)
    rng = np.random.default_rng(3)
    columns = [random_column(problem, device, rng) for device in problem.devices]
    replayed = replay(problem, plan_from_columns(problem, columns))
    path = tmp_path / "odd.json"
    path.write_text(text)
    with pytest.raises(FormatError, match=f"^{path}: {rule}"):
        compare_traces(problem, replayed, path)


def test_the_command_shows_writes_and_compares(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    problem = tiny_problem(3)
    rng = np.random.default_rng(3)
    columns = [random_column(problem, device, rng) for device in problem.devices]
    plan = plan_from_columns(problem, columns)
    files = [str(tmp_path / name) for name in ("problem.json", "plan.json", "trace.json")]
    save_problem(problem, files[0])
    save_plan(plan, files[1])
    assert main(["replay", *files[:2], "--trace", f"{files[2]}.txt"]) == 2
    assert "--trace: must end in .json or .json.gz" in capsys.readouterr().err
    assert main(["replay", *files[:2], "--trace", files[2], "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    told = replay(problem, plan)
    assert shown["iteration_time_s"] == told.iteration_time_s
    assert [row["peak_bytes"] for row in shown["kinds"]] == [
        told.kinds[device.name].memory.peak_bytes for device in problem.devices
    ]
    assert main(["replay", *files[:2], "--against", files[2]]) == 0
    table = capsys.readouterr().out
    assert all(device.name in table for device in problem.devices)
    assert problem.operators[0].name in table
    assert f"{len(problem.operators)} operators in the measured trace" in table
    assert main(["replay", *files[:2], "--rank", "0"]) == 2
    assert "--rank: must be given with --against" in capsys.readouterr().err
    both = str(tmp_path / "both.json")
    assert main(["replay", *files[:2], "--against", files[2], "--trace", both]) == 0
    assert "measured: rank 0" in Path(both).read_text()
    assert main(["replay", *files[:2], "--kind", "a=b"]) == 2
    assert "--graph: must be given with --kind" in capsys.readouterr().err
