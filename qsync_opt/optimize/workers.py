"""Running one job per device kind side by side, so that Ctrl-C leaves with what was found."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

Result = TypeVar("Result")

#: How often the waiting thread looks up, so that Ctrl-C is noticed, in seconds.
_POLL_S = 0.05

#: How long an interrupted job may take to hand over what it has, in seconds.
_GRACE_S = 5.0


class Outcome(Generic[Result]):
    """What a job returned or raised; neither while it runs."""

    def __init__(self) -> None:
        self.value: Result | None = None
        self.error: BaseException | None = None
        self.done = threading.Event()


def run_side_by_side(
    jobs: Sequence[Callable[[], Result]], threads: int, interrupt: Callable[[], None]
) -> tuple[list[Outcome[Result]], bool]:
    """Run jobs in up to `threads` threads and wait for them.

    On Ctrl-C `interrupt` is called once; jobs are then expected to return soon. A job that
    does not within a grace period is left behind (its outcome is not done).

    Returns:
        The outcome of every job, in order, and whether Ctrl-C came.
    """
    outcomes: list[Outcome[Result]] = [Outcome() for _ in jobs]
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for index in range(len(jobs)):
        waiting.put(index)

    def work() -> None:
        while True:
            try:
                index = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                outcomes[index].value = jobs[index]()
            except BaseException as error:  # noqa: BLE001  # raised again by the caller
                outcomes[index].error = error
            outcomes[index].done.set()

    # Daemons: a solver that ignores an interrupt must not keep the process alive.
    for _ in range(min(threads, len(jobs))):
        threading.Thread(target=work, daemon=True).start()
    interrupted = False
    try:
        for outcome in outcomes:
            while not outcome.done.wait(_POLL_S):
                pass
    except KeyboardInterrupt:
        interrupted = True
        interrupt()
        for outcome in outcomes:
            outcome.done.wait(_GRACE_S)
    return outcomes, interrupted
