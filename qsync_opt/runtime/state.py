"""The state of a training job as named tensors and plain values, and back, to the bit.

Weights and optimizer state are the same on every rank, so rank 0's are kept; random states are
kept for every rank. A restored job goes on as if it had never stopped.
"""

from __future__ import annotations

import base64
import json
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from qsync_opt.errors import TrainError
from qsync_opt.runtime.checkpoints import Checkpoint
from qsync_opt.runtime.distributed import Ranks

_MODEL, _OPTIMIZER, _RANDOM = "model/", "optimizer/", "random/"


class KeptOptimizer(Protocol):
    """What a checkpoint needs of an optimizer."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """As of torch's optimizers."""

    def state_dict(self) -> dict[str, Any]:
        """As of torch's optimizers."""

    def load_state_dict(self, state: Any, /) -> None:
        """As of torch's optimizers."""


def pack(
    model: nn.Module, optimizer: KeptOptimizer, randoms: Sequence[bytes]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and plain values of a checkpoint.

    Args:
        model: not wrapped.
        optimizer: of its parameters.
        randoms: what `random_state` gave on every rank.

    Raises:
        TrainError: a state that is neither a tensor nor a plain value.
    """
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[tuple[object, ...], str] = {}
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise _unstorable(f"the model's {name}", value)
        place = (value.device, value.data_ptr(), value.shape, value.stride(), value.dtype)
        first = seen.setdefault(place, name) if value.numel() else name
        if first != name:
            aliases[name] = first  # a tied weight is kept once
        else:
            tensors[_MODEL + name] = _on_cpu(value)
    state = optimizer.state_dict()
    values: dict[str, dict[str, Any]] = {}
    for index, entries in state["state"].items():
        for key, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"{_OPTIMIZER}{index}/{key}"] = _on_cpu(value)
            else:
                values.setdefault(str(index), {})[key] = _plain(value, f"the optimizer's {key}")
    groups = [
        {key: _plain(value, f"the optimizer's {key}") for key, value in group.items()}
        for group in state["param_groups"]
    ]
    for rank, raw in enumerate(randoms):
        tensors[f"{_RANDOM}{rank}"] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    return tensors, {
        "aliases": aliases,
        "optimizer": {"values": values, "groups": groups, "name": _name(optimizer)},
    }


def unpack(checkpoint: Checkpoint, model: nn.Module, optimizer: KeptOptimizer) -> None:
    """Give a model and its optimizer the state of a checkpoint.

    Raises:
        TrainError: it is of another model or optimizer.
    """
    weights = {
        name.removeprefix(_MODEL): tensor
        for name, tensor in checkpoint.tensors.items()
        if name.startswith(_MODEL)
    }
    for name, first in checkpoint.facts["aliases"].items():
        weights[name] = weights[first]
    name = checkpoint.facts["optimizer"].get("name", _name(optimizer))  # later than the format
    if name != _name(optimizer):
        raise TrainError(
            f"the checkpoint of step {checkpoint.step} is of the optimizer {name}, and"
            f" {_name(optimizer)} is to go on",
            "Give the optimizer of this job, or an empty folder",
        )
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state: dict[int, dict[str, Any]] = {}
    for index, values in checkpoint.facts["optimizer"]["values"].items():
        state.setdefault(int(index), {}).update(values)
    try:
        model.load_state_dict(weights)
        for name, tensor in checkpoint.tensors.items():
            if name.startswith(_OPTIMIZER):
                index, _, key = name.removeprefix(_OPTIMIZER).partition("/")
                like = parameters[int(index)]
                state.setdefault(int(index), {})[key] = _laid_out_like(tensor, like)
        # Tuples such as Adam's betas come back from JSON as lists.
        groups = [
            {k: tuple(v) if isinstance(v, list) and k != "params" else v for k, v in group.items()}
            for group in checkpoint.facts["optimizer"]["groups"]
        ]
        optimizer.load_state_dict({"state": state, "param_groups": groups})
    except (RuntimeError, ValueError, KeyError, IndexError) as error:
        raise TrainError(
            f"the checkpoint of step {checkpoint.step} is of another model or optimizer: {error}",
            "Give the folder of this job, or an empty one",
        ) from error


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether no tensor holds an infinity or a NaN; waits for the GPU."""
    kinds = [tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
    held = [tensor.detach() for tensor in kinds if tensor.numel()]
    largest = torch.nn.utils.get_total_norm(held, norm_type=math.inf)
    return math.isfinite(largest.item())


def seed_all(seed: int) -> None:
    """Seed every random number generator of this process with a number of 64 bits."""
    torch.manual_seed(seed >> 1)  # torch takes signed ones
    random.seed(seed)
    np.random.seed(seed % 2**32)


def random_state(device: torch.device) -> bytes:
    """Every random number generator of this process: torch, its GPU, Python and NumPy."""
    version, words, gauss = random.getstate()
    name, keys, *rest = np.random.get_state(legacy=True)
    content: dict[str, Any] = {
        "torch": _to_text(torch.get_rng_state()),
        "python": [version, list(words), gauss],
        "numpy": [name, np.asarray(keys).tolist(), *rest],
    }
    if device.type == "cuda":
        content["cuda"] = _to_text(torch.cuda.get_rng_state(device))
    return json.dumps(content).encode()


def set_random_state(raw: bytes, device: torch.device) -> None:
    """The reverse of `random_state`."""
    content = json.loads(raw)
    torch.set_rng_state(_from_text(content["torch"]))
    version, words, gauss = content["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = content["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    if device.type == "cuda" and "cuda" in content:
        torch.cuda.set_rng_state(_from_text(content["cuda"]), device)


def random_of(checkpoint: Checkpoint, rank: int) -> bytes | None:
    """The random state of a rank; None for a rank that the job did not have."""
    tensor = checkpoint.tensors.get(f"{_RANDOM}{rank}")
    return None if tensor is None else tensor.numpy().tobytes()


def gather(tensors: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """The tensors of all ranks on rank 0, by rank and name; nothing on the others."""
    found: dict[str, Tensor] = {}
    for rank in range(ranks.world):
        own = Checkpoint(step=0, facts={}, tensors=tensors) if rank == ranks.rank else None
        one = broadcast(own, ranks, rank)
        if one is not None and ranks.rank == 0:
            found |= {f"{rank}/{name}": tensor for name, tensor in one.tensors.items()}
    return found


def broadcast(checkpoint: Checkpoint | None, ranks: Ranks, source: int = 0) -> Checkpoint | None:
    """The checkpoint of one rank on every rank, so that only one must reach the file."""
    head: Any = None
    if checkpoint is not None:
        rows = [
            [n, str(t.dtype).split(".")[1], list(t.shape)] for n, t in checkpoint.tensors.items()
        ]
        head = {"step": checkpoint.step, "facts": dict(checkpoint.facts), "tensors": rows}
    head = json.loads(ranks.broadcast_bytes(json.dumps(head).encode(), source))
    if head is None or checkpoint is not None:
        tensors = {} if checkpoint is None else dict(checkpoint.tensors)
    else:
        tensors = {
            name: torch.empty(shape, dtype=getattr(torch, dtype))
            for name, dtype, shape in head["tensors"]
        }
    for tensor in tensors.values():
        if tensor.numel():
            ranks.broadcast(tensor.reshape(-1).view(torch.uint8), source)
    if head is None:
        return None
    return Checkpoint(step=head["step"], facts=head["facts"], tensors=tensors)


def _name(optimizer: KeptOptimizer) -> str:
    return type(getattr(optimizer, "wrapped", optimizer)).__name__


def _on_cpu(value: Tensor) -> Tensor:
    return value.detach().cpu().contiguous()


def _laid_out_like(value: Tensor, parameter: Tensor) -> Tensor:
    if value.shape != parameter.shape or parameter.is_contiguous():
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device="cpu").copy_(value)


def _plain(value: Any, what: str) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item, what) for item in value]
    raise _unstorable(what, value)


def _unstorable(what: str, value: object) -> TrainError:
    return TrainError(
        f"{what} is a {type(value).__name__}, which a checkpoint cannot hold",
        "Keep state in tensors and numbers",
    )


def _to_text(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _from_text(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
