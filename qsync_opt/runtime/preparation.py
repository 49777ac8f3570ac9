"""Before the first step: what a rank does alone, what ranks agree on, what is restored."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qsync_opt import __version__
from qsync_opt.errors import ParameterError, PlanError, QsyncError
from qsync_opt.graph import OperatorGraph
from qsync_opt.kernels.rounding import mix64
from qsync_opt.measure.step import Loss
from qsync_opt.optimize.problem import AllocationProblem
from qsync_opt.optimize.validation import SHARE_TOLERANCE
from qsync_opt.plan import PrecisionPlan
from qsync_opt.runtime import state
from qsync_opt.runtime.agreement import describe_parameters, plan_sha256, require_agreement
from qsync_opt.runtime.batch_sizing import find_counts
from qsync_opt.runtime.batches import (
    Batches,
    MicroBatch,
    Slices,
    batch_rows,
    count_samples,
    micro_batches,
)
from qsync_opt.runtime.bucket_bits import PlannedBits
from qsync_opt.runtime.checkpoints import Checkpoint
from qsync_opt.runtime.communication import parse_communication
from qsync_opt.runtime.distributed import Ranks
from qsync_opt.runtime.keeper import Keeper
from qsync_opt.runtime.lost_ranks import Position
from qsync_opt.runtime.parameters import TrainParameters
from qsync_opt.runtime.passes import Pass
from qsync_opt.runtime.patching import Patch
from qsync_opt.runtime.plan_bits import bits_of_job
from qsync_opt.runtime.refinement import Refinement, plan_in, rows_of
from qsync_opt.runtime.scaling import LossScale
from qsync_opt.runtime.sharded_model import ShardedModel, WholeState
from qsync_opt.runtime.steps import Stepper

#: In a checkpoint: what each rank's communication hook keeps, and the buffers of its shards.
HOOK, BUFFERS = "communication/", "buffers/"


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained, as `train` was given it.

    Attributes:
        model, batch, loss, plan, kind, problem, graph, batches: see `trainer.train`.
    """

    model: nn.Module
    batch: Any
    loss: Loss | None
    plan: PrecisionPlan | None
    kind: str
    problem: AllocationProblem | None
    graph: OperatorGraph | None
    batches: Batches | None


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What takes the steps.

    Attributes:
        first: step to begin with.
        plan: in use then; None without one.
        counts: samples of every rank.
        stepper: of this rank.
        optimizer: of the model's parameters.
        scale: None where no rank multiplies in fp16.
        keeper: of checkpoints.
        refinement: None where the plan stays.
        sharded: None where ranks have whole replicas.
    """

    first: int
    plan: PrecisionPlan | None
    counts: list[int]
    stepper: Stepper
    optimizer: torch.optim.Optimizer | WholeState
    scale: LossScale | None
    keeper: Keeper
    refinement: Refinement | None
    sharded: ShardedModel | None

    def close(self) -> None:
        """Leave the model without hooks, and no process behind."""
        self.stepper.close()
        self.keeper.close()
        if self.refinement is not None:
            self.refinement.close()


class Preparation:
    """The way to the first step.

    Args:
        ranks: of the job.
        task: what is trained.
        parameters: of the job.
        patch: of this rank's model.
    """

    def __init__(self, ranks: Ranks, task: Task, parameters: TrainParameters, patch: Patch) -> None:
        self._ranks = ranks
        self._task = task
        self._parameters = parameters
        self._patch = patch
        self._batch_size = parameters.batch_size or 0
        self._bits: PlannedBits | None = None

    def alone(self) -> None:
        """What this rank does without the others: look at its batch, and convert its model.

        Raises:
            QsyncError: options that do not fit each other, the plan or the model.
        """
        parameters, task = self._parameters, self._task
        if parameters.batch_size is None:
            world = self._ranks.world
            self._batch_size = batch_rows(task.batch) * world * parameters.accumulation
        if task.plan is not None and task.problem is not None:
            expected, found = task.problem.sha256, task.plan.problem
            if found != expected:
                rule = f"must be of the problem ({expected[:12]}...)"
                raise PlanError("problem", rule, found, "Solve this problem again")
        if parameters.refine_interval:
            for name in ("plan", "problem", "graph"):
                if getattr(task, name) is None:
                    raise ParameterError(name, "must be given to refine the plan", None)
        self._bits = self._bits_of(task.plan)
        self._patch.put_on(task.plan)

    def together(self, failure: QsyncError | None, position: Position) -> Parts:
        """Agree with the other ranks, restore the newest checkpoint, and be ready to step.

        Args:
            failure: why this rank cannot take part; then no rank does.
            position: of the job.

        Raises:
            QsyncError: ranks that do not agree, or a checkpoint that does not fit.
        """
        ranks, task, parameters = self._ranks, self._task, self._parameters
        plan = _asked_for(task.plan, parameters)
        description = {
            "torch": torch.__version__.partition("+")[0],
            "qsync_opt": __version__,
            "batch size": self._batch_size,
            "plan": plan,
            "problem": "none" if task.problem is None else task.problem.sha256,
            "options": parameters.describe(),
            "parameters": describe_parameters(task.model),
        }
        position.kinds = require_agreement(ranks, description, task.kind, failure)
        keeper = Keeper(ranks, parameters, plan, position)
        try:
            return self._begin(keeper, position)
        except BaseException:
            keeper.close()
            raise

    def _begin(self, keeper: Keeper, position: Position) -> Parts:
        """What is done once ranks agree."""
        ranks, task, parameters = self._ranks, self._task, self._parameters
        found = keeper.newest()
        batches = Slices(task.batch, ranks.device) if task.batches is None else task.batches
        counts = self._counts(found, position.kinds, batches)
        parts = micro_batches(counts, ranks.rank, parameters.accumulation)
        refinement = self._refinement(counts, parts, batches)
        scaled = ranks.any(self._patch.multiplies_fp16) or (
            refinement is not None and refinement.may_multiply_fp16
        )
        scale = (
            LossScale(ranks, parameters.loss_scale, parameters.growth_interval) if scaled else None
        )
        state.seed_all(mix64(mix64(parameters.seed) + ranks.rank))
        sharded = self._sharded()
        trained = task.model if sharded is None else sharded.module
        optimizer = parameters.make_optimizer(trained)
        kept = optimizer if sharded is None else WholeState(optimizer)
        stepper = Stepper(
            trained,
            ranks,
            parts=parts,
            batches=batches,
            loss=task.loss,
            optimizer=optimizer,
            scale=scale,
            parameters=parameters,
            sharded=sharded,
            bits=self._bits,
        )
        in_use = task.plan
        if found is not None:
            in_use = self._take_plan_of(found) or task.plan
            if in_use is not None:
                self._bits_of(in_use)  # raises if they cannot be sent
                stepper.plan_changed(in_use)
            keeper.restore(found, task.model, kept, scale)
            if sharded is not None:
                sharded.spread()
                sharded.load_buffers(own_tensors(BUFFERS, found, ranks))
            if refinement is not None:
                refinement.restore(found)
        first = 0 if found is None else found.step
        if first < parameters.steps:
            stepper.rehearse(first)
        if found is not None and stepper.hook is not None:
            stepper.hook.load_state(own_tensors(HOOK, found, ranks))
        return Parts(
            first=first,
            plan=in_use,
            counts=counts,
            stepper=stepper,
            optimizer=kept,
            scale=scale,
            keeper=keeper,
            refinement=refinement,
            sharded=sharded,
        )

    def _bits_of(self, plan: PrecisionPlan | None) -> PlannedBits | None:
        return bits_of_job(plan, self._task.problem, self._task.graph, self._parameters)

    def _sharded(self) -> ShardedModel | None:
        """A sharded copy of the model, where weights are to be coded on their way."""
        parameters = self._parameters
        word = "fp32" if parameters.communication is None else parameters.communication
        communication = parse_communication(word)
        if communication.weights is None or self._ranks.world == 1:
            return None
        return ShardedModel(
            self._task.model,
            communication,
            seed=parameters.seed,
            find_unused_parameters=parameters.find_unused_parameters,
        )

    def _counts(self, found: Checkpoint | None, kinds: list[str], batches: Batches) -> list[int]:
        """Samples of every rank: as they were, as they finish together, or as shares say."""
        parameters, task = self._parameters, self._task
        if not parameters.batch_sizing:
            shares = self._shares(kinds)
            return count_samples(self._batch_size, shares, parameters.accumulation)
        if found is not None and found.facts["kinds"] == kinds:
            counts = [int(count) for count in found.facts["samples"]]
            if sum(counts) == self._batch_size:
                return counts
        memory = None
        if task.problem is not None and task.kind in task.problem.device_index:
            memory = task.problem.devices[task.problem.device_index[task.kind]].memory_bytes
        work = Pass(task.model, batches=batches, loss=task.loss, parameters=parameters)
        return find_counts(
            task.model, self._ranks, work, self._batch_size, parameters.accumulation, memory
        )

    def _shares(self, kinds: list[str]) -> list[float]:
        given: Mapping[str, float] | None = self._parameters.shares
        problem = self._task.problem
        if given is None and problem is not None:
            given = {device.name: device.batch_share for device in problem.devices}
        if given is None:
            return [1 / self._ranks.world] * self._ranks.world
        for kind in kinds:
            if kind not in given:
                raise ParameterError("shares", f"must name the device kind {kind}", list(given))
        unknown = [kind for kind in self._parameters.shares or () if kind not in kinds]
        if unknown:
            rule = f"must name device kinds of the job ({', '.join(sorted(set(kinds)))})"
            raise ParameterError("shares", rule, unknown[0])
        if self._parameters.shares is None and problem is not None:
            _require_whole_batch(problem, kinds)
        return [float(given[kind]) for kind in kinds]

    def _refinement(
        self, counts: list[int], parts: list[MicroBatch], batches: Batches
    ) -> Refinement | None:
        task, parameters = self._task, self._parameters
        if not parameters.refine_interval:
            return None
        if task.plan is None or task.problem is None or task.graph is None:
            raise ParameterError("refine_interval", "must be 0 without plan, problem, graph", None)
        sizes = [
            len(micro_batches(counts, rank, parameters.accumulation)[0].rows)
            for rank in range(self._ranks.world)
        ]
        return Refinement(
            self._ranks,
            self._patch,
            task.plan,
            task.problem,
            task.graph,
            batches=batches,
            rows=rows_of(parts[0].rows.start, sizes, parameters.refine_samples),
            loss=task.loss,
            parameters=parameters,
        )

    def _take_plan_of(self, found: Checkpoint) -> PrecisionPlan | None:
        """Run at the plan that was in use, if it was not the first one; that plan."""
        plan = plan_in(found)
        failure: QsyncError | None = None
        try:
            if plan is not None:
                self._patch.exchange(plan)
        except QsyncError as error:
            failure = error
        self._ranks.share_failure(failure)
        return plan


def _asked_for(plan: PrecisionPlan | None, parameters: TrainParameters) -> str:
    """What decides the precisions of all ranks, in a word: a checkpoint is of it."""
    if parameters.uniform is not None:
        return f"uniform {parameters.uniform}"
    if parameters.autocast is not None:
        return f"autocast {parameters.autocast}"
    return plan_sha256(plan)


def _require_whole_batch(problem: AllocationProblem, kinds: Sequence[str]) -> None:
    """Refuse ranks that together have another share of the batch than all of it."""
    shares = {device.name: device.batch_share for device in problem.devices}
    if abs(math.fsum(shares[kind] for kind in kinds) - 1) <= SHARE_TOLERANCE:
        return
    wanted = ", ".join(f"{device.name} x {device.workers}" for device in problem.devices)
    found = ", ".join(f"{kind} x {count}" for kind, count in Counter(kinds).items())
    rule = f"must be those of the problem ({wanted}), whose shares of the batch add up to 1"
    raise ParameterError("ranks", rule, found, "Give shares, or build the problem for these ranks")


def tensors_of_ranks(place: str, tensors: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """What a checkpoint keeps of each rank under a place; on rank 0, nothing on the others."""
    return {place + name: tensor for name, tensor in state.gather(tensors, ranks).items()}


def own_tensors(place: str, found: Checkpoint, ranks: Ranks) -> dict[str, Tensor]:
    """What it has kept of this rank; nothing of one that the job did not have."""
    own = f"{place}{ranks.rank}/"
    return {
        name.removeprefix(own): tensor
        for name, tensor in found.tensors.items()
        if name.startswith(own)
    }
