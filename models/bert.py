"""BERT (Devlin et al., arXiv 1810.04805) from `transformers`, for its two fine-tuning tasks.

Weights are random: nothing is downloaded. The model returns its own loss.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForMultipleChoice, BertForQuestionAnswering

#: Answers to choose from, as in SWAG.
CHOICES = 4


def random_batch(
    task: str,
    batch_size: int,
    length: int,
    vocabulary: int,
    first: int,
    padding: int,
    padded: bool = True,
) -> dict[str, Tensor]:
    """Random tokens, with padding at the end or of full length, and labels of a task.

    Args:
        task: `question_answering` or `multiple_choice`.
        batch_size: examples.
        length: tokens of a sequence; the shortest is half as long.
        vocabulary: different tokens.
        first: the first token that is no special one.
        padding: the token of padding.
        padded: whether sequences differ in length. Without, there is no mask: `transformers`
            then need not ask the device in every forward whether the mask hides anything,
            for which the host would wait.
    """
    shape: tuple[int, ...] = (batch_size, length)
    if task == "multiple_choice":
        shape = (batch_size, CHOICES, length)
    tokens = torch.randint(first, vocabulary, shape)
    batch = {"input_ids": tokens}
    if padded:
        ends = torch.randint(length // 2, length + 1, shape[:-1])
        mask = torch.arange(length) < ends[..., None]
        batch = {"input_ids": torch.where(mask, tokens, padding), "attention_mask": mask.long()}
    if task == "multiple_choice":
        batch["labels"] = torch.randint(0, CHOICES, (batch_size,))
    else:
        starts = torch.randint(0, length // 2, (batch_size,))
        batch["start_positions"] = starts
        batch["end_positions"] = starts + torch.randint(0, length // 2, (batch_size,))
    return batch


def build(
    batch_size: int = 32,
    length: int = 384,
    task: str = "question_answering",
    layers: int = 12,
    heads: int = 12,
    width: int = 768,
    vocabulary: int = 30522,
    dropout: float = 0.1,
    padded: bool = True,
    seed: int = 0,
) -> tuple[nn.Module, dict[str, Tensor], None]:
    """The model and a batch; the model returns its loss.

    Args:
        batch_size: examples.
        length: tokens of a sequence.
        task: `question_answering` (SQuAD) or `multiple_choice` (SWAG).
        layers: encoder layers; the default sizes are those of BERT-base.
        heads: of attention.
        width: of the activations.
        vocabulary: different tokens.
        dropout: probability, in attention too.
        padded: whether sequences differ in length and have a mask.
        seed: of weights and batch.
    """
    heads_of = {
        "question_answering": BertForQuestionAnswering,
        "multiple_choice": BertForMultipleChoice,
    }
    if task not in heads_of:
        raise ValueError(f"task must be one of {', '.join(heads_of)}, got {task!r}")
    torch.manual_seed(seed)
    config: Any = BertConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        max_position_embeddings=max(512, length),
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    model = heads_of[task](config).train()
    batch = random_batch(task, batch_size, length, vocabulary, min(999, vocabulary // 2), 0, padded)
    batch["token_type_ids"] = (
        (torch.arange(length) >= length // 4).long().expand_as(batch["input_ids"]).contiguous()
    )
    return model, batch, None
