"""`explain` against the enumeration of every plan of tiny problems."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest

from qsync_opt.errors import ProblemError, SolverUnavailableError
from qsync_opt.optimize import minima
from qsync_opt.optimize.evaluate import (
    TIME_TOLERANCE,
    evaluate,
    evaluate_columns,
    follower_columns,
)
from qsync_opt.optimize.explain import explain
from qsync_opt.optimize.explanation import Cause
from qsync_opt.optimize.floors import is_late
from qsync_opt.optimize.generate import generate_problem
from qsync_opt.optimize.minima import SoleKind
from qsync_opt.optimize.problem import (
    AllocationProblem,
    Bucket,
    CastTensors,
    DeviceKind,
    Operator,
    SavedTensors,
)
from qsync_opt.optimize.result import SolveParameters
from qsync_opt.precision import HANDED_ON, Precision

UNLIMITED = 2**53
EXACTLY = SolveParameters(relative_gap=0.0)
SEEDS = 40

#: How close a proof must come: memory to the byte, time to a solver's tolerance.
PROVEN = {"memory": 0.0, "memory and deadline": 0.0, "deadline": 1e-7}

#: Deadlines below this are missed even with the tolerance of `evaluate`.
JUST_LESS = 1 - 3 * TIME_TOLERANCE


def tiny_problem(seed: int) -> AllocationProblem:
    """One to three kinds, two to six operators, everything the format allows, no budget."""
    rng = np.random.default_rng(seed)
    while True:
        try:
            return _random_problem(rng)
        except ProblemError:
            continue  # a pin contradicts a group, or a group has no precision in common


def _random_problem(rng: np.random.Generator) -> AllocationProblem:
    count = int(rng.integers(2, 7))
    pool = [Precision.BF16, Precision.INT8, Precision.FP16, Precision.TF32]
    names = [Precision.FP32, *pool[: int(rng.integers(1, 4))]]
    buckets = int(rng.integers(0, 4))
    operators = []
    for o in range(count):
        follows: tuple[int, ...] = ()
        if o and rng.random() < 0.4:
            inputs = rng.choice(o, size=min(o, int(rng.integers(1, 4))), replace=False)
            follows = tuple(sorted(inputs.tolist()))
        bucket = int(rng.integers(buckets)) if buckets and rng.random() < 0.7 else None
        operators.append(Operator(name=f"op{o}", kind="test", bucket=bucket, follows=follows))
    kinds = int(rng.integers(1, 4))
    groups: list[tuple[str, ...]] = []
    if rng.random() < 0.4:
        members = rng.choice(count, size=min(count, int(rng.integers(2, 4))), replace=False)
        groups.append(tuple(f"op{o}" for o in members.tolist()))
    return AllocationProblem(
        name="tiny",
        provenance="random",
        precisions=tuple(names),
        storage=tuple(p.storage for p in names),
        output=tuple(p.output if p.output in names else Precision.FP32 for p in names),
        operators=tuple(operators),
        buckets=tuple(
            Bucket(all_reduce_s=float(rng.integers(0, 5)), size_bytes=1) for _ in range(buckets)
        ),
        devices=tuple(_random_kind(rng, operators, names, r, kinds) for r in range(kinds)),
        groups=tuple(groups),
    )


def _random_kind(
    rng: np.random.Generator,
    operators: list[Operator],
    names: list[Precision],
    index: int,
    kinds: int,
) -> DeviceKind:
    count, columns = len(operators), len(names)
    available = rng.random((count, columns)) < 0.7
    available[np.arange(count), rng.integers(columns, size=count)] = True
    for o, operator in enumerate(operators):
        if operator.follows:
            available[o] |= [p in HANDED_ON for p in names]
    # Some kinds in single bytes, some beyond 100 GB, where one byte is 1e-11 of the budget.
    unit, odd = (1, 0) if rng.random() < 0.5 else (2**33, 1)

    def some_bytes(*shape: int) -> np.ndarray:
        return rng.integers(0, 9, size=shape) * unit + odd * rng.integers(0, 9, size=shape)

    producers = [o for o in range(count - 1) if rng.random() < 0.7]
    consumers = [
        sorted(
            rng.choice(
                np.arange(o + 1, count), size=int(rng.integers(1, count - o)), replace=False
            ).tolist()
        )
        for o in producers
    ]
    casts = rng.integers(0, 4, size=(2, len(producers), columns, columns)).astype(float)
    savers = [
        sorted(
            rng.choice(count, size=int(rng.integers(1, min(count, 3) + 1)), replace=False).tolist()
        )
        for _ in range(int(rng.integers(0, 5)))
    ]
    dtypes = tuple(dict.fromkeys(p.storage for p in names))
    pinned = {}
    for o in range(count):
        if rng.random() < 0.15:
            pinned[f"op{o}"] = names[int(rng.choice(np.flatnonzero(available[o])))]
    return DeviceKind(
        name=f"kind{index}",
        workers=1,
        batch_share=1 / kinds,
        memory_bytes=UNLIMITED,
        fixed_bytes=int(some_bytes(1)[0]),
        optimizer_s=float(rng.integers(0, 3)),
        available=available,
        forward_s=rng.integers(0, 9, size=(count, columns)) + rng.random((count, columns)),
        backward_s=rng.integers(0, 9, size=(count, columns)).astype(float),
        perturbation=rng.random((count, columns)),
        forward_transient_bytes=some_bytes(count, columns),
        backward_transient_bytes=some_bytes(count, columns),
        tensors=CastTensors.from_rows(
            producer=producers, consumers=consumers, forward_s=casts[0], backward_s=casts[1]
        ),
        saved=SavedTensors.from_rows(
            savers=savers, size_bytes=some_bytes(len(savers), len(dtypes)), dtypes=dtypes
        ),
        pins=pinned,
    )


@dataclass(frozen=True)
class Plans:
    """What every plan of a kind that obeys pins, groups and followers takes."""

    memory: list[int]
    time_s: list[float]

    def feasible(self, memory_bytes: int, deadline_s: float | None) -> bool:
        limit = np.inf if deadline_s is None else deadline_s * (1 + TIME_TOLERANCE)
        pairs = zip(self.memory, self.time_s, strict=True)
        return any(memory <= memory_bytes and time_s <= limit for memory, time_s in pairs)

    def least_memory(self, deadline_s: float | None = None) -> int:
        limit = np.inf if deadline_s is None else deadline_s * (1 + TIME_TOLERANCE)
        pairs = zip(self.memory, self.time_s, strict=True)
        return min(memory for memory, time_s in pairs if time_s <= limit)

    def least_time(self, memory_bytes: int = UNLIMITED) -> float:
        pairs = zip(self.memory, self.time_s, strict=True)
        return min(time_s for memory, time_s in pairs if memory <= memory_bytes)


def every_plan(problem: AllocationProblem, device: DeviceKind) -> Plans:
    alone = replace(problem, devices=(replace(device, workers=1, batch_share=1.0),))
    options = [
        [0] if operator.follows else np.flatnonzero(device.available[o]).tolist()
        for o, operator in enumerate(problem.operators)
    ]
    plans = Plans(memory=[], time_s=[])
    for choice in itertools.product(*options):
        column = follower_columns(problem, np.array(choice))
        part = evaluate_columns(alone, [column], None)
        if all(violation.resource == "memory" for violation in part.violations):
            plans.memory.append(part.peak_memory_bytes)
            plans.time_s.append(part.devices[device.name].iteration_time_s)
    return plans


def budgets(plans: Plans, rng: np.random.Generator) -> Iterator[tuple[int, float | None]]:
    """Limits of one kind around every border of what is feasible."""
    smallest, quickest = plans.least_memory(), plans.least_time()
    yield smallest, None
    yield smallest - 1, None
    yield smallest, plans.least_time(smallest)
    yield smallest, plans.least_time(smallest) * JUST_LESS
    yield plans.least_memory(quickest), quickest
    yield plans.least_memory(quickest) - 1, quickest
    yield UNLIMITED, quickest * JUST_LESS
    yield smallest - 1, quickest * JUST_LESS
    yield int(rng.choice(plans.memory)), float(rng.choice(plans.time_s))


def check_kind(
    plans: Plans, device: DeviceKind, deadline_s: float | None, causes: list[Cause]
) -> None:
    """The causes of one kind are the enumeration's, and so are all their numbers."""
    if not plans.memory:
        assert [cause.resource for cause in causes] == ["pins and followers"]
        return
    budget = device.memory_bytes
    if plans.feasible(budget, deadline_s):
        assert causes == []
        return
    expected: dict[str, tuple[float, float]] = {}
    if plans.least_memory() > budget:
        expected["memory"] = (budget, plans.least_memory())
    if deadline_s is not None and plans.least_time() > deadline_s * (1 + TIME_TOLERANCE):
        expected["deadline"] = (deadline_s, plans.least_time())
    if not expected:
        expected["memory and deadline"] = (budget, plans.least_memory(deadline_s))
    assert {cause.resource: (cause.limit, cause.minimum) for cause in causes} == {
        resource: (limit, pytest.approx(least, rel=TIME_TOLERANCE, abs=0))
        if resource == "deadline"
        else (limit, least)
        for resource, (limit, least) in expected.items()
    }
    for cause in causes:
        assert cause.minimum is not None
        assert cause.limit is not None
        assert cause.shortfall == cause.minimum - cause.limit
        assert cause.bound is not None
        assert cause.bound == pytest.approx(cause.minimum, rel=PROVEN[cause.resource], abs=0)
        assert cause.bound <= cause.minimum
        assert cause.where
        assert cause.nearest
        check_nearest(plans, budget, deadline_s, cause)


