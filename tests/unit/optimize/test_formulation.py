"""`formulate` against `evaluate`: a plan keeps every row if and only if it is feasible.

The columns beside the choices are set by their definitions (`Formulation`'s module): a flow
and a paid cast are products of choices, a copy is kept if a saver asks for it, a carry is the
least that its low row asks for. No other values could satisfy rows that these break.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace

import numpy as np
import pytest

from qsync_opt.errors import ParameterError
from qsync_opt.optimize.arrays import BoolArray, FloatArray, IntArray
from qsync_opt.optimize.backends import solve_program
from qsync_opt.optimize.byte_rows import add_byte_rows
from qsync_opt.optimize.evaluate import (
    TIME_TOLERANCE,
    allowed_columns,
    evaluate_columns,
    evaluate_device,
)
from qsync_opt.optimize.formulation import Formulation, formulate
from qsync_opt.optimize.linear import LazyNames, LinearProgram, ProgramBuilder
from qsync_opt.optimize.problem import AllocationProblem, DeviceKind
from qsync_opt.optimize.result import SolveStatus
from qsync_opt.optimize.solve import solve
from qsync_opt.precision import Precision
from tests.tiny_problems import UNLIMITED, random_column, tiny_problem

SEEDS = 60
_NAME = re.compile(r"(\w+)\[([^\]]*)\](.*)")


def values_of(
    problem: AllocationProblem, formulation: Formulation, columns: list[IntArray]
) -> FloatArray:
    """The value of every column of the program under a plan, by the columns' definitions."""
    program = formulation.program
    values = np.zeros(len(program.objective))
    carries = []
    for index, name in enumerate(program.column_names):
        match = _NAME.fullmatch(name)
        assert match is not None, name
        letter, inside, rest = match.groups()
        kind, *parts = inside.split(",")
        if rest == " carry":
            carries.append((index, name.removesuffix(" carry")))
            continue
        assert not rest, name
        if letter in "TM":
            continue
        device = problem.devices[problem.device_index[kind]]
        column = columns[problem.device_index[kind]]
        values[index] = _DEFINITIONS[letter](problem, device, column, parts)
    for index, row in carries:
        line = program.row_names.index(f"{row} low")
        over = program.activity(values)[line] - program.row_upper[line]
        factor = -entry(program, line, index)
        values[index] = max(0, math.ceil(over / factor))
    for index, name in enumerate(program.column_names):
        if name[:2] in ("T[", "M["):
            values[index] = least_clock(program, values, index)
    return values


def _x(problem: AllocationProblem, _: DeviceKind, column: IntArray, parts: list[str]) -> bool:
    operator, precision = parts
    return problem.precisions[column[problem.operator_index[operator]]] is Precision(precision)


def _t(_: AllocationProblem, device: DeviceKind, column: IntArray, parts: list[str]) -> bool:
    tensor, consumer, p, q = map(int, parts)
    return bool(column[device.tensors.producer[tensor]] == p and column[consumer] == q)


def _z(_: AllocationProblem, device: DeviceKind, column: IntArray, parts: list[str]) -> bool:
    tensor, p, q = map(int, parts)
    asks = bool((column[device.tensors.consumers_of(tensor)] == q).any())
    return asks and bool(column[device.tensors.producer[tensor]] == p)


def _k(problem: AllocationProblem, device: DeviceKind, column: IntArray, parts: list[str]) -> bool:
    tensor, dtype = int(parts[0]), Precision(parts[1])
    return any(problem.storage[column[o]] is dtype for o in device.saved.savers_of(tensor))


_DEFINITIONS = {"x": _x, "t": _t, "z": _z, "k": _k}


def entry(program: LinearProgram, row: int, column: int) -> float:
    """One coefficient, 0 where there is none."""
    stretch = slice(int(program.row_start[row]), int(program.row_start[row + 1]))
    here = program.columns[stretch] == column
    return float(program.values[stretch][here].sum())


def least_clock(program: LinearProgram, values: FloatArray, clock: int) -> float:
    """The least value of an objective column that its rows allow."""
    over = program.activity(values) - program.row_upper
    rows = [row for row in range(len(over)) if entry(program, row, clock) == -1.0]
    return max(0.0, *(float(over[row]) for row in rows))


def broken(program: LinearProgram, values: FloatArray) -> list[str]:
    """Names of the rows and columns that some values break."""
    activity = program.activity(values)
    # Rows of time are near 1e4; all others hold whole numbers.
    time = np.array([name.startswith(("time", "least")) for name in program.row_names])
    room = np.where(time, 1e-8, 0.25)
    wrong = (activity > program.row_upper + room) | (activity < program.row_lower - room)
    outside = (values < program.lower) | (values > program.upper)
    return [name for name, bad in zip(program.row_names, wrong, strict=True) if bad] + [
        name for name, bad in zip(program.column_names, outside, strict=True) if bad
    ]


