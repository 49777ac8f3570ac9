"""`qsync-opt calibrate`: a run of a plan beside its prediction, kept with the measured costs."""

from __future__ import annotations

import statistics
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from qsync_opt import options
from qsync_opt.commands import EXIT_PLAN, check_targets, load_plan_of
from qsync_opt.errors import ParameterError
from qsync_opt.measured_costs import (
    add_measured_options,
    costs_files,
    load_measured,
    load_measured_graph,
)

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from qsync_opt.optimize.problem import AllocationProblem
    from qsync_opt.runtime.metrics import StepMetrics

#: First steps of a run that do not count: buckets form, kernels are chosen, caches fill.
_WARM_UP = 3


def add_commands(command: options.AddCommand) -> None:
    """Add `calibrate` to the command line."""
    sub = command(
        "calibrate",
        run_calibrate,
        "keep with the costs how far a prediction was off from a run, for all later ones",
    )
    sub.add_argument("problem", metavar="PROBLEM", help="problem file built from the costs")
    sub.add_argument("plan", metavar="PLAN", help="plan file that was run")
    source = sub.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--measured", type=options.number, metavar="S", help="iteration time of the run (s)"
    )
    source.add_argument(
        "--metrics", metavar="FOLDER", help="folder that `train` wrote the steps of the run to"
    )
    add_measured_options(sub)


def run_calibrate(arguments: argparse.Namespace) -> int:
    """Replay a plan, compare with its run, and write the costs files with the error in them."""
    from qsync_opt import console
    from qsync_opt.calibration import median_error
    from qsync_opt.files import load_problem, save_costs
    from qsync_opt.hosts import calibrate

    problem = load_problem(arguments.problem)
    plan = load_plan_of(problem, arguments.plan)
    files = costs_files(arguments)
    if len(set(files.values())) < len(files):
        rule = "must name a file of its own for each device kind"
        raise ParameterError("kind", rule, sorted(files.values())[0])
    check_targets(*files.values())
    graph = load_measured_graph(arguments)
    if graph is None:
        raise ParameterError("kind", "must be given: the costs to keep the error with", None)
    costs, _ = load_measured(problem, arguments)
    measured_s = arguments.measured
    if measured_s is None:
        measured_s = _median_step_s(arguments.metrics, problem)
    calibrated = calibrate(
        problem, plan, measured_s, graph=graph, costs=costs, waits=arguments.waits
    )
    for name, row in calibrated.items():
        save_costs(row, files[name])
    run = next(iter(calibrated.values())).held_out[-1]
    kinds = {
        name: {
            "costs": files[name],
            "runs": len(row.held_out),
            "median_error": median_error(row.held_out),
            "error": row.error,
        }
        for name, row in calibrated.items()
    }
    if arguments.json:
        shown = {"predicted_s": run.predicted_s, "measured_s": run.measured_s, "error": run.error}
        console.write_json({**shown, "kinds": kinds})
        return EXIT_PLAN
    sign = "more" if run.error > 0 else "less"
    lines = [
        f"predicted {console.seconds(run.predicted_s)}, measured {console.seconds(run.measured_s)}:"
        f" {console.percent(abs(run.error))} {sign} than measured"
    ]
    lines += [
        f"{name}: ± {console.percent(row.error)} of {len(row.held_out)} run(s), median"
        f" {console.percent(median_error(row.held_out))}; wrote {files[name]}"
        for name, row in calibrated.items()
    ]
    console.write(*lines)
    return EXIT_PLAN


def _median_step_s(folder: str, problem: AllocationProblem) -> float:
    """Median over the steps of the slowest rank's time.

    Raises:
        ParameterError: no steps that count, or of a job of other ranks than the problem's.
    """
    from qsync_opt.model_commands import require_torch

    require_torch()
    from qsync_opt.runtime.metrics import read_metrics

    if not Path(folder).is_dir():
        raise ParameterError("metrics", "must be a folder that `train` wrote", folder)
    metrics: Mapping[int, list[StepMetrics]] = read_metrics(Path(folder))
    found = Counter(rows[-1].kind for rows in metrics.values() if rows)
    wanted = Counter({device.name: device.workers for device in problem.devices})
    if all(metrics.values()) and found and found != wanted:
        rule = f"must be of a job with the ranks of the problem ({_counted(wanted)})"
        raise ParameterError("metrics", rule, _counted(found), "Give the run of this plan")
    steps = zip(*metrics.values(), strict=False)  # those that every rank has written
    times = [max(row.step_s for row in rows) for rows in steps][_WARM_UP:]
    if not times:
        rule = f"must hold more than {_WARM_UP} steps of a run"
        raise ParameterError("metrics", rule, folder, "Train for more steps with --output")
    return float(statistics.median(times))


def _counted(kinds: Mapping[str, int]) -> str:
    return ", ".join(f"{kind} x {count}" for kind, count in sorted(kinds.items()))
