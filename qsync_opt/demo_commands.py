"""`qsync-opt demo`: from a model and this machine's devices to a report, in a few minutes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from qsync_opt import options
from qsync_opt.commands import exit_code, solve_parameters
from qsync_opt.report_commands import add_open_option, open_page

if TYPE_CHECKING:
    import argparse

    from qsync_opt.optimize.comparison import ComparisonRow

#: The same list as in `demo.tasks`, which a test compares.
TASKS = ("digits", "text")


def add_commands(command: options.AddCommand) -> None:
    """Add `demo` to the command line."""
    sub = command(
        "demo",
        run_demo,
        "measure two device kinds of this machine, solve, predict, train and report; or solve and"
        " report a problem",
    )
    sub.add_argument(
        "problem", metavar="PROBLEM", nargs="?", help="problem file: solve and report this alone"
    )
    sub.add_argument("--task", choices=TASKS, action="append", help="can be repeated; default: all")
    sub.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="default: two GPUs if there are two, else two processes on the CPU",
    )
    sub.add_argument("--steps", type=int, metavar="N", help="of training; default: by task")
    sub.add_argument(
        "--output", "-o", metavar="FOLDER", default="demo-output", help="default: %(default)s"
    )
    add_open_option(sub)
    options.slacks_option(sub)
    options.solver_options(sub)


def run_demo(arguments: argparse.Namespace) -> int:
    """Run the tasks, or solve the problem; everything is written to one folder."""
    from qsync_opt import console
    from qsync_opt.errors import ParameterError
    from qsync_opt.report.looks import require_matplotlib

    require_matplotlib("demo", arguments.output)
    if arguments.steps is not None and arguments.steps < 1:
        raise ParameterError("steps", "must be at least 1", arguments.steps)
    folder = Path(arguments.output)
    folder.mkdir(parents=True, exist_ok=True)
    facts: dict[str, object] = {}
    rows: list[ComparisonRow] = []
    pages: list[Path] = []
    if arguments.problem is not None:
        facts, rows = _of_problem(arguments, folder)
        pages.append(folder / "report.html")
    else:
        facts, rows = _of_tasks(arguments, folder)
        pages += [folder / name / "report.html" for name in facts if name != "machine"]
    if arguments.json:
        files = sorted(str(path) for path in folder.rglob("*") if path.is_file())
        console.write_json({**facts, "files": files})
    for page in pages:
        open_page(page, arguments.open)
    return exit_code(rows)


def _of_problem(
    arguments: argparse.Namespace, folder: Path
) -> tuple[dict[str, object], list[ComparisonRow]]:
    from qsync_opt import console
    from qsync_opt.demo.pipeline import run_problem
    from qsync_opt.files import load_problem

    problem = load_problem(arguments.problem)
    if not arguments.json:
        console.write(console.one_line(f"{problem.name}: {problem.provenance}"))
    facts, comparison = run_problem(
        problem,
        folder,
        slacks=arguments.slacks,
        parameters=solve_parameters(arguments, None),
        shown=not arguments.json,
    )
    return facts, list(comparison.rows)


def _of_tasks(
    arguments: argparse.Namespace, folder: Path
) -> tuple[dict[str, object], list[ComparisonRow]]:
    from qsync_opt import console
    from qsync_opt.demo.devices import demo_machine
    from qsync_opt.demo.pipeline import run_task
    from qsync_opt.demo.tasks import find_task
    from qsync_opt.model_commands import require_torch

    require_torch()
    facts: dict[str, object] = {}
    rows: list[ComparisonRow] = []
    names = list(dict.fromkeys(arguments.task or TASKS))
    with demo_machine(arguments.device) as machine:
        tasks = [find_task(name, machine.device_type, arguments.steps) for name in names]
        facts["machine"] = {device.kind: device.words for device in machine.devices}
        told = "; ".join(f"{device.kind}: {device.words}" for device in machine.devices)
        if not arguments.json:
            console.write(f"{told}. {machine.note}".rstrip(". ") + ".")
        for task in tasks:
            if not arguments.json:
                console.write(f"{task.name}: {task.words}")
            facts[task.name], comparison = run_task(
                machine,
                task,
                folder / task.name,
                slacks=arguments.slacks,
                parameters=solve_parameters(arguments, None),
                shown=not arguments.json,
            )
            rows += comparison.rows
    return facts, rows
