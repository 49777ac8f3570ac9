"""Stopping what runs: solvers in other threads and processes, and jobs not yet begun."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from typing import Any

import pytest

from qsync_opt.optimize.backends import solve_program
from qsync_opt.optimize.formulation import formulate
from qsync_opt.optimize.generate import generate_problem
from qsync_opt.optimize.interrupter import Interrupter
from qsync_opt.optimize.workers import run_side_by_side


def test_only_what_runs_is_stopped() -> None:
    interrupter = Interrupter()
    stopped: list[str] = []
    with interrupter.calling(lambda: stopped.append("before")):
        pass
    with interrupter.calling(lambda: stopped.append("during")):
        assert not interrupter.stopped
        interrupter.interrupt()
        assert interrupter.stopped
    assert stopped == ["during"]
    with interrupter.calling(lambda: stopped.append("after")):
        assert stopped == ["during", "after"]  # an interrupt that has come holds


@pytest.mark.parametrize("solver", ["cp_sat", "cbc"])
def test_a_solver_that_is_stopped_claims_nothing(solver: str) -> None:
    problem = generate_problem(operators=300, seed=2)
    program = formulate(
        problem, deadline_s=problem.deadline_s, device=problem.devices[0].name
    ).program
    interrupter = Interrupter()
    interrupter.interrupt()
    answer = solve_program(program, solver=solver, relative_gap=0.0, interrupter=interrupter)
    assert answer.status == "unknown"
    assert answer.values is None


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_jobs_come_back_in_order_with_what_they_raise(threads: int) -> None:
    def fail() -> int:
        raise ValueError("of this job alone")

    jobs = [lambda: 1, fail, lambda: 3]
    outcomes, interrupted = run_side_by_side(jobs, threads, lambda: None)
    assert not interrupted
    assert [outcome.value for outcome in outcomes] == [1, None, 3]
    assert [type(outcome.error) for outcome in outcomes] == [type(None), ValueError, type(None)]


def test_after_ctrl_c_no_further_job_is_begun() -> None:
    told = threading.Event()

    def first() -> int:
        os.kill(os.getpid(), signal.SIGINT)
        told.wait()
        return 1

    def second() -> int:
        raise AssertionError("begun after Ctrl-C")

    outcomes, interrupted = run_side_by_side([first, second], 1, told.set)
    assert interrupted
    assert [outcome.value for outcome in outcomes] == [1, None]
    assert [outcome.error for outcome in outcomes] == [None, None]


def test_ctrl_c_during_a_solve_in_the_main_thread_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ortools.math_opt.python import mathopt

    solve: Any = mathopt.solve

    def drops_it(*words: object, **options: object) -> Any:
        """As protobuf does, which converts the answer."""
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        return solve(*words, **options)

    monkeypatch.setattr(mathopt, "solve", drops_it)
    problem = generate_problem(operators=3, seed=2)
    program = formulate(
        problem, deadline_s=problem.deadline_s, device=problem.devices[0].name
    ).program
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            solve_program(program)
    finally:
        signal.signal(signal.SIGINT, before)