def check_nearest(plans: Plans, budget: int, deadline_s: float | None, cause: Cause) -> None:
    """Every alternative has a plan, and no smaller change of what it changes has one."""
    for option in cause.nearest:
        assert plans.feasible(option.memory_bytes, option.deadline_s)
        if option.memory_bytes > budget:
            assert not plans.feasible(option.memory_bytes - 1, option.deadline_s)
        if deadline_s is not None:
            assert option.deadline_s is not None
            if option.deadline_s > deadline_s:
                tighter = option.deadline_s * JUST_LESS
                assert not plans.feasible(option.memory_bytes, tighter)
        else:
            assert option.deadline_s is None


def check(problem: AllocationProblem, cases: int, parameters: SolveParameters = EXACTLY) -> None:
    """`explain` at limits around every border of what is feasible on the first kind."""
    plans = {device.name: every_plan(problem, device) for device in problem.devices}
    first = problem.devices[0]
    limits: list[tuple[int, float | None]] = [(UNLIMITED, None)]
    if plans[first.name].memory:
        limits = list(budgets(plans[first.name], np.random.default_rng(cases)))[:cases]
    for memory_bytes, deadline_s in limits:
        if deadline_s is not None and deadline_s <= 0:
            continue
        devices = (replace(first, memory_bytes=max(memory_bytes, 0)), *problem.devices[1:])
        case = replace(problem, devices=devices, deadline_s=deadline_s)
        found = explain(case, parameters=parameters)
        for device in case.devices:
            causes = [cause for cause in found.causes if cause.device == device.name]
            check_kind(plans[device.name], device, deadline_s, causes)
        assert found.unknown == ()
        assert found.feasible == (found.causes == ())
        assert (found.plan is not None) == found.feasible
        if found.plan is not None:
            assert evaluate(case, found.plan).feasible


