"""How pictures look: colours with a meaning in light and dark, matplotlib settings, file types.

Pictures are drawn in the light colours. Every one of them stands for a role; in a page its
hexadecimal value is replaced by a CSS variable of that role, so one SVG serves both modes.
Colour never stands alone: position, marker, hatch or a label says the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qsync_opt.errors import ParameterError
from qsync_opt.precision import Precision

if TYPE_CHECKING:
    import os

    from matplotlib.figure import Figure

#: Role -> its colour on light and on dark paper. Fills have a contrast of at least 3 to both
#: papers, texts of at least 4.5 (WCAG 2.2, 1.4.11 and 1.4.3); a test computes it.
COLOURS = {
    "paper": ("#ffffff", "#10151c"),
    "ink": ("#1b2129", "#e8edf2"),
    "muted": ("#586270", "#a3adb8"),
    "grid": ("#d5dae0", "#39414b"),
    "fp32": ("#2b5fb0", "#74a9f7"),
    "tf32": ("#1a8799", "#4cc3d6"),
    "bf16": ("#33883a", "#6bcb70"),
    "fp16": ("#857400", "#d3c13a"),
    "fp8": ("#c05a12", "#f9a055"),
    "int8": ("#b3204c", "#fb7396"),
    "forward": ("#2b5fb1", "#74a9f8"),
    "backward": ("#7653b4", "#b79af0"),
    "cast": ("#c05a13", "#f9a056"),
    "optimizer": ("#5b6673", "#9aa5b1"),
    "network": ("#33883b", "#6bcb71"),
    "fixed": ("#8a939e", "#6f7985"),
    "transient": ("#6b7480", "#8f99a5"),
    "limit": ("#b3204d", "#fb7397"),
    "series0": ("#2b5fb2", "#74a9f9"),
    "series1": ("#c05a14", "#f9a057"),
    "series2": ("#b3204e", "#fb7398"),
    "series3": ("#33883c", "#6bcb72"),
    "series4": ("#7653b5", "#b79af1"),
    "series5": ("#1a879a", "#4cc3d7"),
}

#: The same series look the same in every picture.
MARKERS = ("o", "s", "D", "^", "v", "P", "X")
LINES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1)), (0, (1, 1)))
SERIES = tuple(role for role in COLOURS if role.startswith("series"))

_IMAGE_TYPES = (".png", ".svg", ".pdf")
DOTS_PER_INCH = 150


def light(role: str) -> str:
    """The colour that a picture is drawn in."""
    return COLOURS[role][0]


def of_precision(precision: Precision) -> str:
    """The colour of a precision."""
    return light(precision.value)


def of_series(index: int) -> str:
    """The colour of one of several lines."""
    return light(SERIES[index % len(SERIES)])


@contextmanager
def drawing() -> Iterator[None]:
    """The settings in which every picture is made; nothing outside is changed."""
    import matplotlib as mpl

    settings: Any = {
        "svg.hashsalt": "qsync-opt",  # the same input gives the same bytes
        "svg.fonttype": "none",  # text stays text: it can be searched, read out and scaled
        "font.size": 9.0,
        "font.family": ["sans-serif"],
        "axes.titlesize": 9.0,
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": light("muted"),
        "axes.labelcolor": light("ink"),
        "axes.facecolor": light("paper"),
        "figure.facecolor": light("paper"),
        "savefig.facecolor": light("paper"),
        "text.color": light("ink"),
        "xtick.color": light("muted"),
        "ytick.color": light("muted"),
        "xtick.labelcolor": light("ink"),
        "ytick.labelcolor": light("ink"),
        "grid.color": light("grid"),
        "hatch.color": light("muted"),
        "hatch.linewidth": 0.6,
        "legend.frameon": False,
    }
    with mpl.rc_context(settings):
        yield


def check_image(path: str | os.PathLike[str]) -> str:
    """The image type that a path asks for, before any work is spent on what it will show.

    Raises:
        ParameterError: a file type that is not drawn, or matplotlib is not installed.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in _IMAGE_TYPES:
        raise ParameterError("plot", f"must end in {', '.join(_IMAGE_TYPES)}", str(path))
    require_matplotlib("plot", str(path))
    return suffix.removeprefix(".")


def require_matplotlib(field: str, value: object) -> None:
    """Raise unless pictures can be drawn.

    Args:
        field: the option that asks for a picture.
        value: of the option.

    Raises:
        ParameterError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        rule = "needs matplotlib, which is not installed"
        raise ParameterError(field, rule, value, "pip install 'qsync-opt[report]'")


def legend(figure: Figure, handles: Sequence[Any], labels: Sequence[str], width: float) -> None:
    """A legend under a figure, in as many even rows as the width needs.

    Args:
        figure: of a width in inches.
        handles: what is explained.
        labels: in words, one for each.
        width: of the figure.
    """
    if not handles:
        return
    longest = max(len(label) for label in labels)
    fitting = max(1, int((width - 0.3) / (0.5 + 0.062 * longest)))
    rows = -(-len(handles) // fitting)
    columns = -(-len(handles) // rows)
    # matplotlib fills columns first, and people read rows.
    order = [row * columns + column for column in range(columns) for row in range(rows)]
    order = [index for index in order if index < len(handles)]
    figure.legend(
        [handles[index] for index in order],
        [labels[index] for index in order],
        loc="outside lower center",
        ncols=columns,
        fontsize=8,
    )


def plain(text: str) -> str:
    """`text` as it stands: a dollar sign would start mathematics."""
    return text.replace("$", r"\$")


def time_unit(seconds: Sequence[float]) -> tuple[str, float]:
    """The unit for an axis that holds these times, and its number in a second."""
    longest = max(seconds, default=0.0)
    if longest >= 1:
        return "s", 1.0
    return ("ms", 1e3) if longest >= 1e-3 or longest == 0 else ("us", 1e6)


def size_unit(size_bytes: Sequence[int]) -> tuple[str, float]:
    """The unit for an axis that holds these sizes, and its bytes."""
    largest = max(size_bytes, default=0)
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if largest >= 2**power:
            return unit, float(2**power)
    return "bytes", 1.0