def unlimited(problem: AllocationProblem) -> AllocationProblem:
    devices = [replace(device, memory_bytes=UNLIMITED) for device in problem.devices]
    return replace(problem, devices=tuple(devices))


def some_plans(
    problem: AllocationProblem, rng: np.random.Generator, most: int
) -> list[list[IntArray]]:
    """Random plans in which pins and groups agree; half of them with stray followers.

    Pins and groups are kept by having no column for anything else.
    """
    plans = []
    for number in range(most):
        columns = []
        for device in problem.devices:
            allowed = allowed_columns(problem, device)
            masked = replace(device, available=allowed, pins={})
            column = random_column(problem, masked, rng)
            if number % 2:
                column = np.array([rng.choice(np.flatnonzero(row)) for row in allowed])
            for group in problem.groups:
                rows = [problem.operator_index[name] for name in group]
                column[rows] = column[rows[0]]
            columns.append(column)
        if all(
            allowed_columns(problem, device)[np.arange(len(column)), column].all()
            for device, column in zip(problem.devices, columns, strict=True)
        ):
            plans.append(columns)
    return plans


def near_the_deadline(problem: AllocationProblem, columns: list[IntArray]) -> bool:
    """Whether a time is so near its limit that half a tolerance decides."""
    assert problem.deadline_s is not None
    limit = problem.deadline_s * (1 + 0.75 * TIME_TOLERANCE)
    return any(
        abs(evaluate_device(problem, device, column).iteration_time_s / limit - 1)
        < 0.5 * TIME_TOLERANCE
        for device, column in zip(problem.devices, columns, strict=True)
    )


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_plan_keeps_every_row_if_and_only_if_it_is_feasible(seed: int) -> None:
    problem = tiny_problem(seed)
    joint = formulate(problem, deadline_s=problem.deadline_s)
    for columns in some_plans(problem, np.random.default_rng(seed), 30):
        if near_the_deadline(problem, columns):
            continue
        judged = evaluate_columns(problem, columns, problem.deadline_s)
        values = values_of(problem, joint, columns)
        wrong = broken(joint.program, values)
        assert bool(wrong) is not judged.feasible, (wrong, judged.violations)
        for (index, found), column in zip(joint.read(values), columns, strict=True):
            np.testing.assert_array_equal(found, column)
            assert index == problem.device_index[problem.devices[index].name]
        objective = float(joint.program.objective @ values) * joint.objective_unit
        assert objective == pytest.approx(judged.perturbation, rel=1e-12)


def test_the_plans_tried_are_of_both_sorts() -> None:
    verdicts = {True: 0, False: 0}
    resources = set()
    carries = 0
    for seed in range(SEEDS):
        problem = tiny_problem(seed)
        program = formulate(problem, deadline_s=problem.deadline_s).program
        carries += sum(name.endswith("carry") for name in program.column_names)
        for columns in some_plans(problem, np.random.default_rng(seed), 30):
            judged = evaluate_columns(problem, columns, problem.deadline_s)
            verdicts[judged.feasible] += 1
            resources |= {violation.resource for violation in judged.violations}
    assert min(verdicts.values()) > 200
    assert resources == {"memory", "deadline", "follower"}
    assert carries > 50


@pytest.mark.parametrize("objective", ["time", "memory"])
@pytest.mark.parametrize("seed", range(0, SEEDS, 2))
def test_the_objective_columns_are_what_evaluate_says(seed: int, objective: str) -> None:
    problem = unlimited(tiny_problem(seed))
    rng = np.random.default_rng(seed)
    plans = some_plans(problem, rng, 12)[::2]
    for index, device in enumerate(problem.devices):
        built = formulate(problem, device=device.name, objective=objective)
        for columns in plans:
            part = evaluate_device(problem, device, columns[index])
            values = values_of(problem, built, columns)
            found = float(built.program.objective @ values) * built.objective_unit
            held = part.peak_memory_bytes - device.fixed_bytes
            expected = part.iteration_time_s if objective == "time" else held
            assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_the_joint_program_solved_at_once_gives_the_optimum(seed: int) -> None:
    problem = tiny_problem(seed)
    want = solve(problem, method="brute_force")
    joint = formulate(problem, deadline_s=problem.deadline_s)
    answer = solve_program(joint.program, relative_gap=0.0)
    if want.status is SolveStatus.INFEASIBLE:
        assert answer.status == "infeasible"
        return
    assert answer.values is not None
    columns = [column for _, column in joint.read(answer.values)]
    judged = evaluate_columns(problem, columns, problem.deadline_s)
    assert judged.feasible, judged.violations
    assert judged.perturbation == pytest.approx(want.objective, rel=1e-9)


