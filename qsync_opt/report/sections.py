"""The sections of a report: each has pictures and tables, or says what it was not given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from qsync_opt import console
from qsync_opt.report import (
    memory_chart,
    pareto_chart,
    plan_tables,
    precision_map,
    timelines,
    training_charts,
)
from qsync_opt.report.inputs import ReportInputs
from qsync_opt.report.picture import Picture
from qsync_opt.report.tables import Table


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the page.

    Attributes:
        name: its id.
        title: its heading.
        text: what it says, a paragraph each.
        pictures, tables: what it shows.
        missing: why it shows nothing, or not all; empty where all is there.
    """

    name: str
    title: str
    text: tuple[str, ...] = ()
    pictures: tuple[Picture, ...] = ()
    tables: tuple[Table, ...] = ()
    missing: str = ""


def sections_of(inputs: ReportInputs) -> list[Section]:
    """All sections, in the order of the page."""
    makers: tuple[Callable[[ReportInputs], Section], ...] = (
        _plans,
        _precision,
        _timeline,
        _memory,
        _pareto,
        _losses,
        _errors,
    )
    return [make(inputs) for make in makers]


_NO_PLANS = "No plan was given (--plan), and none was asked for (--solve)."


def headline(inputs: ReportInputs) -> str:
    """What the first plan achieves, in a sentence."""
    if not inputs.plans:
        return f"{len(inputs.problem.operators)} operators on {_kinds(inputs)}; no plan yet."
    name = next(iter(inputs.plans))
    mine = inputs.evaluations[name]
    text = f"Plan {name}: {console.seconds(mine.iteration_time_s)} a step"
    if inputs.deadline_s is not None:
        text += f" of {console.seconds(inputs.deadline_s)} allowed"
    text += f", perturbation {console.number(mine.perturbation)}"
    ratios = [
        f"{rival} {other.perturbation / mine.perturbation:.4g} times that"
        for rival, other in inputs.evaluations.items()
        if rival != name and other.perturbation > mine.perturbation > 0
    ]
    return f"{text}; {', '.join(ratios)}." if ratios else f"{text}."


def _kinds(inputs: ReportInputs) -> str:
    return " and ".join(f"{d.workers} x {d.name}" for d in inputs.problem.devices)


def _plans(inputs: ReportInputs) -> Section:
    problem = inputs.problem
    text = [
        f"{len(problem.operators)} operators at {', '.join(problem.precisions)} on"
        f" {_kinds(inputs)}; {console.counted(len(problem.buckets), 'gradient bucket')}."
    ]
    if problem.provenance:
        text.append(f"Where the numbers come from: {problem.provenance.rstrip('.')}.")
    if inputs.plans and inputs.deadline_s is None:
        text.append("No deadline was given, so plans are held to the memory alone.")
    return Section(
        name="plans-section",
        title="Plans",
        text=tuple(text),
        tables=plan_tables.all_tables(inputs) if inputs.plans else (),
        missing="" if inputs.plans else _NO_PLANS,
    )


def _precision(inputs: ReportInputs) -> Section:
    title = "Precision of every operator"
    if not inputs.plans:
        return Section(name="precision-section", title=title, missing=_NO_PLANS)
    return Section(
        name="precision-section",
        title=title,
        pictures=(precision_map.picture(inputs),),
        tables=(precision_map.table(inputs),),
    )


def _timeline(inputs: ReportInputs) -> Section:
    title = "Timeline of a step"
    if not inputs.plans:
        return Section(name="timeline-section", title=title, missing=_NO_PLANS)
    traced = [name for name in inputs.plans if name in inputs.steps]
    summed = [name for name in inputs.plans if name in inputs.runs and name not in traced]
    missing = []
    if not traced and not summed:
        missing.append(
            "No step was measured: give a trace (--trace) or the metrics of training (--metrics)"
            " under the name of a plan."
        )
    elif summed:
        missing.append(
            f"Of {', '.join(summed)} no trace was given (--trace): measured lanes show sums alone."
        )
    if not inputs.hosts:
        missing.append("No costs were given (--graph, --kind): launching is taken to be free.")
    return Section(
        name="timeline-section",
        title=title,
        pictures=(timelines.picture(inputs),),
        tables=(timelines.table(inputs),),
        missing=" ".join(missing),
    )


def _memory(inputs: ReportInputs) -> Section:
    title = "Memory over the step"
    if not inputs.plans:
        return Section(name="memory-section", title=title, missing=_NO_PLANS)
    return Section(
        name="memory-section",
        title=title,
        pictures=(memory_chart.picture(inputs),),
        tables=(memory_chart.table(inputs),),
    )


def _pareto(inputs: ReportInputs) -> Section:
    title = "Perturbation against time"
    if not inputs.curve and not inputs.plans:
        missing = "Neither a curve (--pareto) nor a plan was given."
        return Section(name="pareto-section", title=title, missing=missing)
    return Section(
        name="pareto-section",
        title=title,
        pictures=(pareto_chart.picture(inputs),),
        tables=(pareto_chart.table(inputs),) if inputs.curve else (),
        missing=""
        if inputs.curve
        else "No curve was given (--pareto), and none was asked for (--solve): plans alone.",
    )


def _losses(inputs: ReportInputs) -> Section:
    title = "Training"
    if not inputs.runs:
        missing = "No metrics of training were given (--metrics)."
        return Section(name="losses-section", title=title, missing=missing)
    return Section(
        name="losses-section",
        title=title,
        pictures=(training_charts.loss_picture(inputs),),
        tables=(_run_table(inputs), training_charts.loss_table(inputs)),
    )


def _run_table(inputs: ReportInputs) -> Table:
    rows = [
        (
            name,
            rank.rank,
            rank.kind,
            rank.steps,
            run.losses[0] if run.losses else None,
            training_charts.last_loss(run.losses) if run.losses else None,
            rank.step_s,
            rank.compute_s,
            rank.wait_s,
            rank.memory_bytes,
        )
        for name, run in inputs.runs.items()
        for rank in run.ranks
    ]
    columns = (
        "job",
        "rank",
        "device_kind",
        "steps",
        "first_loss",
        "last_loss",
        "step_s",
        "compute_s",
        "wait_s",
        "memory_bytes",
    )
    return Table(
        name="ranks",
        title="Ranks (times are medians; the last loss is a moving mean; memory of a CPU is that"
        " of the process)",
        columns=columns,
        rows=tuple(rows),
    )


def _errors(inputs: ReportInputs) -> Section:
    title = "Prediction error"
    rows = training_charts.predictions(inputs) if inputs.plans or inputs.costs else []
    if not rows:
        missing = (
            "Nothing was measured that a prediction could be held against: give metrics of a job"
            " under the name of its plan (--metrics), or costs (--graph, --kind)."
        )
        return Section(name="errors-section", title=title, missing=missing)
    text: tuple[str, ...] = ()
    known = [r.error for r in inputs.replays.values() if r.error is not None]
    if known:
        text = (f"Costs measured on held-out plans promise an error of {max(known):.1%}.",)
    return Section(
        name="errors-section",
        title=title,
        text=text,
        pictures=(training_charts.error_picture(rows),),
        tables=(
            training_charts.error_table(rows),
            *((training_charts.operator_table(inputs),) if inputs.steps else ()),
        ),
    )
