"""Runs specs, each in a process of its own, so that none pays for, or profits from, another."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import qsync_opt as qo
from tests.benchmarks.specs import OWN, PRECISIONS, SolverSpec, not_measured

ROOT = Path(__file__).resolve().parents[2]

#: A solver that goes on so many times its limit, and this much longer, is ended.
_PATIENCE, _PATIENCE_S = 3.0, 120.0

_IMPORT = """
import time
began = time.perf_counter()
import qsync_opt
print(time.perf_counter() - began)
"""


#: Solves the spec of its first argument into the file of its second.
_MEASURE = """
import json, sys
from pathlib import Path
from tests.benchmarks.specs import SolverSpec, measure
spec = SolverSpec(**json.loads(sys.argv[1]))
Path(sys.argv[2]).write_text(json.dumps(measure(spec)))
"""


def measure_apart(spec: SolverSpec) -> dict[str, Any]:
    """`measure` in a fresh interpreter; a row without numbers if it crashes or will not stop.

    Not a process of `multiprocessing`: in those the solver does not fork, as it does for users.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "row.json"  # not its output, into which solvers print
        command = [sys.executable, "-c", _MEASURE, json.dumps(asdict(spec)), str(path)]
        limit_s = None if spec.limit_s is None else _PATIENCE * spec.limit_s + _PATIENCE_S
        # A group of its own, so that processes which it forked end with it.
        process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return not_measured(spec, "KILLED", f"went on after {limit_s:g} s")
        if code or not path.exists():
            return not_measured(spec, "CRASHED", f"exit code {code}")
        row: dict[str, Any] = json.loads(path.read_text())
        return row


def run_solvers(
    specs: Iterable[SolverSpec],
    *,
    run: Callable[[SolverSpec], dict[str, Any]] = measure_apart,
    report: Callable[[dict[str, Any]], None] = lambda row: None,
) -> list[dict[str, Any]]:
    """The rows of all specs, in order.

    A plain solver that has found no plan of some problem is not run on larger ones of its
    family: it would only use up its time limit again.
    """
    rows = []
    gave_up: dict[tuple[object, ...], int] = {}
    for spec in specs:
        key = (spec.solver, *spec.family)
        if key in gave_up:
            row = not_measured(spec, "NOT_RUN", f"no plan at {gave_up[key]} operators")
        else:
            row = run(spec)
            if spec.solver != OWN and row["objective"] is None:
                gave_up[key] = spec.operators
        rows.append(row)
        report(row)
    return rows


def run_start_up(repeats: int = 5) -> dict[str, float]:
    """Median seconds: importing the package; and solving 54 operators from the command line."""
    imports, commands = [], []
    with tempfile.TemporaryDirectory() as folder:
        problem = Path(folder) / "problem.json"
        qo.save_problem(qo.generate_problem(operators=54, precisions=PRECISIONS), problem)
        command = [sys.executable, "-m", "qsync_opt.cli", "solve", str(problem), "--json"]
        for _ in range(repeats):
            done = _run([sys.executable, "-c", _IMPORT])
            imports.append(float(done))
            began = time.perf_counter()
            _run(command)
            commands.append(time.perf_counter() - began)
    return {
        "import_s": statistics.median(imports),
        "command_line_54_s": statistics.median(commands),
        "repeats": repeats,
    }


def _run(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
