"""Chrome traces: a replay as one, and how a measured one differs from it.

The files open in Perfetto and in chrome://tracing: a process per rank, and in it a lane for
the host, the device and the network, with the memory in use as a counter.
"""

from __future__ import annotations

import gzip
import json
import os
from collections import defaultdict
from collections.abc import Sequence
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

#: Category of what torch.profiler shows of named regions on a GPU.
_ON_GPU = "gpu_user_annotation"

#: Microseconds since 1970 in the year 5138: no clock tells more.
_LATEST_US = 1e17

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
    # Hosts run ahead, and viewers leave out what begins before 0.
    begin = min((event["ts"] for event in events if "ts" in event), default=0.0)
    if begin < 0.0:
        events = [{**e, "ts": e["ts"] - begin} if "ts" in e else e for e in events]
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
    blank (`layer1.0.conv1 forward`). Lanes of hosts do not count, nor do annotations of the host
    where torch.profiler shows those of a GPU. Where the trace has a process for each rank, as
    those of `train` have, those of one rank count. Nested events of one operator count once, and
    so does a trace of several steps, by the number of its events called `step` (or of the names
    that start with `ProfilerStep`).

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


def read_trace(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The events of a Chrome trace (.json or .json.gz); times of spans are numbers.

    Raises:
        FormatError: not a Chrome trace.
        OSError: it cannot be read.
    """
    path, where = Path(path), str(path)
    if path.stat().st_size > _LARGEST_TRACE:
        raise FormatError(where, f"must be smaller than {_LARGEST_TRACE} bytes", "a larger file")
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        data = json.loads(raw)
    except (ValueError, gzip.BadGzipFile, EOFError, RecursionError) as error:
        raise FormatError(where, "must be complete, valid JSON", str(error)) from None
    events = data.get("traceEvents") if isinstance(data, dict) else data
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        rule = "must be a Chrome trace: a list of events, or an object with it in traceEvents"
        raise FormatError(where, rule, "something else")
    for event in events:
        for key, least in (("ts", -np.inf), ("dur", 0.0)):
            value = event.get(key, 0.0)
            if event.get("ph") == "X" and not _is_time(value, least):
                rule = f"must have events whose {key} is a number of microseconds"
                raise FormatError(where, rule, value)
    return events


def _is_time(value: object, least: float) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and least <= value <= _LATEST_US  # type: ignore[operator]


def overlaid(predicted: dict[str, Any], events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A predicted trace with the processes of a measured one beside its own.

    Args:
        predicted: as `to_trace` gives it.
        events: as `read_trace` gives them; they are shifted to begin with the prediction.
    """
    own = predicted["traceEvents"]
    first = 1 + max((event["pid"] for event in own), default=-1)
    numbers: dict[str, int] = {}
    begin = min((event.get("ts", 0.0) for event in events if event.get("ph") == "X"), default=0.0)
    names = {
        str(event.get("pid")): str(event.get("args", {}).get("name", ""))
        for event in events
        if event.get("ph") == "M" and event.get("name") == "process_name"
    }
    moved = []
    for event in events:
        if event.get("ph") == "M" and event.get("name") == "process_name":
            continue
        process = str(event.get("pid"))
        number = numbers.setdefault(process, first + len(numbers))
        times = {"ts": event["ts"] - begin} if _is_time(event.get("ts"), -np.inf) else {}
        moved.append({**event, "pid": number, **times})
    titles = [
        _named("process_name", number, f"measured: {names.get(process) or process}")
        for process, number in numbers.items()
    ]
    return {**predicted, "traceEvents": [*own, *titles, *moved]}


def _measured(path: Path, names: set[str], rank: int) -> dict[str, float]:
    """Seconds per step of the operators that a trace names, on one rank's device."""
    events = read_trace(path)
    complete = [event for event in events if event.get("ph") == "X"]
    processes = _processes(events)
    if processes and rank not in processes:
        known = ", ".join(map(str, sorted(processes)))
        raise FormatError("rank", f"must be one of the measured trace's: {known}", rank)
    if processes:
        complete = [event for event in complete if event.get("pid") == processes[rank]]
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    hosts = _host_lanes(events)
    # torch.profiler shows what it is told the names of twice: as the host runs it and the GPU.
    on_gpu = any(event.get("cat") == _ON_GPU for event in complete)
    steps: dict[object, int] = defaultdict(int)
    profiled = set()
    for event in complete:
        label, lane = str(event.get("name", "")), (str(event.get("pid")), str(event.get("tid")))
        if label == "step":
            steps[lane] += 1
        elif label.startswith("ProfilerStep"):
            profiled.add(label)
        name = label if label in names else label.partition(" ")[0]
        if name in names and lane not in hosts and (not on_gpu or event.get("cat") == _ON_GPU):
            begin = float(event.get("ts", 0.0))
            spans[name].append((begin, begin + float(event.get("dur", 0.0))))
    if not spans:
        rule = "must have events named like operators of the problem"
        remedy = "Name what an operator runs with torch.profiler.record_function"
        raise FormatError(str(path), rule, f"{len(complete)} events", remedy)
    count = max(len(profiled), *steps.values(), 1) if steps else max(len(profiled), 1)
    return {name: _covered(rows) / _US / count for name, rows in spans.items()}


def _host_lanes(events: Sequence[dict[str, Any]]) -> set[tuple[str, str]]:
    """Process and thread of lanes that show hosts, in traces of this library."""
    return {
        (str(event.get("pid")), str(event.get("tid")))
        for event in events
        if event.get("ph") == "M"
        and event.get("name") == "thread_name"
        and event.get("args", {}).get("name") == LANES[HOST]
    }


def _processes(events: list[dict[str, Any]]) -> dict[int, object]:
    """Rank -> its process, where processes are named after ranks."""
    found = {}
    for event in events:
        if event.get("ph") == "M" and event.get("name") == "process_name":
            word, _, rest = str(event.get("args", {}).get("name")).partition(" ")
            number = rest.partition(" ")[0]
            if word == "rank" and number.isdecimal():
                found[int(number)] = event.get("pid")
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