@pytest.mark.parametrize("seed", range(SEEDS))
def test_explanation_is_that_of_the_enumeration(seed: int) -> None:
    check(tiny_problem(seed), cases=9)


@pytest.mark.parametrize("solver", ["scip", "cbc"])
@pytest.mark.parametrize("seed", [1000, 1001])
def test_other_solvers_give_the_same_numbers(solver: str, seed: int) -> None:
    check(tiny_problem(seed), cases=3, parameters=replace(EXACTLY, solver=solver))


def test_least_memory_is_exact_where_the_program_is_off_by_a_few_bytes() -> None:
    # At 128 GiB the program of least memory calls a plan of 3 bytes too many optimal.
    check(tiny_problem(2353), cases=9)


@pytest.mark.parametrize("seed", range(1000, 1006))
def test_a_solver_of_whole_numbers_says_how_far_it_proved(seed: int) -> None:
    # CP-SAT counts time in coarse steps: its least time is a bound and a plan apart.
    problem = tiny_problem(seed)
    first = problem.devices[0]
    plans = every_plan(problem, first)
    if not plans.memory:
        return
    for memory_bytes, deadline_s in budgets(plans, np.random.default_rng(seed)):
        if deadline_s is None or deadline_s <= 0:
            continue
        devices = (replace(first, memory_bytes=max(memory_bytes, 0)), *problem.devices[1:])
        case = replace(problem, devices=devices, deadline_s=deadline_s)
        found = explain(case, parameters=replace(EXACTLY, solver="cp_sat"))
        causes = [cause for cause in found.causes if cause.device == first.name]
        assert bool(causes) == (not plans.feasible(memory_bytes, deadline_s))
        least = {
            "memory": float(plans.least_memory()),
            "deadline": plans.least_time(),
            "memory and deadline": np.inf,
        }
        if plans.least_time() <= deadline_s * (1 + TIME_TOLERANCE):
            least["memory and deadline"] = plans.least_memory(deadline_s)
        for cause in causes:
            assert cause.bound is not None
            assert cause.bound <= least[cause.resource] * (1 + TIME_TOLERANCE)
            assert cause.minimum is None or cause.minimum >= least[cause.resource]
            for option in cause.nearest:
                assert plans.feasible(option.memory_bytes, option.deadline_s)


@pytest.fixture(scope="module")
def plain() -> AllocationProblem:
    """One kind, nothing pinned, few enough operators to enumerate its plans."""
    return generate_problem(operators=8, precisions=3, devices=1, seed=3, tightness=0.5)


