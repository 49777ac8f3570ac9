"""Averages over ranks with codes on the wire, in two phases.

A vector is cut into one chunk for each rank. First every rank sends every other one the codes
of its chunk; a rank adds up, in float32, what it was sent, and its own codes too. Then it codes
the mean of its chunk and sends that to all. Every rank decodes the same bytes, its own chunk
included, so all end with the same bits. Values that are not coded ride in the same messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, distributed

from qsync_opt.errors import TrainError
from qsync_opt.runtime import levels
from qsync_opt.runtime.bucket_codec import (
    as_bytes,
    decode,
    decode_mean,
    encode,
    from_bytes,
    rank_key,
)
from qsync_opt.runtime.communication import Coding, Layout, layout_of
from qsync_opt.runtime.host_reduction import goes_by_host

#: Newer releases of torch give the collective another name, and warn of the old one.
_NAMES = ("all_gather_single", "all_gather_into_tensor")
_all_gather: Any = next(getattr(distributed, n) for n in _NAMES if hasattr(distributed, n))


class Exchange:
    """The messages of a group of ranks, and how many bytes this rank sent in them.

    Args:
        group: process group; None: the default one.
    """

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self.rank = distributed.get_rank(group)
        self.world = distributed.get_world_size(group)
        self.sent_bytes = 0

    def all_to_all(self, messages: Tensor) -> tuple[Tensor, Any]:
        """Send row i to rank i: the rows from all ranks, and what to wait for."""
        received = torch.empty_like(messages)
        self.sent_bytes += (self.world - 1) * messages[0].numel() * messages.element_size()
        run = distributed.all_to_all_single
        return received, self._collective(run, received, messages)

    def all_gather(self, message: Tensor, output: Tensor | None = None) -> tuple[Tensor, Any]:
        """Send a message to all: the messages of all ranks as rows, and what to wait for.

        Args:
            message: [n].
            output: [world * n], where the rows are to go.
        """
        if output is None:
            output = message.new_empty(self.world * message.numel())
        self.sent_bytes += (self.world - 1) * message.numel() * message.element_size()
        work = self._collective(_all_gather, output, message.contiguous())
        return output.view(self.world, -1), work

    def _collective(self, run: Any, output: Tensor, given: Tensor) -> Any:
        """Start a collective; what to wait for."""
        if not goes_by_host(given, self.group):  # gloo crashes on what lies on a GPU
            return run(output, given, group=self.group, async_op=True)
        arrived = torch.empty(output.shape, dtype=output.dtype)
        work = run(arrived, given.cpu(), group=self.group, async_op=True)
        return _Staged(work, arrived, output)

    def add_up(self, counts: Tensor) -> Tensor:
        """The sum over ranks of a few numbers, in place."""
        distributed.all_reduce(counts, group=self.group)
        return counts

    def copy_from_first(self, tensor: Tensor) -> Tensor:
        """What rank 0 of the group has, in place."""
        first = 0 if self.group is None else distributed.get_global_rank(self.group, 0)
        distributed.broadcast(tensor, first, group=self.group)
        return tensor

    def require_equal(self, facts: Sequence[int], device: torch.device, what: str) -> None:
        """Refuse to go on unless ranks give the same numbers.

        Raises:
            TrainError: they do not.
        """
        own = torch.tensor([len(facts)], dtype=torch.int64, device=device)
        for mine in (own, torch.tensor(facts, dtype=torch.int64, device=device)):
            rows, work = self.all_gather(mine)
            work.wait()
            if not torch.equal(rows, mine.expand_as(rows)):
                raise TrainError(
                    f"ranks do not agree on {what}: {rows.tolist()[:8]}",
                    "Start every rank with the same model and the same options",
                )


class _Staged:
    """A collective on host memory, whose result belongs on the device."""

    def __init__(self, work: Any, arrived: Tensor, output: Tensor) -> None:
        self._work, self._arrived, self._output = work, arrived, output

    def wait(self) -> None:
        """Wait for it, and copy the result over."""
        self._work.wait()
        self._output.copy_(self._arrived)


class Memory:
    """What a reduction keeps from one step to the next; empty at first.

    Attributes:
        table: learned levels, on the device of the values.
        learned_at: the step that the levels were fitted in.
        first: what coding took away from this rank's values, [count] float32.
        second: what it took away from the mean of this rank's chunk, float32.
    """

    def __init__(self) -> None:
        self.table: Tensor | None = None
        self.learned_at = -1
        self.first: Tensor | None = None
        self.second: Tensor | None = None
        self._before: tuple[Any, ...] | None = None

    def begin(self) -> None:
        """A step begins, which may turn out to be left out."""
        self._before = self.table, self.learned_at, self.first, self.second

    def undo(self) -> None:
        """Be as before the step that began last."""
        if self._before is not None:
            self.table, self.learned_at, self.first, self.second = self._before
            self._before = None


@dataclass(frozen=True, kw_only=True)
class Averaging:
    """How vectors are averaged over the ranks of an exchange.

    Attributes:
        exchange: of the group.
        coding: of the values.
        bucket_size: see `Communication`.
        seed: of the run, the same on all ranks.
    """

    exchange: Exchange
    coding: Coding
    bucket_size: int
    seed: int
    scheme: str = field(init=False)

    def __post_init__(self) -> None:
        # Feedback gives back what rounding to the nearest took: no need to be unbiased.
        object.__setattr__(self, "scheme", "nearest" if self.coding.feedback else "stochastic")

    def layout(self, count: int) -> Layout:
        """Of a vector of so many values."""
        return layout_of(count, self.exchange.world, self.coding.bits, self.bucket_size)

    def run(
        self, values: Tensor, exact: Tensor, memory: Memory, tensor: int, step: int
    ) -> Iterator[Any]:
        """Average two vectors in place; yields what must be waited for before it goes on.

        Args:
            values: [n], coded; fp32, bf16 or fp16.
            exact: [m], sent as it is, and added up in float32 at least.
            memory: of these vectors.
            tensor: number of these vectors among those of a step; two are used up.
            step: of training.
        """
        exchange = self.exchange
        layout, world = self.layout(values.numel()), exchange.world
        memory.begin()
        table = self._learn(values, layout, memory, step)
        # --- to the rank that owns the chunk
        given = self._with_feedback(values, memory.first)
        key = rank_key(self.seed, exchange.rank, step, tensor)
        messages = encode(given, layout, self.scheme, key, table, as_bytes(exact, world))
        if self.coding.feedback:
            kept = decode(messages, layout, table=table).flatten()[: given.numel()]
            memory.first = _lost(given, kept)
        received, work = exchange.all_to_all(messages)
        yield work
        mean = decode_mean(received, layout, world, table)
        rest = from_bytes(received[:, layout.message_bytes :], exact.dtype)
        wide = exact.dtype if exact.dtype.itemsize > 4 or exact.is_complex() else torch.float32
        rest_mean = rest.sum(0, dtype=wide).div_(world).to(exact.dtype)
        # --- and from it to all
        size = min(max(layout.count - exchange.rank * layout.chunk, 0), layout.chunk)
        own = replace(layout, count=size, parts=1)
        given = self._with_feedback(mean[:size], memory.second)
        key = rank_key(self.seed, exchange.rank, step, tensor + 1)
        message = encode(given, own, self.scheme, key, table, rest_mean.view(torch.uint8)[None])
        if self.coding.feedback:
            memory.second = _lost(given, decode(message, own, table=table)[0, :size])
        rows, work = exchange.all_gather(message[0])
        yield work
        averaged = decode(rows, layout, table=table, dtype=values.dtype)
        values.copy_(averaged.flatten()[: values.numel()])
        rest = from_bytes(rows[:, layout.message_bytes :], exact.dtype)
        exact.copy_(rest.flatten()[: exact.numel()])

    def _with_feedback(self, values: Tensor, lost: Tensor | None) -> Tensor:
        if not self.coding.feedback:
            return values
        if lost is None or lost.numel() != values.numel():  # of another number of ranks
            return values.float()
        return values.float() + lost

    def _learn(self, values: Tensor, layout: Layout, memory: Memory, step: int) -> Tensor | None:
        if not self.coding.learned:
            return None
        if values.numel() and is_time_to_learn(memory, step):
            memory.table = learn(
                self.exchange,
                levels.histogram(values, layout.bucket),
                self.coding.bits,
                stochastic=self.scheme == "stochastic",
            )
            memory.learned_at = step
        if memory.table is None:
            memory.table = levels.even_levels(self.coding.bits).to(values.device)
        return memory.table


def is_time_to_learn(memory: Memory, step: int) -> bool:
    """Whether levels are fitted anew: at first, and in the steps 1, 2, 4, 8 and so on."""
    return memory.table is None or (memory.learned_at != step and step & (step - 1) == 0)


def learn(exchange: Exchange, counts: Tensor, bits: int, *, stochastic: bool) -> Tensor:
    """Levels for what all ranks have, the same to the bit on each of them."""
    exchange.add_up(counts)
    table = torch.empty(2**bits, device=counts.device)
    if exchange.rank == 0:  # processors of different makers may round the fit differently
        table.copy_(levels.fit_levels(counts, bits, stochastic=stochastic))
    return exchange.copy_from_first(table)


def _lost(given: Tensor, kept: Tensor) -> Tensor:
    """What coding took away; nothing where a value is not finite, for that step is left out."""
    lost = given - kept
    return torch.where(torch.isfinite(lost), lost, 0.0)
