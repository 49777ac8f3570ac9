"""A few measured steps of a job as a Chrome trace, in the form of a predicted one.

A profiler records the steps on every rank under the labels of `labels`. What comes back is
read by ids, not by names of functions: a backward node belongs to the operator whose label it
was made under, by its sequence number, and a kernel to what its launch was inside of, by its
correlation number. The trace has a process for each rank with the lanes of a replay, so that
`qsync-opt replay --against` finds operators in it and both open side by side.
"""

from __future__ import annotations

import bisect
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from qsync_opt.errors import QsyncError, TrainError
from qsync_opt.runtime.convert import sessions_of
from qsync_opt.runtime.distributed import Ranks
from qsync_opt.runtime.labels import FORWARD, OperatorLabels
from qsync_opt.runtime.parameters import TrainParameters
from qsync_opt.runtime.passes import NO_LABELS
from qsync_opt.runtime.preparation import Task
from qsync_opt.runtime.steps import Stepper
from qsync_opt.simulate.trace import DEVICE, HOST, NETWORK, process_events, save_document

#: Steps before the first that is traced: kernels are chosen and allocators fill in them.
_WARM_UP = 3

_BACKWARD = "backward"
_STEP, _OPTIMIZER = "step", "optimizer"
_NODE = "autograd::engine::evaluate_function"
_KERNELS = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_LAUNCHES = frozenset({"cuda_runtime", "cuda_driver"})


class Tracing:
    """Records some steps of one rank, and writes those of all ranks.

    Args:
        ranks: of the job.
        task: what is trained.
        parameters: of the job; `trace` is given.
    """

    def __init__(self, ranks: Ranks, task: Task, parameters: TrainParameters) -> None:
        self._ranks = ranks
        self._task = task
        self._parameters = parameters
        self._labels = OperatorLabels(task.model, task.graph)
        self._profile: profile | None = None
        self._first = -1

    def begins_with(self, step: int, first: int) -> bool:
        """Whether recording begins before a step of a call of `train` that began with `first`."""
        latest = self._parameters.steps - self._parameters.trace_steps
        return step == max(first, min(first + _WARM_UP, latest))

    def ends_with(self, done: int, is_over: bool) -> bool:
        """Whether recording ends once so many steps have been taken, or training is over."""
        last = self._first + self._parameters.trace_steps
        return self._profile is not None and (is_over or done == last)

    def start(self, stepper: Stepper, step: int) -> None:
        """Begin to record with a step."""
        self._first = step
        stepper.label(self._labels)
        for session in sessions_of(self._task.model):
            session.label = self._labels.label
        activities = [ProfilerActivity.CPU]
        if self._ranks.device.type == "cuda":
            torch.cuda.synchronize(self._ranks.device)
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._profile.start()

    def write(self, stepper: Stepper) -> None:
        """End recording, and write the steps of all ranks; every rank must call this.

        Raises:
            TrainError: the file cannot be written.
        """
        recorded = self._profile
        if recorded is None:
            return
        if self._ranks.device.type == "cuda":
            torch.cuda.synchronize(self._ranks.device)
        self.close()
        stepper.label(NO_LABELS)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            recorded.export_chrome_trace(str(path))
            data = json.loads(path.read_text())
        base, events = to_events(data, self._labels.ranges)
        mine = {"base_ns": base, "kind": self._task.kind, "events": events}
        rows = [json.loads(raw) for raw in self._ranks.gather_bytes(json.dumps(mine).encode())]
        failure: QsyncError | None = None
        if self._ranks.rank == 0 and self._parameters.trace is not None:
            try:
                save_document(_document(rows, self._first), self._parameters.trace)
            except OSError as error:
                failure = TrainError(
                    f"the trace cannot be written to {self._parameters.trace}: {error.strerror}",
                    "Give another file; checkpoints are not concerned",
                )
            except QsyncError as error:
                failure = error
        self._ranks.share_failure(failure)

    def close(self) -> None:
        """Record nothing any more."""
        if self._profile is not None:
            self._profile.stop()
            self._profile = None
        for session in sessions_of(self._task.model):
            session.label = None