def with_memory(problem: AllocationProblem, memory_bytes: int) -> AllocationProblem:
    (device,) = problem.devices
    return replace(problem, devices=(replace(device, memory_bytes=memory_bytes),))


def test_the_text_says_what_is_short_and_what_to_set(plain: AllocationProblem) -> None:
    least = every_plan(plain, plain.devices[0]).least_memory()
    free = replace(plain, deadline_s=None)
    text = explain(with_memory(free, least - 2**20)).text
    assert f"needs at least {least:,} bytes at " in text
    assert f"but has {least - 2**20:,} bytes: short by 1,048,576 bytes (1.00 MiB)" in text
    assert text.endswith(f"To have a plan: set memory_bytes to {least:,}.")
    assert explain(with_memory(free, least)).text.startswith("A plan exists")


def test_the_deadline_to_set_works_as_printed(plain: AllocationProblem) -> None:
    quickest = every_plan(plain, plain.devices[0]).least_time()
    late = with_memory(replace(plain, deadline_s=quickest / 2), UNLIMITED)
    found = explain(late)
    assert [cause.resource for cause in found.causes] == ["deadline"]
    printed = float(found.text.removesuffix(".").rsplit(" ", 1)[1])
    assert explain(replace(late, deadline_s=printed)).feasible


def test_contributors_add_up_to_the_minimum(plain: AllocationProblem) -> None:
    # With so few operators that all of them are named, the parts are the whole.
    small = generate_problem(operators=3, precisions=2, devices=1, seed=0, graph="chain")
    (cause,) = explain(with_memory(replace(small, deadline_s=None), 0)).causes
    assert sum(part.amount for part in cause.contributors) == cause.minimum
    amounts = [part.amount for part in cause.contributors]
    assert amounts == sorted(amounts, reverse=True)


def test_every_kind_is_explained(small_problem: AllocationProblem) -> None:
    starved = tuple(replace(device, memory_bytes=1) for device in small_problem.devices)
    found = explain(replace(small_problem, devices=starved))
    assert {cause.device for cause in found.causes} == {
        device.name for device in small_problem.devices
    }


def test_more_memory_or_time_never_turns_a_plan_into_none(small_problem: AllocationProblem) -> None:
    assert explain(small_problem).feasible
    richer = tuple(
        replace(device, memory_bytes=2 * device.memory_bytes) for device in small_problem.devices
    )
    assert small_problem.deadline_s is not None
    looser = replace(small_problem, devices=richer, deadline_s=2 * small_problem.deadline_s)
    assert explain(looser).feasible


def broken_solver(*_: object, **__: object) -> None:
    raise SolverUnavailableError("highs", "it is not installed")


def test_arithmetic_needs_no_solver(
    plain: AllocationProblem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(minima, "solve_program", broken_solver)
    assert explain(with_memory(plain, UNLIMITED)).feasible
    (device,) = plain.devices
    fixed = with_memory(replace(plain, deadline_s=None), device.fixed_bytes)
    found = explain(fixed)
    assert found.feasible is False
    (cause,) = found.causes
    assert cause.bound is not None
    assert device.fixed_bytes < cause.bound <= every_plan(plain, device).least_memory()


def test_a_solver_that_fails_leaves_the_question_open_and_says_why(
    undecided: AllocationProblem, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert explain(undecided).feasible
    monkeypatch.setattr(minima, "solve_program", broken_solver)
    found = explain(undecided)
    assert found.feasible is None
    assert found.plan is None
    assert "it is not installed" in found.unknown[0]
    assert found.unknown[0] in found.text


def test_no_time_leaves_the_question_open(undecided: AllocationProblem) -> None:
    found = explain(undecided, parameters=SolveParameters(time_limit_s=0.0))
    assert found.feasible is None
    assert "time limit" in found.unknown[0]


@pytest.fixture(scope="module")
def undecided() -> AllocationProblem:
    """A problem whose tightest joint limits lie between the bounds and the candidate plans."""
    for seed in range(100):
        problem = generate_problem(operators=7, precisions=3, devices=1, seed=seed)
        (device,) = problem.devices
        plans = every_plan(problem, device)
        smallest = plans.least_memory()
        problem = with_memory(problem, smallest)
        deadline_s = plans.least_time(smallest)
        kind = SoleKind(problem, problem.devices[0], SolveParameters())
        if not any(
            found.memory_bytes <= smallest and not is_late(found.time_s, deadline_s)
            for found in kind.plans
        ) and not (kind.memory_floor_bytes > smallest or is_late(kind.time_floor_s, deadline_s)):
            return replace(problem, deadline_s=deadline_s)
    raise AssertionError("no such problem among the seeds")
