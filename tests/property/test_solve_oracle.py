"""`exact` against every plan of random tiny problems, for every back end, to the byte."""

from __future__ import annotations

import itertools
import math
import multiprocessing
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from qsync_opt.errors import InfeasibleError
from qsync_opt.optimize.arrays import IntArray
from qsync_opt.optimize.brute_force import brute_force_fastest
from qsync_opt.optimize.evaluate import evaluate_columns, evaluate_device
from qsync_opt.optimize.problem import (
    AllocationProblem,
    CastTensors,
    DeviceKind,
    Operator,
    SavedTensors,
)
from qsync_opt.optimize.result import SOLVERS, SolveParameters, SolveStatus
from qsync_opt.optimize.solve import find_deadline, solve
from qsync_opt.precision import Precision
from tests.solve_oracle import Way, faults, posed, wrong_results
from tests.tiny_problems import UNLIMITED, tiny_problem

#: Problems tried in all, and how many of them each test tries.
PROBLEMS, CHUNK = 2_000, 50


@pytest.fixture(scope="module")
def chunks() -> Iterator[Mapping[int, Future[list[str]]]]:
    """What is wrong with each stretch of the problems, worked out on two cores."""
    # Spawned, not forked: solvers have started threads in this process.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, context, warnings.simplefilter, ("error",)) as pool:
        yield {
            first: pool.submit(wrong_results, range(first, first + CHUNK))
            for first in range(0, PROBLEMS, CHUNK)
        }
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("first", range(0, PROBLEMS, CHUNK))
def test_exact_equals_brute_force(first: int, chunks: Mapping[int, Future[list[str]]]) -> None:
    wrong = chunks[first].result()
    assert not wrong, "\n".join(wrong)


def test_the_problems_are_of_every_sort() -> None:
    # Else the comparison above would say little.
    problems = [posed(seed) for seed in range(120)]
    statuses = {solve(problem, method="brute_force").status for problem in problems}
    assert statuses == {SolveStatus.OPTIMAL, SolveStatus.INFEASIBLE}
    assert {len(problem.devices) for problem in problems} == {1, 2, 3}
    for sort in (
        any(problem.groups for problem in problems),
        any(device.pins for problem in problems for device in problem.devices),
        any(not device.available.all() for problem in problems for device in problem.devices),
        any(operator.follows for problem in problems for operator in problem.operators),
        any(problem.deadline_s is None for problem in problems),
        any(
            (np.diff(device.tensors.consumer_start) > 1).any()
            and (np.diff(device.saved.saver_start) > 1).any()
            and 10**11 < device.memory_bytes < UNLIMITED
            for problem in problems
            for device in problem.devices
        ),
    ):
        assert sort


@pytest.mark.parametrize("first", range(0, 200, CHUNK))
def test_the_deadline_is_that_of_the_fastest_plan(first: int) -> None:
    wrong = []
    for seed in range(first, first + CHUNK):
        problem = replace(tiny_problem(seed), deadline_s=None, slack=0.25)
        columns = [brute_force_fastest(problem, device) for device in problem.devices]
        solver = SOLVERS[seed % 3]  # CBC is left to the test above
        parameters = SolveParameters(
            time_limit_s=None, threads=1, solver=solver, plain=seed % 2 == 0
        )
        if any(column is None for column in columns):
            with pytest.raises(InfeasibleError):
                find_deadline(problem, parameters=parameters)
            continue
        fastest = max(
            evaluate_device(problem, device, column).iteration_time_s
            for device, column in zip(problem.devices, columns, strict=True)
            if column is not None
        )
        found = find_deadline(problem, parameters=parameters)
        if not math.isclose(found, 1.25 * fastest, rel_tol=2e-9):
            wrong.append(f"seed {seed}, {solver}: {found}, not {1.25 * fastest}")
    assert not wrong, "\n".join(wrong)


# -- to the byte --------------------------------------------------------------------------------

BYTE_WAYS = [Way(solver, plain=plain, every=1) for solver in SOLVERS for plain in (False, True)]
FP32, BF16, INT8 = Precision.FP32, Precision.BF16, Precision.INT8


