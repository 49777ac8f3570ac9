"""The precision of every operator as a picture: a strip for each plan and device kind.

Operators stand from left to right in forward order, precisions from the widest (top) to the
narrowest. Operators with a choice are thick, those without one thin.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from qsync_opt.optimize.evaluate import allowed_columns
from qsync_opt.optimize.problem import AllocationProblem, DeviceKind
from qsync_opt.plan import PrecisionPlan
from qsync_opt.precision import Precision
from qsync_opt.report import looks
from qsync_opt.report.inputs import ReportInputs
from qsync_opt.report.picture import Picture
from qsync_opt.report.tables import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Parts of a model that are named along the axis, at most.
_MOST_PARTS = 20

#: Runs of operators that a strip tells apart from left to right, at most.
_MOST_SPANS = 1000
_LEVEL_INCHES = 0.17
_LETTER_INCHES = 0.075
_THICK, _THIN = 0.84, 0.3


@dataclass(frozen=True, kw_only=True, slots=True)
class Strip:
    """One plan on one device kind."""

    plan: str
    device: DeviceKind
    precisions: tuple[Precision, ...]
    chosen: tuple[bool, ...]


def strips_of(problem: AllocationProblem, name: str, plan: PrecisionPlan) -> list[Strip]:
    """The strips of a plan, one for each device kind."""
    strips = []
    for device in problem.devices:
        row = plan.for_device(device.name)
        options = allowed_columns(problem, device).sum(axis=1).tolist()
        strips.append(
            Strip(
                plan=name,
                device=device,
                precisions=tuple(row[operator.name] for operator in problem.operators),
                chosen=tuple(
                    not operator.follows and count > 1
                    for operator, count in zip(problem.operators, options, strict=True)
                ),
            )
        )
    return strips


def picture(inputs: ReportInputs) -> Picture:
    """Every plan on every kind."""
    problem = inputs.problem
    strips = [s for name, plan in inputs.plans.items() for s in strips_of(problem, name, plan)]
    return Picture(
        name="precision",
        title="Precision of every operator, in forward order. Thick: chosen; thin: follows its"
        " inputs or has one option only",
        description=" ".join(f"{_title(strip)}." for strip in strips),
        draw=lambda width: draw(problem, strips, width),
    )


def table(inputs: ReportInputs) -> Table:
    """One row per operator, one column per plan and kind."""
    problem = inputs.problem
    strips = [s for name, plan in inputs.plans.items() for s in strips_of(problem, name, plan)]
    columns = ("operator", "kind", *(f"{s.plan} on {s.device.name}" for s in strips))
    return Table(
        name="operators",
        title="Precision of every operator",
        columns=columns,
        rows=tuple(
            (operator.name, operator.kind, *(strip.precisions[index].value for strip in strips))
            for index, operator in enumerate(problem.operators)
        ),
    )


def draw(problem: AllocationProblem, strips: list[Strip], width: float) -> Figure:
    """The picture for a width in inches."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    used = {precision for strip in strips for precision in strip.precisions}
    levels = [precision for precision in Precision if precision in used]
    height = len(strips) * (len(levels) * _LEVEL_INCHES + 0.3) + 0.55
    engine = ConstrainedLayoutEngine(hspace=0.0, h_pad=0.03)
    figure = Figure(figsize=(width, height), layout=engine)
    all_axes = figure.subplots(len(strips), 1, sharex=True, squeeze=False)[:, 0]
    parts = parts_of([operator.name for operator in problem.operators])
    for axes, strip in zip(all_axes, strips, strict=True):
        _draw_strip(axes, strip, levels)
        for _, start, _ in parts[1:]:
            axes.axvline(start, color=looks.light("grid"), linewidth=0.6, zorder=0)
        axes.set_title(looks.plain(_title(strip)), fontsize=8.5, pad=3)
    _name_parts(all_axes[-1], parts, len(problem.operators), width)
    return figure


def _draw_strip(axes: Axes, strip: Strip, levels: list[Precision]) -> None:
    count = len(strip.precisions)
    for (precision, chosen), runs in _runs(strip).items():
        spans = _joined(runs, count / _MOST_SPANS)
        level, height = levels.index(precision), _THICK if chosen else _THIN
        axes.broken_barh(
            spans,
            (level - height / 2, height),
            facecolor=looks.of_precision(precision),
            alpha=1.0 if chosen else 0.55,
            linewidth=0,
        )
    axes.set_xlim(0, count)
    axes.set_ylim(len(levels) - 0.45, -0.55)
    axes.set_yticks(range(len(levels)), [level.value for level in levels], fontsize=7.5)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", length=0, labelbottom=False)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.grid(axis="y", linewidth=0.5)
    axes.set_axisbelow(True)


def _runs(strip: Strip) -> dict[tuple[Precision, bool], list[tuple[int, int]]]:
    """Precision, and whether it was chosen -> runs of such operators: first, how many."""
    runs: dict[tuple[Precision, bool], list[tuple[int, int]]] = defaultdict(list)
    start = 0
    for look, group in groupby(zip(strip.precisions, strip.chosen, strict=True)):
        length = len(list(group))
        runs[look].append((start, length))
        start += length
    return runs


def _joined(runs: list[tuple[int, int]], nearest: float) -> list[tuple[int, int]]:
    """Runs with less than a hair between them as one."""
    joined: list[tuple[int, int]] = []
    for start, length in runs:
        if joined and start - sum(joined[-1]) < nearest:
            joined[-1] = (joined[-1][0], start + length - joined[-1][0])
        else:
            joined.append((start, length))
    return joined


def parts_of(names: list[str]) -> list[tuple[str, int, int]]:
    """Runs of operators with a common prefix: name, first operator, how many.

    The prefix is as long as it can be with few enough runs.
    """
    best = [("", 0, len(names))]
    deepest = max(name.count(".") for name in names) + 1
    for depth in range(1, deepest + 1):
        parts, start = [], 0
        for prefix, group in groupby(".".join(name.split(".")[:depth]) for name in names):
            length = len(list(group))
            parts.append((prefix, start, length))
            start += length
        if len(parts) > _MOST_PARTS:
            break
        best = parts
    return best


def _name_parts(axes: Axes, parts: list[tuple[str, int, int]], count: int, width: float) -> None:
    """Name the parts that are wide enough for their names."""
    inches = (width - 0.6) / count
    shown = [
        (start + length / 2, name)
        for name, start, length in parts
        if name and length * inches >= len(name) * _LETTER_INCHES
    ]
    axes.set_xticks([place for place, _ in shown], [name for _, name in shown], fontsize=7.5)
    axes.tick_params(axis="x", length=0, labelbottom=True)
    axes.set_xlabel(f"{count} operators in forward order", fontsize=8)


def _title(strip: Strip) -> str:
    """`exact on weak (2 workers): fp32 12, int8 3`: what was chosen where there is a choice."""
    counts: dict[Precision, int] = {}
    for precision, chosen in zip(strip.precisions, strip.chosen, strict=True):
        if chosen:
            counts[precision] = counts.get(precision, 0) + 1
    listed = ", ".join(f"{p} {counts[p]}" for p in Precision if p in counts)
    return f"{strip.plan} on {strip.device.name}: {listed or 'nothing to choose'}"
