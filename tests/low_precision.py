"""Small models, plans for them, and the signal-to-quantisation-noise ratio, for tests."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from qsync_opt.precision import Precision
from qsync_opt.runtime.availability import supported_precisions
from qsync_opt.runtime.layers import layer_of


class Attention(nn.Module):
    """Causal attention by torch's own function, plus one written out as two products."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        shape = (x.shape[0], x.shape[1], self.heads, -1)
        q, k, v = (f(x).view(shape).transpose(1, 2) for f in (self.query, self.key, self.value))
        fused = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        weights = torch.softmax(torch.matmul(q, k.transpose(-2, -1)) * k.shape[-1] ** -0.5, -1)
        mixed = self.dropout(fused) + weights @ v
        return self.out(mixed.transpose(1, 2).reshape(x.shape))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and two fully connected layers, each behind a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class TinyGpt(nn.Module):
    """A language model whose head is tied to its embedding."""

    def __init__(self, words: int = 50, width: int = 32, layers: int = 1, heads: int = 4) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight
        for table in (self.words, self.places):
            nn.init.normal_(table.weight, std=0.1)  # logits of a usual size at the start

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class TinyCnn(nn.Module):
    """Convolutions with groups, a stride, a residual and a 1x1, behind batch norms."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(16)
        self.grouped = nn.Conv2d(16, 32, 3, stride=2, padding=1, groups=4, bias=False)
        self.norm2 = nn.BatchNorm2d(32)
        self.short = nn.Conv2d(16, 32, 1, stride=2)
        self.relu = nn.ReLU()
        self.head = nn.Linear(32, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.relu(self.norm1(self.stem(images)))
        x = self.relu(self.norm2(self.grouped(x)) + self.short(x))
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


def uniform_plan(model: nn.Module, precision: Precision) -> dict[str, Precision]:
    """Every layer and every product of attention at one precision, or at bf16 without it."""
    plan = {
        name: precision for name, module in model.named_modules() if layer_of(module) is not None
    }
    for name, module in model.named_modules():
        if isinstance(module, Attention):
            for kind in ("scaled_dot_product_attention", "matmul", "matmul.1"):
                has = precision in supported_precisions(kind.removesuffix(".1"))
                plan[f"{name}.{kind}"] = precision if has else Precision.BF16
            plan[f"{name}.softmax"] = Precision.FP32
    return plan


def decibels(found: Tensor, exact: Tensor) -> float:
    """Signal over noise; infinite where nothing differs."""
    exact = exact.detach().double()
    noise = (found.detach().double() - exact).square().sum().item()
    signal = exact.square().sum().item()
    return math.inf if noise == 0 else 10 * math.log10(signal / noise)


def tokens(count: int = 2, length: int = 16, words: int = 50) -> Tensor:
    """Random tokens, the same every time."""
    return torch.randint(words, (count, length), generator=torch.Generator().manual_seed(7))


def language_loss(logits: Tensor, batch: Tensor) -> Any:
    """Cross entropy of predicting the batch, in fp32 at least."""
    return functional.cross_entropy(
        logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1), batch.flatten()
    )


def gradients(model: nn.Module) -> Mapping[str, Tensor]:
    """A copy of the gradient of every parameter."""
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
