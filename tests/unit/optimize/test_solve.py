"""`solve` and `find_deadline`: methods, limits, hints, interruption, and what they report."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from qsync_opt.errors import InfeasibleError, ParameterError, PlanError, SolverUnavailableError
from qsync_opt.optimize import backends
from qsync_opt.optimize.evaluate import evaluate, plan_from_columns
from qsync_opt.optimize.generate import generate_problem
from qsync_opt.optimize.problem import AllocationProblem
from qsync_opt.optimize.result import (
    METHODS,
    SOLVERS,
    Progress,
    SolveParameters,
    SolveResult,
    SolveStatus,
)
from qsync_opt.optimize.solve import find_deadline, solve
from qsync_opt.plan import PrecisionPlan
from tests.tiny_problems import random_column, tiny_problem

EXACT = SolveParameters(relative_gap=0.0, time_limit_s=None)


def with_budgets(problem: AllocationProblem, memory_bytes: int) -> AllocationProblem:
    devices = [replace(device, memory_bytes=memory_bytes) for device in problem.devices]
    return replace(problem, devices=tuple(devices))


@pytest.fixture(scope="module")
def problem() -> AllocationProblem:
    """Small enough for brute force, and greedy is not optimal on it."""
    return generate_problem(
        operators=10, precisions=3, devices=2, seed=1, tightness=0.4, costs="correlated"
    )


@pytest.fixture(scope="module")
def large() -> AllocationProblem:
    """Not solved in a millisecond by any means."""
    return generate_problem(operators=400, precisions=4, devices=2, seed=0, tightness=0.3)


# -- methods ------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_a_plan_that_evaluate_accepts(
    method: str, problem: AllocationProblem
) -> None:
    result = solve(problem, method=method, parameters=EXACT)
    plan = result.require_plan()
    judged = evaluate(problem, plan, deadline_s=result.deadline_s)
    assert result.evaluation == judged
    assert result.objective == judged.perturbation
    assert judged.feasible or method == "fastest"
    assert result.method == ("exact" if method == "auto" else method)
    assert result.fallback_reason is None
    assert result.parameters is EXACT
    assert set(result.devices) == {device.name for device in problem.devices}
    proven = {"auto", "exact", "brute_force"}
    if method in proven:
        assert result.status is SolveStatus.OPTIMAL
        assert result.gap == 0.0
        assert result.bound == result.objective
    elif method != "fastest":
        assert result.status is SolveStatus.HEURISTIC
        assert result.bound is None
        assert result.gap is None


def test_the_objective_is_the_weighted_sum_of_the_kinds(problem: AllocationProblem) -> None:
    result = solve(problem, method="exact", parameters=EXACT)
    parts = [
        problem.weight(device) * (result.devices[device.name].objective or 0.0)
        for device in problem.devices
    ]
    assert result.objective == pytest.approx(sum(parts), rel=1e-12)


def test_the_fastest_plan_sets_the_pace_of_a_problem_with_a_slack() -> None:
    base = generate_problem(operators=10, precisions=3, devices=2, seed=2, tightness=0.5)
    slack = replace(base, deadline_s=None, slack=0.2)
    fastest = solve(slack, method="fastest")
    assert fastest.status is SolveStatus.OPTIMAL
    assert fastest.evaluation is not None
    assert fastest.fastest_time_s == pytest.approx(fastest.evaluation.iteration_time_s, rel=1e-12)
    assert fastest.deadline_s == pytest.approx(1.2 * fastest.evaluation.iteration_time_s, rel=1e-12)
    exact = solve(slack, method="exact", parameters=EXACT)
    assert exact.deadline_s == pytest.approx(find_deadline(slack), rel=1e-12)
    assert exact.evaluation is not None
    assert exact.evaluation.iteration_time_s <= (exact.deadline_s or 0) * (1 + 1e-9)


def test_a_plan_that_is_uniform_is_called_so() -> None:
    base = generate_problem(operators=6, precisions=2, devices=1, seed=0, tightness=1.0)
    result = solve(base, method="exact", parameters=EXACT)
    assert result.notes == ("kind0: the plan is uniform fp32",)


def test_one_precision_leaves_no_choice() -> None:
    base = generate_problem(operators=6, precisions=1, devices=1, seed=0, tightness=1.0)
    for method in METHODS:
        result = solve(base, method=method, parameters=EXACT)
        assert set(result.require_plan().for_device("kind0").values()) == {base.precisions[0]}


def test_an_unknown_method_is_refused(problem: AllocationProblem) -> None:
    with pytest.raises(ParameterError, match="method: must be one of auto, exact"):
        solve(problem, method="magic")


def test_brute_force_refuses_what_it_cannot_try(large: AllocationProblem) -> None:
    with pytest.raises(ParameterError, match="number of plans .* Use method 'exact'"):
        solve(large, method="brute_force")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("time_limit_s", -1.0),
        ("time_limit_s", float("nan")),
        ("time_limit_s", float("inf")),
        ("time_limit_s", True),
        ("relative_gap", 1.0),
        ("relative_gap", -1e-9),
        ("relative_gap", "0"),
        ("threads", 0),
        ("threads", 1.5),
        ("threads", True),
        ("seed", -1),
        ("seed", 2**31),
        ("solver", "HiGHS"),
    ],
)
def test_options_out_of_range_are_refused(name: str, value: object) -> None:
    with pytest.raises(ParameterError, match=f"^{name}: must be"):
        SolveParameters(**{name: value})  # type: ignore[arg-type]


# -- infeasible ---------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["auto", "exact", "brute_force"])
@pytest.mark.parametrize("slack", [False, True])
def test_too_little_memory_is_proven_infeasible(
    method: str, slack: bool, problem: AllocationProblem
) -> None:
    tight = with_budgets(problem, problem.devices[0].fixed_bytes)
    if slack:
        tight = replace(tight, deadline_s=None)
    result = solve(tight, method=method, parameters=EXACT)
    assert result.status is SolveStatus.INFEASIBLE
    assert (result.plan, result.objective, result.bound, result.gap) == (None, None, None, None)
    with pytest.raises(InfeasibleError, match="explain"):
        result.require_plan()


@pytest.mark.parametrize("method", ["greedy", "uniform", "random"])
def test_a_heuristic_without_a_plan_proves_nothing_or_says_so(
    method: str, problem: AllocationProblem
) -> None:
    result = solve(with_budgets(problem, problem.devices[0].fixed_bytes), method=method)
    assert result.status in (SolveStatus.NO_PLAN_FOUND, SolveStatus.INFEASIBLE)
    assert result.plan is None


def test_find_deadline_of_a_problem_without_a_plan_raises(problem: AllocationProblem) -> None:
    tight = replace(with_budgets(problem, 0), deadline_s=None)
    with pytest.raises(InfeasibleError, match="fits the memory") as caught:
        find_deadline(tight)
    assert caught.value.proven
    assert find_deadline(problem) == problem.deadline_s


# -- limits -------------------------------------------------------------------------------------


def check_cut_short(problem: AllocationProblem, result: SolveResult) -> None:
    """What a result that ran out of time may be, and that none of its claims is false."""
    assert result.status in (
        SolveStatus.TIME_LIMIT,
        SolveStatus.OPTIMAL,
        SolveStatus.HEURISTIC,
    )
    if result.plan is not None:
        assert evaluate(problem, result.plan, deadline_s=result.deadline_s).feasible
    if result.status is SolveStatus.OPTIMAL:
        assert result.gap is not None
        assert result.gap <= result.parameters.relative_gap


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("limit", [0.0, 0.001])
def test_hardly_any_time_is_no_error(
    limit: float, solver: str, plain: bool, large: AllocationProblem
) -> None:
    parameters = SolveParameters(time_limit_s=limit, solver=solver, plain=plain, relative_gap=0.0)
    result = solve(large, method="exact", parameters=parameters)
    check_cut_short(large, result)
    assert result.status is SolveStatus.TIME_LIMIT or solver == "cbc"


@pytest.mark.parametrize("limit", [0.0, 0.001])
def test_auto_falls_back_to_greedy_when_exact_has_no_plan(
    limit: float, large: AllocationProblem
) -> None:
    parameters = SolveParameters(time_limit_s=limit, plain=True)
    result = solve(large, method="auto", parameters=parameters)
    check_cut_short(large, result)
    assert result.plan is not None
    assert result.method == "greedy"
    assert result.status is SolveStatus.HEURISTIC
    assert result.fallback_reason is not None
    assert "exact found no plan" in result.fallback_reason


@pytest.mark.parametrize("limit", [0.0, 0.001, 0.05])
def test_a_deadline_from_too_little_time_is_not_called_optimal(
    limit: float, large: AllocationProblem
) -> None:
    slack = replace(large, deadline_s=None, slack=0.1)
    result = solve(slack, method="exact", parameters=SolveParameters(time_limit_s=limit))
    check_cut_short(slack, result)
    if result.status is SolveStatus.OPTIMAL:
        truth = find_deadline(slack, parameters=SolveParameters(time_limit_s=None))
        assert result.deadline_s == pytest.approx(truth, rel=1e-4)


# -- hints --------------------------------------------------------------------------------------


def test_a_hint_is_kept_when_there_is_no_time_for_more(problem: AllocationProblem) -> None:
    best = solve(problem, method="exact", parameters=EXACT)
    stopped = SolveParameters(time_limit_s=0.0, relative_gap=0.0)
    result = solve(problem, method="exact", parameters=stopped, hint=best.plan)
    assert result.objective == pytest.approx(best.objective, rel=1e-12)


def test_an_infeasible_hint_does_no_harm(problem: AllocationProblem) -> None:
    rng = np.random.default_rng(0)
    best = solve(problem, method="exact", parameters=EXACT)
    for _ in range(5):
        columns = [random_column(problem, device, rng) for device in problem.devices]
        hint = plan_from_columns(problem, columns)
        result = solve(problem, method="exact", parameters=EXACT, hint=hint)
        assert result.status is SolveStatus.OPTIMAL
        assert result.objective == pytest.approx(best.objective, rel=1e-12)


def test_a_hint_for_another_problem_is_refused(problem: AllocationProblem) -> None:
    other = tiny_problem(0)
    columns = [random_column(other, d, np.random.default_rng(0)) for d in other.devices]
    with pytest.raises(PlanError, match="hash of the problem"):
        solve(problem, hint=plan_from_columns(other, columns))
    plan = solve(problem, method="greedy").require_plan()
    part = dict(plan.devices)
    part.popitem()
    with pytest.raises(PlanError, match="exactly the problem's device kinds"):
        solve(problem, hint=PrecisionPlan(problem=problem.sha256, devices=part))


# -- solvers that fail --------------------------------------------------------------------------


def test_a_back_end_that_fails_is_named(
    problem: AllocationProblem, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object, **__: object) -> None:
        raise SolverUnavailableError("highs", "went home", "Install it")

    monkeypatch.setattr(backends, "_solve_math_opt", gone)
    parameters = SolveParameters(plain=True, relative_gap=0.0)
    exact = solve(problem, method="exact", parameters=parameters)
    assert exact.status is SolveStatus.SOLVER_ERROR
    assert exact.fallback_reason == "solver highs: went home. Install it"
    auto = solve(problem, method="auto", parameters=parameters)
    assert auto.method == "greedy"
    assert auto.plan is not None
    assert "solver highs: went home" in (auto.fallback_reason or "")
    slack = replace(problem, deadline_s=None)
    with pytest.raises(SolverUnavailableError, match="went home"):
        find_deadline(slack, parameters=parameters)
    # What needs no back end is not touched by it.
    assert solve(problem, method="uniform", parameters=parameters).fallback_reason is None


def test_an_error_that_is_none_of_ours_is_not_swallowed(
    problem: AllocationProblem, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bug(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(backends, "_solve_math_opt", bug)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        solve(problem, method="exact", parameters=SolveParameters(plain=True))


# -- reports, interruption ----------------------------------------------------------------------


def test_progress_never_contradicts_the_result(problem: AllocationProblem) -> None:
    reports: list[Progress] = []
    parameters = replace(EXACT, progress=reports.append)
    result = solve(problem, method="exact", parameters=parameters)
    assert reports
    assert {report.device for report in reports} <= set(result.devices)
    for report in reports:
        best = result.devices[report.device].objective
        assert best is not None
        assert report.elapsed_s >= 0
        assert report.phase
        if report.objective is not None and report.bound is not None:
            assert report.bound <= report.objective * (1 + 1e-9)


_INTERRUPTED = """
import json, os, signal, sys, time
from qsync_opt.optimize.evaluate import evaluate
from qsync_opt.optimize.generate import generate_problem
from qsync_opt.optimize.result import SolveParameters
from qsync_opt.optimize.solve import solve
problem = generate_problem(
    operators=300, precisions=4, devices=2, seed=3, tightness=0.3, costs="correlated"
)
seen, sent = {}, []
def report(progress):
    if progress.objective is not None:
        seen[progress.device] = progress.objective
        if len(seen) == 2 and not sent:
            sent.append(True)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)
parameters = SolveParameters(relative_gap=0.0, time_limit_s=None, threads=2, progress=report)
result = solve(problem, method=sys.argv[1], parameters=parameters)
feasible = result.plan is not None and evaluate(problem, result.plan).feasible
found = {name: part.objective for name, part in result.devices.items()}
sys.stdout.write(json.dumps([result.status.name, feasible, seen, found, result.gap]))
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.parametrize("method", ["exact", "auto"])
def test_ctrl_c_returns_the_incumbent(method: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED, method], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    status, feasible, seen, found, gap = json.loads(done.stdout.splitlines()[-1])
    assert status == "INTERRUPTED"
    assert feasible
    assert gap is None or gap >= 0
    for name, objective in seen.items():
        assert found[name] <= objective * (1 + 1e-12)
