"""Training with a plan that has bits for buckets: parts of `training_on_ranks`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from qsync_opt.build import build_problem
from qsync_opt.costs import Cluster, ClusterKind
from qsync_opt.errors import ParameterError, PlanError, QsyncError, TrainError
from qsync_opt.graph import OperatorGraph
from qsync_opt.measure.capture import capture
from qsync_opt.measure.communication import read_buckets
from qsync_opt.measure.model_file import load_batches, load_model
from qsync_opt.measure.step import Loss
from qsync_opt.optimize.problem import AllocationProblem
from qsync_opt.optimize.refresh import Answer
from qsync_opt.plan import PrecisionPlan
from qsync_opt.precision import Precision
from qsync_opt.runtime import refinement, steps
from qsync_opt.runtime.bucket_codec import exempt_parameters
from qsync_opt.runtime.communication import all_reduce_bytes
from qsync_opt.runtime.metrics import global_losses, read_metrics
from qsync_opt.runtime.parameters import TrainParameters
from qsync_opt.runtime.trainer import TrainProgress, TrainResult, train
from tests.cost_cases import made_up_costs, made_up_table
from tests.distributed.small_training import KINDS, require_equal, weights

MODEL = Path(__file__).parents[2] / "models" / "small_gpt.py"
SIZES: dict[str, Any] = {"width": 32, "batch_size": 8, "length": 32}

#: So that even a small model has several buckets, in MiB: the size of a weight, with or without
#: the bias that comes before it at one precision and after it at another.
CAP_MB = 4 * 32 * 128 / 2**20

#: Bits of the buckets in turn -> how far the loss of the last steps may be from that of full
#: precision; 4 bits take longer to learn the same.
BANDS = {(32, 8, 16, 4): 0.1, (8,): 0.02}


@contextmanager
def small_buckets() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        made = partial(DistributedDataParallel, bucket_cap_mb=CAP_MB)
        patch.setattr(steps, "DistributedDataParallel", made)
        yield


@cache
def case() -> tuple[OperatorGraph, AllocationProblem, tuple[tuple[str, ...], ...]]:
    """The graph, a problem whose buckets are those of the job, and their parameters."""
    model, batch, loss = load_model(MODEL, SIZES)
    graph = capture(model, batch, loss, least_coverage=0.0)
    buckets = read_buckets(model, batch, loss, bucket_cap_mb=CAP_MB)
    costs = {
        k: replace(made_up_costs(graph, seed), buckets=buckets) for seed, k in enumerate(KINDS)
    }
    kinds = tuple(ClusterKind(name=kind) for kind in KINDS)
    table = made_up_table(graph)
    problem = build_problem(graph, costs, table, Cluster(kinds=kinds), bits=(16, 8, 4))
    return graph, problem, tuple(bucket.parameters for bucket in buckets)


def plan_at(
    cycle: tuple[int, ...],
    weak: Precision = Precision.FP32,
    strong: Precision = Precision.FP32,
) -> PrecisionPlan:
    """One precision for the adjustable operators of each kind, and some bits for every bucket."""
    graph, problem, _ = case()
    row = dict.fromkeys((operator.name for operator in graph.operators), Precision.FP32)
    names = [graph.operators[index].name for index in graph.adjustable]
    bits = tuple(cycle[k % len(cycle)] for k in range(len(problem.buckets)))
    devices = {
        "strong": {**row, **dict.fromkeys(names, strong)},
        "weak": {**row, **dict.fromkeys(names, weak)},
    }
    return PrecisionPlan(problem=problem.sha256, devices=devices, communication=bits)


def run(
    rank: int,
    plan: PrecisionPlan | None,
    steps_: int,
    folder: Path | None = None,
    report: Callable[[TrainProgress], None] | None = None,
    model: nn.Module | None = None,
    spoil: Callable[[Loss], Loss] | None = None,
    **options: Any,
) -> tuple[nn.Module, TrainResult]:
    graph, problem, _ = case()
    made, batch, loss = load_model(MODEL, SIZES)
    model = made if model is None else model
    if spoil is not None and loss is not None:
        loss = spoil(loss)
    given: dict[str, Any] = {"checkpoint_interval": 0, "learning_rate": 1e-2, **options}
    with small_buckets():
        result = train(
            model,
            batch,
            loss,
            parameters=TrainParameters(steps=steps_, folder=folder, **given),
            plan=plan,
            kind=KINDS[rank],
            problem=problem if plan is not None else None,
            graph=graph,
            batches=load_batches(MODEL, SIZES),
            report=report,
        )
    return model, result


def require_replicas(model: nn.Module) -> None:
    for name, tensor in model.state_dict().items():
        other = tensor.clone()
        distributed.broadcast(other, 0)
        assert torch.equal(tensor, other), name


def formula(model: nn.Module, bits: tuple[int, ...]) -> int:
    exempt = {id(p) for p in exempt_parameters(model)}
    total = 0
    for names, wanted in zip(case()[2], bits, strict=True):
        parts = [model.get_parameter(name) for name in names]
        exact = sum(p.numel() for p in parts if id(p) in exempt)
        coded = sum(p.numel() for p in parts) - exact
        total += all_reduce_bytes(coded, 2, wanted, exact=exact)
    return total


def mixed_bits(rank: int, folder: Path) -> None:
    """The loss follows that of full precision, ranks stay equal, bytes are the formula's."""
    _, problem, _ = case()
    assert len(problem.buckets) > 3
    count = 25
    _, exact = run(rank, None, count, folder / "fp32")
    for cycle, band in BANDS.items():
        plan = plan_at(cycle)
        place = folder / "-".join(map(str, cycle))
        model, result = run(rank, plan, count, place)
        require_replicas(model)
        sent = {row.sent_bytes for row in result.metrics}
        assert sent == {formula(model, plan.communication)}
        distributed.barrier()
        losses, whole = (global_losses(read_metrics(p)) for p in (place, folder / "fp32"))
        found, right = (sum(row[-8:]) / 8 for row in (losses, whole))
        assert right < 0.8 * whole[0]
        assert abs(found / right - 1) < band, (cycle, found, right)
    assert exact.metrics[0].sent_bytes == 4 * sum(
        parameter.numel() for parameter in model.parameters()
    )


