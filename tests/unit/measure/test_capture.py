"""Laws of a captured graph, each against an oracle that shares no code with the capture."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from qsync_opt.files import load_graph, save_graph
from qsync_opt.graph import OperatorGraph, Origin, Role
from qsync_opt.measure.calls import decode_arguments, find_function, tensors_in
from qsync_opt.measure.capture import capture
from qsync_opt.measure.model_file import load_model
from qsync_opt.measure.step import call_model, leaves, loss_of, split_batch
from tests.unit.measure.nets import Chain, Mixed, chain_batch, clamped, mixed_batch

MODELS = Path(__file__).parents[3] / "models"

Case = tuple[nn.Module, Any, Any]

_TINY_BERT = {"length": 16, "layers": 2, "heads": 2, "width": 32, "vocabulary": 100}


def chain(middle: Callable[[Any, Tensor], Tensor] | None = None) -> Case:
    return Chain(middle), chain_batch(), functional.cross_entropy


def overwritten(net: Any, h: Tensor) -> Tensor:
    h = h * 2
    h[:, 0] = 0
    h += 1
    return functional.relu_(h)


def model_file(name: str, **sizes: object) -> Callable[[], Case]:
    return lambda: load_model(MODELS / f"{name}.py", sizes)


CASES: dict[str, Callable[[], Case]] = {
    "chain": chain,
    "in place": lambda: chain(overwritten),
    "block": lambda: chain(lambda net, h: net.block(h)),
    "custom function": lambda: chain(clamped),
    "module twice": lambda: chain(lambda net, h: net.inner(net.inner(h).relu())),
    "slices": lambda: chain(lambda net, h: torch.cat([h[:, 4:], h[:, :4]], 1)),
    "dropout": lambda: chain(lambda net, h: functional.dropout(h, 0.5)),
    "mixed": lambda: (Mixed(), mixed_batch(), functional.cross_entropy),
    "small_cnn": model_file("small_cnn", batch_size=4),
    "small_gpt": model_file("small_gpt", batch_size=2, length=16, dropout=0.1),
    "bert": model_file("bert", batch_size=2, **_TINY_BERT),
    "roberta": model_file("roberta", batch_size=2, **_TINY_BERT),
    "bert choice": model_file("bert", batch_size=2, task="multiple_choice", **_TINY_BERT),
}


@pytest.fixture(scope="module", params=CASES, name="case")
def _case(request: pytest.FixtureRequest) -> tuple[Case, OperatorGraph]:
    torch.manual_seed(0)
    case = CASES[request.param]()
    return case, capture(*case, least_coverage=0.0)


def run_step(case: Case) -> None:
    """The step again, without anything of the capture's recording."""
    model, batch, loss = case
    inputs, target = split_batch(batch, loss)
    model.zero_grad(set_to_none=True)
    loss_of(call_model(model, inputs), target, loss).backward()  # type: ignore[no-untyped-call]
    model.zero_grad(set_to_none=True)


def test_producers_stand_before_consumers(case: tuple[Case, OperatorGraph]) -> None:
    graph = case[1]
    made: set[int] = set()
    for op in graph.operators:
        for index in op.inputs:
            assert graph.tensors[index].producer is None or index in made
        made |= set(op.outputs)


def test_operators_have_their_own_names(case: tuple[Case, OperatorGraph]) -> None:
    found = [op.name for op in case[1].operators]
    assert len(set(found)) == len(found)


def test_saved_bytes_are_those_of_the_saved_storages(case: tuple[Case, OperatorGraph]) -> None:
    (model, batch, loss), graph = case
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        alias = tensor.detach()
        kept[alias.untyped_storage().data_ptr()] = alias  # held, so no address comes twice
        return alias

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run_step((model, batch, loss))
    always = [*model.parameters(), *model.buffers(), *(tensor for _, tensor in leaves(batch))]
    for tensor in always:
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    expected = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    assert sum(row.size_bytes for row in graph.saved if not row.resident) == expected


def test_flops_are_those_of_torch(case: tuple[Case, OperatorGraph]) -> None:
    # Torch cannot count the fused attention of a CPU, so its counter sees the plain form.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        run_step(case[0])
    graph = case[1]
    total = sum(op.forward_flops + op.backward_flops for op in graph.operators)
    assert total == counter.get_total_flops()