@pytest.mark.parametrize("seed", range(0, SEEDS, 2))
def test_a_program_over_some_options_holds_the_plans_of_these_options(seed: int) -> None:
    problem = tiny_problem(seed)
    rng = np.random.default_rng(seed)
    assert problem.deadline_s is not None
    for device in problem.devices:
        domain: BoolArray = allowed_columns(problem, device).copy()
        drop = rng.random(domain.shape) < 0.2
        for group in problem.groups:  # members lose the same options
            rows = [problem.operator_index[name] for name in group]
            drop[rows] = drop[rows[0]]
        domain &= ~drop
        built = formulate(
            problem, deadline_s=problem.deadline_s, device=device.name, domains=[domain]
        )
        answer = solve_program(built.program, relative_gap=0.0)
        alone = replace(problem, devices=(replace(device, batch_share=1 / device.workers),))
        picks = itertools.product(*(np.flatnonzero(row).tolist() for row in domain))
        judged = [
            evaluate_columns(alone, [np.array(column)], problem.deadline_s) for column in picks
        ]
        least = min((j.perturbation for j in judged if j.feasible), default=math.inf)
        assert (answer.status == "infeasible") is (least == math.inf)
        if answer.values is not None:
            ((_, column),) = built.read(answer.values)
            found = evaluate_device(problem, device, column).perturbation
            assert found * alone.weight(alone.devices[0]) == pytest.approx(least, rel=1e-9)


# -- byte rows ----------------------------------------------------------------------------------


def byte_program(sizes: IntArray, budget: int) -> LinearProgram:
    builder = ProgramBuilder("bytes", named=False)
    columns = builder.add_columns(LazyNames(len(sizes), list), integer=True)
    add_byte_rows(builder, "memory", columns, sizes, budget)
    return builder.build()


@pytest.mark.parametrize("scale", [1, 10**3, 10**6, 10**9, 10**11])
@pytest.mark.parametrize("seed", range(30))
def test_byte_rows_hold_exactly_where_the_sum_does(seed: int, scale: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(0, 2 * scale, size=5) * int(rng.integers(1, 4))
    picks = np.array(list(itertools.product([0, 1], repeat=5)), dtype=np.int64)
    sums = picks @ sizes
    total = int(sums[int(rng.integers(len(sums)))])
    for budget in (total, total - 1, total + 1, 0, -1, int(sizes.sum())):
        program = byte_program(sizes, budget)
        carries = range(5, len(program.objective))
        for pick, amount in zip(picks.astype(np.float64), sums.tolist(), strict=True):
            values = np.zeros(len(program.objective))
            values[:5] = pick
            # Some whole carry must do: the least that the low row, the last one, asks for.
            for carry in carries:
                over = program.activity(values)[-1] - program.row_upper[-1]
                values[carry] = max(
                    0, math.ceil(over / -entry(program, program.shape[0] - 1, carry))
                )
                assert values[carry] <= program.upper[carry] or amount > budget
            kept = (program.activity(values) <= program.row_upper).all()
            assert kept == (amount <= budget)


@pytest.mark.parametrize("scale", [10**3, 10**9, 10**11])
def test_coefficients_are_large_enough_to_see_and_small_enough_to_trust(scale: int) -> None:
    rng = np.random.default_rng(0)
    sizes = rng.integers(scale, 2 * scale, size=40) | 1
    program = byte_program(sizes, int(sizes.sum() // 2))
    assert np.abs(program.values).max() <= 2.0**22
    assert np.abs(program.values)[program.values != 0].min() >= 1.0


# -- refusals -----------------------------------------------------------------------------------


def test_wrong_arguments_are_refused() -> None:
    problem = tiny_problem(0)
    with pytest.raises(ParameterError, match="objective"):
        formulate(problem, objective="speed")
    with pytest.raises(ParameterError, match="device: must be one of"):
        formulate(problem, device="nobody")
    for objective in ("time", "memory"):
        with pytest.raises(ParameterError, match="device: must be given"):
            formulate(problem, objective=objective)


def test_names_are_unique_and_numbers_without_them() -> None:
    problem = tiny_problem(6)
    named = formulate(problem, deadline_s=problem.deadline_s).program
    assert len(set(named.column_names)) == len(named.column_names)
    assert len(set(named.row_names)) == len(named.row_names)
    plain = formulate(problem, deadline_s=problem.deadline_s, named=False).program
    np.testing.assert_array_equal(plain.values, named.values)
    np.testing.assert_array_equal(plain.columns, named.columns)
    np.testing.assert_array_equal(plain.row_upper, named.row_upper)
