"""Dynamic batch sizing: uneven shares with which ranks of unequal speed finish together.

What Poplar, LB-BSP and others do instead of lowering precisions. Every rank times its forward
and backward for two numbers of samples n; a line a + b n through them predicts others. Samples
are then handed out one by one, each to the rank that would be done first with one more. That
makes the last rank finish as early as the lines allow: an exchange of samples cannot help,
because every rank that has one less would still have got it. As lines bend (small batches
leave a GPU idle), it is done again around what was found, and what was fastest is kept.

How much fits the memory of a GPU is told from the peaks of the same two runs.
"""

from __future__ import annotations

import heapq
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from qsync_opt.errors import ParameterError
from qsync_opt.runtime.distributed import Ranks
from qsync_opt.runtime.passes import Pass, leaving_no_trace

#: How often shares are measured and chosen anew.
_ROUNDS = 4

#: Passes before those that are timed, and those: at least so many, and for so long.
_WARM_UP, _RUNS, _LEAST_S = 1, 5, 0.1

#: Least slope of a line, of its mean: a GPU that waits for its host seems to take samples for
#: nothing, up to a number that two points do not show.
_LEAST_SLOPE = 0.1

#: Share of the memory that is left free: allocators do not pack it full.
_RESERVE = 0.08

#: Words of 4 bytes that a parameter takes and that are not there yet: DDP's bucket, and two of
#: an optimizer such as Adam.
_WORDS_TO_COME = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """What a rank takes for n samples: `base_s + sample_s * n` seconds.

    Attributes:
        base_s: whatever the number.
        sample_s: for each sample, > 0.
        most: samples that fit its memory; None: nobody knows a limit.
    """

    base_s: float
    sample_s: float
    most: int | None = None


def balanced_counts(batch_size: int, speeds: Sequence[Speed], least: int = 1) -> list[int]:
    """Samples of every rank, so that the last one finishes as early as can be.

    Args:
        batch_size: all of them.
        speeds: of the ranks.
        least: samples that every rank must have.

    Raises:
        ParameterError: they do not fit the memories, or are too few.
    """
    counts = [least] * len(speeds)
    left = batch_size - sum(counts)
    room = sum(batch_size if s.most is None else max(0, s.most - least) for s in speeds)
    if left < 0 or left > room:
        rule = f"must be {sum(counts)} to {sum(counts) + room}, what ranks can take"
        raise ParameterError("batch_size", rule, batch_size)
    waiting = [(s.base_s + s.sample_s * (least + 1), rank) for rank, s in enumerate(speeds)]
    heapq.heapify(waiting)
    while left:
        _, rank = heapq.heappop(waiting)
        speed = speeds[rank]
        if speed.most is not None and counts[rank] >= speed.most:
            continue  # for good
        counts[rank] += 1
        left -= 1
        heapq.heappush(waiting, (speed.base_s + speed.sample_s * (counts[rank] + 1), rank))
    return counts


def find_counts(
    model: nn.Module,
    ranks: Ranks,
    work: Pass,
    batch_size: int,
    accumulation: int,
    memory_bytes: int | None,
) -> list[int]:
    """Samples of every rank by what they take; the same on all ranks, which must all call this.

    Args:
        model: of this rank; nothing of it is changed.
        ranks: of the job.
        work: forward and backward of this rank.
        batch_size: samples of a step, over all ranks.
        accumulation: micro-batches of a step; each is run alone.
        memory_bytes: what this rank may take of a GPU; None: all that the process may.

    Raises:
        ParameterError: the batch does not fit the memories together.
    """
    world = ranks.world
    counts = [batch_size // world + (rank < batch_size % world) for rank in range(world)]
    best, fastest_s = counts, math.inf
    for _ in range(_ROUNDS if world > 1 else 0):
        mine = max(1, counts[ranks.rank] // accumulation)
        with leaving_no_trace(model):
            speed, taken_s = _speed(model, ranks, work, mine, memory_bytes)
        row = [speed.base_s, speed.sample_s, speed.most, taken_s]
        rows = [json.loads(raw) for raw in ranks.gather_bytes(json.dumps(row).encode())]
        times = [math.inf if taken is None else taken for *_, taken in rows]
        if max(times) < fastest_s:
            best, fastest_s = counts, max(times)
        # Of a whole step: its micro-batches one after the other.
        speeds = [
            Speed(
                base_s=base_s * accumulation,
                sample_s=sample_s,
                most=None if most is None else most * accumulation,
            )
            for base_s, sample_s, most, _ in rows
        ]
        before, counts = counts, balanced_counts(batch_size, speeds, accumulation)
        if counts == before:
            break
    return best if math.isfinite(fastest_s) else counts


def _speed(
    model: nn.Module, ranks: Ranks, work: Pass, samples: int, memory_bytes: int | None
) -> tuple[Speed, float | None]:
    """Time two numbers of samples, while the other ranks do the same.

    Returns:
        The line through them, and the seconds of the larger; None if so many do not fit.
    """
    device = ranks.device
    wanted, limit = samples, None
    while True:
        try:
            large_s, large_bytes = _run(work, samples, device)
            break
        except torch.OutOfMemoryError:
            if samples == 1:
                raise
            samples = limit = samples // 2
            model.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
    taken_s = large_s if samples == wanted else None
    small = max(1, samples // 2)
    if small == samples:
        return Speed(base_s=0.0, sample_s=large_s, most=limit), taken_s
    small_s, small_bytes = _run(work, small, device)
    slope = max((large_s - small_s) / (samples - small), _LEAST_SLOPE * large_s / samples)
    if device.type == "cuda":
        a_sample = max(1.0, (large_bytes - small_bytes) / (samples - small))
        to_come = _WORDS_TO_COME * 4 * sum(p.numel() for p in model.parameters())
        free = _memory_of(device, memory_bytes) * (1 - _RESERVE) - large_bytes - to_come
        fits = samples + math.floor(free / a_sample)
        limit = max(1, fits if limit is None else min(limit, fits))
    speed = Speed(base_s=max(0.0, large_s - slope * samples), sample_s=slope, most=limit)
    fits = speed.most is None or wanted <= speed.most
    return speed, taken_s if fits else None


def _run(work: Pass, samples: int, device: torch.device) -> tuple[float, int]:
    """Median seconds of a pass, and the most memory of the GPU that it took."""
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    times: list[float] = []
    while len(times) < _WARM_UP + _RUNS or sum(times[_WARM_UP:]) < _LEAST_S:
        begin = time.perf_counter()
        work.run(0, range(samples), count=len(times), factor=1.0)
        if is_cuda:
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    return (
        statistics.median(times[_WARM_UP:]),
        torch.cuda.max_memory_allocated(device) if is_cuda else 0,
    )


def _memory_of(device: torch.device, memory_bytes: int | None) -> float:
    total: float = torch.cuda.get_device_properties(device).total_memory
    fraction: Callable[[Any], float] | None = getattr(
        torch.cuda, "get_per_process_memory_fraction", None
    )  # since torch 2.8
    if fraction is not None:
        total *= fraction(device)
    return total if memory_bytes is None else min(total, memory_bytes)
