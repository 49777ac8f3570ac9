"""What measured costs add to a replay: launching, and the error to expect; and how that is found.

`host_costs` hands a kind's costs to `replay` and `solve_replayed`; `calibrate` keeps with them
how far the prediction of a plan was off once it was run, so that every later one says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone

import numpy as np

from qsync_opt.calibration import HeldOutRun, plan_digest, with_run
from qsync_opt.costs import DeviceCosts
from qsync_opt.errors import CostsError, ParameterError
from qsync_opt.graph import OperatorGraph, Role
from qsync_opt.optimize.arrays import FloatArray
from qsync_opt.optimize.problem import AllocationProblem
from qsync_opt.plan import PrecisionPlan
from qsync_opt.precision import Precision
from qsync_opt.simulate.replay import replay
from qsync_opt.simulate.tasks import HostCosts


def host_costs(
    graph: OperatorGraph,
    costs: DeviceCosts,
    precisions: Sequence[Precision],
    *,
    waits: bool = False,
) -> HostCosts:
    """Launch times in the columns of a problem; on a CPU host and device are one, and it is zero.

    Launching an operator alone, again and again, takes longer than in a step (predicted and
    measured steps on an H200: up to three times), so the times of each precision are scaled to
    what launching a whole step at it took, where that was measured.

    Args:
        graph: the graph.
        costs: measured for it.
        precisions: columns of the problem.
        waits: whether the host waits for its device in every step, see `HostCosts`.

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
    whole = tables["forward_host_s"] + tables["backward_host_s"]
    scale = _host_scale(graph, costs, precisions, whole)
    return HostCosts(
        forward_s=tables["forward_host_s"] * scale,
        backward_s=tables["backward_host_s"] * scale,
        optimizer_s=costs.optimizer.host_s,
        waits=waits,
        error=costs.error,
    )


def _host_scale(
    graph: OperatorGraph,
    costs: DeviceCosts,
    precisions: Sequence[Precision],
    told_s: FloatArray,
) -> FloatArray:
    """Measured over told launch time of a step at each precision; 1 where it is not known, [P].

    Operators that stay in fp32 in such a step are scaled as in a step in fp32.

    Args:
        graph: the graph.
        costs: measured for it.
        precisions: columns of `told_s`.
        told_s: of every operator at each precision, forward and backward together, [N, P].
    """
    scale = np.ones(len(precisions))
    if Precision.FP32 not in costs.step_of or Precision.FP32 not in precisions:
        return scale
    wide = told_s[:, precisions.index(Precision.FP32)]
    if not wide.sum() > 0.0:
        return scale
    wide = wide * (costs.step_of[Precision.FP32].host_s / wide.sum())
    signatures = [row.signature for row in graph.operators]
    movable = np.array([row.role is not Role.FIXED for row in graph.operators])
    for column, precision in enumerate(precisions):
        step = costs.step_of.get(precision)
        if step is None:
            continue
        has = costs.operators.available[signatures, costs.precisions.index(precision)]
        lowered = movable & has if precision is not Precision.FP32 else np.ones_like(movable)
        told = float(told_s[lowered, column].sum())
        left = step.host_s - float(wide[~lowered].sum())
        if told > 0.0 and left > 0.0:
            scale[column] = left / told
    return scale


def calibrate(
    problem: AllocationProblem,
    plan: PrecisionPlan,
    measured_s: float,
    *,
    graph: OperatorGraph,
    costs: Mapping[str, DeviceCosts],
    waits: bool = False,
) -> dict[str, DeviceCosts]:
    """The costs with what running a plan showed of them.

    The plan should not be one that the costs were measured with. It is replayed from these
    costs, and the predicted and the measured time are added to those of every kind given;
    `replay` with `host_costs` of them then carries the largest error.

    Args:
        problem: built from the costs.
        plan: the plan that was run.
        measured_s: iteration time of the run, the median over its steps, first ones left out.
        graph: that was measured.
        costs: device kind -> its costs.
        waits: see `host_costs`.

    Raises:
        PlanError: the plan is for another problem.
        ParameterError: a time that is not > 0, or costs of no kind or of an unknown one.
        CostsError: costs of another graph.
    """
    if not 0.0 < measured_s < float("inf"):
        raise ParameterError("measured_s", "must be a finite number > 0", measured_s)
    if not costs:
        raise ParameterError("costs", "must have at least one device kind", costs)
    hosts = {
        name: host_costs(graph, row, problem.precisions, waits=waits) for name, row in costs.items()
    }
    run = HeldOutRun(
        plan=plan_digest(plan),
        ranks=sum(device.workers for device in problem.devices),
        predicted_s=replay(problem, plan, hosts=hosts).iteration_time_s,
        measured_s=measured_s,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )
    return {name: replace(row, held_out=with_run(row.held_out, run)) for name, row in costs.items()}
