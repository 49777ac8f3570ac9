"""The commands of `qsync-opt`: each takes the parsed options, shows its result, returns a code.

What a command needs is imported when it runs, so `--help` and usage errors are instant.
Files are written before anything is shown, so that a reader who goes away loses nothing.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from qsync_opt import options
from qsync_opt.errors import FormatError
from qsync_opt.measured_costs import add_measured_options, load_measured

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from qsync_opt.optimize.comparison import ComparisonRow
    from qsync_opt.optimize.problem import AllocationProblem
    from qsync_opt.optimize.result import Progress, SolveParameters
    from qsync_opt.plan import PrecisionPlan

EXIT_PLAN = 0
EXIT_NO_PLAN = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
EXIT_PIPE_CLOSED = 141  # 128 + SIGPIPE


def add_commands(command: options.AddCommand) -> None:
    """Add the commands that look for plans, and judge them, to the command line."""
    sub = command("solve", run_solve, "find the plan of least perturbation that keeps the pace")
    sub.add_argument("problem", metavar="PROBLEM", help="problem file")
    sub.add_argument(
        "--method", choices=options.METHODS, default="auto", help="default: %(default)s"
    )
    sub.add_argument("--hint", metavar="PLAN", help="plan file to start from")
    sub.add_argument("--output", "-o", metavar="PLAN", help="write the plan to this file")
    options.pace_options(sub)
    options.solver_options(sub)
    add_measured_options(sub)

    sub = command("evaluate", run_evaluate, "what a plan costs, and the rules it breaks")
    sub.add_argument("problem", metavar="PROBLEM", help="problem file")
    sub.add_argument("plan", metavar="PLAN", help="plan file")
    sub.add_argument(
        "--deadline", type=options.number, metavar="S", help="iteration time to keep (s)"
    )

    sub = command("compare", run_compare, "several methods side by side")
    sub.add_argument("problem", metavar="PROBLEM", help="problem file")
    options.methods_option(sub)
    options.pace_options(sub)
    options.solver_options(sub)

    sub = command("pareto", run_pareto, "perturbation against iteration time")
    sub.add_argument("problem", metavar="PROBLEM", help="problem file")
    options.slacks_option(sub)
    options.methods_option(sub)
    sub.add_argument("--plot", metavar="FILE", help="draw the curve (.png, .svg or .pdf)")
    sub.add_argument("--csv", metavar="FILE", help="write the points as CSV")
    options.solver_options(sub)

    sub = command("explain", run_explain, "which budget of a problem is too small, and by how much")
    sub.add_argument("problem", metavar="PROBLEM", help="problem file")
    options.pace_options(sub)


def run_solve(arguments: argparse.Namespace) -> int:
    """Find a plan, and write it where `--output` says."""
    from qsync_opt import console
    from qsync_opt.files import load_problem, save_plan
    from qsync_opt.optimize.result import SolveStatus
    from qsync_opt.optimize.solve import solve
    from qsync_opt.replayed import solve_replayed

    problem = paced(load_problem(arguments.problem), arguments)
    hint = None if arguments.hint is None else load_plan_of(problem, arguments.hint)
    check_targets(arguments.output)
    _, hosts = load_measured(problem, arguments)
    with console.solving() as progress:
        parameters, method = solve_parameters(arguments, progress), arguments.method
        if hosts:
            result = solve_replayed(problem, hosts, method=method, parameters=parameters, hint=hint)
        else:
            result = solve(problem, method=method, parameters=parameters, hint=hint)
    if arguments.output is not None and result.plan is not None:
        save_plan(result.plan, arguments.output)
    if arguments.json:
        console.write_json(result)
    else:
        console.write(*console.render_result(problem, result))
    if result.status is SolveStatus.INTERRUPTED:
        return EXIT_INTERRUPTED
    return EXIT_NO_PLAN if result.plan is None else EXIT_PLAN


def run_evaluate(arguments: argparse.Namespace) -> int:
    """Show what a plan costs and which rules it breaks."""
    from qsync_opt import console
    from qsync_opt.files import load_problem
    from qsync_opt.optimize.evaluate import evaluate

    problem = load_problem(arguments.problem)
    plan = load_plan_of(problem, arguments.plan)
    evaluation = evaluate(problem, plan, deadline_s=arguments.deadline)
    if arguments.json:
        console.write_json(evaluation)
    else:
        console.write(*console.render_evaluation(problem, plan, evaluation))
    return EXIT_PLAN if evaluation.feasible else EXIT_NO_PLAN


def run_compare(arguments: argparse.Namespace) -> int:
    """Show several methods side by side."""
    from qsync_opt import console
    from qsync_opt.files import load_problem
    from qsync_opt.optimize.compare import compare

    problem = paced(load_problem(arguments.problem), arguments)
    with console.solving() as progress:
        comparison = compare(
            problem, methods=arguments.methods, parameters=solve_parameters(arguments, progress)
        )
    if arguments.json:
        console.write_json(console.comparison_to_json(comparison))
    else:
        console.write(*console.render_comparison(comparison))
    return exit_code(comparison.rows)


def run_pareto(arguments: argparse.Namespace) -> int:
    """Show perturbation against iteration time; draw it and write it as CSV if asked."""
    from qsync_opt import console
    from qsync_opt.files import load_problem, write_atomically
    from qsync_opt.optimize.compare import pareto
    from qsync_opt.report import check_image, pareto_csv, plot_pareto

    check_targets(arguments.csv, arguments.plot)
    if arguments.plot is not None:
        check_image(arguments.plot)
    problem = load_problem(arguments.problem)
    with console.solving() as progress:
        curve = pareto(
            problem,
            slacks=arguments.slacks,
            methods=arguments.methods,
            parameters=solve_parameters(arguments, progress),
        )
    if arguments.csv is not None:
        write_atomically(arguments.csv, pareto_csv(curve).encode())
    if arguments.plot is not None:
        plot_pareto(curve, arguments.plot)
    if arguments.json:
        console.write_json(console.pareto_to_json(curve))
    else:
        console.write(*console.render_pareto(curve))
    return exit_code([row for point in curve.points for row in point.comparison.rows])


def run_explain(arguments: argparse.Namespace) -> int:
    """Say which budget is too small, and by how much."""
    from qsync_opt import console
    from qsync_opt.files import load_problem
    from qsync_opt.optimize.explain import explain

    problem = paced(load_problem(arguments.problem), arguments)
    with console.solving():
        explanation = explain(problem)
    if arguments.json:
        console.write_json(explanation)
    else:
        console.write(*console.render_explanation(explanation))
    return EXIT_PLAN if explanation.feasible else EXIT_NO_PLAN


def exit_code(rows: Sequence[ComparisonRow]) -> int:
    """What a command with these rows ends with."""
    from qsync_opt.optimize.result import SolveStatus

    if any(row.status is SolveStatus.INTERRUPTED for row in rows):
        return EXIT_INTERRUPTED
    return EXIT_PLAN if any(row.plan is not None for row in rows) else EXIT_NO_PLAN


def load_plan_of(problem: AllocationProblem, path: str) -> PrecisionPlan:
    """The plan in a file, which must be one of a problem.

    Raises:
        FormatError: the file is not of the format.
        PlanError: the plan is not of the problem; says in which file it is.
    """
    from qsync_opt.files import load_plan, naming
    from qsync_opt.optimize.buckets import chosen
    from qsync_opt.optimize.evaluate import plan_columns

    plan = load_plan(path)
    with naming(path):  # what `evaluate` looks at first, and no more: it may come later
        plan_columns(problem, plan)
        chosen(problem.buckets, plan.communication)
    return plan


def check_targets(*paths: str | None) -> None:
    """Refuse a file that cannot be written before time is spent on what goes into it."""
    for path in paths:
        if path is None:
            continue
        target = Path(path)
        if target.exists() and not target.is_file():
            raise FormatError(path, "must be a regular file", "something else")
        folder = target.parent
        if not (folder.is_dir() and os.access(folder, os.W_OK)):
            raise FormatError(path, "must be in a folder that can be written", str(folder))


def paced(problem: AllocationProblem, arguments: argparse.Namespace) -> AllocationProblem:
    """The problem with the pace that the options ask for, if they do."""
    if arguments.deadline is not None:
        return replace(problem, deadline_s=arguments.deadline)
    if arguments.slack is not None:
        return replace(problem, deadline_s=None, slack=arguments.slack)
    return problem


def solve_parameters(
    arguments: argparse.Namespace, progress: Callable[[Progress], None] | None
) -> SolveParameters:
    """What the options ask of a solve."""
    from qsync_opt.optimize.result import SolveParameters

    return SolveParameters(
        time_limit_s=arguments.time_limit,
        relative_gap=arguments.gap,
        threads=arguments.threads,
        seed=arguments.seed,
        solver=arguments.solver,
        plain=arguments.plain,
        progress=progress,
    )
