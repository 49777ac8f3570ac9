"""The loss scale moves as torch's GradScaler does, whose code it does not share."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from qsync_opt.errors import ParameterError, TrainError
from qsync_opt.precision import Precision
from qsync_opt.runtime.distributed import Ranks
from qsync_opt.runtime.parameters import TrainParameters
from qsync_opt.runtime.scaling import LossScale

ALONE = Ranks(rank=0, world=1, device=torch.device("cpu"))


def test_the_scale_moves_as_that_of_torch() -> None:
    torch.manual_seed(0)
    ours, theirs = nn.Linear(3, 2), nn.Linear(3, 2)
    theirs.load_state_dict(ours.state_dict())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ours, theirs)]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
    scale = LossScale(ALONE, 2.0**8, growth_interval=3)
    generator = torch.Generator().manual_seed(1)
    seen = set()
    for number in range(60):
        bad = {0: float("inf"), 1: float("nan")}.get(
            int(torch.randint(6, (), generator=generator)), 1.0
        )
        x = torch.randn(4, 3, generator=generator)
        for model in (ours, theirs):
            model.zero_grad()
            loss = model(x).square().mean() * bad
            scaled = loss * scale.scale if model is ours else scaler.scale(loss)
            scaled.backward()
        if scale.unscale([p.grad for p in ours.parameters() if p.grad is not None]):
            optimizers[0].step()
        scaler.step(optimizers[1])
        scaler.update()
        assert scale.scale == scaler.get_scale(), number
        seen.add(scale.scale)
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(mine, other)
    assert len(seen) > 3


def test_overflow_at_the_smallest_scale_ends_the_job() -> None:
    scale = LossScale(ALONE, 2.0**-9)
    assert not scale.unscale([torch.tensor([float("inf")])])
    with pytest.raises(TrainError, match="not finite"):
        scale.unscale([torch.tensor([float("nan")])])


def test_the_state_is_kept() -> None:
    scale = LossScale(ALONE, 2.0**4, growth_interval=3)
    scale.unscale([torch.ones(2)])
    other = LossScale(ALONE, 2.0**9, growth_interval=3)
    other.load(scale.state())
    for _ in range(2):
        scale.unscale([torch.ones(2)])
        other.unscale([torch.ones(2)])
    assert scale.scale == other.scale == 2.0**5


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps", 0),
        ("steps", True),
        ("accumulation", 0),
        ("batch_size", -1),
        ("keep", 0),
        ("checkpoint_interval", -1),
        ("growth_interval", 0),
        ("learning_rate", 0.0),
        ("learning_rate", float("nan")),
        ("timeout_s", -1.0),
        ("loss_scale", 3.0),
        ("optimizer", "lion"),
        ("autocast", Precision.INT8),
    ],
)
def test_options_out_of_range_are_refused(name: str, value: object) -> None:
    with pytest.raises(ParameterError, match=name):
        TrainParameters(**{"steps": 1, name: value})  # type: ignore[arg-type]


def test_two_rivals_at_once_are_refused() -> None:
    with pytest.raises(ParameterError, match="uniform"):
        TrainParameters(steps=1, uniform=Precision.BF16, autocast=Precision.BF16)
