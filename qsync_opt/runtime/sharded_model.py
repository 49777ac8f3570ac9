"""A model whose weights, gradients and optimizer state are spread over the ranks of a job.

What is trained is a copy that FSDP2 shards, block by block; the model itself keeps its modules
and is given the weights when they are collected: for a checkpoint, and at the end. Checkpoints
therefore look like those of whole replicas, and either kind of job can go on from them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from qsync_opt.errors import ParameterError
from qsync_opt.runtime.communication import Communication
from qsync_opt.runtime.quantized_sharding import QuantizedSharding, quantize_sharding

#: A block with fewer values than this is gathered with what is around it.
_SMALLEST_BLOCK = 2**16


class ShardedModel:
    """A sharded copy of a model, on all ranks of the default process group.

    Args:
        model: on its device; every rank starts with the weights of rank 0.
        communication: what is sent.
        seed: of the random bits.
        find_unused_parameters: for a model that leaves parameters out of some steps.

    Attributes:
        module: the sharded copy, to be trained.
        sharding: codes what it sends.

    Raises:
        ParameterError: an option is not for sharded models, or not of this torch.
    """

    def __init__(
        self,
        model: nn.Module,
        communication: Communication,
        *,
        seed: int,
        find_unused_parameters: bool = False,
    ) -> None:
        if communication.cast is not None:
            rule = "must not cast gradients of sharded weights"
            raise ParameterError("communication", rule, str(communication), "Give them bits")
        self._model = model
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                distributed.broadcast(tensor.detach(), 0)
        self.module: Any = copy.deepcopy(model)
        device = next(model.parameters()).device
        mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
        for block in list(blocks_of(self.module)):
            fully_shard(block, mesh=mesh)
        fully_shard(self.module, mesh=mesh)
        if find_unused_parameters:
            if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
                rule = "must be off where weights are sharded by this torch"
                raise ParameterError("find_unused_parameters", rule, torch.__version__)
            for module in self.module.modules():
                if isinstance(module, FSDPModule):
                    module.set_reduce_scatter_unused_params(True)
        self.sharding: QuantizedSharding = quantize_sharding(self.module, communication, seed=seed)

    def collect(self) -> None:
        """Give the model the weights that the ranks hold together; all ranks call it."""
        with torch.no_grad():
            for own, shard in _pairs(self._model.parameters(), self.module.parameters()):
                own.copy_(shard.full_tensor() if isinstance(shard, DTensor) else shard)
            for own, shard in _pairs(self._model.buffers(), self.module.buffers()):
                own.copy_(shard)

    def buffers(self) -> dict[str, Tensor]:
        """Name -> buffer of this rank, on the CPU: those of ranks differ, as samples do."""
        return {name: buffer.detach().cpu() for name, buffer in self.module.named_buffers()}

    def load_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Go on with what `buffers` gave on this rank."""
        own = dict(self.module.named_buffers())
        with torch.no_grad():
            for name, buffer in buffers.items():
                own[name].copy_(buffer)

    def spread(self) -> None:
        """Give the ranks the weights of the model, which must be the same on all of them."""
        with torch.no_grad():
            for own, shard in _pairs(self._model.parameters(), self.module.parameters()):
                if isinstance(shard, DTensor):
                    shard.to_local().copy_(_local(own, shard))
                else:
                    shard.copy_(own)
            for own, shard in _pairs(self._model.buffers(), self.module.buffers()):
                shard.copy_(own)


class WholeState:
    """The state of an optimizer of shards as that of one of whole parameters.

    Args:
        optimizer: of shards.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._collected: dict[str, Any] | None = None

    @property
    def wrapped(self) -> torch.optim.Optimizer:
        """The optimizer."""
        return self._optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the optimizer."""
        return self._optimizer.param_groups

    def collect(self) -> None:
        """Put the shards of all ranks together, for `state_dict`; all ranks call it."""
        state = self._optimizer.state_dict()
        entries = {
            index: {
                key: value.full_tensor().cpu() if isinstance(value, DTensor) else value
                for key, value in values.items()
            }
            for index, values in state["state"].items()
        }
        self._collected = {**state, "state": entries}

    def state_dict(self) -> dict[str, Any]:
        """What was collected last; it is not kept."""
        if self._collected is None:
            raise ParameterError("optimizer", "must be collected first", None)
        found, self._collected = self._collected, None
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take this rank's shards of a state of whole parameters."""
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        entries = {
            index: {key: _shard_like(value, parameters[index]) for key, value in values.items()}
            for index, values in state["state"].items()
        }
        self._optimizer.load_state_dict({**state, "state": entries})


def blocks_of(model: nn.Module) -> Iterator[nn.Module]:
    """The modules to gather one at a time: the members of a model's outermost lists.

    A member that is small, or shares a parameter with what is outside, is left to the whole.
    """
    holders: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders[id(parameter)] = holders.get(id(parameter), 0) + 1

    def visit(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            if isinstance(module, (nn.ModuleList, nn.Sequential)) and _is_alone(child, holders):
                yield child
            else:
                yield from visit(child)

    yield from visit(model)


def _is_alone(block: nn.Module, holders: Mapping[int, int]) -> bool:
    if isinstance(block, (nn.ModuleList, nn.ModuleDict)):  # nothing calls a list
        return False
    inside: dict[int, int] = {}
    for module in block.modules():
        for parameter in module.parameters(recurse=False):
            inside[id(parameter)] = inside.get(id(parameter), 0) + 1
    size = sum(parameter.numel() for parameter in block.parameters())
    return size >= _SMALLEST_BLOCK and all(holders[key] == n for key, n in inside.items())


def _pairs(whole: Iterator[Any], sharded: Iterator[Any]) -> Iterator[tuple[Tensor, Any]]:
    return zip(whole, sharded, strict=True)


def _local(whole: Tensor, like: DTensor) -> Tensor:
    """This rank's shard of a tensor that all ranks have."""
    found: Any = distribute_tensor(
        whole.detach().to(like.device), like.device_mesh, like.placements, src_data_rank=None
    )
    local: Tensor = found.to_local()
    return local


def _shard_like(value: Any, parameter: Tensor) -> Any:
    is_whole = isinstance(value, Tensor) and value.shape == parameter.shape
    if not (is_whole and isinstance(parameter, DTensor)):
        return value
    local = _local(value, parameter)
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
