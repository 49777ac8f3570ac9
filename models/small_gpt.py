"""A small GPT that learns the bytes of Python's standard library; trains on a CPU in seconds."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path

import gpt
import torch
from torch import Tensor, nn

#: One token per byte.
VOCABULARY = 256
_MOST_BYTES = 2**20


@cache
def load_data() -> Tensor:
    """The first MiB of the standard library's modules in the order of their names, [bytes]."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b""
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= _MOST_BYTES:
            break
    return torch.frombuffer(bytearray(text[:_MOST_BYTES]), dtype=torch.uint8).long()


def draw(batch_size: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random pieces of the text and the same one byte later, [batch_size, length] each."""
    data = load_data()
    starts = torch.randint(0, len(data) - length, (batch_size,), generator=generator)
    rows = data[starts[:, None] + torch.arange(length + 1)]
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def batches(step: int, rows: range, length: int = 64, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Some rows of the batch of a step: pieces of the text, the same for the same step."""
    inputs, targets = draw(rows.stop, length, torch.Generator().manual_seed(seed * 2**32 + step))
    return inputs[rows.start :], targets[rows.start :]


def build(
    batch_size: int = 16,
    length: int = 64,
    layers: int = 2,
    heads: int = 4,
    width: int = 64,
    dropout: float = 0.0,
    seed: int = 0,
) -> tuple[nn.Module, tuple[Tensor, Tensor], Callable[..., Tensor]]:
    """The model, a batch of text, and the loss."""
    torch.manual_seed(seed)
    size = gpt.Size(layers=layers, heads=heads, width=width)
    model = gpt.GPT(size, VOCABULARY, length, dropout)
    batch = draw(batch_size, length, torch.Generator().manual_seed(seed))
    return model, batch, gpt.next_token_loss
