"""The registry takes the fastest implementation that is right, and remembers it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from qsync_opt.errors import FormatError, KernelError
from qsync_opt.kernels.registry import Registry, Run, round_size, signature

DEVICE = "a device"
RIGHT, WRONG = torch.ones(2), torch.zeros(2)


def correct(result: Tensor) -> bool:
    return torch.equal(result, RIGHT)


class Clock:
    """Stands for the timer: seconds of each implementation, and how often each was timed."""

    def __init__(self, **times_s: float) -> None:
        self.times_s = times_s
        self.measured: list[str] = []
        self.runs: dict[str, Run] = {name: self._run(RIGHT) for name in times_s}

    @staticmethod
    def _run(result: Tensor) -> Run:
        return lambda: result

    def __call__(self, run: Run) -> float:
        (name,) = (name for name, known in self.runs.items() if known is run)
        self.measured.append(name)
        return self.times_s[name]


def test_the_fastest_runs_and_is_timed_once() -> None:
    clock = Clock(slow=3.0, fast=1.0, middle=2.0)
    registry = Registry(DEVICE, clock)
    assert registry.known(("op", 8)) is None
    for _ in range(2):
        assert registry.choose(("op", 8), clock.runs, correct) == "fast"
    assert registry.known(("op", 8)) == "fast"
    assert clock.measured == ["slow", "fast", "middle"]
    (choice,) = registry.choices.values()
    assert choice.times_s == clock.times_s
    assert choice.reason == "2.00x as fast as middle"


def test_each_key_has_a_choice_of_its_own() -> None:
    clock = Clock(one=1.0, other=2.0)
    registry = Registry(DEVICE, clock)
    registry.choose(("op", 8), clock.runs, correct)
    clock.times_s["one"] = 3.0
    assert registry.choose(("op", 16), clock.runs, correct) == "other"
    assert registry.choose(("op", 8), clock.runs, correct) == "one"


def test_a_wrong_or_failing_one_is_never_taken() -> None:
    clock = Clock(right=5.0)

    def refused() -> Tensor:
        raise KernelError("op", "refused")

    candidates: dict[str, Callable[[], Tensor]] = {
        "wrong": lambda: WRONG,
        "refused": refused,
        **clock.runs,
    }
    registry = Registry(DEVICE, clock)
    assert registry.choose(("op",), candidates, correct) == "right"
    (choice,) = registry.choices.values()
    assert set(choice.rejected) == {"wrong", "refused"}
    assert "refused" in choice.rejected["refused"]
    del candidates["right"]
    with pytest.raises(KernelError, match=r"wrong: gave a wrong result; refused: .*refused"):
        registry.choose(("other",), candidates, correct)


def test_nothing_is_timed_or_remembered_while_a_graph_is_captured() -> None:
    clock = Clock(first=2.0, second=1.0)
    registry = Registry(DEVICE, clock)
    assert registry.choose(("op",), clock.runs, correct, may_measure=False) == "first"
    assert not clock.measured
    assert registry.known(("op",)) is None
    assert registry.choose(("op",), clock.runs, correct) == "second"
    assert registry.choose(("op",), clock.runs, correct, may_measure=False) == "second"


def test_a_file_brings_the_choices_back(tmp_path: Path) -> None:
    clock = Clock(slow=2.0, fast=1.0)
    registry = Registry(DEVICE, clock)
    key = ("op", 8, torch.bfloat16)
    registry.choose(key, clock.runs, correct)
    registry.save(tmp_path / "choices.json")
    assert f'"{signature(key)}"' in (tmp_path / "choices.json").read_text()

    later = Registry(DEVICE, clock)
    later.load(tmp_path / "choices.json")
    assert later.choices == registry.choices
    assert later.choose(key, clock.runs, correct) == "fast"
    assert clock.measured == ["slow", "fast"]


def test_a_remembered_implementation_that_is_gone_is_replaced(tmp_path: Path) -> None:
    clock = Clock(slow=2.0, fast=1.0)
    registry = Registry(DEVICE, clock)
    registry.choose(("op",), clock.runs, correct)
    registry.save(tmp_path / "choices.json")
    later = Registry(DEVICE, clock)
    later.load(tmp_path / "choices.json")
    del clock.runs["fast"]
    assert later.choose(("op",), clock.runs, correct) == "slow"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"device": "another"}, "device"),
        ({"version": 2}, "version"),
        ({"format": "qsync-opt/plan"}, "format"),
        ({"choices": {"op": {"implementation": "x"}}}, "choices"),
    ],
)
def test_a_file_that_does_not_hold_here_is_refused(
    change: dict[str, object], field: str, tmp_path: Path
) -> None:
    registry = Registry(DEVICE, Clock())
    path = tmp_path / "choices.json"
    registry.save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(FormatError, match=field):
        registry.load(path)
    path.write_text("{")
    with pytest.raises(FormatError, match="JSON"):
        registry.load(path)


def test_signatures_are_readable() -> None:
    key = ("int8_matmul", 8192, 4096, torch.bfloat16, True)
    assert signature(key) == "int8_matmul 8192 4096 bfloat16 True"


def test_sizes_are_rounded_up_to_powers_of_two() -> None:
    assert [round_size(size) for size in (1, 2, 3, 4, 5, 1000)] == [1, 2, 4, 4, 8, 1024]


def test_choices_are_kept_for_later_processes(tmp_path: Path) -> None:
    file = tmp_path / "cache" / "choices.json"
    clock = Clock(one=2.0, other=1.0)
    Registry(DEVICE, clock, file).choose(("op", 8), clock.runs, correct)
    later = Clock(one=1.0, other=2.0)
    again = Registry(DEVICE, later, file)
    assert again.choose(("op", 8), later.runs, correct) == "other"
    assert later.measured == []
    assert again.choose(("op", 16), later.runs, correct) == "one"
    assert set(Registry(DEVICE, later, file).choices) == {"op 8", "op 16"}
    # What does not hold here, or is damaged, is timed anew and written over.
    for text in (file.read_text().replace(DEVICE, "another"), "{"):
        file.write_text(text)
        newest = Clock(one=1.0, other=2.0)
        registry = Registry(DEVICE, newest, file)
        assert registry.choose(("op", 8), newest.runs, correct) == "one"
        assert set(Registry(DEVICE, newest, file).choices) == {"op 8"}


def test_nowhere_to_keep_choices_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    clock = Clock(one=1.0)
    registry = Registry(DEVICE, clock, tmp_path / "cache" / "choices.json")
    assert registry.choose(("op", 8), clock.runs, correct) == "one"
