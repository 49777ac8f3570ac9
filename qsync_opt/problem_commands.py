"""The commands of `qsync-opt` that write problems and read solutions: `export` and `generate`.

Like those in `commands` they take the parsed options, show their result and return a code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qsync_opt import options
from qsync_opt.commands import EXIT_NO_PLAN, EXIT_PLAN, check_targets, paced
from qsync_opt.errors import ParameterError

if TYPE_CHECKING:
    import argparse


def add_commands(command: options.AddCommand) -> None:
    """Add `export` and `generate` to the command line."""
    sub = command("export", run_export, "write a problem as MPS, or read a solution of it back")
    sub.add_argument("problem", metavar="PROBLEM", help="problem file")
    sub.add_argument("mps", metavar="MPS", help="MPS file to write (.mps or .mps.gz)")
    sub.add_argument("--device", metavar="KIND", help="one device kind only; default: joint")
    sub.add_argument(
        "--solution",
        metavar="FILE",
        help="solution file of HiGHS, SCIP or CBC for MPS; MPS is read instead of written",
    )
    sub.add_argument("--plan", metavar="PLAN", help="with --solution: the plan file to write")
    sub.add_argument(
        "--base-plan", metavar="PLAN", help="with --solution of one kind: plan of the other kinds"
    )
    options.pace_options(sub)

    sub = command("generate", run_generate, "write a seeded random problem")
    sub.add_argument("output", metavar="OUT", help="problem file to write (.json or .json.gz)")
    for name, default, text in (
        ("operators", 300, "operators"),
        ("precisions", 4, "precisions, 1 to 6"),
        ("devices", 2, "device kinds"),
        ("buckets", 8, "gradient buckets"),
        ("seed", 0, "seed of the random numbers"),
    ):
        sub.add_argument(
            f"--{name}", type=int, default=default, metavar="N", help=f"{text}; default: {default}"
        )
    sub.add_argument(
        "--tightness",
        type=options.number,
        default=0.3,
        metavar="X",
        help="0: budgets leave no room, 1: they never bind; default: %(default)s",
    )
    sub.add_argument(
        "--communication",
        type=options.whole_numbers,
        default=(),
        metavar="BITS",
        help="fewer bits that gradients can be sent in, between commas; default: 32 only",
    )
    sub.add_argument("--graph", default="branching", help="branching (default) or chain")
    sub.add_argument(
        "--costs", default="independent", help="independent (default), correlated or inverse"
    )


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
    problem = paced(load_problem(arguments.problem), arguments)
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
        communication=arguments.communication,
    )
    save_problem(problem, arguments.output)
    if arguments.json:
        console.write_json(
            {"problem": arguments.output, "name": problem.name, "sha256": problem.sha256}
        )
    else:
        console.write(f"wrote {arguments.output}: {problem.name}")
    return EXIT_PLAN
