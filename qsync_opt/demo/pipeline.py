"""The demonstration: a task from its model to a report, and a problem from its file to one."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from qsync_opt import console
from qsync_opt.demo.devices import DemoMachine
from qsync_opt.demo.lines import Lines
from qsync_opt.demo.tasks import DemoTask
from qsync_opt.files import save_plan, write_atomically
from qsync_opt.optimize.compare import compare, pareto
from qsync_opt.optimize.comparison import Comparison, ParetoCurve
from qsync_opt.optimize.export import write_mps
from qsync_opt.optimize.problem import AllocationProblem
from qsync_opt.optimize.result import SolveParameters
from qsync_opt.plan import PrecisionPlan
from qsync_opt.report import (
    MeasuredRun,
    ReportInputs,
    curve_of,
    pareto_csv,
    read_run,
    read_trace,
    write_report,
)
from qsync_opt.simulate.replay import replay
from qsync_opt.simulate.tasks import HostCosts
from qsync_opt.simulate.trace import save_trace

#: The first is what the report shows most of.
METHODS = ("exact", "greedy", "uniform")

#: Plans that are trained, and the precision that is trained throughout as a yardstick.
_TRAINED, _YARDSTICK = ("exact", "uniform"), "fp32"

_PROBLEM_STEPS = 4
_TASK_STEPS = 4 + _PROBLEM_STEPS + len(_TRAINED) + 1


def run_task(
    machine: DemoMachine,
    task: DemoTask,
    folder: Path,
    *,
    slacks: tuple[float, ...],
    parameters: SolveParameters,
    shown: bool,
) -> tuple[dict[str, object], Comparison]:
    """A task from its model to the report in `folder`, which is emptied of an earlier one.

    Args:
        machine: the devices.
        task: the task.
        folder: where everything is written.
        slacks: of the Pareto curve, relative to the fastest feasible time.
        parameters: of every solve.
        shown: whether each step's line is written.

    Returns:
        What the steps found, by step; and the methods side by side.
    """
    from qsync_opt.demo.preparation import prepare
    from qsync_opt.demo.training import train_job

    lines = Lines(_TASK_STEPS, shown)
    folder.mkdir(parents=True, exist_ok=True)
    prepared = prepare(machine, task, folder, lines)
    problem = prepared.problem
    comparison, curve, plans = _solved(problem, folder, slacks, parameters, lines)
    predicted = _replayed(problem, plans, prepared.hosts, folder, lines)
    runs: dict[str, MeasuredRun] = {}
    for name in (*(name for name in _TRAINED if name in plans), _YARDSTICK):
        job = folder / f"train-{name}"
        shutil.rmtree(job, ignore_errors=True)
        with lines.step(f"train {name}", f"training {name}", has_progress=True) as line:
            of_plan = (folder / f"plan-{name}.json", folder / "problem.json")
            train_job(
                machine,
                task,
                prepared.graph_file,
                job,
                plan=of_plan if name in plans else None,
                uniform=None if name in plans else name,
            )
            runs[name] = read_run(job)
            line.text, line.facts = _of_run(runs[name], predicted.get(name))
    traces = {name: folder / f"train-{name}" / "trace.json.gz" for name in plans}
    inputs = ReportInputs(
        problem=problem,
        plans=plans,
        deadline_s=comparison.deadline_s,
        comparison=comparison,
        curve=curve_of(curve),
        hosts=prepared.hosts,
        costs=prepared.costs,
        runs=runs,
        steps={n: read_trace(problem, path) for n, path in traces.items() if path.is_file()},
    )
    _reported(inputs, folder, lines)
    return dict(lines.facts), comparison


def run_problem(
    problem: AllocationProblem,
    folder: Path,
    *,
    slacks: tuple[float, ...],
    parameters: SolveParameters,
    shown: bool,
) -> tuple[dict[str, object], Comparison]:
    """What can be shown of a problem alone; see `run_task`."""
    lines = Lines(_PROBLEM_STEPS, shown)
    folder.mkdir(parents=True, exist_ok=True)
    comparison, curve, plans = _solved(problem, folder, slacks, parameters, lines)
    _replayed(problem, plans, {}, folder, lines)
    inputs = ReportInputs(
        problem=problem,
        plans=plans,
        deadline_s=comparison.deadline_s,
        comparison=comparison,
        curve=curve_of(curve),
    )
    _reported(inputs, folder, lines)
    return dict(lines.facts), comparison


def _solved(
    problem: AllocationProblem,
    folder: Path,
    slacks: tuple[float, ...],
    parameters: SolveParameters,
    lines: Lines,
) -> tuple[Comparison, ParetoCurve, dict[str, PrecisionPlan]]:
    with lines.step("solve", "solving with every method") as line, console.output_dropped():
        comparison = compare(problem, methods=METHODS, parameters=parameters)
        curve = pareto(problem, slacks=slacks, methods=METHODS, parameters=parameters)
        write_atomically(folder / "pareto.csv", pareto_csv(curve).encode())
        plans = {row.method: row.plan for row in comparison.rows if row.plan is not None}
        for method, plan in plans.items():
            save_plan(plan, folder / f"plan-{method}.json")
        line.text = _of_methods(comparison)
        line.facts = {"comparison": console.comparison_to_json(comparison)}
    with lines.step("export", "writing the program as MPS") as line:
        if comparison.deadline_s is None:
            line.text = "nothing to write: no plan fits the memory"
        else:
            path = folder / "problem.mps.gz"
            write_mps(problem, path, deadline_s=comparison.deadline_s)
            line.text = f"{path.name}, {console.size(path.stat().st_size)}, for any other solver"
            line.facts = {"mps": str(path)}
    return comparison, curve, plans


def _of_methods(comparison: Comparison) -> str:
    best = comparison.best
    if best is None or best.objective is None:
        return "no plan: " + "; ".join(row.reason for row in comparison.rows if row.reason)[:200]
    gap = "" if best.gap is None else f", gap to the proven bound {console.percent(best.gap)}"
    others = [f"{row.method} {_times(row.ratio)}" for row in comparison.rows if row is not best]
    return f"{best.method} perturbs {console.number(best.objective)}{gap}; {', '.join(others)}"


def _times(ratio: float | None) -> str:
    if ratio is None:
        return "finds none"
    return "the same" if ratio < 1.0005 else f"{ratio:.4g} times that"


def _replayed(
    problem: AllocationProblem,
    plans: Mapping[str, PrecisionPlan],
    hosts: Mapping[str, HostCosts],
    folder: Path,
    lines: Lines,
) -> dict[str, float]:
    """Predicted step of every plan, seconds."""
    with lines.step("replay", "predicting a step") as line:
        found = {}
        for name, plan in plans.items():
            replayed = replay(problem, plan, hosts=hosts)
            save_trace(problem, replayed, folder / f"trace-{name}.json.gz")
            found[name] = replayed.iteration_time_s
        line.text = "predicted step: " + (
            ", ".join(f"{name} {console.seconds(time_s)}" for name, time_s in found.items())
            or "none, there is no plan"
        )
        line.facts = {"iteration_time_s": found}
    return found


def _of_run(run: MeasuredRun, predicted_s: float | None) -> tuple[str, dict[str, object]]:
    from qsync_opt.report.training_charts import last_loss

    text = f"{console.seconds(run.step_s)} a step"
    if predicted_s:
        text += f" (predicted {console.seconds(predicted_s)}, {run.step_s / predicted_s - 1:+.1%})"
    first, last = run.losses[0], last_loss(run.losses)
    facts: dict[str, object] = {"step_s": run.step_s, "predicted_s": predicted_s, "loss": last}
    return f"{text}, loss {first:.3g} to {last:.3g}", facts


def _reported(inputs: ReportInputs, folder: Path, lines: Lines) -> None:
    with lines.step("report", "drawing the report") as line:
        files = write_report(inputs, folder)
        line.text = f"{files[0]}"
        line.facts = {"report": str(files[0]), "files": [str(path) for path in files]}
