"""Laws of solving precisions and bits together, on every instance given codes."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from qsync_opt.files import load_problem
from qsync_opt.optimize.bits import single_bit_counts
from qsync_opt.optimize.evaluate import evaluate
from qsync_opt.optimize.result import SolveParameters, SolveStatus
from qsync_opt.optimize.solve import solve
from tests.coded_problems import coded

FOLDER = Path(__file__).parents[2] / "problems"
INDEX = json.loads((FOLDER / "index.json").read_text())["instances"]
FEASIBLE = [entry["file"] for entry in INDEX if entry["objective"] is not None]

#: What both sides of a comparison may be off by: their gaps.
_GAP = 2e-4


def test_the_instances_are_those_of_the_index() -> None:
    assert len(FEASIBLE) > 10


@pytest.mark.parametrize("file", FEASIBLE)
def test_bits_that_are_chosen_are_no_worse_than_one_bit_count_for_all(file: str) -> None:
    problem = coded(load_problem(FOLDER / file))
    joint = solve(problem)
    assert joint.status is SolveStatus.OPTIMAL
    assert joint.plan is not None
    assert joint.objective is not None
    assert joint.deadline_s is not None
    judged = evaluate(problem, joint.plan, deadline_s=joint.deadline_s)
    assert judged.feasible
    assert judged.perturbation == joint.objective
    for bits in single_bit_counts(problem):
        fixed = replace(problem.at_bits(bits), deadline_s=joint.deadline_s, slack=0.0)
        alone = solve(fixed)
        if alone.objective is not None:
            total = alone.objective + problem.bits_perturbation(bits)
            assert joint.objective <= total * (1 + _GAP), bits


def test_the_joint_program_agrees() -> None:
    for name in ("vgg16-bn-v100-t4", "vgg16-bn-h200-25"):
        problem = coded(load_problem(FOLDER / f"{name}.json.gz"), slack=0.05, share=1.5)
        ours = solve(problem)
        plain = solve(problem, parameters=SolveParameters(plain=True))
        assert ours.status is plain.status is SolveStatus.OPTIMAL
        assert ours.objective == pytest.approx(plain.objective, rel=_GAP)
        assert plain.bound is not None
        assert ours.bound is not None
        assert ours.bound <= (plain.objective or 0.0) * (1 + 1e-9)
        assert plain.bound <= (ours.objective or 0.0) * (1 + 1e-9)


_INTERRUPTED = """
import json, os, signal, sys, time
from qsync_opt.optimize.evaluate import evaluate
from qsync_opt.optimize.generate import generate_problem
from qsync_opt.optimize.result import SolveParameters
from qsync_opt.optimize.solve import solve
problem = generate_problem(
    operators=300, precisions=4, devices=2, seed=3, costs="correlated", communication=(16, 8, 4)
)
seen = []
def report(progress):
    if progress.device == "" and not seen:
        seen.append([progress.objective, progress.bound])
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)
parameters = SolveParameters(relative_gap=0.0, time_limit_s=None, threads=2, progress=report)
result = solve(problem, method="exact", parameters=parameters)
feasible = result.plan is not None and evaluate(problem, result.plan).feasible
answer = [result.status.name, feasible, seen[0], result.objective, result.bound]
sys.stdout.write(json.dumps(answer))
sys.stdout.flush()
os._exit(0)
"""


def test_ctrl_c_returns_the_incumbent_and_a_bound() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    status, feasible, seen, objective, bound = json.loads(done.stdout.splitlines()[-1])
    assert status == "INTERRUPTED"
    assert feasible
    assert objective <= seen[0] * (1 + 1e-12)
    assert seen[1] * (1 - 1e-12) <= bound <= objective


@pytest.mark.parametrize("limit_s", [0.0, 0.1, 0.4])
def test_a_time_limit_leaves_a_plan_and_a_bound_that_hold(limit_s: float) -> None:
    problem = coded(load_problem(FOLDER / "decoder-70b-stage-h200-l4.json.gz"), 0.02, 1.0)
    result = solve(problem, parameters=SolveParameters(time_limit_s=limit_s))
    assert result.status is SolveStatus.TIME_LIMIT
    if result.plan is not None:
        assert result.objective is not None
        assert result.bound is not None
        assert evaluate(problem, result.plan, deadline_s=result.deadline_s).feasible
        assert result.bound <= 20393.2163  # an objective that was reached


def test_files_without_choices_of_bits_have_neither_codes_nor_bits() -> None:
    for entry in INDEX:
        if entry["name"].endswith("-tcp"):
            continue
        path = FOLDER / entry["file"]
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        assert b'"codes"' not in raw
        assert load_problem(path).sha256 == entry["sha256"]
