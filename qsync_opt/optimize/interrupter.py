"""`Interrupter`: one thread tells solvers that run in others to stop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Interrupter:
    """Calls what stops the solvers that run, once, when it is told to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stopped = False
        self._stops: dict[object, Callable[[], object]] = {}

    @property
    def stopped(self) -> bool:
        """Whether `interrupt` has been called."""
        return self._stopped

    def interrupt(self) -> None:
        """Stop what runs now, and at once whatever is started later."""
        with self._lock:
            self._stopped = True
            stops = list(self._stops.values())
        for stop in stops:
            stop()

    @contextmanager
    def calling(self, stop: Callable[[], object]) -> Iterator[None]:
        """Call `stop` if `interrupt` comes, or has come, while the block runs."""
        key = object()
        with self._lock:
            self._stops[key] = stop
            late = self._stopped
        try:
            if late:
                stop()
            yield
        finally:
            with self._lock:
                del self._stops[key]
