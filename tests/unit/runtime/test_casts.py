from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qsync_opt.precision import Precision
from qsync_opt.runtime.casts import CastCache
from qsync_opt.runtime.convert import convert
from qsync_opt.runtime.layers import STATE
from tests.low_precision import TinyGpt, language_loss, tokens, uniform_plan


class Counter:
    """Makes casts to bf16 and counts them."""

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.made = 0

    def __call__(self) -> tuple[Tensor, ...]:
        self.made += 1
        return (self.x.to(torch.bfloat16),)


def made(*shape: int) -> Tensor:
    """What an operator made of something differentiated: only such tensors have shared casts."""
    return torch.randn(shape or (4,), requires_grad=True) * 1


def test_readers_of_one_tensor_share_a_cast() -> None:
    cache, x = CastCache(), made()
    make = Counter(x)
    assert cache.get(x, "bf16", make)[0] is cache.get(x, "bf16", make)[0]
    assert make.made == 1
    cache.get(x, "another form", make)
    assert make.made == 2


def test_a_tensor_written_in_place_is_cast_again() -> None:
    cache, x = CastCache(), made()
    make = Counter(x)
    cache.get(x, "bf16", make)
    x.add_(1)
    (cast,) = cache.get(x, "bf16", make)
    assert make.made == 2
    assert torch.equal(cast, x.bfloat16())


def test_a_cast_goes_with_its_tensor() -> None:
    cache, x = CastCache(), made()
    dead = weakref.ref(cache.get(x, "bf16", Counter(x.detach().clone()))[0])
    assert dead() is not None
    del x
    gc.collect()
    assert dead() is None
    assert len(cache) == 0


def test_an_older_cast_lives_only_while_somebody_else_holds_it() -> None:
    cache, x, y = CastCache(), made(), made()
    make = Counter(x)
    kept = cache.get(x, "bf16", make)
    cache.get(y, "bf16", Counter(y))
    assert cache.get(x, "bf16", make)[0] is kept[0]
    assert make.made == 1
    del kept
    cache.get(y, "bf16", Counter(y))
    cache.get(x, "bf16", make)
    assert make.made == 2


def test_a_cast_for_the_last_reader_is_not_held() -> None:
    cache, x = CastCache(), made()
    make = Counter(x)
    kept = cache.get(x, "bf16", make, hold=False)
    assert cache.get(x, "bf16", make, hold=False)[0] is kept[0]
    dead = weakref.ref(kept[0])
    del kept
    assert dead() is None
    assert cache.latest == ()


def fill_by_numpy(x: Tensor, values: Tensor) -> None:
    x.detach().numpy()[:] = values.numpy()


def fill_by_data(x: Tensor, values: Tensor) -> None:
    x.data.copy_(values)


def exchange_data(x: Tensor, values: Tensor) -> None:
    x.data = values.clone()


@pytest.mark.parametrize("fill", [fill_by_numpy, fill_by_data, exchange_data])
@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize("is_trained", [False, True])
def test_a_buffer_of_the_caller_is_read_anew(
    precision: Precision, fill: Any, is_trained: bool
) -> None:
    """What fills it between steps, as `dist.recv` does, leaves its version as it was."""
    model = convert(nn.Sequential(nn.Linear(16, 16)), {"0": precision}, emulate=True)
    buffer = torch.randn(8, 16, requires_grad=is_trained)
    for _ in range(3):
        values = torch.randn(8, 16)
        fill(buffer, values)
        with torch.set_grad_enabled(is_trained):
            assert torch.equal(model(buffer), model(values))


@pytest.mark.parametrize("precision", list(Precision))
def test_a_tensor_is_trained_on_after_inference_with_it(precision: Precision) -> None:
    model = convert(nn.Sequential(nn.Linear(16, 16)), {"0": precision}, emulate=True)
    x = made(8, 16)
    with torch.inference_mode():
        expected = model(x)
    out = model(x)
    out.sum().backward()
    assert torch.equal(out, expected)


class Shared(nn.Module):
    """Query, key and value read one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.query(x) + self.key(x) + self.value(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("precision", [p for p in Precision if p.storage is not Precision.FP32])
def test_query_key_and_value_save_one_copy(precision: Precision) -> None:
    model = Shared()
    convert(model, dict.fromkeys(("query", "key", "value"), precision), emulate=True)
    x = made(32, 16)
    parameters = {p.data_ptr() for p in model.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in parameters and tensor.numel() > 32:
            kept[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(x)
    assert [tensor.element_size() for tensor in kept.values()] == [precision.element_bytes]
    out.sum().backward()


def test_nothing_is_left_after_a_step() -> None:
    model = TinyGpt()
    convert(model, uniform_plan(model, Precision.INT8))
    language_loss(model(tokens()), tokens()).backward()
    gc.collect()
    state: Any = vars(model.head)[STATE]
    assert len(state.session.cache) == 0
