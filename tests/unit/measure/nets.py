"""Small networks that hold what real models hold, and the step that tests run on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from qsync_opt.graph import OperatorGraph
from qsync_opt.measure.capture import capture


class Clamp(torch.autograd.Function):
    """A custom Function written with torch functions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.clamp(x, min=0)
        ctx.save_for_backward(y)
        return y * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        below: Tensor = grad * 2 * (y > 0)
        return below


def clamped(net: Any, h: Tensor) -> Tensor:
    """A middle that calls the custom Function."""
    return applied(Clamp)(net, h)


def applied(function: Any) -> Callable[[Any, Tensor], Tensor]:
    """A middle that applies a custom Function."""
    return lambda net, h: function.apply(h)


class Chain(nn.Module):
    """Linear layers with `middle(self, h)` between the first and the last."""

    def __init__(self, middle: Callable[[Any, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.inner = nn.Linear(8, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True))
        self.last = nn.Linear(8, 3)
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.middle is not None:
            h = self.middle(self, h)
        return self.last(h)  # type: ignore[no-any-return]


class Mixed(nn.Module):
    """Convolution with running statistics, a look-up, attention by hand and by module."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.emb = nn.Embedding(10, 16)
        self.ln = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 48)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.fc = nn.Linear(8 * 16 + 16, 10)

    def forward(self, images: Tensor, tokens: Tensor) -> Tensor:
        h = self.relu(self.bn(self.conv(images)))
        h = functional.adaptive_avg_pool2d(h, 4).flatten(1)
        e = self.emb(tokens)
        q, k, v = self.qkv(self.ln(e)).chunk(3, -1)
        e = e + (q @ k.transpose(1, 2) / 4).softmax(-1) @ v
        e = self.encoder(e)
        return self.fc(torch.cat([h, e.mean(1)], 1))  # type: ignore[no-any-return]


def chain_batch(rows: int = 5) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 4), torch.randint(0, 3, (rows,))


def mixed_batch() -> tuple[tuple[Tensor, Tensor], Tensor]:
    inputs = (torch.randn(4, 3, 16, 16), torch.randint(0, 10, (4, 7)))
    return inputs, torch.randint(0, 10, (4,))


def capture_chain(middle: Callable[[Any, Tensor], Tensor] | None = None) -> OperatorGraph:
    torch.manual_seed(0)
    # Tests are about structure; how the time of microseconds is shared out is not their matter.
    return capture(Chain(middle), chain_batch(), functional.cross_entropy, least_coverage=0.0)


def checkpointed(reentrant: bool) -> Callable[[Any, Tensor], Tensor]:
    return lambda net, h: checkpoint(net.block, h, use_reentrant=reentrant)


def names(graph: OperatorGraph) -> list[str]:
    return [op.name for op in graph.operators]
