"""Shared set-up: load order of the solvers, repeatable property tests, small problems."""

from __future__ import annotations

import signal
from pathlib import Path

# Before any test module: HiGHS inside MathOpt can crash when PuLP or highspy was loaded
# first (google/or-tools#5246).
import ortools.math_opt.python.mathopt  # noqa: F401
import pytest
from hypothesis import HealthCheck, settings

from qsync_opt.files import save_problem
from qsync_opt.optimize.generate import generate_problem
from qsync_opt.optimize.problem import AllocationProblem

# A shell may start what it runs in the background with Ctrl-C ignored, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples on every run, and no limit on their time: a slow machine is no failure.
settings.register_profile(
    "qsync",
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("qsync")


@pytest.fixture(scope="session")
def small_problem() -> AllocationProblem:
    """Twelve operators, three precisions, two kinds: every method solves it at once."""
    return generate_problem(operators=12, precisions=3, devices=2, seed=1, tightness=0.5)


@pytest.fixture
def problem_file(small_problem: AllocationProblem, tmp_path: Path) -> Path:
    path = tmp_path / "problem.json"
    save_problem(small_problem, path)
    return path
