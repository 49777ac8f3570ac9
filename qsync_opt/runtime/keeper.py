"""Checkpoints of a job: all ranks look for the newest, one reads or writes, all learn of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from qsync_opt.errors import FormatError, ParameterError, PlanError, QsyncError
from qsync_opt.runtime import state
from qsync_opt.runtime.checkpoints import Checkpoint, CheckpointFolder
from qsync_opt.runtime.distributed import Ranks
from qsync_opt.runtime.lost_ranks import Position
from qsync_opt.runtime.parameters import TrainParameters
from qsync_opt.runtime.scaling import LossScale

if TYPE_CHECKING:
    from torch import Tensor, nn


#: What every checkpoint of a job says of it.
_FACTS = ("plan", "optimizer", "aliases", "loss_scale", "kinds", "samples", "current_plan")


class Keeper:
    """Restores the newest checkpoint of a job and writes further ones.

    Args:
        ranks: of the job.
        parameters: of the job.
        plan: digest of the plan that the job was started with.
        position: of the job; told of every checkpoint.
    """

    def __init__(
        self, ranks: Ranks, parameters: TrainParameters, plan: str, position: Position
    ) -> None:
        self._ranks = ranks
        self._position = position
        self._resume = parameters.resume
        self._plan = plan
        folder = parameters.folder
        self._folder = None if folder is None else CheckpointFolder(folder, parameters.keep)

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint on all ranks, wherever it lies; None where there is none.

        Raises:
            QsyncError: it is of another plan, unwanted, or cannot be read.
        """
        ranks, folder = self._ranks, self._folder
        if folder is None:
            return None
        newest = -1
        failure: QsyncError | None = None
        try:
            folder.prepare(ranks.rank)
            newest = max(folder.steps(), default=-1)
            if newest >= 0 and not self._resume:
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
        if found is not None:
            missing = next((name for name in _FACTS if name not in found.facts), None)
            if missing is not None:
                rule = f"must hold {', '.join(_FACTS)}"
                remedy = "Remove the file to go on from the one before"
                raise FormatError(f"checkpoint of step {found.step}", rule, missing, remedy)
        if found is not None and found.facts["plan"] != self._plan:
            given = self._plan if " " in self._plan else f"{self._plan[:12]}..."
            rule = f"must be of the plan that is given ({given})"
            remedy = "Give the plan it was made with, or another folder"
            where = f"checkpoint of step {found.step}"
            raise PlanError(where, rule, found.facts["plan"], remedy)
        return found

    def close(self) -> None:
        """Let other jobs use the folder."""
        if self._folder is not None:
            self._folder.close()

    def restore(
        self,
        found: Checkpoint,
        model: nn.Module,
        optimizer: state.KeptOptimizer,
        scale: LossScale | None,
    ) -> None:
        """Give everything the state of a checkpoint.

        Raises:
            TrainError: it is of another model or optimizer.
        """
        state.unpack(found, model, optimizer)
        if scale is not None and found.facts["loss_scale"] is not None:
            scale.load(found.facts["loss_scale"])
        own = state.random_of(found, self._ranks.rank)
        if own is not None:
            state.set_random_state(own, self._ranks.device)
        self._position.saved = found.step

    def save(
        self,
        done: int,
        model: nn.Module,
        optimizer: state.KeptOptimizer,
        scale: LossScale | None,
        *,
        facts: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
    ) -> None:
        """Write a checkpoint, if there is a folder; no rank goes on before it is there.

        Args:
            done: steps that have been taken.
            model: not wrapped.
            optimizer: of its parameters.
            scale: None where nothing is scaled.
            facts: further plain values, those of rank 0.
            tensors: further tensors, those of rank 0.
        """
        if self._folder is None:
            return
        ranks = self._ranks
        randoms = ranks.gather_bytes(state.random_state(ranks.device))
        failure: QsyncError | None = None
        if ranks.rank == 0:
            try:
                packed, plain = state.pack(model, optimizer, randoms)
                plain |= {"plan": self._plan, **facts}
                plain |= {"loss_scale": None if scale is None else scale.state()}
                checkpoint = Checkpoint(step=done, facts=plain, tensors={**packed, **tensors})
                self._folder.save(checkpoint)
            except QsyncError as error:
                failure = error
        ranks.share_failure(failure)
        self._position.saved = done
