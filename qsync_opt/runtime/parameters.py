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
from qsync_opt.files import require_json_name
from qsync_opt.kernels.rounding import Rounding
from qsync_opt.precision import Precision
from qsync_opt.runtime.communication import parse_communication
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
    "communication",
    "find_unused_parameters",
    "batch_sizing",
    "refine_interval",
    "refine_samples",
    "trace_steps",
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
        batch_sizing: choose shares by what ranks take for their samples, so that they finish
            together, as far as memories allow; measured before the first step.
        refine_interval: steps after which the plan is solved anew for the gradients of that
            time; it is taken up as many steps later. 0: never.
        refine_samples: most samples of a rank that the indicator is gathered on.
        refine_time_limit_s: of each solve.
        trace: where a Chrome trace of a few steps goes (.json or .json.gz); None: nowhere.
        trace_steps: how many.
        emulate: run precisions that the device lacks with what it has.
        loss_scale: the first one, where any rank multiplies in fp16.
        growth_interval: steps without an overflow after which the loss scale doubles.
        communication: what ranks send, see `communication.parse_communication`; None: fp32
            gradients. With bits for weights, these and the optimizer's state are sharded over
            the ranks while the model is trained.
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
    batch_sizing: bool = False
    refine_interval: int = 0
    refine_samples: int = 8
    refine_time_limit_s: float = 60.0
    trace: Path | None = None
    trace_steps: int = 3
    emulate: bool = False
    loss_scale: float = INITIAL_SCALE
    growth_interval: int = GROWTH_INTERVAL
    communication: str | None = None
    find_unused_parameters: bool = False
    timeout_s: float = field(default=TIMEOUT_S)

    def __post_init__(self) -> None:
        least = {"steps": 1, "accumulation": 1, "checkpoint_interval": 0, "keep": 1}
        least |= {"growth_interval": 1, "refine_interval": 0, "refine_samples": 1}
        for name, bound in {**least, "trace_steps": 1}.items():
            _require_whole(name, getattr(self, name), bound)
        if self.batch_size is not None:
            _require_whole("batch_size", self.batch_size, 1)
        for name in ("learning_rate", "timeout_s", "loss_scale", "refine_time_limit_s"):
            value = getattr(self, name)
            if not (isinstance(value, (int, float)) and math.isfinite(value) and value > 0):
                raise ParameterError(name, "must be a positive number", value)
        if math.frexp(self.loss_scale)[0] != 0.5:
            rule = "must be a power of two, or scaling would round gradients"
            raise ParameterError("loss_scale", rule, self.loss_scale)
        if isinstance(self.optimizer, str) and self.optimizer not in OPTIMIZERS:
            rule = f"must be one of {', '.join(OPTIMIZERS)}"
            raise ParameterError("optimizer", rule, self.optimizer)
        for name in ("folder", "trace"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, Path(getattr(self, name)))
        if self.trace is not None:
            require_json_name("trace", self.trace)
        if self.uniform is not None and self.autocast is not None:
            raise ParameterError("autocast", "must not be given with uniform", self.autocast)
        if self.autocast is not None and self.autocast not in _AUTOCAST:
            raise ParameterError("autocast", "must be bf16 or fp16", self.autocast)
        if self.communication is not None:
            wanted = parse_communication(self.communication)
            if wanted.weights is not None and (self.refine_interval or self.trace is not None):
                rule = "must not code weights with refine_interval or trace"
                raise ParameterError("communication", rule, self.communication, "Leave one out")
        if self.batch_sizing and self.shares is not None:
            raise ParameterError("batch_sizing", "must not be given with shares", True)
        if self.refine_interval and (self.uniform or self.autocast):
            rule = "must be 0 with uniform or autocast, which have no plan"
            raise ParameterError("refine_interval", rule, self.refine_interval)

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
            "traces": self.trace is not None,
        }


def _require_whole(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ParameterError(name, f"must be a whole number of at least {least}", value)
