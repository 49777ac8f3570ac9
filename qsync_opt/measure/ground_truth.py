"""The indicator `measured`: run the step with one operator lowered and compare gradients.

For operator o at precision p, with all other operators in fp32,

    w[o, p] = E ||g_hat - g||^2

summed over all parameters, where g_hat is the gradient with o patched by `runtime.convert` at
p (emulated where the device lacks it), g the one with the same patch at fp32, and the mean is
over draws of stochastic rounding; rounding to the nearest needs one. The random numbers of the
model (dropout) are the same in every run (`draws`). fp16 runs with a loss scale, halved until
nothing overflows. Unit: that of a squared gradient. Cost: one forward and backward per
operator, precision and draw.

Operators that one module runs share their precision and are lowered together; each gets an
equal share of the effect.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from qsync_opt.graph import GroupReason, OperatorGraph
from qsync_opt.kernels.rounding import Rounding
from qsync_opt.measure.draws import SameDraws
from qsync_opt.measure.moments import LARGEST_LOSS_SCALE, require_finite
from qsync_opt.measure.rounding_noise import layout_of
from qsync_opt.measure.step import Loss, call_model, loss_of, split_batch
from qsync_opt.optimize.arrays import FloatArray
from qsync_opt.precision import Precision
from qsync_opt.runtime.convert import convert, revert, set_step

#: Operators done and operators in all.
Report = Callable[[int, int], None]


def measured_variance(
    model: nn.Module,
    batch: Any,
    graph: OperatorGraph,
    precisions: Sequence[Precision],
    *,
    loss: Loss | None = None,
    draws: int = 1,
    rounding: Rounding = Rounding.NEAREST,
    seed: int = 0,
    report: Report | None = None,
) -> FloatArray:
    """The table [N, P] of one batch; see the module.

    Args:
        model: that the graph was captured from; reverted at the end.
        batch: as in `capture`.
        graph: of the model.
        precisions: of the columns.
        loss: as in `capture`.
        draws: of stochastic rounding.
        rounding: of what is quantised to 8 bits.
        seed: of dropout and of the draws.
        report: told after every operator.

    Raises:
        CaptureError: the loss or a gradient is not finite in fp32.
        PlanError: the model is not the one that the graph was captured from.
    """
    table = np.zeros((len(graph.operators), len(precisions)))
    all_fp32 = {graph.operators[index].name: Precision.FP32 for index in graph.adjustable}
    step = _Step(model, batch, loss, seed)

    def run(plan: dict[str, Precision], draw: int, scale: float) -> list[Tensor | None]:
        convert(model, plan, graph=graph, emulate=True, rounding=rounding, seed=seed, rank=0)
        try:
            set_step(model, draw)
            return step.gradients(scale)
        finally:
            revert(model)

    reference = run(all_fp32, 0, 1.0)
    require_finite(step.loss, [gradient for gradient in reference if gradient is not None])
    units = _units(graph)
    for number, unit in enumerate(units):
        for column, precision in enumerate(precisions):
            if any(precision not in layout_of(graph, index).precisions for index in unit):
                table[list(unit), column] = math.inf
                continue
            if precision is Precision.FP32:
                continue
            plan = all_fp32 | {graph.operators[index].name: precision for index in unit}
            stochastic = rounding is Rounding.STOCHASTIC and precision in (
                Precision.INT8,
                Precision.FP8,
            )
            repeats = draws if stochastic else 1
            effect = sum(_effect(run, plan, draw, precision, reference) for draw in range(repeats))
            table[list(unit), column] = effect / repeats / len(unit)
        if report is not None:
            report(number + 1, len(units))
    return table


class _Step:
    """The forward and backward that are compared."""

    def __init__(self, model: nn.Module, batch: Any, loss: Loss | None, seed: int) -> None:
        self._model = model
        self._inputs, self._target = split_batch(batch, loss)
        self._loss = loss
        self._seed = seed
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self.loss = torch.zeros(())

    def gradients(self, scale: float) -> list[Tensor | None]:
        torch.manual_seed(self._seed)
        with torch.enable_grad():
            with SameDraws():
                output = call_model(self._model, self._inputs)
                value = loss_of(output, self._target, self._loss)
            self.loss = value.detach()
            found = torch.autograd.grad(value * scale, self._parameters, allow_unused=True)
        return [None if gradient is None else gradient / scale for gradient in found]


def _effect(
    run: Callable[[dict[str, Precision], int, float], list[Tensor | None]],
    plan: dict[str, Precision],
    draw: int,
    precision: Precision,
    reference: list[Tensor | None],
) -> float:
    """The squared distance of the gradients; infinite where they overflow at every scale."""
    scale = LARGEST_LOSS_SCALE if precision is Precision.FP16 else 1.0
    while True:
        effect = 0.0
        for found, exact in zip(run(plan, draw, scale), reference, strict=True):
            if found is not None and exact is not None:
                effect += float((found - exact).square().sum(dtype=torch.float64))
        if math.isfinite(effect):
            return effect
        if scale <= 1.0:
            return math.inf
        scale /= 2


def _units(graph: OperatorGraph) -> list[tuple[int, ...]]:
    """Adjustable operators, those together that one module runs."""
    shared = {
        index: group.operators
        for group in graph.groups
        if group.reason is GroupReason.SHARED_MODULE
        for index in group.operators
    }
    return list(dict.fromkeys(shared.get(index, (index,)) for index in graph.adjustable))
