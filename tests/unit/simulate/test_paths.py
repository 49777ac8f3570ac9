"""The longest paths of each kind against the replay, and cuts made of them against all plans."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from qsync_opt.optimize.arrays import IntArray
from qsync_opt.optimize.evaluate import evaluate_device, plan_from_columns
from qsync_opt.optimize.problem import AllocationProblem
from qsync_opt.simulate.paths import KindPaths, violated
from qsync_opt.simulate.replay import replay
from qsync_opt.simulate.tasks import HostCosts
from tests.host_cases import random_hosts
from tests.tiny_problems import random_column, tiny_problem

SEEDS = range(120)


def drawn(seed: int) -> tuple[AllocationProblem, list[IntArray], dict[str, HostCosts]]:
    problem = tiny_problem(seed)
    rng = np.random.default_rng([seed, 3])
    columns = [random_column(problem, device, rng) for device in problem.devices]
    return problem, columns, random_hosts(problem, seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_slowest_kind_s_longest_path_is_the_replayed_time(seed: int) -> None:
    problem, columns, hosts = drawn(seed)
    shown = replay(problem, plan_from_columns(problem, columns), hosts=hosts).iteration_time_s
    told, worst = (
        max(
            KindPaths(problem, device, hosts[device.name], worst=case).time_s(column)
            for device, column in zip(problem.devices, columns, strict=True)
        )
        for case in (False, True)
    )
    if any(host.waits and host.overlap_slowdown > 1 for host in hosts.values()):
        assert told <= shown * (1 + 1e-12)
        assert worst >= shown * (1 - 1e-12)
    else:
        assert told == pytest.approx(shown, rel=1e-12)


def test_both_bounds_of_waiting_under_overlap_are_sometimes_apart() -> None:
    apart = 0
    for seed in SEEDS:
        problem, columns, hosts = drawn(seed)
        for device, column in zip(problem.devices, columns, strict=True):
            low, high = (
                KindPaths(problem, device, hosts[device.name], worst=case).time_s(column)
                for case in (False, True)
            )
            apart += high > low * (1 + 1e-9)
    assert apart > 10


@pytest.mark.parametrize("seed", SEEDS)
def test_a_cut_is_its_plan_s_path_and_no_longer_than_any_plan_s_time(seed: int) -> None:
    problem, columns, hosts = drawn(seed)
    rng = np.random.default_rng([seed, 4])
    for device, column in zip(problem.devices, columns, strict=True):
        for host in (hosts[device.name], replace(hosts[device.name], waits=True)):
            paths = KindPaths(problem, device, host)
            others = [random_column(problem, device, rng) for _ in range(10)]
            for path in paths.host_paths(column):
                cut = paths.cut(column, path)
                assert cut.length_s(device, column) == pytest.approx(path.time_s, rel=1e-12)
                for other in others:
                    assert cut.length_s(device, other) <= paths.time_s(other) * (1 + 1e-12)


def test_the_cases_have_paths_of_every_sort() -> None:
    names = set()
    for seed in SEEDS:
        problem, columns, hosts = drawn(seed)
        for device, column in zip(problem.devices, columns, strict=True):
            paths = KindPaths(problem, device, hosts[device.name])
            limit = evaluate_device(problem, device, column).iteration_time_s
            for path in violated(paths.host_paths(column), limit):
                words = paths.cut(column, path).name.split()
                names |= {words[0], words[-2] if "bucket" in words else words[-1]}
    assert names == {"host", "forward", "backward", "optimizer", "bucket", "compute"}


def test_without_a_host_there_are_no_host_paths() -> None:
    problem, columns, _ = drawn(0)
    for device, column in zip(problem.devices, columns, strict=True):
        paths = KindPaths(problem, device, None)
        assert paths.host_paths(column) == []
        told = evaluate_device(problem, device, column).iteration_time_s
        assert paths.time_s(column) == pytest.approx(told, rel=1e-12)
