"""`FactorGraph` and `Lagrangian` against `evaluate`, on random plans of random tiny problems."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from qsync_opt.optimize import elimination, factors
from qsync_opt.optimize.arrays import FloatArray, IntArray
from qsync_opt.optimize.brute_force import brute_force_columns, brute_force_fastest
from qsync_opt.optimize.climb import Point
from qsync_opt.optimize.evaluate import (
    DeviceEvaluation,
    allowed_columns,
    evaluate_columns,
    evaluate_device,
)
from qsync_opt.optimize.factors import FactorGraph
from qsync_opt.optimize.generate import generate_problem
from qsync_opt.optimize.lagrangian import Lagrangian
from qsync_opt.optimize.problem import AllocationProblem, DeviceKind
from tests.tiny_problems import UNLIMITED, random_column, tiny_problem

SEEDS = 40


def kinds(seed: int) -> list[tuple[AllocationProblem, DeviceKind]]:
    """The device kinds of a tiny problem."""
    problem = tiny_problem(seed)
    return [(problem, device) for device in problem.devices]


def some_options(graph: FactorGraph, rng: np.random.Generator, most: int = 40) -> list[IntArray]:
    """Allowed options of all variables: every combination, or some at random."""
    rows = [np.flatnonzero(row).tolist() for row in graph.allowed]
    if np.prod([len(row) for row in rows]) <= most:
        return [np.array(picks, dtype=np.int64) for picks in itertools.product(*rows)]
    return [np.array([rng.choice(row) for row in rows], dtype=np.int64) for _ in range(most)]


def keeps_rules(problem: AllocationProblem, device: DeviceKind, column: IntArray) -> bool:
    """Whether a plan of one kind keeps pins, groups and followers."""
    alone = replace(device, batch_share=1 / device.workers, memory_bytes=UNLIMITED)
    return evaluate_columns(replace(problem, devices=(alone,)), [column], None).feasible


def rows_of(part: DeviceEvaluation, device: DeviceKind) -> FloatArray:
    """Largest time row (with tails) and largest memory row, as `evaluate` has them."""
    return np.array([part.iteration_time_s, part.peak_memory_bytes - device.fixed_bytes])


def largest_rows(lagrangian: Lagrangian, use: FloatArray) -> FloatArray:
    """The same from the rows of the Lagrangian: minimising time, a limit is minus its constant."""
    times = use[: lagrangian.time_rows] - lagrangian.limit[: lagrangian.time_rows]
    return np.array([times.max(), use[lagrangian.time_rows :].max(initial=-np.inf)])


@pytest.mark.parametrize("seed", range(SEEDS))
def test_the_tables_say_what_evaluate_says(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for problem, device in kinds(seed):
        graph = FactorGraph(problem, device, allowed_columns(problem, device))
        assert graph.exact
        if not graph.feasible:
            continue
        clock = Lagrangian(graph, None)
        priced = Lagrangian(graph, 1.0)
        for options in some_options(graph, rng):
            column = graph.operator_columns(options)
            assert clock.allows(options) == keeps_rules(problem, device, column)
            if not clock.allows(options):
                continue
            part = evaluate_device(problem, device, column)
            objective, use = priced.usage(options)
            assert objective == pytest.approx(part.perturbation, rel=1e-12)
            none, same = clock.usage(options)
            assert none == 0.0
            np.testing.assert_array_equal(use, same)
            np.testing.assert_allclose(largest_rows(clock, use), rows_of(part, device), rtol=1e-12)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_plan_that_keeps_the_rules_has_options(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for problem, device in kinds(seed):
        graph = FactorGraph(problem, device, allowed_columns(problem, device))
        lagrangian = Lagrangian(graph, None) if graph.feasible else None
        leaders = [
            int(np.flatnonzero(graph.variable_of == v)[0]) for v in range(len(graph.allowed))
        ]
        for _ in range(30):
            column = random_column(problem, device, rng)
            if not keeps_rules(problem, device, column):
                continue
            assert lagrangian is not None, "a plan exists, but a variable has no option"
            options = column[leaders]
            np.testing.assert_array_equal(graph.operator_columns(options), column)
            assert lagrangian.allows(options)


def test_a_graph_over_some_options_is_the_same_graph() -> None:
    # What remains must cost the same: variables with one option keep their share.
    rng = np.random.default_rng(3)
    problem = generate_problem(operators=40, precisions=3, devices=1, seed=3, tightness=0.5)
    (device,) = problem.devices
    whole = FactorGraph(problem, device, allowed_columns(problem, device))
    domain = allowed_columns(problem, device)
    column = random_column(problem, device, rng)
    fixed = rng.random(len(column)) < 0.5
    domain[fixed] = np.eye(domain.shape[1], dtype=np.bool_)[column[fixed]]
    part = FactorGraph(problem, device, domain)
    assert part.feasible
    assert (part.allowed.sum(axis=1) <= whole.allowed.sum(axis=1)).all()
    options = column[
        [int(np.flatnonzero(part.variable_of == v)[0]) for v in range(len(part.allowed))]
    ]
    many, few = Lagrangian(whole, 1.0), Lagrangian(part, 1.0, Lagrangian(whole, 1.0).points)
    np.testing.assert_array_equal(part.operator_columns(options), column)
    assert many.usage(options)[0] == pytest.approx(few.usage(options)[0], rel=1e-12)
    np.testing.assert_allclose(many.usage(options)[1], few.usage(options)[1], rtol=1e-12)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_split_tables_never_exceed_the_true_cost(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(seed)
    for problem, device in kinds(seed):
        monkeypatch.setattr(factors, "LARGEST_TABLE", len(problem.precisions))
        graph = FactorGraph(problem, device, allowed_columns(problem, device))
        if not graph.feasible:
            continue
        clock = Lagrangian(graph, None)
        for options in some_options(graph, rng, 40):
            column = graph.operator_columns(options)
            if not keeps_rules(problem, device, column):
                continue
            part = evaluate_device(problem, device, column)
            every = np.zeros(len(clock.elimination.copy_of), dtype=np.int64)
            every[:] = options[clock.elimination.copy_of]
            _, use = clock.usage(every)
            assert (largest_rows(clock, use) <= rows_of(part, device) * (1 + 1e-12) + 1e-12).all()


def test_tables_are_split_where_they_would_be_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factors, "LARGEST_TABLE", 3)
    problem = generate_problem(operators=12, precisions=3, devices=1, seed=0, tightness=0.5)
    (device,) = problem.devices
    assert not FactorGraph(problem, device, allowed_columns(problem, device)).exact


def random_prices(lagrangian: Lagrangian, rng: np.random.Generator) -> FloatArray:
    """Prices >= 0, most of them 0; the rows of time sum to 1 where time is minimised."""
    prices = rng.exponential(size=len(lagrangian.limit)) * (rng.random(len(lagrangian.limit)) < 0.5)
    prices *= 10.0 ** rng.integers(-2, 3)
    if lagrangian.deadline_s is None:
        share = rng.dirichlet(np.ones(lagrangian.time_rows))
        prices[: lagrangian.time_rows] = share
    return prices


@pytest.mark.parametrize("largest", [None, 9], ids=["exact", "split"])
@pytest.mark.parametrize("seed", range(SEEDS))
def test_the_lagrangian_is_a_lower_bound_at_any_prices(
    seed: int, largest: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if largest is not None:
        monkeypatch.setattr(factors, "LARGEST_TABLE", largest)
        monkeypatch.setattr(elimination, "LARGEST_TABLE", largest)
    rng = np.random.default_rng(seed)
    for problem, device in kinds(seed):
        assert problem.deadline_s is not None
        graph = FactorGraph(problem, device, allowed_columns(problem, device))
        best = brute_force_columns(problem, device, problem.deadline_s)
        fastest = brute_force_fastest(problem, device)
        if not graph.feasible:
            assert best is None
            assert fastest is None
            continue
        for deadline_s, column in ((problem.deadline_s, best), (None, fastest)):
            if column is None:
                continue
            part = evaluate_device(problem, device, column)
            optimum = part.iteration_time_s if deadline_s is None else part.perturbation
            lagrangian = Lagrangian(graph, deadline_s)
            for _ in range(10):
                point = lagrangian.evaluate(random_prices(lagrangian, rng))
                assert point.value <= optimum + 1e-9 * max(1.0, abs(optimum))


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_plan_found_at_some_prices_attains_their_value(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for problem, device in kinds(seed):
        graph = FactorGraph(problem, device, allowed_columns(problem, device))
        if not graph.feasible:
            continue
        lagrangian = Lagrangian(graph, problem.deadline_s)
        for _ in range(5):
            prices = random_prices(lagrangian, rng)
            point = lagrangian.evaluate(prices)
            if not np.isfinite(point.value):
                continue  # followers and groups contradict each other
            assert lagrangian.allows(point.options)
            attained = point.objective + prices @ point.excess
            assert point.value == pytest.approx(attained, rel=1e-9, abs=1e-9)
            least = lagrangian.elimination.conditional_minima(lagrangian.costs(prices))
            least = least.min(axis=1) - lagrangian.constant(prices)
            np.testing.assert_allclose(least, point.value, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("minimise_time", [False, True], ids=["perturbation", "time"])
# On 141 Glop leaves the prices of time, which sum to 1, at 1 + 3e-8.
@pytest.mark.parametrize("seed", [*range(SEEDS), 141])
def test_a_climb_ends_between_its_start_and_the_optimum(seed: int, minimise_time: bool) -> None:
    for problem, device in kinds(seed):
        assert problem.deadline_s is not None
        graph = FactorGraph(problem, device, allowed_columns(problem, device))
        if not graph.feasible:
            continue
        values: list[float] = []

        def seen(point: Point, values: list[float] = values) -> bool:
            values.append(point.value)
            return False

        lagrangian = Lagrangian(graph, None if minimise_time else problem.deadline_s)
        climb = lagrangian.maximise(
            tolerance=1e-9,
            visit=seen,
            enough=lambda value: False,
        )
        column = (
            brute_force_fastest(problem, device)
            if minimise_time
            else brute_force_columns(problem, device, problem.deadline_s)
        )
        if column is None:
            continue  # then any bound is a bound
        assert not climb.impossible
        part = evaluate_device(problem, device, column)
        optimum = part.iteration_time_s if minimise_time else part.perturbation
        assert max(values) == climb.best.value
        assert climb.best.value <= optimum + 1e-9 * max(1.0, abs(optimum))
