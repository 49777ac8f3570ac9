"""A step on every device kind, as predicted and as measured, and what it holds on the network.

Ranks of one kind do the same, so one lane stands for all of them; measured lanes are of the
first rank of the kind. Without a trace a measured lane shows sums alone: computing, waiting.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from qsync_opt.report import looks
from qsync_opt.report.inputs import ReportInputs
from qsync_opt.report.measured import MeasuredRank, MeasuredStep
from qsync_opt.report.picture import Picture
from qsync_opt.report.tables import Table
from qsync_opt.simulate.replay import KindReplay, Replay
from qsync_opt.simulate.tasks import Tasks, Work

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LANE_INCHES = 0.25

#: What a block shows -> its colour's role and hatch.
_LOOKS = {
    "optimizer": ("optimizer", ""),
    "forward": ("forward", ""),
    "backward": ("backward", "////"),
    "cast": ("cast", ""),
    "all-reduce": ("network", ""),
    "computing (sum)": ("fixed", ""),
    "waiting (sum)": ("paper", "...."),
}
_WORD_OF = {
    Work.OPTIMIZER: "optimizer",
    Work.FORWARD: "forward",
    Work.BACKWARD: "backward",
    Work.FORWARD_CAST: "cast",
    Work.BACKWARD_CAST: "cast",
}

#: Blocks of a lane that can be told apart.
_MOST_BLOCKS = 800

#: Neighbours nearer than this share of the step are drawn as one block.
_NEAR = 5e-4


@dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """One row of blocks: (what, start, end) in seconds."""

    name: str
    blocks: tuple[tuple[str, float, float], ...]


def picture(inputs: ReportInputs) -> Picture:
    """A panel for every plan."""
    panels = [(name, lanes_of(inputs, name)) for name in inputs.plans]
    return Picture(
        name="timeline",
        title="One step on a rank of every kind; the network reduces a bucket when all ranks"
        " are ready",
        description=" ".join(_described(inputs, name) for name in inputs.plans),
        draw=lambda width: draw(panels, width),
    )


def table(inputs: ReportInputs) -> Table:
    """One row per plan and kind: predicted times, and measured ones where there are any."""
    rows: list[tuple[object, ...]] = []
    for name, replayed in inputs.replays.items():
        run = inputs.runs.get(name)
        for device in inputs.problem.devices:
            part = replayed.kinds[device.name]
            rank = None if run is None else first_rank(run.ranks, device.name)
            rows.append(
                (
                    name,
                    device.name,
                    replayed.iteration_time_s,
                    part.compute_s,
                    part.cast_s,
                    part.optimizer_s,
                    part.waiting_s,
                    part.host_bound_s,
                    None if rank is None else rank.step_s,
                    None if rank is None else rank.compute_s,
                    None if rank is None else rank.wait_s,
                )
            )
    return Table(
        name="timeline",
        title="Predicted and measured times of a step (medians)",
        columns=(
            "plan",
            "device_kind",
            "iteration_time_s",
            "compute_s",
            "cast_s",
            "optimizer_s",
            "waiting_s",
            "host_bound_s",
            "measured_step_s",
            "measured_compute_s",
            "measured_wait_s",
        ),
        rows=tuple(rows),
    )


def first_rank(ranks: Sequence[MeasuredRank], kind: str) -> MeasuredRank | None:
    """The first rank of a kind."""
    return next((rank for rank in ranks if rank.kind == kind), None)


def lanes_of(inputs: ReportInputs, plan: str) -> list[Lane]:
    """The lanes of one plan."""
    replayed, run = inputs.replays[plan], inputs.runs.get(plan)
    steps = {step.kind: step for step in reversed(inputs.steps.get(plan, ()))}
    lanes = []
    for device in inputs.problem.devices:
        kind = device.name
        lanes.append(_predicted(kind, replayed.kinds[kind], replayed.iteration_time_s))
        rank = None if run is None else first_rank(run.ranks, kind)
        if kind in steps:
            lanes.append(_traced(kind, steps[kind]))
        elif rank is not None:
            sums = (
                ("computing (sum)", 0.0, rank.compute_s),
                ("waiting (sum)", rank.compute_s, rank.compute_s + rank.wait_s),
            )
            lanes.append(Lane(name=f"{kind}, measured", blocks=sums))
    lanes.append(_network(replayed))
    for step in list(steps.values())[:1]:
        blocks = [("all-reduce", s.start_s, s.end_s) for s in step.spans if s.work is None]
        if blocks:
            lanes.append(Lane(name="network, measured", blocks=_merged(blocks, step.step_s)))
    return lanes


def _predicted(kind: str, part: KindReplay, step_s: float) -> Lane:
    words = [_WORD_OF[work] for work in Tasks.WORKS]
    blocks = zip(
        (words[index] for index in part.tasks.work.tolist()),
        part.start_s.tolist(),
        part.end_s.tolist(),
        strict=True,
    )
    return Lane(name=f"{kind}, predicted", blocks=_merged(blocks, step_s))


def _traced(kind: str, step: MeasuredStep) -> Lane:
    blocks = [
        (_WORD_OF[span.work], span.start_s, span.end_s)
        for span in step.spans
        if span.work is not None
    ]
    return Lane(name=f"{kind}, measured", blocks=_merged(blocks, step.step_s))


def _network(replayed: Replay) -> Lane:
    starts, ends = replayed.reduce_start_s.tolist(), replayed.reduce_end_s.tolist()
    blocks = [("all-reduce", start, end) for start, end in zip(starts, ends, strict=True)]
    name = "network, predicted"
    return Lane(name=name, blocks=tuple(block for block in blocks if block[2] > block[1]))


def _merged(
    blocks: Iterable[tuple[str, float, float]], step_s: float
) -> tuple[tuple[str, float, float], ...]:
    """Blocks with equal neighbours that touch drawn as one."""
    result: list[tuple[str, float, float]] = []
    for what, start, end in blocks:
        if end <= start:
            continue
        if result and result[-1][0] == what and start - result[-1][2] <= _NEAR * step_s:
            result[-1] = (what, result[-1][1], max(end, result[-1][2]))
        else:
            result.append((what, start, end))
    return tuple(result)


def thinned(
    blocks: Sequence[tuple[str, float, float]], end_s: float
) -> Sequence[tuple[str, float, float]]:
    """Not more blocks than can be told apart: in each slot of time what took most of it.

    Args:
        blocks: (what, start, end), by start, one after the other.
        end_s: where the axis ends.
    """
    if len(blocks) <= _MOST_BLOCKS or end_s <= 0:
        return blocks
    words = list(dict.fromkeys(what for what, _, _ in blocks))
    edges = np.linspace(0.0, end_s, _MOST_BLOCKS + 1)
    spent = np.zeros((len(words) + 1, _MOST_BLOCKS))
    for number, word in enumerate(words):
        mine = [(start, end) for what, start, end in blocks if what == word]
        # Time spent on it until t, at the edges of slots.
        places = np.array(mine).ravel()
        lengths = np.array([[0.0, end - start] for start, end in mine]).ravel()
        spent[number] = np.diff(np.interp(edges, places, np.cumsum(lengths)))
    spent[-1] = end_s / _MOST_BLOCKS - spent.sum(axis=0)  # nothing
    result = []
    for slot, most in enumerate(spent.argmax(axis=0).tolist()):
        if most < len(words):
            result.append((words[most], float(edges[slot]), float(edges[slot + 1])))
    return _merged(result, end_s)


def draw(panels: Sequence[tuple[str, Sequence[Lane]]], width: float) -> Figure:
    """The picture for a width in inches."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    ends = [end for _, lanes in panels for lane in lanes for _, _, end in lane.blocks]
    unit, scale = looks.time_unit(ends)
    height = sum(len(lanes) * _LANE_INCHES + 0.32 for _, lanes in panels) + 1.0
    figure = Figure(figsize=(width, height), layout="constrained")
    ratios = [len(lanes) + 0.6 for _, lanes in panels]
    all_axes = figure.subplots(
        len(panels), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": ratios}
    )[:, 0]
    for axes, (name, lanes) in zip(all_axes, panels, strict=True):
        shown = [
            Lane(name=lane.name, blocks=tuple(thinned(lane.blocks, max(ends)))) for lane in lanes
        ]
        _draw_panel(axes, shown, scale)
        axes.set_title(looks.plain(name), fontsize=8.5, pad=3)
    all_axes[-1].set_xlim(0, max(ends, default=1.0) * scale * 1.01)
    all_axes[-1].set_xlabel(f"time in the step ({unit})", fontsize=8.5)
    used = {what for _, lanes in panels for lane in lanes for what, _, _ in lane.blocks}
    handles = [
        Patch(
            facecolor=looks.light(role),
            hatch=hatch,
            label=what,
            edgecolor=looks.light("muted"),
            linewidth=0.3,
        )
        for what, (role, hatch) in _LOOKS.items()
        if what in used
    ]
    looks.legend(figure, handles, [str(handle.get_label()) for handle in handles], width)
    return figure


