"""Problems out as MPS to HiGHS, SCIP and CBC, and their solution files back as plans."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qsync_opt.errors import FormatError, ParameterError, PlanError
from qsync_opt.optimize.arrays import IntArray
from qsync_opt.optimize.evaluate import (
    TIME_TOLERANCE,
    evaluate,
    evaluate_device,
    follower_columns,
    plan_from_columns,
)
from qsync_opt.optimize.export import read_mps_solution, write_mps
from qsync_opt.optimize.formulation import formulate
from qsync_opt.optimize.generate import generate_problem
from qsync_opt.optimize.mps_names import generic_name, names_of, sidecar_path
from qsync_opt.optimize.mps_reader import read_linear_program
from qsync_opt.optimize.problem import AllocationProblem, DeviceKind
from qsync_opt.optimize.rows import transient_bytes

MpsSolvers = Callable[[Sequence[Path]], Mapping[str, list[float]]]

STYLES = ("highs", "pretty", "sparse", "scip", "cbc", "cbc-all")


def tiny_problem(seed: int, **options: object) -> AllocationProblem:
    graph = ("branching", "chain")[seed % 2]
    given = {"operators": 5, "precisions": 3, "devices": 2, "tightness": 0.3, "graph": graph}
    return generate_problem(seed=seed, **{**given, **options})  # type: ignore[arg-type]


def all_plans(problem: AllocationProblem, device: DeviceKind) -> list[IntArray]:
    """Every plan of one kind that keeps the rule of followers."""
    free = [
        [0] if operator.follows else np.flatnonzero(device.available[index]).tolist()
        for index, operator in enumerate(problem.operators)
    ]
    return [follower_columns(problem, np.array(pick)) for pick in itertools.product(*free)]


def best_plan(problem: AllocationProblem, device: DeviceKind) -> tuple[float, IntArray]:
    """The least perturbation of one kind within memory and deadline, by trying all plans."""
    assert problem.deadline_s is not None
    best: tuple[float, IntArray] | None = None
    for column in all_plans(problem, device):
        part = evaluate_device(problem, device, column)
        in_time = part.iteration_time_s <= problem.deadline_s * (1 + TIME_TOLERANCE)
        fits = part.peak_memory_bytes <= device.memory_bytes
        if in_time and fits and (best is None or part.perturbation < best[0]):
            best = (part.perturbation, column)
    assert best is not None
    return best


def solution_text(problem: AllocationProblem, names_path: Path, columns: list[IntArray]) -> str:
    """A plan as a solution file in SCIP's style, the whole numbers only."""
    origin = names_of(names_path, names_path.read_text()).origin
    formulation = formulate(problem, deadline_s=origin.deadline_s, device=origin.device)
    lines = ["objective value:                        0"]
    chosen = {
        int(choices[operator, column])
        for kind, choices in formulation.choices
        for operator, column in enumerate(columns[kind].tolist())
    }
    lines += [f"{generic_name('C', index)}   1 \t(obj:0)" for index in sorted(chosen)]
    return "\n".join(lines) + "\n"


def test_exported_optimum_is_that_of_brute_force(tmp_path: Path, mps_solvers: MpsSolvers) -> None:
    problems, joint, alone = [], [], []
    for seed in range(4):
        problem = tiny_problem(seed)
        if seed >= 2:  # budgets met to the byte by the best plan
            kinds = []
            for device in problem.devices:
                part = evaluate_device(problem, device, best_plan(problem, device)[1])
                kinds.append(replace(device, memory_bytes=part.peak_memory_bytes))
            problem = replace(problem, devices=tuple(kinds))
        problems.append(problem)
        joint.append(tmp_path / f"joint{seed}.mps")
        write_mps(problem, joint[-1])
        alone.append(tmp_path / f"alone{seed}.mps")
        write_mps(problem, alone[-1], device=problem.devices[1].name)
    found = mps_solvers([*joint, *alone])
    for index, problem in enumerate(problems):
        parts = [best_plan(problem, device) for device in problem.devices]
        weights = [problem.weight(device) for device in problem.devices]
        total = sum(w * best for w, (best, _) in zip(weights, parts, strict=True))
        best = plan_from_columns(problem, [column for _, column in parts])
        for name, objectives in found.items():
            assert objectives[index] == pytest.approx(total, rel=1e-9, abs=1e-8), name
            one = objectives[len(joint) + index]
            assert one == pytest.approx(parts[1][0], rel=1e-9, abs=1e-8), name
        for style in STYLES:
            plan = read_mps_solution(problem, joint[index], f"{joint[index]}.{style}.sol")
            result = evaluate(problem, plan)
            assert result.feasible
            assert result.perturbation == pytest.approx(total, rel=1e-9)
            merged = read_mps_solution(
                problem, alone[index], f"{alone[index]}.{style}.sol", base_plan=best
            )
            assert evaluate(problem, merged).feasible
            assert evaluate(problem, merged).perturbation == pytest.approx(total, rel=1e-9)


