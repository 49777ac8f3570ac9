"""Running one job per device kind side by side, so that Ctrl-C leaves with what was found."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

Result = TypeVar("Result")

#: How often the waiting thread looks up, so that Ctrl-C is noticed, in seconds.
_POLL_S = 0.05

#: How long interrupted jobs may take to hand over what they have, in seconds.
_GRACE_S = 5.0


class Outcome(Generic[Result]):
    """What a job returned or raised; neither while it runs, or where it was never begun."""

    def __init__(self) -> None:
        self.value: Result | None = None
        self.error: BaseException | None = None
        self.done = threading.Event()


def run_side_by_side(
    jobs: Sequence[Callable[[], Result]], threads: int, interrupt: Callable[[], None]
) -> tuple[list[Outcome[Result]], bool]:
    """Run jobs in up to `threads` threads and wait for them.

    On Ctrl-C `interrupt` is called once and no further job is begun; those that run are
    expected to return soon. A job that does not within a grace period is left behind (its
    outcome is not done).

    Returns:
        The outcome of every job, in order, and whether Ctrl-C came.
    """
    outcomes: list[Outcome[Result]] = [Outcome() for _ in jobs]
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for index in range(len(jobs)):
        waiting.put(index)

    stopping = threading.Event()

    def work() -> None:
        while True:
            try:
                index = waiting.get_nowait()
            except queue.Empty:
                return
            if stopping.is_set():
                outcomes[index].done.set()
                continue
            try:
                outcomes[index].value = jobs[index]()
            except BaseException as error:  # noqa: BLE001  # raised again by the caller
                outcomes[index].error = error
            outcomes[index].done.set()

    interrupted = False
    try:
        # Daemons: a solver that ignores an interrupt must not keep the process alive.
        for _ in range(min(threads, len(jobs))):
            threading.Thread(target=work, daemon=True).start()
        for outcome in outcomes:
            while not outcome.done.wait(_POLL_S):
                pass
    except KeyboardInterrupt:
        interrupted = True
        stopping.set()
        interrupt()
        over_s = time.monotonic() + _GRACE_S
        for outcome in outcomes:
            outcome.done.wait(max(0.0, over_s - time.monotonic()))
    return outcomes, interrupted
