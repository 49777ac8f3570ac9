"""`KnapsackSearch` against every choice of small multiple-choice knapsacks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from qsync_opt.optimize.arrays import IntArray
from qsync_opt.optimize.knapsack import Knapsack, KnapsackSearch, KnapsackSolution

SEEDS = 40


def drawn(seed: int) -> Knapsack:
    """One to five classes of one to four items; one to three rows; uses of both signs."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 5, size=int(rng.integers(1, 6)))
    start = np.concatenate([[0], np.cumsum(counts)])
    rows = int(rng.integers(1, 4))
    use = rng.normal(size=(start[-1], rows)) * 10.0 ** rng.integers(-3, 9, size=rows)
    cost = rng.uniform(0, 10, size=start[-1])
    if seed % 5 == 0:  # ties in cost, and whole amounts
        cost, use = np.rint(cost), np.rint(rng.normal(size=use.shape) * 2)
    knapsack = Knapsack(start=start, cost=cost, use=use, capacity=np.zeros(rows))
    # Capacities that a random choice meets exactly.
    picks = choices(knapsack)[int(rng.integers(len(choices(knapsack))))]
    return Knapsack(start=start, cost=cost, use=use, capacity=use[picks].sum(axis=0))


def choices(knapsack: Knapsack) -> IntArray:
    """One item per class, every way, [A, C]."""
    start = knapsack.start.tolist()
    rows = [range(a, b) for a, b in itertools.pairwise(start)]
    return np.array(list(itertools.product(*rows)), dtype=np.int64)


def feasible(knapsack: Knapsack, picks: IntArray) -> IntArray:
    used = knapsack.use[picks].sum(axis=1)
    kept: IntArray = picks[(used <= knapsack.capacity).all(axis=1)]
    return kept


def least(knapsack: Knapsack, accept: Callable[[IntArray], bool] = lambda _: True) -> float:
    """The least cost of a choice within the capacities."""
    kept = [picks for picks in feasible(knapsack, choices(knapsack)) if accept(picks)]
    return min((float(knapsack.cost[picks].sum()) for picks in kept), default=math.inf)


def searched(
    knapsack: Knapsack,
    *,
    prices: float = 0.0,
    target: float = math.inf,
    gap: float = 0.0,
    width: int = 10**6,
    merged_widths: Sequence[int] = (),
    stop: Callable[[], bool] = lambda: False,
    accept: Callable[[IntArray], bool] = lambda _: True,
) -> KnapsackSolution:
    scale = np.abs(knapsack.use).max(axis=0)
    return KnapsackSearch(
        knapsack,
        prices=prices / np.where(scale > 0, scale, 1.0),
        target=target,
        gap=gap,
        width=width,
        merged_widths=merged_widths,
        stop=stop,
        accept=accept,
    ).solve()


def check(knapsack: Knapsack, found: KnapsackSolution, optimum: float) -> None:
    assert found.bound <= optimum + 1e-9
    if found.items is None:
        assert found.cost == math.inf
    else:
        classes = np.repeat(np.arange(len(knapsack.start) - 1), np.diff(knapsack.start))
        np.testing.assert_array_equal(classes[found.items], np.arange(len(knapsack.start) - 1))
        assert len(feasible(knapsack, found.items[None])) == 1
        assert found.cost == pytest.approx(float(knapsack.cost[found.items].sum()))


