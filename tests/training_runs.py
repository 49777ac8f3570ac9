"""Training small models for a while: what the tests of training compare."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from qsync_opt.kernels.rounding import Rounding
from qsync_opt.precision import Precision
from qsync_opt.runtime.convert import convert, set_step
from tests.low_precision import TinyCnn, TinyGpt, language_loss, uniform_plan

STEPS = 300
TAIL = 10


def text_batches() -> Iterator[Tensor]:
    """Pieces of the Python sources of the standard library's json package, one byte a token."""
    folder = Path(json.__file__).parent
    source = "".join(path.read_text() for path in sorted(folder.glob("*.py")))
    data = torch.tensor([min(max(ord(letter), 32), 127) - 32 for letter in source])
    generator = torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(len(data) - 17, (16,), generator=generator)
        yield torch.stack([data[start : start + 17] for start in starts])


def image_batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Bars of four directions at random places under noise."""
    generator = torch.Generator().manual_seed(0)
    place = torch.arange(8.0)
    rows, columns = torch.meshgrid(place, place, indexing="ij")
    along = torch.stack([rows, columns, (rows + columns) / 2, (rows - columns) / 2 + 4])
    while True:
        labels = torch.randint(4, (32,), generator=generator)
        centre = 2 + 4 * torch.rand(32, 1, 1, generator=generator)
        bars = torch.exp(-((along[labels] - centre) ** 2))
        yield (bars + 0.3 * torch.randn(32, 8, 8, generator=generator)).unsqueeze(1), labels


def curve(
    name: str,
    precision: Precision | None,
    rounding: Rounding = Rounding.NEAREST,
    steps: int = STEPS,
    learning_rate: float = 1.0,
    device: str = "cpu",
    width: int = 32,
) -> list[float]:
    """Losses of a training run; no precision: the model as it is."""
    torch.manual_seed(0)
    model: nn.Module = TinyGpt(words=96, width=width) if name == "gpt" else TinyCnn(classes=4)
    model.to(device)
    if precision is not None:
        convert(model, uniform_plan(model, precision), rounding=rounding, emulate=True)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learning_rate * (1e-2 if name == "gpt" else 3e-3)
    )
    scaler = torch.amp.GradScaler(device, init_scale=2.0**12, enabled=precision is Precision.FP16)
    texts, images = text_batches(), image_batches()
    losses = []
    loss: Any
    for number in range(steps):
        set_step(model, number)
        if name == "gpt":
            batch = next(texts).to(device)
            logits = model(batch[:, :-1])
            loss = language_loss(logits, batch[:, 1:])
        else:
            pictures, labels = (part.to(device) for part in next(images))
            loss = functional.cross_entropy(model(pictures).float(), labels)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


def tail(losses: list[float]) -> float:
    """The mean loss of the last steps."""
    return sum(losses[-TAIL:]) / TAIL
