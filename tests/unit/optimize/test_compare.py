"""`compare` and `pareto`: one deadline for all, rows for failures, a front that never rises."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from qsync_opt.errors import InfeasibleError, ParameterError, SolverUnavailableError
from qsync_opt.optimize import compare as module
from qsync_opt.optimize.compare import compare, pareto
from qsync_opt.optimize.comparison import ROW_COLUMNS
from qsync_opt.optimize.evaluate import (
    TIME_TOLERANCE,
    evaluate,
    evaluate_columns,
    follower_columns,
    plan_from_columns,
)
from qsync_opt.optimize.generate import generate_problem
from qsync_opt.optimize.problem import AllocationProblem
from qsync_opt.optimize.result import (
    METHODS,
    SolveParameters,
    SolveResult,
    SolveStatus,
    relative_gap,
)
from qsync_opt.optimize.solve import find_deadline, solve
from qsync_opt.plan import PrecisionPlan

EXACTLY = SolveParameters(relative_gap=0.0)


@pytest.fixture(scope="module")
def paced() -> AllocationProblem:
    """A problem that asks for the pace of its fastest plan."""
    problem = generate_problem(operators=10, precisions=3, devices=2, seed=5, tightness=0.6)
    return replace(problem, deadline_s=None, slack=0.1)


def test_all_methods_are_held_to_one_deadline(paced: AllocationProblem) -> None:
    found = compare(paced, methods=METHODS[:5])
    deadline_s = find_deadline(paced)
    assert found.deadline_s == deadline_s
    assert [row.method for row in found.rows] == list(METHODS[:5])
    for row in found.rows:
        if row.plan is None:
            continue
        held = evaluate(paced, row.plan, deadline_s=deadline_s)
        assert held.feasible
        assert row.evaluation == held
        assert row.objective == held.perturbation
        assert row.iteration_time_s == held.iteration_time_s <= deadline_s * (1 + TIME_TOLERANCE)
        assert row.peak_memory_bytes == held.peak_memory_bytes


def test_exact_is_no_worse_than_greedy_nor_greedy_than_uniform(paced: AllocationProblem) -> None:
    uniform, greedy, exact = compare(paced, parameters=EXACTLY).rows
    assert exact.objective is not None
    assert greedy.objective is not None
    assert exact.objective <= greedy.objective
    assert uniform.objective is None or greedy.objective <= uniform.objective
    assert exact.status is SolveStatus.OPTIMAL
    assert exact.bound == pytest.approx(exact.objective, rel=1e-6)


def test_ratios_are_to_the_best_row(paced: AllocationProblem) -> None:
    found = compare(paced)
    best = found.best
    assert best is not None
    assert best.objective == min(row.objective for row in found.rows if row.objective is not None)
    assert best.ratio == 1.0
    for row in found.rows:
        if row.objective is not None:
            assert row.ratio == pytest.approx(row.objective / best.objective)
    assert found.bound is not None
    assert found.bound <= best.objective


def test_ratio_to_a_best_of_nothing() -> None:
    problem = generate_problem(operators=3, precisions=2, devices=1, seed=0, tightness=1.0)
    found = compare(problem, methods=["exact", "fastest"])
    exact, fastest = found.rows
    assert exact.objective == 0.0
    assert exact.ratio == 1.0
    assert fastest.objective is not None
    assert fastest.ratio == (math.inf if fastest.objective > 0 else 1.0)


def test_the_table_has_a_value_for_every_column(paced: AllocationProblem) -> None:
    found = compare(paced, methods=["greedy", "exact"])
    for values, row in zip(found.table(), found.rows, strict=True):
        named = dict(zip(ROW_COLUMNS, values, strict=True))
        assert named["method"] == row.method
        assert named["status"] == row.status.name
        assert named["objective"] == row.objective


def starved(problem: AllocationProblem) -> AllocationProblem:
    devices = tuple(replace(device, memory_bytes=1) for device in problem.devices)
    return replace(problem, devices=devices)


def test_a_problem_without_a_plan_gives_rows_that_say_so(paced: AllocationProblem) -> None:
    found = compare(starved(paced))
    assert found.deadline_s is None
    assert found.best is None
    assert [row.status for row in found.rows] == [SolveStatus.INFEASIBLE] * 3
    assert all(row.reason and row.objective is None and row.plan is None for row in found.rows)
    curve = pareto(starved(paced), slacks=[0.0, 0.1])
    assert curve.fastest_time_s is None
    assert len(curve.rows()) == 6
    assert curve.front("exact") == []


def test_a_deadline_that_no_plan_meets_gives_rows_that_say_so(paced: AllocationProblem) -> None:
    late = replace(paced, deadline_s=find_deadline(paced) / 10, slack=0.0)
    found = compare(late)
    assert found.deadline_s == late.deadline_s
    assert all(row.plan is None for row in found.rows)
    assert found.rows[-1].status is SolveStatus.INFEASIBLE


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InfeasibleError("no plan: memory", proven=True), SolveStatus.INFEASIBLE),
        (InfeasibleError("no plan: too slow"), SolveStatus.NO_PLAN_FOUND),
        (SolverUnavailableError("highs", "crashed"), SolveStatus.SOLVER_ERROR),
    ],
)
def test_a_method_that_fails_leaves_the_others_alone(
    paced: AllocationProblem,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    status: SolveStatus,
) -> None:
    def failing(problem: AllocationProblem, *, method: str, **options: Any) -> object:
        if method == "exact":
            raise error
        return solve(problem, method=method, **options)

    monkeypatch.setattr(module, "solve", failing)
    greedy, exact = compare(paced, methods=["greedy", "exact"]).rows
    assert greedy.plan is not None
    assert exact.status is status
    assert exact.reason == str(error)
    assert exact.plan is None


def test_after_ctrl_c_no_further_method_is_run(
    paced: AllocationProblem, monkeypatch: pytest.MonkeyPatch
) -> None:
    run: list[str] = []

    def interrupted(problem: AllocationProblem, *, method: str, **options: Any) -> SolveResult:
        run.append(method)
        result = solve(problem, method=method, **options)
        return replace(result, status=SolveStatus.INTERRUPTED) if method == "greedy" else result

    monkeypatch.setattr(module, "solve", interrupted)
    uniform, greedy, exact = compare(paced).rows
    assert run == ["uniform", "greedy"]
    assert uniform.status is SolveStatus.HEURISTIC
    assert (greedy.status, exact.status) == (SolveStatus.INTERRUPTED,) * 2
    assert greedy.plan is not None
    assert exact.plan is None
    run.clear()
    curve = pareto(paced, slacks=[0.0, 0.1])
    assert run == ["uniform", "greedy"]
    assert [point.slack for point in curve.points] == [0.0]


@pytest.mark.parametrize("name", ["solve", "find_deadline"])
def test_ctrl_c_before_there_is_a_plan_gives_rows_that_say_so(
    paced: AllocationProblem, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, name, interrupted)
    assert {row.status for row in compare(paced).rows} == {SolveStatus.INTERRUPTED}
    (point,) = pareto(paced, slacks=[0.0, 0.1]).points
    assert {row.status for row in point.comparison.rows} == {SolveStatus.INTERRUPTED}


@pytest.mark.parametrize("methods", [[], "exact", 5, None, ["simplex"], ["exact", "exact"]])
def test_bad_methods_are_refused_before_anything_is_solved(
    paced: AllocationProblem, methods: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("a solve was started")

    monkeypatch.setattr(module, "solve", never)
    monkeypatch.setattr(module, "find_deadline", never)
    with pytest.raises(ParameterError, match="methods"):
        compare(paced, methods=methods)
    with pytest.raises(ParameterError, match="methods"):
        pareto(paced, methods=methods)


@pytest.mark.parametrize(
    "slacks",
    [
        [],
        "0",
        0.1,
        None,
        [-0.1],
        [float("nan")],
        [float("inf")],
        [1.1e6],
        [0.1, 0.1],
        [True],
        ["0"],
    ],
)
def test_bad_slacks_are_refused(paced: AllocationProblem, slacks: Any) -> None:
    with pytest.raises(ParameterError, match="slacks"):
        pareto(paced, slacks=slacks)


def test_the_exact_front_is_that_of_the_enumeration() -> None:
    problem = generate_problem(operators=7, precisions=3, devices=1, seed=2, tightness=0.5)
    (device,) = problem.devices
    plans = []
    options = [
        [0] if operator.follows else np.flatnonzero(device.available[o]).tolist()
        for o, operator in enumerate(problem.operators)
    ]
    for choice in np.array(np.meshgrid(*options)).reshape(len(options), -1).T:
        column = follower_columns(problem, choice)
        part = evaluate_columns(problem, [column], None)
        if part.feasible:
            plans.append((part.devices[device.name].iteration_time_s, part.perturbation))
    fastest = min(time_s for time_s, _ in plans)
    slacks = [0.5, 0.0, 0.02, 0.2, 3.0]
    curve = pareto(problem, slacks=slacks, methods=["exact"], parameters=EXACTLY)
    assert curve.fastest_time_s == pytest.approx(fastest, rel=1e-6)
    assert [point.slack for point in curve.points] == sorted(slacks)
    for point in curve.points:
        assert point.deadline_s is not None
        limit = point.deadline_s * (1 + TIME_TOLERANCE)
        least = min(perturbation for time_s, perturbation in plans if time_s <= limit)
        assert point.comparison.rows[0].objective == pytest.approx(least, rel=1e-9, abs=1e-300)


def test_the_exact_front_never_rises_whatever_the_gap(paced: AllocationProblem) -> None:
    loose = SolveParameters(relative_gap=0.5)
    curve = pareto(paced, slacks=np.linspace(0, 1, 9).tolist(), parameters=loose)
    front = [objective for _, objective in curve.front("exact")]
    assert len(front) == 9
    assert front == sorted(front, reverse=True)


def test_rows_of_a_curve_fit_its_columns(paced: AllocationProblem) -> None:
    curve = pareto(paced, slacks=[0.0, 0.3], methods=["greedy", "exact"])
    rows = [dict(zip(curve.columns, row, strict=True)) for row in curve.rows()]
    assert [(row["slack"], row["method"]) for row in rows] == [
        (0.0, "greedy"),
        (0.0, "exact"),
        (0.3, "greedy"),
        (0.3, "exact"),
    ]
    with pytest.raises(ParameterError, match="method"):
        curve.front("uniform")


def result_of(
    problem: AllocationProblem, plan: PrecisionPlan | None, bound: float | None, status: SolveStatus
) -> SolveResult:
    evaluation = None if plan is None else evaluate(problem, plan)
    objective = None if evaluation is None else evaluation.perturbation
    return SolveResult(
        method="exact",
        status=status,
        plan=plan,
        evaluation=evaluation,
        objective=objective,
        bound=bound,
        gap=relative_gap(objective, bound),
        deadline_s=problem.deadline_s,
        fastest_time_s=None,
        fallback_reason=None,
        notes=(),
        devices={},
        solve_s=0.0,
        parameters=EXACTLY,
    )


def test_a_better_plan_of_a_tighter_deadline_is_handed_on_and_kept(
    paced: AllocationProblem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A solver that does worse at every looser deadline, and at last finds nothing."""
    good, worse = (compare(paced, methods=[method]).rows[0].plan for method in ("exact", "fastest"))
    assert good is not None
    least = evaluate(paced, good).perturbation
    answers = [
        (good, least / 2, SolveStatus.TIME_LIMIT),
        (worse, least / 4, SolveStatus.TIME_LIMIT),
        (None, None, SolveStatus.INFEASIBLE),
        (worse, least, SolveStatus.OPTIMAL),
    ]
    hints: list[object] = []

    def scripted(
        problem: AllocationProblem,
        *,
        method: str,
        parameters: SolveParameters,
        hint: PrecisionPlan | None,
    ) -> SolveResult:
        hints.append(hint)
        plan, bound, status = answers[len(hints) - 1]
        return result_of(problem, plan, bound, status)

    monkeypatch.setattr(module, "solve", scripted)
    curve = pareto(paced, slacks=[0.1, 0.2, 0.3, 0.4], methods=["exact"], parameters=EXACTLY)
    assert hints == [None, good, good, good]
    rows = [point.comparison.rows[0] for point in curve.points]
    assert [row.plan for row in rows] == [good] * 4
    assert [row.objective for row in rows] == [least] * 4
    assert [row.bound for row in rows] == [least / 2, least / 4, None, least]
    assert [row.gap for row in rows] == [0.5, 0.75, None, 0.0]
    assert [row.status for row in rows] == [
        SolveStatus.TIME_LIMIT,
        SolveStatus.TIME_LIMIT,
        SolveStatus.NO_PLAN_FOUND,
        SolveStatus.OPTIMAL,
    ]
    for point, row in zip(curve.points, rows, strict=True):
        assert row.evaluation is not None
        assert row.evaluation.deadline_s == point.deadline_s
        assert row.evaluation.feasible


