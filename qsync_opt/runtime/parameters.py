"""`TrainParameters`: the options of a training job, checked on construction."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from qsync_opt.errors import ParameterError
from qsync_opt.kernels.rounding import Rounding
from qsync_opt.precision import Precision
from qsync_opt.runtime.distributed import TIMEOUT_S
from qsync_opt.runtime.scaling import GROWTH_INTERVAL, INITIAL_SCALE

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

#: Name -> optimizer of some parameters at a learning rate.
OPTIMIZERS: Mapping[str, Callable[[Iterable[nn.Parameter], float], torch.optim.Optimizer]] = (
    MappingProxyType(
        {
            "sgd": lambda parameters, rate: torch.optim.SGD(parameters, lr=rate, momentum=0.9),
            "adam": lambda parameters, rate: torch.optim.Adam(parameters, lr=rate),
            "adamw": lambda parameters, rate: torch.optim.AdamW(parameters, lr=rate),
        }
    )
)

#: Fields that ranks compare as they are.
_COMPARED = (
    "steps",
    "accumulation",
    "learning_rate",
    "seed",
    "resume",
    "checkpoint_interval",
    "emulate",
    "loss_scale",
    "growth_interval",
    "find_unused_parameters",
)

_AUTOCAST = {Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}


@dataclass(frozen=True, kw_only=True)
class TrainParameters:
    """How to train; the same on every rank, apart from the folder.

    Attributes:
        steps: optimizer steps in all, those before a restart included.
        batch_size: samples of a step, over all ranks and micro-batches. None: what the given
            batch has, times ranks and micro-batches.
        accumulation: micro-batches whose gradients are added up before a step.
        optimizer: one of `OPTIMIZERS`, or a function that makes one of parameters.
        learning_rate: of a named optimizer.
        schedule: factor of the learning rate in a step; None: always 1.
        shares: device kind -> fraction of the global batch that one of its workers handles.
            None: that of the problem, or equal shares.
        seed: of everything random; ranks draw apart.
        rounding: of what is quantised.
        folder: where checkpoints and metrics go; None: nothing is kept.
        checkpoint_interval: steps between checkpoints; 0: only at the end and when interrupted.
        keep: newest checkpoints that are kept.
        resume: go on from the newest checkpoint in the folder. Otherwise there may be none.
        uniform: one precision for every adjustable operator instead of the plan's.
        autocast: bf16 or fp16: torch.autocast instead of a plan.
        emulate: run precisions that the device lacks with what it has.
        loss_scale: the first one, where any rank multiplies in fp16.
        growth_interval: steps without an overflow after which the loss scale doubles.
        find_unused_parameters: for a model that leaves parameters out of some steps.
        timeout_s: how long a rank may keep the others waiting.

    Raises:
        ParameterError: a value out of its range, or two that exclude each other.
    """

    steps: int
    batch_size: int | None = None
    accumulation: int = 1
    optimizer: str | OptimizerFactory = "adamw"
    learning_rate: float = 1e-3
    schedule: Callable[[int], float] | None = None
    shares: Mapping[str, float] | None = None
    seed: int = 0
    rounding: Rounding = Rounding.NEAREST
    folder: Path | None = None
    checkpoint_interval: int = 100
    keep: int = 3
    resume: bool = True
    uniform: Precision | None = None
    autocast: Precision | None = None
    emulate: bool = False
    loss_scale: float = INITIAL_SCALE
    growth_interval: int = GROWTH_INTERVAL
    find_unused_parameters: bool = False
    timeout_s: float = field(default=TIMEOUT_S)

    def __post_init__(self) -> None:
        least = {"steps": 1, "accumulation": 1, "checkpoint_interval": 0, "keep": 1}
        for name, bound in {**least, "growth_interval": 1}.items():
            _require_whole(name, getattr(self, name), bound)
        if self.batch_size is not None:
            _require_whole("batch_size", self.batch_size, 1)
        for name in ("learning_rate", "timeout_s", "loss_scale"):
            value = getattr(self, name)
            if not (isinstance(value, (int, float)) and math.isfinite(value) and value > 0):
                raise ParameterError(name, "must be a positive number", value)
        if math.frexp(self.loss_scale)[0] != 0.5:
            rule = "must be a power of two, or scaling would round gradients"
            raise ParameterError("loss_scale", rule, self.loss_scale)
        if isinstance(self.optimizer, str) and self.optimizer not in OPTIMIZERS:
            rule = f"must be one of {', '.join(OPTIMIZERS)}"
            raise ParameterError("optimizer", rule, self.optimizer)
        if self.folder is not None:
            object.__setattr__(self, "folder", Path(self.folder))
        if self.uniform is not None and self.autocast is not None:
            raise ParameterError("autocast", "must not be given with uniform", self.autocast)
        if self.autocast is not None and self.autocast not in _AUTOCAST:
            raise ParameterError("autocast", "must be bf16 or fp16", self.autocast)

    def autocast_dtype(self) -> torch.dtype | None:
        """The dtype of autocast, None without it."""
        return None if self.autocast is None else _AUTOCAST[self.autocast]

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of the parameters that are trained.

        Raises:
            ParameterError: there are none.
        """
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not trained:
            raise ParameterError("model", "must have parameters that are trained", len(trained))
        if isinstance(self.optimizer, str):
            return OPTIMIZERS[self.optimizer](trained, self.learning_rate)
        return self.optimizer(trained)

    def describe(self) -> dict[str, Any]:
        """What ranks compare, ready for JSON."""
        own = self.optimizer if isinstance(self.optimizer, str) else "given by the caller"
        return {
            **{name: getattr(self, name) for name in _COMPARED},
            "optimizer": own,
            "rounding": self.rounding.name.lower(),
            "uniform": None if self.uniform is None else str(self.uniform),
            "autocast": None if self.autocast is None else str(self.autocast),
            "shares": None if self.shares is None else dict(self.shares),
            "keeps checkpoints": self.folder is not None,
        }


def _require_whole(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ParameterError(name, f"must be a whole number of at least {least}", value)
