"""`solve_replayed` against the replay of every plan of random tiny problems."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from qsync_opt.errors import ParameterError, PlanError
from qsync_opt.optimize.arrays import IntArray
from qsync_opt.optimize.evaluate import (
    allowed_columns,
    broken_rules,
    evaluate_device,
    plan_from_columns,
)
from qsync_opt.optimize.problem import AllocationProblem, DeviceKind
from qsync_opt.optimize.result import SolveParameters, SolveResult, SolveStatus
from qsync_opt.optimize.solve import solve
from qsync_opt.plan import bits_text
from qsync_opt.replayed import solve_replayed
from qsync_opt.replayed_bits import ReplayedBits
from qsync_opt.simulate.replay import replay
from qsync_opt.simulate.tasks import HostCosts
from tests.coded_problems import tiny_coded_problem
from tests.host_cases import random_hosts
from tests.tiny_problems import tiny_problem

PROBLEMS, CHUNK = 100, 25

#: Joint plans of the largest problem that is tried whole.
MOST_PLANS = 700

ROUNDING = 1e-9


def single_plans(problem: AllocationProblem, device: DeviceKind) -> list[IntArray]:
    """Every plan of one kind that keeps its memory and rules."""
    rows = [np.flatnonzero(row).tolist() for row in allowed_columns(problem, device)]
    columns = (np.array(picks, dtype=np.int64) for picks in itertools.product(*rows))
    return [
        column
        for column in columns
        if not broken_rules(problem, device, column)
        and evaluate_device(problem, device, column).peak_memory_bytes <= device.memory_bytes
    ]


def timed_plans(
    problem: AllocationProblem, hosts: Mapping[str, HostCosts]
) -> list[tuple[float, float]] | None:
    """(objective, replayed time) of every joint plan, or None where there are too many."""
    parts = [single_plans(problem, device) for device in problem.devices]
    if math.prod(len(part) for part in parts) > MOST_PLANS:
        return None
    found = []
    for columns in itertools.product(*parts):
        objective = sum(
            problem.weight(device) * evaluate_device(problem, device, column).perturbation
            for device, column in zip(problem.devices, columns, strict=True)
        )
        plan = plan_from_columns(problem, list(columns))
        found.append((objective, replay(problem, plan, hosts=hosts).iteration_time_s))
    return found


def cases(
    seeds: range, slowdowns: tuple[float, ...], waits: bool | None = None
) -> list[tuple[int, AllocationProblem, dict[str, HostCosts], list[tuple[float, float]]]]:
    """Problems with hosts, and all their plans; half with a deadline that cuts the plans in two."""
    result = []
    for seed in seeds:
        problem = tiny_problem(seed, kinds=1 if seed % 3 else None)
        hosts = random_hosts(problem, seed, slowdowns=slowdowns)
        if waits is not None:
            hosts = {name: replace(host, waits=waits) for name, host in hosts.items()}
        plans = timed_plans(problem, hosts)
        if plans is None:
            continue
        rng = np.random.default_rng([seed, 11])
        if plans and seed % 2:
            times = sorted(time_s for _, time_s in plans)
            deadline_s = max(times[int(rng.integers(len(times)))] * 1.0001, 1e-3)
            problem = replace(problem, deadline_s=deadline_s)
        elif seed % 4 == 0:
            slack = float(rng.choice([0.0, 0.1, 0.5]))
            problem = replace(problem, deadline_s=None, slack=slack)
        result.append((seed, problem, hosts, plans))
    return result


def faults(
    problem: AllocationProblem,
    hosts: Mapping[str, HostCosts],
    plans: list[tuple[float, float]],
    got: SolveResult,
) -> list[str]:
    deadline_s = problem.deadline_s
    if deadline_s is None and plans:
        deadline_s = (1 + problem.slack) * min(time_s for _, time_s in plans)
    in_time = [o for o, t in plans if deadline_s is not None and t <= deadline_s * (1 + ROUNDING)]
    if not in_time:
        wrong = got.status is not SolveStatus.INFEASIBLE or got.plan is not None
        return [f"{got.status.name} where nothing is feasible"] if wrong else []
    if got.status is not SolveStatus.OPTIMAL or got.plan is None or got.replayed is None:
        return [f"{got.status.name}, not optimal ({got.fallback_reason})"]
    found = []
    assert deadline_s is not None
    assert got.objective is not None
    assert got.deadline_s is not None
    if not math.isclose(got.deadline_s, deadline_s, rel_tol=1e-8):
        found.append(f"deadline {got.deadline_s}, not {deadline_s}")
    if not math.isclose(got.objective, min(in_time), rel_tol=ROUNDING, abs_tol=1e-12):
        found.append(f"objective {got.objective}, not {min(in_time)}")
    if got.bound is None or got.bound > min(in_time) * (1 + ROUNDING) + 1e-12:
        found.append(f"bound {got.bound} above {min(in_time)}")
    told = replay(problem, got.plan, hosts=hosts).iteration_time_s
    if told > deadline_s * (1 + 1e-8) or got.replayed.iteration_time_s != told:
        found.append(f"replayed {told} of {got.replayed.iteration_time_s}, {deadline_s}")
    return found


EXACT = SolveParameters(relative_gap=0.0, time_limit_s=None, threads=1)


@pytest.mark.parametrize("first", range(0, PROBLEMS, CHUNK))
def test_the_optimum_under_replay_is_that_of_all_plans(first: int) -> None:
    wrong = []
    for waits, slowdowns in ((True, (1.0,)), (False, (1.0, 1.5, 3.0))):
        for seed, problem, hosts, plans in cases(range(first, first + CHUNK), slowdowns, waits):
            got = solve_replayed(problem, hosts, parameters=EXACT)
            wrong += [f"seed {seed}, {waits}: {f}" for f in faults(problem, hosts, plans, got)]
    assert not wrong, "\n".join(wrong)


def test_cuts_are_made_and_matter() -> None:
    made, off = 0, 0
    for _, problem, hosts, _ in cases(range(60), (1.0,), waits=True):
        got = solve_replayed(problem, hosts, parameters=EXACT)
        if got.replayed is None:
            continue
        made += got.replayed.cuts > 0
        off += got.replayed.additive_error < -0.05
        if got.replayed.cuts and got.deadline_s is not None:
            held = replace(problem, deadline_s=got.deadline_s, slack=0.0)
            plain = solve(held, parameters=EXACT)
            assert plain.objective is not None
            assert got.objective is not None
            assert plain.objective <= got.objective * (1 + ROUNDING)
    assert made > 10
    assert off > 10


def test_without_limiting_hosts_it_is_solve() -> None:
    for seed in range(20):
        problem = tiny_problem(seed)
        want = solve(problem, method="exact", parameters=EXACT)
        got = solve_replayed(problem, {}, parameters=EXACT)
        assert got.status is want.status
        assert got.objective == want.objective
        assert got.plan == want.plan
        if got.replayed is not None:
            assert got.replayed.cuts == 0
            assert got.replayed.additive_error == pytest.approx(0.0, abs=1e-12)


def test_waiting_hosts_under_overlap_get_plans_in_time_and_bounds_that_hold() -> None:
    statuses = set()
    for seed, problem, hosts, plans in cases(range(60), (1.5, 3.0), waits=True):
        got = solve_replayed(problem, hosts, parameters=EXACT)
        statuses.add(got.status)
        if got.plan is None or problem.deadline_s is None:
            continue
        deadline_s = problem.deadline_s * (1 + ROUNDING)
        best = min((o for o, time_s in plans if time_s <= deadline_s), default=math.inf)
        assert replay(problem, got.plan, hosts=hosts).iteration_time_s <= deadline_s, seed
        assert got.objective is not None
        assert got.bound is not None
        assert got.bound <= best * (1 + ROUNDING) + 1e-12, seed
        assert got.objective >= best * (1 - ROUNDING) - 1e-12, seed
        if got.status is SolveStatus.OPTIMAL:
            assert got.objective == pytest.approx(best, rel=ROUNDING, abs=1e-12), seed
    assert SolveStatus.OPTIMAL in statuses


@pytest.mark.parametrize(("solver", "plain"), [("scip", False), ("highs", True), ("scip", True)])
def test_other_back_ends_and_whole_programs_agree(solver: str, plain: bool) -> None:
    parameters = replace(EXACT, solver=solver, plain=plain, relative_gap=1e-6)
    for _, problem, hosts, _ in cases(range(30, 50), (1.0,), waits=True):
        want = solve_replayed(problem, hosts, parameters=EXACT)
        got = solve_replayed(problem, hosts, parameters=parameters)
        assert got.status is want.status
        if want.objective is None:
            assert got.objective is None
        else:
            assert got.objective == pytest.approx(want.objective, rel=2e-6, abs=1e-12)


def test_bits_and_precisions_are_the_best_of_all_that_are_in_time() -> None:
    """Against the replay of every plan at all bits."""
    found = changed = 0
    for seed in range(90):
        problem = tiny_coded_problem(seed)
        if not problem.has_codes:
            continue
        hosts = random_hosts(problem, seed, slowdowns=(1.0,))
        if seed % 4 == 0:
            hosts = {}
        got = solve_replayed(problem, hosts, parameters=EXACT)
        if got.plan is None or got.deadline_s is None or got.objective is None:
            assert got.status is SolveStatus.INFEASIBLE, seed
            continue
        free = solve(replace(problem, deadline_s=got.deadline_s, slack=0.0), parameters=EXACT)
        assert f"gradients are sent in {bits_text(got.plan.communication)}" in got.notes[-1]
        told = replay(problem, got.plan, hosts=hosts).iteration_time_s
        assert told <= got.deadline_s * (1 + 1e-8), seed
        assert free.plan is not None
        assert free.objective is not None
        assert got.bound is not None
        assert free.objective <= got.objective * (1 + ROUNDING)
        least = math.inf
        choices = [[code.bits for code in bucket.choices] for bucket in problem.buckets]
        for bits in itertools.product(*choices):
            plans = timed_plans(problem.at_bits(bits), hosts)
            if plans is None:
                break
            added = problem.bits_perturbation(bits)
            in_time = [o for o, t in plans if t <= got.deadline_s * (1 + ROUNDING)]
            least = min([least, *(o + added for o in in_time)])
        else:
            assert got.objective == pytest.approx(least, rel=ROUNDING, abs=1e-12), seed
            assert got.status is SolveStatus.OPTIMAL, seed
            assert got.bound <= least * (1 + ROUNDING)
            found += 1
            changed += got.plan.communication != free.plan.communication
    assert found > 20
    assert changed >= 2


def test_no_time_for_bits_is_no_proof() -> None:
    """A plan of the relaxation, which hosts make late, must not pass for an answer."""
    found = 0
    for seed in range(12):
        problem = tiny_coded_problem(seed)
        if not problem.has_codes:
            continue
        hosts = random_hosts(problem, seed, slowdowns=(1.0,))
        fastest = solve_replayed(replace(problem, deadline_s=None), hosts).fastest_time_s
        if fastest is None:
            continue
        late = replace(problem, deadline_s=fastest * 1.1, slack=0.0)
        with pytest.MonkeyPatch.context() as patch:
            # Time is up as soon as the relaxation is solved.
            patch.setattr(ReplayedBits, "_is_over", lambda self: True)
            got = solve_replayed(late, hosts)
        assert got.plan is None
        assert got.objective is None
        assert got.status in (SolveStatus.NO_PLAN_FOUND, SolveStatus.INFEASIBLE), seed
        found += got.status is SolveStatus.NO_PLAN_FOUND
    assert found > 3


def test_bits_that_hosts_leave_no_room_for_are_proven_to_have_no_plan() -> None:
    found = 0
    for seed in range(20):
        problem = tiny_coded_problem(seed)
        hosts = random_hosts(problem, seed, slowdowns=(1.0,))
        fastest = solve_replayed(replace(problem, deadline_s=None), hosts).fastest_time_s
        if not problem.has_codes or fastest is None:
            continue
        late = solve_replayed(replace(problem, deadline_s=fastest * 0.999, slack=0.0), hosts)
        assert late.status is SolveStatus.INFEASIBLE
        assert late.plan is None
        found += 1
    assert found > 5


def test_bad_input_is_named() -> None:
    problem = tiny_problem(0)
    hosts = random_hosts(problem, 0)
    with pytest.raises(ParameterError, match="method.*hosts"):
        solve_replayed(problem, hosts, method="greedy")
    with pytest.raises(ParameterError, match="hosts.*nobody"):
        solve_replayed(problem, {"nobody": next(iter(hosts.values()))})
    small = HostCosts(forward_s=np.zeros((1, 1)), backward_s=np.zeros((1, 1)))
    with pytest.raises(ParameterError, match="operators by precisions"):
        solve_replayed(problem, {problem.devices[0].name: small})
    other = solve(tiny_problem(1), method="fastest").plan
    with pytest.raises(PlanError, match="problem"):
        solve_replayed(problem, hosts, hint=other)
