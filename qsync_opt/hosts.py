"""`host_costs`: what the host of a device kind takes, from its measured costs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qsync_opt.costs import DeviceCosts
from qsync_opt.errors import CostsError
from qsync_opt.graph import OperatorGraph
from qsync_opt.precision import Precision
from qsync_opt.simulate.tasks import HostCosts


def host_costs(
    graph: OperatorGraph, costs: DeviceCosts, precisions: Sequence[Precision]
) -> HostCosts:
    """Launch times in the columns of a problem; on a CPU host and device are one, and it is zero.

    Args:
        graph: the graph.
        costs: measured for it.
        precisions: columns of the problem.

    Raises:
        CostsError: costs of another graph.
    """
    if costs.graph_sha256 != graph.sha256:
        rule = f"must be that of the graph ({graph.sha256[:12]}...)"
        raise CostsError("graph_sha256", rule, costs.graph_sha256, "Measure with this graph")
    rows = [operator.signature for operator in graph.operators]
    tables = {}
    for name in ("forward_host_s", "backward_host_s"):
        measured = np.nan_to_num(getattr(costs.operators, name), nan=0.0)
        table = np.zeros((len(rows), len(precisions)))
        for column, precision in enumerate(precisions):
            if precision in costs.precisions:
                table[:, column] = measured[rows, costs.precisions.index(precision)]
        tables[name] = table
    return HostCosts(forward_s=tables["forward_host_s"], backward_s=tables["backward_host_s"])
