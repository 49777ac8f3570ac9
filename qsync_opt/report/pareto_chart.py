"""Perturbation against iteration time: as a picture of its own, in a report, and as CSV."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from qsync_opt.errors import ParameterError
from qsync_opt.files import write_atomically
from qsync_opt.optimize.comparison import ParetoCurve
from qsync_opt.report import looks
from qsync_opt.report.inputs import CurvePoint, ReportInputs, curve_of, methods_of
from qsync_opt.report.picture import Picture
from qsync_opt.report.tables import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Dots between plans that count as lying together.
_NEAR = 14

#: (name, iteration time in seconds, perturbation) of a plan that is marked.
Mark = tuple[str, float, float]


def pareto_csv(curve: ParetoCurve) -> str:
    """The points of a curve as CSV: one line per slack and method, units in the header.

    Args:
        curve: what `pareto` returned.
    """
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(curve.columns)
    writer.writerows(curve.rows())
    return stream.getvalue()


def plot_pareto(curve: ParetoCurve, path: str | os.PathLike[str]) -> None:
    """Draw perturbation against iteration time, one staircase per method.

    A mark is a plan, at its own iteration time and not the deadline it was held to; between
    marks the line is the best plan so far. The axis of the perturbation is
    logarithmic where the values are positive and span more than a decade.

    Args:
        curve: what `pareto` returned; at least one plan in it.
        path: image to write; `.png`, `.svg` or `.pdf`. The same curve gives the same bytes.

    Raises:
        ParameterError: see `check_image`; or a curve without any plan.
        FormatError: the path cannot be written.
    """
    kind = looks.check_image(path)
    points = curve_of(curve)
    if not any(point.objective is not None for point in points):
        raise ParameterError("curve", "must have at least one plan to draw", curve.problem)
    stream = io.BytesIO()
    with looks.drawing():
        figure = draw(points, (), methods_of(points), (curve.fastest_time_s, None), 7.0)
        figure.axes[0].set_title(looks.plain(curve.problem))
        figure.savefig(stream, format=kind, dpi=looks.DOTS_PER_INCH, metadata=_undated(kind))
    write_atomically(path, stream.getvalue())


def picture(inputs: ReportInputs) -> Picture:
    """The curve, if there is one, with the plans marked."""
    from qsync_opt import console

    marks = [
        (name, evaluation.iteration_time_s, evaluation.perturbation)
        for name, evaluation in inputs.evaluations.items()
    ]
    words = [
        f"{name}: {console.seconds(time_s)} a step, perturbation {console.number(value)}."
        for name, time_s, value in marks
    ]
    if inputs.curve:
        methods = methods_of(inputs.curve)
        slacks = len({point.slack for point in inputs.curve})
        words.insert(0, f"Curves of {', '.join(methods)} over {slacks} deadlines.")
    fastest = _fastest(inputs.curve)
    return Picture(
        name="pareto",
        title="What the gradient loses (added variance) against the time of a step; lower and"
        " further left is better",
        description=" ".join(words),
        draw=lambda width: draw(
            inputs.curve, marks, inputs.names, (fastest, inputs.deadline_s), min(width, 6.4)
        ),
    )


def table(inputs: ReportInputs) -> Table:
    """The points of the curve."""
    columns = ("slack", "deadline_s", "method", "objective", "bound", "iteration_time_s")
    return Table(
        name="pareto",
        title="Plans of least perturbation by deadline",
        columns=columns,
        rows=tuple(tuple(getattr(point, name) for name in columns) for point in inputs.curve),
    )


def _fastest(curve: Sequence[CurvePoint]) -> float | None:
    """The fastest feasible time, from a deadline and its slack."""
    return next(
        (point.deadline_s / (1 + point.slack) for point in curve if point.deadline_s is not None),
        None,
    )


def front_of(curve: Sequence[CurvePoint], method: str) -> list[tuple[float, float]]:
    """(iteration time, objective) of one method's plans, by time."""
    return sorted(
        (point.iteration_time_s, point.objective)
        for point in curve
        if point.method == method
        and point.iteration_time_s is not None
        and point.objective is not None
    )


