"""Forked workers: replies, notes, failures, deaths, Ctrl-C; each in a fresh process."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PRELUDE = """
import json, os, signal, sys, threading, time
from types import SimpleNamespace
from qsync_opt.optimize.processes import ForkedWorkers, WorkerFailure, can_fork

class Worker:
    def __init__(self, number, note):
        self.number, self.note, self.stopped = number, note, threading.Event()

    def perform(self, request):
        if request == "raise" and self.number == 1:
            raise ValueError("a bug")
        if request == "die" and self.number == 1:
            os._exit(7)
        if request == "wait":
            self.note("waiting")
            if self.number == 0:
                self.stopped.wait()
            else:
                time.sleep(60)
        self.note(f"{request} noted")
        return f"{self.number} did {request} in another process: {os.getpid() != PARENT}"

    def interrupt(self):
        self.stopped.set()

    def partial(self):
        return f"{self.number} has a part"

PARENT = os.getpid()
notes = []

def crew(count, most):
    makers = [lambda note, number=number: Worker(number, note) for number in range(count)]
    return ForkedWorkers(makers, most=most, note=lambda number, text: notes.append((number, text)))

def show(value):
    sys.stdout.write(json.dumps(value))
"""


def run(script: str, *, expect: int = 0) -> object:
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + script], capture_output=True, text=True, check=False
    )
    assert done.returncode == expect, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("most", [1, 2, 5])
def test_every_worker_answers_in_order_and_more_than_once(most: int) -> None:
    shown = run(f"""
with crew(3, {most}) as workers:
    show([workers.ask("one"), workers.ask("two"), sorted(notes)])
""")
    rows = [
        [f"{n} did {what} in another process: True" for n in range(3)] for what in ("one", "two")
    ]
    noted = sorted([n, f"{what} noted"] for n in range(3) for what in ("one", "two"))
    assert shown == [[rows[0], False], [rows[1], False], noted]


def test_what_a_worker_raises_comes_with_its_traceback() -> None:
    shown = run("""
with crew(2, 2) as workers:
    replies, _ = workers.ask("raise")
    show([replies[0], replies[1].died, str(replies[1])])
""")
    assert isinstance(shown, list)
    assert shown[:2] == ["0 did raise in another process: True", False]
    assert "ValueError: a bug" in shown[2]


def test_a_worker_that_dies_is_told_apart() -> None:
    shown = run("""
with crew(2, 2) as workers:
    replies, _ = workers.ask("die")
    show([replies[0], replies[1].died, str(replies[1])])
""")
    assert shown == ["0 did die in another process: True", True, "exit code 7"]


def test_ctrl_c_gives_what_there_is_and_leaves_nobody_behind() -> None:
    shown = run("""
def press():
    while len(notes) < 2:
        time.sleep(0.01)
    os.kill(PARENT, signal.SIGINT)

workers = crew(3, 2)
with workers:
    pids = [process.pid for process in workers._processes]
    threading.Thread(target=press).start()
    replies = workers.ask("wait")
left = [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
show([replies, left])
""")
    # The first heeds the interrupt, the second does not, the third was never begun.
    assert shown == [[["0 did wait in another process: True", "1 has a part", None], True], []]


def test_a_process_with_another_thread_is_not_forked() -> None:
    shown = run("""
alone = can_fork()
done = threading.Event()
threading.Thread(target=done.wait).start()
crowded = can_fork()
done.set()
show([alone, crowded])
""")
    assert shown == [sys.platform == "linux", False]


def test_a_process_that_uses_a_gpu_is_not_forked() -> None:
    shown = run("""
sys.modules["torch"] = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: used))
found = []
for used in (False, True):
    found.append(can_fork())
show(found)
""")
    assert shown == [sys.platform == "linux", False]


@pytest.mark.parametrize("threads", [1, 2])
def test_solve_is_the_same_in_forked_processes_and_reports_from_them(threads: int) -> None:
    shown = run(f"""
import qsync_opt as qo
problem = qo.generate_problem(operators=210, precisions=3, devices=2, seed=3)
seen = set()
def note(report):
    seen.add((report.device, os.getpid()))
parameters = qo.SolveParameters(threads={threads}, relative_gap=1e-3, progress=note)
result = qo.solve(problem, method="exact", parameters=parameters)
show([result.status.name, sorted(seen) == [(d.name, PARENT) for d in problem.devices],
      [result.plan.for_device(d.name)[problem.operators[-1].name] for d in problem.devices],
      result.objective])
""")
    alone = run("""
import qsync_opt as qo
problem = qo.generate_problem(operators=210, precisions=3, devices=2, seed=3)
threading.Thread(target=time.sleep, args=(5,), daemon=True).start()  # so that nothing is forked
result = qo.solve(problem, method="exact", parameters=qo.SolveParameters(relative_gap=1e-3))
show([result.status.name, True,
      [result.plan.for_device(d.name)[problem.operators[-1].name] for d in problem.devices],
      result.objective])
""")
    assert shown == alone
    assert isinstance(shown, list)
    assert shown[0] == "OPTIMAL"


def test_a_back_end_that_ends_its_process_is_reported() -> None:
    shown = run("""
import qsync_opt as qo
from qsync_opt.optimize import proposals
proposals.solve_program = lambda *a, **k: os._exit(139)
problem = qo.generate_problem(operators=210, precisions=3, devices=2, seed=3)
result = qo.solve(problem, method="auto", parameters=qo.SolveParameters(plain=True, threads=2))
show([result.status.name, result.method, result.fallback_reason])
""")
    assert isinstance(shown, list)
    assert shown[0] != "OPTIMAL"
    assert "highs ended its process: exit code 139" in shown[2]