def to_events(
    data: Mapping[str, Any], ranges: Sequence[tuple[int, int, str]]
) -> tuple[int, list[dict[str, Any]]]:
    """What a profiler recorded on one rank, as events of the lanes of a replay.

    Args:
        data: its Chrome trace.
        ranges: see `OperatorLabels`.

    Returns:
        The nanoseconds that all times count from, and the events without a process. Where
        there are kernels, they are the device's lane, and the host's lane has what launched
        them; otherwise host and device are one.
    """
    complete = [event for event in data["traceEvents"] if event.get("ph") == "X"]
    owners = _Owners(ranges)
    spans: dict[Any, list[tuple[float, float, str]]] = {}
    events: list[dict[str, Any]] = []
    for event in complete:
        label = _label(event, owners)
        if label is not None:
            begin = float(event["ts"])
            spans.setdefault(event["tid"], []).append((begin, begin + event["dur"], label))
        elif event["name"] == _STEP and event.get("cat") == "user_annotation":
            events.append(_event(event, _STEP, HOST, _STEP))
        elif str(event["name"]).startswith("gloo:"):
            events.append(_event(event, str(event["name"]), NETWORK, "communication"))
    kernels = [event for event in complete if event.get("cat") in _KERNELS]
    for rows in spans.values():
        rows.sort()
        for begin, end, label in rows:
            operator, _, work = label.rpartition(" ")
            event = {"ts": begin, "dur": end - begin}
            if kernels:
                row = _event(event, work or label, HOST, work or label)
                events.append({**row, "args": {"operator": operator or label}})
            else:
                events.append(_event(event, label, DEVICE, work or label))
    launches = {
        event["args"]["correlation"]: event
        for event in complete
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    for kernel in kernels:
        launch = launches.get(kernel["args"].get("correlation"))
        label = None if launch is None else _span_at(spans.get(launch["tid"], ()), launch["ts"])
        name = str(kernel["name"])
        if "nccl" in name.lower():
            events.append(_event(kernel, name, NETWORK, "communication"))
        else:
            work = "other" if label is None else label.rpartition(" ")[2]
            row = _event(kernel, label or name, DEVICE, work)
            events.append({**row, "args": {"kernel": name}})
    events.sort(key=lambda event: float(event["ts"]))
    return int(data.get("baseTimeNanoseconds", 0)), events


class _Owners:
    """Finds the operator that made an autograd node."""

    def __init__(self, ranges: Sequence[tuple[int, int, str]]) -> None:
        self._rows = sorted(ranges)
        self._starts = [start for start, _, _ in self._rows]
        self.names = {name for _, _, name in ranges}

    def of(self, sequence: int) -> str | None:
        """The operator; None for a node that was made under no label."""
        place = bisect.bisect_right(self._starts, sequence) - 1
        if place < 0 or sequence >= self._rows[place][1]:
            return None
        return self._rows[place][2]


def _label(event: Mapping[str, Any], owners: _Owners) -> str | None:
    """What an event of the host is part of: an operator's forward or backward, the optimizer."""
    name = str(event["name"])
    if event.get("cat") == "user_annotation":
        is_forward = name.endswith(f" {FORWARD}")
        return name if is_forward or name == _OPTIMIZER else None
    sequence = event.get("args", {}).get("Sequence number", -1)
    if name.startswith(_NODE) and sequence >= 0:
        operator = owners.of(sequence)
        return None if operator is None else f"{operator} {_BACKWARD}"
    return None


def _span_at(rows: Sequence[tuple[float, float, str]], at: float) -> str | None:
    """The label of the span of a thread that holds a moment; spans do not overlap."""
    place = bisect.bisect_right(rows, (at, float("inf"), "")) - 1
    if place < 0 or at >= rows[place][1]:
        return None
    return rows[place][2]


def _event(event: Mapping[str, Any], name: str, lane: int, category: str) -> dict[str, Any]:
    times = {"ts": event["ts"], "dur": event["dur"]}
    return {"name": name, "cat": category, "ph": "X", "tid": lane, **times}


def _document(rows: Sequence[Mapping[str, Any]], first: int) -> dict[str, Any]:
    """The trace of all ranks, from the earliest event on."""
    least = min(row["base_ns"] for row in rows)
    offsets = [(row["base_ns"] - least) / 1e3 for row in rows]
    begin = min(
        (event["ts"] + offset for row, offset in zip(rows, offsets, strict=True)
         for event in row["events"]),
        default=0.0,
    )  # fmt: skip
    events = []
    for rank, (row, offset) in enumerate(zip(rows, offsets, strict=True)):
        events += process_events(rank, row["kind"])
        events += [
            {**event, "pid": rank, "ts": event["ts"] + offset - begin} for event in row["events"]
        ]
    return {
        "displayTimeUnit": "ms",
        "traceEvents": events,
        "otherData": {"first_step": first, "torch": str(torch.__version__)},
    }
