"""Chrome traces: a replay as one, and how a measured one differs from it.

The files open in Perfetto and in chrome://tracing: a process per rank, and in it a lane for
the host, the device and the network, with the memory in use as a counter.
"""

from __future__ import annotations

import gzip
import json
import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qsync_opt.errors import FormatError
from qsync_opt.files import write_atomically
from qsync_opt.optimize.problem import AllocationProblem
from qsync_opt.simulate.replay import KindReplay, Replay
from qsync_opt.simulate.tasks import Tasks, Work

#: The threads of a rank's process.
HOST, DEVICE, NETWORK = 0, 1, 2
LANES = {HOST: "host", DEVICE: "device", NETWORK: "network"}

#: Chrome traces count in microseconds.
_US = 1e6

#: Bytes of the largest trace that is read: more is no training step.
_LARGEST_TRACE = 2**31


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """An operator whose measured time is not the predicted one.

    Attributes:
        name: of the operator.
        predicted_s, measured_s: device time in one step, forward, backward and casts.
    """

    name: str
    predicted_s: float
    measured_s: float

    @property
    def extra_s(self) -> float:
        """By how much it took longer."""
        return self.measured_s - self.predicted_s


def to_trace(problem: AllocationProblem, replayed: Replay) -> dict[str, Any]:
    """A replay as a Chrome trace, ready for JSON."""
    events: list[dict[str, Any]] = []
    rank = 0
    for device in problem.devices:
        part = replayed.kinds[device.name]
        own = _events(problem, part)
        for _ in range(device.workers):
            events += process_events(rank, device.name)
            events += [{**event, "pid": rank} for event in own]
            events += [{**event, "pid": rank} for event in _reductions(problem, replayed)]
            rank += 1
    return {
        "displayTimeUnit": "ms",
        "traceEvents": events,
        "otherData": {
            "problem": problem.sha256,
            "iteration_time_s": replayed.iteration_time_s,
            "error": replayed.error,
        },
    }


def save_trace(problem: AllocationProblem, replayed: Replay, path: str | os.PathLike[str]) -> None:
    """Write a replay as a Chrome trace (.json, or .json.gz)."""
    save_document(to_trace(problem, replayed), path)


