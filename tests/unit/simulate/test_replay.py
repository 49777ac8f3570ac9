"""The replay against the iteration time of `evaluate`, and against a plain event simulation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from qsync_opt.errors import ParameterError, PlanError
from qsync_opt.optimize.arrays import IntArray
from qsync_opt.optimize.evaluate import evaluate, plan_from_columns
from qsync_opt.optimize.generate import generate_problem
from qsync_opt.optimize.problem import AllocationProblem
from qsync_opt.optimize.solve import solve
from qsync_opt.plan import PrecisionPlan
from qsync_opt.precision import Precision
from qsync_opt.simulate.memory import memory_timeline
from qsync_opt.simulate.replay import replay
from qsync_opt.simulate.tasks import HostCosts, Tasks, Work, device_tasks
from tests.coded_problems import tiny_coded_problem
from tests.tiny_problems import random_column, tiny_problem

SEEDS = range(150)


def drawn(seed: int) -> tuple[AllocationProblem, list[IntArray], PrecisionPlan]:
    problem = tiny_problem(seed)
    rng = np.random.default_rng(seed)
    columns = [random_column(problem, device, rng) for device in problem.devices]
    return problem, columns, plan_from_columns(problem, columns)


def hosts_of(problem: AllocationProblem, seed: int, scale: float) -> dict[str, HostCosts]:
    rng = np.random.default_rng([seed, 7])
    result = {}
    for device in problem.devices:
        typical = scale * max(float(device.forward_s.mean()), 1e-9)
        shape = device.forward_s.shape
        result[device.name] = HostCosts(
            forward_s=rng.uniform(0, 2 * typical, size=shape),
            backward_s=rng.uniform(0, 2 * typical, size=shape),
            optimizer_s=float(rng.uniform(0, typical)),
            overlap_slowdown=float(rng.choice([1.0, 1.3, 2.0])),
            waits=bool(rng.random() < 0.4),
            error=float(rng.uniform(0, 0.1)),
        )
    return result


@pytest.mark.parametrize("seed", SEEDS)
def test_without_a_host_the_replay_is_evaluate(seed: int) -> None:
    problem, _, plan = drawn(seed)
    told, shown = evaluate(problem, plan), replay(problem, plan)
    assert shown.iteration_time_s == pytest.approx(told.iteration_time_s, rel=1e-12)
    assert shown.error is None
    for device in problem.devices:
        part, kind = told.devices[device.name], shown.kinds[device.name]
        np.testing.assert_allclose(kind.ready_s, part.ready_s, rtol=1e-12)
        assert kind.end_s[-1] == pytest.approx(part.compute_s, rel=1e-12)
        assert kind.compute_s == pytest.approx(part.forward_s + part.backward_s, rel=1e-12)
        casts = part.cast_forward_s + part.cast_backward_s
        assert kind.cast_s == pytest.approx(casts, rel=1e-9, abs=1e-15)
        assert kind.optimizer_s == pytest.approx(device.optimizer_s)
        assert kind.host_bound_s == pytest.approx(0.0, abs=1e-9 * part.compute_s)
        assert kind.memory.peak_bytes == part.peak_memory_bytes


def simulated(
    problem: AllocationProblem, columns: list[IntArray], hosts: dict[str, HostCosts], steps: int
) -> float:
    """The period, by advancing every rank from event to event: no formula of the replay."""
    ranks = [
        (device_tasks(problem, device, column, hosts[device.name]), hosts[device.name])
        for device, column in zip(problem.devices, columns, strict=True)
    ]
    host_free = [0.0] * len(ranks)
    begin, period = 0.0, 0.0
    for _ in range(steps):
        launched = []
        for number, (tasks, host) in enumerate(ranks):
            times, now = [], begin if host.waits else host_free[number]
            for seconds in tasks.launch_s.tolist():
                now += seconds
                times.append(now)
            host_free[number] = now
            launched.append(times)
        clock = begin
        done = [0] * len(ranks)
        left = [tasks.duration_s.tolist()[0] for tasks, _ in ranks]
        buckets, reducing, network = 0, 0.0, False
        while True:
            # Start the next all-reduce once every rank has come far enough.
            ready = buckets < len(problem.buckets) and all(
                done[n] >= tasks.ready[buckets] for n, (tasks, _) in enumerate(ranks)
            )
            if not network and ready:
                network, reducing = True, problem.buckets[buckets].all_reduce_s
            if network and reducing <= 0:
                network, buckets = False, buckets + 1
                continue
            # The time to the next event at the present speeds.
            ahead = [reducing] if network else []
            speeds = []
            for n, (tasks, host) in enumerate(ranks):
                speed = 0.0
                if done[n] < len(tasks.duration_s):
                    wait = launched[n][done[n]] - clock
                    if wait > 1e-15 * max(clock, 1e-300):
                        ahead.append(wait)
                    else:
                        speed = 1.0 / host.overlap_slowdown if network else 1.0
                        ahead.append(left[n] / speed)
                speeds.append(speed)
            if not ahead:
                break
            step = max(min(ahead), 0.0)
            clock += step
            reducing = max(reducing - step, 0.0) if network else 0.0
            if network and step == min(ahead) == ahead[0]:
                reducing = 0.0
            for n, (tasks, _) in enumerate(ranks):
                if speeds[n]:
                    left[n] -= step * speeds[n]
                    if left[n] <= 1e-12 * tasks.duration_s[done[n]]:
                        done[n] += 1
                        if done[n] < len(tasks.duration_s):
                            left[n] = float(tasks.duration_s[done[n]])
        period, begin = clock - begin, clock
    return period


@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("seed", range(0, 150, 3))
def test_the_replay_is_the_event_simulation(seed: int, scale: float) -> None:
    problem, columns, plan = drawn(seed)
    hosts = hosts_of(problem, seed, scale)
    shown = replay(problem, plan, hosts=hosts)
    # From a cold start it takes some steps until only the slowest host still limits.
    assert shown.iteration_time_s == pytest.approx(simulated(problem, columns, hosts, 60), rel=1e-9)
    assert shown.error == max(host.error for host in hosts.values() if host.error is not None)


def test_the_cases_meet_every_limit() -> None:
    """Host-bound and device-bound steps, waiting ranks, and overlap that costs."""
    bound, waited, stretched = set(), set(), set()
    for seed in SEEDS:
        problem, _, plan = drawn(seed)
        shown = replay(problem, plan, hosts=hosts_of(problem, seed, 1.0))
        plain = replay(problem, plan)
        for name, kind in shown.kinds.items():
            bound.add(kind.host_bound_s > 1e-6 * shown.iteration_time_s)
            waited.add(kind.waiting_s > 1e-6 * shown.iteration_time_s)
            stretched.add(kind.compute_s > 1.001 * plain.kinds[name].compute_s)
    assert bound == waited == stretched == {True, False}


@pytest.mark.parametrize("seed", range(20))
def test_buckets_are_reduced_in_the_bits_of_the_plan(seed: int) -> None:
    problem = tiny_coded_problem(seed)
    rng = np.random.default_rng(seed)
    columns = [random_column(problem, device, rng) for device in problem.devices]
    bits = [int(rng.choice([c.bits for c in bucket.choices])) for bucket in problem.buckets]
    plan = plan_from_columns(problem, columns, bits)
    shown = replay(problem, plan)
    assert shown.iteration_time_s == pytest.approx(
        evaluate(problem, plan).iteration_time_s, rel=1e-12
    )
    fixed = problem.at_bits(bits)
    took = shown.reduce_end_s - shown.reduce_start_s
    np.testing.assert_allclose(took, [b.all_reduce_s for b in fixed.buckets], atol=1e-9)
    if problem.has_codes:
        with pytest.raises(PlanError, match="communication"):
            replay(problem, replace(plan, communication=(8,) * (len(bits) + 1)))


@pytest.mark.parametrize("seed", range(0, 150, 10))
def test_a_slower_host_or_overlap_never_ends_sooner(seed: int) -> None:
    problem, _, plan = drawn(seed)
    times = []
    for scale in (0.0, 0.5, 1.0, 2.0, 8.0):
        hosts = {
            n: replace(h, overlap_slowdown=1.5) for n, h in hosts_of(problem, seed, scale).items()
        }
        times.append(replay(problem, plan, hosts=hosts).iteration_time_s)
    assert (np.diff(times) >= -1e-12 * times[-1]).all()


def test_a_host_that_limits_sets_the_pace() -> None:
    problem = generate_problem(operators=20, devices=1, seed=0)
    plan = solve(problem, method="uniform").plan
    assert plan is not None
    (device,) = problem.devices
    shape = device.forward_s.shape
    host = HostCosts(forward_s=np.full(shape, 1.0), backward_s=np.full(shape, 2.0), optimizer_s=0.5)
    shown = replay(problem, plan, hosts={device.name: host})
    assert shown.iteration_time_s == pytest.approx(20 * 3.0 + 0.5, rel=1e-2)


@pytest.mark.parametrize("seed", SEEDS)
def test_tasks_come_in_order_and_casts_before_who_asks(seed: int) -> None:
    problem, columns, _ = drawn(seed)
    for device, column in zip(problem.devices, columns, strict=True):
        tasks = device_tasks(problem, device, column, None)
        works = [Tasks.WORKS[work] for work in tasks.work.tolist()]
        operators = tasks.operator.tolist()
        forward = [o for w, o in zip(works, operators, strict=True) if w is Work.FORWARD]
        backward = [o for w, o in zip(works, operators, strict=True) if w is Work.BACKWARD]
        assert works[0] is Work.OPTIMIZER
        assert forward == list(range(len(column)))
        assert backward == forward[::-1]
        for index, (work, operator) in enumerate(zip(works, operators, strict=True)):
            if work in (Work.FORWARD_CAST, Work.BACKWARD_CAST):
                following = next(
                    i for i in range(index, len(works)) if works[i] in (Work.FORWARD, Work.BACKWARD)
                )
                assert operators[following] == operator


@pytest.mark.parametrize("seed", SEEDS)
def test_memory_is_what_lives(seed: int) -> None:
    problem, columns, _ = drawn(seed)
    count = len(problem.operators)
    for device, column in zip(problem.devices, columns, strict=True):
        shown = memory_timeline(problem, device, column)
        for point in range(2 * count):
            operator = point if point < count else 2 * count - 1 - point
            want: dict[Precision, int] = {}
            for tensor in range(len(device.saved)):
                savers = device.saved.savers_of(tensor).tolist()
                if min(savers) <= operator:
                    for dtype in {problem.storage[column[saver]] for saver in savers}:
                        size = device.saved.size_bytes[tensor, device.saved.dtypes.index(dtype)]
                        want[dtype] = want.get(dtype, 0) + int(size)
            terms = shown.terms_at(point)
            assert sum(terms.values()) == int(shown.total_bytes[point])
            for dtype, size in want.items():
                assert terms.get(f"saved {dtype}", 0) == size


def test_a_hundred_kinds_of_a_thousand_operators_are_replayed_whole() -> None:
    problem = generate_problem(operators=1_000, devices=2, seed=0)
    first = problem.devices[0]
    share = 1 / 100
    devices = tuple(
        replace(first, name=f"kind{i}", workers=1, batch_share=share) for i in range(100)
    )
    problem = replace(problem, devices=devices)
    column = np.array([int(np.flatnonzero(row)[0]) for row in first.available])
    plan = plan_from_columns(problem, [column] * 100)
    shown = replay(problem, plan)
    assert len(shown.kinds) == 100
    assert shown.iteration_time_s == pytest.approx(evaluate(problem, plan).iteration_time_s)


def test_bad_input_is_named() -> None:
    problem, _, plan = drawn(0)
    shape = problem.devices[0].forward_s.shape
    good = HostCosts(forward_s=np.zeros(shape), backward_s=np.zeros(shape))
    with pytest.raises(ParameterError, match="hosts.*nobody"):
        replay(problem, plan, hosts={"nobody": good})
    small = HostCosts(forward_s=np.zeros((1, 1)), backward_s=np.zeros((1, 1)))
    with pytest.raises(ParameterError, match="operators by precisions"):
        replay(problem, plan, hosts={problem.devices[0].name: small})
    with pytest.raises(ParameterError, match="overlap_slowdown"):
        replace(good, overlap_slowdown=0.5)
    with pytest.raises(ParameterError, match="forward_s"):
        replace(good, forward_s=np.full(shape, -1.0))
    with pytest.raises(ParameterError, match="error"):
        replace(good, error=float("inf"))
    with pytest.raises(ParameterError, match="optimizer_s"):
        replace(good, optimizer_s=float("nan"))
    with pytest.raises(PlanError, match="problem"):
        replay(tiny_problem(1), plan)
