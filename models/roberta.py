"""RoBERTa (Liu et al., arXiv 1907.11692) from `transformers`, for its two fine-tuning tasks.

Weights are random: nothing is downloaded. The model returns its own loss.
"""

from __future__ import annotations

from typing import Any

import bert
import torch
from torch import Tensor, nn
from transformers import (
    RobertaConfig,
    RobertaForMultipleChoice,
    RobertaForQuestionAnswering,
)

#: Positions are counted from the padding token's number on.
PADDING = 1


def build(
    batch_size: int = 32,
    length: int = 128,
    task: str = "multiple_choice",
    layers: int = 12,
    heads: int = 12,
    width: int = 768,
    vocabulary: int = 50265,
    dropout: float = 0.1,
    padded: bool = True,
    seed: int = 0,
) -> tuple[nn.Module, dict[str, Tensor], None]:
    """The model and a batch; the model returns its loss.

    Args:
        batch_size: examples.
        length: tokens of a sequence.
        task: `multiple_choice` (SWAG) or `question_answering` (SQuAD).
        layers: encoder layers; the default sizes are those of RoBERTa-base.
        heads: of attention.
        width: of the activations.
        vocabulary: different tokens.
        dropout: probability, in attention too.
        padded: whether sequences differ in length and have a mask.
        seed: of weights and batch.
    """
    heads_of = {
        "question_answering": RobertaForQuestionAnswering,
        "multiple_choice": RobertaForMultipleChoice,
    }
    if task not in heads_of:
        raise ValueError(f"task must be one of {', '.join(heads_of)}, got {task!r}")
    torch.manual_seed(seed)
    config: Any = RobertaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        max_position_embeddings=max(514, length + PADDING + 1),
        type_vocab_size=1,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        pad_token_id=PADDING,
    )
    model = heads_of[task](config).train()
    batch = bert.random_batch(task, batch_size, length, vocabulary, 4, PADDING, padded)
    return model, batch, None
