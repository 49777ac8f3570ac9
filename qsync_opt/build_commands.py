"""The command of `qsync-opt` that makes a problem of measured costs: `build`.

Like those in `commands` it takes the parsed options, shows its result and returns a code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qsync_opt import options
from qsync_opt.commands import EXIT_PLAN, check_targets
from qsync_opt.errors import ParameterError

if TYPE_CHECKING:
    import argparse

    from qsync_opt.costs import AllReduceCosts, ClusterKind


def add_commands(command: options.AddCommand) -> None:
    """Add `build` to the command line."""
    sub = command("build", run_build, "make a problem of measured costs and a cluster")
    sub.add_argument("graph", metavar="GRAPH", help="graph file")
    sub.add_argument(
        "--kind",
        action="append",
        required=True,
        metavar="NAME=COSTS[,workers=N][,share=X][,memory_gb=X]",
        help="a device kind and its costs file; repeat for every kind",
    )
    sub.add_argument("--perturbation", metavar="TABLE", required=True, help="file of `perturb`")
    sub.add_argument(
        "--all-reduce", metavar="COSTS", help="costs file whose all-reduce times hold for the job"
    )
    sub.add_argument(
        "--bits",
        type=options.whole_numbers,
        default=(),
        metavar="16,8,...",
        help="bits that each bucket of gradients may be sent at instead of 32; takes costs of"
        " `measure --codes` and a table of `perturb --gradients`",
    )
    sub.add_argument("--output", "-o", metavar="PROBLEM", required=True, help="file to write")
    options.pace_options(sub)


def run_build(arguments: argparse.Namespace) -> int:
    """Make a problem of a graph, costs of several kinds, and a table of perturbations."""
    from qsync_opt import console
    from qsync_opt.build import build_problem, network_warnings, version_warnings
    from qsync_opt.costs import Cluster
    from qsync_opt.files import load_costs, load_graph, load_perturbations, save_problem

    check_targets(arguments.output)
    graph = load_graph(arguments.graph)
    kinds, files = zip(*(_kind(text) for text in arguments.kind), strict=True)
    costs = {kind.name: load_costs(path) for kind, path in zip(kinds, files, strict=True)}
    cluster = Cluster(kinds=kinds, all_reduce=_all_reduce(arguments.all_reduce))
    problem = build_problem(
        graph,
        costs,
        load_perturbations(arguments.perturbation),
        cluster,
        bits=arguments.bits,
        deadline_s=arguments.deadline,
        slack=arguments.slack or 0.0,
    )
    save_problem(problem, arguments.output)
    warnings = (*version_warnings(costs), *network_warnings(cluster))
    shown = {
        "problem": arguments.output,
        "sha256": problem.sha256,
        "operators": len(problem.operators),
        "precisions": list(problem.precisions),
        "buckets": len(problem.buckets),
        "bits": [[way.bits for way in bucket.choices] for bucket in problem.buckets],
        "devices": {
            device.name: {
                "workers": device.workers,
                "memory_bytes": device.memory_bytes,
                "fixed_bytes": device.fixed_bytes,
            }
            for device in problem.devices
        },
        "warnings": list(warnings),
    }
    if arguments.json:
        console.write_json(shown)
    else:
        console.write(
            f"{problem.name}: {len(problem.operators)} operators at"
            f" {', '.join(problem.precisions)}, {console.counted(len(problem.buckets), 'bucket')},"
            f" {console.counted(len(problem.devices), 'kind')}",
            *(f"warning: {text}" for text in warnings),
            f"wrote {arguments.output}",
        )
    return EXIT_PLAN


def _kind(text: str) -> tuple[ClusterKind, str]:
    """`NAME=COSTS,setting=value,...` as a kind and its file."""
    from qsync_opt.build import cluster_kind

    head, *settings = text.split(",")
    name, separator, path = head.partition("=")
    pairs = [setting.partition("=") for setting in settings]
    if not (separator and name and path) or not all(middle for _, middle, _ in pairs):
        rule = "must be NAME=COSTS, with ,workers=N ,share=X or ,memory_gb=X after it"
        raise ParameterError("kind", rule, text)
    return cluster_kind(name, **{key: value for key, _, value in pairs}), path


def _all_reduce(path: str | None) -> AllReduceCosts | None:
    from qsync_opt.files import load_costs

    if path is None:
        return None
    found = load_costs(path).all_reduce
    if found is None:
        rule = "must be costs that hold times of all-reduces"
        raise ParameterError("all_reduce", rule, path, "Measure with --ranks, or under torchrun")
    return found