def _draw_panel(axes: Axes, lanes: Sequence[Lane], scale: float) -> None:
    for level, lane in enumerate(lanes):
        for what, (role, hatch) in _LOOKS.items():
            spans = [(s * scale, (e - s) * scale) for w, s, e in lane.blocks if w == what]
            if spans:
                axes.broken_barh(
                    spans,
                    (level - 0.4, 0.8),
                    facecolor=looks.light(role),
                    hatch=hatch,
                    edgecolor=looks.light("muted") if hatch else "none",
                    linewidth=0.2 if hatch else 0.0,
                )
    axes.set_ylim(len(lanes) - 0.45, -0.55)
    axes.set_yticks(range(len(lanes)), [looks.plain(lane.name) for lane in lanes], fontsize=7.5)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=7.5)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x", linewidth=0.5)
    axes.set_axisbelow(True)


def _described(inputs: ReportInputs, plan: str) -> str:
    from qsync_opt import console

    replayed, run = inputs.replays[plan], inputs.runs.get(plan)
    text = f"{plan}: predicted {console.seconds(replayed.iteration_time_s)} a step"
    if run is not None:
        text += f", measured {console.seconds(run.step_s)}"
    waits = ", ".join(
        f"{kind} waits {console.seconds(part.waiting_s)}" for kind, part in replayed.kinds.items()
    )
    return f"{text}; {waits}."
