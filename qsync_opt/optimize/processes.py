"""Forked workers: one process per device kind, so that kinds do not share an interpreter lock.

Most of the work is arithmetic on short arrays, which holds Python's lock: two kinds in two
threads take as long as one after the other. A fork costs milliseconds and copies nothing, but
is safe only while this process has no thread that the child would miss (`can_fork`).

Between the processes go pairs of a kind of message and a text.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

#: How often the waiting process looks up, so that Ctrl-C is noticed, in seconds.
_POLL_S = 0.2

#: How long an interrupted worker may take before it hands over what it has, and then before it
#: is ended, in seconds.
_PARTIAL_S = 3.0
_GRACE_S = 5.0


class Worker(Protocol):
    """What runs in a forked process."""

    def perform(self, request: str) -> str:
        """Do what is asked; gives the reply."""

    def interrupt(self) -> None:
        """Make `perform` return soon; called from another thread."""

    def partial(self) -> str:
        """A reply from what there is; called from another thread while `perform` runs."""


class WorkerFailure(RuntimeError):  # noqa: N818  # a bug in a worker, with its traceback
    """A worker raised, or its process died; says how.

    Args:
        message: the worker's traceback, or how its process ended.
        died: whether the process ended by itself.
    """

    def __init__(self, message: str, *, died: bool) -> None:
        super().__init__(message)
        self.died = died


def can_fork() -> bool:
    """Whether a child would miss nothing: Linux, no other thread of Python, no GPU in use.

    A process that uses CUDA must not fork: pages that its device reads and writes are shared
    with the child until somebody writes to them, and then are no longer the same.
    """
    torch = sys.modules.get("torch")
    return (
        sys.platform == "linux"
        and not (torch is not None and torch.cuda.is_initialized())
        and "fork" in multiprocessing.get_all_start_methods()
        and threading.active_count() == 1
        and multiprocessing.current_process().name == "MainProcess"
    )


class ForkedWorkers:
    """Workers in processes of their own; a context manager, which ends them.

    Args:
        makers: make each worker, in its process; given a function that sends a note.
        most: requests done at a time.
        note: takes the notes, with the number of the worker.
    """

    def __init__(
        self,
        makers: Sequence[Callable[[Callable[[str], None]], Worker]],
        *,
        most: int,
        note: Callable[[int, str], None],
    ) -> None:
        self._makers, self._most, self._note = makers, most, note
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []

    def __enter__(self) -> ForkedWorkers:
        context = multiprocessing.get_context("fork")
        for maker in self._makers:
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(maker, theirs, [*self._connections, ours]), daemon=True
            )
            # Ctrl-C is the parent's business from the first instruction on.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            try:
                with warnings.catch_warnings():
                    # Idle threads of numpy's BLAS count as threads; they know how to be forked.
                    warnings.simplefilter("ignore", DeprecationWarning)
                    process.start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()  # it holds nothing that is not here
            process.join()
            process.close()

    def ask(self, request: str) -> tuple[list[str | WorkerFailure | None], bool]:
        """Ask every worker the same thing.

        Returns:
            Each one's reply, or how it failed, or None if Ctrl-C came first; and whether it did.
        """
        replies: list[str | WorkerFailure | None] = [None] * len(self._connections)
        waiting = list(range(len(replies)))
        busy: set[int] = set()
        until: float | None = None
        while (waiting and until is None) or busy:
            if until is not None and time.monotonic() >= until:
                break
            try:
                while until is None and waiting and len(busy) < self._most:
                    number = waiting.pop(0)
                    busy.add(number)
                    self._tell(number, ("do", request))
                self._collect(busy, replies)
            except KeyboardInterrupt:
                if until is None:
                    until = time.monotonic() + _GRACE_S
                    for number in busy:
                        self._tell(number, ("stop", ""))
        return replies, until is not None

    def _tell(self, number: int, message: tuple[str, str]) -> None:
        # A worker that died is found where its reply is read.
        with contextlib.suppress(BrokenPipeError):
            _send(self._connections[number], message)

    def _collect(self, busy: set[int], replies: list[str | WorkerFailure | None]) -> None:
        for ready in wait([self._connections[number] for number in busy], _POLL_S):
            number = next(n for n in busy if self._connections[n] is ready)
            try:
                kind, text = _receive(self._connections[number])
            except EOFError:
                process = self._processes[number]
                process.join()
                replies[number] = WorkerFailure(f"exit code {process.exitcode}", died=True)
                busy.discard(number)
                continue
            if kind == "note":
                self._note(number, text)
                continue
            replies[number] = text if kind == "done" else WorkerFailure(text, died=False)
            busy.discard(number)


def _send(connection: Connection, message: tuple[str, str]) -> None:
    connection.send_bytes(json.dumps(message).encode())


def _receive(connection: Connection) -> tuple[str, str]:
    kind, text = json.loads(connection.recv_bytes())
    return kind, text


def _serve(
    maker: Callable[[Callable[[str], None]], Worker],
    connection: Connection,
    others: Sequence[Connection],
) -> None:
    """The life of a worker: answers requests until its parent closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says when to stop
    for other in others:  # held open here, they would hide that the parent is gone
        other.close()
    lock = threading.Lock()

    def send(kind: str, text: str) -> None:
        with lock:
            _send(connection, (kind, text))

    worker = maker(lambda text: send("note", text))
    requests: queue.SimpleQueue[str] = queue.SimpleQueue()
    idle = threading.Event()

    def work() -> None:
        while True:
            request = requests.get()
            try:
                reply = ("done", worker.perform(request))
            except BaseException:  # noqa: BLE001  # raised again by the parent
                reply = ("failed", traceback.format_exc())
            idle.set()
            send(*reply)

    def hand_over() -> None:
        if not idle.wait(_PARTIAL_S):
            send("done", worker.partial())

    # In a new thread: what a solver keeps per thread for the forking one (HiGHS: its helpers,
    # which were not forked) is not seen there.
    threading.Thread(target=work, daemon=True).start()
    while True:
        try:
            kind, text = _receive(connection)
        except (EOFError, OSError):
            os._exit(0)  # the parent is gone, or wants nothing more
        if kind == "do":
            idle.clear()
            requests.put(text)
        else:
            worker.interrupt()
            threading.Thread(target=hand_over, daemon=True).start()