def test_uniform_plans_get_no_hint(
    paced: AllocationProblem, monkeypatch: pytest.MonkeyPatch
) -> None:
    hints: list[object] = []
    full = plan_from_columns(
        paced, [np.zeros(len(paced.operators), dtype=np.int64) for _ in paced.devices]
    )

    def recording(
        problem: AllocationProblem, *, hint: PrecisionPlan | None, **_: object
    ) -> SolveResult:
        hints.append(hint)
        return result_of(problem, full, None, SolveStatus.HEURISTIC)

    monkeypatch.setattr(module, "solve", recording)
    pareto(paced, slacks=[0.0, 1.0], methods=["uniform", "greedy"])
    assert hints == [None] * 4


# -- buckets with codes -------------------------------------------------------------------------


def test_methods_choose_bits_and_the_front_of_the_exact_one_never_rises() -> None:
    problem = generate_problem(operators=30, seed=4, communication=(16, 8, 4))
    curve = pareto(problem, slacks=(0.0, 0.1, 0.5), methods=("uniform", "greedy", "exact"))
    before: float | None = None
    for point in curve.points:
        uniform, greedy, exact = (row.objective for row in point.comparison.rows)
        assert exact is not None
        assert greedy is not None
        assert exact <= greedy
        assert uniform is None or greedy <= uniform
        assert before is None or exact <= before
        before = exact
        for row in point.comparison.rows:
            if row.plan is not None:
                judged = evaluate(problem, row.plan, deadline_s=point.deadline_s)
                assert judged.feasible
                assert judged == row.evaluation
    assert curve.points[0].comparison.rows[-1].plan is not None
    assert curve.points[0].comparison.rows[-1].plan.communication  # the fastest pace needs them
