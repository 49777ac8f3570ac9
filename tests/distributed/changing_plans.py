"""Refinement on two ranks: parts of `training_on_ranks`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.nn import functional

from qsync_opt.build import build_problem
from qsync_opt.costs import Cluster, ClusterKind
from qsync_opt.errors import CaptureError, PlanError
from qsync_opt.files import load_plan
from qsync_opt.graph import OperatorGraph
from qsync_opt.kernels.rounding import Rounding
from qsync_opt.measure.capture import capture
from qsync_opt.optimize.problem import AllocationProblem
from qsync_opt.optimize.solve import solve
from qsync_opt.plan import PrecisionPlan
from qsync_opt.precision import Precision
from qsync_opt.runtime import patching, refinement
from qsync_opt.runtime.layers import Layer
from qsync_opt.runtime.parameters import TrainParameters
from qsync_opt.runtime.trainer import TrainProgress, TrainResult, train
from tests.cost_cases import made_up_costs, made_up_table
from tests.distributed.small_training import (
    KINDS,
    ROWS,
    data,
    require_equal,
    small_model,
    weights,
)

INTERVAL = 3


@cache
def case() -> tuple[OperatorGraph, AllocationProblem, PrecisionPlan]:
    """A problem with room for fp32 everywhere, and its fastest plan, which lowers a lot."""
    graph = capture(small_model(dropout=0.2), data(), functional.cross_entropy)
    costs = {kind: made_up_costs(graph, seed) for seed, kind in enumerate(KINDS)}
    kinds = tuple(ClusterKind(name=kind) for kind in KINDS)
    problem = build_problem(graph, costs, made_up_table(graph), Cluster(kinds=kinds), slack=100.0)
    plan = solve(problem, method="fastest").plan
    assert plan is not None
    assert {Precision.FP32} != set(plan.devices["weak"].values())
    return graph, problem, plan


def run(
    rank: int,
    folder: Path | None,
    steps: int,
    report: Callable[[TrainProgress], None] | None = None,
    model: nn.Sequential | None = None,
    **options: Any,
) -> tuple[nn.Sequential, TrainResult]:
    graph, problem, plan = case()
    model = small_model(dropout=0.2) if model is None else model
    given = {"refine_interval": INTERVAL, "checkpoint_interval": 0, **options}
    parameters = TrainParameters(
        steps=steps, batch_size=ROWS, learning_rate=0.02, folder=folder, **given
    )
    result = train(
        model,
        data(),
        functional.cross_entropy,
        parameters=parameters,
        plan=plan,
        kind=KINDS[rank],
        problem=problem,
        graph=graph,
        report=report,
    )
    return model, result


def precisions(model: nn.Module) -> dict[str, Precision]:
    return {
        name: module._qsync_state.precision
        for name, module in model.named_modules()
        if isinstance(module, Layer)
    }


def notes(result: TrainResult) -> dict[int, str]:
    return {row.step: row.refinement for row in result.metrics if row.refinement is not None}


def refinement_of_a_plan(rank: int, folder: Path) -> None:
    """The plan of a table gathered at step 3 is in use from step 6 on, on both ranks."""
    model = small_model(dropout=0.2)
    before = list(model.parameters())
    seen: list[dict[str, Precision]] = []
    _, result = run(rank, folder, 8, lambda progress: seen.append(precisions(model)), model=model)
    _, problem, first = case()
    told = notes(result)
    assert list(told) == [3, 6]
    assert told[3].startswith("the indicator took")
    assert told[6].startswith("a new plan: perturbation")
    own = {name: first.devices[KINDS[rank]][name] for name in ("0", "3")}
    assert seen[:6] == [own] * 6
    assert result.plan is not None
    # With a deadline that does not bind, nothing is lowered.
    assert seen[6:] == [dict.fromkeys(own, Precision.FP32)] * 2
    assert result.plan.devices[KINDS[rank]]["0"] is Precision.FP32
    assert result.plan.problem == problem.sha256
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    for tensor in weights(model).values():
        other = tensor.clone()
        distributed.broadcast(other, 0)
        assert torch.equal(tensor, other)
    distributed.barrier()
    assert load_plan(folder / "plan-00000006.json") == result.plan


def refinement_beside_stochastic_rounding(rank: int, folder: Path) -> None:
    """The model is converted anew after every table, and its layers must know the step."""
    _, result = run(rank, None, 5, rounding=Rounding.STOCHASTIC)
    assert list(notes(result)) == [3]
    assert len(result.metrics) == 5


def resumption(rank: int, folder: Path) -> None:
    """Stopped while a plan is being looked for, after it was taken up, and on the very step."""
    whole, full = run(rank, folder / "whole", 11)
    for step in (4, 6, 7):
        run(rank, folder / "parts", step)
    found, last = run(rank, folder / "parts", 11)
    assert last.first_step == 7
    require_equal(weights(found), weights(whole))
    assert last.plan == full.plan
    assert [row.loss for row in last.metrics] == [row.loss for row in full.metrics[7:]]
    # What was refined stays, also where it is refined no more.
    _, rest = run(rank, folder / "parts", 13, refine_interval=0)
    assert rest.plan == full.plan


def a_solve_that_fails(rank: int, folder: Path) -> None:
    """The plan in use stays on both ranks, and the metrics say why."""
    _, _, first = case()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(refinement, "_GRACE_S", -1e9)  # over before it begins
        _, result = run(rank, None, 8)
    assert "the plan stays: the solver ran beyond 60 s" in notes(result)[6]
    assert result.plan is first

    def fail(*_: object, **__: object) -> None:
        raise CaptureError("no second derivative", "Write it with torch functions")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(refinement, "perturbations", fail)
        model, result = run(rank, None, 5)
    why = "rank 1 cannot gather the indicator: no second derivative"
    assert notes(result)[3].startswith(f"no plan is looked for: {why}")
    assert result.plan is first

    def refuse(self: patching.Patch, plan: PrecisionPlan) -> None:
        raise PlanError("0", "must be something else", plan)

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(patching.Patch, "exchange", refuse)
        seen: list[dict[str, Precision]] = []
        model = small_model(dropout=0.2)
        _, result = run(rank, None, 8, lambda p: seen.append(precisions(model)), model=model)
    assert "the plan stays: rank 1 cannot run the new one" in notes(result)[6]
    assert result.plan is first
    assert seen[7] == seen[0]


PARTS: Mapping[str, Callable[[int, Path], None]] = {
    "refinement": refinement_of_a_plan,
    "refinement, stochastic": refinement_beside_stochastic_rounding,
    "refinement resumed": resumption,
    "refinement failed": a_solve_that_fails,
}
