"""Captures on a GPU: what is saved is what the allocator holds, roles are those of CUDA."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from qsync_opt.graph import OperatorGraph, Role
from qsync_opt.measure.capture import capture
from qsync_opt.measure.model_file import load_model
from qsync_opt.measure.step import call_model, loss_of, split_batch, to_device

pytestmark = pytest.mark.gpu

MODELS = Path(__file__).parents[3] / "models"
SIZES: dict[str, dict[str, object]] = {
    "resnet50": {"batch_size": 32},
    "vgg16_bn": {"batch_size": 16},
    "bert": {"batch_size": 8, "layers": 4},
    "gpt": {"batch_size": 2, "layers": 4},
}


def build(name: str) -> tuple[nn.Module, Any, Any]:
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    model, batch, loss = load_model(MODELS / f"{name}.py", SIZES[name])
    return model.cuda(), to_device(batch, torch.device("cuda")), loss


@pytest.fixture(scope="module", params=SIZES, name="case")
def _case(request: pytest.FixtureRequest) -> tuple[Any, OperatorGraph]:
    case = build(request.param)
    return case, capture(*case)


def test_saved_bytes_are_what_forward_leaves_allocated(case: tuple[Any, OperatorGraph]) -> None:
    (model, batch, loss), graph = case
    inputs, target = split_batch(batch, loss)
    held = 0
    for _ in range(2):  # the first warms up workspaces
        model.zero_grad(set_to_none=True)
        gc.collect()
        before = torch.cuda.memory_allocated()
        value = loss_of(call_model(model, inputs), target, loss)
        held = torch.cuda.memory_allocated() - before
        value.backward()  # type: ignore[no-untyped-call]
        del value
    saved = sum(row.size_bytes for row in graph.saved if not row.resident)
    assert saved == pytest.approx(held, rel=0.02)


def test_norms_and_losses_are_fixed_and_products_adjustable(
    case: tuple[Any, OperatorGraph],
) -> None:
    graph = case[1]
    for op in graph.operators:
        if op.kind in ("layer_norm", "softmax", "cross_entropy"):
            assert op.role is Role.FIXED
        if op.kind in ("linear", "conv2d", "scaled_dot_product_attention"):
            assert op.role is Role.ADJUSTABLE
        if op.kind in ("relu", "gelu", "batch_norm", "max_pool2d"):
            assert op.role is Role.FOLLOWER
    assert list(graph.backward_order) == sorted(graph.backward_order, reverse=True)
    assert graph.coverage.share >= 0.95
