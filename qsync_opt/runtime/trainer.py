"""`train`: one synchronous data-parallel job on unequal devices.

Every rank calls it with its own device kind. Before the first step ranks agree on what must be
equal; in every step they agree on whether to go on; whatever ends the job, its files are
whole and the next start goes on from them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn

from qsync_opt.errors import QsyncError, TrainError
from qsync_opt.graph import OperatorGraph
from qsync_opt.measure.step import Loss
from qsync_opt.optimize.problem import AllocationProblem
from qsync_opt.plan import PrecisionPlan
from qsync_opt.runtime.batches import Batches
from qsync_opt.runtime.distributed import Pending, Ranks, joined, names_of
from qsync_opt.runtime.host_memory import keep_freed_memory
from qsync_opt.runtime.interruption import Interruption
from qsync_opt.runtime.lost_ranks import Position, naming_lost_ranks
from qsync_opt.runtime.metrics import MetricsFile, StepMetrics, memory_in_use
from qsync_opt.runtime.parameters import TrainParameters
from qsync_opt.runtime.patching import Patch
from qsync_opt.runtime.preparation import (
    BUFFERS,
    HOOK,
    Parts,
    Preparation,
    Task,
    tensors_of_ranks,
)
from qsync_opt.runtime.refinement import keep_plan, plan_to_json
from qsync_opt.runtime.sharded_model import WholeState
from qsync_opt.runtime.state import all_finite
from qsync_opt.runtime.steps import Taken
from qsync_opt.runtime.tracing import Tracing

#: What a rank tells the others during a step; the highest level counts.
_GO_ON, _STOP, _DIVERGED = 0, 1, 2

#: How often a host that waits for its GPU looks whether the other ranks are still there.
_POLL_S = 2e-4


class TrainStatus(str, Enum):
    """Why training ended."""

    FINISHED = "all steps were taken"
    INTERRUPTED = "stopped by a signal"


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What a call of `train` did.

    Attributes:
        status: why it ended.
        first_step: the step that it began with; not 0 if a checkpoint was there.
        steps: how many steps have been taken in all.
        metrics: of this rank in this call.
        checkpoint_step: step of the newest checkpoint; None without a folder.
        samples: of every rank in a step.
        plan: in use at the end, which refinement may have changed; None without one.
    """

    status: TrainStatus
    first_step: int
    steps: int
    metrics: tuple[StepMetrics, ...]
    checkpoint_step: int | None
    samples: tuple[int, ...]
    plan: PrecisionPlan | None


@dataclass(frozen=True, kw_only=True)
class TrainProgress:
    """What a report is given after every step.

    Attributes:
        first_step: the step that this call began with.
        steps: how many there are to be in all.
        metrics: of the step, on this rank.
    """

    first_step: int
    steps: int
    metrics: StepMetrics


def train(
    model: nn.Module,
    batch: Any,
    loss: Loss | None = None,
    *,
    parameters: TrainParameters,
    plan: PrecisionPlan | None = None,
    kind: str = "device",
    problem: AllocationProblem | None = None,
    graph: OperatorGraph | None = None,
    batches: Batches | None = None,
    report: Callable[[TrainProgress], None] | None = None,
) -> TrainResult:
    """Train a model together with the other ranks of the job, if there are any.

    The ranks are those of the default process group, or those that a launcher such as torchrun
    started (see `distributed.joined`). On a CPU the process keeps the memory that it frees from
    here on, as where it was measured. SIGINT and SIGTERM end the job after the step, with a
    checkpoint if there is a folder.

    Args:
        model: fp32, on the device of this rank (a GPU must be the current one); trained in
            place. Its modules are left as they were, in training mode or not.
        batch: see `measure.step`; the data of every step unless `batches` is given.
        loss: None if the model returns it. It is a mean over samples that count alike.
        parameters: options, equal on all ranks.
        plan: of all kinds; None: the model as it is.
        kind: device kind of this rank.
        problem: the plan's problem, for batch shares and refinement; a plan of another one is
            refused.
        graph: the graph that the plan was made for, see `convert`.
        batches: gives the samples of each step.
        report: called after every step, on every rank.

    Raises:
        QsyncError: bad options, ranks that do not agree, or a checkpoint that does not fit.
        TrainError: a rank is gone, or the loss is not finite any more.
    """
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    if device.type == "cpu":
        keep_freed_memory()
    task = Task(
        model=model,
        batch=batch,
        loss=loss,
        plan=plan,
        kind=kind,
        problem=problem,
        graph=graph,
        batches=batches,
    )
    with joined(device, parameters.timeout_s) as ranks:
        patch = Patch(model, kind, graph, parameters, ranks)
        preparation = Preparation(ranks, task, parameters, patch)
        failure: QsyncError | None = None
        try:
            preparation.alone()
        except QsyncError as error:
            failure = error
        position = Position(kinds=[kind] * ranks.world)
        try:
            with naming_lost_ranks(ranks, position), Interruption() as interruption:
                parts = preparation.together(failure, position)
                with (
                    closing(parts),
                    closing(_Job(ranks, task, parameters, parts, position, report)) as job,
                ):
                    return job.run(interruption)
        finally:
            patch.take_off()


