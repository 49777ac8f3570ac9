"""Where the parameters of a `fully_shard` module lie in the buffers that it communicates.

FSDP2 hands a custom collective one flat buffer per module: every rank's row holds that rank's
shard of each parameter, padded to equal sizes, in the order in which the module's own modules
list their parameters, children first. Nothing public tells that order, so the first buffer is
compared with the shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from qsync_opt.errors import ParameterError, TrainError
from qsync_opt.runtime.bucket_codec import CODED_DTYPES, exempt_parameters, put, spans_of, take


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A parameter's part of a row.

    Attributes:
        module: that has the parameter.
        name: of the parameter there.
        numel: values of the padded shard.
        dtype: of the parameter.
        exempt: whether it is sent as it is.
    """

    module: nn.Module
    name: str
    numel: int
    dtype: torch.dtype
    exempt: bool

    @property
    def parameter(self) -> Tensor:
        """What the module has under the name now: a shard, or during its work the whole."""
        found: Tensor = getattr(self.module, self.name)
        return found


@dataclass(frozen=True, kw_only=True)
class ShardGroup:
    """The parameters that a module gathers and reduces together.

    Attributes:
        shards: in the order of a row.
        group: the ranks that the parameters are sharded over.
        world: how many ranks these are.
    """

    shards: tuple[Shard, ...]
    group: Any
    world: int

    def gathered(self, row: Tensor) -> Row:
        """A row of the weights' buffer."""
        return Row(self.shards, row, "weights", self.world)

    def reduced(self, row: Tensor) -> Row:
        """A row of the gradients' buffer."""
        trained = tuple(shard for shard in self.shards if shard.parameter.requires_grad)
        return Row(trained, row, "gradients", self.world)


class Row:
    """A view of one rank's part of a buffer.

    Args:
        shards: that the row consists of.
        row: [values]; of bytes, where FSDP2 joins parameters of several dtypes.
        what: for an error.
        world: ranks that the shards are of.

    Raises:
        TrainError: the row has another size.
    """

    def __init__(self, shards: Sequence[Shard], row: Tensor, what: str, world: int) -> None:
        self.row = row
        self._shards = shards
        self._is_bytes = row.dtype is torch.uint8
        sizes = [s.numel * (s.dtype.itemsize if self._is_bytes else 1) for s in shards]
        if sum(sizes) != row.numel():
            raise TrainError(
                f"{what} of {shards[0].name if shards else 'nothing'} and others fill"
                f" {row.numel()} elements of a row, not the {sum(sizes)} of {len(shards)} shards"
                f" over {world} ranks",
                "Call set_reduce_scatter_unused_params(True) where parameters get no gradient,"
                " give fully_shard one module at a time and reshard_after_forward no number,"
                " and call quantize_sharding after that",
            )
        kept = [s.exempt or (not self._is_bytes and row.dtype not in CODED_DTYPES) for s in shards]
        self._sizes = sizes
        self._kept = kept
        self.coded, self.exact = spans_of(zip(sizes, kept, strict=True))

    def values(self) -> Tensor:
        """What is coded, [n]."""
        if not self._is_bytes:
            return take(self.row, self.coded)
        parts = [self.row[at].clone().view(s.dtype).float() for s, at in self._typed()]
        return torch.cat(parts) if parts else self.row.new_empty(0, dtype=torch.float32)

    def rest(self) -> Tensor:
        """What is sent as it is, [m]."""
        return take(self.row, self.exact)

    def put(self, values: Tensor, rest: Tensor) -> None:
        """The reverse of `values` and `rest`."""
        put(self.row, self.exact, rest)
        if not self._is_bytes:
            put(self.row, self.coded, values)
            return
        start = 0
        for shard, at in self._typed():
            part = values[start : start + shard.numel].to(shard.dtype)
            self.row[at].copy_(part.view(torch.uint8))
            start += shard.numel

    def require_shards(self) -> None:
        """Compare the row with what the parameters' shards hold now.

        Raises:
            TrainError: it holds something else: FSDP2 lays it out differently.
        """
        end = 0
        for shard, size in zip(self._shards, self._sizes, strict=True):
            parameter = shard.parameter
            if isinstance(parameter, DTensor):
                own = parameter.to_local().detach().flatten()
                dtype = shard.dtype if self._is_bytes else self.row.dtype
                expected = own.to(self.row.device, dtype).view(torch.uint8)
                found = self.row[end : end + size].contiguous().view(torch.uint8)
                if not torch.equal(found[: expected.numel()], expected):
                    raise TrainError(
                        f"FSDP2 of torch {torch.__version__} lays out {shard.name} in a way that"
                        " is not known",
                        "Use a release of torch from 2.9 to 2.14, and report this one",
                    )
            end += size

    def _typed(self) -> Iterator[tuple[Shard, slice]]:
        end = 0
        for shard, size, kept in zip(self._shards, self._sizes, self._kept, strict=True):
            if not kept:
                yield shard, slice(end, end + size)
            end += size


def shard_groups(model: nn.Module, bucket_size: int) -> Iterator[tuple[Any, ShardGroup]]:
    """The modules that `fully_shard` was called with, and what each of them communicates.

    Raises:
        ParameterError: parameters are sharded over more than one dimension of ranks.
    """
    exempt = {id(parameter) for parameter in exempt_parameters(model, bucket_size)}
    for root in model.modules():
        if not isinstance(root, FSDPModule):
            continue
        shards: list[Shard] = []
        seen: set[int] = set()
        group: Any = None
        world = 0
        for module in _own_modules(root):
            for name, parameter in module.named_parameters(recurse=False):
                if id(parameter) in seen or not isinstance(parameter, DTensor):
                    continue  # tied, or left out of sharding
                seen.add(id(parameter))
                axis, dim = _axis(name, parameter)
                mesh = parameter.device_mesh
                group, world = mesh.get_group(axis), mesh.size(axis)
                length = parameter.shape[dim]
                numel = -(-length // world) * (parameter.numel() // length) if length else 0
                is_kept = id(parameter) in exempt or parameter.dtype not in CODED_DTYPES
                shards.append(
                    Shard(
                        module=module,
                        name=name,
                        numel=numel,
                        dtype=parameter.dtype,
                        exempt=is_kept,
                    )
                )
        if shards:
            yield root, ShardGroup(shards=tuple(shards), group=group, world=world)


def _own_modules(root: Any) -> list[nn.Module]:
    """The modules below, in FSDP2's order, without those that are sharded by themselves."""
    seen: set[nn.Module] = set()
    found: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        seen.add(module)
        for child in module.children():
            if child not in seen and not isinstance(child, FSDPModule):
                visit(child)
        found.append(module)

    visit(root)
    return found


def _axis(name: str, parameter: DTensor) -> tuple[int, int]:
    """The dimension of ranks that a parameter is sharded over, and its own dimension."""
    axes = [
        (axis, cast(Any, placement).dim)
        for axis, placement in enumerate(parameter.placements)
        if placement.is_shard()
    ]
    if len(axes) != 1:
        rule = "must be sharded over one dimension of ranks: tensor parallelism is not known"
        raise ParameterError(name, rule, str(parameter.placements))
    return axes[0]
