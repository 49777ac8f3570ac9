"""`train`: one synchronous data-parallel job on unequal devices.

Every rank calls it with its own device kind. Before the first step ranks agree on what must be
equal; after every step they agree on whether to go on; whatever ends the job, its files are
whole and the next start goes on from them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import distributed, nn

from qsync_opt import __version__
from qsync_opt.errors import ParameterError, PlanError, QsyncError, TrainError
from qsync_opt.graph import OperatorGraph
from qsync_opt.kernels.rounding import mix64
from qsync_opt.measure.step import Loss
from qsync_opt.measure.uniform import uniform_plan
from qsync_opt.optimize.problem import AllocationProblem
from qsync_opt.plan import PrecisionPlan
from qsync_opt.precision import Precision
from qsync_opt.runtime import state
from qsync_opt.runtime.agreement import describe_parameters, plan_sha256, require_agreement
from qsync_opt.runtime.availability import available_precisions, supported_precisions
from qsync_opt.runtime.batches import Batches, Slices, batch_rows, count_samples, micro_batches
from qsync_opt.runtime.casts import compute_dtype
from qsync_opt.runtime.checkpoints import Checkpoint, CheckpointFolder
from qsync_opt.runtime.convert import convert, revert
from qsync_opt.runtime.distributed import Ranks, first_line, joined, names_of
from qsync_opt.runtime.interruption import Interruption
from qsync_opt.runtime.layers import layer_of
from qsync_opt.runtime.metrics import MetricsFile, StepMetrics, memory_in_use
from qsync_opt.runtime.parameters import TrainParameters
from qsync_opt.runtime.scaling import LossScale
from qsync_opt.runtime.steps import Stepper, Taken

#: What a rank tells the others during a step; the highest level counts.
_GO_ON, _STOP, _DIVERGED = 0, 1, 2


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
    """

    status: TrainStatus
    first_step: int
    steps: int
    metrics: tuple[StepMetrics, ...]
    checkpoint_step: int | None


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
    started (see `distributed.joined`). SIGINT and SIGTERM end the job after the step, with a
    checkpoint if there is a folder.

    Args:
        model: fp32, on the device of this rank (a GPU must be the current one); trained in
            place. Its modules are left as they were, in training mode or not.
        batch: see `measure.step`; the data of every step unless `batches` is given.
        loss: None if the model returns it. It is a mean over samples that count alike.
        parameters: options, equal on all ranks.
        plan: of all kinds; None: the model as it is.
        kind: device kind of this rank.
        problem: the plan's problem, for batch shares; a plan of another one is refused.
        graph: the graph that the plan was made for, see `convert`.
        batches: gives the samples of each step.
        report: called after every step, on every rank.

    Raises:
        QsyncError: bad options, ranks that do not agree, or a checkpoint that does not fit.
        TrainError: a rank is gone, or the loss is not finite any more.
    """
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    with joined(device, parameters.timeout_s) as ranks:
        job = _Job(ranks, kind, parameters, plan, report)
        failure: QsyncError | None = None
        try:
            job.prepare(model, batch, problem, graph)
        except QsyncError as error:
            failure = error
        try:
            with job.naming_lost_ranks(), Interruption() as interruption:
                stepper = job.start(model, batch, loss, problem, batches, failure)
                return job.run(stepper, interruption)
        finally:
            job.close(model)


class _Job:
    """The state of one call of `train`."""

    def __init__(
        self,
        ranks: Ranks,
        kind: str,
        parameters: TrainParameters,
        plan: PrecisionPlan | None,
        report: Callable[[TrainProgress], None] | None,
    ) -> None:
        self._ranks = ranks
        self._kind = kind
        self._parameters = parameters
        self._plan = plan
        self._report = report
        self._kinds = [kind] * ranks.world
        self._done = 0  # steps that all ranks have taken
        self._batch_size = parameters.batch_size or 0
        self._is_converted = False
        self._multiplies_fp16 = parameters.autocast is Precision.FP16
        folder = parameters.folder
        self._folder = None if folder is None else CheckpointFolder(folder, parameters.keep)
        self._saved: int | None = None
        self._file: MetricsFile | None = None
        self._stepper: Stepper | None = None
        self._rows: list[StepMetrics] = []
        self._bad_step: int | None = None  # first one whose loss was not finite

    # --- before the first step ----------------------------------------------------------

    def prepare(
        self,
        model: nn.Module,
        batch: Any,
        problem: AllocationProblem | None,
        graph: OperatorGraph | None,
    ) -> None:
        """What this rank does alone: look at its batch, and convert its model."""
        parameters, plan, device = self._parameters, self._plan, self._ranks.device
        if parameters.batch_size is None:
            self._batch_size = batch_rows(batch) * self._ranks.world * parameters.accumulation
        if plan is not None and problem is not None and plan.problem != problem.sha256:
            rule = f"must be of the problem ({problem.sha256[:12]}...)"
            raise PlanError("problem", rule, plan.problem, "Solve this problem again")
        precisions: Mapping[str, Precision] = {}
        if parameters.uniform is not None:
            precisions = _uniform(model, parameters.uniform, graph, device)
        elif plan is not None and parameters.autocast is None:
            precisions = plan.for_device(self._kind)
        if precisions:
            convert(
                model,
                precisions,
                graph=graph,
                rounding=parameters.rounding,
                seed=parameters.seed,
                rank=self._ranks.rank,
                emulate=parameters.emulate,
            )
            self._is_converted = True
        self._multiplies_fp16 |= any(
            compute_dtype(precision, device) is torch.float16 for precision in precisions.values()
        )

    def start(
        self,
        model: nn.Module,
        batch: Any,
        loss: Loss | None,
        problem: AllocationProblem | None,
        batches: Batches | None,
        failure: QsyncError | None,
    ) -> Stepper:
        """Agree with the other ranks, restore the newest checkpoint, and be ready to step."""
        parameters, ranks = self._parameters, self._ranks
        description = {
            "torch": torch.__version__.partition("+")[0],
            "qsync_opt": __version__,
            "batch size": self._batch_size,
            "plan": plan_sha256(self._plan),
            "options": parameters.describe(),
            "parameters": describe_parameters(model),
        }
        self._kinds = require_agreement(ranks, description, self._kind, failure)
        shares = self._shares(problem)
        counts = count_samples(self._batch_size, shares, parameters.accumulation)
        self._samples = counts[ranks.rank]
        scaled = ranks.any(self._multiplies_fp16)
        self._scale = (
            LossScale(ranks, parameters.loss_scale, parameters.growth_interval) if scaled else None
        )
        state.seed_all(mix64(mix64(parameters.seed) + ranks.rank))
        self._model = model
        self._optimizer = parameters.make_optimizer(model)
        stepper = self._stepper = Stepper(
            model,
            ranks,
            parts=micro_batches(counts, ranks.rank, parameters.accumulation),
            batches=Slices(batch, ranks.device) if batches is None else batches,
            loss=loss,
            optimizer=self._optimizer,
            scale=self._scale,
            parameters=parameters,
        )
        self._first = 0 if self._folder is None else self._resume(self._folder)
        if parameters.folder is not None:
            self._file = MetricsFile(parameters.folder, ranks.rank, self._first)
        if self._first < parameters.steps:
            stepper.rehearse(self._first)
        return stepper

    def _shares(self, problem: AllocationProblem | None) -> list[float]:
        given: Mapping[str, float] | None = self._parameters.shares
        if given is None and problem is not None:
            given = {device.name: device.batch_share for device in problem.devices}
        if given is None:
            return [1 / self._ranks.world] * self._ranks.world
        for kind in self._kinds:
            if kind not in given:
                raise ParameterError("shares", f"must name the device kind {kind}", list(given))
        return [float(given[kind]) for kind in self._kinds]

    def _resume(self, folder: CheckpointFolder) -> int:
        """Restore the newest checkpoint, if there is one; the step to begin with."""
        ranks, parameters = self._ranks, self._parameters
        newest = -1
        failure: QsyncError | None = None
        try:
            folder.prepare()
            newest = max(folder.steps(), default=-1)
            if newest >= 0 and not parameters.resume:
                rule = "must hold no checkpoints unless they are to be used"
                raise ParameterError("folder", rule, str(folder.folder), "Give another one")
        except QsyncError as error:
            failure = error
        ranks.share_failure(failure)
        # Hosts need not share the folder, and a launcher may number them anew at a restart.
        all_newest = [int(raw) for raw in ranks.gather_bytes(str(newest).encode())]
        source = all_newest.index(max(all_newest))
        found: Checkpoint | None = None
        try:
            if ranks.rank == source and newest >= 0:
                found = folder.load(newest)
        except QsyncError as error:
            failure = error
        ranks.share_failure(failure)
        found = state.broadcast(found, ranks, source)
        if found is None:
            return 0
        plan = plan_sha256(self._plan)
        if found.facts["plan"] != plan:
            rule = f"must be of the plan that is given ({plan[:12]}...)"
            remedy = "Give the plan it was made with, or another folder"
            where = f"checkpoint of step {found.step}"
            raise PlanError(where, rule, found.facts["plan"], remedy)
        state.unpack(found, self._model, self._optimizer)
        if self._scale is not None and found.facts["loss_scale"] is not None:
            self._scale.load(found.facts["loss_scale"])
        own = state.random_of(found, ranks.rank)
        if own is not None:
            state.set_random_state(own, ranks.device)
        self._saved = found.step
        return found.step

    # --- stepping -----------------------------------------------------------------------

    def run(self, stepper: Stepper, interruption: Interruption) -> TrainResult:
        """Take the steps that are left."""
        parameters, ranks = self._parameters, self._ranks
        is_late = ranks.device.type == "cuda"  # reading a number at once would stop the launching
        pending: tuple[Taken, float] | None = None
        done = self._done = self._first
        stopped = False
        before = time.perf_counter()
        while done < parameters.steps and not stopped:
            level = _STOP if interruption.requested else _GO_ON
            asked = ranks.start_max(level if self._bad_step is None else _DIVERGED)
            taken = stepper.take(done)
            now = time.perf_counter()
            if pending is not None:
                self._finish(*pending)
            pending, before = (taken, now - before), now
            if not is_late:
                self._finish(*pending)
                pending = None
            highest = asked.result()
            if highest == _DIVERGED:
                self._raise_diverged()
            done += 1
            self._done = done
            stopped = highest == _STOP
            interval = parameters.checkpoint_interval
            if stopped or done == parameters.steps or (interval and done % interval == 0):
                if pending is not None:
                    self._finish(*pending)
                    pending = None
                self._save(done)
                before = time.perf_counter()
        finished = done >= parameters.steps
        return TrainResult(
            status=TrainStatus.FINISHED if finished else TrainStatus.INTERRUPTED,
            first_step=self._first,
            steps=done,
            metrics=tuple(self._rows),
            checkpoint_step=self._saved,
        )

    def _finish(self, taken: Taken, step_s: float) -> None:
        """Read the numbers of a step and hand them on."""
        compute_s, wait_s = taken.times()
        loss = taken.loss.item()
        row = StepMetrics(
            step=taken.step,
            rank=self._ranks.rank,
            kind=self._kind,
            loss=loss,
            samples=self._samples,
            step_s=step_s,
            compute_s=compute_s,
            wait_s=wait_s,
            memory_bytes=memory_in_use(self._ranks.device),
            loss_scale=taken.loss_scale,
            skipped=taken.skipped,
        )
        self._rows.append(row)
        if not math.isfinite(loss) and not taken.skipped and self._bad_step is None:
            self._bad_step = taken.step
        if self._file is not None:
            self._file.write(row)
        if self._report is not None:
            steps = self._parameters.steps
            self._report(TrainProgress(first_step=self._first, steps=steps, metrics=row))

    def _save(self, done: int) -> None:
        """Write a checkpoint; no rank goes on before it is there."""
        ranks = self._ranks
        if ranks.any(self._bad_step is not None):
            self._raise_diverged()
        if self._folder is None:
            return
        randoms = ranks.gather_bytes(state.random_state(ranks.device))
        failure: QsyncError | None = None
        if ranks.rank == 0:
            try:
                tensors, facts = state.pack(self._model, self._optimizer, randoms)
                scale = None if self._scale is None else self._scale.state()
                facts |= {"plan": plan_sha256(self._plan), "loss_scale": scale}
                facts |= {"world": ranks.world, "kinds": self._kinds}
                self._folder.save(Checkpoint(step=done, facts=facts, tensors=tensors))
            except QsyncError as error:
                failure = error
        ranks.share_failure(failure)
        self._saved = done

    def _raise_diverged(self) -> None:
        # The gradient carries it to all ranks; the ranks with the earliest step began it.
        mine = b"" if self._bad_step is None else str(self._bad_step).encode()
        told = {r: int(raw) for r, raw in enumerate(self._ranks.gather_bytes(mine)) if raw}
        first = min(told.values())
        lost = [rank for rank, step in told.items() if step == first]
        kept = "no checkpoint" if self._saved is None else f"the checkpoint of step {self._saved}"
        raise TrainError(
            f"the loss of {names_of(lost, self._kinds)} is not finite in step {first};"
            f" {kept} comes from before",
            "Lower the learning rate, or give operators more precision",
        )

    @contextmanager
    def naming_lost_ranks(self) -> Iterator[None]:
        """Turn the failure of a collective into the name of the rank that is gone."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, QsyncError) or not _is_of_the_network(error):
                raise
            lost = self._ranks.missing(f"roll call after {self._done}")
            name = names_of(lost, self._kinds) if lost else "a rank"
            last = f"the last step that all ranks took is step {self._done - 1}"
            kept = "from the start" if self._saved is None else f"from step {self._saved}"
            raise TrainError(
                f"{name} is gone; {last if self._done else 'no step was taken'}"
                f" ({first_line(error)})",
                f"Start the job again: it goes on {kept}",
            ) from error

    def close(self, model: nn.Module) -> None:
        """Leave the model's modules as they were."""
        if self._file is not None:
            self._file.close()
        if self._stepper is not None:
            self._stepper.close()
        if self._is_converted:
            with suppress(ParameterError):  # somebody changed classes since; not ours to undo
                revert(model)


def _uniform(
    model: nn.Module, precision: Precision, graph: OperatorGraph | None, device: torch.device
) -> dict[str, Precision]:
    if graph is not None:
        return uniform_plan(graph, precision, available_precisions(device))
    found = {}
    for name, module in model.named_modules():
        layer = layer_of(module)
        if layer is not None:
            has = precision in supported_precisions(layer.kind)
            found[name] = precision if has else precision.output
    return found


def _is_of_the_network(error: RuntimeError) -> bool:
    text = str(error).lower()
    return isinstance(error, distributed.DistError) or "gloo" in text or "nccl" in text
