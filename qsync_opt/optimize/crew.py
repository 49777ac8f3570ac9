"""`make_crew`: how the device kinds of one `solve` are worked on, in threads or processes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Protocol

from qsync_opt.optimize.kind import KindJob
from qsync_opt.optimize.processes import ForkedWorkers, WorkerFailure, can_fork
from qsync_opt.optimize.result import Progress, SolveParameters
from qsync_opt.optimize.workers import run_side_by_side


class Crew(Protocol):
    """Works on all kinds; a context manager."""

    def __enter__(self) -> Crew:
        """Begin."""

    def __exit__(self, *_: object) -> None:
        """End what still runs."""

    def perform(self, deadline_s: float | None) -> bool:
        """`KindJob.perform` for every kind; says whether Ctrl-C came."""


def make_crew(kinds: Sequence[KindJob], parameters: SolveParameters, *, apart: bool) -> Crew:
    """A crew for some kinds.

    Args:
        kinds: the kinds.
        parameters: how many at a time, and who is told.
        apart: whether the work is worth processes of its own, where they can be had.
    """
    if apart and min(len(kinds), parameters.threads) > 1 and can_fork():
        return _Processes(kinds, parameters)
    return _Threads(kinds, parameters)


class _Threads:
    """The kinds in threads of this process."""

    def __init__(self, kinds: Sequence[KindJob], parameters: SolveParameters) -> None:
        self._kinds, self._threads = kinds, parameters.threads

    def __enter__(self) -> _Threads:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def perform(self, deadline_s: float | None) -> bool:
        def interrupt() -> None:
            for kind in self._kinds:
                kind.interrupt()

        jobs = [lambda kind=kind: kind.perform(deadline_s) for kind in self._kinds]
        outcomes, interrupted = run_side_by_side(jobs, self._threads, interrupt)
        for outcome in outcomes:
            if outcome.error is not None:
                raise outcome.error
        if interrupted:
            for kind in self._kinds:
                kind.settle()
        return interrupted


class _Processes:
    """The kinds in forked processes."""

    def __init__(self, kinds: Sequence[KindJob], parameters: SolveParameters) -> None:
        self._kinds, self._progress = kinds, parameters.progress
        self._solver = parameters.solver
        self._workers = ForkedWorkers(
            [_maker(kind) for kind in kinds], most=parameters.threads, note=self._note
        )

    def __enter__(self) -> _Processes:
        self._workers.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._workers.__exit__()

    def _note(self, number: int, text: str) -> None:
        if self._progress is not None:
            self._progress(Progress(**json.loads(text)))

    def perform(self, deadline_s: float | None) -> bool:
        replies, interrupted = self._workers.ask(json.dumps(deadline_s))
        for kind, reply in zip(self._kinds, replies, strict=True):
            if isinstance(reply, str):
                kind.load(reply)
            elif isinstance(reply, WorkerFailure) and reply.died:
                kind.trouble, kind.died = f"{self._solver} ended its process: {reply}", True
            elif isinstance(reply, WorkerFailure):
                raise reply
        return interrupted


class _Worker:
    """A kind in its own process."""

    def __init__(self, kind: KindJob, note: Callable[[str], None]) -> None:
        self._kind = kind
        if kind.report is not None:
            kind.report = lambda progress: note(json.dumps(asdict(progress)))

    def perform(self, request: str) -> str:
        self._kind.perform(json.loads(request))
        return self._kind.state()

    def interrupt(self) -> None:
        self._kind.interrupt()

    def partial(self) -> str:
        self._kind.settle()
        return self._kind.state()


def _maker(kind: KindJob) -> Callable[[Callable[[str], None]], _Worker]:
    return lambda note: _Worker(kind, note)
