"""Checkpoints: what is written is read back to the bit, whole or not at all."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from qsync_opt.errors import FormatError, TrainError
from qsync_opt.runtime import checkpoints, state
from qsync_opt.runtime.checkpoints import Checkpoint, CheckpointFolder
from qsync_opt.runtime.distributed import Ranks

CPU = torch.device("cpu")


class Tied(nn.Module):
    """Tied weights, a convolution in channels-last format, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 6, 3)
        weight = self.conv.weight.detach().contiguous(memory_format=torch.channels_last)
        self.conv.weight = nn.Parameter(weight)
        self.norm = nn.BatchNorm2d(6)
        self.first = nn.Linear(6, 6, bias=False)
        self.second = nn.Linear(6, 6, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x)).mean((2, 3))
        return self.second(self.first(x))  # type: ignore[no-any-return]


def trained(seed: int, steps: int) -> tuple[Tied, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.8, 0.95))
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(2, 4, 5, 5)).square().mean().backward()
    optimizer.step()


@pytest.fixture(params=["safetensors", "torch"])
def folder(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: Any
) -> Iterator[CheckpointFolder]:
    if request.param == "torch":
        monkeypatch.setattr(checkpoints, "safetensors", None)
    else:
        pytest.importorskip("safetensors")
    found = CheckpointFolder(tmp_path / "job", keep=2)
    found.prepare()
    with closing(found):
        yield found


def names_in(folder: CheckpointFolder) -> set[str]:
    """All files but that by which other jobs are kept out."""
    return {path.name for path in folder.folder.iterdir()} - {".rank-0.lock"}


def save(folder: CheckpointFolder, number: int, seed: int = 0, steps: int = 2) -> Path:
    model, optimizer = trained(seed, steps)
    tensors, facts = state.pack(model, optimizer, [state.random_state(CPU)])
    return folder.save(Checkpoint(step=number, facts=facts, tensors=tensors))


def test_training_goes_on_as_if_it_had_not_stopped(folder: CheckpointFolder) -> None:
    model, optimizer = trained(0, 3)
    tensors, facts = state.pack(model, optimizer, [state.random_state(CPU)])
    folder.save(Checkpoint(step=3, facts=facts, tensors=tensors))
    step(model, optimizer)
    other, others = trained(1, 1)
    found = folder.load(3)
    state.unpack(found, other, others)
    raw = state.random_of(found, 0)
    assert raw is not None
    state.set_random_state(raw, CPU)
    step(other, others)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name
    assert other.second.weight is other.first.weight
    moment = others.state[other.conv.weight]["exp_avg"]
    assert moment.stride() == other.conv.weight.stride()
    assert others.param_groups[0]["betas"] == (0.8, 0.95)


def test_a_tied_weight_is_kept_once(folder: CheckpointFolder) -> None:
    save(folder, 1)
    found = folder.load(1)
    assert found.facts["aliases"] == {"second.weight": "first.weight"}
    assert "model/second.weight" not in found.tensors


def test_the_newest_are_kept(folder: CheckpointFolder) -> None:
    for number in (5, 10, 15):
        save(folder, number)
    assert folder.steps() == [10, 15]


def test_a_write_that_fails_leaves_what_was_there(
    folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = save(folder, 5)
    content = before.read_bytes()

    def fail(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", fail)
    for number in (5, 6):
        with pytest.raises(TrainError, match="No space left"):
            save(folder, number, seed=1)
    assert [path.name for path in folder.folder.iterdir() if path.suffix != ".lock"] == [
        before.name
    ]
    assert before.read_bytes() == content


def test_what_a_killed_process_left_is_removed_and_nothing_else(folder: CheckpointFolder) -> None:
    kept = save(folder, 5)
    left = folder.folder / f".step-00000006.{'a' * 16}.tmp"
    foreign = folder.folder / ".step-6.tmp"
    for path in (left, foreign):
        path.write_bytes(b"half")
    folder.prepare()
    assert {path.name for path in folder.folder.iterdir() if path.suffix != ".lock"} == {
        kept.name,
        foreign.name,
    }


@pytest.mark.parametrize("part", [0.0, 0.3, 0.9])
def test_a_broken_file_is_refused_with_its_name(folder: CheckpointFolder, part: float) -> None:
    path = save(folder, 5)
    raw = path.read_bytes()
    path.write_bytes(raw[: int(part * len(raw))])
    with pytest.raises(FormatError, match=r"step-00000005.*Remove the file"):
        folder.load(5)


def test_a_step_without_a_checkpoint_is_refused(folder: CheckpointFolder) -> None:
    with pytest.raises(FormatError, match="must have a checkpoint"):
        folder.load(7)


def test_a_checkpoint_of_another_model_is_refused(folder: CheckpointFolder) -> None:
    save(folder, 5)
    model = nn.Linear(3, 3)
    with pytest.raises(TrainError, match="another model"):
        state.unpack(folder.load(5), model, torch.optim.AdamW(model.parameters(), lr=1.0))


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam])
def test_a_checkpoint_of_another_optimizer_is_refused(make: Any, folder: CheckpointFolder) -> None:
    """Even one whose state has the same names, and would be taken over in silence."""
    save(folder, 5)
    model, _ = trained(0, 0)
    with pytest.raises(TrainError, match=f"optimizer AdamW, and {make.__name__} is to go on"):
        state.unpack(folder.load(5), model, make(model.parameters(), lr=1.0))


def test_a_file_without_step_or_facts_is_refused(folder: CheckpointFolder) -> None:
    path = save(folder, 5)
    tensors, text = checkpoints._read(path)
    for name in ("step", "facts"):
        content = {key: value for key, value in json.loads(text).items() if key != name}
        checkpoints._write(path, tensors, json.dumps(content))
        with pytest.raises(FormatError, match="the step and the facts"):
            folder.load(5)


def test_a_full_disk_is_named(folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise checkpoints._Refused("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(checkpoints, "_write", full)
    with pytest.raises(TrainError, match=r"cannot be written to .*No space left"):
        save(folder, 5)


def test_state_that_cannot_be_kept_is_refused() -> None:
    model, optimizer = trained(0, 1)
    optimizer.param_groups[0]["note"] = object()
    with pytest.raises(TrainError, match="note"):
        state.pack(model, optimizer, [])


def test_every_generator_is_restored() -> None:
    def draw() -> tuple[float, float, float]:
        return torch.rand(()).item(), random.gauss(0, 1), float(np.random.standard_normal())

    draw()
    raw = state.random_state(CPU)
    expected = draw()
    draw()
    state.set_random_state(raw, CPU)
    assert draw() == expected


def test_alone_a_checkpoint_is_broadcast_to_nobody(folder: CheckpointFolder) -> None:
    save(folder, 5)
    found = folder.load(5)
    ranks = Ranks(rank=0, world=1, device=CPU)
    same = state.broadcast(found, ranks)
    assert same is not None
    assert copy.copy(same.facts) == found.facts
    assert all(torch.equal(same.tensors[name], found.tensors[name]) for name in found.tensors)
    assert state.broadcast(None, ranks) is None