class _Job:
    """Takes the steps of one call of `train` on one rank."""

    def __init__(
        self,
        ranks: Ranks,
        task: Task,
        parameters: TrainParameters,
        parts: Parts,
        position: Position,
        report: Callable[[TrainProgress], None] | None,
    ) -> None:
        self._ranks = ranks
        self._task = task
        self._parameters = parameters
        self._parts = parts
        self._position = position
        self._report = report
        self._rows: list[StepMetrics] = []
        self._bad_step: int | None = None  # first one whose loss was not finite
        self._notes: dict[int, str] = {}
        self._before = 0.0
        self._plan = parts.plan
        self._file: MetricsFile | None = None
        if parameters.folder is not None:
            self._file = MetricsFile(parameters.folder, ranks.rank, parts.first)
        self._tracing = None if parameters.trace is None else Tracing(ranks, task, parameters)

    def run(self, interruption: Interruption) -> TrainResult:
        """Take the steps that are left."""
        parameters, parts, position = self._parameters, self._parts, self._position
        is_late = self._ranks.device.type == "cuda"  # numbers are read when a step has ended
        pending: tuple[Taken, float] | None = None
        done = position.done = parts.first
        is_over = done >= parameters.steps
        self._before = time.perf_counter()
        # Asked for before it is needed, so that it costs nothing, and while a GPU is waited for
        # tells whether the ranks are there that it waits for.
        asked = self._ask(interruption)
        while not is_over:
            self._before_step(done)
            taken = parts.stepper.take(done)
            now = time.perf_counter()
            step_s, self._before = now - self._before, now
            if not is_late:
                self._finish(taken, step_s)
            highest = asked.result()
            if highest == _DIVERGED:
                self._raise_diverged()
            done += 1
            position.done = done
            is_over = highest == _STOP or done == parameters.steps
            asked = self._ask(interruption)
            if pending is not None:
                self._await(pending[0], asked)
                self._finish(*pending)
            pending = (taken, step_s) if is_late else None
            interval = parameters.checkpoint_interval
            is_saved = is_over or bool(interval and done % interval == 0)
            is_traced = self._tracing is not None and self._tracing.ends_with(done, is_over)
            if pending is not None and (is_saved or is_traced):
                self._await(pending[0], asked)
                self._finish(*pending)
                pending = None
            if is_traced and self._tracing is not None:
                self._tracing.write(parts.stepper)
                self._before = time.perf_counter()
            if is_saved:
                self._save(done)
                self._before = time.perf_counter()
        asked.result()
        return TrainResult(
            status=TrainStatus.INTERRUPTED if done < parameters.steps else TrainStatus.FINISHED,
            first_step=parts.first,
            steps=done,
            metrics=tuple(self._rows),
            checkpoint_step=position.saved,
            samples=tuple(parts.counts),
            plan=self._plan,
        )

    def close(self) -> None:
        """Leave nothing open."""
        if self._file is not None:
            self._file.close()
        if self._tracing is not None:
            self._tracing.close()

    def _ask(self, interruption: Interruption) -> Pending:
        """Begin to ask whether all ranks take the next step."""
        level = _STOP if interruption.requested else _GO_ON
        return self._ranks.start_max(level if self._bad_step is None else _DIVERGED)

    def _before_step(self, step: int) -> None:
        """What is due between steps: another plan, the beginning of a trace."""
        parts = self._parts
        refinement = parts.refinement
        if refinement is not None:
            note = refinement.before_step(step)
            if note is not None:
                self._notes[step] = note
                parts.stepper.converted_anew()
                self._before = time.perf_counter()
            if refinement.plan is not self._plan:
                self._plan = refinement.plan
                parts.stepper.plan_changed(refinement.plan)
                if self._parameters.folder is not None and self._ranks.rank == 0:
                    keep_plan(self._parameters.folder, step, refinement.plan)
        if self._tracing is not None and self._tracing.begins_with(step, parts.first):
            self._tracing.start(parts.stepper, step)
            self._before = time.perf_counter()

    def _await(self, taken: Taken, asked: Pending) -> None:
        """Wait for the end of a step on the GPU, unless a rank is gone that it waits for.

        Raises:
            RuntimeError: of the network.
        """
        while not taken.has_ended:
            asked.check()
            time.sleep(_POLL_S)

    def _finish(self, taken: Taken, step_s: float) -> None:
        """Read the numbers of a step and hand them on."""
        compute_s, wait_s = taken.times()
        loss = taken.loss.item()
        row = StepMetrics(
            step=taken.step,
            rank=self._ranks.rank,
            kind=self._task.kind,
            loss=loss,
            samples=self._parts.counts[self._ranks.rank],
            step_s=step_s,
            compute_s=compute_s,
            wait_s=wait_s,
            memory_bytes=memory_in_use(self._ranks.device),
            loss_scale=taken.loss_scale,
            skipped=taken.skipped,
            sent_bytes=taken.sent_bytes,
            refinement=self._notes.pop(taken.step, None),
        )
        self._rows.append(row)
        if not math.isfinite(loss) and not taken.skipped and self._bad_step is None:
            self._bad_step = taken.step
        if self._file is not None:
            self._file.write(row)
        if self._report is not None:
            steps = self._parameters.steps
            self._report(TrainProgress(first_step=self._parts.first, steps=steps, metrics=row))

    def _save(self, done: int) -> None:
        """Write a checkpoint; no rank goes on before it is there."""
        if self._ranks.any(self._bad_step is not None):
            self._raise_diverged()
        parts = self._parts
        facts: dict[str, Any] = {
            "world": self._ranks.world,
            "kinds": self._position.kinds,
            "samples": parts.counts,
            "current_plan": None,
        }
        if self._plan is not None and self._plan is not self._task.plan:
            facts["current_plan"] = plan_to_json(self._plan)
        tensors = {} if parts.refinement is None else parts.refinement.tensors()
        if parts.stepper.hook is not None and self._parameters.folder is not None:
            tensors |= tensors_of_ranks(HOOK, parts.stepper.hook.state(), self._ranks)
        if parts.sharded is not None and self._parameters.folder is not None:
            tensors |= tensors_of_ranks(BUFFERS, parts.sharded.buffers(), self._ranks)
        if parts.sharded is not None:
            parts.sharded.collect()
        if self._ranks.any(not all_finite(self._task.model.parameters())):
            raise TrainError(
                f"weights are not finite after step {done - 1}: a gradient was not, although the"
                f" loss was; {self._kept()} comes from before",
                "Look for roots and divisions at 0, or lower the learning rate",
            )
        if isinstance(parts.optimizer, WholeState) and self._parameters.folder is not None:
            parts.optimizer.collect()
        parts.keeper.save(
            done, self._task.model, parts.optimizer, parts.scale, facts=facts, tensors=tensors
        )

    def _raise_diverged(self) -> None:
        # The gradient carries it to all ranks; the ranks with the earliest step began it.
        mine = b"" if self._bad_step is None else str(self._bad_step).encode()
        told = {r: int(raw) for r, raw in enumerate(self._ranks.gather_bytes(mine)) if raw}
        first = min(told.values())
        lost = [rank for rank, step in told.items() if step == first]
        raise TrainError(
            f"the loss of {names_of(lost, self._position.kinds)} is not finite in step {first};"
            f" {self._kept()} comes from before",
            "Lower the learning rate, or give operators more precision",
        )

    def _kept(self) -> str:
        saved = self._position.saved
        return "no checkpoint" if saved is None else f"the checkpoint of step {saved}"
