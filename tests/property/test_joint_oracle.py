"""Precisions and bits solved together, against every plan at all bits and other solvers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from qsync_opt.optimize.evaluate import TIME_TOLERANCE, evaluate
from qsync_opt.optimize.joint_core import open_options
from qsync_opt.optimize.joint_lagrangian import JointLagrangian, NoPlanError
from qsync_opt.optimize.run import distinct_kinds
from qsync_opt.optimize.solve import solve
from qsync_opt.plan import FULL_BITS
from tests.coded_problems import every_plan, tiny_coded_problem
from tests.solve_oracle import WAYS, faults

PROBLEMS, CHUNK = 300, 30

#: Plans of the problems whose every plan is judged by `evaluate`.
_MOST_PLANS = 1_500

HEURISTICS = ("uniform", "greedy", "random")


@pytest.mark.parametrize("first", range(0, PROBLEMS, CHUNK))
def test_exact_is_brute_force_is_the_joint_program(first: int) -> None:
    wrong = []
    for seed in range(first, first + CHUNK):
        problem = tiny_coded_problem(seed)
        want = solve(problem, method="brute_force")
        for way in WAYS:
            if seed % way.every == 0:
                got = solve(problem, method="exact", parameters=way.parameters)
                wrong += [f"seed {seed}, {way}: {fault}" for fault in faults(problem, want, got)]
    assert not wrong, "\n".join(wrong)


def test_brute_force_is_the_least_of_all_plans() -> None:
    judged = 0
    for seed in range(120):
        problem = tiny_coded_problem(seed)
        plans = every_plan(problem, _MOST_PLANS)
        if plans is None:
            continue
        judged += 1
        got = solve(problem, method="brute_force")
        deadline_s = problem.deadline_s
        times = [time_s for _, time_s, feasible in plans if feasible]
        if deadline_s is None and times:
            deadline_s = (1 + problem.slack) * min(times)
        best = min(
            (
                perturbation
                for perturbation, time_s, feasible in plans
                if feasible and time_s <= (deadline_s or 0.0) * (1 + TIME_TOLERANCE)
            ),
            default=None,
        )
        assert (got.objective is None) == (best is None), seed
        if best is not None:
            assert got.objective == pytest.approx(best, rel=1e-9, abs=1e-12), seed
    assert judged > 30


def test_methods_are_never_better_than_they_can_be_nor_worse_than_they_promise() -> None:
    for seed in range(120):
        problem = tiny_coded_problem(seed)
        exact = solve(problem, method="exact")
        found = {method: solve(problem, method=method) for method in HEURISTICS}
        for method, result in found.items():
            if result.objective is None:
                continue
            assert result.plan is not None
            judged = evaluate(problem, result.plan, deadline_s=result.deadline_s)
            assert judged.feasible, (seed, method)
            assert judged.perturbation == result.objective
            assert exact.objective is not None, (seed, method)
            assert exact.objective <= result.objective, (seed, method)
        uniform, greedy = found["uniform"].objective, found["greedy"].objective
        if uniform is not None:
            assert greedy is not None, seed
            assert greedy <= uniform, seed
        # Greedy starts from the fastest plan, so it has one wherever there is one.
        assert (greedy is None) == (exact.objective is None), seed


def test_bits_that_are_chosen_are_no_worse_than_bits_that_are_given() -> None:
    gained = 0
    for seed in range(60):
        problem = tiny_coded_problem(seed)
        joint = solve(problem, method="exact")
        if joint.objective is None or joint.deadline_s is None:
            continue
        counts = {c.bits for b in problem.buckets for c in b.choices} | {FULL_BITS}
        for count in counts:
            bits = [
                min(c.bits for c in bucket.choices if c.bits >= count) for bucket in problem.buckets
            ]
            fixed = replace(problem.at_bits(bits), deadline_s=joint.deadline_s, slack=0.0)
            alone = solve(fixed, method="exact")
            if alone.objective is None:
                gained += 1
                continue
            total = alone.objective + problem.bits_perturbation(bits)
            assert joint.objective <= total * (1 + 1e-4) + 1e-12, (seed, count)
            gained += joint.objective < total * (1 - 1e-3)
    assert gained > 10


def test_the_bound_holds_at_all_prices_and_for_every_code() -> None:
    rng = np.random.default_rng(3)
    checked = 0
    for seed in range(150):
        problem = tiny_coded_problem(seed)
        if problem.deadline_s is None or not problem.has_codes:
            continue
        deadline_s = problem.deadline_s
        try:
            joint = JointLagrangian(problem, distinct_kinds(problem), deadline_s)
        except NoPlanError:
            continue
        best = solve(problem, method="brute_force").objective
        if best is None:
            continue
        for _ in range(3):
            drawn = rng.random(len(joint.limit)) * (rng.random(len(joint.limit)) < 0.4)
            point = joint.evaluate(drawn * joint.reference)
            assert point.value <= best * (1 + 1e-9) + 1e-9, seed
            for bucket, bounds in enumerate(open_options(joint, point).codes):
                for code, bound in zip(problem.buckets[bucket].choices, bounds, strict=True):
                    # One way left is a bucket without codes; its variance is added by hand.
                    alone = replace(
                        problem.buckets[bucket], codes=(), all_reduce_s=code.all_reduce_s
                    )
                    others = problem.buckets
                    fixed = replace(
                        problem, buckets=(*others[:bucket], alone, *others[bucket + 1 :])
                    )
                    least = solve(fixed, method="brute_force").objective
                    if least is not None:
                        total = least + code.perturbation
                        assert bound <= total * (1 + 1e-9) + 1e-9, (seed, bucket, code.bits)
                        checked += 1
    assert checked > 100


def test_equal_kinds_get_one_plan() -> None:
    solved = 0
    for seed in range(0, 80, 2):
        problem = tiny_coded_problem(seed)
        if len(problem.devices) > 1:
            continue
        (device,) = problem.devices
        halves = tuple(
            replace(device, name=name, batch_share=device.batch_share / 2) for name in ("a", "b")
        )
        posed = replace(problem, devices=halves)
        want = solve(posed, method="brute_force")
        for way in WAYS[:2]:
            got = solve(posed, method="exact", parameters=way.parameters)
            assert not faults(posed, want, got), seed
            if got.plan is not None:
                assert got.plan.for_device("a") == got.plan.for_device("b")
                solved += 1
    assert solved > 20