def plans(problem: AllocationProblem) -> list[IntArray]:
    """Every plan of a problem of one kind without followers that keeps pins and groups."""
    (device,) = problem.devices
    rows = [np.flatnonzero(row).tolist() for row in device.available]
    everything = replace(
        problem, devices=(replace(device, memory_bytes=UNLIMITED),), deadline_s=None
    )
    columns = (np.array(picks, dtype=np.int64) for picks in itertools.product(*rows))
    return [c for c in columns if evaluate_columns(everything, [c], None).feasible]


def packed(seed: int, memory: int | None = None) -> AllocationProblem:
    """Nine operators that each save about 11 GB or about half of it: near 100 GB in all.

    The sizes differ in their last bytes, so no two plans hold the same; without `memory`
    the budget is the peak of a random plan, which a plan meets exactly.
    """
    rng = np.random.default_rng(seed)
    count = 9
    full = 11 * 10**9 + rng.integers(0, 2_000, size=count)
    half = full // 2 + rng.integers(-900, 900, size=count)
    device = DeviceKind(
        name="large",
        workers=1,
        batch_share=1.0,
        memory_bytes=UNLIMITED,
        fixed_bytes=10**9 + int(rng.integers(0, 1_000)),
        optimizer_s=0.0,
        available=np.ones((count, 2), dtype=bool),
        forward_s=np.ones((count, 2)),
        backward_s=np.ones((count, 2)),
        perturbation=np.stack([np.zeros(count), rng.uniform(0.9, 1.1, size=count)], axis=1),
        tensors=CastTensors.from_rows(
            producer=[], consumers=[], forward_s=np.zeros((0, 2, 2)), backward_s=np.zeros((0, 2, 2))
        ),
        saved=SavedTensors.from_rows(
            savers=[[o] for o in range(count)],
            size_bytes=np.stack([full, half], axis=1),
            dtypes=(FP32, BF16),
        ),
    )
    problem = AllocationProblem(
        name="packed",
        provenance="random",
        precisions=(FP32, BF16),
        storage=(FP32, BF16),
        output=(FP32, BF16),
        operators=tuple(Operator(name=f"op{o}", kind="linear") for o in range(count)),
        buckets=(),
        devices=(device,),
        deadline_s=1e3,
    )
    if memory is None:
        column = rng.integers(0, 2, size=count)
        memory = evaluate_device(problem, device, column).peak_memory_bytes
    return replace(problem, devices=(replace(device, memory_bytes=memory),))


@pytest.mark.parametrize("way", BYTE_WAYS, ids=str)
def test_one_byte_decides_whether_a_plan_exists(way: Way) -> None:
    for seed in range(2):
        problem = packed(seed)
        least = min(
            evaluate_device(problem, problem.devices[0], column).peak_memory_bytes
            for column in plans(problem)
        )
        assert 5 * 10**10 < least < 10**11
        met = solve(packed(seed, least), method="exact", parameters=way.parameters)
        assert met.status is SolveStatus.OPTIMAL, (seed, met)
        assert met.evaluation is not None
        assert met.evaluation.peak_memory_bytes == least
        exceeded = solve(packed(seed, least - 1), method="exact", parameters=way.parameters)
        assert exceeded.status is SolveStatus.INFEASIBLE, (seed, exceeded)
        assert exceeded.plan is None


@pytest.mark.parametrize("way", BYTE_WAYS, ids=str)
def test_one_byte_decides_which_plan_is_best(way: Way) -> None:
    for seed in range(2):
        problem = packed(seed)
        (device,) = problem.devices
        best = solve(problem, method="brute_force")
        assert best.evaluation is not None
        peak = best.evaluation.peak_memory_bytes
        for memory in (peak, peak - 1):
            tight = replace(problem, devices=(replace(device, memory_bytes=memory),))
            want = solve(tight, method="brute_force")
            got = solve(tight, method="exact", parameters=way.parameters)
            assert not faults(tight, want, got), (seed, memory)
        assert want.objective is not None
        assert best.objective is not None
        assert want.objective > best.objective
