"""`Elimination` against adding up all tables for every assignment."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from qsync_opt.optimize import elimination
from qsync_opt.optimize.arrays import BoolArray, FloatArray, IntArray
from qsync_opt.optimize.elimination import Elimination

Scope = tuple[int, ...]


@dataclass(frozen=True)
class Sum:
    """Random tables over some variables, and what they add up to."""

    variables: int
    columns: int
    scopes: Sequence[Scope]
    costs: FloatArray
    run: Elimination

    @staticmethod
    def drawn(
        rng: np.random.Generator, variables: int, columns: int, scopes: Sequence[Scope], shut: float
    ) -> Sum:
        """Costs of both signs; a fraction `shut` of the entries is infinite."""
        active = np.ones(variables, dtype=np.bool_)
        run = Elimination(variables, columns, active, scopes)
        costs = rng.normal(size=run.cells)
        costs[rng.random(run.cells) < shut] = np.inf
        costs[0] = 0.0
        return Sum(variables, columns, scopes, costs, run)

    def open_one(self, rng: np.random.Generator) -> None:
        """Allow one assignment at least."""
        picks = rng.integers(self.columns, size=self.variables)
        cells = [1 + v * self.columns + int(picks[v]) for v in range(self.variables)]
        for scope, first in zip(self.scopes, self.run.first_cell.tolist(), strict=True):
            entry = 0
            for v in scope:
                entry = entry * self.columns + int(picks[v])
            cells.append(first + entry)
        shut = [cell for cell in cells if np.isinf(self.costs[cell])]
        self.costs[shut] = rng.normal(size=len(shut))

    def assignments(self) -> IntArray:
        """All of them, [A, V]."""
        every = itertools.product(range(self.columns), repeat=self.variables)
        return np.array(list(every), dtype=np.int64).reshape(-1, self.variables)

    def values(self, assignments: IntArray) -> FloatArray:
        """The sum of all tables, [A]."""
        total = np.zeros(len(assignments))
        for v in range(self.variables):
            total += self.costs[1 + v * self.columns + assignments[:, v]]
        for scope, first in zip(self.scopes, self.run.first_cell.tolist(), strict=True):
            entry = np.zeros(len(assignments), dtype=np.int64)
            for v in scope:
                entry = entry * self.columns + assignments[:, v]
            total += self.costs[first + entry]
        return total

    def component_values(self, members: list[int], assignments: IntArray) -> FloatArray:
        """The sum of the tables over some variables only, [A]."""
        inside = set(members)
        total = np.zeros(len(assignments))
        for v in members:
            total += self.costs[1 + v * self.columns + assignments[:, v]]
        for scope, first in zip(self.scopes, self.run.first_cell.tolist(), strict=True):
            if inside >= set(scope):
                entry = np.zeros(len(assignments), dtype=np.int64)
                for v in scope:
                    entry = entry * self.columns + assignments[:, v]
                total += self.costs[first + entry]
        return total


def random_scopes(rng: np.random.Generator, variables: int, widest: int) -> list[Scope]:
    """Some sets of two or more variables, ascending; a set may come twice."""
    scopes = []
    for _ in range(int(rng.integers(0, 2 * variables))):
        size = int(rng.integers(2, widest + 1))
        if size <= variables:
            scopes.append(tuple(sorted(rng.choice(variables, size=size, replace=False).tolist())))
    return scopes


def random_sum(seed: int, *, widest: int = 4, shut: float | None = None) -> Sum:
    rng = np.random.default_rng(seed)
    variables, columns = int(rng.integers(1, 8)), int(rng.integers(1, 4))
    share = float(rng.choice([0.0, 0.1, 0.4])) if shut is None else shut
    return Sum.drawn(rng, variables, columns, random_scopes(rng, variables, widest), share)


def conditional(tables: Sum) -> FloatArray:
    """The least sum with each option fixed, by trying all, [V, P]."""
    assignments = tables.assignments()
    values = tables.values(assignments)
    result = np.full((tables.variables, tables.columns), np.inf)
    for v in range(tables.variables):
        for option in range(tables.columns):
            result[v, option] = values[assignments[:, v] == option].min()
    return result


@pytest.mark.parametrize("seed", range(60))
def test_the_minimum_is_that_of_all_assignments(seed: int) -> None:
    tables = random_sum(seed)
    assert tables.run.exact
    least = tables.values(tables.assignments()).min()
    value, options = tables.run.minimise(tables.costs)
    assert value == pytest.approx(least, rel=1e-12, abs=1e-12)
    assert len(options) == tables.variables
    if np.isfinite(least):
        assert tables.values(options[None])[0] == pytest.approx(least, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("seed", range(60))
def test_conditional_minima_are_those_of_all_assignments(seed: int) -> None:
    tables = random_sum(seed)
    found = tables.run.conditional_minima(tables.costs)
    np.testing.assert_allclose(found, conditional(tables), rtol=1e-11, atol=1e-11)


def parts(tables: Sum) -> IntArray:
    """The connected component of every variable, [V]."""
    component = np.arange(tables.variables)
    for scope in tables.scopes:
        for v in scope[1:]:
            component[component == component[v]] = component[scope[0]]
    return np.unique(component, return_inverse=True)[1].astype(np.int64)


@pytest.mark.parametrize("seed", range(60))
def test_near_minima_lists_exactly_the_assignments_within_the_slack(seed: int) -> None:
    tables = random_sum(seed, shut=(0.0, 0.15)[seed % 2])
    tables.open_one(np.random.default_rng(seed))
    assignments = tables.assignments()
    component = parts(tables)
    slack = float(np.random.default_rng(seed).uniform(0.0, 3.0))
    listed = tables.run.near_minima(tables.costs, component, slack, limit=10**6)
    assert listed is not None
    assert len(listed) == component.max() + 1
    for number, (members, options) in enumerate(listed):
        assert sorted(members) == np.flatnonzero(component == number).tolist()
        values = tables.component_values(members, assignments)
        near = assignments[values < values.min() + slack - 1e-12][:, members]
        assert len(np.unique(options, axis=0)) == len(options)
        assert set(map(tuple, options.tolist())) == set(map(tuple, near.tolist()))


def test_near_minima_gives_up_beyond_its_limit() -> None:
    rng = np.random.default_rng(0)
    tables = Sum.drawn(rng, 6, 3, [(v, v + 1) for v in range(5)], 0.0)
    component = np.zeros(6, dtype=np.int64)
    assert tables.run.near_minima(tables.costs, component, 1e9, limit=3**6 - 1) is None
    listed = tables.run.near_minima(tables.costs, component, 1e9, limit=3**6)
    assert listed is not None
    assert len(listed[0][1]) == 3**6


def test_variables_without_a_part_in_it_are_left_alone() -> None:
    active: BoolArray = np.array([True, False, True])
    run = Elimination(3, 2, active, [(0, 2)])
    costs = np.zeros(run.cells)
    costs[int(run.first_cell[0]) :] = [3.0, 1.0, 2.0, 4.0]
    costs[3:5] = -100.0  # of the variable that takes no part
    value, options = run.minimise(costs)
    assert value == 1.0
    assert options.tolist() == [0, 0, 1]


def test_a_sum_without_tables_takes_each_variable_at_its_best() -> None:
    run = Elimination(2, 3, np.ones(2, dtype=np.bool_), [])
    costs = np.array([0.0, 5.0, 4.0, 6.0, -1.0, np.inf, 2.0])
    value, options = run.minimise(costs)
    assert value == 3.0
    assert options.tolist() == [1, 0]


def test_nothing_allowed_has_an_infinite_minimum() -> None:
    run = Elimination(2, 2, np.ones(2, dtype=np.bool_), [(0, 1)])
    costs = np.zeros(run.cells)
    costs[int(run.first_cell[0]) :] = np.inf
    assert run.minimise(costs)[0] == np.inf
    assert (run.conditional_minima(costs) == np.inf).all()


@pytest.mark.parametrize("seed", range(60))
def test_split_variables_give_lower_bounds(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(seed)
    variables, columns = int(rng.integers(4, 7)), int(rng.integers(2, 4))
    widest = int(rng.integers(2, 4))
    monkeypatch.setattr(elimination, "LARGEST_TABLE", columns**widest)
    # All pairs, and some larger tables that just fit: every variable has too many neighbours.
    scopes: list[Scope] = list(itertools.combinations(range(variables), 2))
    scopes += [s for s in random_scopes(rng, variables, widest) if len(s) == widest]
    tables = Sum.drawn(rng, variables, columns, scopes, 0.1 * (seed % 2))
    assert tables.run.exact is (variables <= widest)
    copies = tables.run.copy_of
    assert copies[:variables] == list(range(variables))
    values = tables.values(tables.assignments())
    value, options = tables.run.minimise(tables.costs)
    assert len(options) == len(copies)
    assert value <= values.min() + 1e-11
    minima = tables.run.conditional_minima(tables.costs)
    assert (minima <= conditional(tables) + 1e-11).all()
    # A plan that all copies agree on is a true one.
    if all(options[copy] == options[origin] for copy, origin in enumerate(copies)):
        assert tables.values(options[None, :variables])[0] == pytest.approx(value, abs=1e-11)
    if np.isfinite(value):  # no option can do better than the whole
        assert (minima >= value - 1e-11).all()


def test_larger_tables_never_loosen_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    # Once a table fits all variables, the bound is the minimum.
    rng = np.random.default_rng(5)
    scopes = list(itertools.combinations(range(6), 2))
    sizes = [2**power for power in range(2, 7)]
    run = Elimination(6, 2, np.ones(6, dtype=np.bool_), scopes)
    costs = rng.normal(size=run.cells)
    costs[0] = 0.0
    exact = run.minimise(costs)[0]
    for size in sizes:
        monkeypatch.setattr(elimination, "LARGEST_TABLE", size)
        bounded = Elimination(6, 2, np.ones(6, dtype=np.bool_), scopes)
        assert bounded.minimise(costs)[0] <= exact + 1e-12
    assert bounded.exact
    assert bounded.minimise(costs)[0] == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("variables", [1, 2, 3, 50, 257])
def test_long_chains_are_exact(variables: int) -> None:
    # The minimum of a chain, by the forward recurrence.
    rng = np.random.default_rng(variables)
    columns = 3
    scopes = [(v, v + 1) for v in range(variables - 1)]
    tables = Sum.drawn(rng, variables, columns, scopes, 0.05)
    unary = tables.costs[1 : 1 + variables * columns].reshape(variables, columns)
    best = unary[0]
    for v, first in enumerate(tables.run.first_cell.tolist()):
        step = tables.costs[first : first + columns**2].reshape(columns, columns)
        best = (best[:, None] + step).min(axis=0) + unary[v + 1]
    value, options = tables.run.minimise(tables.costs)
    assert value == pytest.approx(best.min(), rel=1e-12, abs=1e-12)
    assert tables.values(options[None])[0] == pytest.approx(best.min(), rel=1e-12, abs=1e-12)
