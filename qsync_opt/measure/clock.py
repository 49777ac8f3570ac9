"""Timing calls on a device: warm-up, repetition, median and spread.

A step runs many other operators between two runs of one, so the L2 cache is overwritten before
each run, and then only what the step has just written is put back into it (`warm`).

On a GPU a call returns when it is launched, so two times are taken: the device's, between two
events, and the host's. So that a slow launch does not show in the device's time, the device is
first kept busy until everything is launched.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

#: Cycles of `torch.cuda._sleep` in a second, more than any GPU's clock has.
_CYCLES_PER_S = 2.5e9

#: The device is kept busy at least and at most so long before what is timed.
_LEAST_BUSY_S, _MOST_BUSY_S = 1e-4, 0.1

#: How much longer the device is kept busy than the host took to launch as much before.
_HEAD_START = 1.5

#: Overwriting this many times the L2 cache leaves nothing of what was in it.
_FLUSHED = 2

#: Where Linux describes the caches of a core (Documentation/ABI/testing/sysfs-devices-system-cpu).
_CPU_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")

#: Times nearer to each other than this do not tell a busy device from a quiet one: events have
#: a resolution of about 0.5 us (documentation of cudaEventElapsedTime).
_EVENT_RESOLUTION_S = 1e-6

#: Tiny kernels in a row, and rounds, from which the cost of the events themselves is told.
_TINY, _TINY_ROUNDS = 20, 15

#: Samples of a call that takes longer than a second all together.
_LEAST_SAMPLES = 3


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
        step_bytes: what a step writes from one run of a call to the next, which bounds what
            is overwritten of a CPU's caches; None: more than they hold.
    """

    def __init__(
        self,
        device: torch.device,
        effort: Effort | None = None,
        timer: Callable[[], float] = time.perf_counter,
        step_bytes: int | None = None,
    ) -> None:
        self.device = device
        self.effort = effort or Effort()
        self.timer = timer
        self._is_cuda = device.type == "cuda"
        self._held: list[object] = []
        self._held_results = 0
        self._gpu: _GpuLane | None = None
        self._cpu = _CpuCache(step_bytes)

    @property
    def cache_bytes(self) -> int:
        """Size of the L2 cache, of a CPU for each thread; 0 where the system does not say."""
        return self._lane().cache_bytes if self._is_cuda else self._cpu.cache_bytes

    def time(
        self, call: Callable[[], object], *, results: int = 0, warm: Sequence[Tensor] = ()
    ) -> Timing:
        """Time a call; the best of several tries where the device seems busy.

        Args:
            call: what to time.
            results: how many results to hold before they are let go together. A step keeps
                what its forward makes, so that every call there gets memory that the system
                hands out anew; on a CPU that takes time. 0: each result is dropped at once.
            warm: what the step has just written when the call begins, the newest last. It
                is in the L2 cache then, and nothing else is.
        """
        self._held_results = results
        for _ in range(self.effort.warm_up):
            call()
        self.synchronize()
        begin = self.timer()
        call()
        host_s = self.timer() - begin
        self.synchronize()
        once_s = max(self.timer() - begin, 1e-7)
        most = self.effort.most_calls
        if results and not self._is_cuda:
            most = min(most, results)
        calls = min(most, max(1, math.ceil(self.effort.sample_s / once_s)))
        self._held.clear()
        best: Timing | None = None
        for attempt in range(self.effort.retries + 1):
            budget_s = self.effort.budget_s * 2**attempt
            if self._is_cuda:
                found = self._on_gpu(call, calls, budget_s, once_s, host_s, warm)
            else:
                found = self._on_cpu(call, budget_s, [_words(tensor) for tensor in warm])
            if best is None or found.spread < best.spread:
                best = found
            distance_s = best.spread * best.time_s
            if best.spread <= self.effort.largest_spread or (
                self._is_cuda and distance_s <= _EVENT_RESOLUTION_S
            ):
                break
        self._held.clear()
        return best  # type: ignore[return-value]  # the loop runs at least once

    def synchronize(self) -> None:
        """Wait for the device."""
        if self._is_cuda:
            torch.cuda.synchronize(self.device)

    def _on_cpu(
        self, call: Callable[[], object], budget_s: float, warm: Sequence[Tensor]
    ) -> Timing:
        times: list[float] = []
        held = self._held
        end = time.perf_counter() + budget_s
        while len(times) < self.effort.samples or time.perf_counter() < end:
            if len(held) >= self._held_results:
                held.clear()
            self._cpu.leave(warm)
            begin = self.timer()
            held.append(call())
            times.append(self.timer() - begin)
            if not self._held_results:
                held.clear()
        return Timing(time_s=statistics.median(times), spread=spread_of(times))

    def _on_gpu(
        self,
        call: Callable[[], object],
        calls: int,
        budget_s: float,
        once_s: float,
        host_s: float,
        warm: Sequence[Tensor],
    ) -> Timing:
        lane = self._lane()
        bits = [_words(tensor) for tensor in warm]
        samples = min(self.effort.samples, max(_LEAST_SAMPLES, math.ceil(1.0 / once_s)))
        times: list[float] = []
        hosts: list[float] = []
        end = time.perf_counter() + budget_s
        while len(times) < samples or time.perf_counter() < end:
            seconds, host_s, launched = lane.take(call, calls, host_s, bits, self.timer)
            times += seconds
            hosts += launched
        return Timing(
            time_s=statistics.median(times),
            spread=spread_of(times),
            host_s=statistics.median(hosts),
        )

    def _lane(self) -> _GpuLane:
        if self._gpu is None:
            self._gpu = _GpuLane(self.device)
        return self._gpu


