"""What real models do: tied weights, shared and frozen modules, functional calls, any batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from qsync_opt.errors import CaptureError
from qsync_opt.graph import GroupReason, OperatorGraph, Role
from qsync_opt.measure.capture import capture
from qsync_opt.precision import Precision
from tests.unit.measure.nets import (
    Chain,
    Mixed,
    capture_chain,
    chain_batch,
    checkpointed,
    clamped,
    mixed_batch,
    names,
)


def roles(graph: OperatorGraph) -> dict[str, Role]:
    return {op.name: op.role for op in graph.operators}


def members(graph: OperatorGraph) -> list[tuple[list[str], GroupReason]]:
    return [
        ([graph.operators[i].name for i in group.operators], group.reason) for group in graph.groups
    ]


def parameters_of(graph: OperatorGraph, name: str) -> list[str]:
    op = graph.operators[graph.operator_index[name]]
    return [graph.parameters[index].name for index in op.parameters]


def test_modules_give_their_names_and_calls_add_the_function() -> None:
    graph = capture_chain(lambda net, h: functional.relu(functional.relu(net.block(h)) * 2))
    assert names(graph) == [
        *("first", "block.0", "block.1", "relu", "mul", "relu.1", "last", "loss.cross_entropy")
    ]


def test_views_are_folded() -> None:
    graph = capture_chain(
        lambda net, h: h.view(-1, 2, 4).transpose(1, 2).transpose(1, 2).flatten(1)
    )
    assert names(graph) == ["first", "last", "loss.cross_entropy"]
    first, last = graph.operators[:2]
    assert first.outputs[0] in last.inputs


def test_a_view_whose_backward_computes_stays() -> None:
    graph = capture_chain(lambda net, h: torch.cat([h[:, :4], h[:, :4]], 1))
    assert names(graph)[:4] == ["first", "getitem", "getitem.1", "cat"]


def test_gradients_that_are_added_up_are_counted() -> None:
    graph = capture_chain(lambda net, h: h + net.inner(h) + net.block(h))
    tensor = graph.operators[graph.operator_index["first"]].outputs[0]
    assert graph.tensors[tensor].gradients == 3
    assert [graph.operators[i].name for i in graph.tensors[tensor].consumers] == [
        *("inner", "add", "block.0")
    ]


def test_a_tensor_is_held_as_long_as_the_code_of_the_model_holds_it() -> None:
    def middle(net: Any, h: Tensor) -> Tensor:
        wide = net.inner(h)
        view = wide.view(-1)
        del wide  # the view holds its memory
        low = functional.relu(net.block(h))
        del h
        out: Tensor = functional.gelu(low) + view.view(-1, 8)
        return out

    graph = capture_chain(middle)
    held = {
        row.name: graph.operators[held].name
        for row in graph.operators
        for output in row.outputs
        if (held := graph.tensors[output].held_until) is not None
    }
    assert held == {
        "first": "add",  # by the caller of the middle
        "inner": "add",
        "block.0": "relu",  # overwritten in place: one memory
        "block.1": "relu",
        "relu": "add",
        "gelu": "add",
        "add": "last",
        "last": "loss.cross_entropy",
        "loss.cross_entropy": "loss.cross_entropy",
    }


def test_a_module_called_twice_is_two_operators_of_one_group() -> None:
    graph = capture_chain(lambda net, h: net.inner(functional.relu(net.inner(h))))
    assert members(graph) == [(["inner", "inner.1"], GroupReason.SHARED_MODULE)]
    weight = next(p for p in graph.parameters if p.name == "inner.weight")
    assert [graph.operators[i].name for i in weight.operators] == ["inner", "inner.1"]
    assert weight in [graph.parameters[i] for i in graph.completes[weight.operators[0]]]


def test_a_block_called_twice_shares_what_is_inside() -> None:
    graph = capture_chain(lambda net, h: net.block(net.block(h)))
    assert members(graph) == [(["block.0", "block.0.1"], GroupReason.SHARED_MODULE)]


def test_tied_weights_are_one_parameter_with_two_names() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(7, 4)
            self.head = nn.Linear(4, 7, bias=False)
            self.head.weight = self.emb.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.emb(tokens).relu())  # type: ignore[no-any-return]

    batch = (torch.randint(0, 7, (5,)), torch.randint(0, 7, (5,)))
    graph = capture(Tied(), batch, functional.cross_entropy, least_coverage=0.0)
    assert [(p.name, p.aliases) for p in graph.parameters] == [("emb.weight", ("head.weight",))]
    assert members(graph) == [(["emb", "head"], GroupReason.TIED_PARAMETER)]
    # Its gradient is complete when the look-up's backward is over, and the two are added.
    assert graph.completes == ((0,), (), (), ())
    tensor = next(t for t in graph.tensors if t.parameter == 0)
    assert tensor.gradients == 2


def test_frozen_layers_are_operators_without_gradient() -> None:
    net = Chain(lambda net, h: net.inner(h).relu())
    net.first.requires_grad_(False)
    net.inner.weight.requires_grad_(False)
    graph = capture(net, chain_batch(), functional.cross_entropy, least_coverage=0.0)
    first = graph.operators[graph.operator_index["first"]]
    assert first.role is Role.ADJUSTABLE
    assert not first.differentiable
    assert first.backward_flops == 0
    trained = {graph.parameters[i].name for i in graph.gradient_order}
    assert trained == {"inner.bias", "last.weight", "last.bias"}
    assert parameters_of(graph, "inner") == ["inner.weight", "inner.bias"]


def test_products_inside_a_function_are_operators_of_their_own() -> None:
    torch.manual_seed(0)
    graph = capture(Mixed(), mixed_batch(), functional.cross_entropy, least_coverage=0.0)
    inside = [op for op in graph.operators if op.module == "encoder.self_attn"]
    adjustable = [op.name for op in inside if op.role is Role.ADJUSTABLE]
    assert adjustable == [
        "encoder.self_attn.linear",
        "encoder.self_attn.scaled_dot_product_attention",
        "encoder.self_attn.linear.1",
    ]
    assert parameters_of(graph, adjustable[2]) == [
        "encoder.self_attn.out_proj.weight",
        "encoder.self_attn.out_proj.bias",
    ]
    assert roles(graph)["emb"] is Role.ADJUSTABLE
    assert roles(graph)["matmul"] is Role.ADJUSTABLE
    assert roles(graph)["matmul.1"] is Role.ADJUSTABLE


def test_bookkeeping_does_not_take_the_name_of_a_module() -> None:
    torch.manual_seed(0)
    graph = capture(Mixed(), mixed_batch(), functional.cross_entropy, least_coverage=0.0)
    assert roles(graph)["bn"] is Role.FOLLOWER
    assert roles(graph)["bn.add_"] is Role.FIXED  # counts the batches


def test_a_functional_product_alone_in_a_module_names_its_function() -> None:
    class Scores(nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            return q @ k

    class Net(Chain):
        def __init__(self) -> None:
            super().__init__(lambda net, h: net.scores(h, h.t()) @ h)
            self.scores = Scores()

    graph = capture(Net(), chain_batch(), functional.cross_entropy, least_coverage=0.0)
    assert names(graph)[:3] == ["first", "scores.matmul", "matmul"]


def test_a_custom_function_is_known_by_what_it_calls() -> None:
    graph = capture_chain(clamped)
    assert names(graph) == ["first", "clamp", "mul", "last", "loss.cross_entropy"]
    assert graph.operators[2].differentiable
    saved = next(row for row in graph.saved if 2 in row.savers)
    assert graph.tensors[saved.tensor or 0].producer == 1


def test_an_input_and_an_output_in_one_memory_are_saved_once() -> None:
    graph = capture_chain(lambda net, h: net.block(net.inner(h)))
    relu = graph.operator_index["block.1"]
    last = graph.operator_index["last"]
    (row,) = [row for row in graph.saved if relu in row.savers]
    assert row.savers == (relu, last)
    assert row.kept_output == (relu,)
    assert row.bytes_at(Precision.BF16) * 2 == row.size_bytes == row.bytes_at(Precision.FP32)


def test_masks_and_indices_keep_their_size_and_copies_of_the_batch_take_more() -> None:
    graph = capture_chain(lambda net, h: functional.max_pool1d(h[None], 1)[0])
    pool = graph.operator_index["max_pool1d"]
    own = [row for row in graph.saved if row.savers == (pool,) and row.tensor is None]
    assert [row.follows_precision for row in own] == [False]
    batch = next(row for row in graph.saved if row.savers == (0,))
    assert batch.resident
    assert batch.bytes_at(Precision.FP32) == batch.bytes_at(Precision.TF32) == 0
    assert batch.bytes_at(Precision.INT8) * 4 == batch.size_bytes


def test_a_cast_to_fp32_in_the_model_stays() -> None:
    graph = capture_chain(lambda net, h: h.float() * 2 + h)
    assert roles(graph)["float"] is Role.FIXED
    assert roles(graph)["mul"] is Role.FIXED  # reads nothing but fp32
    assert roles(graph)["add"] is Role.FIXED
    product = graph.operators[graph.operator_index["first"]].outputs[0]
    readers = [graph.operators[i].name for i in graph.tensors[product].consumers]
    assert readers == ["float", "add"]


def test_what_the_loss_does_not_need_is_fixed() -> None:
    def aside(net: Any, h: Tensor) -> Tensor:
        with torch.no_grad():
            net.inner(h)
        net.block(h)
        return h

    graph = capture_chain(aside)
    assert roles(graph)["inner"] is roles(graph)["block.0"] is Role.FIXED
    assert roles(graph)["last"] is Role.ADJUSTABLE
    unused = {p.name for p in graph.parameters} - {
        graph.parameters[i].name for i in graph.gradient_order
    }
    assert unused == {"inner.weight", "inner.bias", "block.0.weight", "block.0.bias"}


class Keywords(nn.Module):
    """Takes keyword arguments and gives its loss in several shapes."""

    def __init__(self, shape: str) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.shape = shape

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        scores = self.fc(x)
        loss = functional.cross_entropy(scores, labels) if labels is not None else scores.sum()
        return {
            "scalar": loss,
            "dict": {"loss": loss, "scores": scores},
            "tuple": (loss, scores),
            "attribute": SimpleNamespace(loss=loss),
        }[self.shape]


@pytest.mark.parametrize("shape", ["scalar", "dict", "tuple", "attribute"])
def test_a_loss_that_the_model_returns(shape: str) -> None:
    x, labels = chain_batch()
    for batch in ({"x": x, "labels": labels}, (x, labels), x):
        graph = capture(Keywords(shape), batch, least_coverage=0.0)
        assert names(graph)[0] == "fc"


def test_a_model_that_takes_a_mapping_whole() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return functional.cross_entropy(self.fc(batch["x"]), batch["y"])

    x, labels = chain_batch()
    graph = capture(Whole(), {"x": x, "y": labels}, least_coverage=0.0)
    assert names(graph) == ["fc", "cross_entropy"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_is_refused(reentrant: bool) -> None:
    with pytest.raises(CaptureError, match="block.* runs again during backward .*Turn checkpoint"):
        capture_chain(checkpointed(reentrant))


def test_recomputation_without_a_module_is_refused() -> None:
    from torch.utils.checkpoint import checkpoint

    with pytest.raises(CaptureError, match="runs again during backward"):
        capture_chain(lambda net, h: checkpoint(lambda x: x.relu() * 2, h, use_reentrant=False))


def test_recomputation_is_seen_where_backward_counts_its_nodes_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU, whose backward has a thread and a count of nodes of its own."""
    from torch.utils.checkpoint import checkpoint

    monkeypatch.setattr("qsync_opt.measure.capture.sequence_number", lambda: 0)
    capture_chain()
    with pytest.raises(CaptureError, match="runs again during backward"):
        capture_chain(lambda net, h: checkpoint(lambda x: x.relu() * 2, h, use_reentrant=False))
