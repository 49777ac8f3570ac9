"""Perplexity with coded weights and gradients, at equal steps and seeds, on one device.

Ranks are virtual: each computes the gradient of its own part of the batch, one after the other,
and their averages go through the same code as over a network (`two_phase`), with the messages
handed over in memory. Weights are rounded before every step as an all-gather would round them;
the optimizer keeps full precision. Text: the Python sources of this machine, of which a part
is held out. Tokens are the most frequent words of the sources, or single bytes.
"""

from __future__ import annotations

import math
import os
import re
import sysconfig
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qsync_opt.measure.model_file import load_model
from qsync_opt.measure.step import Loss
from qsync_opt.runtime import levels
from qsync_opt.runtime.bucket_codec import decode, encode, exempt_parameters, rank_key
from qsync_opt.runtime.communication import Communication, layout_of, parse_communication
from qsync_opt.runtime.two_phase import Averaging, Exchange, Memory, is_time_to_learn

VARIANTS = ("fp32", "w8g8", "w4lg4l")

_WORD = re.compile(rb"[ ]?[A-Za-z_]+|[ ]?[0-9]|[ ]*\n[ ]*|[ ]?[^\sA-Za-z_0-9]+|\s")
_HELD_OUT = 0.05


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is trained, and for how long.

    Attributes:
        model: file.
        built: what its `build` is given beside vocabulary, length and seed.
        vocabulary: tokens; 256 are single bytes.
        length: tokens of a sequence.
        batch: sequences of a step over all ranks.
        ranks: virtual ones.
        steps: of the optimizer.
        text_bytes: of sources.
        evaluated: sequences that perplexity is measured on.
    """

    model: str
    built: Mapping[str, int | str]
    vocabulary: int
    length: int
    batch: int
    ranks: int
    steps: int
    text_bytes: int
    evaluated: int


SIZES = {
    "cuda": Sizes(
        model="models/gpt.py",
        built={"size": "125M", "vocabulary": 16384, "batch_size": 1},
        vocabulary=16384,
        length=512,
        batch=64,
        ranks=4,
        steps=400,
        text_bytes=48 * 2**20,
        evaluated=512,
    ),
    "cpu": Sizes(
        model="models/small_gpt.py",
        built={"layers": 2, "width": 64},
        vocabulary=256,
        length=64,
        batch=16,
        ranks=4,
        steps=150,
        text_bytes=2 * 2**20,
        evaluated=256,
    ),
}


class Board:
    """Where the messages of virtual ranks are exchanged."""

    def __init__(self) -> None:
        self._sent: list[tuple[Tensor, Tensor, bool]] = []
        self.table: Tensor | None = None

    def post(self, message: Tensor, received: Tensor, is_split: bool) -> None:
        """Leave a message, and the place for what comes back."""
        self._sent.append((message, received, is_split))

    def deliver(self) -> None:
        """Hand over what all ranks posted."""
        for rank, (_, received, is_split) in enumerate(self._sent):
            for source, (message, _, _) in enumerate(self._sent):
                received[source].copy_(message[rank] if is_split else message)
        self._sent.clear()


class VirtualExchange(Exchange):
    """The exchange of a virtual rank."""

    def __init__(self, rank: int, world: int, board: Board) -> None:
        self.group = None
        self.rank, self.world, self.sent_bytes = rank, world, 0
        self._board = board

    def all_to_all(self, messages: Tensor) -> tuple[Tensor, Any]:
        received = torch.empty_like(messages)
        self.sent_bytes += (self.world - 1) * messages[0].numel()
        self._board.post(messages, received, True)
        return received, None

    def all_gather(self, message: Tensor, output: Tensor | None = None) -> tuple[Tensor, Any]:
        rows = message.new_empty((self.world, message.numel()))
        self.sent_bytes += (self.world - 1) * message.numel()
        self._board.post(message, rows, False)
        return rows, None

    def add_up(self, counts: Tensor) -> Tensor:
        return counts  # levels are fitted to what the first rank has

    def copy_from_first(self, tensor: Tensor) -> Tensor:
        if self.rank == 0:
            self._board.table = tensor
        assert self._board.table is not None
        return tensor.copy_(self._board.table)


class CodedTraining:
    """Rounds weights, and averages gradients of virtual ranks, as they would be on the wire."""

    def __init__(self, model: nn.Module, communication: Communication, ranks: int) -> None:
        self._weights = communication.weights
        self._bucket_size = communication.bucket_size
        exempt = {id(parameter) for parameter in exempt_parameters(model)}
        parameters = list(model.parameters())
        self.coded = [p for p in parameters if id(p) not in exempt]
        self.exact = [p for p in parameters if id(p) in exempt]
        self._board = Board()
        self._memory = Memory()
        self._memories = [Memory() for _ in range(ranks)]
        self._averagings = [
            Averaging(
                exchange=VirtualExchange(rank, ranks, self._board),
                coding=communication.gradients,
                bucket_size=communication.bucket_size,
                seed=0,
            )
            for rank in range(ranks)
            if communication.gradients is not None
        ]
        self.sent_bytes = 0

    def round_weights(self, step: int) -> list[Tensor]:
        """Put rounded values in the place of the coded weights; what was there before."""
        before = [p.detach().clone() for p in self.coded]
        coding = self._weights
        if coding is not None:
            flat = torch.cat([p.flatten() for p in before])
            layout = layout_of(flat.numel(), 1, coding.bits, self._bucket_size)
            scheme, table = "shift", None
            if coding.learned:
                scheme = "nearest"
                if is_time_to_learn(self._memory, step):
                    counts = levels.histogram(flat, layout.bucket)
                    found = levels.fit_levels(counts, coding.bits, stochastic=False)
                    self._memory.table, self._memory.learned_at = found.to(flat.device), step
                table = self._memory.table
            key = rank_key(1, 0, step, 0)
            messages = encode(flat, layout, scheme, key, table)
            rounded = decode(messages, layout, scheme, key, table)[0, : flat.numel()]
            _unflatten(rounded, [p.data for p in self.coded])
        return before

    def average(self, coded: Sequence[Tensor], exact: Sequence[Tensor], step: int) -> None:
        """Average flat gradients of the ranks; every rank's end with the same bits."""
        if not self._averagings:
            for group in (coded, exact):
                mean = torch.stack(list(group)).mean(0)
                for values in group:
                    values.copy_(mean)
            return
        runs = [
            averaging.run(values, rest, memory, 0, step)
            for averaging, values, rest, memory in zip(
                self._averagings, coded, exact, self._memories, strict=True
            )
        ]
        for _ in range(2):
            for run in runs:
                next(run)
            self._board.deliver()
        for run in runs:
            assert next(run, None) is None
        self.sent_bytes = self._averagings[0].exchange.sent_bytes


