"""Pins, groups and followers: propagation and search against every assignment of tiny graphs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from qsync_opt.optimize.consistency import (
    Network,
    Rule,
    RuleSort,
    find_conflict,
    rules_of,
    rules_to_drop,
)
from qsync_opt.optimize.problem import (
    AllocationProblem,
    CastTensors,
    DeviceKind,
    Operator,
    SavedTensors,
)
from qsync_opt.precision import PROMOTED, Precision

PRECISIONS = (Precision.FP32, Precision.BF16, Precision.INT8, Precision.FP16)
SEEDS = 100


def problem_of(
    follows: Sequence[tuple[int, ...]],
    pins: dict[int, Precision],
    groups: Sequence[tuple[int, ...]] = (),
    available: np.ndarray | None = None,
) -> AllocationProblem:
    """A problem of which only the rules matter."""
    shape = (len(follows), len(PRECISIONS))
    zeros = np.zeros(shape)
    none = np.zeros((0, len(PRECISIONS), len(PRECISIONS)))
    device = DeviceKind(
        name="kind",
        workers=1,
        batch_share=1.0,
        memory_bytes=0,
        fixed_bytes=0,
        optimizer_s=0.0,
        available=np.ones(shape, dtype=np.bool_) if available is None else available,
        forward_s=zeros,
        backward_s=zeros,
        perturbation=zeros,
        tensors=CastTensors.from_rows(producer=[], consumers=[], forward_s=none, backward_s=none),
        saved=SavedTensors.from_rows(savers=[], size_bytes=[], dtypes=(Precision.FP32,)),
        pins={f"op{o}": precision for o, precision in pins.items()},
    )
    return AllocationProblem(
        name="rules",
        provenance="test",
        precisions=PRECISIONS,
        storage=tuple(p.storage for p in PRECISIONS),
        output=tuple(p.output for p in PRECISIONS),
        operators=tuple(
            Operator(name=f"op{o}", kind="test", follows=inputs) for o, inputs in enumerate(follows)
        ),
        buckets=(),
        groups=tuple(tuple(f"op{o}" for o in group) for group in groups),
        devices=(device,),
    )


def random_problem(seed: int) -> AllocationProblem:
    """Three to six operators; many pins, groups and followers, so that half contradict."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(3, 7))
    follows: list[tuple[int, ...]] = []
    for o in range(count):
        if o and rng.random() < 0.6:
            picked = rng.choice(o, size=min(o, int(rng.integers(1, 4))), replace=False)
            follows.append(tuple(sorted(picked.tolist())))
        else:
            follows.append(())
    available = rng.random((count, len(PRECISIONS))) < 0.6
    for o, inputs in enumerate(follows):
        available[o] |= np.array([p is not Precision.INT8 for p in PRECISIONS]) & bool(inputs)
        available[o, int(rng.integers(len(PRECISIONS)))] = True
    pins: dict[int, Precision] = {}
    groups: list[tuple[int, ...]] = []
    members = sorted(rng.choice(count, size=2, replace=False).tolist())
    if available[members].all(axis=0).any() and rng.random() < 0.6:
        groups.append(tuple(members))
    for o in range(count):
        if rng.random() < 0.35 and not (groups and o in groups[0]):
            pins[o] = PRECISIONS[int(rng.choice(np.flatnonzero(available[o])))]
    return problem_of(follows, pins, groups, available)


def keeps(problem: AllocationProblem, rules: Sequence[Rule], column: Sequence[int]) -> bool:
    """Whether an assignment keeps every rule, read off the definition of each."""
    for rule in rules:
        first, *rest = (column[row] for row in rule.scope)
        if rule.sort is RuleSort.PIN and first != rule.column:
            return False
        if rule.sort is RuleSort.GROUP and any(other != first for other in rest):
            return False
        if rule.sort is RuleSort.FOLLOWER:
            handed = {problem.output[other] for other in rest}
            dtype = handed.pop() if len(handed) == 1 else PROMOTED
            if problem.precisions[first] is not dtype:
                return False
    return True


