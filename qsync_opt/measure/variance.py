"""The indicator `variance`: what rounding adds to the variance of the gradient, predicted.

For operator o at precision p, over all tensors t that the layer rounds (`rounding_noise`),

    w[o, p] = sum_t sum_i ( E e_ti^2 * S_ti ) + kinks[o, p]

with E e_ti^2 the power of the rounding error of element i, computed with the layer's own
quantiser, and S_ti the power with which noise there spreads to the gradients of all parameters
(`moments`). Both directions are in the sum: operands and output rounded on the way forward,
gradients on the way back. It is the bi-directional indicator of QSync (arXiv 2407.02327) with
three of its assumptions replaced by measurements: the error models of fixed and floating point
by the errors themselves, the depth of a layer by S, and norms by squared norms.

Followers that take the 16-bit dtype which o hands on round too. What they add is computed by
running each by itself in 16 bits, and counted for o where o alone makes them follow.

Noise that reaches kinks (`kinks`) adds sum_k slope_k * deviation_k. The pass back from the kinks
gives the root of sum_k (slope_k * deviation_k)^2; with deviations that are equal shares of the
inputs' sizes, the sum is sqrt(n) times that, n = (sum_k c_k)^2 / sum_k c_k^2 the effective
number of kinks behind o, c_k = slope_k * size_k.

All of this is first order: it holds while w is small beside ||g||^2. Beyond, the measured effect
levels off near 2 ||g||^2, that of a gradient that has nothing left of g, and w goes on growing.

Unit: that of a squared gradient; c times the loss gives c^2 times the table. Cost: one step and
about four backward passes a probe, however many operators and precisions there are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from qsync_opt.graph import OperatorGraph, Role
from qsync_opt.kernels.rounding import Rounding
from qsync_opt.measure.flows import Product, Replayable, Tap
from qsync_opt.measure.moments import Observation
from qsync_opt.measure.rounding_noise import Layout, Part, gradient_noise, value_noise
from qsync_opt.optimize.arrays import FloatArray
from qsync_opt.precision import Precision
from qsync_opt.runtime.casts import compute_dtype


@dataclass(frozen=True, kw_only=True)
class _Added:
    """Noise of some rounding: its effect, and sum_k c_k^2 E ||e_k||^2 at the kinks."""

    effect: float = 0.0
    at_kinks: float = 0.0

    def __add__(self, other: _Added) -> _Added:
        return _Added(effect=self.effect + other.effect, at_kinks=self.at_kinks + other.at_kinks)


def added_variance(
    observation: Observation,
    graph: OperatorGraph,
    precisions: Sequence[Precision],
    rounding: Rounding,
) -> FloatArray:
    """The table [N, P] of one observed step; see the module.

    Args:
        observation: with probes and replays.
        graph: whose step it was.
        precisions: of the columns.
        rounding: of what is quantised to 8 bits.
    """
    table = np.zeros((len(graph.operators), len(precisions)))
    dtypes = {p.output for p in precisions} - {Precision.FP32}
    followers = {dtype: _followers(observation, graph, dtype) for dtype in dtypes}
    for index, product in observation.products.items():
        following = _following(graph, index)
        many = _effective_kinks(observation, index)
        for column, precision in enumerate(precisions):
            if precision not in product.layout.precisions:
                table[index, column] = math.inf
                continue
            added = _of_product(product, precision, rounding, observation.loss_scale)
            if precision.output is not Precision.FP32:
                for follower in following:
                    added += followers[precision.output].get(follower, _Added())
            total = added.effect + math.sqrt(added.at_kinks * many)
            table[index, column] = math.inf if math.isnan(total) else total
    return table


def _of_product(
    product: Product, precision: Precision, rounding: Rounding, loss_scale: float
) -> _Added:
    added = _Added()
    layout = product.layout
    taps = [*product.operands, *([] if product.output is None else [product.output])]
    for tap in taps:
        power = tap.value_power
        forward, backward = product.weight_forward, product.weight_backward
        if (
            precision is Precision.INT8
            and tap.part is Part.WEIGHT
            and forward is not None
            and backward is not None
        ):
            # The gradient of the input goes through the 16-bit weight, not through the codes.
            power = forward.value_power
            half = precision.output
            added += _weigh(tap, backward.value_power, layout, half, rounding)
        added += _weigh(tap, power, layout, precision, rounding)
        if tap.spread_power is not None:
            noise = value_noise(layout, tap.part, precision, tap.value, tap.spread_power, rounding)
            added += _Added(at_kinks=noise)
        if tap.gradient is not None and tap.gradient_power is not None:
            noise = gradient_noise(
                layout,
                tap.part,
                precision,
                tap.gradient,
                tap.gradient_power,
                loss_scale=loss_scale,
                rounding=rounding,
            )
            added += _Added(effect=noise)
    return added


def _weigh(
    tap: Tap, power: Tensor | None, layout: Layout, precision: Precision, rounding: Rounding
) -> _Added:
    if power is None:
        return _Added()
    return _Added(effect=value_noise(layout, tap.part, precision, tap.value, power, rounding))


def _following(graph: OperatorGraph, index: int) -> list[int]:
    """The followers whose dtype one operator alone decides."""
    lowered = {index}
    for number in range(index + 1, len(graph.operators)):
        operator = graph.operators[number]
        if operator.role is Role.FOLLOWER and operator.follows and lowered >= {*operator.follows}:
            lowered.add(number)
    return sorted(lowered - {index})


def _followers(
    observation: Observation, graph: OperatorGraph, dtype: Precision
) -> dict[int, _Added]:
    """What each follower adds when it runs in a 16-bit dtype, beyond what it is handed."""
    return {
        index: _of_follower(replayable, dtype, observation.loss_scale)
        for index, replayable in observation.replayables.items()
        if graph.operators[index].role is Role.FOLLOWER
    }


def _of_follower(replayable: Replayable, precision: Precision, loss_scale: float) -> _Added:
    device = replayable.inputs[0].value.device
    dtype = compute_dtype(precision, device)
    scale = loss_scale if dtype is torch.float16 else 1.0
    wide, wide_out = replayable.run(lambda _, x: x.to(dtype).float())
    low, low_out = replayable.run(lambda _, x: x.to(dtype))
    added = _Added()
    for tap, exact, rounded in zip(replayable.outputs, wide_out, low_out, strict=True):
        error = (rounded.detach().float() - exact.detach()).square()
        added += _Added(effect=_dot(error, tap.value_power), at_kinks=_dot(error, tap.spread_power))
    back = zip(
        replayable.inputs,
        replayable.gradients(wide, wide_out, scale),
        replayable.gradients(low, low_out, scale),
        strict=True,
    )
    for tap, exact, rounded in back:
        added += _Added(effect=_dot((rounded - exact).square(), tap.gradient_power))
    return added


def _dot(error: Tensor, power: Tensor | None) -> float:
    if power is None:
        return 0.0
    return float(torch.where(power > 0, error * power, 0.0).sum(dtype=torch.float64))


def _effective_kinks(observation: Observation, index: int) -> float:
    sizes = [kink.slope * kink.size for kink in observation.kinks if kink.operator > index]
    squares = sum(size * size for size in sizes)
    return sum(sizes) ** 2 / squares if squares else 0.0
