"""Bits of buckets: what they are in a problem and a plan, and the methods that choose them."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from qsync_opt.errors import ParameterError, PlanError, SolverUnavailableError
from qsync_opt.optimize import backends
from qsync_opt.optimize.baselines import uniform_candidates
from qsync_opt.optimize.bits import BitsMethods, BitsPlan, single_bit_counts
from qsync_opt.optimize.bucket_groups import bucket_groups
from qsync_opt.optimize.evaluate import (
    evaluate,
    evaluate_columns,
    plan_columns,
    plan_from_columns,
)
from qsync_opt.optimize.explain import explain
from qsync_opt.optimize.generate import generate_problem
from qsync_opt.optimize.problem import AllocationProblem, Bucket, BucketCode
from qsync_opt.optimize.result import SolveParameters, SolveStatus
from qsync_opt.optimize.solve import solve
from qsync_opt.plan import FULL_BITS, PrecisionPlan, bits_text, sending_text
from tests.coded_problems import coded, tiny_coded_problem
from tests.tiny_problems import random_column


@pytest.fixture(scope="module")
def problem() -> AllocationProblem:
    return generate_problem(operators=12, buckets=3, seed=5, communication=(8, 16, 4))


def random_plan(problem: AllocationProblem, seed: int) -> PrecisionPlan:
    rng = np.random.default_rng(seed)
    columns = [random_column(problem, device, rng) for device in problem.devices]
    bits = [int(rng.choice([c.bits for c in bucket.choices])) for bucket in problem.buckets]
    return plan_from_columns(problem, columns, bits)


# -- data ---------------------------------------------------------------------------------------


def test_a_problem_at_bits_has_the_times_of_the_bits(problem: AllocationProblem) -> None:
    fixed = problem.at_bits((8, 32, 4))
    assert not fixed.has_codes
    assert [b.all_reduce_s for b in fixed.buckets] == [
        problem.buckets[0].choices[2].all_reduce_s,
        problem.buckets[1].all_reduce_s,
        problem.buckets[2].choices[3].all_reduce_s,
    ]
    assert problem.bits_perturbation((8, 32, 4)) == pytest.approx(
        problem.buckets[0].codes[1].perturbation + problem.buckets[2].codes[2].perturbation
    )
    assert problem.bits_perturbation(()) == 0.0
    assert problem.at_bits(()) == replace(
        problem, buckets=tuple(replace(bucket, codes=()) for bucket in problem.buckets)
    )
    plain = generate_problem(operators=5, seed=1)
    assert plain.at_bits(()) is plain


def test_the_fastest_bits_are_those_of_least_time_and_most_bits_among_equals() -> None:
    codes = (
        BucketCode(bits=16, all_reduce_s=0.5, perturbation=1.0),
        BucketCode(bits=8, all_reduce_s=0.5, perturbation=2.0),
        BucketCode(bits=4, all_reduce_s=0.7, perturbation=3.0),
    )
    base = generate_problem(operators=5, buckets=2, seed=1)
    slow = tuple(replace(code, all_reduce_s=9.0) for code in codes)
    buckets = (
        Bucket(all_reduce_s=1.0, size_bytes=1, codes=codes),
        Bucket(all_reduce_s=1.0, size_bytes=1, codes=slow),
    )
    assert replace(base, buckets=buckets).fastest_bits == (16, 32)


@pytest.mark.parametrize(
    ("bits", "field", "rule"),
    [
        ((8, 8), "communication", r"one entry per bucket \(3\)"),
        ((8, 8, 5), r"communication\[2\]", r"bits that the bucket has \(32, 16, 8, 4\)"),
    ],
)
def test_bits_that_a_problem_lacks_are_refused(
    problem: AllocationProblem, bits: tuple[int, ...], field: str, rule: str
) -> None:
    plan = replace(random_plan(problem, 1), communication=bits)
    for use in (evaluate, plan_columns):
        with pytest.raises(PlanError, match=f"{field}: .*{rule}"):
            use(problem, plan)
    with pytest.raises(PlanError, match=rule):
        problem.at_bits(bits)


def test_a_plan_with_bits_is_refused_where_buckets_have_no_codes() -> None:
    plain = generate_problem(operators=5, buckets=1, seed=1)
    plan = replace(solve(plain).require_plan(), communication=(8,))
    with pytest.raises(PlanError, match=r"bits that the bucket has \(32\)"):
        evaluate(plain, plan)


@pytest.mark.parametrize("bits", [(1,), (17,), (31,), (8.0,), (True,), ("8",)])
def test_bits_that_nothing_is_sent_in_are_refused(bits: tuple[object, ...]) -> None:
    with pytest.raises(PlanError, match=r"communication\[0\]: must be 32, or a whole number"):
        PrecisionPlan(problem="abc", devices={"weak": {}}, communication=bits)  # type: ignore[arg-type]


def test_bits_are_part_of_a_plan(problem: AllocationProblem) -> None:
    full, eight = (
        replace(random_plan(problem, 1), communication=bits) for bits in ((32, 32, 32), (8, 32, 32))
    )
    assert full.communication == ()
    assert full == replace(full, communication=())
    assert full != eight
    assert hash(full) != hash(eight)
    assert pickle.loads(pickle.dumps(eight)) == eight  # noqa: S301  # written here
    assert bits_text(eight.communication) == "8 bits x 1, 32 bits x 2"
    assert bits_text(()) == bits_text((32, 32)) == "32 bits"
    assert sending_text(eight.communication).endswith("8 bits x 1, 32 bits x 2 (bits x buckets)")
    assert sending_text(()) == "gradients are sent in 32 bits"


def test_codes_are_part_of_the_hash(problem: AllocationProblem) -> None:
    first = problem.buckets[0]
    changes = [
        replace(first, codes=()),
        replace(first, codes=first.codes[:2]),
        *(
            replace(first, codes=(replace(first.codes[0], **change), *first.codes[1:]))
            for change in ({"bits": 12}, {"all_reduce_s": 1.0}, {"perturbation": 1.0})
        ),
    ]
    hashes = {replace(problem, buckets=(b, *problem.buckets[1:])).sha256 for b in changes}
    assert len({problem.sha256, *hashes}) == 6


# -- what a plan costs --------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_a_plan_costs_what_it_costs_at_its_bits_and_their_variance(seed: int) -> None:
    problem = tiny_coded_problem(seed)
    plan = random_plan(problem, seed)
    got = evaluate(problem, plan)
    fixed = problem.at_bits(plan.communication)
    want = evaluate_columns(fixed, plan_columns(problem, plan), problem.deadline_s)
    sent = problem.bits_perturbation(plan.communication)
    assert got.communication_perturbation == sent
    assert got.perturbation == want.perturbation + sent
    assert got.devices == want.devices
    assert got.violations == want.violations
    assert got.iteration_time_s == want.iteration_time_s


# -- methods ------------------------------------------------------------------------------------


def test_uniform_is_the_best_of_all_precisions_at_one_bit_count() -> None:
    found = 0
    for seed in range(60):
        problem = tiny_coded_problem(seed)
        got = solve(problem, method="uniform")
        if got.deadline_s is None or not problem.has_codes:
            continue
        best = None
        for bits in single_bit_counts(problem):
            fixed = problem.at_bits(bits)
            parts = [uniform_candidates(fixed, d, got.deadline_s) for d in fixed.devices]
            for pick in itertools.product(*parts):
                if all(candidate.feasible for candidate in pick):
                    columns = [candidate.column for candidate in pick]
                    value = evaluate_columns(problem, columns, None, bits).perturbation
                    best = value if best is None else min(best, value)
        assert (got.objective is None) == (best is None), seed
        if best is not None:
            assert got.objective == pytest.approx(best, rel=1e-12, abs=1e-15), seed
            found += 1
    assert found > 10


def asked_times(count: int) -> Callable[[], bool]:
    """Says to stop once it has been asked so often."""
    asked = itertools.count()
    return lambda: next(asked) >= count


def test_greedy_is_never_worse_than_uniform_whenever_it_is_stopped() -> None:
    better = 0
    for seed in range(6):
        problem = generate_problem(operators=12, buckets=3, seed=seed, communication=(16, 8, 4))
        assert problem.deadline_s is not None
        start = solve(problem.at_bits(problem.fastest_bits), method="fastest").require_plan()
        columns = plan_columns(problem.at_bits(problem.fastest_bits), start)
        for after in range(8):
            uniform, greedy = (
                BitsMethods(problem, problem.deadline_s, asked_times(after)) for _ in range(2)
            )
            least, found = (
                np.inf if plan is None else plan.evaluation.perturbation
                for plan in (uniform.uniform(), greedy.greedy(columns))
            )
            assert found <= least
            better += found < least
    assert better > 0


def test_single_bit_counts_take_the_next_more_bits_that_a_bucket_has() -> None:
    problem = generate_problem(operators=5, buckets=2, seed=1, communication=(16, 4))
    buckets = (problem.buckets[0], replace(problem.buckets[1], codes=problem.buckets[1].codes[:1]))
    problem = replace(problem, buckets=buckets)
    assert single_bit_counts(problem) == [(32, 32), (16, 16), (4, 16)]


def test_raised_bits_keep_the_deadline_and_gain(problem: AllocationProblem) -> None:
    assert problem.deadline_s is not None
    methods = BitsMethods(problem, problem.deadline_s, lambda: False)
    start = methods.uniform()
    assert start is not None
    bits = problem.fastest_bits
    judged = evaluate_columns(problem, start.columns, problem.deadline_s, bits)
    low = BitsPlan(columns=start.columns, bits=bits, evaluation=judged)
    raised = methods.raised(low)
    assert raised.evaluation.feasible
    assert raised.evaluation.perturbation < low.evaluation.perturbation
    for k, count in enumerate(raised.bits):  # no bucket can be raised by one step more
        more = [c for c in problem.buckets[k].choices if c.bits > count]
        if more:
            after = (*raised.bits[:k], more[-1].bits, *raised.bits[k + 1 :])
            judged = evaluate_columns(problem, raised.columns, problem.deadline_s, after)
            assert not judged.feasible


def test_the_fastest_plan_is_at_the_fastest_bits(problem: AllocationProblem) -> None:
    result = solve(problem, method="fastest")
    alone = solve(problem.at_bits(problem.fastest_bits), method="fastest")
    assert result.plan is not None
    assert result.plan.communication == problem.fastest_bits
    assert result.evaluation is not None
    assert alone.evaluation is not None
    assert result.evaluation.iteration_time_s == alone.evaluation.iteration_time_s


def test_a_result_names_its_bits_and_how_many_were_judged(problem: AllocationProblem) -> None:
    result = solve(problem, method="exact")
    assert result.status is SolveStatus.OPTIMAL
    assert result.plan is not None
    assert f"gradients are sent in {bits_text(result.plan.communication)}" in result.notes[0]
    assert all(part.statistics["bit_vectors"] >= 1 for part in result.devices.values())


def test_a_hint_with_bits_is_kept_when_there_is_no_time_for_more(
    problem: AllocationProblem,
) -> None:
    best = solve(problem, method="exact").require_plan()
    parameters = SolveParameters(time_limit_s=0.0)
    kept = solve(problem, method="exact", parameters=parameters, hint=best)
    assert kept.objective == evaluate(problem, best).perturbation
    other = replace(problem, buckets=problem.buckets[::-1])
    with pytest.raises(PlanError, match="must be the hash of the problem"):
        solve(other, hint=best)


def test_too_many_bits_for_brute_force_are_refused() -> None:
    problem = generate_problem(operators=2, buckets=8, seed=1, communication=(16, 8, 4))
    with pytest.raises(ParameterError, match="beyond 4096 combinations"):
        solve(problem, method="brute_force")


def test_equal_inputs_give_equal_plans() -> None:
    problem = generate_problem(operators=60, seed=9, communication=(16, 8, 4))
    for method in ("exact", "greedy", "random", "uniform"):
        one, two = (
            solve(problem, method=method, parameters=SolveParameters(threads=threads))
            for threads in (1, 2)
        )
        assert one.plan == two.plan, method


# -- infeasible ---------------------------------------------------------------------------------


def test_what_no_bits_allow_is_infeasible_and_explained(problem: AllocationProblem) -> None:
    soonest = solve(problem, method="fastest")
    assert soonest.evaluation is not None
    least_s = soonest.evaluation.iteration_time_s
    for factor, feasible in ((0.999, False), (1.001, True)):
        posed = replace(problem, deadline_s=least_s * factor)
        for method in ("exact", "greedy"):
            result = solve(posed, method=method)
            assert (result.plan is not None) is feasible, (method, factor)
            if not feasible:
                assert result.status is SolveStatus.INFEASIBLE, method
                assert result.bound is None
        told = explain(posed)
        assert told.feasible is feasible
        if told.plan is not None:
            assert evaluate(posed, told.plan).feasible
        else:
            assert all("deadline" in cause.resource for cause in told.causes)


# -- laws of the exact method's parts -------------------------------------------------------------


def test_like_buckets_lose_nothing_by_falling_times() -> None:
    """Of all assignments within the slack, some sorted one is as good in cost and every tail."""
    rng = np.random.default_rng(1)
    for _ in range(50):
        codes, buckets = int(rng.integers(1, 4)), int(rng.integers(1, 5))
        seconds = rng.integers(0, 4, size=codes).astype(np.float64)
        variance = rng.random(codes)
        worth = np.cumsum(rng.random(buckets))  # later buckets are in more rows
        cost = [variance + seconds * price for price in worth]
        reduced = [row - row.min() for row in cost]
        slack = float(rng.uniform(0.1, 3.0))
        (group,) = bucket_groups(
            ["alike"] * buckets,
            [seconds] * buckets,
            reduced,
            [np.zeros(codes, dtype=np.bool_)] * buckets,
            slack,
        )
        listed = {tuple(row) for row in group.codes.tolist()}
        for pick in itertools.product(range(codes), repeat=buckets):
            if sum(reduced[k][code] for k, code in enumerate(pick)) >= slack:
                continue
            tails = np.cumsum(seconds[list(pick)][::-1])[::-1]
            assert any(
                variance[list(row)].sum() <= variance[list(pick)].sum() + 1e-12
                and (np.cumsum(seconds[list(row)][::-1])[::-1] <= tails + 1e-12).all()
                for row in listed
            )


def test_an_instance_with_codes_is_as_described() -> None:
    problem = coded(generate_problem(operators=20, seed=2))
    for bucket in problem.buckets:
        assert [code.bits for code in bucket.choices] == [FULL_BITS, 16, 8, 4]
        assert bucket.codes[1].all_reduce_s == pytest.approx(bucket.all_reduce_s / 4)
        ratio = bucket.codes[2].perturbation / bucket.codes[1].perturbation
        assert ratio == pytest.approx((255 / 15) ** 2)


# -- back ends that fail, and generated problems --------------------------------------------------


def test_a_back_end_that_fails_is_named_and_auto_falls_back(
    problem: AllocationProblem, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object, **__: object) -> None:
        raise SolverUnavailableError("highs", "went home", "Install it")

    monkeypatch.setattr(backends, "_solve_math_opt", gone)
    parameters = SolveParameters(plain=True)
    exact = solve(problem, method="exact", parameters=parameters)
    assert exact.status is SolveStatus.SOLVER_ERROR
    assert exact.plan is None
    assert exact.fallback_reason == "solver highs: went home. Install it"
    auto = solve(problem, method="auto", parameters=parameters)
    assert auto.method == "greedy"
    assert auto.plan is not None
    assert "went home" in (auto.fallback_reason or "")
    assert solve(problem, method="uniform", parameters=parameters).fallback_reason is None


@pytest.mark.parametrize(
    "communication", [8, None, {8, 4}, np.array([8, 4]), "8", (8.0,), (True,), (32,), (1,)]
)
def test_bits_that_cannot_be_generated_are_refused(communication: Any) -> None:
    with pytest.raises(ParameterError, match="communication: must be whole numbers from 2 to 16"):
        generate_problem(operators=2, communication=communication)


def test_codes_leave_all_other_numbers_of_a_generated_problem_alone() -> None:
    plain = generate_problem(operators=15, buckets=3, seed=8)
    made = generate_problem(operators=15, buckets=3, seed=8, communication=(8, 16))
    assert [[code.bits for code in bucket.choices] for bucket in made.buckets] == [[32, 16, 8]] * 3
    for one, two in zip(plain.devices, made.devices, strict=True):
        for name in ("forward_s", "backward_s", "perturbation"):
            assert (getattr(one, name) == getattr(two, name)).all()
    assert plain.provenance == made.provenance.replace(", communication=(16, 8)", "")
    assert [b.all_reduce_s for b in plain.buckets] == [b.all_reduce_s for b in made.buckets]
    for bad in (1, 17, 8.0, True):
        with pytest.raises(ParameterError, match="communication: must be whole numbers"):
            generate_problem(operators=2, communication=(bad,))  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(4))
def test_a_code_that_outweighs_all_operators_is_solved(seed: int) -> None:
    """Prices grow with the variance of codes, not with that of operators alone."""
    problem = generate_problem(
        operators=6, precisions=3, devices=2, seed=seed, tightness=0.5, communication=(8,)
    )
    assert problem.deadline_s is not None
    first, *others = problem.buckets
    huge = tuple(replace(code, perturbation=1e30) for code in first.codes)
    slow = replace(first, all_reduce_s=10 * problem.deadline_s, codes=huge)
    problem = replace(problem, buckets=(slow, *others))
    result = solve(problem)
    assert result.status is SolveStatus.OPTIMAL, result.fallback_reason
    assert result.require_plan().communication[0] == 8
    assert result.objective == pytest.approx(1e30, rel=1e-4)
