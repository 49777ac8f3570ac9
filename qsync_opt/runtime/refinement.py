"""Periodic refinement: the plan follows the gradients while they change.

Every n steps all ranks gather the indicator on samples of the step that comes, rank 0 has the
problem solved again by another process, and n steps later all ranks take up the plan that was
found. The step of the exchange is fixed and not when the solver happens to be done, so a run
that was interrupted in between goes on to the bit: the table is in the checkpoint, and the
same table gives the same plan. Where anything fails, the plan in use stays.

Weights, gradients, the optimizer and DDP's buckets are not concerned: precision lives inside
the operators, and converting gives modules another class. What codes of gradients add to the
variance stays that of the start: it was measured on whole batches, and the ranges of gradients
of a few samples are wider.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import qsync_opt
from qsync_opt.errors import ParameterError, QsyncError
from qsync_opt.files import save_plan
from qsync_opt.graph import OperatorGraph
from qsync_opt.kernels.rounding import mix64
from qsync_opt.measure.sensitivity import METHODS, perturbations
from qsync_opt.measure.step import Loss, to_device
from qsync_opt.optimize.arrays import FloatArray
from qsync_opt.optimize.problem import AllocationProblem
from qsync_opt.optimize.refresh import Answer, read_answer, write_problem, write_question
from qsync_opt.plan import PrecisionPlan
from qsync_opt.precision import Precision
from qsync_opt.runtime.batches import Batches
from qsync_opt.runtime.checkpoints import Checkpoint
from qsync_opt.runtime.distributed import Ranks, first_line
from qsync_opt.runtime.parameters import TrainParameters
from qsync_opt.runtime.patching import Patch

#: In a checkpoint: the table that is being solved with.
_TABLE = "refinement/perturbation"

#: Beyond the solver's own limit: starting Python, reading the problem, writing the plan.
_GRACE_S = 30.0


class Refinement:
    """The plan in use, and how it is renewed.

    Args:
        ranks: of the job.
        patch: of this rank.
        plan: that the job was started with.
        problem: that the plan was made for; its costs and its deadline stay.
        graph: of the model.
        batches: where samples come from.
        rows: samples of this rank that the indicator is gathered on, equally many on all ranks.
        loss: None if the model returns it.
        parameters: of the job.

    Attributes:
        plan: in use.

    Raises:
        ParameterError: the problem's operators are not those of the graph.
    """

    def __init__(
        self,
        ranks: Ranks,
        patch: Patch,
        plan: PrecisionPlan,
        problem: AllocationProblem,
        graph: OperatorGraph,
        *,
        batches: Batches,
        rows: range,
        loss: Loss | None,
        parameters: TrainParameters,
    ) -> None:
        self.plan = plan
        self._ranks = ranks
        self._patch = patch
        self._problem = problem
        self._graph = graph
        self._batches = batches
        self._rows = rows
        self._loss = loss
        self._parameters = parameters
        self._table: FloatArray | None = None
        self._solving: _Solving | None = None
        names = {operator.name for operator in graph.operators}
        missing = [operator.name for operator in problem.operators if operator.name not in names]
        if missing:
            rule = "must have every operator of the problem"
            raise ParameterError("graph", rule, missing[0], "Give the graph of the problem")

    @property
    def may_multiply_fp16(self) -> bool:
        """Whether some plan of the problem does."""
        return Precision.FP16 in self._problem.precisions

    def before_step(self, step: int) -> str | None:
        """Take up what was found and begin anew, where it is time; on all ranks alike.

        Returns:
            What happened, for the metrics; None where nothing was due.
        """
        interval = self._parameters.refine_interval
        if step == 0 or step % interval:
            return None
        told = []
        if self._table is not None:
            told.append(self._take_up())
            self._table = None
        begin = time.perf_counter()
        failure = self._gather(step)
        seconds = time.perf_counter() - begin
        lost = f"no plan is looked for: {failure}"
        told.append(lost if failure else f"the indicator took {seconds:.2f} s")
        return "; ".join(told)

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint keeps, beside the plan in use."""
        return {} if self._table is None else {_TABLE: torch.from_numpy(self._table)}

    def restore(self, found: Checkpoint) -> None:
        """Go on from a checkpoint, whether or not it was written with refinement."""
        self.plan = plan_in(found) or self.plan
        table = found.tensors.get(_TABLE)
        if table is not None:
            self._solve(table.numpy())

    def close(self) -> None:
        """End what still runs."""
        if self._solving is not None:
            self._solving.close()

    def _take_up(self) -> str:
        """The plan that was looked for, on all ranks or on none."""
        ranks = self._ranks
        answer: dict[str, Any] = {"plan": None, "told": ""}
        if self._solving is not None:  # on rank 0
            found = self._solving.answer()
            content = None if found.plan is None else plan_to_json(found.plan)
            answer = {"plan": content, "told": found.told}
        answer = json.loads(ranks.broadcast_bytes(json.dumps(answer).encode()))
        if answer["plan"] is None:
            return str(answer["told"])
        before, plan = self.plan, _from_json(answer["plan"])
        failure = ""
        try:
            self._patch.exchange(plan)
        except QsyncError as error:
            failure = f"rank {ranks.rank} cannot run the new one: {error}"
        failures = [raw.decode() for raw in ranks.gather_bytes(failure.encode()) if raw]
        if failures:
            if not failure:
                self._patch.exchange(before)
            return f"the plan stays: {failures[0]}"
        self.plan = plan
        return str(answer["told"])

    def _gather(self, step: int) -> str:
        """The mean table of all ranks; why there is none, if there is none."""
        ranks, problem = self._ranks, self._problem
        failure, values = "", b""
        try:
            with self._patch.off():
                table = perturbations(
                    self._patch.model,
                    to_device(self._batches(step, self._rows), ranks.device),
                    self._graph,
                    precisions=problem.precisions,
                    method=METHODS[0],
                    loss=self._loss,
                    rounding=self._parameters.rounding,
                    seed=mix64(mix64(self._parameters.seed) ^ mix64(step)) >> 1,
                )
            rows = [table.operators.index(operator.name) for operator in problem.operators]
            values = np.ascontiguousarray(table.values[rows], dtype=np.float64).tobytes()
        except (QsyncError, RuntimeError) as error:
            failure = f"rank {ranks.rank} cannot gather the indicator: {first_line(error)}"
        failures = [raw.decode() for raw in ranks.gather_bytes(failure.encode()) if raw]
        if failures:
            return failures[0]
        shape = (len(problem.operators), len(problem.precisions))
        tables = [np.frombuffer(raw).reshape(shape) for raw in ranks.gather_bytes(values)]
        self._solve(np.mean(tables, axis=0))
        return ""

    def _solve(self, table: FloatArray) -> None:
        """Begin to look for a plan, in a process beside rank 0."""
        self._table = table
        if self._ranks.rank:
            return
        if self._solving is None:
            self._solving = _Solving(self._problem, self._parameters.refine_time_limit_s)
        self._solving.ask(self.plan, table)


