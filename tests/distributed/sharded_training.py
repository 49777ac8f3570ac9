"""Parts of `communication_on_ranks`: the trainer with coded weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor

from qsync_opt.errors import ParameterError
from qsync_opt.precision import Precision
from qsync_opt.runtime.parameters import TrainParameters
from qsync_opt.runtime.sharded_model import blocks_of
from qsync_opt.runtime.trainer import TrainResult, train
from tests.distributed.communication_on_ranks import Part, all_equal
from tests.low_precision import TinyGpt, language_loss, tokens

ROWS = 12


class Counting(nn.Module):
    """A model with a buffer that every forward changes, and blocks large enough to shard."""

    calls: Tensor

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.gpt = TinyGpt(width=80, layers=2)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.gpt(x)  # type: ignore[no-any-return]


class Watching(Counting):
    """One more buffer, which depends on the samples of the rank, and the output on it."""

    seen: Tensor

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.float().mean() / 100
        return super().forward(x) * (1.0 + self.seen.mean())


def _fit(model: nn.Module, steps: int, **options: Any) -> TrainResult:
    parameters = TrainParameters(steps=steps, batch_size=ROWS, learning_rate=3e-3, **options)
    batch = tokens(ROWS)
    return train(model, (batch, batch), language_loss, parameters=parameters)


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def training(rank: int, world: int, folder: Path) -> None:
    """Losses follow those of whole replicas; the model keeps its modules and has the weights."""
    whole = Counting()
    expected = [row.loss for row in _fit(whole, 8).metrics]
    assert len(list(blocks_of(whole))) == 2
    for word, most in (("w8g8", 0.02), ("w4lg4l", 0.15)):
        model = Counting(seed=rank)  # every rank begins with the weights of rank 0
        kinds = [type(module) for module in model.modules()]
        parameters = list(model.parameters())
        found = [row.loss for row in _fit(model, 8, communication=word).metrics]
        assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < most, word
        assert found[-1] < found[0]
        assert [type(module) for module in model.modules()] == kinds
        assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
        assert not any(isinstance(p, DTensor) for p in model.parameters())
        for tensor in model.state_dict().values():
            assert all_equal(tensor.float())
        assert int(model.calls) == 8
        assert torch.equal(model.gpt.head.weight, model.gpt.words.weight)
    distance = sum(
        float((a.float() - b.float()).square().sum())
        for a, b in zip(_weights(model).values(), _weights(whole).values(), strict=True)
    )
    assert distance**0.5 < 3
    assert (distance > 0) == (world > 1)


def restart(rank: int, world: int, folder: Path) -> None:
    """A job that stopped goes on to the bit; whole replicas can go on from it, and it from them."""
    options: dict[str, Any] = {"accumulation": 2, "checkpoint_interval": 0}
    place = folder / f"sharded{world}"
    for word in ("w6lg4l",):
        options["communication"] = word
        whole, parts = Watching(), Watching()
        _fit(whole, 5, folder=place / f"{word} whole", **options)
        _fit(parts, 3, folder=place / f"{word} parts", **options)
        parts = Watching(seed=9)
        result = _fit(parts, 5, folder=place / f"{word} parts", **options)
        assert result.first_step == 3
        for name, tensor in _weights(whole).items():
            assert torch.equal(parts.state_dict()[name], tensor), name
    again = Watching()
    before = _weights(parts)
    _fit(again, 5, folder=place / f"{word} parts", communication="g8")
    for name, tensor in _weights(again).items():  # whole replicas have the buffers of rank 0
        assert torch.equal(tensor, before[name]) or (rank and name == "seen")
    _fit(again, 6, folder=place / f"{word} parts", communication="g8")
    result = _fit(again, 7, folder=place / f"{word} parts", communication="w8g8")
    assert (result.first_step, result.steps) == (6, 7)


def precisions_and_scaling(rank: int, world: int, folder: Path) -> None:
    """Converted layers, a loss scale that is too large at first, and other optimizers."""
    model = Counting()
    options: dict[str, Any] = {"uniform": Precision.FP16, "emulate": True, "loss_scale": 2.0**26}
    result = _fit(model, 16, communication="w8g8", **options)
    skipped = [row.skipped for row in result.metrics]
    assert skipped[0]
    assert not skipped[-1]
    told = torch.tensor([int(flag) for flag in skipped])
    assert all_equal(told)
    assert result.metrics[-1].loss < result.metrics[0].loss
    for optimizer in ("sgd", "adam"):
        model = Counting()
        _fit(model, 2, communication="w8", optimizer=optimizer, uniform=Precision.BF16)
        for tensor in model.state_dict().values():
            assert all_equal(tensor.float())


def mistakes(rank: int, world: int, folder: Path) -> None:
    """What sharded weights do not go with is said."""
    with pytest.raises(ParameterError, match="must not code weights with"):
        TrainParameters(steps=1, communication="w8g8", trace=folder / "trace.json")
    with pytest.raises(ParameterError, match="must not code weights with"):
        TrainParameters(steps=1, communication="w8g8", refine_interval=5)
    with pytest.raises(ParameterError, match="must be off where gradients are sharded"):
        _fit(Counting(), 1, communication="w8g4e")
    distributed.barrier()


PARTS: dict[str, tuple[Part, tuple[int, ...]]] = {
    "sharded training": (training, (1, 3)),
    "restart of shards": (restart, (2,)),
    "precisions of shards": (precisions_and_scaling, (2,)),
    "mistakes of the trainer": (mistakes, (2,)),
}
