"""Kinks: where a small noise flips a gradient instead of moving it.

Where a rectifier is close to zero, or two values in a pooling window are close to each other,
noise e in the input lets the gradient jump. The share of elements that jump grows with E|e|,
not with E e^2, so that for small noise kinks outweigh everything that a derivative sees.

No list of functions says which operators have kinks. Each operator without a choice is run
again by itself with Gaussian noise of two sizes on an input. With d the change of the gradients
that it hands back and S the power with which noise in these spreads to all gradients
(`moments`), D(s) = sum_i S_i * E d_i^2 is the effect of noise of standard deviation s; it is
a * s for a kink and b * s^2 elsewhere. D(s) = a * s + b * s^2 at the two sizes gives the slope
a; the second term is what `moments` counts already.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from qsync_opt.measure.flows import Replayable

#: The two sizes of the noise, relative to the root mean square of the input.
_SIZES = (2.0**-7, 2.0**-4)

#: A slope that explains less of the effect of the smaller noise is none.
_LEAST_SHARE = 0.25


@dataclass(frozen=True, kw_only=True)
class Kink:
    """An input of an operator at which the gradient jumps.

    Attributes:
        operator: index in the graph.
        place: of the input among `Replayable.inputs`.
        size: root mean square of the input.
        slope: added gradient power per standard deviation of noise in the input.
    """

    operator: int
    place: int
    size: float
    slope: float


def find_kinks(replayable: Replayable, generator: torch.Generator) -> list[Kink]:
    """The kinks of one operator.

    Args:
        replayable: after its step was probed.
        generator: of the noise.
    """
    powers = [tap.gradient_power for tap in replayable.inputs]
    if all(power is None for power in powers):
        return []
    base = replayable.gradients(*replayable.run(lambda _, x: x))
    kinks = []
    for place, tap in enumerate(replayable.inputs):
        size = float(tap.value.float().square().mean().sqrt())
        if not math.isfinite(size) or size == 0:
            continue
        noise = torch.randn(tap.value.shape, generator=generator, device=tap.value.device)
        ratios = []
        for share in _SIZES:
            deviation = share * size
            change = _adding(noise * deviation, place)
            moved = replayable.gradients(*replayable.run(change))
            effect = sum(
                float((power * (after - before).square()).sum(dtype=torch.float64))
                for power, after, before in zip(powers, moved, base, strict=True)
                if power is not None
            )
            ratios.append(effect / deviation)
        small, large = ratios
        # ratio = a + b * s at both sizes
        slope = (small * _SIZES[1] - large * _SIZES[0]) / (_SIZES[1] - _SIZES[0])
        if math.isfinite(slope) and slope > _LEAST_SHARE * small:
            kinks.append(
                Kink(
                    operator=replayable.operator,
                    place=place,
                    size=size,
                    slope=slope,
                )
            )
    return kinks


def _adding(noise: Tensor, place: int) -> Callable[[int, Tensor], Tensor]:
    return lambda number, x: x + noise if number == place else x
