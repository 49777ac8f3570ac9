"""Laws of `solve`: changes to a problem that change nothing, or only for the better."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qsync_opt.files import load_plan, save_plan
from qsync_opt.optimize import elimination, factors
from qsync_opt.optimize.backends import solve_program
from qsync_opt.optimize.evaluate import (
    evaluate,
    evaluate_columns,
    evaluate_device,
    plan_columns,
    plan_from_columns,
    recurrence_s,
)
from qsync_opt.optimize.formulation import formulate
from qsync_opt.optimize.generate import generate_problem
from qsync_opt.optimize.problem import (
    NOT_GIVEN,
    AllocationProblem,
    Bucket,
    CastTensors,
    DeviceKind,
    SavedTensors,
)
from qsync_opt.optimize.result import SolveParameters, SolveResult, SolveStatus
from qsync_opt.optimize.solve import solve
from tests.tiny_problems import UNLIMITED, random_column, tiny_problem

EXACT = SolveParameters(relative_gap=0.0, time_limit_s=None, threads=1)

#: Sums of the same floats in another order or another unit differ by less than this fraction.
ROUNDING = 1e-9

seeds = st.integers(min_value=0, max_value=2**32 - 1)


def exact(problem: AllocationProblem) -> SolveResult:
    result = solve(problem, method="exact", parameters=EXACT)
    assert result.status in (SolveStatus.OPTIMAL, SolveStatus.INFEASIBLE)
    return result


def cost(result: SolveResult) -> float:
    """The objective; infinite where no plan exists."""
    return math.inf if result.objective is None else result.objective


def same(first: float, second: float) -> bool:
    return first == second or math.isclose(first, second, rel_tol=ROUNDING)


def no_worse(first: float, second: float) -> bool:
    return first <= second or same(first, second)


def each_kind(
    problem: AllocationProblem, change: Callable[[DeviceKind], DeviceKind]
) -> AllocationProblem:
    return replace(problem, devices=tuple(change(device) for device in problem.devices))


# -- budgets ------------------------------------------------------------------------------------


@settings(max_examples=20)
@given(seed=seeds, more=st.integers(min_value=0, max_value=2**40))
def test_more_memory_never_worsens_the_objective(seed: int, more: int) -> None:
    problem = tiny_problem(seed)

    def grown(device: DeviceKind) -> DeviceKind:
        return replace(device, memory_bytes=min(device.memory_bytes + more, UNLIMITED))

    assert no_worse(cost(exact(each_kind(problem, grown))), cost(exact(problem)))


@settings(max_examples=20)
@given(seed=seeds, slack=st.floats(min_value=0, max_value=2), more=st.floats(0, 2))
def test_more_slack_never_worsens_the_objective(seed: int, slack: float, more: float) -> None:
    problem = replace(tiny_problem(seed), deadline_s=None)
    tight = exact(replace(problem, slack=slack))
    loose = exact(replace(problem, slack=slack + more))
    assert no_worse(cost(loose), cost(tight))
    assert (tight.deadline_s is None) is (loose.deadline_s is None)


@settings(max_examples=20)
@given(seed=seeds, factor=st.floats(min_value=1, max_value=3))
def test_a_later_deadline_never_worsens_the_objective(seed: int, factor: float) -> None:
    problem = tiny_problem(seed)
    assert problem.deadline_s is not None
    later = replace(problem, deadline_s=problem.deadline_s * factor)
    assert no_worse(cost(exact(later)), cost(exact(problem)))


# -- units --------------------------------------------------------------------------------------


def timed(problem: AllocationProblem, factor: float) -> AllocationProblem:
    """The same problem with every time in another unit."""

    def change(device: DeviceKind) -> DeviceKind:
        tensors = device.tensors
        return replace(
            device,
            optimizer_s=device.optimizer_s * factor,
            forward_s=device.forward_s * factor,
            backward_s=device.backward_s * factor,
            tensors=CastTensors(
                producer=tensors.producer,
                consumer_start=tensors.consumer_start,
                consumers=tensors.consumers,
                forward_s=tensors.forward_s * factor,
                backward_s=tensors.backward_s * factor,
            ),
        )

    buckets = tuple(
        Bucket(all_reduce_s=bucket.all_reduce_s * factor, size_bytes=bucket.size_bytes)
        for bucket in problem.buckets
    )
    deadline = None if problem.deadline_s is None else problem.deadline_s * factor
    return replace(each_kind(problem, change), buckets=buckets, deadline_s=deadline)


def sized(problem: AllocationProblem, factor: int) -> AllocationProblem:
    """The same problem with every amount of memory in another unit."""

    def change(device: DeviceKind) -> DeviceKind:
        saved, unlimited = device.saved, device.memory_bytes == UNLIMITED
        assert device.forward_transient_bytes is not None
        assert device.backward_transient_bytes is not None
        sizes = np.where(
            saved.size_bytes == NOT_GIVEN, NOT_GIVEN, np.maximum(saved.size_bytes, 0) * factor
        )
        return replace(
            device,
            memory_bytes=UNLIMITED if unlimited else device.memory_bytes * factor,
            fixed_bytes=device.fixed_bytes * factor,
            forward_transient_bytes=device.forward_transient_bytes * factor,
            backward_transient_bytes=device.backward_transient_bytes * factor,
            saved=SavedTensors(
                saver_start=saved.saver_start,
                savers=saved.savers,
                dtypes=saved.dtypes,
                size_bytes=sizes,
            ),
        )

    return each_kind(problem, change)


def columns(problem: AllocationProblem, result: SolveResult) -> list[list[int]] | None:
    if result.plan is None:
        return None
    return [column.tolist() for column in plan_columns(problem, result.plan)]


@settings(max_examples=20)
@given(seed=seeds, power=st.integers(-40, 40), slack=st.booleans())
def test_binary_units_of_time_change_nothing(seed: int, power: int, slack: bool) -> None:
    problem = tiny_problem(seed)
    if slack:
        problem = replace(problem, deadline_s=None, slack=0.1)
    scaled = timed(problem, 2.0**power)
    first, second = exact(problem), exact(scaled)
    assert same(cost(first), cost(second))
    assert columns(problem, first) == columns(scaled, second)


@settings(max_examples=20)
@given(seed=seeds, factor=st.sampled_from([1e-9, 1e-3, 1e3, 1e6]))
def test_decimal_units_of_time_change_nothing(seed: int, factor: float) -> None:
    problem = tiny_problem(seed)
    assert same(cost(exact(problem)), cost(exact(timed(problem, factor))))


@settings(max_examples=20)
@given(seed=seeds, factor=st.sampled_from([2, 3, 1000, 1024]))
def test_units_of_memory_change_nothing(seed: int, factor: int) -> None:
    problem = tiny_problem(seed)
    scaled = sized(problem, factor)
    first, second = exact(problem), exact(scaled)
    assert same(cost(first), cost(second))
    assert columns(problem, first) == columns(scaled, second)


@settings(max_examples=20)
@given(seed=seeds, factor=st.sampled_from([2.0**-30, 1e-30, 1e-3, 1e3, 2.0**30, 1e30]))
def test_units_of_perturbation_change_only_the_unit(seed: int, factor: float) -> None:
    problem = tiny_problem(seed)
    scaled = each_kind(problem, lambda d: replace(d, perturbation=d.perturbation * factor))
    assert same(cost(exact(problem)) * factor, cost(exact(scaled)))


# -- names and order ----------------------------------------------------------------------------


@settings(max_examples=20)
@given(seed=seeds)
def test_names_of_operators_change_nothing(seed: int) -> None:
    problem = tiny_problem(seed)
    order = np.random.default_rng(seed).permutation(len(problem.operators))
    name = {
        operator.name: f"node {number}, [x] é"
        for operator, number in zip(problem.operators, order.tolist(), strict=True)
    }
    renamed = replace(
        problem,
        operators=tuple(replace(o, name=name[o.name]) for o in problem.operators),
        groups=tuple(tuple(name[member] for member in group) for group in problem.groups),
        devices=tuple(
            replace(d, pins={name[o]: precision for o, precision in d.pins.items()})
            for d in problem.devices
        ),
    )
    first, second = exact(problem), exact(renamed)
    assert cost(first) == cost(second)
    assert columns(problem, first) == columns(renamed, second)


@settings(max_examples=20)
@given(seed=seeds)
def test_the_order_of_the_kinds_changes_nothing(seed: int) -> None:
    problem = tiny_problem(seed)
    turned = replace(problem, devices=problem.devices[::-1])
    first, second = exact(problem), exact(turned)
    assert same(cost(first), cost(second))
    if first.plan is not None and second.plan is not None:
        assert first.plan.devices == second.plan.devices


@settings(max_examples=20)
@given(seed=seeds)
def test_identical_kinds_get_the_same_plan(seed: int) -> None:
    problem = tiny_problem(seed, kinds=1)
    (device,) = problem.devices
    half = device.batch_share / 3
    twin = replace(device, name="twin", batch_share=2 * half)
    pair = replace(problem, devices=(replace(device, batch_share=half), twin))
    alone, both = exact(problem), exact(pair)
    assert alone.status is both.status
    assert both.devices["twin"].same_as == device.name
    assert both.devices[device.name].same_as is None
    if both.plan is not None and alone.plan is not None:
        assert both.plan.for_device("twin") == both.plan.for_device(device.name)
        assert both.plan.for_device("twin") == alone.plan.for_device(device.name)
        # n a^2, with a third and two thirds of the batch in place of all of it
        assert same(cost(both), cost(alone) * (1 / 9 + 4 / 9))


# -- methods ------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(seed=seeds, slack=st.booleans())
def test_exact_is_no_worse_than_greedy_and_greedy_than_uniform(seed: int, slack: bool) -> None:
    problem = tiny_problem(seed)
    if slack:
        problem = replace(problem, deadline_s=None, slack=0.2)
    best = cost(exact(problem))
    greedy = cost(solve(problem, method="greedy", parameters=EXACT))
    uniform = cost(solve(problem, method="uniform", parameters=EXACT))
    random = cost(solve(problem, method="random", parameters=EXACT))
    assert no_worse(best, greedy)
    assert no_worse(greedy, uniform)
    assert no_worse(best, random)
    assert cost(solve(problem, method="auto", parameters=EXACT)) == best


@settings(max_examples=20)
@given(seed=seeds)
def test_kinds_apart_are_kinds_together_are_the_recurrence(seed: int) -> None:
    problem = tiny_problem(seed)
    apart = exact(problem)
    joint = formulate(problem, deadline_s=problem.deadline_s)
    together = solve_program(joint.program, relative_gap=0.0)
    if apart.plan is None:
        assert together.status == "infeasible"
        return
    assert together.values is not None
    plan = [column for _, column in joint.read(together.values)]
    judged = evaluate_columns(problem, plan, problem.deadline_s)
    assert judged.feasible
    assert same(judged.perturbation, cost(apart))
    # The whole job's time by the event recurrence is the largest time of any kind alone.
    for each in (plan, plan_columns(problem, apart.plan)):
        parts = [
            evaluate_device(problem, device, column)
            for device, column in zip(problem.devices, each, strict=True)
        ]
        end = recurrence_s(problem, [part.ready_s for part in parts])
        end = max(end, *(part.compute_s for part in parts))
        assert same(end, max(part.iteration_time_s for part in parts))
        assert problem.deadline_s is not None
        assert end <= problem.deadline_s * (1 + 1e-9)


@settings(max_examples=20)
@given(seed=seeds)
def test_a_hint_never_makes_it_worse(seed: int) -> None:
    problem = tiny_problem(seed)
    rng = np.random.default_rng(seed)
    drawn = [random_column(problem, device, rng) for device in problem.devices]
    hint = plan_from_columns(problem, drawn)
    without = exact(problem)
    given_ = solve(problem, method="exact", parameters=EXACT, hint=hint)
    assert given_.status is without.status
    assert same(cost(given_), cost(without))
    stopped = replace(EXACT, time_limit_s=0.0)
    hasty = solve(problem, method="auto", parameters=stopped, hint=hint)
    if evaluate(problem, hint).feasible:
        assert no_worse(cost(hasty), evaluate(problem, hint).perturbation)


@settings(max_examples=20)
@given(seed=seeds)
def test_a_plan_goes_through_a_file_unchanged(seed: int) -> None:
    problem = tiny_problem(seed)
    result = solve(problem, method="auto", parameters=EXACT)
    if result.plan is None:
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "plan.json")
        save_plan(result.plan, path)
        back = load_plan(path)
    assert back == result.plan
    assert evaluate(problem, back) == result.evaluation


@settings(max_examples=30)
@given(seed=seeds, gap=st.floats(min_value=1e-6, max_value=0.5))
def test_a_gap_holds_and_its_bound_is_true(seed: int, gap: float) -> None:
    problem = tiny_problem(seed)
    best = solve(problem, method="brute_force")
    result = solve(problem, method="exact", parameters=replace(EXACT, relative_gap=gap))
    assert result.status is best.status
    if best.objective is not None:
        assert result.bound is not None
        assert result.gap is not None
        assert result.gap <= gap
        assert no_worse(result.bound, best.objective)
        assert no_worse(cost(result) * (1 - gap), best.objective)


# -- larger problems, and tables too large to be exact ------------------------------------------


@pytest.mark.parametrize("costs", ["independent", "correlated", "inverse"])
@pytest.mark.parametrize("seed", range(3))
def test_the_bounds_and_reductions_keep_the_optimum(seed: int, costs: str) -> None:
    problem = generate_problem(
        operators=24, precisions=3, devices=1, seed=seed, tightness=0.35, costs=costs
    )
    plain = solve(problem, method="exact", parameters=replace(EXACT, plain=True))
    quick = exact(problem)
    assert plain.status is SolveStatus.OPTIMAL
    assert same(cost(plain), cost(quick))


@pytest.mark.parametrize("largest", [4, 9])
@pytest.mark.parametrize("first", range(0, 90, 30))
def test_split_tables_keep_the_optimum(
    first: int, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elimination, "LARGEST_TABLE", largest)
    monkeypatch.setattr(factors, "LARGEST_TABLE", largest)
    wrong = []
    for seed in range(first, first + 30):
        problem = tiny_problem(seed)
        want = solve(problem, method="brute_force")
        got = solve(problem, method="exact", parameters=EXACT)
        if got.status is not want.status or not same(cost(got), cost(want)):
            wrong.append(f"seed {seed}: {got.status.name} {cost(got)}, not {cost(want)}")
    assert not wrong, "\n".join(wrong)


# -- determinism --------------------------------------------------------------------------------

_PLANS = """
import json, sys
from qsync_opt.optimize.generate import generate_problem
from qsync_opt.optimize.result import SolveParameters
from qsync_opt.optimize.solve import solve
from tests.tiny_problems import tiny_problem
problems = [tiny_problem(seed) for seed in range(12)]
problems += [
    generate_problem(operators=210, precisions=4, devices=2, seed=seed, tightness=0.3)
    for seed in range(1)
]
answers = []
for problem in problems:
    for plain in (False, len(problem.operators) < 10):
        parameters = SolveParameters(time_limit_s=None, threads=int(sys.argv[1]), plain=plain)
        result = solve(problem, parameters=parameters)
        plan = result.plan and {
            kind: {name: p.value for name, p in row.items()}
            for kind, row in result.plan.devices.items()
        }
        answers.append([result.status.name, result.objective, result.bound, plan])
sys.stdout.write(json.dumps(answers))
"""


def test_the_plan_depends_on_neither_threads_nor_hash_seed_nor_process() -> None:
    root = Path(__file__).parents[2]
    answers = []
    for threads, hash_seed in (("1", "0"), ("2", "1"), ("3", "2")):
        done = subprocess.run(
            [sys.executable, "-c", _PLANS, threads],
            capture_output=True,
            text=True,
            check=False,
            cwd=root,
            env=os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(root)},
        )
        assert done.returncode == 0, done.stderr
        answers.append(json.loads(done.stdout.splitlines()[-1]))
    assert answers[0] == answers[1] == answers[2]
    assert {answer[0] for answer in answers[0]} == {"OPTIMAL", "INFEASIBLE"}
