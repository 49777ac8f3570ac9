"""How the clock times a GPU, on one that is made up: its time passes where calls say so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from qsync_opt.measure.clock import Clock, Effort

CPU = torch.device("cpu")
EVENTS_S = 2e-6
CACHE_BYTES = 4096


class Gpu:
    """A stream whose time is told by hand, and what was asked of it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.slept: list[float] = []
        self.log: list[str] = []

    def work(self, seconds: float, name: str = "call") -> None:
        self.now_s += seconds
        self.log.append(name)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = made.now_s

        def synchronize(self) -> None:
            made.log.append("wait")

        def elapsed_time(self, other: Event) -> float:
            return (other.at - self.at + EVENTS_S) * 1e3

    @contextmanager
    def on_device(device: torch.device) -> Iterator[None]:
        yield

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", on_device)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: made.slept.append(cycles / 2.5e9))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    properties = SimpleNamespace(L2_cache_size=CACHE_BYTES)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return made


def clock_of(**effort: Any) -> Clock:
    clock = Clock(CPU, Effort(**{"budget_s": 0.0, "warm_up": 1, **effort}))
    clock._is_cuda = True
    return clock


def test_the_cost_of_the_events_is_taken_off(gpu: Gpu) -> None:
    timing = clock_of().time(lambda: gpu.work(5e-6))
    assert timing.time_s == pytest.approx(5e-6)
    assert timing.spread == pytest.approx(0.0, abs=1e-9)
    assert clock_of().time(lambda: None).time_s == 0.0


def test_before_each_call_the_cache_holds_what_was_just_written_and_nothing_else(gpu: Gpu) -> None:
    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            name = func._overloadpacket.__name__
            if name in ("zero_", "bitwise_or_"):
                gpu.log.append(f"{name} {args[0].numel()}")
            return func(*args, **(kwargs or {}))

    clock = clock_of(samples=3, sample_s=0.0)
    assert clock.cache_bytes == CACHE_BYTES
    older, newer = torch.randn(10).half(), torch.randn(3, 7)
    before = older.clone(), newer.clone()
    gpu.log.clear()
    with Watch():  # type: ignore[no-untyped-call]
        clock.time(lambda: gpu.work(1e-3), warm=[older, newer])
    once = [f"zero_ {2 * CACHE_BYTES // 4}", "bitwise_or_ 5", "bitwise_or_ 21", "call", "wait"]
    assert gpu.log == ["call", "call", *once * 3]
    assert torch.equal(older, before[0])
    assert torch.equal(newer, before[1])
    assert older._version == newer._version == 0  # autograd saw nothing


def test_the_device_waits_longer_where_the_host_is_slow(gpu: Gpu) -> None:
    ticks = [0.0]

    def timer() -> float:
        ticks[0] += 1e-3  # every look at the clock takes a millisecond
        return ticks[0]

    clock = Clock(CPU, Effort(budget_s=0.0, samples=2, sample_s=0.0), timer)
    clock._is_cuda = True
    timing = clock.time(lambda: gpu.work(1e-6))
    assert timing.host_s == pytest.approx(1e-3)
    assert max(gpu.slept[-2:]) > 1.5e-3
    assert max(gpu.slept) <= 0.1


def test_events_too_near_to_each_other_are_no_sign_of_a_busy_device(gpu: Gpu) -> None:
    seconds = iter([1e-6, 1.8e-6] * 1000)
    calls = len(gpu.log)
    quick = clock_of(samples=4, sample_s=0.0, retries=3)
    assert quick.time(lambda: gpu.work(next(seconds))).spread > 0.2
    near = gpu.log.count("call") - calls
    seconds = iter([1e-3, 1.8e-3] * 1000)
    clock_of(samples=4, sample_s=0.0, retries=3).time(lambda: gpu.work(next(seconds)))
    far = gpu.log.count("call") - calls - near
    assert near == 2 + 4
    assert far == 2 + 4 * 4
