"""Batch sizing: whether no other shares finish earlier, and what memory and bent lines do."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from qsync_opt.errors import ParameterError
from qsync_opt.runtime import batch_sizing
from qsync_opt.runtime.batch_sizing import Speed, balanced_counts, find_counts
from qsync_opt.runtime.distributed import Ranks


def finish(counts: list[int], speeds: list[Speed]) -> float:
    return max(s.base_s + s.sample_s * n for s, n in zip(speeds, counts, strict=True))


def all_counts(total: int, speeds: list[Speed], least: int) -> list[list[int]]:
    rows = itertools.product(range(least, total + 1), repeat=len(speeds))
    return [
        list(row)
        for row in rows
        if sum(row) == total
        and all(s.most is None or n <= s.most for s, n in zip(speeds, row, strict=True))
    ]


@pytest.mark.parametrize("seed", range(40))
def test_no_other_counts_finish_earlier(seed: int) -> None:
    draw = random.Random(seed)
    least = draw.choice([1, 2])
    speeds = [
        Speed(
            base_s=draw.choice([0.0, draw.uniform(0, 5)]),
            sample_s=draw.uniform(0.1, 3),
            most=draw.choice([None, draw.randint(2, 9)]),
        )
        for _ in range(draw.choice([2, 3]))
    ]
    total = draw.randint(least * len(speeds), 12)
    possible = all_counts(total, speeds, least)
    if not possible:
        with pytest.raises(ParameterError, match="batch_size"):
            balanced_counts(total, speeds, least)
        return
    found = balanced_counts(total, speeds, least)
    assert found in possible
    assert finish(found, speeds) == pytest.approx(min(finish(c, speeds) for c in possible))


def test_a_batch_that_is_too_small_or_too_large_is_refused() -> None:
    speeds = [Speed(base_s=0.0, sample_s=1.0, most=3), Speed(base_s=0.0, sample_s=1.0, most=4)]
    assert balanced_counts(7, speeds) == [3, 4]
    for size in (1, 8):
        with pytest.raises(ParameterError, match="must be 2 to 7"):
            balanced_counts(size, speeds)


class Peers(Ranks):
    """Rank 0 of a job whose other ranks answer by a function of what is asked."""

    def gather_bytes(self, message: bytes) -> list[bytes]:
        return [message, *(answer(message) for answer in PEERS)]


PEERS: list[Callable[[bytes], bytes]] = []


def counts_of(
    monkeypatch: pytest.MonkeyPatch, own: Callable[[int], float], peer: Callable[[int], float]
) -> tuple[list[int], list[int]]:
    """What `find_counts` makes of two curves for 24 samples, and what rank 0 was measured at."""
    asked: list[int] = []

    def run(work: object, samples: int, device: torch.device) -> tuple[float, int]:
        asked.append(samples)
        return own(samples), 0

    def answer(message: bytes) -> bytes:
        samples = 24 - asked[-2]  # the peer has the rest
        small = samples // 2
        slope = (peer(samples) - peer(small)) / (samples - small)
        row = [peer(samples) - slope * samples, slope, None, peer(samples)]
        return json.dumps(row).encode()

    monkeypatch.setattr(batch_sizing, "_run", run)
    monkeypatch.setitem(globals(), "PEERS", [answer])
    ranks = Peers(rank=0, world=2, device=torch.device("cpu"))
    work: Any = None
    return find_counts(nn.Linear(2, 2), ranks, work, 24, 1, None), asked


def test_shares_follow_the_speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, asked = counts_of(monkeypatch, lambda n: 1.0 * n, lambda n: 3.0 * n)
    assert counts == [18, 6]
    assert asked == [12, 6, 18, 9]  # equal shares, then what was found, which stays


def test_a_host_bound_rank_does_not_get_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 12 samples cost nothing more here; beyond, they cost a lot."""

    def own(samples: int) -> float:
        return 12.0 + 6.0 * max(0, samples - 12)

    counts, asked = counts_of(monkeypatch, own, lambda n: 1.5 * n)
    best = min(max(own(n), 1.5 * (24 - n)) for n in range(1, 24))
    assert max(asked) > 13  # it was tried
    assert max(own(counts[0]), 1.5 * counts[1]) <= 1.1 * max(best, own(12), 1.5 * 12)
