"""A plan of a captured graph's operators runs: the graph and `convert` mean the same names."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qsync_opt.graph import Role
from qsync_opt.measure.capture import capture
from qsync_opt.measure.step import call_model, loss_of, split_batch
from qsync_opt.precision import Precision
from qsync_opt.runtime.availability import available_precisions, supported_precisions
from qsync_opt.runtime.convert import convert, revert
from tests.unit.measure.test_capture import CASES

_DTYPES = {Precision.FP32: torch.float32, Precision.BF16: torch.bfloat16}


@pytest.mark.parametrize("name", CASES)
def test_random_plans_convert_and_hand_on_what_they_say(name: str) -> None:
    torch.manual_seed(0)
    model, batch, loss = CASES[name]()
    graph = capture(model, batch, loss, least_coverage=0.0)
    draw = random.Random(name)
    leader = {i: group.operators[0] for group in graph.groups for i in group.operators}
    plan: dict[str, Precision] = {}
    for index in graph.adjustable:
        op = graph.operators[index]
        if leader.get(index, index) < index:
            plan[op.name] = plan[graph.operators[leader[index]].name]
            continue
        options = supported_precisions(op.kind) & available_precisions("cpu")
        plan[op.name] = draw.choice(sorted(options))

    seen: dict[str, set[torch.dtype]] = {}

    def note(path: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: object, output: object) -> None:
            if isinstance(output, Tensor):
                seen.setdefault(path, set()).add(output.dtype)

        return hook

    handles = [module.register_forward_hook(note(path)) for path, module in model.named_modules()]
    convert(model, plan, graph=graph)
    inputs, target = split_batch(batch, loss)
    value = loss_of(call_model(model, inputs), target, loss)
    value.backward()  # type: ignore[no-untyped-call]
    for handle in handles:
        handle.remove()
    revert(model)
    assert torch.isfinite(value)
    for op in graph.operators:
        if op.role is Role.ADJUSTABLE and op.name == op.module:
            assert seen[op.name] == {_DTYPES[plan[op.name].output]}, op.name
