"""Roles against torch.autocast: random networks at random plans hand on the dtypes foreseen."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from qsync_opt.graph import OperatorGraph, Role
from qsync_opt.measure.capture import capture

WIDTH = 8


class Call(nn.Module):
    """One functional call as a module, so that its output can be hooked."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs)


ONE: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "layer_norm": lambda: nn.LayerNorm(WIDTH),
    "softmax": lambda: nn.Softmax(-1),
    "dropout": lambda: nn.Dropout(0.5),
    "mse": lambda: Call(lambda x: functional.mse_loss(x, torch.zeros_like(x), reduction="none")),
    "exp": lambda: Call(lambda x: torch.exp(-x.abs())),
    "cumsum": lambda: Call(lambda x: x.cumsum(-1) / WIDTH),
}
TWO: dict[str, Callable[..., Tensor]] = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b.tanh(),
    "cat": lambda a, b: torch.cat([a, b], -1)[..., ::2],
    "matmul": lambda a, b: a @ b.transpose(-1, -2) @ b / WIDTH,
    "where": lambda a, b: torch.where(a > 0, a, b),
}


class Random(nn.Module):
    """A random directed acyclic network; the last tensors are added up."""

    def __init__(self, seed: int, size: int = 12) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.steps = nn.ModuleList()
        self.sources: list[list[int]] = []
        for made in range(1, size + 1):
            if draw.random() < 0.6:
                self.steps.append(ONE[draw.choice(list(ONE))]())
                self.sources.append([max(0, made - draw.randint(1, 3))])
            else:
                self.steps.append(Call(TWO[draw.choice(list(TWO))]))
                self.sources.append([max(0, made - draw.randint(1, 4)) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        tensors = [self.first(x)]
        for step, sources in zip(self.steps, self.sources, strict=True):
            tensors.append(step(*(tensors[source] for source in sources)))
        return torch.stack([tensor.float().mean() for tensor in tensors]).sum()


def foreseen(graph: OperatorGraph, low: Mapping[str, bool]) -> list[torch.dtype]:
    """The dtype that every operator hands on, from the roles alone."""
    dtypes: list[torch.dtype] = []
    for op in graph.operators:
        is_low = {
            Role.ADJUSTABLE: low.get(op.name, False),
            Role.FOLLOWER: all(dtypes[i] is torch.bfloat16 for i in op.follows),
            Role.FIXED: False,
        }[op.role]
        dtypes.append(torch.bfloat16 if is_low else torch.float32)
    return dtypes


class _Watch(torch.overrides.TorchFunctionMode):
    """Runs a network under autocast, products at the precision of a plan; notes the dtypes."""

    def __init__(self, graph: OperatorGraph, low: Mapping[str, bool]) -> None:
        super().__init__()
        self.graph = graph
        self.low = low
        self.next = 0
        self.seen: list[torch.dtype] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "").strip("_")
        op = self.graph.operators[min(self.next, len(self.graph.operators) - 1)]
        if self.next == len(self.graph.operators) or name != op.kind.strip("_"):
            return func(*args, **(kwargs or {}))  # a view, or no operation at all
        self.next += 1
        is_low = op.role is not Role.ADJUSTABLE or self.low[op.name]
        if not is_low:
            args = [a.float() if isinstance(a, Tensor) else a for a in args]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_low):
            result = func(*args, **(kwargs or {}))
        self.seen.append(result.dtype)
        return result


@pytest.mark.parametrize("seed", range(25))
def test_followers_hand_on_what_autocast_gives(seed: int) -> None:
    torch.manual_seed(seed)
    model = Random(seed)
    x = torch.randn(3, WIDTH)
    graph = capture(model, x, least_coverage=0.0)
    draw = random.Random(seed)
    for share in (0.0, 0.5, 0.9, 1.0):
        low = {graph.operators[i].name: draw.random() < share for i in graph.adjustable}
        with _Watch(graph, low) as watch:
            model(x)
        assert watch.next == len(graph.operators)
        pairs = zip(graph.operators, foreseen(graph, low), watch.seen, strict=True)
        wrong = [(op.name, a, b) for op, a, b in pairs if a is not b and b.is_floating_point]
        assert not wrong


@pytest.mark.parametrize(
    ("call", "role"),
    [
        (lambda h: functional.relu(h), Role.FOLLOWER),
        (lambda h: functional.gelu(h), Role.FOLLOWER),
        (lambda h: h * 2 + 1, Role.FOLLOWER),
        (lambda h: functional.mse_loss(h, h * 2, reduction="none") * h, Role.FIXED),
        (lambda h: h + torch.ones(WIDTH), Role.FIXED),  # promotion with an fp32 tensor
        (lambda h: h + torch.ones(()), Role.FOLLOWER),  # a number does not promote
        (lambda h: h.argmax(-1, keepdim=True) + h, Role.FOLLOWER),
        (lambda h: h.double().float(), Role.FIXED),
    ],
)
def test_the_role_of_a_call(call: Callable[[Tensor], Tensor], role: Role) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)
            self.last = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(call(self.first(x))).sum()  # type: ignore[no-any-return]

    graph = capture(Net(), torch.randn(3, WIDTH), least_coverage=0.0)
    last = graph.operators[graph.operator_index["last"]]
    read = graph.tensors[last.inputs[0]].producer
    assert read is not None
    assert graph.operators[read].role is role
