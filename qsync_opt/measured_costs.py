"""Options that name a graph and the costs measured for it, and what commands make of them.

With them a command knows what hosts take to launch, and how far predictions were off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qsync_opt.errors import ParameterError

if TYPE_CHECKING:
    import argparse

    from qsync_opt.costs import DeviceCosts
    from qsync_opt.graph import OperatorGraph
    from qsync_opt.optimize.problem import AllocationProblem
    from qsync_opt.simulate.tasks import HostCosts


def add_measured_options(sub: argparse.ArgumentParser) -> None:
    """Which costs were measured, for what hosts take to launch."""
    sub.add_argument("--graph", metavar="GRAPH", help="with --kind: the graph that was measured")
    sub.add_argument(
        "--kind",
        action="append",
        default=[],
        metavar="NAME=COSTS",
        help="costs file of a device kind, for what its host takes to launch; can be repeated",
    )
    sub.add_argument(
        "--waits",
        action="store_true",
        help="hosts wait for their devices in every step, as scaling the loss makes them",
    )


def load_measured(
    problem: AllocationProblem, arguments: argparse.Namespace
) -> tuple[dict[str, DeviceCosts], dict[str, HostCosts]]:
    """Costs by kind, and what the hosts take by them, from the options.

    Raises:
        ParameterError: one of the options without the others, or not NAME=COSTS.
    """
    from qsync_opt.files import load_costs
    from qsync_opt.hosts import host_costs

    graph = load_measured_graph(arguments)
    if graph is None:
        return {}, {}
    costs, hosts = {}, {}
    for name, path in costs_files(arguments).items():
        costs[name] = load_costs(path)
        hosts[name] = host_costs(graph, costs[name], problem.precisions, waits=arguments.waits)
    return costs, hosts


def load_measured_graph(arguments: argparse.Namespace) -> OperatorGraph | None:
    """The graph that was measured; None where the options are not given.

    Raises:
        ParameterError: one of the options without the others.
    """
    from qsync_opt.files import load_graph

    if bool(arguments.kind) != (arguments.graph is not None):
        given, missing = ("kind", "graph") if arguments.kind else ("graph", "kind")
        raise ParameterError(missing, f"must be given with --{given}", None)
    if arguments.graph is None:
        if arguments.waits:
            raise ParameterError("kind", "must be given with --waits", None)
        return None
    return load_graph(arguments.graph)


def costs_files(arguments: argparse.Namespace) -> dict[str, str]:
    """Device kind -> its costs file.

    Raises:
        ParameterError: not NAME=COSTS, or a name twice.
    """
    files: dict[str, str] = {}
    for text in arguments.kind:
        name, sign, path = text.partition("=")
        if not (name and sign and path):
            raise ParameterError("kind", "must be NAME=COSTS", text)
        if name in files:
            raise ParameterError("kind", "must name each device kind once", name)
        files[name] = path
    return files
