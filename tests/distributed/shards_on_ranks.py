"""Parts of `communication_on_ranks`: coded weights and gradients under FSDP2."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from qsync_opt.errors import ParameterError, TrainError
from qsync_opt.runtime.bucket_codec import exempt_parameters
from qsync_opt.runtime.communication import layout_of, parse_communication
from qsync_opt.runtime.quantized_sharding import QuantizedSharding, quantize_sharding
from tests.distributed.communication_on_ranks import Part, all_equal, counted

_dcp: Any = dcp  # it names no exports


class Net(nn.Module):
    """Layers whose sizes no number of ranks divides, a norm, a tied and a tiny weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(37, 61)
        self.norm = nn.LayerNorm(61)
        self.wide = nn.Linear(61, 3)  # fewer rows than ranks: an empty shard
        self.middle = nn.Linear(61, 61)
        self.last = nn.Linear(3, 700)
        self.tied = nn.Linear(37, 61)
        self.tied.weight = self.first.weight
        self.seen: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x) + self.tied(x))
        y = self.wide(torch.tanh(self.middle(y)))
        self.seen = {
            name: getattr(self, name).weight.detach().clone() for name in ("first", "wide", "last")
        }
        return self.last(torch.tanh(y))  # type: ignore[no-any-return]


def _sharded(mesh: DeviceMesh, **options: Any) -> Any:
    model = Net()
    fully_shard(model.middle, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def _mesh(world: int) -> DeviceMesh:
    return init_device_mesh("cpu", (world,))


def _input(rank: int) -> Tensor:
    return torch.randn(4, 37, generator=torch.Generator().manual_seed(50 + rank))


def _step(model: Net, rank: int, factor: float = 1.0) -> Tensor:
    for parameter in model.parameters():
        parameter.grad = None
    loss: Tensor = model(_input(rank)).square().mean() * factor
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def _full(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            grad = parameter.grad
            found[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return found


def _expected(ranks: Sequence[int]) -> dict[str, Tensor]:
    total: dict[str, Tensor] = {}
    for rank in ranks:
        model = Net()
        _step(model, rank)
        for name, gradient in _full(model).items():
            total[name] = total.get(name, torch.tensor(0.0)) + gradient / len(ranks)
    return total


def _distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    error = sum(float((found[name] - expected[name]).square().sum()) for name in found)
    return float((error / sum(float(v.square().sum()) for v in expected.values())) ** 0.5)


def sharding(rank: int, world: int, folder: Path) -> None:
    """Weights are the same bits on all ranks, gradients close, exempt ones as they are."""
    expected = _expected(range(world))
    plain = Net()
    exempt = {id(p) for p in exempt_parameters(plain)}
    kept = {name for name, p in plain.named_parameters() if id(p) in exempt}
    assert {"norm.weight", "middle.bias", "wide.weight"} <= kept
    assert not {"first.weight", "middle.weight", "last.weight"} & kept
    words = [("w8g8", 0.05)]
    if world < 8:
        words += [("g8", 0.05), ("w8", 0.05), ("w4lg4l", 0.6), ("fp32", 1e-5)]
    for word, most in words:
        model = _sharded(_mesh(world))
        before = {name: p.to_local().clone() for name, p in _locals(model)}
        found = quantize_sharding(model, parse_communication(word), seed=3)
        for step in range(2):
            with counted() as sent:
                was = found.sent_bytes
                _step(model, rank)
            assert found.step == step
            assert sent[0] == found.sent_bytes - was
            assert (sent[0] > 0) == (world > 1)
            assert _distance(_full(model), expected) < most, word
            for weight in model.seen.values():
                assert all_equal(weight)
            assert torch.equal(model.seen["wide"], plain.wide.weight)
            rounded = model.seen["first"] != plain.first.weight
            assert bool(rounded.float().mean() > 0.9) == (world > 1 and "w" in word)
        for name, parameter in _locals(model):  # full precision stays with the optimizer
            assert torch.equal(parameter.to_local(), before[name])
    assert isinstance(model, FSDPModule)


def _locals(model: nn.Module) -> list[tuple[str, DTensor]]:
    found: list[tuple[str, DTensor]] = []
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        found.append((name, parameter))
    return found


def only_exempt_gradients(rank: int, world: int, folder: Path) -> None:
    """With exact weights, the gradients of norms and biases are those of the plain model."""
    expected = _expected(range(world))
    model = _sharded(_mesh(world))
    quantize_sharding(model, parse_communication("g4"))
    _step(model, rank)
    found = _full(model)
    for name in ("norm.weight", "norm.bias", "wide.weight", "first.bias", "middle.bias"):
        assert torch.allclose(found[name], expected[name], rtol=1e-4, atol=1e-7), name


def weights_in_a_step(rank: int, world: int, folder: Path) -> None:
    """Forward and backward of a step see the same weights; the next step draws anew."""
    model = _sharded(_mesh(world))
    found = quantize_sharding(model, parse_communication("w4"), seed=1)
    drawn = []
    weight = Net().first.weight.detach()
    total = torch.zeros_like(weight)
    for step in range(40):
        model.train()
        with torch.enable_grad():
            model(_input(rank))
        model.reshard()
        drawn.append(model.seen["first"])
        total += model.seen["first"] / 40
        if step == 0:  # an evaluation does not draw
            model.eval()
            model(_input(rank))
            model.reshard()
            assert torch.equal(model.seen["first"], drawn[0])
            with found.exact():
                model(_input(rank))
            model.reshard()
            assert torch.equal(model.seen["first"], weight)
            model.train()
    assert not torch.equal(drawn[0], drawn[1])
    error = (drawn[0] - weight).abs().max()
    assert float((total - weight).abs().max()) < 0.6 * float(error)
    found.begin(0)
    model.train()
    model(_input(rank))
    model.reshard()
    assert torch.equal(model.seen["first"], drawn[0])
    handle = model.unshard(async_op=True)
    assert handle is not None
    handle.wait()
    assert torch.equal(model.first.weight, drawn[0])


def broken_weights(rank: int, world: int, folder: Path) -> None:
    """A NaN in one rank's shard or gradient is seen by all."""
    model = _sharded(_mesh(world))
    quantize_sharding(model, parse_communication("w8g8"))
    _step(model, rank, float("inf") if rank == 0 else 1.0)
    finite = torch.cat([torch.isfinite(g).flatten() for g in _full(model).values()])
    assert all_equal(finite)
    assert not bool(finite.all())
    with torch.no_grad():
        model.first.weight.to_local()[:1].fill_(float("nan"))
    assert bool(torch.isnan(_step(model, rank)))


def accumulation(rank: int, world: int, folder: Path) -> None:
    """Several backwards, sent each or together, give the sum."""
    expected = {name: 2 * value for name, value in _expected(range(world)).items()}
    for together in (False, True):
        model = _sharded(_mesh(world))
        found = quantize_sharding(model, parse_communication("g8"))
        for number in range(2):
            model.set_requires_gradient_sync(number == 1 or not together)
            before = found.sent_bytes
            model(_input(rank)).square().mean().backward()
            assert found.sent_bytes > before
        assert _distance(_full(model), expected) < 0.03


def options_of_fsdp(rank: int, world: int, folder: Path) -> None:
    """Casts, frozen parameters, other dtypes, kept weights, and unused parameters."""
    expected = _expected(range(world))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = _sharded(_mesh(world), mp_policy=policy)
    quantize_sharding(model, parse_communication("w8g8"))
    _step(model, rank)
    assert model.seen["first"].dtype is torch.bfloat16
    assert _distance(_full(model), expected) < 0.08

    model = Net()
    model.middle.requires_grad_(False)
    model.last.to(torch.bfloat16).requires_grad_(False)
    model.last.register_forward_pre_hook(lambda _, inputs: inputs[0].bfloat16())
    fully_shard(model, mesh=_mesh(world), reshard_after_forward=False)
    quantize_sharding(model, parse_communication("w8g8"))
    _step(model, rank)
    names = [name for name in expected if not name.startswith(("middle", "last"))]
    assert _distance(_full(model), {name: expected[name] for name in names}) < 0.08
    assert all_equal(model.seen["last"])
    assert model.seen["last"].dtype is torch.bfloat16

    unused = Net()
    unused.extra = nn.Linear(61, 61)
    fully_shard(unused, mesh=_mesh(world))
    quantize_sharding(unused, parse_communication("g8"))
    with pytest.raises(TrainError, match="set_reduce_scatter_unused_params"):
        _step(unused, rank)


def checkpoint(rank: int, world: int, folder: Path) -> None:
    """A saved job goes on with the bits of one that never stopped."""

    def start() -> tuple[Any, QuantizedSharding, torch.optim.Optimizer]:
        model = _sharded(_mesh(world))
        found = quantize_sharding(model, parse_communication("w6lg4l"), seed=9)
        return model, found, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train(model: Net, optimizer: torch.optim.Optimizer, steps: int) -> list[Tensor]:
        for _ in range(steps):
            _step(model, rank)
            optimizer.step()
        return [p.to_local().clone() for _, p in _locals(model)]

    model, found, optimizer = start()
    train(model, optimizer, 3)
    place = folder / f"checkpoint{world}"
    assert set(model.state_dict()) == set(Net().state_dict())
    _dcp.save({"model": model.state_dict()}, checkpoint_id=place)
    moments = copy.deepcopy(optimizer.state_dict())
    extra = found.state()
    expected = train(model, optimizer, 3)

    model, found, optimizer = start()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().zero_()
    loaded = {"model": model.state_dict()}
    _dcp.load(loaded, checkpoint_id=place)
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(moments)
    found.load_state(extra)
    after = train(model, optimizer, 3)
    assert all(torch.equal(a, b) for a, b in zip(expected, after, strict=True))


def replicas(rank: int, world: int, folder: Path) -> None:
    """Shards in a node, coded averages between nodes; and FSDP2's own HSDP."""
    expected = _expected(range(world))
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("node", "shard"))
    for word, most in (("w8g8", 0.06), ("g4l", 0.6)):
        model = _sharded(mesh["shard"])
        group = mesh["node"].get_group()
        found = quantize_sharding(model, parse_communication(word), replicas=group)
        with counted() as sent:
            _step(model, rank)
        assert sent[0] == found.sent_bytes
        gradients = _full(model)
        assert _distance(gradients, expected) < most
        for gradient in gradients.values():
            assert all_equal(gradient)
    model = _sharded(mesh)
    quantize_sharding(model, parse_communication("w8g8"))
    _step(model, rank)
    assert _distance(_full(model), expected) < 0.06


def bytes_of_shards(rank: int, world: int, folder: Path) -> None:
    """A step gathers the weights twice and scatters the gradients once, at the computed size."""
    model = nn.Sequential(nn.Linear(256, 64 * world, bias=False))
    fully_shard(model, mesh=_mesh(world))
    inner = nn.Sequential(model)
    fully_shard(inner, mesh=_mesh(world))
    found = quantize_sharding(inner, parse_communication("w8g4"))
    with counted() as sent:
        inner(torch.ones(1, 256)).sum().backward()
    weights = layout_of(256 * 64, 1, 8).message_bytes
    gradients = layout_of(256 * 64 * world, world, 4).message_bytes
    assert sent[0] == found.sent_bytes == (world - 1) * (2 * weights + gradients)


def mistakes(rank: int, world: int, folder: Path) -> None:
    """What cannot be done is said before anything is sent."""
    with pytest.raises(ParameterError, match="must have modules that fully_shard"):
        quantize_sharding(Net(), parse_communication("w8g8"))
    model = _sharded(_mesh(world))
    with pytest.raises(ParameterError, match="must be off where gradients are sharded"):
        quantize_sharding(model, parse_communication("g4e"))
    with pytest.raises(ParameterError, match="reduce_dtype"):
        quantize_sharding(model, parse_communication("fp16"))
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(FSDPModule, "set_custom_all_gather")
        with pytest.raises(ParameterError, match="Use torch 2.9 or newer"):
            quantize_sharding(model, parse_communication("w8g8"))
    with pytest.raises(TrainError, match="ranks do not agree on what is sent"):
        quantize_sharding(model, parse_communication(f"w8g{3 + rank}"))
    if world % 2 == 0:
        model = _sharded(_mesh(world), reshard_after_forward=2 if world > 2 else True)
        quantize_sharding(model, parse_communication("w8g8"))
        if world > 2:
            with pytest.raises(TrainError, match="reshard_after_forward"):
                _step(model, rank)
    distributed.barrier()


_SOME = (2, 4)
PARTS: dict[str, tuple[Part, tuple[int, ...]]] = {
    "sharding": (sharding, (1, 2, 3, 8)),
    "only exempt gradients": (only_exempt_gradients, (3,)),
    "weights in a step": (weights_in_a_step, (2, 3)),
    "broken weights": (broken_weights, (3,)),
    "accumulation of shards": (accumulation, (2,)),
    "options of FSDP2": (options_of_fsdp, (2, 3)),
    "checkpoint": (checkpoint, (3,)),
    "replicas": (replicas, (4,)),
    "bytes of shards": (bytes_of_shards, (2, 3)),
    "mistakes of shards": (mistakes, _SOME),
}
