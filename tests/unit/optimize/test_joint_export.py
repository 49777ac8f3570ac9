"""Bits in MPS files: the joint program out to other solvers, and plans with bits back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from qsync_opt.errors import FormatError, ParameterError
from qsync_opt.optimize.evaluate import evaluate
from qsync_opt.optimize.export import read_mps_solution, write_mps
from qsync_opt.optimize.formulation import formulate
from qsync_opt.optimize.mps_names import generic_name
from qsync_opt.optimize.mps_reader import read_linear_program
from qsync_opt.optimize.problem import AllocationProblem
from qsync_opt.optimize.solve import solve
from tests.coded_problems import tiny_coded_problem

MpsSolvers = Callable[[Sequence[Path]], Mapping[str, list[float]]]

STYLES = ("highs", "pretty", "sparse", "scip", "cbc", "cbc-all")


def feasible_problems(count: int) -> list[AllocationProblem]:
    """Tiny problems with codes and a deadline of their own, of more than one kind."""
    found = []
    for seed in range(200):
        problem = tiny_coded_problem(seed)
        wanted = problem.has_codes and problem.deadline_s is not None and len(problem.devices) > 1
        if wanted and solve(problem, method="brute_force").objective:
            found.append(problem)
        if len(found) == count:
            return found
    raise AssertionError("too few problems")


def test_exported_optimum_is_that_of_brute_force(tmp_path: Path, mps_solvers: MpsSolvers) -> None:
    problems = feasible_problems(4)
    paths = [tmp_path / f"joint{index}.mps" for index in range(len(problems))]
    for problem, path in zip(problems, paths, strict=True):
        write_mps(problem, path)
        assert read_linear_program(path).column_names == (
            formulate(problem, deadline_s=problem.deadline_s).program.column_names
        )
    found = mps_solvers(paths)
    for index, problem in enumerate(problems):
        best = solve(problem, method="brute_force").objective
        for name, objectives in found.items():
            assert objectives[index] == pytest.approx(best, rel=1e-8, abs=1e-8), name
        for style in STYLES:
            plan = read_mps_solution(problem, paths[index], f"{paths[index]}.{style}.sol")
            judged = evaluate(problem, plan)
            assert judged.feasible, style
            assert judged.perturbation == pytest.approx(best, rel=1e-8), style


def test_one_kind_alone_is_refused_and_told_what_to_do(tmp_path: Path) -> None:
    (problem,) = feasible_problems(1)
    name = problem.devices[0].name
    rule = r"device: must be None where buckets have codes.*problem\.at_bits"
    with pytest.raises(ParameterError, match=rule):
        write_mps(problem, tmp_path / "one.mps", device=name)
    with pytest.raises(ParameterError, match=rule):
        formulate(problem, device=name)
    write_mps(problem.at_bits(problem.fastest_bits), tmp_path / "one.mps", device=name)


def test_bits_must_be_decided(tmp_path: Path) -> None:
    (problem,) = feasible_problems(1)
    path, solution = tmp_path / "joint.mps", tmp_path / "joint.sol"
    write_mps(problem, path)
    formulation = formulate(problem, deadline_s=problem.deadline_s)
    assert formulation.sent is not None
    chosen = {
        int(choices[operator, column])
        for _, choices in formulation.choices
        for operator, column in enumerate((choices >= 0).argmax(axis=1).tolist())
    }
    first = next(k for k, bits in enumerate(formulation.sent.bits) if len(bits) > 1)
    for bucket, columns in enumerate(formulation.sent.columns):
        if bucket != first:
            chosen.add(int(columns[0]))

    columns = formulation.sent.columns[first].tolist()

    def written(*sent: float) -> None:
        values = dict.fromkeys(sorted(chosen), 1.0) | dict(zip(columns, sent, strict=False))
        lines = ["objective value:                        0"]
        lines += [f"{generic_name('C', i)}   {value} \t(obj:0)" for i, value in values.items()]
        solution.write_text("\n".join(lines) + "\n")

    written(1e-9, 1 - 1e-9)
    plan = read_mps_solution(problem, path, solution)
    assert plan.communication[first] == formulation.sent.bits[first][1]
    for sent in ((), (1.0, 1.0), (2.0, -1.0), (0.5, 0.5), (1 - 1e-4, 0.0)):
        written(*sent)
        with pytest.raises(FormatError, match=f"bits of bucket {first}: must have exactly one"):
            read_mps_solution(problem, path, solution)
