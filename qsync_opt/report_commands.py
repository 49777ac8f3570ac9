"""`qsync-opt report`: one page of pictures and tables from whatever files there are."""

from __future__ import annotations

import os
import sys
from argparse import BooleanOptionalAction
from pathlib import Path
from typing import TYPE_CHECKING

from qsync_opt import options
from qsync_opt.commands import EXIT_PLAN, exit_code, load_plan_of, paced, solve_parameters
from qsync_opt.errors import ParameterError
from qsync_opt.measured_costs import add_measured_options, load_measured

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from qsync_opt.optimize.comparison import Comparison, ParetoCurve
    from qsync_opt.optimize.problem import AllocationProblem
    from qsync_opt.report import CurvePoint


def add_commands(command: options.AddCommand) -> None:
    """Add `report` to the command line."""
    sub = command(
        "report",
        run_report,
        "write pictures and tables of plans, predictions and training as one HTML page",
    )
    sub.add_argument("problem", metavar="PROBLEM", help="problem file")
    for name, value, text in (
        ("plan", "PLAN", "a plan file; pictures of one plan show the first"),
        ("metrics", "FOLDER", "what `train` wrote, under the name of its plan"),
        ("trace", "FILE", "a measured Chrome trace, under the name of its plan"),
    ):
        sub.add_argument(
            f"--{name}",
            action="append",
            default=[],
            metavar=f"[NAME=]{value}",
            help=f"{text}; can be repeated",
        )
    sub.add_argument("--pareto", metavar="FILE", help="points that `pareto --csv` wrote")
    add_measured_options(sub)
    sub.add_argument(
        "--solve", action="store_true", help="find plans and the Pareto curve, with these options:"
    )
    options.methods_option(sub)
    options.slacks_option(sub)
    options.pace_options(sub)
    options.solver_options(sub)
    sub.add_argument(
        "--output", "-o", metavar="FOLDER", default="report-output", help="default: %(default)s"
    )
    add_open_option(sub)


def add_open_option(sub: argparse.ArgumentParser) -> None:
    """Whether a browser is to show the page."""
    sub.add_argument(
        "--open",
        action=BooleanOptionalAction,
        default=None,
        help="show the page in a browser; default: where there is a screen and a terminal",
    )


def run_report(arguments: argparse.Namespace) -> int:
    """Write the page, its pictures and its tables."""
    from qsync_opt import console
    from qsync_opt.files import load_problem, read_bytes
    from qsync_opt.report import (
        ReportInputs,
        curve_of,
        read_curve,
        read_run,
        read_trace,
        write_report,
    )
    from qsync_opt.report.looks import require_matplotlib

    require_matplotlib("report", arguments.output)
    problem = paced(load_problem(arguments.problem), arguments)
    plans = {name: load_plan_of(problem, path) for name, path in _named("plan", arguments.plan)}
    runs = {name: read_run(path) for name, path in _named("metrics", arguments.metrics)}
    steps = {name: read_trace(problem, path) for name, path in _named("trace", arguments.trace)}
    curve: tuple[CurvePoint, ...] = ()
    if arguments.pareto is not None:
        text = read_bytes(arguments.pareto).decode(errors="replace")
        curve = read_curve(text, arguments.pareto)
    costs, hosts = load_measured(problem, arguments)
    comparison: Comparison | None = None
    if arguments.solve:
        comparison, found = _solved(problem, arguments)
        curve = curve or curve_of(found)
        for row in comparison.rows:
            if row.plan is not None:
                plans.setdefault(row.method, row.plan)
    inputs = ReportInputs(
        problem=problem,
        plans=plans,
        deadline_s=None if comparison is None else comparison.deadline_s,
        comparison=comparison,
        curve=curve,
        hosts=hosts,
        costs=costs,
        runs=runs,
        steps=steps,
    )
    with console.counting("written") as progress:
        files = write_report(inputs, arguments.output, progress=progress)
    if arguments.json:
        console.write_json({"report": str(files[0]), "files": [str(path) for path in files]})
    else:
        console.write(f"wrote {files[0]}, and beside it {len(files) - 1} pictures and tables")
    open_page(files[0], arguments.open)
    return EXIT_PLAN if comparison is None else exit_code(comparison.rows)


def _solved(
    problem: AllocationProblem, arguments: argparse.Namespace
) -> tuple[Comparison, ParetoCurve]:
    from qsync_opt import console
    from qsync_opt.optimize.compare import compare, pareto

    with console.solving() as progress:
        parameters = solve_parameters(arguments, progress)
        comparison = compare(problem, methods=arguments.methods, parameters=parameters)
        curve = pareto(
            problem, slacks=arguments.slacks, methods=arguments.methods, parameters=parameters
        )
    return comparison, curve


def _named(field: str, texts: Sequence[str]) -> list[tuple[str, str]]:
    """`NAME=PATH` as a pair; without a name, it is that of the file without `plan-` or `train-`.

    Raises:
        ParameterError: no path, or a name twice.
    """
    pairs: list[tuple[str, str]] = []
    for text in texts:
        name, sign, path = text.partition("=")
        if not sign:
            stem = Path(text).name.split(".")[0]
            name, path = stem.removeprefix("plan-").removeprefix("train-"), text
        if not (name and path):
            raise ParameterError(field, "must be NAME=PATH", text)
        if name in dict(pairs):
            raise ParameterError(field, "must have each name once", name, "Give NAME=PATH")
        pairs.append((name, path))
    return pairs


def open_page(path: Path, wanted: bool | None) -> None:
    """Show a page in a browser: if that is wanted, or nothing is said and somebody sees it.

    Args:
        path: of the page.
        wanted: None to decide by whether there are a screen and a terminal.

    Raises:
        ParameterError: it is wanted, and there is no browser.
    """
    import webbrowser

    from qsync_opt import console

    has_screen = sys.platform in ("darwin", "win32") or any(
        os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY")
    )
    if wanted is False or (wanted is None and not (has_screen and console.is_terminal())):
        return
    shown = webbrowser.open(path.resolve().as_uri())
    if wanted and not shown:
        rule = "needs a browser, and none was found"
        raise ParameterError("open", rule, str(path), "Open the file yourself")
