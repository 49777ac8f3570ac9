"""Which samples of a global batch a rank computes, and how much they count.

A step's global batch has B samples, numbered from 0. Rank r takes b_r of them in one run, cut
into its micro-batches. DDP averages gradients over the W ranks; so that the average is the
gradient of the mean loss over all B samples, the loss of a micro-batch of n samples, itself a
mean, is multiplied by W n / B.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qsync_opt.errors import ParameterError
from qsync_opt.measure.step import leaves, to_device

#: `batches(step, rows)`: the samples `rows` of the global batch of a step. The content of a
#: sample must depend on the step and its number alone, so that shares and restarts change nothing.
Batches = Callable[[int, range], Any]

_SUM_TOLERANCE = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Samples that go through the model at once.

    Attributes:
        rows: their numbers in the global batch.
        weight: factor of their mean loss.
    """

    rows: range
    weight: float


def count_samples(batch_size: int, shares: Sequence[float], accumulation: int) -> list[int]:
    """Samples of every rank: as near to its share as whole numbers allow, all of them given out.

    Args:
        batch_size: B.
        shares: of the ranks; they sum to 1.
        accumulation: micro-batches; each must get a sample.

    Raises:
        ParameterError: shares that do not sum to 1, or are not positive, or a rank that would
            have fewer samples than micro-batches.
    """
    if any(not (math.isfinite(share) and share > 0) for share in shares):
        raise ParameterError("shares", "must be positive numbers", list(shares))
    if abs(math.fsum(shares) - 1) > _SUM_TOLERANCE:
        remedy = "They are fractions of the global batch, one for every rank"
        raise ParameterError("shares", "must sum to 1", list(shares), remedy)
    exact = [batch_size * share for share in shares]
    counts = [math.floor(part + _SUM_TOLERANCE) for part in exact]
    by_rest = sorted(range(len(shares)), key=lambda rank: (counts[rank] - exact[rank], rank))
    for rank in by_rest[: batch_size - sum(counts)]:
        counts[rank] += 1
    for rank, count in enumerate(counts):
        if count < accumulation:
            rule = f"must give every rank at least {accumulation} samples (one a micro-batch)"
            remedy = f"Rank {rank} gets {count}: enlarge the batch or its share"
            raise ParameterError("batch_size", rule, batch_size, remedy)
    return counts


def micro_batches(counts: Sequence[int], rank: int, accumulation: int) -> list[MicroBatch]:
    """The micro-batches of a rank: its run of samples cut as evenly as possible."""
    total, world = sum(counts), len(counts)
    start = sum(counts[:rank])
    base, extra = divmod(counts[rank], accumulation)
    parts = []
    for number in range(accumulation):
        size = base + (number < extra)
        rows = range(start, start + size)
        parts.append(MicroBatch(rows=rows, weight=world * size / total))
        start += size
    return parts


def batch_rows(batch: Any) -> int:
    """How many samples a batch has: the length of its tensors.

    Raises:
        ParameterError: it has no tensor, or tensors of unequal lengths.
    """
    lengths = {tensor.shape[0] for _, tensor in leaves(batch) if tensor.dim() > 0}
    if len(lengths) != 1:
        remedy = "Offer batches(step, rows) for a batch whose tensors are of several lengths"
        rule = "must hold tensors with one row for every sample"
        raise ParameterError("batch", rule, sorted(lengths), remedy)
    return lengths.pop()


class Slices:
    """`Batches` from one batch, used in every step: its rows, from the start again at its end.

    Args:
        batch: see `measure.step`.
        device: where the slices are kept.
    """

    def __init__(self, batch: Any, device: torch.device) -> None:
        self._rows = batch_rows(batch)
        self._batch = to_device(batch, device)
        self._kept: dict[range, Any] = {}

    def __call__(self, step: int, rows: range) -> Any:
        """The samples; the same object for the same rows."""
        if rows not in self._kept:
            first = rows.start % self._rows
            if first + len(rows) <= self._rows:
                place: Any = slice(first, first + len(rows))
            else:
                place = torch.arange(rows.start, rows.stop) % self._rows
            self._kept[rows] = _take(self._batch, place)
        return self._kept[rows]


def _take(value: Any, place: Any) -> Any:
    if isinstance(value, Tensor):
        if value.dim() == 0:
            return value
        return value[place if isinstance(place, slice) else place.to(value.device)]
    if isinstance(value, Mapping):
        return {key: _take(item, place) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_take(item, place) for item in value)
    return value
