"""`write_report`: the page, and its pictures and tables as files beside it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from qsync_opt.files import write_atomically
from qsync_opt.report import looks
from qsync_opt.report.inputs import ReportInputs
from qsync_opt.report.page import page
from qsync_opt.report.sections import sections_of

PAGE = "report.html"


def write_report(
    inputs: ReportInputs,
    folder: str | os.PathLike[str],
    *,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Path, ...]:
    """Write `report.html`, which needs no other file, and its pictures (PNG) and tables (CSV).

    What was not given is left out, and the page says so. The same inputs give the same bytes.

    Args:
        inputs: what to show.
        folder: where; it is made if it is not there.
        progress: called with how many files are written, and of how many.

    Returns:
        The files, the page first.

    Raises:
        ParameterError: matplotlib is not installed.
        FormatError: a file cannot be written.
    """
    looks.require_matplotlib("report", str(folder))
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    sections = sections_of(inputs)
    pictures = [picture for section in sections for picture in section.pictures]
    tables = [table for section in sections for table in section.tables]
    names = [*(f"{p.name}.png" for p in pictures), *(f"{t.name}.csv" for t in tables)]
    total = len(names) + 1
    written = [target / PAGE]
    for picture in pictures:
        written.append(target / f"{picture.name}.png")
        write_atomically(written[-1], picture.png())
        if progress is not None:
            progress(len(written) - 1, total)
    for table in tables:
        written.append(target / f"{table.name}.csv")
        write_atomically(written[-1], table.csv().encode())
    write_atomically(written[0], page(inputs, sections, names).encode())
    if progress is not None:
        progress(total, total)
    return tuple(written)
