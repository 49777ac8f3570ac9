"""Coded weights and gradients under `fully_shard` (FSDP2), through its custom collectives.

Weights are rounded with a random shift that each quantisation bucket shares, unbiased with a
variance of step^2 / 12; in the forward and the backward of a step alike. Gradients are rounded
stochastically, sent once to the rank that keeps their shard, and added up there in float32.
Optimizer and checkpoints see full-precision shards alone.

Under HSDP (`fully_shard` on a mesh of two dimensions) FSDP2's own all-reduce between replicas
runs in full precision, since nothing public replaces it. To code that too, shard over the
ranks of a node alone and hand the ranks that hold the same shards to `quantize_sharding`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from qsync_opt.errors import ParameterError
from qsync_opt.runtime import levels
from qsync_opt.runtime.bucket_codec import (
    as_bytes,
    decode,
    decode_mean,
    encode,
    from_bytes,
    rank_key,
)
from qsync_opt.runtime.communication import Communication, layout_of
from qsync_opt.runtime.fsdp_collectives import AllGather, ReduceScatter, nothing_left
from qsync_opt.runtime.shards import ShardGroup, shard_groups
from qsync_opt.runtime.two_phase import (
    Averaging,
    Exchange,
    Memory,
    is_time_to_learn,
    learn,
)

_NEEDED = (
    "set_custom_all_gather",
    "set_custom_reduce_scatter",
    "set_all_reduce_hook",
    "set_force_sum_reduction_for_comms",
)

#: Tensors that a group numbers in a step: weights, gradients, and two phases between replicas.
_TENSORS = 4


def quantize_sharding(
    model: nn.Module, communication: Communication, *, seed: int = 0, replicas: Any = None
) -> QuantizedSharding:
    """Code what the `fully_shard` modules of a model send; call it on every rank alike.

    Args:
        model: whose forward begins a step; `fully_shard` was called with it or with modules of
            it, one at a time.
        communication: what is sent.
        seed: of the random bits, the same on all ranks.
        replicas: process group of the ranks that hold the same shards as this one; gradients
            are averaged over it in two phases. Needs a mesh of one dimension.

    Raises:
        ParameterError: nothing is sharded, an option does not fit, or this torch lacks a hook.
        TrainError: ranks do not agree.
    """
    for name in _NEEDED:
        if not hasattr(FSDPModule, name):
            rule = f"must have FSDPModule.{name}"
            raise ParameterError("torch", rule, torch.__version__, "Use torch 2.9 or newer")
    if communication.cast is not None:
        remedy = "Give fully_shard a MixedPrecisionPolicy with reduce_dtype"
        rule = "must not cast what fully_shard sends"
        raise ParameterError("communication, cast", rule, communication.cast, remedy)
    if communication.gradients is not None and communication.gradients.feedback:
        rule = "must be off where gradients are sharded"
        raise ParameterError("communication, feedback", rule, True, "Use DDP, or leave it out")
    return QuantizedSharding(model, communication, seed, replicas)


class QuantizedSharding:
    """Codes what sharded modules send; see `quantize_sharding`.

    Attributes:
        step: that the random bits depend on: the number of the forward pass in training.
    """

    def __init__(
        self, model: nn.Module, communication: Communication, seed: int, replicas: Any
    ) -> None:
        self.step = 0
        self.communication = communication
        self.seed = seed
        self.is_exact = False
        self._next = 0
        self._exchanges: dict[Any, Exchange] = {}
        self._groups: list[_Group] = []
        found = list(shard_groups(model, communication.bucket_size))
        if not found:
            raise ParameterError("model", "must have modules that fully_shard was called with", 0)
        for number, (module, shards) in enumerate(found):
            group = _Group(self, number, shards, replicas)
            module.set_custom_all_gather(AllGather(group))
            module.set_custom_reduce_scatter(ReduceScatter(group))
            # So that no mean is asked of the collective: FSDP2 divides by itself.
            module.set_force_sum_reduction_for_comms(True)
            if replicas is not None:
                module.set_all_reduce_hook(group.average)
            self._groups.append(group)
        facts = [len(found), seed & 0x7FFFFFFFFFFFFFFF, communication.bucket_size]
        for coding in (communication.weights, communication.gradients):
            facts += [0, 0] if coding is None else [coding.bits, int(coding.learned)]
        facts += [shard.numel for _, shards in found for shard in shards.shards]
        mesh = cast(Any, found[0][1].shards[0].parameter).device_mesh
        exchange = self.exchange(found[0][1].group)
        exchange.require_equal(facts, torch.device(mesh.device_type), "what is sent")
        exchange.sent_bytes = 0
        # Before FSDP2's own, which gathers the weights.
        model.register_forward_pre_hook(self._on_forward, prepend=True)

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sent in collectives of weights and gradients."""
        return sum(exchange.sent_bytes for exchange in self._exchanges.values())

    def begin(self, step: int) -> None:
        """Say which number the next forward pass in training has; without it they count from 0."""
        self._next = step

    @contextmanager
    def exact(self) -> Iterator[None]:
        """Send everything as it is, for instance to evaluate; on all ranks alike."""
        self.is_exact = True
        try:
            yield
        finally:
            self.is_exact = False

    def state(self) -> dict[str, Tensor]:
        """What a restart needs besides the model: the step, and learned levels."""
        found = {"next": torch.tensor([self._next])}
        for group in self._groups:
            for name, memory in group.memories.items():
                if memory.table is not None:
                    found[f"{group.number}/{name}/table"] = memory.table.cpu().clone()
                    found[f"{group.number}/{name}/learned_at"] = torch.tensor([memory.learned_at])
        return found

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` gave."""
        self._next = int(state["next"].item()) if "next" in state else 0
        for group in self._groups:
            for name, memory in group.memories.items():
                place = f"{group.number}/{name}"
                memory.table = state.get(f"{place}/table")
                learned_at = state.get(f"{place}/learned_at")
                memory.learned_at = -1 if learned_at is None else int(learned_at.item())

    def exchange(self, group: Any) -> Exchange:
        """The exchange of a process group."""
        if group not in self._exchanges:
            self._exchanges[group] = Exchange(group)
        return self._exchanges[group]

    def _on_forward(self, module: nn.Module, inputs: object) -> None:
        if module.training and torch.is_grad_enabled():
            self.step, self._next = self._next, self._next + 1


class _Group:
    """What one sharded module sends."""

    def __init__(
        self, sharding: QuantizedSharding, number: int, shards: ShardGroup, replicas: Any
    ) -> None:
        self.sharding = sharding
        self.number = number
        self.shards = shards
        self.memories = {name: Memory() for name in ("weights", "gradients", "replicas")}
        self._replicas = replicas
        self._is_checked = False

    def gather(self, output: Tensor, own: Tensor, group: Any) -> tuple[Any, Callable[[], None]]:
        """Start to gather weights: what to wait for, and what is to be done then."""
        sharding = self.sharding
        coding = sharding.communication.weights
        exchange = sharding.exchange(group)
        row = self.shards.gathered(own)
        if not self._is_checked:
            row.require_shards()
            self._is_checked = True
        if coding is None or sharding.is_exact or exchange.world == 1:
            _, work = exchange.all_gather(own, output)
            return work, nothing_left
        values = row.values()
        layout = layout_of(values.numel(), 1, coding.bits, sharding.communication.bucket_size)
        table = None
        scheme = "shift"
        if coding.learned:
            # A shift between levels that are not even would be biased; nearest loses least.
            scheme = "nearest"
            table = self._table("weights", values, layout.bucket, exchange, coding.bits)
        tensor = _TENSORS * self.number

        def key(rank: int) -> Any:
            return rank_key(sharding.seed, rank, sharding.step, tensor)

        rest = row.rest()
        message = encode(values, layout, scheme, key(exchange.rank), table, as_bytes(rest, 1))
        rows, work = exchange.all_gather(message[0])
        keys = [key(rank) for rank in range(exchange.world)]

        def finish() -> None:
            wholes = output.view(exchange.world, -1)
            for own_key, message, whole in zip(keys, rows, wholes, strict=True):
                found = decode(message[None], layout, scheme, own_key, table, values.dtype)
                kept = from_bytes(message[layout.message_bytes :], rest.dtype)
                self.shards.gathered(whole).put(found[0, : values.numel()], kept)

        return work, finish

    def scatter(self, output: Tensor, whole: Tensor, group: Any, divisor: int) -> None:
        """Add up gradients, and keep this rank's shards of the sum."""
        sharding = self.sharding
        coding = sharding.communication.gradients
        exchange = sharding.exchange(group)
        world = exchange.world
        rows = whole.view(world, -1)
        spans = self.shards.reduced(rows[0])
        if coding is None or sharding.is_exact or world == 1 or not spans.coded:
            received, work = exchange.all_to_all(rows)
            work.wait()
            wide = torch.float32 if whole.dtype.itemsize < 4 else whole.dtype
            output.copy_(received.sum(0, dtype=wide).div_(divisor))
            return
        values = torch.cat([rows[:, span] for span in spans.coded], dim=1)
        bucket_size = sharding.communication.bucket_size
        layout = layout_of(values.numel(), world, coding.bits, bucket_size)
        table = None
        if coding.learned:
            table = self._table("gradients", values, layout.bucket, exchange, coding.bits)
        count = values.shape[1]
        if count < layout.chunk:  # the last value again: a bucket's range stays
            padding = values[:, -1:].expand(world, layout.chunk - count)
            values = torch.cat((values, padding), dim=1)
        layout = replace(layout, count=values.numel())
        key = rank_key(sharding.seed, exchange.rank, sharding.step, _TENSORS * self.number + 1)
        kept = [rows[:, span] for span in spans.exact]
        beside = torch.cat(kept, dim=1).view(torch.uint8) if kept else None
        messages = encode(values.flatten(), layout, "stochastic", key, table, beside)
        received, work = exchange.all_to_all(messages)
        work.wait()
        total = decode_mean(received, layout, divisor, table)[:count]
        rest = from_bytes(received[:, layout.message_bytes :], whole.dtype)
        rest_total = rest.sum(0, dtype=torch.float32).div_(divisor)
        self.shards.reduced(output).put(total, rest_total)

    def average(self, shard: Tensor) -> None:
        """Average gradient shards over replicas, in place: FSDP2's all-reduce hook."""
        sharding = self.sharding
        coding = sharding.communication.gradients
        exchange = sharding.exchange(self._replicas)
        if exchange.world == 1:
            return
        row = self.shards.reduced(shard)
        if coding is None or sharding.is_exact or not row.coded:
            exchange.add_up(shard).div_(exchange.world)
            return
        averaging = Averaging(
            exchange=exchange,
            coding=coding,
            bucket_size=sharding.communication.bucket_size,
            seed=sharding.seed + 1,
        )
        values, rest = row.values().contiguous(), row.rest().contiguous()
        memory = self.memories["replicas"]
        tensor = _TENSORS * self.number + 2
        for work in averaging.run(values, rest, memory, tensor, sharding.step):
            work.wait()
        row.put(values, rest)

    def _table(
        self, name: str, values: Tensor, bucket: int, exchange: Exchange, bits: int
    ) -> Tensor:
        memory = self.memories[name]
        step = self.sharding.step
        if values.numel() and is_time_to_learn(memory, step):
            counts = levels.histogram(values, bucket)
            memory.table = learn(exchange, counts, bits, stochastic=name != "weights")
            memory.learned_at = step
        if memory.table is None:
            memory.table = levels.even_levels(bits)
        memory.table = memory.table.to(values.device)
        return memory.table
