"""What was measured of a training job: its metrics summed up, and one step of a trace by rank."""

from __future__ import annotations

import gzip
import json
import os
import re
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qsync_opt.errors import FormatError
from qsync_opt.files import read_bytes
from qsync_opt.optimize.problem import AllocationProblem
from qsync_opt.simulate.tasks import Work

#: Of the steps of a job, the first ones that do not count: buffers are made in them.
_WARM_UP_SHARE, _WARM_UP_MOST = 0.2, 20

_US = 1e-6  # Chrome traces count in microseconds
_OF_NETWORK = re.compile(r"all-reduce|gloo:|nccl:|ncclDevKernel")
_RANK = re.compile(r"rank (\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredRank:
    """The steps of one rank, without the first ones; times are medians.

    Attributes:
        rank: its number.
        kind: its device kind.
        steps: how many were taken, the first ones included.
        step_s: from the end of a step to the end of the next.
        compute_s: forward, backward and optimizer.
        wait_s: for other ranks and for what is reduced late.
        memory_bytes: largest; of a GPU what tensors take, of a CPU the whole process.
    """

    rank: int
    kind: str
    steps: int
    step_s: float
    compute_s: float
    wait_s: float
    memory_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredRun:
    """A training job.

    Attributes:
        losses: the mean over all samples of every step that all ranks have written.
        ranks: in the order of their numbers.
    """

    losses: tuple[float, ...]
    ranks: tuple[MeasuredRank, ...]

    @property
    def step_s(self) -> float:
        """Median time of a step, of the slowest rank."""
        return max(row.step_s for row in self.ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Something that a rank did.

    Attributes:
        work: what it is; None for communication.
        operator: its name; empty for the optimizer and for communication.
        start_s, end_s: from the beginning of the step.
    """

    work: Work | None
    operator: str
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredStep:
    """One step of a trace on one rank: that of median length on the first rank.

    Attributes:
        rank: its number.
        kind: its device kind.
        step_s: length of the step.
        spans: what was done, by start.
    """

    rank: int
    kind: str
    step_s: float
    spans: tuple[Span, ...]


def read_run(folder: str | os.PathLike[str]) -> MeasuredRun:
    """The metrics that `train` left in a folder.

    Raises:
        FormatError: a file is not of the format, or there is none.
    """
    from qsync_opt.runtime.metrics import global_losses, read_metrics

    metrics = read_metrics(Path(folder))
    if not metrics or not all(metrics.values()):
        rule = "must be a folder with the metrics of a training job (rank-0.jsonl, ...)"
        raise FormatError(str(folder), rule, "none of some rank" if metrics else "none")
    ranks = []
    for rank, rows in metrics.items():
        kept = rows[min(int(len(rows) * _WARM_UP_SHARE), _WARM_UP_MOST) :]
        ranks.append(
            MeasuredRank(
                rank=rank,
                kind=rows[0].kind,
                steps=len(rows),
                step_s=statistics.median(row.step_s for row in kept),
                compute_s=statistics.median(row.compute_s for row in kept),
                wait_s=statistics.median(row.wait_s for row in kept),
                memory_bytes=max(row.memory_bytes for row in rows),
            )
        )
    return MeasuredRun(losses=tuple(global_losses(metrics)), ranks=tuple(ranks))


def read_trace(
    problem: AllocationProblem, path: str | os.PathLike[str]
) -> tuple[MeasuredStep, ...]:
    """One step of every rank in a Chrome trace (.json or .json.gz).

    Events belong to operators as in `compare_traces`; what follows the name says which work it
    is. A file with one process is of the rank that its `distributedInfo` or the name of the
    process tells, and else of rank 0. Of a GPU's trace the lanes of the device count.

    Args:
        problem: the problem that was trained.
        path: of the trace.

    Raises:
        FormatError: not a trace, no operator of the problem in it, or a rank that the problem
            does not have.
    """
    where = str(path)
    data, events = _load(path)
    complete = [row for row in events if row.get("ph") == "X"]
    names = {operator.name for operator in problem.operators}
    hosts = {
        (row.get("pid"), row.get("tid"))
        for row in events
        if row.get("name") == "thread_name" and row.get("args", {}).get("name") == "host"
    }
    if any(row.get("cat") == "gpu_user_annotation" for row in complete):
        kept = ("gpu_user_annotation", "kernel")
        complete = [row for row in complete if row.get("cat") in kept or _is_step(row)]
    by_process: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for row in complete:
        if _is_step(row) or (row.get("pid"), row.get("tid")) not in hosts:
            by_process[row.get("pid")].append(row)
    kinds = [device.name for device in problem.devices for _ in range(device.workers)]
    chosen: int | None = None
    steps = []
    for pid, rows in sorted(by_process.items(), key=lambda item: str(item[0])):
        spans = [span for row in rows if (span := _span(row, names)) is not None]
        if not any(span.operator for span in spans):
            continue
        rank = _rank_of(pid, data, events)
        if not 0 <= rank < len(kinds):
            rule = f"must be of the ranks 0 to {len(kinds) - 1} of the problem"
            raise FormatError(where, rule, rank)
        marks = sorted(_times(row) for row in rows if _is_step(row))
        if chosen is None and marks:
            chosen = _median_step(marks)
        length, inside = _one_step(spans, marks, chosen)
        steps.append(MeasuredStep(rank=rank, kind=kinds[rank], step_s=length, spans=inside))
    if not steps:
        rule = "must have events named like operators of the problem"
        raise FormatError(where, rule, f"{len(complete)} events")
    return tuple(sorted(steps, key=lambda step: step.rank))


def _load(path: str | os.PathLike[str]) -> tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]]:
    try:
        data: Any = json.loads(read_bytes(path))
        if isinstance(data, list):
            data = {"traceEvents": data}
        events = [row for row in data["traceEvents"] if isinstance(row, dict)]
    except (ValueError, KeyError, TypeError, gzip.BadGzipFile) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(str(path), "must be a Chrome trace", str(error)) from None
    return data, events


def _is_step(row: Mapping[str, Any]) -> bool:
    name = str(row.get("name", ""))
    return name == "step" or name.startswith("ProfilerStep")


def _rank_of(pid: object, data: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> int:
    told = data.get("distributedInfo")
    if isinstance(told, dict) and isinstance(told.get("rank"), int):
        return int(told["rank"])
    for row in events:
        if row.get("name") == "process_name" and row.get("pid") == pid:
            match = _RANK.search(str(row.get("args", {}).get("name", "")))
            if match:
                return int(match.group(1))
    return 0


def _median_step(marks: Sequence[tuple[float, float]]) -> int:
    """The number of the step of median length."""
    order = sorted(range(len(marks)), key=lambda index: marks[index][1] - marks[index][0])
    return order[len(order) // 2]


def _one_step(
    spans: Sequence[Span], marks: Sequence[tuple[float, float]], chosen: int | None
) -> tuple[float, tuple[Span, ...]]:
    """Length of the chosen step and the spans in it; of all there is where no step is marked."""
    if marks:
        begin, end = marks[min(chosen or 0, len(marks) - 1)]
        spans = [span for span in spans if begin <= span.start_s < end]
    else:
        begin = min(span.start_s for span in spans)
        end = max(span.end_s for span in spans)
    moved = (
        replace(span, start_s=span.start_s - begin, end_s=span.end_s - begin) for span in spans
    )
    return end - begin, tuple(sorted(moved, key=lambda span: (span.start_s, span.end_s)))


def _times(row: Mapping[str, Any]) -> tuple[float, float]:
    begin = float(row.get("ts", 0.0)) * _US
    return begin, begin + float(row.get("dur", 0.0)) * _US


def _span(row: Mapping[str, Any], names: set[str]) -> Span | None:
    label = str(row.get("name", ""))
    begin, end = _times(row)
    name, _, rest = label.partition(" ")
    if label in names:
        name, rest = label, str(row.get("cat", ""))
    if name in names:
        known = {work.value: work for work in Work}
        work = known.get(rest, Work.BACKWARD if "backward" in rest else Work.FORWARD)
        return Span(work=work, operator=name, start_s=begin, end_s=end)
    if label.lower().startswith("optimizer"):
        return Span(work=Work.OPTIMIZER, operator="", start_s=begin, end_s=end)
    if row.get("cat") == "communication" or _OF_NETWORK.match(label):
        return Span(work=None, operator="", start_s=begin, end_s=end)
    return None
