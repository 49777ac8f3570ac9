"""Conversion with the captured graph: its names, its roles, and what needs no help."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from qsync_opt.errors import PlanError
from qsync_opt.graph import OperatorGraph, Role
from qsync_opt.kernels.rounding import Rounding
from qsync_opt.measure.capture import capture
from qsync_opt.precision import Precision
from qsync_opt.runtime.availability import supported_precisions
from qsync_opt.runtime.convert import convert, set_step
from qsync_opt.runtime.layers import STATE, Patched
from tests.low_precision import Attention, TinyGpt, gradients, language_loss, tokens

QKV = ("query", "key", "value")


def planned(graph: OperatorGraph, precision: Precision) -> dict[str, Precision]:
    """A precision for every operator; bf16 where it has no such form, followers as they fall."""
    handed: list[Precision] = []
    plan = {}
    for operator in graph.operators:
        if operator.role is Role.ADJUSTABLE:
            has = precision in supported_precisions(operator.kind)
            plan[operator.name] = precision if has else Precision.BF16
        elif operator.role is Role.FIXED:
            plan[operator.name] = Precision.FP32
        else:
            dtypes = {handed[index] for index in operator.follows}
            plan[operator.name] = dtypes.pop() if len(dtypes) == 1 else Precision.FP32
        handed.append(plan[operator.name].output)
    return plan


@pytest.fixture(scope="module")
def graph() -> OperatorGraph:
    torch.manual_seed(0)
    return capture(TinyGpt(layers=2), (tokens(), tokens()), language_loss, least_coverage=0.0)


def model_with(graph: OperatorGraph, plan: Mapping[str, Precision], **options: Any) -> TinyGpt:
    torch.manual_seed(0)
    model = TinyGpt(layers=2)
    convert(model, plan, graph=graph, emulate=True, **options)
    return model


@pytest.mark.parametrize("precision", Precision)
def test_the_graph_changes_no_result(graph: OperatorGraph, precision: Precision) -> None:
    plan = planned(graph, precision)
    torch.manual_seed(0)
    plain = TinyGpt(layers=2)
    convert(plain, plan, emulate=True)
    found = []
    for model in (model_with(graph, plan), plain):
        out = model(tokens())
        language_loss(out, tokens()).backward()
        found.append([out, *gradients(model).values()])
    assert all(map(torch.equal, *found))


def test_calls_that_need_no_help_get_none(graph: OperatorGraph) -> None:
    model = model_with(graph, planned(graph, Precision.BF16))
    patched = {type(module).__name__ for module in model.modules() if isinstance(module, Patched)}
    assert patched == {"PrecisionLinear", "PrecisionEmbedding"}
    mixed = planned(graph, Precision.BF16)
    mixed["blocks.1.attention.matmul.1"] = Precision.FP32
    model = model_with(graph, mixed)
    first, second = (block.attention for block in model.blocks)
    assert type(first) is Attention
    assert isinstance(second, Patched)
    assert model(tokens()).dtype is torch.bfloat16


def test_readers_of_one_tensor_draw_the_same_bits(graph: OperatorGraph) -> None:
    plan = planned(graph, Precision.INT8)
    model = model_with(graph, plan, rounding=Rounding.STOCHASTIC)
    set_step(model, 0)
    attention: Any = model.blocks[0].attention
    parts = [vars(getattr(attention, name))[STATE] for name in QKV]
    assert len({part.source for part in parts}) == 1
    assert len({part.input_draw() for part in parts}) == 1
    assert len({part.draw() for part in parts}) == 3
    other: Any = model.blocks[1].attention
    assert vars(other.query)[STATE].source != parts[0].source
    model(tokens()).float().sum().backward()


def test_the_last_reader_of_a_tensor_is_told(graph: OperatorGraph) -> None:
    model = model_with(graph, planned(graph, Precision.INT8))
    attention: Any = model.blocks[0].attention
    last = {name: vars(getattr(attention, name))[STATE].is_last_reader for name in QKV}
    assert last == {"query": False, "key": False, "value": True}


def test_names_are_those_of_the_graph(graph: OperatorGraph) -> None:
    plan = planned(graph, Precision.BF16)
    with pytest.raises(PlanError, match="must be an operator of the graph"):
        model_with(graph, plan | {"blocks.3.up": Precision.BF16})
    for name in ("head", "blocks.1.attention.matmul.1"):
        missing = {other: precision for other, precision in plan.items() if other != name}
        with pytest.raises(PlanError) as caught:
            model_with(graph, missing)
        assert caught.value.field == name
    with pytest.raises(PlanError, match="captured from another model"):
        convert(nn.Sequential(nn.Linear(2, 2)), plan, graph=graph)
