"""Memory over a step on every device kind, term by term, against its budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from qsync_opt import console
from qsync_opt.optimize.arrays import FloatArray, IntArray
from qsync_opt.precision import Precision
from qsync_opt.report import looks
from qsync_opt.report.inputs import ReportInputs
from qsync_opt.report.picture import Picture
from qsync_opt.report.tables import Table
from qsync_opt.simulate.memory import MemoryTimeline
from qsync_opt.simulate.replay import KindReplay
from qsync_opt.simulate.tasks import Tasks, Work

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Program points that are drawn, at most: of those that fall together the largest is kept.
_MOST_POINTS = 300


@dataclass(frozen=True, kw_only=True, eq=False)
class Course:
    """Memory of one plan on one kind: when each program point begins, and its terms."""

    plan: str
    times_s: FloatArray
    memory: MemoryTimeline


def picture(inputs: ReportInputs) -> Picture:
    """A panel for every kind: the first plan by terms, the others as lines."""
    courses = {
        device.name: [
            _course(name, replayed.kinds[device.name]) for name, replayed in inputs.replays.items()
        ]
        for device in inputs.problem.devices
    }
    budgets = {device.name: device.memory_bytes for device in inputs.problem.devices}
    words = [
        f"{course.plan} on {kind}: at most {console.size(course.memory.peak_bytes)}"
        f" of {console.size(budgets[kind])}."
        for kind, rows in courses.items()
        for course in rows
    ]
    first = next(iter(inputs.plans))
    others = " Lines: the other plans." if len(inputs.plans) > 1 else ""
    return Picture(
        name="memory",
        title=f"Memory over the step, predicted. Areas: plan {first}, term by term.{others}",
        description=" ".join(words),
        draw=lambda width: draw(courses, budgets, width),
    )


def table(inputs: ReportInputs) -> Table:
    """One row per plan and kind: the peak, its terms, and the budget."""
    dtypes = [p for p in Precision if p in inputs.problem.storage]
    rows: list[tuple[object, ...]] = []
    for name, replayed in inputs.replays.items():
        for device in inputs.problem.devices:
            memory = replayed.kinds[device.name].memory
            terms = memory.terms_at(memory.peak_point)
            rows.append(
                (
                    name,
                    device.name,
                    memory.peak_bytes,
                    device.memory_bytes,
                    terms["fixed"],
                    *(terms.get(f"saved {dtype}", 0) for dtype in dtypes),
                    terms["transient"],
                )
            )
    saved = (f"saved_{dtype}_bytes" for dtype in dtypes)
    return Table(
        name="memory",
        title="Memory at its peak, and of what it consists",
        columns=(
            "plan",
            "device_kind",
            "peak_memory_bytes",
            "budget_bytes",
            "fixed_bytes",
            *saved,
            "transient_bytes",
        ),
        rows=tuple(rows),
    )


def _course(plan: str, part: KindReplay) -> Course:
    """The program points (forward, then backward) at the starts of their tasks."""
    works = [Tasks.WORKS.index(work) for work in (Work.FORWARD, Work.BACKWARD)]
    starts = part.start_s[np.isin(part.tasks.work, works)]
    return Course(plan=plan, times_s=np.append(starts, part.end_s[-1]), memory=part.memory)


def draw(courses: dict[str, list[Course]], budgets: dict[str, int], width: float) -> Figure:
    """The picture for a width in inches."""
    from matplotlib.figure import Figure

    side_by_side = width > 6
    count = len(courses)
    columns = min(count, 2) if side_by_side else 1
    lines = -(-count // columns)
    figure = Figure(figsize=(width, 2.3 * lines + 0.7), layout="constrained")
    all_axes = figure.subplots(lines, columns, squeeze=False).ravel()
    times = [float(course.times_s[-1]) for rows in courses.values() for course in rows]
    unit, scale = looks.time_unit(times)
    handles: dict[str, object] = {}
    for axes, (kind, rows) in zip(all_axes, courses.items(), strict=False):
        _draw_kind(axes, rows, budgets[kind], scale, handles)
        axes.set_title(looks.plain(kind), fontsize=8.5, pad=3)
        axes.set_xlabel(f"time in the step ({unit})", fontsize=8.5)
    for axes in all_axes[count:]:
        axes.set_visible(False)
    looks.legend(figure, list(handles.values()), list(handles), width)
    return figure


def _draw_kind(
    axes: Axes, rows: list[Course], budget: int, scale: float, handles: dict[str, object]
) -> None:
    peaks = [course.memory.peak_bytes for course in rows]
    # A budget far above what is used would flatten the picture; it is then told in words.
    shows_budget = budget <= 2.5 * max(peaks)
    unit, unit_bytes = looks.size_unit([*peaks, budget] if shows_budget else peaks)
    first = rows[0]
    points, times = _thinned(first)
    levels = {
        f"saved {dtype}": first.memory.saved_bytes[dtype][points]
        for dtype in Precision
        if dtype in first.memory.saved_bytes
    }
    levels["transient"] = first.memory.transient_bytes[points]
    # Before the forward pass there is what is always there.
    levels = {term: np.concatenate([[0], sizes, sizes[-1:]]) for term, sizes in levels.items()}
    levels = {"fixed": np.full(len(times), first.memory.fixed_bytes), **levels}
    base = np.zeros(len(times))
    for term, sizes in levels.items():
        top = base + sizes / unit_bytes
        role = term.removeprefix("saved ")
        area = axes.fill_between(
            times * scale,
            base,
            top,
            step="post",
            facecolor=looks.light(role),
            hatch="////" if term == "transient" else None,
            edgecolor=looks.light("paper"),
            linewidth=0.0,
        )
        handles.setdefault(term, area)
        base = top
    for index, course in enumerate(rows[1:], 1):
        points, times = _thinned(course)
        total = course.memory.total_bytes[points]
        (line,) = axes.step(
            times * scale,
            np.concatenate([[course.memory.fixed_bytes], total, total[-1:]]) / unit_bytes,
            where="post",
            color=looks.light("ink"),
            linestyle=looks.LINES[index % len(looks.LINES)],
            linewidth=1.1,
        )
        handles.setdefault(looks.plain(course.plan), line)
    if shows_budget:
        line = axes.axhline(budget / unit_bytes, color=looks.light("limit"), linewidth=1.6)
        handles.setdefault("budget", line)
    else:
        axes.annotate(
            f"budget {console.size(budget)}, far above",
            (0.99, 0.97),
            xycoords="axes fraction",
            ha="right",
            va="top",
            fontsize=7.5,
        )
    highest = max([*peaks, budget] if shows_budget else peaks) / unit_bytes
    axes.set_ylim(0, highest * (1.12 if shows_budget else 1.25))
    axes.set_xlim(0, max(float(course.times_s[-1]) for course in rows) * scale)
    axes.set_ylabel(f"memory ({unit})", fontsize=8.5)
    axes.tick_params(labelsize=7.5)
    axes.grid(axis="y", linewidth=0.5)
    axes.set_axisbelow(True)


def _thinned(course: Course) -> tuple[IntArray, FloatArray]:
    """Program points to draw; and 0, the times at which they begin, and when the last one ends."""
    total = course.memory.total_bytes
    size = -(-len(total) // _MOST_POINTS)
    starts = np.arange(0, len(total), size)
    points = np.array([start + int(total[start : start + size].argmax()) for start in starts])
    times = [np.zeros(1), course.times_s[starts], course.times_s[-1:]]
    return points, np.concatenate(times)
