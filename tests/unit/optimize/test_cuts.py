"""Cuts as rows of the Lagrangian, of single changes and of programs: all say a path's length."""

from __future__ import annotations

import numpy as np
import pytest

from qsync_opt.errors import ParameterError
from qsync_opt.optimize.cuts import TimeCut, lengths_s
from qsync_opt.optimize.evaluate import allowed_columns, broken_rules
from qsync_opt.optimize.factors import FactorGraph
from qsync_opt.optimize.formulation import formulate
from qsync_opt.optimize.lagrangian import Lagrangian
from qsync_opt.optimize.moves import single_changes
from qsync_opt.optimize.problem import AllocationProblem, DeviceKind
from tests.tiny_problems import random_column, tiny_problem

SEEDS = range(60)


def random_cuts(problem: AllocationProblem, seed: int) -> list[TimeCut]:
    rng = np.random.default_rng([seed, 5])
    count = len(problem.operators)
    shape = (count, len(problem.precisions))
    cuts = []
    for number in range(3):
        low = int(rng.integers(0, count + 1))
        cuts.append(
            TimeCut(
                name=f"cut {number}",
                operator_s=rng.uniform(0, 5, size=shape) * (rng.random((count, 1)) < 0.7),
                past_s=float(rng.uniform(0, 3)),
                forward_casts_from=int(rng.integers(0, count + 1)),
                backward_casts=(low, int(rng.integers(low, count + 1))),
            )
        )
    return cuts


def length_by_hand(cut: TimeCut, device: DeviceKind, column: np.ndarray) -> float:
    total = cut.past_s + sum(float(cut.operator_s[o, p]) for o, p in enumerate(column.tolist()))
    tensors = device.tensors
    for tensor in range(len(tensors)):
        producer = int(tensors.producer[tensor])
        asked: set[int] = set()
        for consumer in sorted(tensors.consumers_of(tensor).tolist()):
            target = int(column[consumer])
            if target in asked:
                continue
            asked.add(target)
            if consumer >= cut.forward_casts_from:
                total += float(tensors.forward_s[tensor, column[producer], target])
            if cut.backward_casts[0] <= producer < cut.backward_casts[1]:
                total += float(tensors.backward_s[tensor, column[producer], target])
    return total


@pytest.mark.parametrize("seed", SEEDS)
def test_every_form_of_a_cut_says_the_length_of_its_path(seed: int) -> None:
    problem = tiny_problem(seed)
    cuts, rng = random_cuts(problem, seed), np.random.default_rng(seed)
    for device in problem.devices:
        graph = FactorGraph(problem, device, allowed_columns(problem, device))
        if not graph.feasible:
            continue
        lagrangian = Lagrangian(graph, 100.0, cuts=cuts)
        assert lagrangian.time_rows == len(lagrangian.first) + len(cuts)
        place = slice(len(lagrangian.first), lagrangian.time_rows)
        past = np.array([cut.past_s for cut in cuts])
        for _ in range(10):
            column = random_column(problem, device, rng)
            if broken_rules(problem, device, column):
                continue
            want = [length_by_hand(cut, device, column) for cut in cuts]
            np.testing.assert_allclose(lengths_s(cuts, device, column), want, rtol=1e-12)
            options = lagrangian.elimination.minimise(  # copies of variables included
                _only(lagrangian, graph.options_of(column))
            )[1]
            _, used = lagrangian.usage(options)
            np.testing.assert_allclose(used[place] + past, want, rtol=1e-12)
            # At prices on cuts alone, costs are what the cuts weigh.
            prices = np.zeros(len(lagrangian.limit))
            prices[place] = rng.uniform(0, 2, size=len(cuts))
            costs = lagrangian.costs(prices) + _only(lagrangian, graph.options_of(column))
            value, _ = lagrangian.elimination.minimise(costs)
            objective = float(device.perturbation[np.arange(len(column)), column].sum())
            weighed = float((prices / lagrangian.scale)[place] @ used[place])
            assert value == pytest.approx(objective + weighed, rel=1e-9, abs=1e-12)


def _only(lagrangian: Lagrangian, options: np.ndarray) -> np.ndarray:
    """Costs that allow one option of every variable."""
    blocked = np.full(lagrangian.graph.allowed.shape, np.inf)
    blocked[np.arange(len(options)), options] = 0.0
    costs = np.zeros(lagrangian.elimination.cells)
    costs[1 : 1 + blocked.size] = blocked.ravel()
    return costs


@pytest.mark.parametrize("seed", SEEDS)
def test_single_changes_change_cuts_by_what_usage_says(seed: int) -> None:
    problem = tiny_problem(seed)
    cuts, rng = random_cuts(problem, seed), np.random.default_rng(seed)
    device = problem.devices[0]
    graph = FactorGraph(problem, device, allowed_columns(problem, device))
    if not graph.feasible:
        return
    lagrangian = Lagrangian(graph, 100.0, cuts=cuts)
    rows = np.arange(len(lagrangian.limit))
    column = random_column(problem, device, rng)
    options = graph.options_of(column)
    if not graph.allowed[np.arange(len(options)), options].all():
        return
    changes = single_changes(lagrangian, options, rows)
    _, before = lagrangian.usage(options)
    for variable, option in np.argwhere(graph.allowed).tolist():
        changed = options.copy()
        changed[variable] = option
        _, after = lagrangian.usage(changed)
        np.testing.assert_allclose(
            changes.use[variable, option], after - before, rtol=1e-9, atol=1e-9 * after.max()
        )


def test_a_program_has_a_row_for_each_cut_and_needs_one_kind() -> None:
    problem = tiny_problem(3, kinds=2)
    cuts = random_cuts(problem, 3)
    for objective, rows in (("perturbation", 3), ("time", 6)):
        names = [
            formulate(
                problem,
                deadline_s=50.0,
                device=problem.devices[0].name,
                objective=objective,
                cuts=given,
            ).program.row_names
            for given in ((), cuts)
        ]
        assert sum(name.startswith("cut[") for name in names[1]) == rows
        assert not any(name.startswith("cut[") for name in names[0])
    with pytest.raises(ParameterError, match="device"):
        formulate(problem, deadline_s=50.0, cuts=cuts)
