"""Coded gradients and weights between ranks on GPUs: replicas equal, values close.

Two ranks can share a GPU over gloo, which shows that streams and events are right; NCCL needs a
GPU for each.
"""

from __future__ import annotations

import socket
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from qsync_opt.runtime.communication import parse_communication
from qsync_opt.runtime.quantized_comm import compress_gradients
from qsync_opt.runtime.quantized_sharding import quantize_sharding


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(300, 700), nn.Tanh(), nn.LayerNorm(700), nn.Linear(700, 301)]
    return nn.Sequential(*layers).cuda()


def _gradients(model: nn.Module) -> Tensor:
    found = []
    for parameter in model.parameters():
        grad: Any = parameter.grad
        if isinstance(grad, DTensor):
            grad = _whole(grad.to_local())
        found.append(grad.flatten())
    return torch.cat(found)


def _whole(shard: Tensor) -> Tensor:
    """The shards of all ranks, by the host: gloo crashes where it gathers from GPUs."""
    shards: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(shards, shard.cpu())
    return torch.cat(shards).cuda()


def _backward(model: nn.Module, rank: int, factor: float = 1.0) -> Tensor:
    model.zero_grad(set_to_none=True)
    x = torch.randn(16, 300, generator=torch.Generator().manual_seed(rank)).cuda()
    loss: Any = model(x).square().mean() * factor
    loss.backward()
    return _gradients(model)


def _check(rank: int, world: int, port: int, backend: str) -> None:
    device = rank if backend == "nccl" else 0
    torch.cuda.set_device(device)
    distributed.init_process_group(
        backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
    )
    expected = _backward(DistributedDataParallel(_model(), device_ids=[device]), rank)
    for word, most in (("g8", 0.03), ("g4l", 0.3), ("g4e", 0.3)):
        wrapped = DistributedDataParallel(_model(), device_ids=[device], bucket_cap_mb=0.3)
        hook = compress_gradients(wrapped, parse_communication(word))
        assert hook is not None
        for step in range(4):
            found = _backward(wrapped, rank, float("nan") if step == 2 and rank == 0 else 1.0)
            first = found.clone()
            distributed.broadcast(first, 0)
            assert torch.equal(found.view(torch.int32), first.view(torch.int32))
            assert bool(torch.isfinite(found).all()) == (step != 2)
            if step < 2:
                assert float((found - expected).norm() / expected.norm()) < most * (1 + step)
        assert hook.exchange.sent_bytes > 0
    mesh = init_device_mesh("cuda", (world,))
    for word, most in (("w8g8", 0.05), ("w4lg4l", 0.5)):
        model = _model()
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        sharding = quantize_sharding(model, parse_communication(word))
        for _ in range(2):
            found = _backward(model, rank)
            assert float((found - expected).norm() / expected.norm()) < most
        assert sharding.sent_bytes > 0
    distributed.destroy_process_group()


def _start(count: int, backend: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn(_check, (count, port, backend), nprocs=count)  # type: ignore[no-untyped-call]


@pytest.mark.gpu
def test_ranks_that_share_a_gpu(device: torch.device) -> None:
    _start(2, "gloo")


@pytest.mark.multi_gpu
def test_ranks_on_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    _start(torch.cuda.device_count(), "nccl")
