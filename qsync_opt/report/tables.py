"""`Table`: the numbers behind a picture, as CSV to the last digit and as HTML for reading.

A column's name says its unit (`_s`, `_bytes`), which decides how it is shown. In HTML every
number stands in a `data` element whose value is that of the CSV.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from qsync_opt import console

#: Rows that a page shows; the CSV has all of them.
_MOST_ROWS = 400


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of one kind.

    Attributes:
        name: of its file, and its id in the page.
        title: what the rows are.
        columns: names with units: letters, digits and underscores.
        rows: text, numbers, truth values, or None where there is no value.
    """

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]

    def csv(self) -> str:
        """The table as CSV, with a header."""
        stream = io.StringIO()
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows([[_text(value) for value in row] for row in self.rows])
        return stream.getvalue()

    def html(self) -> str:
        """The table as an element that scrolls by itself where it is too wide."""
        numeric = [
            any(_is_number(row[index]) for row in self.rows) for index in range(len(self.columns))
        ]
        head = "".join(
            f'<th scope="col"{_right(numeric[index])}>{escape(_heading(column))}</th>'
            for index, column in enumerate(self.columns)
        )
        rows = "\n".join(self._row(row, numeric) for row in self.rows[:_MOST_ROWS])
        rest = len(self.rows) - _MOST_ROWS
        note = f"<p>{rest} more rows are in {escape(self.name)}.csv.</p>" if rest > 0 else ""
        title = escape(self.title)
        return (
            f'<div class="scroll" tabindex="0" role="region" aria-label="{title}">\n'
            f'<table id="{self.name}"><caption>{title}</caption>\n'
            f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div>\n{note}"
        )

    def _row(self, row: Sequence[object], numeric: Sequence[bool]) -> str:
        cells = [
            f"<td{_right(numeric[index])}>{_cell(self.columns[index], value)}</td>"
            for index, value in enumerate(row)
        ]
        return f"<tr>{''.join(cells)}</tr>"


def _text(value: object) -> str:
    """A value in CSV: all digits, and nothing for None."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return repr(float(value)) if isinstance(value, float) else str(value)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _right(numeric: bool) -> str:
    return ' class="number"' if numeric else ""


def _heading(column: str) -> str:
    """`iteration_time_s` as `iteration time`: the unit is in the cells."""
    for unit in ("_s", "_bytes"):
        if column.endswith(unit):
            return column.removesuffix(unit).replace("_", " ")
    return column.replace("_", " ")


def _cell(column: str, value: object) -> str:
    if not _is_number(value):
        return escape(_text(value)) or "–"
    shown = shown_number(column, value)  # type: ignore[arg-type]  # a number, as asked
    return f'<data value="{escape(_text(value))}">{escape(shown)}</data>'


def shown_number(column: str, value: float) -> str:
    """A number as a person reads it, in the unit that suits it."""
    if isinstance(value, float) and not math.isfinite(value):
        return "–" if math.isnan(value) else str(value)
    if column.endswith("_s"):
        return console.seconds(value) if value >= 0 else f"-{console.seconds(-value)}"
    if column.endswith("_bytes"):
        return console.size(int(value))
    if column.endswith(("error", "gap", "share", "slack")):
        return console.percent(value)
    return str(value) if isinstance(value, int) else console.number(value)
