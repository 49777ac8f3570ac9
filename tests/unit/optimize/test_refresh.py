"""A problem solved again with other perturbations."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from qsync_opt.errors import ParameterError
from qsync_opt.optimize.evaluate import evaluate
from qsync_opt.optimize.generate import generate_problem
from qsync_opt.optimize.refresh import (
    LEAST_GAIN,
    read_answer,
    refreshed,
    solve_again,
    write_problem,
    write_question,
)
from qsync_opt.optimize.solve import solve

PROBLEM = generate_problem(operators=12, precisions=3, devices=2, seed=3, tightness=0.5)
TABLE = PROBLEM.devices[0].perturbation


def test_only_perturbations_change() -> None:
    values = np.random.default_rng(0).uniform(0, 1, TABLE.shape)
    renewed = refreshed(PROBLEM, values)
    for before, after in zip(PROBLEM.devices, renewed.devices, strict=True):
        available = before.available
        assert np.array_equal(after.available, available)
        assert np.array_equal(after.perturbation[available], values[available])
        assert np.array_equal(after.forward_s, before.forward_s)
    assert renewed.sha256 != PROBLEM.sha256
    assert refreshed(PROBLEM, np.array(TABLE)).devices[0].perturbation.tolist() == TABLE.tolist()
    plan = solve(PROBLEM, method="greedy").plan
    assert plan is not None
    old = evaluate(PROBLEM, plan)
    new = evaluate(renewed, replace(plan, problem=renewed.sha256))
    assert new.iteration_time_s == old.iteration_time_s
    assert new.feasible == old.feasible


def test_what_is_infinite_is_not_available() -> None:
    values = np.array(TABLE)
    values[0, 2] = np.inf
    for device in refreshed(PROBLEM, values).devices:
        assert not device.available[0, 2]


@pytest.mark.parametrize("values", [TABLE[:-1], np.full(TABLE.shape, np.nan)])
def test_a_table_of_another_shape_or_with_nan_is_refused(values: np.ndarray) -> None:
    with pytest.raises(ParameterError, match="perturbation"):
        refreshed(PROBLEM, values)


def test_a_better_plan_is_taken_and_belongs_to_the_first_problem() -> None:
    plan = solve(PROBLEM, method="exact").plan
    assert plan is not None
    answer = solve_again(PROBLEM, plan, np.array(TABLE)[::-1] * 10, 30.0)
    assert answer.plan is not None, answer.told
    assert answer.plan.problem == PROBLEM.sha256
    renewed = refreshed(PROBLEM, np.array(TABLE)[::-1] * 10)
    best = solve(renewed, method="exact")
    new = evaluate(renewed, replace(answer.plan, problem=renewed.sha256))
    old = evaluate(renewed, replace(plan, problem=renewed.sha256))
    assert new.feasible
    assert best.objective is not None
    assert new.perturbation == pytest.approx(best.objective, rel=1e-3)
    assert new.perturbation <= (1 - LEAST_GAIN) * old.perturbation


def test_a_plan_that_is_still_best_stays() -> None:
    values = np.array(TABLE)
    renewed = refreshed(PROBLEM, values)
    plan = solve(renewed, method="exact").plan
    assert plan is not None
    answer = solve_again(PROBLEM, replace(plan, problem=PROBLEM.sha256), values, 30.0)
    assert answer.plan is None
    assert "the plan stays" in answer.told


def test_the_process_answers_in_its_folder_and_ends_with_its_parent(tmp_path: Path) -> None:
    plan = solve(PROBLEM, method="greedy").plan
    assert plan is not None
    write_problem(tmp_path, PROBLEM)
    words = [sys.executable, "-m", "qsync_opt.optimize.refresh", str(tmp_path), "30"]
    # One precision of one operator has no number: the answer says so.
    values = np.array(TABLE)
    values[0, 0] = np.nan
    write_question(tmp_path, plan, values)
    assert read_answer(tmp_path) is None
    with subprocess.Popen(words, stdin=subprocess.PIPE) as process:
        assert process.wait(60) == 0
    answer = read_answer(tmp_path)
    assert answer is not None
    assert answer.plan is None
    assert "perturbation: must be numbers" in answer.told
    write_question(tmp_path, plan, np.array(TABLE)[::-1] * 10)
    assert read_answer(tmp_path) is None
    with subprocess.Popen(words, stdin=subprocess.DEVNULL) as process:  # nobody is there
        assert process.wait(60) == 1
    assert read_answer(tmp_path) is None