def other_order(rank: int, folder: Path) -> None:
    """At another precision gradients arrive in another order: buckets keep their bits."""
    plan = plan_at((32, 8, 16, 4), weak=Precision.BF16, strong=Precision.BF16)
    model, result = run(rank, plan, 2)
    require_replicas(model)
    for row in result.metrics:
        assert row.sent_bytes == pytest.approx(formula(model, plan.communication), rel=0.03)


def resume(rank: int, folder: Path) -> None:
    """Stopped and started again at bits of its own for each bucket, nothing is different."""
    plan = plan_at((32, 4, 16, 8), weak=Precision.BF16)
    whole, full = run(rank, plan, 7, folder / "whole")
    for count in (3, 4, 7):
        found, last = run(rank, plan, count, folder / "parts")
    require_equal(weights(found), weights(whole))
    assert [row.loss for row in last.metrics] == [row.loss for row in full.metrics[4:]]
    with pytest.raises(PlanError, match="must be of the plan that is given"):
        run(rank, plan_at((4,)), 8, folder / "parts")


def exchange(rank: int, folder: Path) -> None:
    """A refined plan brings other bits: used from its step on, and after a restart too."""
    first, second = plan_at((8, 32)), plan_at((4, 8, 16))
    options: dict[str, Any] = {"refine_interval": 3}

    def answer(self: object) -> Answer:
        return Answer(plan=second, told="a new plan")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(refinement._Solving, "ask", lambda self, plan, table: None)
        patch.setattr(refinement._Solving, "answer", answer)
        whole, full = run(rank, first, 9, folder / "whole", **options)
        for count in (5, 7):
            run(rank, first, count, folder / "parts", **options)
    # What was refined stays, also where it is refined no more.
    found, last = run(rank, first, 8, folder / "parts")
    assert full.plan == last.plan == second
    sent = [row.sent_bytes for row in full.metrics]
    bits = [plan.communication for plan in (first, second)]
    assert sent[:6] == [formula(whole, bits[0])] * 6
    assert sent[6:] == [formula(whole, bits[1])] * 3
    assert [row.sent_bytes for row in last.metrics] == [formula(whole, bits[1])]
    assert last.metrics[0].loss == full.metrics[7].loss
    require_replicas(found)


