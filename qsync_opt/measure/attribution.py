"""Whose work it was: low-level operations of the backward, and time, by call."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from qsync_opt.graph import Coverage
from qsync_opt.measure.recorder import Recorder
from qsync_opt.measure.records import ACCUMULATE, Work


class SequenceOwners:
    """Finds the call that made an autograd node, by the node's sequence number."""

    def __init__(self, recorder: Recorder) -> None:
        self._owner: dict[int, int] = {}
        for index, call in enumerate(recorder.calls):
            self._owner.update(dict.fromkeys(range(*call.sequence), index))
        self._owner.update(recorder.tensors.custom)

    def of(self, sequence: int | None) -> int | None:
        """Index of the call; None for no node, or one that no call made."""
        return None if sequence is None else self._owner.get(sequence)


def backward_of_calls(recorder: Recorder, owners: SequenceOwners) -> list[Work]:
    """What the backward of each call ran, without adding up gradients."""
    works = [Work() for _ in recorder.calls]
    for entry in recorder.backward.values():
        owner = owners.of(entry.sequence)
        if owner is not None and not entry.adds:
            work = works[owner]
            work.flops += entry.work.flops
            work.products += entry.work.products
            work.marks += entry.work.marks
            work.computes |= entry.work.computes
    return works


def coverage_of(recorder: Recorder, owners: SequenceOwners) -> Coverage:
    """How much of the step's time belongs to calls."""
    explained = _seconds(call.work for call in recorder.calls)
    forward_s = explained + _seconds([recorder.outside])
    missing: dict[str, float] = defaultdict(float)
    if forward_s > explained:
        missing["forward: operations outside of every torch function"] = forward_s - explained
    backward_s = 0.0
    for entry in recorder.backward.values():
        seconds = _seconds([entry.work])
        backward_s += seconds
        # Adding up gradients is in the graph as `GraphTensor.gradients`.
        accumulates = entry.adds or entry.sequence == ACCUMULATE
        if accumulates or owners.of(entry.sequence) is not None:
            explained += seconds
        else:
            missing[f"backward: {entry.name}"] += seconds
    ranked = sorted(missing.items(), key=lambda item: (-item[1], item[0]))
    return Coverage(
        forward_s=forward_s, backward_s=backward_s, explained_s=explained, missing=dict(ranked)
    )


def _seconds(works: Iterable[Work]) -> float:
    total = 0.0
    for work in works:
        for start, end in work.marks:
            total += end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3
    return total
