"""What every step of every rank was like, as lines of JSON in a file per rank.

A line has the fields of `StepMetrics`. Lines are written whole and one by one, so a rank that
is killed leaves at most one broken line, the last, which readers leave out. A resumed job
first removes the lines of the steps that it does again.
"""

from __future__ import annotations

import json
import math
import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from qsync_opt.errors import FormatError
from qsync_opt.files import write_atomically

#: `json.dumps` would make one for every line.
_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)

_PREFIX, _SUFFIX = "rank-", ".jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """One step of one rank.

    Attributes:
        step: number of the step, from 0.
        rank: number of the rank.
        kind: its device kind.
        loss: mean over the samples of this rank.
        samples: how many those are.
        step_s: from the end of the step before to the end of this one.
        compute_s: forward and backward up to the last gradient, and the optimizer.
        wait_s: after the last gradient: for other ranks, and for what is reduced late.
        memory_bytes: largest so far; of a GPU what tensors take, of a CPU the process.
        loss_scale: factor of the loss in this step.
        skipped: whether gradients overflowed, so that nothing was changed.
        refinement: what became of the plan just before this step; None where nothing was due.
        sent_bytes: of gradients, and of sharded weights, that the rank sent; of an all-reduce
            what a ring sends. 0 for a single rank, and in files of early releases.
    """

    step: int
    rank: int
    kind: str
    loss: float
    samples: int
    step_s: float
    compute_s: float
    wait_s: float
    memory_bytes: int
    loss_scale: float
    skipped: bool
    refinement: str | None = None
    sent_bytes: int = 0


_NAMES = tuple(field.name for field in fields(StepMetrics))
_ADDED = ("sent_bytes",)  # since the first release

#: Steps that one rank may have written and another not yet: numbers of a GPU come a step late.
_APART = 2


class MetricsFile:
    """Appends the steps of one rank to its file in a folder.

    Args:
        folder: of the job; it exists.
        rank: whose steps.
        first_step: earlier lines from this step on are removed.
    """

    def __init__(self, folder: Path, rank: int, first_step: int) -> None:
        self.path = folder / f"{_PREFIX}{rank}{_SUFFIX}"
        kept = [row for row in _rows(self.path) if row["step"] < first_step]
        write_atomically(self.path, b"".join(_line(row) for row in kept))
        # Unbuffered: a line is handed to the system by one call, whatever happens next.
        self._stream = self.path.open("ab", buffering=0)

    def write(self, metrics: StepMetrics) -> None:
        """Append one step."""
        self._stream.write(_line({name: getattr(metrics, name) for name in _NAMES}))

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


def read_metrics(folder: Path) -> dict[int, list[StepMetrics]]:
    """Rank -> its steps, from the files in a folder.

    Raises:
        FormatError: a line other than the last is not of the format.
    """
    found = {}
    for path in folder.glob(f"{_PREFIX}*{_SUFFIX}"):
        number = path.name[len(_PREFIX) : -len(_SUFFIX)]
        if number.isdecimal():
            found[int(number)] = [StepMetrics(**row) for row in _rows(path)]
    return dict(sorted(found.items()))


def global_losses(metrics: Mapping[int, list[StepMetrics]]) -> list[float]:
    """The mean loss over all samples of each step that every rank of it has written.

    A job may have gone on with fewer or more ranks: those of a step are the ranks that have
    written it. Ranks that are at work now are at most some steps apart, and what not all of them
    have written is left out.
    """
    last = [rows[-1].step for rows in metrics.values() if rows]
    reached = min((step for step in last if step >= max(last) - _APART), default=-1)
    steps: dict[int, list[StepMetrics]] = {}
    for rows in metrics.values():
        for row in rows:
            steps.setdefault(row.step, []).append(row)
    losses = []
    for step, found in sorted(steps.items()):
        if step <= reached:
            total = sum(row.samples for row in found)
            losses.append(sum(row.loss * row.samples for row in found) / total)
    return losses


def memory_in_use(device: torch.device) -> int:
    """The largest memory so far, see `StepMetrics`."""
    if device.type == "cuda":
        # `max_memory_allocated` sorts all figures of the allocator for this one.
        stats = torch.cuda.memory_stats_as_nested_dict(device)
        return int(stats["allocated_bytes"]["all"]["peak"]) if stats else 0
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024  # Linux counts KiB


def _line(row: Mapping[str, Any]) -> bytes:
    # Python writes NaN and Infinity, which are no JSON; a reader gets None.
    finite = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in row.items()
    }
    return _ENCODER.encode(finite).encode() + b"\n"


def _rows(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    *lines, rest = path.read_bytes().split(b"\n")
    del rest  # empty, or what a killed rank could not finish
    return [_row(line, f"{path}:{number}") for number, line in enumerate(lines, 1)]


def _row(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise FormatError(where, "must be a line of JSON", line.decode(errors="replace")) from error
    if not isinstance(row, dict) or not set(_NAMES) - set(_ADDED) <= set(row) <= set(_NAMES):
        raise FormatError(where, f"must have the fields {', '.join(_NAMES)}", row)
    return {**row, "loss": float("nan") if row["loss"] is None else row["loss"]}
