"""The lines of the demonstration: one for every step, with its key number and how long it took."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

from qsync_opt import console

_NAME_WIDTH = 13


@dataclass(kw_only=True)
class StepLine:
    """What a step says of itself.

    Attributes:
        text: its key number, in words; set by the step.
        facts: the same for programs.
    """

    text: str = ""
    facts: dict[str, object] = field(default_factory=dict)


class Lines:
    """Tells the steps of a task, and keeps what they found.

    Args:
        total: how many steps there will be.
        shown: whether lines are written; a program gets `facts` alone.
    """

    def __init__(self, total: int, shown: bool) -> None:
        self._total = total
        self._shown = shown
        self._count = 0
        self.facts: dict[str, dict[str, object]] = {}

    @contextmanager
    def step(self, name: str, doing: str, *, has_progress: bool = False) -> Iterator[StepLine]:
        """A step; its line is written when it is done.

        Args:
            name: of the step, unique.
            doing: what is being done, shown meanwhile.
            has_progress: what runs inside shows its own progress.
        """
        self._count += 1
        line = StepLine()
        begin = time.perf_counter()
        place = f"{self._count} of {self._total}: {doing}"
        with nullcontext() if has_progress or not self._shown else console.waiting(place):
            yield line
        elapsed_s = time.perf_counter() - begin
        self.facts[name] = {"elapsed_s": elapsed_s, **line.facts}
        if self._shown:
            took = console.seconds(float(f"{elapsed_s:.2g}"))
            console.write(f"  {name:{_NAME_WIDTH}} {line.text} [{took}]")
