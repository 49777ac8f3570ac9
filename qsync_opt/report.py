"""Pictures and tables to keep: the Pareto curve as an image or as CSV."""

from __future__ import annotations

import csv
import io
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qsync_opt.errors import ParameterError
from qsync_opt.files import write_atomically

if TYPE_CHECKING:
    import os

    from qsync_opt.optimize.comparison import ParetoCurve

_IMAGE_TYPES = (".png", ".svg", ".pdf")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_DOTS_PER_INCH = 150


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
    kind = check_image(path)
    methods = list(dict.fromkeys(r.method for p in curve.points for r in p.comparison.rows))
    fronts = {method: sorted(curve.front(method)) for method in methods}
    if not any(fronts.values()):
        raise ParameterError("curve", "must have at least one plan to draw", curve.problem)
    write_atomically(path, _image(curve, fronts, kind))


def check_image(path: str | os.PathLike[str]) -> str:
    """The image type that a path asks for, before any work is spent on what it will show.

    Raises:
        ParameterError: a file type that is not drawn, or matplotlib is not installed.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in _IMAGE_TYPES:
        raise ParameterError("plot", f"must end in {', '.join(_IMAGE_TYPES)}", str(path))
    if find_spec("matplotlib") is None:
        rule = "needs matplotlib, which is not installed"
        raise ParameterError("plot", rule, str(path), "pip install 'qsync-opt[report]'")
    return suffix.removeprefix(".")


def _image(curve: ParetoCurve, fronts: dict[str, list[tuple[float, float]]], kind: str) -> bytes:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    times = [time_s for front in fronts.values() for time_s, _ in front]
    unit, scale = ("s", 1.0) if max(times) >= 1 else ("ms", 1e3)
    values = [value for front in fronts.values() for _, value in front]
    stream = io.BytesIO()
    # A fixed salt and no date: the same curve gives the same bytes.
    with mpl.rc_context({"svg.hashsalt": "qsync-opt", "font.size": 10}):
        figure = Figure(figsize=(7.0, 4.2), layout="constrained")
        axes = figure.subplots()
        for index, (method, front) in enumerate(fronts.items()):
            if front:
                x = [time_s * scale for time_s, _ in front]
                y = [value for _, value in front]
                (line,) = axes.plot(
                    x, list(accumulate(y, min)), drawstyle="steps-post", linewidth=1.2
                )
                axes.plot(
                    x,
                    y,
                    color=line.get_color(),
                    marker=_MARKERS[index % len(_MARKERS)],
                    # Later methods lie on earlier ones where they agree: smaller marks show both.
                    markersize=max(9 - 2 * index, 4),
                    linestyle="none",
                    label=method,
                )
        if curve.fastest_time_s is not None:
            axes.axvline(
                curve.fastest_time_s * scale,
                color="0.6",
                linestyle=":",
                linewidth=1,
                zorder=0,
                label="fastest feasible",
            )
        if min(values) > 0 and max(values) > 10 * min(values):
            axes.set_yscale("log")
        axes.set_xlabel(f"iteration time ({unit})")
        axes.set_ylabel("added gradient variance (perturbation)")
        axes.set_title(_plain(curve.problem))
        axes.grid(alpha=0.3, which="major")
        figure.legend(loc="outside lower center", ncols=4, frameon=False)
        figure.savefig(stream, format=kind, dpi=_DOTS_PER_INCH, metadata=_undated(kind))
    return stream.getvalue()


def _plain(text: str) -> str:
    """`text` as it stands: a dollar sign would start mathematics."""
    return text.replace("$", r"\$")


def _undated(kind: str) -> dict[str, Any]:
    return {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind, {})