class _Solving:
    """The process that solves, and the folder through which it is spoken to."""

    def __init__(self, problem: AllocationProblem, time_limit_s: float) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="qsync-opt-refinement-"))
        self._limit_s = time_limit_s
        self._problem: AllocationProblem | None = problem
        self._process: subprocess.Popen[bytes] | None = None
        self._asked_at = 0.0
        self._trouble = ""

    def ask(self, plan: PrecisionPlan, table: FloatArray) -> None:
        """Begin."""
        self._end()
        self._trouble = ""
        try:
            if self._problem is not None:
                write_problem(self._folder, self._problem)
                self._problem = None  # it is in the folder
            write_question(self._folder, plan, table)
            self._start()
        except (QsyncError, OSError) as error:
            self._trouble = first_line(error)

    def _start(self) -> None:
        root = str(Path(qsync_opt.__file__).parents[1])
        others = os.environ.get("PYTHONPATH")
        environment = {
            **os.environ,
            "PYTHONPATH": root if others is None else f"{root}{os.pathsep}{others}",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        }
        with (self._folder / "errors").open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "qsync_opt.optimize.refresh", str(self._folder)]
                + [str(self._limit_s)],
                env=environment,
                stdin=subprocess.PIPE,  # closed by whatever ends this process
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,  # Ctrl-C is for the job; it then ends the solve
            )
        self._asked_at = time.monotonic()

    def answer(self) -> Answer:
        """Wait for the end."""
        process = self._process
        if process is None:
            told = f"the plan stays: the solver cannot be started: {self._trouble}"
            return Answer(plan=None, told=told)
        left = self._asked_at + self._limit_s + _GRACE_S - time.monotonic()
        try:
            process.wait(max(0.0, left))
        except subprocess.TimeoutExpired:
            self._end()
            limit = f"{self._limit_s:g} s"
            return Answer(plan=None, told=f"the plan stays: the solver ran beyond {limit}")
        try:
            found = read_answer(self._folder)
        except QsyncError as error:
            return Answer(plan=None, told=f"the plan stays: {error}")
        if found is None:
            said = (self._folder / "errors").read_text(errors="replace").strip().splitlines()
            why = said[-1] if said else f"exit code {process.returncode}"
            return Answer(plan=None, told=f"the plan stays: the solver failed: {why}")
        self._end()
        return found

    def close(self) -> None:
        """Leave nothing behind."""
        self._end()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            if self._process.stdin is not None:
                self._process.stdin.close()
            self._process.wait()
            self._process = None


def plan_in(found: Checkpoint) -> PrecisionPlan | None:
    """The plan that was in use when a checkpoint was written; None: that of the start."""
    content = found.facts.get("current_plan")
    return None if content is None else _from_json(content)


def keep_plan(folder: Path, step: int, plan: PrecisionPlan) -> None:
    """Put a plan beside the checkpoints, for people."""
    save_plan(plan, folder / f"plan-{step:08d}.json")


def plan_to_json(plan: PrecisionPlan) -> dict[str, Any]:
    """A plan as plain values; see `plan_in`."""
    rows = {
        kind: {name: str(precision) for name, precision in row.items()}
        for kind, row in plan.devices.items()
    }
    return {"problem": plan.problem, "devices": rows, "communication": plan.communication}


def _from_json(content: Mapping[str, Any]) -> PrecisionPlan:
    return PrecisionPlan(
        problem=content["problem"],
        devices=content["devices"],
        communication=content.get("communication", ()),  # checkpoints of early releases lack it
    )


def rows_of(start: int, counts: list[int], most: int) -> range:
    """The samples that a rank gathers the indicator on: equally many on all ranks.

    Args:
        start: the rank's first sample.
        counts: samples of all ranks' micro-batches.
        most: not more than these.
    """
    return range(start, start + min(most, *counts))