def test_a_byte_less_changes_the_exported_optimum(tmp_path: Path, mps_solvers: MpsSolvers) -> None:
    problem = tiny_problem(1, devices=1)
    device = problem.devices[0]
    least, column = best_plan(problem, device)
    peak = evaluate_device(problem, device, column).peak_memory_bytes
    scale = 100 * 2**30 // peak  # to the size of a large GPU's memory
    saved = replace(device.saved, size_bytes=device.saved.size_bytes * scale)
    large = replace(
        device,
        fixed_bytes=device.fixed_bytes * scale + 1,
        forward_transient_bytes=transient_bytes(device) * scale,
        backward_transient_bytes=transient_bytes(device) * scale,
        saved=saved,
    )
    paths, expected = [], []
    for spare in (0, -1):
        kind = replace(large, memory_bytes=peak * scale + 1 + spare)
        tight = replace(problem, devices=(kind,))
        paths.append(tmp_path / f"tight{spare}.mps")
        write_mps(tight, paths[-1])
        expected.append(best_plan(tight, kind)[0])
    assert expected[0] == least < expected[1]
    for name, objectives in mps_solvers(paths).items():
        assert objectives == pytest.approx(expected, rel=1e-9, abs=1e-8), name


@given(seed=st.integers(0, 30), data=st.data(), joint=st.booleans())
def test_any_plan_survives_its_solution_file(
    tmp_path_factory: pytest.TempPathFactory, seed: int, data: st.DataObject, joint: bool
) -> None:
    problem = tiny_problem(seed)
    folder = tmp_path_factory.mktemp("plan")
    columns = [data.draw(st.sampled_from(all_plans(problem, d))) for d in problem.devices]
    plan = plan_from_columns(problem, columns)
    write_mps(problem, folder / "p.mps", device=None if joint else problem.devices[0].name)
    (folder / "p.sol").write_text(solution_text(problem, folder / "p.mps", columns))
    base = None if joint else plan
    assert read_mps_solution(problem, folder / "p.mps", folder / "p.sol", base_plan=base) == plan


def test_file_is_the_formulated_program_and_says_where_it_came_from(tmp_path: Path) -> None:
    problem = tiny_problem(0)
    for device, deadline_s in ((None, None), (problem.devices[0].name, 1.25)):
        path = tmp_path / f"{device}.mps.gz"
        write_mps(problem, path, device=device, deadline_s=deadline_s)
        used = problem.deadline_s if deadline_s is None else deadline_s
        expected = formulate(problem, deadline_s=used, device=device).program
        found = read_linear_program(path)
        assert found.column_names == expected.column_names
        np.testing.assert_array_equal(found.values, expected.values)
        np.testing.assert_array_equal(found.objective, expected.objective)
        np.testing.assert_array_equal(found.row_upper, expected.row_upper)
        origin = names_of(path, None).origin
        assert (origin.problem, origin.deadline_s) == (problem.sha256, used)
        assert origin.device == device


def test_deadline_of_a_problem_with_slack_is_found(tmp_path: Path) -> None:
    problem = replace(tiny_problem(3), deadline_s=None, slack=0.25)
    path = tmp_path / "slack.mps"
    write_mps(problem, path)
    fastest = 0.0
    for device in problem.devices:
        parts = [evaluate_device(problem, device, c) for c in all_plans(problem, device)]
        fits = [p.iteration_time_s for p in parts if p.peak_memory_bytes <= device.memory_bytes]
        fastest = max(fastest, min(fits))
    assert names_of(path, None).origin.deadline_s == pytest.approx(1.25 * fastest, rel=1e-9)


