"""CBC, as PuLP ships it, in a process of its own, on our own 17-digit MPS file.

PuLP's own writer keeps 13 digits and its reader of results calls a time limit's incumbent
optimal, so only its binary is used here. PuLP is imported in another process: loaded before
MathOpt's HiGHS it crashes this one.
"""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path

from qsync_opt.errors import FormatError, SolverUnavailableError
from qsync_opt.optimize.interrupter import Interrupter
from qsync_opt.optimize.linear import LinearProgram, ProgramSolution
from qsync_opt.optimize.mps import write_linear_program
from qsync_opt.optimize.mps_solution import read_solution

_FIND = "import pulp; print(pulp.PULP_CBC_CMD(msg=False).path)"
_REMEDY = "Install pulp, or choose another with SolveParameters(solver=...)"


@cache
def _binary() -> str:
    """Path of the CBC binary.

    Raises:
        SolverUnavailableError: PuLP is missing, or has no CBC for this machine.
    """
    if importlib.util.find_spec("pulp") is None:
        raise SolverUnavailableError("cbc", "pulp is not installed", _REMEDY)
    command = [sys.executable, "-c", _FIND]
    located = subprocess.run(command, capture_output=True, text=True, check=False)
    path = located.stdout.strip()
    if located.returncode or not os.access(path, os.X_OK):
        reason = located.stderr.strip().splitlines()[-1:] or [f"no binary at {path!r}"]
        raise SolverUnavailableError("cbc", reason[0], _REMEDY)
    return path


def solve_with_cbc(
    program: LinearProgram,
    unit: float,
    time_limit_s: float | None,
    gaps: tuple[float, float],
    seed: int,
    interrupter: Interrupter | None = None,
) -> ProgramSolution:
    """Solve a program with its objective divided by `unit`, within (relative, absolute) gaps.

    Raises:
        SolverUnavailableError: CBC is missing or crashed.
    """
    with tempfile.TemporaryDirectory() as folder:
        model, solution = Path(folder, "model.mps"), Path(folder, "model.sol")
        write_linear_program(replace(program, objective=program.objective / unit), model)
        command = [_binary(), str(model), "-ratioGap", repr(gaps[0])]
        command += ["-allowableGap", repr(gaps[1]), "-randomCbcSeed", str(seed + 1)]
        command += ["-integerTolerance", "1e-9", "-primalTolerance", "1e-9"]
        if time_limit_s is not None:
            command += ["-timeMode", "elapsed", "-seconds", repr(max(time_limit_s, 0.01))]
        command += ["-solve", "-solution", str(solution)]
        try:
            code, log = _run(command, interrupter)
        except OSError as error:
            raise SolverUnavailableError("cbc", str(error), _REMEDY) from error
        if interrupter is not None and interrupter.stopped:
            return _without_solution("unknown", "interrupted")
        if code < 0 or not solution.exists():
            tail = (log.strip().splitlines() or ["no output"])[-1]
            raise SolverUnavailableError("cbc", f"exit code {code}: {tail}", _REMEDY)
        head = (solution.read_text().splitlines() or [""])[0]
        if "nfeasible" in head:
            return _without_solution("infeasible", head)
        try:
            values = read_solution(solution, columns=len(program.column_names)).values
        except FormatError:
            # CBC writes a file without a solution when it is stopped before finding one.
            return _without_solution("unknown", head)
    objective = float(program.objective @ values)
    optimal = head.startswith("Optimal")
    bound = _bound(log, unit)
    if optimal:
        # "Optimal" means within the gaps; the bound printed may be from before the last cut.
        claimed = objective - max(abs(objective) * gaps[0], gaps[1] * unit)
        bound = claimed if bound is None else max(bound, claimed)
    return ProgramSolution(
        status="optimal" if optimal else "feasible",
        values=values,
        objective=objective,
        bound=-math.inf if bound is None else min(bound, objective),
        message=head,
    )


def _run(command: list[str], interrupter: Interrupter | None) -> tuple[int, str]:
    """Exit code and output of a command, which an interrupt ends."""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # Ctrl-C in a terminal is ours to pass on
    ) as process:
        stopping = nullcontext() if interrupter is None else interrupter.calling(process.kill)
        try:
            with stopping:
                log, _ = process.communicate()
        except BaseException:
            process.kill()
            raise
    return process.returncode, log


def _without_solution(status: str, message: str) -> ProgramSolution:
    return ProgramSolution(
        status=status, values=None, objective=None, bound=-math.inf, message=message
    )


def _bound(log: str, unit: float) -> float | None:
    """The lower bound in CBC's closing lines, where it prints one."""
    for line in reversed(log.splitlines()):
        if line.startswith("Lower bound:"):
            return float(line.split()[-1]) * unit
    return None