def assignments(problem: AllocationProblem, rules: Sequence[Rule]) -> list[tuple[int, ...]]:
    options = [np.flatnonzero(row).tolist() for row in problem.devices[0].available]
    return [c for c in itertools.product(*options) if keeps(problem, rules, c)]


@pytest.mark.parametrize("seed", range(SEEDS))
def test_search_finds_an_assignment_exactly_where_there_is_one(seed: int) -> None:
    problem = random_problem(seed)
    device = problem.devices[0]
    rules = rules_of(problem, device)
    every = assignments(problem, rules)
    network = Network(problem, device, rules)
    preference = np.random.default_rng(seed).random(device.available.shape)
    found = network.assign(preference)
    assert (found is not None) == bool(every)
    if found is not None:
        assert tuple(found.tolist()) in every


@pytest.mark.parametrize("seed", range(SEEDS))
def test_propagation_removes_nothing_that_an_assignment_uses(seed: int) -> None:
    problem = random_problem(seed)
    device = problem.devices[0]
    rules = rules_of(problem, device)
    every = assignments(problem, rules)
    network = Network(problem, device, rules)
    consistent = network.propagate()
    assert consistent or not every
    for column in every:
        assert network.allowed()[np.arange(len(column)), list(column)].all()


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_conflict_has_no_assignment_and_every_part_of_it_has_one(seed: int) -> None:
    problem = random_problem(seed)
    device = problem.devices[0]
    rules = rules_of(problem, device)
    conflict = find_conflict(problem, device)
    assert bool(conflict) == (not assignments(problem, rules))
    if conflict:
        assert not assignments(problem, conflict)
    for rule in conflict:
        assert assignments(problem, [other for other in conflict if other is not rule])


@pytest.mark.parametrize("seed", range(SEEDS))
def test_without_the_rules_to_drop_the_others_hold(seed: int) -> None:
    problem = random_problem(seed)
    rules = rules_of(problem, problem.devices[0])
    dropped = rules_to_drop(problem, problem.devices[0])
    assert assignments(problem, [rule for rule in rules if rule not in dropped])
    assert bool(dropped) == (not assignments(problem, rules))
    assert all(rule.sort is not RuleSort.FOLLOWER for rule in dropped)


def test_random_problems_hold_both_verdicts_and_every_sort_of_rule() -> None:
    conflicts = [
        find_conflict(problem, problem.devices[0]) for problem in map(random_problem, range(SEEDS))
    ]
    assert any(conflicts)
    assert not all(conflicts)
    assert {rule.sort for conflict in conflicts for rule in conflict} == set(RuleSort)


def test_a_conflict_runs_along_the_chain_of_followers() -> None:
    chain = [(), (0,), (1,), (2,), ()]
    pins = {0: Precision.FP32, 3: Precision.BF16, 4: Precision.INT8}
    problem = problem_of(chain, pins)
    described = [rule.describe(problem) for rule in find_conflict(problem, problem.devices[0])]
    assert described == [
        "pin op0 = fp32",
        "pin op3 = bf16",
        "op1 follows op0",
        "op2 follows op1",
        "op3 follows op2",
    ]
    (dropped,) = rules_to_drop(problem, problem.devices[0])
    assert dropped.describe(problem) == "pin op3 = bf16"


def test_a_conflict_that_no_single_rule_shows_is_found() -> None:
    # op2 = fp32 needs unequal inputs, since neither has fp32; the group makes them equal.
    available = np.ones((3, 4), dtype=np.bool_)
    available[:2, 0] = False
    problem = problem_of([(), (), (0, 1)], {2: Precision.FP32}, [(0, 1)], available)
    device = problem.devices[0]
    assert Network(problem, device, rules_of(problem, device)).propagate()
    assert len(find_conflict(problem, device)) == 3


def test_a_long_chain_needs_no_recursion_and_no_retreat() -> None:
    count = 3000
    problem = problem_of([(), *((o,) for o in range(count - 1))], {})
    device = problem.devices[0]
    last = replace(device, pins={f"op{count - 1}": Precision.BF16})
    preference = np.zeros(device.available.shape)
    column = Network(problem, last, rules_of(problem, last)).assign(preference)
    assert column is not None
    assert {problem.output[c] for c in column.tolist()} == {Precision.BF16}
