"""A problem, plans, a job and a trace: everything that a report can show."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qsync_opt.optimize.compare import compare, pareto
from qsync_opt.optimize.problem import AllocationProblem
from qsync_opt.report import ReportInputs, curve_of, read_run, read_trace
from qsync_opt.simulate.replay import replay
from qsync_opt.simulate.trace import save_trace
from tests.unit.report.jobs import write_metrics


@pytest.fixture(scope="session")
def inputs(
    small_problem: AllocationProblem, tmp_path_factory: pytest.TempPathFactory
) -> ReportInputs:
    folder = tmp_path_factory.mktemp("report")
    problem = replace(small_problem, deadline_s=None, slack=0.2)
    comparison = compare(problem, methods=("exact", "greedy", "uniform"))
    plans = {row.method: row.plan for row in comparison.rows if row.plan is not None}
    assert list(plans) == ["exact", "greedy", "uniform"]
    write_metrics(folder, problem)
    save_trace(problem, replay(problem, plans["exact"]), folder / "trace.json.gz")
    return ReportInputs(
        problem=problem,
        plans=plans,
        deadline_s=comparison.deadline_s,
        comparison=comparison,
        curve=curve_of(pareto(problem, slacks=(0.0, 0.2, 0.5))),
        runs={"exact": read_run(folder), "fp32": read_run(folder)},
        steps={"exact": read_trace(problem, folder / "trace.json.gz")},
    )