class _CpuCache:
    """The L2 caches of the threads that torch uses on a CPU."""

    def __init__(self, step_bytes: int | None) -> None:
        self.cache_bytes = _l2_bytes()
        junk_bytes = _FLUSHED * self.cache_bytes * torch.get_num_threads()
        if step_bytes is not None:
            junk_bytes = min(junk_bytes, step_bytes)
        self._junk = torch.zeros(junk_bytes // 4, dtype=torch.int32)

    def leave(self, warm: Sequence[Tensor]) -> None:
        """Leave in the caches what a step would: above all the tensors that it just wrote."""
        self._junk.add_(1)
        for tensor in warm:
            tensor.bitwise_or_(0)


def _l2_bytes() -> int:
    """Bytes of a core's L2 cache, from Linux; 0 where the system does not say."""
    for level in _CPU_CACHES.glob("index*/level"):
        with suppress(OSError, ValueError):
            size = (level.parent / "size").read_text().strip()
            if level.read_text().strip() == "2" and size.endswith("K"):
                return int(size[:-1]) * 1024
    return 0


class _GpuLane:
    """The current stream of a GPU, on which calls are timed one by one."""

    def __init__(self, device: torch.device) -> None:
        properties: Any = torch.cuda.get_device_properties(device)
        self._device = device
        self.cache_bytes = int(properties.L2_cache_size)
        self._junk = torch.empty(
            max(1, _FLUSHED * self.cache_bytes // 4), dtype=torch.int32, device=device
        )
        self._events_s = 0.0
        self._events_s = self._cost_of_events()

    def take(
        self,
        call: Callable[[], object],
        calls: int,
        host_s: float,
        warm: Sequence[Tensor],
        timer: Callable[[], float],
    ) -> tuple[list[float], float, list[float]]:
        """Run a call some times.

        Args:
            call: what to time.
            calls: how often.
            host_s: what the host takes for one, about.
            warm: as in `Clock.time`, as words.
            timer: gives the host's seconds.

        Returns:
            The device's seconds of each call, the host's for one with all around it, and the
            host's of each call.
        """
        marks = [(_event(), _event()) for _ in range(calls)]
        hosts = []
        keep_busy(_HEAD_START * calls * host_s, self._device)
        begin = timer()
        for start, end in marks:
            self._junk.zero_()
            for tensor in warm:
                tensor.bitwise_or_(0)  # writes what is there, as its producer did
            start.record()
            before = timer()
            call()
            hosts.append(timer() - before)
            end.record()
        around_s = (timer() - begin) / calls
        marks[-1][1].synchronize()
        times = [max(0.0, start.elapsed_time(end) / 1e3 - self._events_s) for start, end in marks]
        return times, around_s, hosts

    def _cost_of_events(self) -> float:
        """What two events around a kernel add to its time in a row of kernels."""
        tiny = torch.zeros(1, device=self._device)

        def seconds(kernels: int) -> float:
            found = []
            for _ in range(_TINY_ROUNDS):
                start, end = _event(), _event()
                keep_busy(1e-3, self._device)
                start.record()
                for _ in range(kernels):
                    tiny.add_(1)
                end.record()
                end.synchronize()
                found.append(float(start.elapsed_time(end)) / 1e3)
            return statistics.median(found)

        seconds(_TINY)  # the first launch loads the kernel
        one_s, row_s = seconds(1), seconds(_TINY)
        return max(0.0, one_s - (row_s - one_s) / (_TINY - 1))


def keep_busy(seconds: float, device: torch.device) -> None:
    """Let a GPU wait, so that the host gets ahead of it by some seconds (at most 0.1)."""
    busy_s = min(_LEAST_BUSY_S + seconds, _MOST_BUSY_S)
    with torch.cuda.device(device):
        torch.cuda._sleep(int(busy_s * _CYCLES_PER_S))  # type: ignore[no-untyped-call]


def _event() -> Any:
    event: Any = torch.cuda.Event  # torch leaves it without annotations
    return event(enable_timing=True)


def _words(tensor: Tensor) -> Tensor:
    """The storage of a tensor as whole numbers that autograd knows nothing of."""
    storage = tensor.untyped_storage()
    words = torch.empty(0, dtype=torch.int32, device=tensor.device)
    return words.set_(storage, 0, (storage.nbytes() // 4,), (1,))


def spread_of(times: Sequence[float]) -> float:
    """Distance of the quartiles over the median; 0 for one time."""
    middle = statistics.median(times)
    if len(times) < 2 or middle <= 0:
        return 0.0
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return (high - low) / middle
