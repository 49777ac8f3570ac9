"""Training: the loss of every job by step, and how far predictions were from what came."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from qsync_opt.optimize.arrays import FloatArray
from qsync_opt.optimize.baselines import uniform_candidates
from qsync_opt.report import looks
from qsync_opt.report.inputs import ReportInputs
from qsync_opt.report.picture import Picture
from qsync_opt.report.tables import Table
from qsync_opt.report.timelines import first_rank

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Steps over which a line of losses is averaged: a tenth of them, up to this.
_MOST_AVERAGED = 25


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedTime:
    """A time that was predicted, and then measured."""

    what: str
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """Relative to the prediction; positive where it took longer."""
        return self.measured_s / self.predicted_s - 1 if self.predicted_s else float("nan")


def loss_picture(inputs: ReportInputs) -> Picture:
    """A line for every job."""
    losses = {name: np.array(run.losses) for name, run in inputs.runs.items()}
    words = [
        f"{name}: from {rows[0]:.4g} to {smoothed(rows)[-1]:.4g} in {len(rows)} steps."
        for name, rows in losses.items()
        if len(rows)
    ]
    return Picture(
        name="losses",
        title="Training loss by step, over all ranks (thin: each step; thick: moving mean)",
        description=" ".join(words),
        draw=lambda width: _draw_losses(losses, inputs.names, min(width, 6.4)),
    )


def loss_table(inputs: ReportInputs) -> Table:
    """One row per step, one column per job."""
    steps = max((len(run.losses) for run in inputs.runs.values()), default=0)
    rows = [
        (
            step,
            *(run.losses[step] if step < len(run.losses) else None for run in inputs.runs.values()),
        )
        for step in range(steps)
    ]
    return Table(
        name="losses",
        title="Loss of every step",
        columns=("step", *inputs.runs),
        rows=tuple(rows),
    )


def smoothed(losses: FloatArray) -> FloatArray:
    """The mean of the last steps, at every step."""
    window = max(1, min(_MOST_AVERAGED, len(losses) // 10))
    sums = np.cumsum(np.append(0.0, losses))
    first = np.maximum(np.arange(1, len(losses) + 1) - window, 0)
    result: FloatArray = (sums[1:] - sums[first]) / (np.arange(1, len(losses) + 1) - first)
    return result


def last_loss(losses: Sequence[float]) -> float:
    """The moving mean at the last step."""
    return float(smoothed(np.array(losses))[-1])


def _draw_losses(losses: dict[str, FloatArray], names: Sequence[str], width: float) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 0.55 * width if width > 6 else 0.8 * width))
    figure.set_layout_engine("constrained")
    axes = figure.subplots()
    for name, rows in losses.items():
        index = names.index(name)
        colour = looks.of_series(index)
        steps = np.arange(len(rows))
        axes.plot(steps, rows, color=colour, linewidth=0.6, alpha=0.35)
        axes.plot(
            steps,
            smoothed(rows),
            color=colour,
            linestyle=looks.LINES[index % len(looks.LINES)],
            linewidth=1.6,
            label=looks.plain(name),
        )
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.margins(x=0.01)
    axes.grid(linewidth=0.5)
    axes.set_axisbelow(True)
    looks.legend(figure, *axes.get_legend_handles_labels(), width)
    return figure


def predictions(inputs: ReportInputs) -> list[PredictedTime]:
    """Everything that was both predicted and measured.

    Of jobs: the step, and what each kind computes in it. Of costs: whole steps of one precision
    on one kind alone, which were measured beside the operators that the prediction sums up.
    """
    found = []
    for name, replayed in inputs.replays.items():
        run = inputs.runs.get(name)
        if run is None:
            continue
        found.append(
            PredictedTime(
                what=f"{name}: step of the job",
                predicted_s=replayed.iteration_time_s,
                measured_s=run.step_s,
            )
        )
        for kind, part in replayed.kinds.items():
            rank = first_rank(run.ranks, kind)
            if rank is not None:
                found.append(
                    PredictedTime(
                        what=f"{name}: computing on {kind}",
                        predicted_s=part.compute_s + part.cast_s + part.optimizer_s,
                        measured_s=rank.compute_s,
                    )
                )
    for device in inputs.problem.devices:
        costs = inputs.costs.get(device.name)
        if costs is None:
            continue
        for candidate in uniform_candidates(inputs.problem, device, float("inf")):
            step = costs.step_of.get(candidate.precision)
            if step is not None:
                alone = candidate.evaluation
                found.append(
                    PredictedTime(
                        what=f"all {candidate.precision} on {device.name} alone",
                        predicted_s=alone.compute_s - device.optimizer_s,
                        measured_s=step.forward_s + step.backward_s,
                    )
                )
    return found


def operator_table(inputs: ReportInputs) -> Table:
    """Operators in traces: what they take in a step, the largest difference first."""
    rows = []
    for plan, steps in inputs.steps.items():
        for step in steps:
            part = inputs.replays[plan].kinds[step.kind]
            predicted = np.bincount(
                part.tasks.operator + 1,  # the optimizer is -1
                weights=part.end_s - part.start_s,
                minlength=len(inputs.problem.operators) + 1,
            )
            measured = dict.fromkeys((row.name for row in inputs.problem.operators), 0.0)
            for span in step.spans:
                if span.operator:
                    measured[span.operator] += span.end_s - span.start_s
            rows += [
                (plan, step.rank, step.kind, name, float(predicted[index]), time_s)
                for index, (name, time_s) in enumerate(measured.items(), 1)
                if time_s
            ]
    rows.sort(key=lambda row: -abs(row[5] - row[4]))
    return Table(
        name="operator-times",
        title="Operators in the traced step, forward, backward and casts",
        columns=("plan", "rank", "device_kind", "operator", "predicted_s", "measured_s"),
        rows=tuple(rows),
    )


def error_picture(rows: Sequence[PredictedTime]) -> Picture:
    """A mark for everything that was predicted and measured."""
    words = [f"{row.what}: {row.error:+.1%}." for row in rows]
    return Picture(
        name="errors",
        title="By how much it took longer than predicted",
        description=" ".join(words),
        draw=lambda width: _draw_errors(rows, min(width, 6.4)),
    )


def error_table(rows: Sequence[PredictedTime]) -> Table:
    """What was predicted and what was measured."""
    return Table(
        name="errors",
        title="Predicted and measured times",
        columns=("what", "predicted_s", "measured_s", "error"),
        rows=tuple((row.what, row.predicted_s, row.measured_s, row.error) for row in rows),
    )


def _draw_errors(rows: Sequence[PredictedTime], width: float) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 0.24 * len(rows) + 0.7), layout="constrained")
    axes = figure.subplots()
    percents = [100 * row.error for row in rows]
    places = range(len(rows))
    axes.axvline(0, color=looks.light("muted"), linewidth=1)
    axes.hlines(places, 0, percents, color=looks.of_series(0), linewidth=1.6)
    axes.plot(percents, places, "o", color=looks.of_series(0), markersize=5)
    for place, value in zip(places, percents, strict=True):
        axes.annotate(
            f"{value:+.1f} %",
            (value, place),
            xytext=(7 if value >= 0 else -7, 0),
            textcoords="offset points",
            ha="left" if value >= 0 else "right",
            va="center",
            fontsize=7.5,
        )
    axes.set_yticks(places, [looks.plain(row.what) for row in rows], fontsize=7.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    low, high = min(0.0, *percents), max(0.0, *percents)
    # Numbers of 0.62 inches stand at the marks, beside names of about 1.5 inches.
    share = 0.62 / (width - 1.5)
    sides = (low < 0) + (high > 0)
    room = max(high - low, 5.0) * share / (1 - sides * share)
    axes.set_xlim(low - room if low < 0 else -0.1 * room, high + room)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("measured / predicted - 1 (%)", fontsize=8.5)
    axes.grid(axis="x", linewidth=0.5)
    axes.set_axisbelow(True)
    return figure
