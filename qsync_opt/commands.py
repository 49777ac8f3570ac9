"""The commands of `qsync-opt`: each takes the parsed options, shows its result, returns a code.

What a command needs is imported when it runs, so `--help` and usage errors are instant.
Files are written before anything is shown, so that a reader who goes away loses nothing.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from qsync_opt.errors import FormatError, ParameterError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from qsync_opt.optimize.comparison import ComparisonRow
    from qsync_opt.optimize.problem import AllocationProblem
    from qsync_opt.optimize.result import Progress, SolveParameters

EXIT_PLAN = 0
EXIT_NO_PLAN = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
EXIT_PIPE_CLOSED = 141  # 128 + SIGPIPE

#: Solved by `demo` where it is found, else a generated problem of the same size.
_DEMO_PROBLEM = Path("problems") / "resnet50-v100-t4.json.gz"


def run_solve(arguments: argparse.Namespace) -> int:
    """Find a plan, and write it where `--output` says."""
    from qsync_opt import console
    from qsync_opt.files import load_plan, load_problem, save_plan
    from qsync_opt.optimize.result import SolveStatus
    from qsync_opt.optimize.solve import solve

    problem = _paced(load_problem(arguments.problem), arguments)
    hint = None if arguments.hint is None else load_plan(arguments.hint)
    check_targets(arguments.output)
    with console.solving() as progress:
        result = solve(
            problem,
            method=arguments.method,
            parameters=_parameters(arguments, progress),
            hint=hint,
        )
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
    from qsync_opt.files import load_plan, load_problem
    from qsync_opt.optimize.evaluate import evaluate

    problem = load_problem(arguments.problem)
    plan = load_plan(arguments.plan)
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

    problem = _paced(load_problem(arguments.problem), arguments)
    with console.solving() as progress:
        comparison = compare(
            problem, methods=arguments.methods, parameters=_parameters(arguments, progress)
        )
    if arguments.json:
        console.write_json(console.comparison_to_json(comparison))
    else:
        console.write(*console.render_comparison(comparison))
    return _exit_code(comparison.rows)


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
            parameters=_parameters(arguments, progress),
        )
    if arguments.csv is not None:
        write_atomically(arguments.csv, pareto_csv(curve).encode())
    if arguments.plot is not None:
        plot_pareto(curve, arguments.plot)
    if arguments.json:
        console.write_json(console.pareto_to_json(curve))
    else:
        console.write(*console.render_pareto(curve))
    return _exit_code([row for point in curve.points for row in point.comparison.rows])


def run_explain(arguments: argparse.Namespace) -> int:
    """Say which budget is too small, and by how much."""
    from qsync_opt import console
    from qsync_opt.files import load_problem
    from qsync_opt.optimize.explain import explain

    problem = _paced(load_problem(arguments.problem), arguments)
    with console.solving():
        explanation = explain(problem)
    if arguments.json:
        console.write_json(explanation)
    else:
        console.write(*console.render_explanation(explanation))
    return EXIT_PLAN if explanation.feasible else EXIT_NO_PLAN


def run_export(arguments: argparse.Namespace) -> int:
    """Write a problem as MPS, or read a solution of that file back into a plan."""
    from qsync_opt import console
    from qsync_opt.files import load_plan, load_problem, save_plan
    from qsync_opt.optimize.export import read_mps_solution, write_mps

    if (arguments.solution is None) != (arguments.plan is None):
        given, missing = (
            ("plan", "solution") if arguments.plan is not None else ("solution", "plan")
        )
        raise ParameterError(missing, f"must be given with --{given}", None)
    check_targets(arguments.mps if arguments.solution is None else arguments.plan)
    problem = _paced(load_problem(arguments.problem), arguments)
    if arguments.solution is None:
        with console.solving():  # the deadline may have to be found
            write_mps(problem, arguments.mps, device=arguments.device)
        if arguments.json:
            console.write_json({"mps": arguments.mps, "device": arguments.device})
        else:
            console.write(f"wrote {arguments.mps}")
        return EXIT_PLAN

    from qsync_opt.optimize.evaluate import evaluate

    base = None if arguments.base_plan is None else load_plan(arguments.base_plan)
    plan = read_mps_solution(problem, arguments.mps, arguments.solution, base_plan=base)
    evaluation = evaluate(problem, plan)
    save_plan(plan, arguments.plan)
    if arguments.json:
        console.write_json({"plan": arguments.plan, "evaluation": evaluation})
    else:
        console.write(*console.render_evaluation(problem, plan, evaluation))
    return EXIT_PLAN if evaluation.feasible else EXIT_NO_PLAN


def run_generate(arguments: argparse.Namespace) -> int:
    """Write a random problem."""
    from qsync_opt import console
    from qsync_opt.files import save_problem
    from qsync_opt.optimize.generate import generate_problem

    problem = generate_problem(
        operators=arguments.operators,
        precisions=arguments.precisions,
        devices=arguments.devices,
        seed=arguments.seed,
        tightness=arguments.tightness,
        graph=arguments.graph,
        costs=arguments.costs,
        buckets=arguments.buckets,
    )
    save_problem(problem, arguments.output)
    if arguments.json:
        console.write_json(
            {"problem": arguments.output, "name": problem.name, "sha256": problem.sha256}
        )
    else:
        console.write(f"wrote {arguments.output}: {problem.name}")
    return EXIT_PLAN


def run_demo(arguments: argparse.Namespace) -> int:
    """Compare the methods on one instance, draw its Pareto curve, write plans and MPS."""
    from qsync_opt import console
    from qsync_opt.files import load_problem, save_plan
    from qsync_opt.optimize.compare import compare, pareto
    from qsync_opt.optimize.export import write_mps
    from qsync_opt.optimize.generate import generate_problem
    from qsync_opt.report import check_image, plot_pareto

    if arguments.problem is not None or _DEMO_PROBLEM.exists():
        problem = load_problem(arguments.problem or _DEMO_PROBLEM)
    else:
        problem = generate_problem(operators=54)
    folder = Path(arguments.output)
    folder.mkdir(parents=True, exist_ok=True)
    plots = [folder / "pareto.png", folder / "pareto.svg"]
    for path in plots:
        check_image(path)
    with console.solving() as progress:
        parameters = _parameters(arguments, progress)
        comparison = compare(problem, parameters=parameters)
        curve = pareto(problem, slacks=arguments.slacks, parameters=parameters)
    for path in plots:
        plot_pareto(curve, path)
    plans = {row.method: row.plan for row in comparison.rows if row.plan is not None}
    written = [*plots]
    for method, plan in plans.items():
        written.append(folder / f"plan-{method}.json")
        save_plan(plan, written[-1])
    if comparison.deadline_s is not None:
        written.append(folder / "problem.mps.gz")
        write_mps(problem, written[-1], deadline_s=comparison.deadline_s)
    if arguments.json:
        paths = [str(path) for path in written]
        console.write_json(
            {
                "comparison": console.comparison_to_json(comparison),
                "pareto": console.pareto_to_json(curve),
                "files": paths,
            }
        )
    else:
        console.write(f"{problem.name}: {problem.provenance}\n")
        console.write(*console.render_comparison(comparison))
        console.write(*console.render_pareto(curve))
        console.write("wrote " + "\n      ".join(str(path) for path in written))
    return _exit_code(comparison.rows)


def _exit_code(rows: Sequence[ComparisonRow]) -> int:
    from qsync_opt.optimize.result import SolveStatus

    if any(row.status is SolveStatus.INTERRUPTED for row in rows):
        return EXIT_INTERRUPTED
    return EXIT_PLAN if any(row.plan is not None for row in rows) else EXIT_NO_PLAN


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


def _paced(problem: AllocationProblem, arguments: argparse.Namespace) -> AllocationProblem:
    """The problem with the pace that the options ask for, if they do."""
    if arguments.deadline is not None:
        return replace(problem, deadline_s=arguments.deadline)
    if arguments.slack is not None:
        return replace(problem, deadline_s=None, slack=arguments.slack)
    return problem


def _parameters(
    arguments: argparse.Namespace, progress: Callable[[Progress], None] | None
) -> SolveParameters:
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