@pytest.mark.parametrize("prices", [0.0, 1.0, 1e6])
@pytest.mark.parametrize("seed", range(SEEDS))
def test_the_search_finds_the_best_choice(seed: int, prices: float) -> None:
    knapsack = drawn(seed)
    optimum = least(knapsack)
    found = searched(knapsack, prices=prices)
    assert found.complete
    check(knapsack, found, optimum)
    assert found.cost == pytest.approx(optimum, rel=1e-12)
    assert found.bound == pytest.approx(optimum, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("seed", range(0, SEEDS, 3))
def test_without_a_solution_the_bound_is_infinite(seed: int) -> None:
    whole = drawn(seed)
    lowest = np.minimum.reduceat(whole.use, whole.start[:-1]).sum(axis=0)
    size = np.abs(whole.use).max(axis=0)
    knapsack = Knapsack(
        start=whole.start, cost=whole.cost, use=whole.use, capacity=lowest - 1e-3 * size - 1e-9
    )
    found = searched(knapsack)
    assert found.complete
    assert found.items is None
    assert found.bound == math.inf


@pytest.mark.parametrize("seed", range(SEEDS))
def test_only_choices_below_the_target_are_wanted(seed: int) -> None:
    knapsack = drawn(seed)
    optimum = least(knapsack)
    above = searched(knapsack, target=optimum * 1.01 + 0.01)
    assert above.complete
    assert above.cost == pytest.approx(optimum, rel=1e-12)
    at = searched(knapsack, target=optimum * (1 - 1e-9) - 1e-9)
    assert at.complete
    assert at.items is None
    check(knapsack, at, optimum)
    assert at.bound >= optimum * (1 - 1e-9) - 2e-9  # nothing below the target


@pytest.mark.parametrize("gap", [0.1, 2.0])
@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_gap_bounds_what_is_missed(seed: int, gap: float) -> None:
    knapsack = drawn(seed)
    optimum = least(knapsack)
    found = searched(knapsack, gap=gap)
    assert found.complete
    check(knapsack, found, optimum)
    assert found.cost <= optimum + gap + 1e-9
    assert found.bound >= found.cost - gap - 1e-9


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_refused_choice_is_passed_over(seed: int) -> None:
    knapsack = drawn(seed)

    def accept(items: IntArray) -> bool:
        return int(items.sum()) % 2 == seed % 2

    optimum = least(knapsack, accept)
    found = searched(knapsack, accept=accept)
    assert found.complete
    assert found.items is None or accept(found.items)
    assert found.cost == pytest.approx(optimum, rel=1e-12)
    assert found.bound <= least(knapsack) + 1e-9 or found.bound <= optimum + 1e-9


@pytest.mark.parametrize("merged_widths", [(), (1,), (2, 4), (3, 50)], ids=str)
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_narrow_search_keeps_a_true_bound(
    seed: int, width: int, merged_widths: Sequence[int]
) -> None:
    knapsack = drawn(seed)
    optimum = least(knapsack)
    found = searched(knapsack, width=width, merged_widths=merged_widths)
    check(knapsack, found, optimum)
    if found.complete:
        assert found.cost == pytest.approx(optimum, rel=1e-12)


@pytest.mark.parametrize("seed", range(0, SEEDS, 3))
def test_a_narrow_search_holds_back_what_it_is_not_asked_for(seed: int) -> None:
    knapsack = drawn(seed)
    optimum = least(knapsack)
    found = searched(knapsack, target=optimum * (1 - 1e-9) - 1e-9, width=1, merged_widths=(2,))
    assert (found.items, found.cost) == (None, math.inf)


def test_narrow_searches_end_in_both_ways() -> None:
    ends = {searched(drawn(seed), width=1).complete for seed in range(SEEDS)}
    merged = {searched(drawn(seed), width=1, merged_widths=(2,)).complete for seed in range(SEEDS)}
    assert ends == merged == {True, False}


def test_a_search_told_to_stop_does_no_work() -> None:
    found = searched(drawn(1), stop=lambda: True)
    assert (found.relaxations, found.labels, found.complete, found.items) == (0, 0, False, None)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_one_byte_of_100_gb_decides(seed: int) -> None:
    # Whole bytes beyond 2^36 and a bound that needs prices of 1e9 per unit of cost.
    rng = np.random.default_rng(seed)
    classes = 6
    start = np.arange(0, 2 * classes + 1, 2)
    full = 11 * 10**9 + rng.integers(0, 2_000, size=classes)
    half = full // 2 + rng.integers(-900, 900, size=classes)
    use = np.stack([full, half], axis=1).reshape(-1, 1).astype(np.float64)
    cost = np.stack([np.zeros(classes), rng.uniform(0.9, 1.1, size=classes)], axis=1).ravel()
    unlimited = Knapsack(start=start, cost=cost, use=use, capacity=np.array([1e15]))
    picks = choices(unlimited)
    peak = use[picks, 0].sum(axis=1)
    budget = float(peak[int(rng.integers(len(picks)))])
    for capacity in (budget, budget - 1):
        knapsack = Knapsack(start=start, cost=cost, use=use, capacity=np.array([capacity]))
        found = searched(knapsack)
        assert found.complete
        assert found.cost == pytest.approx(least(knapsack), rel=1e-12)