@pytest.fixture
def exported(tmp_path: Path) -> tuple[AllocationProblem, Path, Path]:
    """A problem, its joint MPS file, and a good solution file."""
    problem = tiny_problem(1)
    path = tmp_path / "problem.mps"
    write_mps(problem, path)
    columns = [best_plan(problem, device)[1] for device in problem.devices]
    solution = tmp_path / "problem.sol"
    solution.write_text(solution_text(problem, path, columns))
    return problem, path, solution


Exported = tuple[AllocationProblem, Path, Path]


def test_one_of_the_two_name_maps_is_enough(exported: Exported) -> None:
    problem, path, solution = exported
    plan = read_mps_solution(problem, path, solution)
    text = sidecar_path(path).read_text()
    sidecar_path(path).unlink()
    assert read_mps_solution(problem, path, solution) == plan
    path.unlink()
    with pytest.raises(FormatError, match="must exist, or the MPS file must carry the map"):
        read_mps_solution(problem, path, solution)
    sidecar_path(path).write_text(text)
    assert read_mps_solution(problem, path, solution) == plan


def test_values_are_rounded_within_the_tolerance_only(exported: Exported) -> None:
    problem, path, solution = exported
    text = solution.read_text()
    plan = read_mps_solution(problem, path, solution)
    solution.write_text(text.replace("   1 \t", "   0.999991 \t"))
    assert read_mps_solution(problem, path, solution) == plan
    for value in ("0.99998", "0.5", "2", "-1"):
        solution.write_text(text.replace("   1 \t", f"   {value} \t", 1))
        with pytest.raises(FormatError, match="must be within 1e-05 of 0 or 1"):
            read_mps_solution(problem, path, solution)


def test_every_operator_of_every_kind_must_be_decided(exported: Exported) -> None:
    problem, path, solution = exported
    lines = solution.read_text().splitlines(keepends=True)
    choices = sum(len(problem.operators) for _ in problem.devices)
    assert len(lines) == 1 + choices
    for index in range(1, len(lines)):
        solution.write_text("".join(lines[:index] + lines[index + 1 :]))
        with pytest.raises(FormatError, match="must have exactly one precision at 1, got '0 at 1"):
            read_mps_solution(problem, path, solution)


def test_two_precisions_of_one_operator_are_refused(exported: Exported) -> None:
    problem, path, solution = exported
    ones = solution.read_text()
    formulation = formulate(problem, deadline_s=problem.deadline_s)
    first = formulation.choices[0][1][0]
    other = next(name for c in first if c >= 0 and (name := generic_name("C", int(c))) not in ones)
    solution.write_text(ones + f"{other}   1 \t(obj:0)\n")
    with pytest.raises(FormatError, match="must have exactly one precision at 1, got '2 at 1"):
        read_mps_solution(problem, path, solution)


def test_file_of_another_problem_is_refused(exported: Exported) -> None:
    _, path, solution = exported
    with pytest.raises(PlanError, match="must be exported from this problem"):
        read_mps_solution(tiny_problem(7), path, solution)


def test_file_of_one_kind_needs_a_plan_for_the_others(tmp_path: Path) -> None:
    problem = tiny_problem(1)
    path = tmp_path / "weak.mps"
    write_mps(problem, path, device=problem.devices[0].name)
    with pytest.raises(ParameterError, match="base_plan: must be given.*'kind0' only"):
        read_mps_solution(problem, path, tmp_path / "unread.sol")


def test_map_of_other_columns_is_refused(exported: Exported) -> None:
    problem, path, solution = exported
    path.unlink()
    beside = sidecar_path(path)
    text = beside.read_text()
    first = formulate(problem, deadline_s=problem.deadline_s).program.column_names[0]
    beside.write_text(text.replace(f'"{first}"', '"x[other]"'))
    with pytest.raises(FormatError, match="must be those of the program that this release"):
        read_mps_solution(problem, path, solution)


@pytest.mark.parametrize("deadline_s", [0.0, -1.0, float("nan"), float("inf"), True, "1"])
def test_bad_deadline_is_refused(tmp_path: Path, deadline_s: float) -> None:
    with pytest.raises(ParameterError, match="deadline_s: must be a finite number > 0"):
        write_mps(tiny_problem(1), tmp_path / "p.mps", deadline_s=deadline_s)
    assert list(tmp_path.iterdir()) == []


def test_unknown_device_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="device: must be one of kind0, kind1"):
        write_mps(tiny_problem(1), tmp_path / "p.mps", device="strong")
