"""`LossScale`: dynamic loss scaling that all ranks do alike.

Gradients of fp16 products underflow unless the loss is scaled up, and overflow if it is scaled
up too far (Micikevicius et al., "Mixed precision training", ICLR 2018). The scale is that of
the job: ranks add up their gradients, so a rank that computes in fp32 scales as well, and one
rank's overflow makes all of them leave out the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from qsync_opt.errors import TrainError
from qsync_opt.runtime.distributed import Ranks
from qsync_opt.runtime.state import all_finite

INITIAL_SCALE = 2.0**16
GROWTH, BACKOFF = 2.0, 0.5

#: Steps without an overflow after which the scale grows.
GROWTH_INTERVAL = 2000

#: Below this, scaling is not what makes gradients overflow.
SMALLEST_SCALE = 2.0**-10


class LossScale:
    """The factor of the loss, and when it changes.

    Args:
        ranks: of the job.
        scale: at the start.
        growth_interval: see `GROWTH_INTERVAL`.
    """

    def __init__(
        self, ranks: Ranks, scale: float = INITIAL_SCALE, growth_interval: int = GROWTH_INTERVAL
    ) -> None:
        self._ranks = ranks
        self._growth_interval = growth_interval
        self.scale = scale
        self.good_steps = 0

    def unscale(self, gradients: Sequence[Tensor]) -> bool:
        """Divide gradients by the scale; whether the step may be taken, the same on all ranks.

        Also sets the scale of the next step.

        Raises:
            TrainError: gradients overflow at the smallest scale too.
        """
        is_finite = True
        if gradients:
            torch._foreach_mul_(list(gradients), 1.0 / self.scale)  # a power of two: exact
            is_finite = all_finite(gradients)
        if self._ranks.any(not is_finite):
            self._back_off()
            return False
        self.good_steps += 1
        if self.good_steps == self._growth_interval:
            self.scale *= GROWTH
            self.good_steps = 0
        return True

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.scale = float(state["scale"])
        self.good_steps = int(state["good_steps"])

    def _back_off(self) -> None:
        self.scale *= BACKOFF
        self.good_steps = 0
        if self.scale < SMALLEST_SCALE:
            raise TrainError(
                f"gradients are not finite at a loss scale of {self.scale / BACKOFF:g} either",
                "Lower the learning rate, or give the overflowing operators bf16 or fp32",
            )
