"""Coded gradients and weights between ranks on GPUs: replicas equal, values close.

Two ranks can share a GPU over gloo, which shows that streams and events are right; NCCL needs a
GPU for each.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from qsync_opt.kernels.native import Native
from qsync_opt.runtime.communication import parse_communication
from qsync_opt.runtime.quantized_comm import compress_gradients
from qsync_opt.runtime.quantized_sharding import quantize_sharding
from qsync_opt.runtime.shared_reduction import SharedReduction, reduce_beside, reduction_for


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


def _check_shared(rank: int, world: int, port: int) -> None:
    """Averages in shared memory while the GPU is busy, so that a missing wait would be seen."""
    torch.cuda.set_device(0)
    distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
    )
    device = torch.device("cuda", 0)
    busy = torch.randn(2048, 2048, device=device)
    with closing(reduction_for(None, device)) as reduction:
        assert isinstance(reduction, SharedReduction)
        for step in range(20):
            generators = [torch.Generator(device).manual_seed(100 * step + r) for r in range(world)]
            for wire in (torch.float32, torch.bfloat16, torch.float16):
                pending = []
                for size in (1000, 1, 3_000_000, 700_001):
                    parts = [torch.randn(size, device=device, generator=g) for g in generators]
                    expected = parts[0].to(wire).div_(world)
                    for part in parts[1:]:
                        expected = expected + part.to(wire).div_(world)
                    for _ in range(5 * rank):  # one rank is late, and in the middle of work
                        busy = torch.tanh(busy @ busy)
                    future = reduction.average(parts[rank].clone(), wire)
                    pending.append((future, expected.float()))
                for future, wanted in pending:
                    assert torch.equal(future.wait(), wanted)
    # Through DDP, against a backward that waits for everything.
    wrapped = DistributedDataParallel(_model(), device_ids=[0], bucket_cap_mb=0.3)
    model = _model()
    with closing(reduce_beside(wrapped, device)) as reduction:
        assert isinstance(reduction, SharedReduction)
        for _ in range(3):
            found = _backward(wrapped, rank)
            expected = sum(_backward(model, r) for r in range(world)) / world  # type: ignore[assignment]
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    distributed.destroy_process_group()


def _start(count: int, check: Callable[..., None], *rest: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn(check, (count, port, *rest), nprocs=count)  # type: ignore[no-untyped-call]


@pytest.mark.gpu
def test_ranks_that_share_a_gpu(device: torch.device) -> None:
    _start(2, _check, "gloo")


@pytest.mark.gpu
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_share_a_gpu_average_in_its_memory(world: int, kernels: Native) -> None:
    _start(world, _check_shared)


@pytest.mark.multi_gpu
def test_ranks_on_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    _start(torch.cuda.device_count(), _check, "nccl")
