"""GPT: a decoder-only transformer for next-token prediction, 125 M to 1.3 B parameters.

Pre-normalised blocks as in GPT-2; sizes as in GPT-3 (Brown et al., arXiv 2005.14165, table
2.1, with 16 heads of 128 for the largest here). The output layer is tied to the token
embedding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, kw_only=True)
class Size:
    """Layers, heads and width of a model."""

    layers: int
    heads: int
    width: int


SIZES = {
    "125M": Size(layers=12, heads=12, width=768),
    "350M": Size(layers=24, heads=16, width=1024),
    "760M": Size(layers=24, heads=16, width=1536),
    "1.3B": Size(layers=24, heads=16, width=2048),
}


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Activations [N, T, width] to the same."""
        batch, length, width = x.shape
        heads = (batch, length, 3, self.heads, width // self.heads)
        q, k, v = self.qkv(x).view(heads).permute(2, 0, 3, 1, 4).unbind(0)
        dropout = self.dropout if self.training else 0.0
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(x.shape))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and a two-layer perceptron, each with a residual connection."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads, dropout)
        self.drop1 = nn.Dropout(dropout)
        self.ln2 = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 4 * width)
        self.act = nn.GELU(approximate="tanh")
        self.fc2 = nn.Linear(4 * width, width)
        self.drop2 = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Activations [N, T, width] to the same."""
        x = x + self.drop1(self.attn(self.ln1(x)))
        return x + self.drop2(self.fc2(self.act(self.fc1(self.ln2(x)))))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Token and position embeddings, blocks, and a tied output layer."""

    def __init__(self, size: Size, vocabulary: int, length: int, dropout: float) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, size.width)
        self.wpe = nn.Embedding(length, size.width)
        self.drop = nn.Dropout(dropout)
        blocks = [Block(size.width, size.heads, dropout) for _ in range(size.layers)]
        self.blocks = nn.ModuleList(blocks)
        self.ln = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, vocabulary, bias=False)
        self.head.weight = self.wte.weight
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() > 1:
                # What is added to the residual stream is scaled by its 2 x layers summands.
                added = name.endswith(("proj.weight", "fc2.weight"))
                scale = (2 * size.layers) ** -0.5 if added else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [N, T] to scores [N, T, vocabulary]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.wte(tokens) + self.wpe(positions))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))  # type: ignore[no-any-return]


def next_token_loss(scores: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of scores [N, T, vocabulary] against tokens [N, T]."""
    return functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


def build(
    batch_size: int = 8,
    size: str = "125M",
    length: int = 1024,
    vocabulary: int = 50304,
    layers: int | None = None,
    dropout: float = 0.0,
    seed: int = 0,
) -> tuple[nn.Module, tuple[Tensor, Tensor], Callable[..., Tensor]]:
    """The model, a batch of random tokens, and the loss.

    Args:
        batch_size: sequences.
        size: one of `SIZES`.
        length: tokens of a sequence.
        vocabulary: GPT-2's 50,257 rounded up to a multiple of 64, which kernels like better.
        layers: fewer or more than the size has.
        dropout: probability.
        seed: of weights and batch.
    """
    if size not in SIZES:
        raise ValueError(f"size must be one of {', '.join(SIZES)}, got {size!r}")
    chosen = SIZES[size]
    if layers is not None:
        chosen = Size(layers=layers, heads=chosen.heads, width=chosen.width)
    torch.manual_seed(seed)
    model = GPT(chosen, vocabulary, length, dropout)
    tokens = torch.randint(0, vocabulary, (batch_size, length + 1))
    return model, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()), next_token_loss
