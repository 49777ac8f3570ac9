"""The precisions of one rank on its model: put on, exchanged for others, and taken off.

What the job asks for is decided here: a plan's row of this device kind, one precision
throughout, or none, for a model that runs as it is or under torch.autocast.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

import torch
from torch import nn

from qsync_opt.errors import ParameterError, QsyncError
from qsync_opt.graph import OperatorGraph
from qsync_opt.measure.uniform import uniform_plan
from qsync_opt.plan import PrecisionPlan
from qsync_opt.precision import Precision
from qsync_opt.runtime.availability import available_precisions, supported_precisions
from qsync_opt.runtime.casts import compute_dtype
from qsync_opt.runtime.convert import convert, revert
from qsync_opt.runtime.distributed import Ranks
from qsync_opt.runtime.layers import layer_of
from qsync_opt.runtime.parameters import TrainParameters
from qsync_opt.runtime.product_check import require_right_products


class Patch:
    """What `convert` did to the model of this rank.

    Parameters are the same objects all the time, so an optimizer, DDP's buckets and hooks are
    not concerned when precisions change.

    Args:
        model: of this rank, on its device.
        kind: device kind of this rank.
        graph: that plans are made for, see `convert`.
        parameters: of the job.
        ranks: of the job.
    """

    def __init__(
        self,
        model: nn.Module,
        kind: str,
        graph: OperatorGraph | None,
        parameters: TrainParameters,
        ranks: Ranks,
    ) -> None:
        self.model = model
        self._kind = kind
        self._graph = graph
        self._parameters = parameters
        self._ranks = ranks
        self._precisions: Mapping[str, Precision] = {}

    @property
    def multiplies_fp16(self) -> bool:
        """Whether any product of this rank is in fp16."""
        return self._parameters.autocast is Precision.FP16 or any(
            compute_dtype(precision, self._ranks.device) is torch.float16
            for precision in self._precisions.values()
        )

    def put_on(self, plan: PrecisionPlan | None) -> None:
        """Convert the model as the job asks for.

        Raises:
            PlanError: see `convert`.
            KernelError: the device multiplies wrong in a precision that is asked for.
        """
        parameters = self._parameters
        precisions: Mapping[str, Precision] = {}
        if parameters.uniform is not None:
            device = self._ranks.device
            precisions = _uniform(self.model, parameters.uniform, self._graph, device)
        elif plan is not None and parameters.autocast is None:
            precisions = plan.for_device(self._kind)
        if precisions:
            self._convert(precisions)
        elif parameters.autocast is not None:
            require_right_products(self._ranks.device, [parameters.autocast])

    def exchange(self, plan: PrecisionPlan) -> None:
        """Take the precisions of another plan instead; where that fails, keep the old ones.

        Raises:
            QsyncError: the new plan does not fit this rank; its model is as it was.
        """
        before = self._precisions
        self._revert()
        try:
            self._convert(plan.for_device(self._kind))
        except QsyncError:
            if before:
                self._convert(before)
            raise

    @contextmanager
    def off(self) -> Iterator[None]:
        """The model as it was before, inside."""
        before = self._precisions
        self._revert()
        try:
            yield
        finally:
            if before:
                self._convert(before)

    def take_off(self) -> None:
        """Leave the model's modules as they were."""
        with suppress(ParameterError):  # somebody changed classes since; not ours to undo
            self._revert()

    def _revert(self) -> None:
        if self._precisions:
            revert(self.model)
            self._precisions = {}

    def _convert(self, precisions: Mapping[str, Precision]) -> None:
        require_right_products(self._ranks.device, precisions.values())
        convert(
            self.model,
            precisions,
            graph=self._graph,
            rounding=self._parameters.rounding,
            seed=self._parameters.seed,
            rank=self._ranks.rank,
            emulate=self._parameters.emulate,
        )
        self._precisions = precisions


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
