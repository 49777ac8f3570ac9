"""One of two processes of `test_layers_on_ranks`: runs every part and writes what failed."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in its list
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from qsync_opt.errors import ParameterError
from qsync_opt.kernels.rounding import Rounding
from qsync_opt.precision import Precision
from qsync_opt.runtime.convert import convert, revert, set_step
from tests.low_precision import TinyGpt, gradients, language_loss, tokens, uniform_plan

BATCHES = (tokens(4)[:2], tokens(4)[2:])


def model_at(precision: Precision, rank: int = 0) -> TinyGpt:
    """The same weights every time; rows of 24 and 50 do not divide evenly."""
    torch.manual_seed(0)
    model = TinyGpt(width=24)
    convert(model, uniform_plan(model, precision), rank=rank, emulate=True)
    return model


def averaged(precisions: tuple[Precision, Precision]) -> dict[str, torch.Tensor]:
    """The mean of the gradients of both batches, each computed alone at its precision."""
    found = []
    for batch, precision in zip(BATCHES, precisions, strict=True):
        model = model_at(precision)
        language_loss(model(batch), batch).backward()
        found.append(gradients(model))
    return {name: (found[0][name] + found[1][name]) / 2 for name in found[0]}


def ddp(rank: int) -> None:
    """The weak rank runs int8 and the strong one fp32; replicas stay equal to the bit."""
    precisions = (Precision.FP32, Precision.INT8)
    expected = averaged(precisions)
    model = model_at(precisions[rank], rank)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(3):
        optimizer.zero_grad()
        language_loss(wrapped(BATCHES[rank]), BATCHES[rank]).backward()
        if number == 0:
            for name, gradient in gradients(model).items():
                assert torch.equal(gradient, expected[name]), name
        optimizer.step()
    for name, parameter in model.named_parameters():
        other = parameter.detach().clone()
        distributed.broadcast(other, 0)
        assert torch.equal(parameter, other), name


def fsdp(precision: Precision, rank: int) -> None:
    """Sharded parameters give the gradients that whole ones give."""
    expected = averaged((precision, precision))
    model = model_at(precision)
    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(2):
        optimizer.zero_grad()
        language_loss(model(BATCHES[rank]), BATCHES[rank]).backward()
        if number == 0:
            for name, parameter in model.named_parameters():
                full = parameter.grad.full_tensor()  # type: ignore[union-attr]
                assert torch.allclose(full, expected[name], rtol=1e-5, atol=1e-7), name
        optimizer.step()


def random_bits(rank: int) -> None:
    """Ranks with one seed round apart."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16))
    convert(model, {"0": Precision.INT8}, rounding=Rounding.STOCHASTIC, seed=5)
    set_step(model, 0)
    mine = model(torch.ones(4, 16).cumsum(1)).float().detach()
    both = [torch.empty_like(mine) for _ in range(2)]
    distributed.all_gather(both, mine)
    assert not torch.equal(both[0], both[1])


def revert_after_sharding(rank: int) -> None:
    """A layer whose class fully_shard changed cannot be given its first class back."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 16))
    convert(model, {"0": Precision.INT8})
    fully_shard(model[0], mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(ParameterError, match="fully_shard"):
        revert(model)


def main() -> None:
    """Run every part and write part -> traceback as JSON."""
    rank, port = map(int, sys.argv[1:])
    store = TCPStore("127.0.0.1", port, is_master=False)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    parts: dict[str, Callable[[int], None]] = {
        "ddp": ddp,
        **{
            f"fsdp {precision}": partial(fsdp, precision)
            for precision in (Precision.BF16, Precision.INT8, Precision.FP8)
        },
        "random bits": random_bits,
        "revert": revert_after_sharding,
    }
    found = {}
    for name, part in parts.items():
        try:
            part(rank)
            found[name] = ""
        except Exception:  # noqa: BLE001  # the test shows it
            found[name] = traceback.format_exc()
    distributed.destroy_process_group()
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