def draw(
    curve: Sequence[CurvePoint],
    marks: Sequence[Mark],
    names: Sequence[str],
    limits_s: tuple[float | None, float | None],
    width: float,
) -> Figure:
    """The picture for a width in inches.

    Args:
        curve: the points.
        marks: plans to ring and name.
        names: their order decides how methods look.
        limits_s: the fastest feasible time, and the deadline.
        width: in inches.
    """
    from matplotlib.figure import Figure

    fastest_s, deadline_s = limits_s

    fronts = {method: front_of(curve, method) for method in methods_of(curve)}
    times = [time_s for front in fronts.values() for time_s, _ in front]
    times += [time_s for _, time_s, _ in marks]
    unit, scale = looks.time_unit(times)
    values = [value for front in fronts.values() for _, value in front]
    values += [value for _, _, value in marks]
    figure = Figure(figsize=(width, 0.6 * width if width > 6 else 1.05 * width))
    figure.set_layout_engine("constrained")
    axes = figure.subplots()
    # Where methods agree, later ones lie on earlier ones with smaller marks: both can be seen.
    for method, front in sorted(fronts.items(), key=lambda item: names.index(item[0])):
        _draw_front(axes, names.index(method), method, [(t * scale, v) for t, v in front])
    if fastest_s is not None:
        axes.axvline(
            fastest_s * scale,
            color=looks.light("muted"),
            linestyle=":",
            linewidth=1,
            zorder=0,
            label="fastest feasible",
        )
    if deadline_s is not None and (fastest_s is None or deadline_s > fastest_s * 1.001):
        axes.axvline(
            deadline_s * scale, color=looks.light("limit"), linewidth=1, zorder=0, label="deadline"
        )
    if values and min(values) > 0 and max(values) > 10 * min(values):
        axes.set_yscale("log")
    else:
        axes.ticklabel_format(axis="y", scilimits=(-2, 4))
    axes.set_xlabel(f"iteration time ({unit})")
    axes.set_ylabel("added gradient variance (perturbation)" if width > 5 else "perturbation")
    axes.margins(x=0.08, y=0.12)
    axes.grid(which="major", linewidth=0.5)
    axes.set_axisbelow(True)
    looks.legend(figure, *axes.get_legend_handles_labels(), width)
    if marks:
        _draw_marks(figure, axes, [(name, time_s * scale, value) for name, time_s, value in marks])
    return figure


def _draw_front(axes: Axes, index: int, method: str, front: Sequence[tuple[float, float]]) -> None:
    if not front:
        return
    x, y = [time for time, _ in front], [value for _, value in front]
    colour = looks.of_series(index)
    axes.plot(x, list(accumulate(y, min)), drawstyle="steps-post", linewidth=1.3, color=colour)
    axes.plot(
        x,
        y,
        color=colour,
        marker=looks.MARKERS[index % len(looks.MARKERS)],
        markersize=max(8 - 2 * index, 4),
        linestyle="none",
        label=method,
    )


def _draw_marks(figure: Figure, axes: Axes, marks: Sequence[Mark]) -> None:
    """The plans, ringed and named; those that lie together share a name, others keep apart."""
    axes.plot(
        [time for _, time, _ in marks],
        [value for _, _, value in marks],
        marker="o",
        markersize=12,
        linestyle="none",
        markerfacecolor="none",
        markeredgecolor=looks.light("ink"),
        markeredgewidth=1.1,
    )
    figure.draw_without_rendering()  # places are known only then
    right = axes.bbox.x0 + 0.7 * axes.bbox.width
    placed: list[tuple[float, float, tuple[float, float], list[str]]] = []
    for name, time, value in marks:
        x, y = axes.transData.transform((time, value))
        near = [row for row in placed if abs(row[0] - x) < _NEAR and abs(row[1] - y) < _NEAR]
        if near:
            near[0][3].append(name)
        else:
            placed.append((x, y, (time, value), [name]))
    for x, _, place, together in placed:
        axes.annotate(
            looks.plain(", ".join(together)),
            place,
            xytext=(-10 if x > right else 10, 4),
            textcoords="offset points",
            ha="right" if x > right else "left",
            fontsize=8,
            bbox={"facecolor": looks.light("paper"), "edgecolor": "none", "pad": 0.8},
        )


def _undated(kind: str) -> dict[str, Any]:
    return {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind, {})
