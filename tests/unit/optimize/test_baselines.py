"""The methods without a solver: `PlanState` against `evaluate`, the rest against all plans."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from qsync_opt.errors import ParameterError, PlanError
from qsync_opt.optimize.baselines import random_columns, uniform_candidates, uniform_columns
from qsync_opt.optimize.brute_force import brute_force_columns, brute_force_fastest
from qsync_opt.optimize.choices import (
    Choice,
    better_cost,
    equal_cost,
    movable,
    picked_columns,
)
from qsync_opt.optimize.evaluate import (
    TIME_TOLERANCE,
    DeviceEvaluation,
    evaluate_columns,
    evaluate_device,
    follower_columns,
)
from qsync_opt.optimize.generate import generate_problem
from qsync_opt.optimize.greedy import greedy_columns
from qsync_opt.optimize.polish import improve_columns
from qsync_opt.optimize.problem import (
    AllocationProblem,
    CastTensors,
    DeviceKind,
    Operator,
    SavedTensors,
)
from qsync_opt.optimize.state import PlanState, Undo
from qsync_opt.optimize.ticks import exact_exponent, fine_exponent, from_ticks, to_ticks
from qsync_opt.precision import Precision
from tests.tiny_problems import UNLIMITED, random_column, tiny_problem

FP32, TF32, BF16, INT8 = Precision.FP32, Precision.TF32, Precision.BF16, Precision.INT8
SEEDS = 120
#: Rounding of sums of a few floats, far below any difference that matters.
ROUNDING = 1 + 1e-11


class Oracle:
    """`evaluate` for one kind alone, with its own memory or without a limit."""

    def __init__(
        self, problem: AllocationProblem, device: DeviceKind, *, unlimited: bool = False
    ) -> None:
        memory = UNLIMITED if unlimited else device.memory_bytes
        alone = replace(device, batch_share=1 / device.workers, memory_bytes=memory)
        self._alone = replace(problem, devices=(alone,), deadline_s=None)

    def feasible(self, column: np.ndarray, deadline_s: float = math.inf) -> bool:
        limit = deadline_s if math.isfinite(deadline_s) else None
        return evaluate_columns(self._alone, [column], limit).feasible


def every_plan(problem: AllocationProblem, device: DeviceKind) -> list[np.ndarray]:
    """All plans that keep to the rules, by listing every combination of available precisions."""
    oracle = Oracle(problem, device, unlimited=True)
    rows = [np.flatnonzero(row).tolist() for row in device.available]
    for row, operator in enumerate(problem.operators):
        if operator.follows:
            rows[row] = [0]  # whatever: derived below
    plans = (
        follower_columns(problem, np.array(picks, dtype=np.int64))
        for picks in itertools.product(*rows)
    )
    return [column for column in plans if oracle.feasible(column)]


# -- one kind, no casts, by hand ----------------------------------------------------------------


def one_kind(
    time_s: list[list[float]],
    perturbation: list[list[float]],
    *,
    precisions: tuple[Precision, ...] = (FP32, BF16, INT8),
    available: list[list[bool]] | None = None,
    pins: dict[str, Precision] | None = None,
    saved_bytes: list[list[int]] | None = None,
    memory: int = UNLIMITED,
    groups: tuple[tuple[str, ...], ...] = (),
) -> AllocationProblem:
    """All of the time in the forward pass; each operator saves its own tensor, if any."""
    count, columns = len(time_s), len(precisions)
    zero = np.zeros((0, columns, columns))
    dtypes = tuple(dict.fromkeys(p.storage for p in precisions))
    kind = DeviceKind(
        name="only",
        workers=1,
        batch_share=1.0,
        memory_bytes=memory,
        fixed_bytes=0,
        optimizer_s=0.0,
        available=np.ones((count, columns), dtype=bool) if available is None else available,  # type: ignore[arg-type]
        forward_s=np.array(time_s),
        backward_s=np.zeros((count, columns)),
        perturbation=np.array(perturbation),
        tensors=CastTensors.from_rows(producer=[], consumers=[], forward_s=zero, backward_s=zero),
        saved=SavedTensors.from_rows(
            savers=[[o] for o in range(count)] if saved_bytes else [],
            size_bytes=saved_bytes or [],
            dtypes=dtypes,
        ),
        pins=pins or {},
    )
    return AllocationProblem(
        name="hand",
        provenance="by hand",
        precisions=precisions,
        storage=tuple(p.storage for p in precisions),
        output=tuple(p.output if p.output in precisions else FP32 for p in precisions),
        operators=tuple(Operator(name=f"op{o}", kind="any") for o in range(count)),
        buckets=(),
        devices=(kind,),
        groups=groups,
    )


def solved(
    function: Callable[..., np.ndarray | None], problem: AllocationProblem, *arguments: object
) -> list[int] | None:
    column = function(problem, problem.devices[0], *arguments)
    return None if column is None else column.tolist()


# -- choices ------------------------------------------------------------------------------------


def test_the_choices_are_groups_and_single_operators_that_do_not_follow() -> None:
    problem = one_kind(
        [[1.0] * 3] * 5,
        [[0.0] * 3] * 5,
        available=[[True, True, True]] * 4 + [[True, True, False]],
        pins={"op3": BF16},
        groups=(("op4", "op0"),),
    )
    operators = list(problem.operators)
    operators[2] = replace(operators[2], follows=(1,))
    problem = replace(problem, operators=tuple(operators))
    assert movable(problem, problem.devices[0]) == (
        Choice(operators=(0, 4), columns=(0, 1)),
        Choice(operators=(1,), columns=(0, 1, 2)),
        Choice(operators=(3,), columns=(1,)),
    )


def test_the_choices_fix_every_plan() -> None:
    for seed in range(SEEDS):
        problem = tiny_problem(seed, kinds=1)
        device = problem.devices[0]
        choices = movable(problem, device)
        made = {
            tuple(picked_columns(problem, choices, picks).tolist())
            for picks in itertools.product(*(choice.columns for choice in choices))
        }
        assert made >= {tuple(column.tolist()) for column in every_plan(problem, device)}


def test_costs_are_compared_with_room_for_rounding() -> None:
    assert equal_cost(0.1 + 0.2, 0.3)
    assert not equal_cost(0.3, 0.3 * (1 + 1e-11))
    assert better_cost((0.1 + 0.2, 1.0), (0.3, 2.0))
    assert not better_cost((0.3, 2.0), (0.1 + 0.2, 1.0))
    assert not better_cost((0.3, 1.0), (0.1 + 0.2, 1.0))
    assert better_cost((0.2, 9.0), (0.3, 1.0))


# -- PlanState ----------------------------------------------------------------------------------


def assert_agrees(
    state: PlanState, problem: AllocationProblem, device: DeviceKind, oracle: Oracle
) -> None:
    column = state.columns()
    part = evaluate_device(problem, device, column)
    assert state.peak_memory_bytes == part.peak_memory_bytes
    assert math.isclose(state.iteration_time_s, part.iteration_time_s, rel_tol=1e-12)
    assert math.isclose(state.perturbation, part.perturbation, rel_tol=1e-12)
    assert state.fits_memory() == (part.peak_memory_bytes <= device.memory_bytes)
    for deadline_s in (problem.deadline_s or 1.0, math.inf):
        expected = oracle.feasible(column, deadline_s)
        assert state.feasible(deadline_s) == expected
        assert (state.excess(deadline_s) == 0) == expected
    np.testing.assert_array_equal(column, follower_columns(problem, column))


def test_a_state_agrees_with_evaluate_through_moves_and_undos() -> None:
    for seed in range(SEEDS):
        problem = tiny_problem(seed, kinds=1)
        device = problem.devices[0]
        rng = random.Random(seed)
        choices = movable(problem, device)
        oracle = Oracle(problem, device)
        column = random_column(problem, device, np.random.default_rng(seed))
        state = PlanState(problem, device, column)
        undos: list[Undo] = []
        for step in range(24):
            if undos and rng.random() < 0.4:
                state.undo(undos.pop())
            else:
                choice = rng.choice(choices)
                undos.append(state.move(choice.operators, rng.choice(choice.columns)))
            if step % 4 == 0:
                assert_agrees(state, problem, device, oracle)
        assert_agrees(state, problem, device, oracle)


def test_thousands_of_moves_leave_no_drift() -> None:
    problem = generate_problem(operators=150, precisions=4, devices=1, seed=3, tightness=0.5)
    device = problem.devices[0]
    rng = random.Random(0)
    choices = movable(problem, device)
    start = follower_columns(problem, np.zeros(150, dtype=np.int64))
    state = PlanState(problem, device, start)
    oracle = Oracle(problem, device)
    costs = (state.time_ticks, state.perturbation_ticks, state.peak_memory_bytes)
    undos: list[Undo] = []
    for step in range(6_000):
        choice = rng.choice(choices)
        undos.append(state.move(choice.operators, rng.choice(choice.columns)))
        if rng.random() < 0.45:
            state.undo(undos.pop())
        if step % 500 == 0:
            assert_agrees(state, problem, device, oracle)
    assert_agrees(state, problem, device, oracle)
    fresh = PlanState(problem, device, state.columns())
    assert fresh.time_ticks == state.time_ticks
    assert fresh.perturbation_ticks == state.perturbation_ticks
    while undos:
        state.undo(undos.pop())
    assert (state.time_ticks, state.perturbation_ticks, state.peak_memory_bytes) == costs
    np.testing.assert_array_equal(state.columns(), start)


def test_magnitudes_far_apart_are_summed_exactly() -> None:
    small, large = 1e-30, 1e30
    problem = one_kind(
        [[1e-9, 1e9, 1.0], [1e-9, 1.0, 1e-9]],
        [[small, large, 1.0], [3 * small, 1.0, large]],
    )
    state = PlanState(problem, problem.devices[0], np.zeros(2, dtype=np.int64))
    assert state.perturbation == small + 3 * small
    moved = state.move([0], 1)
    assert state.perturbation == large
    assert state.iteration_time_s == pytest.approx(1e9, rel=1e-15)
    state.undo(moved)
    assert state.perturbation == small + 3 * small
    assert state.iteration_time_s == pytest.approx(2e-9, rel=1e-15)


def test_ticks_hold_what_they_are_made_for() -> None:
    table = np.array([[0.0, 5e-324, 1e-30], [0.1, 3.0, 1e300]])
    exponent = exact_exponent(table)
    ticks = to_ticks(table, exponent)
    back = [[from_ticks(entry, exponent) for entry in row] for row in ticks]
    assert back == table.tolist()
    for value in (1e-9, 0.75, 1.0, 123456.0):
        assert 2**59 <= to_ticks(np.array([value]), fine_exponent(value, 60))[0] <= 2**60


def test_a_deadline_must_be_positive() -> None:
    problem = one_kind([[1.0] * 3], [[0.0] * 3])
    for deadline_s in (0.0, -1.0, math.nan):
        with pytest.raises(ParameterError, match="deadline_s: must be a number > 0"):
            PlanState(problem, problem.devices[0], np.zeros(1, dtype=np.int64)).feasible(deadline_s)
        with pytest.raises(ParameterError, match="deadline_s: must be a number > 0"):
            brute_force_columns(problem, problem.devices[0], deadline_s)


def test_a_precision_that_is_not_there_is_refused() -> None:
    problem = one_kind(
        [[1.0] * 3] * 2, [[0.0] * 3] * 2, available=[[True] * 3, [True, False, True]]
    )
    with pytest.raises(PlanError, match=r"devices.only.op1: must be a precision .* got 'bf16'"):
        PlanState(problem, problem.devices[0], np.array([1, 1]))


# -- brute force --------------------------------------------------------------------------------


def test_brute_force_is_the_best_of_all_plans() -> None:
    found = 0
    for seed in range(SEEDS):
        problem = tiny_problem(seed, kinds=1, whole=seed % 2 == 0)
        device, deadline_s = problem.devices[0], problem.deadline_s
        assert deadline_s is not None
        plans = [
            (part.perturbation, part.iteration_time_s, tuple(column.tolist()))
            for column in every_plan(problem, device)
            for part in [evaluate_device(problem, device, column)]
            if part.peak_memory_bytes <= device.memory_bytes
        ]
        in_time = [plan for plan in plans if plan[1] <= deadline_s * (1 + TIME_TOLERANCE)]
        best = brute_force_columns(problem, device, deadline_s)
        fastest = brute_force_fastest(problem, device)
        assert (best is None, fastest is None) == (not in_time, not plans)
        if fastest is not None:
            least = min(plan[1] for plan in plans)
            part = evaluate_device(problem, device, fastest)
            assert part.iteration_time_s == pytest.approx(least, rel=1e-12)
        if best is not None:
            found += 1
            part = evaluate_device(problem, device, best)
            if seed % 2 == 0:  # exact sums: the whole order can be compared
                assert (*_cost(part), tuple(best.tolist())) == min(in_time)
            else:
                assert part.perturbation == pytest.approx(min(in_time)[0], rel=1e-12)
    assert found > SEEDS // 3


def _cost(part: DeviceEvaluation) -> tuple[float, float]:
    return part.perturbation, part.iteration_time_s


def test_brute_force_breaks_ties_by_time_and_then_by_column() -> None:
    perturbation = [[0.3, 0.1, 0.1], [0.0, 0.2, 0.2]]
    problem = one_kind([[1.0, 3.0, 2.0], [5.0, 1.0, 1.0]], perturbation)
    assert solved(brute_force_columns, problem, math.inf) == [2, 0]
    assert solved(brute_force_columns, problem, 4.0) == [2, 1]  # op1: equal in both, lower column
    # 0.1 + 0.2 and 0.3 differ in the last bit only: the faster of the two wins.
    assert solved(brute_force_columns, problem, 5.0) == [2, 1]


def test_brute_force_refuses_what_it_cannot_list() -> None:
    problem = one_kind([[1.0] * 3] * 4, [[0.0] * 3] * 4)
    assert brute_force_columns(problem, problem.devices[0], 1e9, limit=81) is not None
    with pytest.raises(ParameterError, match=r"limit: must be at least .* on only \(81\), got 80"):
        brute_force_columns(problem, problem.devices[0], 1e9, limit=80)
    with pytest.raises(ParameterError, match="limit"):
        brute_force_fastest(problem, problem.devices[0], limit=80)


def test_brute_force_in_pieces_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = [tiny_problem(seed, kinds=1) for seed in range(30)]

    def all_best() -> list[list[int] | None]:
        return [solved(brute_force_columns, problem, problem.deadline_s) for problem in problems]

    whole = all_best()
    monkeypatch.setattr("qsync_opt.optimize.brute_force._CHUNK_ENTRIES", 20)
    assert all_best() == whole


# -- every method against all plans ---------------------------------------------------------------


def test_no_method_beats_brute_force_and_each_keeps_its_promise() -> None:
    reached = {"greedy": 0, "improve": 0, "random": 0, "uniform": 0}
    solvable = 0
    for seed in range(SEEDS):
        problem = tiny_problem(seed, kinds=1)
        device, deadline_s = problem.devices[0], problem.deadline_s
        assert deadline_s is not None
        best = brute_force_columns(problem, device, deadline_s)
        fastest = brute_force_fastest(problem, device)
        oracle = Oracle(problem, device)
        anything = follower_columns(problem, device.available.argmax(axis=1))
        start = anything if fastest is None else fastest
        found = {
            "uniform": uniform_columns(problem, device, deadline_s),
            "greedy": greedy_columns(problem, device, deadline_s, start),
            "random": random_columns(problem, device, deadline_s, seed),
            "improve": None,
        }
        if found["greedy"] is not None:
            found["improve"] = improve_columns(problem, device, deadline_s, found["greedy"])
        if best is None:
            assert all(column is None for column in found.values())
            continue
        solvable += 1
        least = evaluate_device(problem, device, best)
        costs = {}
        for name, column in found.items():
            if column is not None:
                assert oracle.feasible(column, deadline_s), name
                costs[name] = evaluate_device(problem, device, column)
                assert costs[name].perturbation * ROUNDING >= least.perturbation, name
                reached[name] += equal_cost(costs[name].perturbation, least.perturbation)
        # The fastest plan is feasible here, so greedy has somewhere to start from.
        assert "greedy" in costs
        first = evaluate_device(problem, device, start)
        assert costs["greedy"].perturbation <= first.perturbation * ROUNDING
        assert not better_cost(_cost(costs["greedy"]), _cost(costs["improve"]))
    assert solvable > SEEDS // 3
    assert reached["improve"] >= reached["greedy"] > reached["uniform"]


# -- uniform --------------------------------------------------------------------------------------


def test_uniform_falls_back_to_the_nearest_wider_precision() -> None:
    yes, no = True, False
    problem = one_kind(
        [[4.0, 3.0, 2.0, 1.0]] * 5,
        [[0.0, 1.0, 2.0, 3.0]] * 5,
        precisions=(FP32, TF32, BF16, INT8),
        available=[
            [yes, yes, yes, yes],
            [yes, no, no, no],
            [yes, yes, no, yes],
            [no, no, yes, yes],
            [yes, yes, yes, yes],
        ],
        pins={"op4": INT8},
    )
    candidates = uniform_candidates(problem, problem.devices[0], math.inf)
    assert [c.precision for c in candidates] == [FP32, TF32, BF16, INT8]
    assert [c.column.tolist() for c in candidates] == [
        [0, 0, 0, 2, 3],  # op3 has nothing wider than bf16; op4 is pinned
        [1, 0, 1, 2, 3],
        [2, 0, 1, 2, 3],
        [3, 0, 3, 3, 3],
    ]
    for candidate in candidates:
        part = evaluate_device(problem, problem.devices[0], candidate.column)
        assert candidate.evaluation == part


def test_uniform_takes_the_least_perturbing_that_fits() -> None:
    problem = one_kind([[4.0, 2.0, 1.0]] * 2, [[0.0, 1.0, 4.0]] * 2)
    assert solved(uniform_columns, problem, 8.0) == [0, 0]
    assert solved(uniform_columns, problem, 7.9) == [1, 1]
    assert solved(uniform_columns, problem, 3.9) == [2, 2]
    assert solved(uniform_columns, problem, 1.9) is None
    memory = one_kind(
        [[1.0] * 3] * 2, [[0.0, 1.0, 4.0]] * 2, saved_bytes=[[40, 20, 10]] * 2, memory=79
    )
    assert solved(uniform_columns, memory, 8.0) == [1, 1]


def test_uniform_breaks_ties_by_time_and_then_by_column() -> None:
    problem = one_kind([[4.0, 2.0, 2.0]] * 2, [[1.0, 1.0, 1.0]] * 2)
    assert solved(uniform_columns, problem, math.inf) == [1, 1]


def test_uniform_does_not_depend_on_the_order_of_the_columns() -> None:
    narrow_first = one_kind(
        [[1.0, 2.0, 4.0]] * 2,
        [[4.0, 1.0, 0.0]] * 2,
        precisions=(INT8, BF16, FP32),
        available=[[False, True, True], [True, True, True]],
    )
    candidates = uniform_candidates(narrow_first, narrow_first.devices[0], math.inf)
    assert [c.column.tolist() for c in candidates] == [[1, 0], [1, 1], [2, 2]]


# -- greedy ---------------------------------------------------------------------------------------


def test_greedy_raises_where_most_is_gained() -> None:
    # Room for one raise by a second; the third operator gains most from it.
    problem = one_kind([[2.0, 1.0, 1.0]] * 3, [[0.0, 5.0, 5.0], [0.0, 4.0, 4.0], [0.0, 6.0, 6.0]])
    start = np.array([2, 2, 2])
    assert solved(greedy_columns, problem, 4.0, start) == [2, 2, 0]
    assert solved(greedy_columns, problem, 5.0, start) == [0, 2, 0]


def test_greedy_measures_the_gain_from_where_an_operator_is() -> None:
    # Variances 10, 1, 0 by precision: the second raise gains 1, not 9 again, so the other
    # operator's gain of 5 comes between.
    problem = one_kind([[3.0, 2.0, 1.0]] * 2, [[0.0, 1.0, 10.0], [0.0, 4.0, 9.0]])
    start = np.array([2, 2])
    assert solved(greedy_columns, problem, 3.0, start) == [1, 2]
    assert solved(greedy_columns, problem, 4.0, start) == [1, 1]
    assert solved(greedy_columns, problem, 5.0, start) == [1, 0]


def test_greedy_still_tries_the_option_after_a_refused_one() -> None:
    problem = one_kind([[3.0, 10.0, 1.0]], [[0.0, 5.0, 9.0]])  # bf16 is slow here
    assert solved(greedy_columns, problem, 3.0, np.array([2])) == [0]


def test_greedy_takes_equal_gains_in_order() -> None:
    problem = one_kind([[2.0, 1.0, 1.0]] * 4, [[0.0, 5.0, 5.0]] * 4)
    assert solved(greedy_columns, problem, 6.0, np.array([2] * 4)) == [0, 0, 2, 2]


def test_greedy_keeps_to_the_memory_by_the_byte() -> None:
    for memory, expected in ((5_000, [0, 2]), (4_999, [1, 2])):
        problem = one_kind(
            [[1.0] * 3] * 2,
            [[0.0, 1.0, 9.0], [0.0, 0.5, 1.0]],
            saved_bytes=[[4_000, 2_000, 1_000]] * 2,
            memory=memory,
        )
        column = solved(greedy_columns, problem, math.inf, np.array([2, 2]))
        assert column is not None
        assert column[0] == expected[0]


def test_greedy_needs_a_feasible_start() -> None:
    problem = one_kind([[2.0, 1.0, 1.0]], [[0.0, 5.0, 5.0]])
    assert solved(greedy_columns, problem, 1.5, np.array([0])) is None
    assert solved(improve_columns, problem, 1.5, np.array([0])) is None


def test_a_stopped_search_returns_what_it_has() -> None:
    problem = generate_problem(operators=400, precisions=3, devices=1, seed=5)
    device, deadline_s = problem.devices[0], problem.deadline_s
    assert deadline_s is not None
    total = np.where(device.available, device.forward_s + device.backward_s, np.inf)
    start = follower_columns(problem, total.argmin(axis=1))
    asked = []

    def stop() -> bool:
        asked.append(1)
        return True

    for method in (greedy_columns, improve_columns):
        asked.clear()
        column = method(problem, device, deadline_s, start, stop)
        assert column is not None
        assert asked
        assert Oracle(problem, device).feasible(column, deadline_s)
        full = method(problem, device, deadline_s, start)
        assert full is not None
        before, stopped, done = (
            evaluate_device(problem, device, c).perturbation for c in (start, column, full)
        )
        assert before >= stopped > done


# -- improve --------------------------------------------------------------------------------------


def test_improve_leaves_no_single_change_that_helps() -> None:
    for seed in range(SEEDS):
        problem = tiny_problem(seed, kinds=1)
        device, deadline_s = problem.devices[0], problem.deadline_s
        assert deadline_s is not None
        start = random_columns(problem, device, deadline_s, seed, tries=1)
        if start is None:
            continue
        column = improve_columns(problem, device, deadline_s, start)
        assert column is not None
        oracle = Oracle(problem, device)
        cost = _cost(evaluate_device(problem, device, column))
        first = _cost(evaluate_device(problem, device, start))
        assert not better_cost(first, cost)
        for choice in movable(problem, device):
            for pick in choice.columns:
                other = column.copy()
                other[list(choice.operators)] = pick
                other = follower_columns(problem, other)
                if oracle.feasible(other, deadline_s):
                    changed = _cost(evaluate_device(problem, device, other))
                    assert not better_cost(changed, cost)


def test_improve_breaks_ties_by_time_and_then_by_column() -> None:
    problem = one_kind([[3.0, 2.0, 2.0], [1.0, 1.0, 1.0]], [[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    assert solved(improve_columns, problem, math.inf, np.array([0, 2])) == [1, 0]
    assert solved(improve_columns, problem, math.inf, np.array([2, 1])) == [1, 0]


def test_improve_exchanges_a_raise_for_a_cheaper_one() -> None:
    # Two seconds to spend. Greedy-like plan: op0 raised (gain 5). Better: lower it, raise op1.
    problem = one_kind([[3.0, 1.0, 1.0]] * 2, [[0.0, 5.0, 5.0], [0.0, 6.0, 6.0]])
    raised = np.array([0, 1])
    assert solved(improve_columns, problem, 4.0, raised) == [1, 0]
    alone = improve_columns(problem, problem.devices[0], 4.0, raised, exchanges=0)
    assert alone is not None
    np.testing.assert_array_equal(alone, raised)


# -- random ---------------------------------------------------------------------------------------


def test_random_depends_on_the_seed_and_the_kind_alone() -> None:
    problem = generate_problem(operators=40, precisions=4, devices=3, seed=2, tightness=0.4)
    first, second, third = problem.devices
    deadline_s = problem.deadline_s
    assert deadline_s is not None
    fewer = replace(
        problem,
        devices=(replace(third, batch_share=0.5), replace(first, batch_share=0.5)),
    )
    plan = random_columns(problem, first, deadline_s, 7)
    assert plan is not None
    same = random_columns(fewer, fewer.devices[1], deadline_s, 7)
    assert same is not None
    np.testing.assert_array_equal(plan, same)
    other_seed = random_columns(problem, first, deadline_s, 8)
    other_kind = random_columns(problem, replace(first, name=second.name), deadline_s, 7)
    assert other_seed is not None
    assert other_kind is not None
    assert (plan != other_seed).any()
    assert (plan != other_kind).any()


def test_random_repairs_what_it_draws() -> None:
    for seed in range(10):
        problem = generate_problem(operators=60, precisions=4, devices=1, seed=seed)
        device, deadline_s = problem.devices[0], problem.deadline_s
        assert deadline_s is not None
        column = random_columns(problem, device, deadline_s, seed, tries=1)
        assert column is not None
        assert Oracle(problem, device).feasible(column, deadline_s)


@pytest.mark.parametrize(("seed", "tries"), [(-1, 1), (0, 0), (True, 1), (0, 1.5)])
def test_random_refuses_odd_arguments(seed: int, tries: int) -> None:
    problem = one_kind([[1.0] * 3], [[0.0] * 3])
    with pytest.raises(ParameterError, match="must be a whole number >="):
        random_columns(problem, problem.devices[0], 1.0, seed, tries)