def save_document(document: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a Chrome trace (.json, or .json.gz)."""
    text = json.dumps(document, separators=(",", ":")).encode()
    data = gzip.compress(text, mtime=0) if str(path).endswith(".gz") else text
    write_atomically(Path(path), data)


def process_events(rank: int, kind: str) -> list[dict[str, Any]]:
    """What names the process of a rank and its lanes."""
    return [
        _named("process_name", rank, f"rank {rank} ({kind})"),
        *({**_named("thread_name", rank, name), "tid": lane} for lane, name in LANES.items()),
    ]


def compare_traces(
    problem: AllocationProblem, replayed: Replay, measured: str | os.PathLike[str], rank: int = 0
) -> list[Difference]:
    """What differs most between a replay and a measured trace, the largest difference first.

    A measured event belongs to the operator whose name it bears, or begins with before a
    blank (`layer1.0.conv1 forward`). Where the trace has a process for each rank, as those of
    `train` have, those of one rank count. Nested events of one operator count once, and so does a
    trace of several steps, by the number of its events called `step` (or starting with
    `ProfilerStep`).

    Args:
        problem: the problem.
        replayed: a replay of it.
        measured: a Chrome trace (.json or .json.gz), such as torch.profiler writes.
        rank: whose prediction it is compared with, and whose process it is.

    Raises:
        FormatError: not a Chrome trace, or one without any operator of the problem.
        OSError: it cannot be read.
    """
    kinds = [device.name for device in problem.devices for _ in range(device.workers)]
    if not 0 <= rank < len(kinds):
        raise FormatError("rank", f"must be 0 to {len(kinds) - 1}", rank)
    part = replayed.kinds[kinds[rank]]
    predicted: dict[str, float] = defaultdict(float)
    for operator, start, end in zip(
        part.tasks.operator.tolist(), part.start_s.tolist(), part.end_s.tolist(), strict=True
    ):
        if operator >= 0:
            predicted[problem.operators[operator].name] += end - start
    found = _measured(Path(measured), set(predicted), rank)
    rows = [
        Difference(name=name, predicted_s=predicted[name], measured_s=seconds)
        for name, seconds in found.items()
    ]
    return sorted(rows, key=lambda row: (-abs(row.extra_s), row.name))


def _measured(path: Path, names: set[str], rank: int) -> dict[str, float]:
    """Seconds per step of the operators that a trace names, on one rank."""
    where = str(path)
    if path.stat().st_size > _LARGEST_TRACE:
        raise FormatError(where, f"must be smaller than {_LARGEST_TRACE} bytes", "a larger file")
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        data = json.loads(raw)
        events = data["traceEvents"] if isinstance(data, dict) else data
        complete = [event for event in events if event.get("ph") == "X"]
        processes = _processes(events)
    except (ValueError, gzip.BadGzipFile, EOFError) as error:
        raise FormatError(where, "must be complete, valid JSON", str(error)) from None
    except (KeyError, TypeError, AttributeError):
        rule = "must be a Chrome trace: a list of events, or an object with it in traceEvents"
        raise FormatError(where, rule, "something else") from None
    if processes and rank not in processes:
        known = ", ".join(map(str, sorted(processes)))
        raise FormatError("rank", f"must be one of the measured trace's: {known}", rank)
    if processes:
        complete = [event for event in complete if event.get("pid") == processes[rank]]
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    steps = 0
    for event in complete:
        label = str(event.get("name", ""))
        steps += label == "step" or label.startswith("ProfilerStep")
        name = label if label in names else label.partition(" ")[0]
        if name in names:
            begin = float(event.get("ts", 0.0))
            spans[name].append((begin, begin + float(event.get("dur", 0.0))))
    if not spans:
        rule = "must have events named like operators of the problem"
        remedy = "Name what an operator runs with torch.profiler.record_function"
        raise FormatError(where, rule, f"{len(complete)} events", remedy)
    return {name: _covered(rows) / _US / max(steps, 1) for name, rows in spans.items()}


def _processes(events: list[dict[str, Any]]) -> dict[int, object]:
    """Rank -> its process, where processes are named after ranks."""
    found = {}
    for event in events:
        if event.get("ph") == "M" and event.get("name") == "process_name":
            word, _, rest = str(event["args"]["name"]).partition(" ")
            number = rest.partition(" ")[0]
            if word == "rank" and number.isdecimal():
                found[int(number)] = event["pid"]
    return found


def _covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of some spans."""
    total, reached = 0.0, -np.inf
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def _named(what: str, rank: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": rank, "args": {"name": name}}


def _span(name: str, lane: int, category: str, start_s: float, end_s: float) -> dict[str, Any]:
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "tid": lane,
        "ts": start_s * _US,
        "dur": (end_s - start_s) * _US,
    }


def _events(problem: AllocationProblem, part: KindReplay) -> list[dict[str, Any]]:
    """The lanes of host and device, and the memory counter, of one rank."""
    events, tasks = [], part.tasks
    count = len(problem.operators)
    total = part.memory.total_bytes.tolist()
    for index, (work, operator) in enumerate(
        zip(tasks.work.tolist(), tasks.operator.tolist(), strict=True)
    ):
        kind = Tasks.WORKS[work]
        name = "optimizer" if operator < 0 else f"{problem.operators[operator].name} {kind}"
        start, end = float(part.start_s[index]), float(part.end_s[index])
        events.append(_span(name, DEVICE, str(kind), start, end))
        launch = float(tasks.launch_s[index])
        if launch > 0:
            done = float(part.launched_s[index])
            events.append(_span(name, HOST, str(kind), done - launch, done))
        if kind in (Work.FORWARD, Work.BACKWARD):
            point = operator if kind is Work.FORWARD else 2 * count - 1 - operator
            events.append(
                {"name": "memory", "ph": "C", "ts": start * _US, "args": {"bytes": total[point]}}
            )
    return events


def _reductions(problem: AllocationProblem, replayed: Replay) -> list[dict[str, Any]]:
    """The lane of the network."""
    times = zip(replayed.reduce_start_s.tolist(), replayed.reduce_end_s.tolist(), strict=True)
    return [
        {
            **_span(f"all-reduce {k}", NETWORK, "communication", start, end),
            "args": {"bytes": problem.buckets[k].size_bytes},
        }
        for k, (start, end) in enumerate(times)
    ]
