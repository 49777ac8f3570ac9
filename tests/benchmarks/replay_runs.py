"""Held-out plans for a problem, and real steps of a model at a plan; for `replays`."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from qsync_opt.costs import DeviceCosts
from qsync_opt.errors import InfeasibleError, SolverUnavailableError
from qsync_opt.graph import OperatorGraph
from qsync_opt.measure.clock import Clock, spread_of
from qsync_opt.measure.measuring import TrainedModel
from qsync_opt.measure.step import split_batch
from qsync_opt.measure.uniform import (
    OPTIMIZERS,
    Step,
    converted,
    run_loss,
    step_of,
    uniform_plan,
    warmed_up,
)
from qsync_opt.optimize.evaluate import plan_from_columns
from qsync_opt.optimize.problem import AllocationProblem
from qsync_opt.perturbation import PerturbationTable
from qsync_opt.plan import PrecisionPlan
from qsync_opt.precision import Precision
from qsync_opt.runtime.availability import available_precisions, supported_precisions
from qsync_opt.runtime.host_reduction import goes_by_host
from qsync_opt.runtime.shared_reduction import reduce_beside
from tests.benchmarks.predictions import columns_of, empty_table

#: Slacks at which plans are solved for; those of `greedy` are fewer, for its plans repeat.
EXACT_SLACKS = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75)
GREEDY_SLACKS = (0.1, 0.3, 0.5)

#: Steps before those that count.
WARM_UP = 3

#: Steps whose launching is timed.
_HOST_STEPS = 9

#: Random plans drawn for each that is wanted: small models have few, and each counts once.
_TRIES = 20

Plan = Mapping[str, Precision]


@dataclass(frozen=True)
class Measured:
    """What steps of a plan took on this rank, medians in seconds.

    Attributes:
        step_s: from one step to the next, with the optimizer.
        spread: distance of the quartiles over the median, of turns (of steps on a CPU).
        forward_s, backward_s: of the device alone, with the host kept ahead; not under DDP.
        host_s: until the host had launched forward and backward; not under DDP.
        peak_bytes: largest allocation of forward and backward over what was there before with
            gradients; 0 on a CPU.
    """

    step_s: float
    spread: float
    forward_s: float
    backward_s: float
    host_s: float
    peak_bytes: int


def random_table(graph: OperatorGraph, costs: DeviceCosts, seed: int) -> PerturbationTable:
    """Perturbations drawn at random, growing as precision falls: solvers need some."""
    rng = np.random.default_rng(seed)
    rows = np.zeros((len(graph.operators), len(costs.precisions)))
    for index in graph.adjustable:
        for column, precision in enumerate(costs.precisions):
            if precision is not Precision.FP32:
                rows[index, column] = float(rng.lognormal()) * 4.0**column
    return replace(empty_table(graph, costs), values=rows, method="random")


def held_out_plans(
    graph: OperatorGraph,
    problem: AllocationProblem,
    costs: Mapping[str, DeviceCosts],
    count: int,
    seed: int,
) -> dict[str, PrecisionPlan]:
    """Uniform plans, greedy and exact ones at several slacks, random mixed ones for the rest."""
    plans: dict[str, PrecisionPlan] = {}
    for precision in problem.precisions:
        rows = []
        for row in costs.values():
            has = available_precisions(row.provenance.device_type) & set(row.precisions)
            rows.append(uniform_plan(graph, precision, has))
        plans[f"all {precision}"] = _plan(graph, problem, rows)
    for name, plan in _solved(problem):
        if plan not in plans.values():
            plans[name] = plan
    generator = random.Random(seed)
    missing = max(0, count - len(plans))
    for number in range(_TRIES * missing):
        if len(plans) == count:
            break
        # From nearly all in fp32 to nearly all lowered, and again.
        share = (number % missing + 1) / (missing + 1)
        plan = _plan(
            graph, problem, [_mixed(graph, row, share, generator) for row in costs.values()]
        )
        if plan not in plans.values():
            plans[f"mixed {number}"] = plan
    return plans


def _solved(problem: AllocationProblem) -> Iterator[tuple[str, PrecisionPlan]]:
    try:
        from qsync_opt.optimize.solve import solve

        for method, slacks in (("greedy", GREEDY_SLACKS), ("exact", EXACT_SLACKS)):
            for slack in slacks:
                posed = replace(problem, deadline_s=None, slack=slack)
                yield f"{method} +{slack:.0%}", solve(posed, method=method).require_plan()
    except (ImportError, InfeasibleError, SolverUnavailableError):
        return  # no solver here: more mixed plans instead


def _mixed(
    graph: OperatorGraph, costs: DeviceCosts, share: float, generator: random.Random
) -> dict[str, Precision]:
    plan = {}
    for index in graph.adjustable:
        row = graph.operators[index]
        in_loss = row.module.split(".")[0] == "loss"
        has = [p for p in costs.precisions if p in supported_precisions(row.kind)]
        lower = [p for p in has if p is not Precision.FP32 and not in_loss]
        is_lowered = bool(lower) and generator.random() < share
        plan[row.name] = generator.choice(lower) if is_lowered else Precision.FP32
    for group in graph.groups:
        first, *others = (graph.operators[index].name for index in group.operators)
        plan.update(dict.fromkeys(others, plan[first]))
    return plan


def _plan(graph: OperatorGraph, problem: AllocationProblem, rows: Sequence[Plan]) -> PrecisionPlan:
    return plan_from_columns(problem, [columns_of(graph, problem, row) for row in rows])


def adjustable(graph: OperatorGraph, plan: PrecisionPlan, kind: str) -> Plan:
    """What `convert` takes: the precisions of adjustable operators."""
    row = plan.for_device(kind)
    return {graph.operators[i].name: row[graph.operators[i].name] for i in graph.adjustable}


def host_of(step: Step) -> float:
    """Seconds in which a host launches a step.

    A GPU that is made to wait takes no more than some thousand launches, so it is not here.
    """
    return statistics.median(step()[2] for _ in range(_HOST_STEPS))


def with_hosts_of_today(
    graph: OperatorGraph, trained: TrainedModel, costs: DeviceCosts, clock: Clock
) -> DeviceCosts:
    """Costs of a GPU that were measured before, with launch times of the host at hand.

    The same GPU beside another host launches otherwise, and one host of a shared machine
    launches 20 to 40 % slower at one hour than at another.
    """
    steps = []
    for row in costs.steps:
        plan = uniform_plan(graph, row.precision, available_precisions(clock.device))
        with converted(trained.model, graph, plan):
            step = step_of(trained.model, trained.batch, trained.loss, clock)
            warmed_up(step)
            steps.append(replace(row, host_s=host_of(step)))
    return replace(costs, steps=tuple(steps))


class Runner:
    """Runs steps of one model at plans, alone or as a rank of DDP.

    Args:
        graph: of the model.
        trained: the model, its batch and loss.
        optimizer: one of `OPTIMIZERS`.
        clock: of the device; its timer is used.
        seconds: of steps for each plan.
    """

    def __init__(
        self,
        graph: OperatorGraph,
        trained: TrainedModel,
        optimizer: str,
        clock: Clock,
        seconds: float,
    ) -> None:
        self._graph, self._trained, self._clock = graph, trained, clock
        self._make, self._seconds = OPTIMIZERS[optimizer], seconds
        self._is_cuda = clock.device.type == "cuda"
        self._ranks = distributed.get_world_size() if distributed.is_initialized() else 1

    def measure(self, plan: Plan) -> Measured:
        """Steps at a plan; under DDP every rank must call this with a plan of its own."""
        model, device = self._trained.model, self._clock.device
        with converted(model, self._graph, plan), ExitStack() as stack:
            alone = (0.0, 0.0, 0.0)
            if self._ranks == 1:
                alone = self._alone()
            wrapped: nn.Module = model
            if self._ranks > 1:
                ids = [device.index] if self._is_cuda else None
                unused = any(not p.requires_grad for p in model.parameters())
                wrapped = DistributedDataParallel(
                    model, device_ids=ids, find_unused_parameters=unused
                )
                if goes_by_host(next(model.parameters())):  # as the trainer has it
                    stack.enter_context(closing(reduce_beside(wrapped, device)))
            times = self._turns(wrapped)
            peak = self._peak_bytes() if self._is_cuda and self._ranks == 1 else 0
            for parameter in model.parameters():
                parameter.grad = None
        return Measured(
            step_s=statistics.median(times),
            spread=spread_of(times),
            forward_s=alone[0],
            backward_s=alone[1],
            host_s=alone[2],
            peak_bytes=peak,
        )

    def _alone(self) -> tuple[float, float, float]:
        """Forward and backward of the device with the host ahead, and the host's time."""
        step = step_of(self._trained.model, self._trained.batch, self._trained.loss, self._clock)
        ahead_s = warmed_up(step)
        rows: list[tuple[float, float, float]] = []
        end = time.perf_counter() + self._seconds / 4
        while len(rows) < 3 or time.perf_counter() < end:
            rows.append(step(ahead_s))
        forward_s, backward_s, host_s = (statistics.median(c) for c in zip(*rows, strict=True))
        if self._is_cuda:
            host_s = host_of(step)
        return forward_s, backward_s, host_s

    def _turns(self, model: nn.Module) -> list[float]:
        """Seconds a step: on a GPU of several in a row, on a CPU of each."""
        run = self._step(model)
        for _ in range(WARM_UP):
            run()
        self._clock.synchronize()
        begin = time.perf_counter()
        run()
        self._clock.synchronize()
        once_s = self._largest(max(time.perf_counter() - begin, 1e-6))
        turns = 5 if self._is_cuda else max(5, int(self._seconds / once_s))
        in_a_row = max(2, int(self._seconds / turns / once_s)) if self._is_cuda else 1
        times = []
        for _ in range(turns):
            if self._ranks > 1:
                distributed.barrier()
            times.append(self._largest(self._row(run, in_a_row)))
        return times

    def _row(self, run: Callable[[], None], count: int) -> float:
        """Seconds of one of `count` steps in a row; on a GPU as its own events tell.

        A step is run before them: nothing is launched yet when a row begins, and in training
        that happens once.
        """
        self._clock.synchronize()
        if not self._is_cuda:
            begin = self._clock.timer()
            for _ in range(count):
                run()
            return (self._clock.timer() - begin) / count
        marks: Any = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        run()
        marks[0].record()
        for _ in range(count):
            run()
        marks[1].record()
        self._clock.synchronize()
        return float(marks[0].elapsed_time(marks[1])) / 1e3 / count

    def _step(self, model: nn.Module) -> Callable[[], None]:
        inputs, target = split_batch(self._trained.batch, self._trained.loss)
        loss = self._trained.loss
        optimizer = self._make([p for p in model.parameters() if p.requires_grad])

        def run() -> None:
            optimizer.zero_grad(set_to_none=True)
            run_loss(model, inputs, target, loss).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

        return run

    def _peak_bytes(self) -> int:
        inputs, target = split_batch(self._trained.batch, self._trained.loss)
        model, device = self._trained.model, self._clock.device
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        gc.collect()
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run_loss(model, inputs, target, self._trained.loss).backward()  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before

    def _largest(self, seconds: float) -> float:
        """Of all ranks."""
        if self._ranks == 1:
            return seconds
        nccl = distributed.get_backend() == "nccl"
        value = torch.tensor(
            seconds, dtype=torch.float64, device=self._clock.device if nccl else "cpu"
        )
        distributed.all_reduce(value, op=distributed.ReduceOp.MAX)
        return float(value)


def gathered(value: Any) -> list[Any]:
    """A value of every rank, in their order."""
    if not distributed.is_initialized():
        return [value]
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, value)
    return found


def from_first(value: Any) -> Any:
    """The value of rank 0."""
    if not distributed.is_initialized():
        return value
    found = [value]
    distributed.broadcast_object_list(found)
    return found[0]
