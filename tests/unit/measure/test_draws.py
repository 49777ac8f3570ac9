"""Random calls draw alike in every precision where precisions are compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from qsync_opt.measure.capture import capture
from qsync_opt.measure.draws import SameDraws, random_state
from qsync_opt.measure.sensitivity import perturbations
from qsync_opt.precision import Precision

LOW = (torch.bfloat16, torch.float16)
CALLS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: functional.dropout(x, 0.3, True),
    lambda x: functional.dropout2d(x[None, None], 0.3, True),
    lambda x: functional.rrelu(x, training=True),
    lambda x: x * torch.rand_like(x),
    lambda x: torch.bernoulli(x.abs().clamp(max=1)),
    lambda x: functional.gumbel_softmax(x),
)


def values() -> Tensor:
    return torch.linspace(-2, 2, 35).view(5, 7)


def seeded(call: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    return call(x), random_state(x.device)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("call", CALLS)
def test_draws_are_those_of_float32(call: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    low = values().to(dtype)
    expected, state = seeded(call, low.float())
    with SameDraws():
        found, after = seeded(call, low)
    assert found.dtype is dtype
    # Products beside the draw are rounded twice.
    tolerance = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(found == 0, expected == 0)
    assert torch.equal(after, state)  # so later calls draw alike too


def test_calls_in_place_write_where_they_should() -> None:
    x = values().bfloat16()
    expected, _ = seeded(lambda t: functional.dropout(t, 0.3, True), x.float())
    with SameDraws():
        found, _ = seeded(lambda t: functional.dropout(t, 0.3, True, inplace=True), x)
    assert found is x
    assert torch.equal(x, expected.bfloat16())


def test_gradients_pass_through_the_same_mask() -> None:
    x = values().bfloat16().requires_grad_()
    with SameDraws():
        out, _ = seeded(lambda t: functional.dropout(t, 0.3, True), x)
    torch.autograd.backward(out.float().sum())
    assert x.grad is not None
    assert x.grad.dtype is torch.bfloat16
    kept = out.detach() != 0
    assert torch.equal(x.grad != 0, kept | (x.detach() == 0) & (x.grad != 0))


def test_what_draws_nothing_runs_as_it_is() -> None:
    x = values().bfloat16()
    with SameDraws():
        found = functional.softmax(x, dim=-1)
        assert functional.dropout(x, 0.3, False) is not None
    assert torch.equal(found, functional.softmax(x, dim=-1))
    assert found.dtype is torch.bfloat16


class Noisy(nn.Module):
    """Multiplies by numbers that a CPU draws otherwise in 16 bits, as a GPU does for dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = functional.rrelu(self.first(x), 0.0, 1.0, training=True)
        return self.last(h)  # type: ignore[no-any-return]


@pytest.mark.parametrize("method", ["variance", "measured"])
def test_other_draws_do_not_pass_for_rounding(method: str) -> None:
    torch.manual_seed(0)
    batch: Any = (torch.randn(32, 8), torch.randint(4, (32,)))
    model = Noisy()
    loss = functional.cross_entropy
    graph = capture(model, batch, loss, least_coverage=0.0)
    table = perturbations(model, batch, graph, method=method, loss=loss)
    first = table.operators.index("first")
    bf16 = table.values[first, table.precisions.index(Precision.BF16)]
    tf32 = table.values[first, table.precisions.index(Precision.TF32)]
    # Three bits less are 64 times the variance; other draws would be thousands of times more.
    assert bf16 < 600 * tf32