def test_every_gradient_is_completed_once(case: tuple[Case, OperatorGraph]) -> None:
    (model, batch, loss), graph = case
    inputs, target = split_batch(batch, loss)
    loss_of(call_model(model, inputs), target, loss).backward()  # type: ignore[no-untyped-call]
    expected = {name for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    order = [graph.parameters[index].name for index in graph.gradient_order]
    assert sorted(order) == sorted(expected)
    assert sorted(i for row in graph.completes for i in row) == sorted(graph.gradient_order)


def test_gradients_are_complete_in_the_order_of_backward(
    case: tuple[Case, OperatorGraph],
) -> None:
    graph = case[1]
    place = {operator: i for i, operator in enumerate(graph.backward_order)}
    completed_by = {i: op for op, row in enumerate(graph.completes) for i in row}
    first = [place[completed_by[index]] for index in graph.gradient_order]
    assert first == sorted(first)


def test_backward_is_the_reverse_of_forward(case: tuple[Case, OperatorGraph]) -> None:
    order = case[1].backward_order
    assert list(order) == sorted(order, reverse=True)


def test_what_completes_a_gradient_has_a_backward(case: tuple[Case, OperatorGraph]) -> None:
    graph = case[1]
    for op, completed in zip(graph.operators, graph.completes, strict=True):
        assert op.differentiable or not completed
        assert op.differentiable == (op.sequence_number is not None)


def test_the_file_holds_the_graph(case: tuple[Case, OperatorGraph], tmp_path: Any) -> None:
    for name in ("graph.json", "graph.json.gz"):
        save_graph(case[1], tmp_path / name)
        loaded = load_graph(tmp_path / name)
        assert loaded == case[1]
        assert loaded.operators == case[1].operators
        assert loaded.signatures == case[1].signatures


def test_every_operator_can_run_again_from_its_signature(
    case: tuple[Case, OperatorGraph],
) -> None:
    for signature in case[1].signatures:
        operands = []
        for operand in signature.operands:
            dtype = getattr(torch, operand.dtype)
            low, high = operand.bounds or (0, 1)
            size = 1 + sum(
                (n - 1) * s for n, s in zip(operand.shape, operand.stride, strict=True) if n
            )
            storage = torch.randint(low, high + 1, (size,)).to(dtype)
            tensor = storage.as_strided(operand.shape, operand.stride)
            operands.append(tensor.clone() if 0 in operand.stride else tensor)
        args, kwargs = decode_arguments(signature.arguments, operands, torch.device("cpu"))
        result = tensors_in(find_function(signature.function)(*args, **kwargs))
        found = [
            (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for tensor in result
        ]
        if found:  # what writes into its operands may return nothing
            assert list(signature.outputs) in (found, []), signature


def test_a_gradient_is_complete_after_the_first_user_with_a_backward() -> None:
    def twice(net: Any, h: Tensor) -> Tensor:
        with torch.no_grad():
            scale = net.inner(h).mean()
        return net.inner(h) * scale  # type: ignore[no-any-return]

    graph = capture(*chain(twice), least_coverage=0.0)
    weight = next(p for p in graph.parameters if p.name == "inner.weight")
    early, late = weight.operators
    assert not graph.operators[early].differentiable
    assert graph.completes[early] == ()
    assert graph.parameters.index(weight) in graph.completes[late]


def test_equal_steps_give_equal_graphs(case: tuple[Case, OperatorGraph]) -> None:
    assert capture(*case[0], least_coverage=0.0).sha256 == case[1].sha256


def test_all_time_is_explained(case: tuple[Case, OperatorGraph]) -> None:
    coverage = case[1].coverage
    assert coverage.share == pytest.approx(1.0)
    assert not coverage.missing
    assert coverage.forward_s > 0
    assert coverage.backward_s > 0


def test_a_follower_follows_operators_that_can_be_lower(
    case: tuple[Case, OperatorGraph],
) -> None:
    graph = case[1]
    for op in graph.operators:
        if op.role is Role.FOLLOWER:
            assert all(graph.operators[i].role is not Role.FIXED for i in op.follows)


def test_memory_needed_by_views_is_that_of_what_they_view(
    case: tuple[Case, OperatorGraph],
) -> None:
    by_storage: dict[int, set[int]] = {}
    for tensor in case[1].tensors:
        by_storage.setdefault(tensor.storage, set()).add(tensor.size_bytes)
    assert all(len(sizes) == 1 for sizes in by_storage.values())


@pytest.mark.parametrize("name", ["mixed", "bert"])
def test_the_model_is_left_as_it_was(name: str) -> None:
    torch.manual_seed(0)
    random.seed(0)
    model, batch, loss = CASES[name]()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    gradients = [p.grad for p in model.parameters()]
    state = {key: value.clone() for key, value in model.state_dict().items()}
    contents = {key: tensor.clone() for key, tensor in leaves(batch)}
    generator = torch.random.get_rng_state()
    capture(model, batch, loss, least_coverage=0.0)
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert all(bool((p.grad == 1).all()) for p in model.parameters() if p.grad is not None)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert all(torch.equal(tensor, contents[key]) for key, tensor in leaves(batch))
    assert torch.equal(generator, torch.random.get_rng_state())
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    assert not sum(hooks)
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_tensors_of_the_batch_and_parameters_have_no_producer(
    case: tuple[Case, OperatorGraph],
) -> None:
    (model, batch, _), graph = case
    shapes = [t.shape for t in graph.tensors if t.origin is Origin.PARAMETER]
    assert len(shapes) == len({p for op in graph.operators for p in op.parameters})
    assert graph.batch_bytes == sum(t.numel() * t.element_size() for _, t in leaves(batch))
    assert len(graph.parameters) == len(list(model.parameters()))