def spoiling(rank: int, bad: float) -> Callable[[Loss], Loss]:
    """Makes a loss that rank 1 multiplies by a bad number in its second step."""

    def spoil(loss: Loss) -> Loss:
        calls = [0]

        def spoiled(output: Any, target: Any) -> Tensor:
            calls[0] += 1  # the first call is of the rehearsal before the first step
            value = loss(output, target)
            return value * bad if (calls[0], rank) == (3, 1) else value

        return spoiled

    return spoil


def overflow(rank: int, folder: Path) -> None:
    """A gradient that is not finite on one rank makes both leave out the step, at any bits."""
    plan = plan_at((8, 32, 4, 16), weak=Precision.FP16)
    for bad in (float("nan"), float("inf")):
        model: nn.Module = load_model(MODEL, SIZES)[0]
        seen: list[dict[str, Tensor]] = []

        def look(progress: TrainProgress, model: nn.Module = model, seen: list[Any] = seen) -> None:
            seen.append(weights(model))

        options: dict[str, Any] = {"loss_scale": 2.0**8, "emulate": True}
        _, result = run(rank, plan, 4, None, look, model, spoiling(rank, bad), **options)
        assert [row.skipped for row in result.metrics] == [False, True, False, False]
        require_equal(seen[1], seen[0])
        assert not all(torch.equal(tensor, seen[1][name]) for name, tensor in seen[2].items())
        require_replicas(model)


def mistakes(rank: int, folder: Path) -> None:
    """What cannot be sent so is said before the first step, on every rank."""
    graph, problem, _ = case()
    plan = plan_at((8, 32))
    with pytest.raises(ParameterError, match="must not be given with a plan that has bits"):
        run(rank, plan, 1, communication="g8")
    model, batch, loss = load_model(MODEL, SIZES)
    one = TrainParameters(steps=1)
    for missing, given in (("problem", {"graph": graph}), ("graph", {"problem": problem})):
        with pytest.raises(ParameterError, match=f"{missing}: must be given with a plan"):
            train(model, batch, loss, parameters=one, plan=plan, kind=KINDS[rank], **given)
    for bits in ((8,), tuple(12 for _ in problem.buckets)):
        with pytest.raises(QsyncError, match="communication"):
            run(rank, replace(plan, communication=bits), 1)
    with pytest.raises(TrainError, match="does not agree with rank 0"):
        run(rank, plan_at((8, 32) if rank else (4, 32)), 1)
    # A plan without bits, of a problem that offers some, may be sent as the user likes.
    _, result = run(rank, plan_at((32,)), 1, communication="g8")
    whole = 4 * sum(parameter.numel() for parameter in model.parameters())
    assert 0 < result.metrics[0].sent_bytes < whole / 2
    # With one precision throughout the plan is not in use, and neither are its bits.
    _, result = run(rank, plan, 1, uniform=Precision.FP32)
    assert result.metrics[0].sent_bytes == whole


PARTS: Mapping[str, Callable[[int, Path], None]] = {
    "bits": mixed_bits,
    "bits in another order": other_order,
    "bits resumed": resume,
    "bits exchanged": exchange,
    "bits and overflow": overflow,
    "bits and mistakes": mistakes,
}