def _unflatten(flat: Tensor, targets: Sequence[Tensor]) -> None:
    start = 0
    for target in targets:
        target.copy_(flat[start : start + target.numel()].view_as(target))
        start += target.numel()


def load_text(sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Tokens of the training text and of the held-out text."""
    text = bytearray()
    for path in _sources():
        text += path.read_bytes()
        if len(text) >= sizes.text_bytes:
            break
    words = _WORD.findall(bytes(text[: sizes.text_bytes]))
    common = Counter(w for w in words if len(w) > 1).most_common(sizes.vocabulary - 256)
    number = {bytes([b]): b for b in range(256)}
    number |= {word: 256 + place for place, (word, _) in enumerate(common)}
    tokens: list[int] = []
    for word in words:
        found = number.get(word)
        if found is None:
            tokens.extend(word)
        else:
            tokens.append(found)
    whole = torch.tensor(tokens, dtype=torch.int32)
    cut = int(len(whole) * (1 - _HELD_OUT))
    return whole[:cut], whole[cut:]


def _sources() -> Iterator[Path]:
    """The sources of this Python and of its packages, in a fixed order."""
    for name in ("stdlib", "purelib"):
        for folder, below, files in os.walk(sysconfig.get_paths()[name]):
            below[:] = sorted(set(below) - {"test", "tests", "site-packages"})
            yield from (Path(folder, file) for file in sorted(files) if file.endswith(".py"))


def _pieces(text: Tensor, starts: Tensor, length: int, device: torch.device) -> Tensor:
    return text[starts[:, None] + torch.arange(length + 1)].long().to(device)


def _casting(device: torch.device) -> AbstractContextManager[Any]:
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


def train(
    word: str, seed: int, sizes: Sizes, text: tuple[Tensor, Tensor], device: torch.device
) -> dict[str, Any]:
    """Train a model, and measure its perplexity on the held-out text."""
    built = {**sizes.built, "length": sizes.length, "seed": seed}
    model, _, loss_of = load_model(sizes.model, built)
    assert loss_of is not None
    model.to(device)
    coding = CodedTraining(model, parse_communication(word), sizes.ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(seed)
    losses = []
    started = time.perf_counter()
    for step in range(sizes.steps):
        warm_up = min(1.0, (step + 1) / (0.05 * sizes.steps))
        decay = 0.55 + 0.45 * math.cos(math.pi * step / sizes.steps)
        for group in optimizer.param_groups:
            group["lr"] = 6e-4 * warm_up * decay
        starts = torch.randint(len(text[0]) - sizes.length, (sizes.batch,), generator=generator)
        rows = _pieces(text[0], starts, sizes.length, device)
        with torch.no_grad():
            before = coding.round_weights(step)
        coded, exact, total = [], [], torch.zeros((), device=device)
        for part in rows.chunk(sizes.ranks):
            optimizer.zero_grad(set_to_none=True)
            with _casting(device):
                loss = loss_of(model(part[:, :-1]).float(), part[:, 1:])
            loss.backward()  # type: ignore[no-untyped-call]
            total = total + loss.detach() / sizes.ranks
            coded.append(_gradients(coding.coded))
            exact.append(_gradients(coding.exact))
        with torch.no_grad():
            coding.average(coded, exact, step)
            _unflatten(_joined(before), [p.data for p in coding.coded])
            _unflatten(coded[0], [_grad(p) for p in coding.coded])
            _unflatten(exact[0], [_grad(p) for p in coding.exact])
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(total)
    held_out = evaluate(model, loss_of, sizes, text[1], device)
    return {
        "communication": word,
        "seed": seed,
        "loss": held_out,
        "perplexity": math.exp(held_out),
        "training_loss": float(sum(losses[-20:]) / len(losses[-20:])),
        "parameters": sum(p.numel() for p in model.parameters()),
        "sent_bytes_a_step": coding.sent_bytes / sizes.steps,
        "seconds": time.perf_counter() - started,
    }


def evaluate(
    model: nn.Module, loss_of: Loss, sizes: Sizes, text: Tensor, device: torch.device
) -> float:
    """Mean loss of a token on evenly spread pieces of the held-out text."""
    starts = torch.linspace(0, len(text) - sizes.length - 2, sizes.evaluated).long()
    total = 0.0
    with torch.no_grad(), _casting(device):
        for part in starts.chunk(max(1, sizes.evaluated // 16)):
            rows = _pieces(text, part, sizes.length, device)
            loss = loss_of(model(rows[:, :-1]).float(), rows[:, 1:])
            total += float(loss) * len(part)
    return total / sizes.evaluated


def _gradients(parameters: Sequence[nn.Parameter]) -> Tensor:
    return torch.cat([_grad(p).flatten() for p in parameters])


def _grad(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.flatten() for part in parts])


def runs(
    variants: Sequence[str], seeds: int, sizes: Sizes, device: torch.device
) -> Iterator[dict[str, Any]]:
    """One row for each variant and seed, seed by seed."""
    text = load_text(sizes)
    for seed in range(seeds):
        for word in variants:
            yield {"tokens": len(text[0]), **train(word, seed, sizes, text, device)}
