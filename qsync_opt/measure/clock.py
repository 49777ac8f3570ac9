"""Timing calls on a device: warm-up, repetition, median and spread.

On a GPU a call returns when it is launched, so two times are taken: the device's, between two
events, and the host's. So that a slow launch does not show in the device's time, the device is
first kept busy until everything is launched.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

#: Cycles of `torch.cuda._sleep` in a second, more than any GPU's clock has.
_CYCLES_PER_S = 2.5e9


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """How long something took.

    Attributes:
        time_s: median of the device's time.
        spread: distance of the quartiles over the median.
        host_s: median until the host had launched it; 0 on a CPU.
    """

    time_s: float
    spread: float
    host_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """How hard to try.

    Attributes:
        warm_up: calls before the first sample.
        samples: at least.
        budget_s: more samples are taken until this is spent.
        sample_s: calls are repeated within a sample up to this.
        most_calls: in one sample.
        retries: where the spread stays above `largest_spread`, with twice the budget each.
        largest_spread: of a device that is not busy with something else.
    """

    warm_up: int = 3
    samples: int = 7
    budget_s: float = 0.04
    sample_s: float = 1e-3
    most_calls: int = 20
    retries: int = 2
    largest_spread: float = 0.2


class Clock:
    """Times calls on one device.

    Args:
        device: where the calls run.
        effort: how hard to try.
        timer: gives seconds. `time.thread_time` leaves out what other processes took from a
            CPU, and is right for one thread only.
    """

    def __init__(
        self,
        device: torch.device,
        effort: Effort | None = None,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.device = device
        self.effort = effort or Effort()
        self.timer = timer
        self._is_cuda = device.type == "cuda"
        self._held: list[object] = []
        self._held_results = 0

    def time(self, call: Callable[[], object], *, results: int = 0) -> Timing:
        """Time a call; the best of several tries where the device seems busy.

        Args:
            call: what to time.
            results: how many results to hold before they are let go together. A step keeps
                what its forward makes, so that every call there gets memory that the system
                hands out anew; on a CPU that takes time. 0: each result is dropped at once.
        """
        self._held_results = results
        for _ in range(self.effort.warm_up):
            call()
        self.synchronize()
        begin = self.timer()
        call()
        self.synchronize()
        once_s = max(self.timer() - begin, 1e-7)
        most = self.effort.most_calls if not results else min(self.effort.most_calls, results)
        calls = min(most, max(1, math.ceil(self.effort.sample_s / once_s)))
        self._held.clear()
        best: Timing | None = None
        for attempt in range(self.effort.retries + 1):
            found = self._sample(call, calls, self.effort.budget_s * 2**attempt)
            if best is None or found.spread < best.spread:
                best = found
            if best.spread <= self.effort.largest_spread:
                break
        self._held.clear()
        return best  # type: ignore[return-value]  # the loop runs at least once

    def synchronize(self) -> None:
        """Wait for the device."""
        if self._is_cuda:
            torch.cuda.synchronize(self.device)

    def _sample(self, call: Callable[[], object], calls: int, budget_s: float) -> Timing:
        take = self._on_gpu if self._is_cuda else self._on_cpu
        times: list[float] = []
        hosts: list[float] = []
        end = time.perf_counter() + budget_s
        host_s = 0.0
        while len(times) < self.effort.samples or time.perf_counter() < end:
            seconds, host_s = take(call, calls, host_s)
            times.append(seconds)
            hosts.append(host_s)
        host = statistics.median(hosts) if self._is_cuda else 0.0
        return Timing(time_s=statistics.median(times), spread=spread_of(times), host_s=host)

    def _on_cpu(self, call: Callable[[], object], calls: int, _: float) -> tuple[float, float]:
        held = self._held
        if len(held) + calls > self._held_results:
            held.clear()
        begin = self.timer()
        for _ in range(calls):
            held.append(call())
        seconds = (self.timer() - begin) / calls
        if not self._held_results:
            held.clear()
        return seconds, 0.0

    def _on_gpu(self, call: Callable[[], object], calls: int, host_s: float) -> tuple[float, float]:
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        busy_s = 1e-4 + 1.5 * calls * host_s
        torch.cuda._sleep(int(busy_s * _CYCLES_PER_S))  # type: ignore[no-untyped-call]
        start.record()
        begin = self.timer()
        for _ in range(calls):
            call()
        launched_s = self.timer() - begin
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / calls, launched_s / calls


def spread_of(times: Sequence[float]) -> float:
    """Distance of the quartiles over the median; 0 for one time."""
    middle = statistics.median(times)
    if len(times) < 2 or middle <= 0:
        return 0.0
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return (high - low) / middle
