"""A small model, its data and its plans: what the tests of training on ranks share."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from qsync_opt.plan import PrecisionPlan
from qsync_opt.precision import Precision

KINDS = ("strong", "weak")
ROWS = 20


def small_model(width: int = 24, dropout: float = 0.0) -> nn.Sequential:
    """The same weights every time; no batch norm, whose gradient is not a sum over samples."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, width), nn.Tanh(), nn.Dropout(dropout), nn.Linear(width, 3)]
    return nn.Sequential(*layers)


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    targets = torch.randint(3, (ROWS,), generator=generator)
    return torch.randn(ROWS, 8, generator=generator), targets


def plan_of(weak: Precision, names: tuple[str, ...] = ("0", "3")) -> PrecisionPlan:
    devices = {"strong": dict.fromkeys(names, Precision.FP32), "weak": dict.fromkeys(names, weak)}
    return PrecisionPlan(problem="0" * 64, devices=devices)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def require_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
