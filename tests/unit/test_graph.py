"""The graph's classes: every rule refused, one hash for one step, files that come back."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qsync_opt.errors import FormatError, GraphError
from qsync_opt.files import load_graph, save_graph
from qsync_opt.graph import (
    Coverage,
    GraphOperator,
    GraphParameter,
    GraphProvenance,
    GraphTensor,
    GroupReason,
    Operand,
    OperatorGraph,
    OperatorGroup,
    Origin,
    Role,
    SavedTensor,
    Signature,
)
from qsync_opt.precision import Precision


def operand(origin: Origin, *shape: int) -> Operand:
    return Operand(
        shape=shape, stride=(shape[1], 1), dtype="float32", origin=origin, requires_grad=True
    )


LINEAR = Signature(
    function="torch.nn.functional.linear",
    kind="linear",
    arguments='[[{"operand":0},{"operand":1}],{}]',
    operands=(operand(Origin.OPERATOR, 2, 4), operand(Origin.PARAMETER, 4, 4)),
    outputs=(((2, 4), "float32"),),
    training=True,
    parts=("mm",),
)
RELU = Signature(
    function="torch.nn.functional.relu",
    kind="relu",
    arguments='[[{"operand":0}],{"inplace":false}]',
    operands=(operand(Origin.OPERATOR, 2, 4),),
    outputs=(((2, 4), "float32"),),
    training=True,
)


def operator(name: str, role: Role, inputs: tuple[int, ...], output: int) -> GraphOperator:
    linear = len(inputs) == 2
    return GraphOperator(
        name=name,
        module=name,
        module_type="torch.nn.modules.linear.Linear",
        kind="linear" if linear else "relu",
        role=role,
        signature=0 if linear else 1,
        inputs=inputs,
        outputs=(output,),
        follows=(0,) if role is Role.FOLLOWER else (),
        parameters=(0,) if linear else (),
        differentiable=True,
        forward_flops=64 if linear else 0,
        backward_flops=128 if linear else 0,
        sequence_number=output,
    )


def tensor(
    storage: int, origin: Origin, producer: int | None, consumers: tuple[int, ...]
) -> GraphTensor:
    return GraphTensor(
        shape=(4, 4) if origin is Origin.PARAMETER else (2, 4),
        dtype="float32",
        size_bytes=64 if origin is Origin.PARAMETER else 32,
        storage=storage,
        origin=origin,
        producer=producer,
        parameter=0 if origin is Origin.PARAMETER else None,
        consumers=consumers,
        gradients=len(consumers),
    )


def tiny_graph() -> OperatorGraph:
    """x -> first -> relu -> second, the two with one weight."""
    return OperatorGraph(
        name="tiny",
        operators=(
            operator("first", Role.ADJUSTABLE, (0, 1), 2),
            operator("relu", Role.FOLLOWER, (2,), 3),
            operator("second", Role.ADJUSTABLE, (3, 1), 4),
        ),
        signatures=(LINEAR, RELU),
        tensors=(
            tensor(0, Origin.BATCH, None, (0,)),
            tensor(1, Origin.PARAMETER, None, (0, 2)),
            tensor(2, Origin.OPERATOR, 0, (1,)),
            tensor(3, Origin.OPERATOR, 1, (2,)),
            tensor(4, Origin.OPERATOR, 2, ()),
        ),
        saved=(
            SavedTensor(
                tensor=0,
                savers=(0,),
                elements=8,
                size_bytes=32,
                follows_precision=True,
                resident=True,
            ),
            SavedTensor(
                tensor=3,
                savers=(1, 2),
                kept_output=(1,),
                elements=8,
                size_bytes=32,
                follows_precision=True,
            ),
            SavedTensor(
                tensor=None, savers=(1,), elements=8, size_bytes=8, follows_precision=False
            ),
        ),
        parameters=(
            GraphParameter(
                name="first.weight",
                aliases=("second.weight",),
                shape=(4, 4),
                dtype="float32",
                requires_grad=True,
                operators=(0, 2),
            ),
        ),
        gradient_order=(0,),
        backward_order=(2, 1, 0),
        groups=(OperatorGroup(operators=(0, 2), reason=GroupReason.TIED_PARAMETER),),
        buffer_bytes=0,
        batch_bytes=32,
        coverage=Coverage(
            forward_s=0.25, backward_s=0.75, explained_s=0.96, missing={"backward: X": 0.04}
        ),
        provenance=GraphProvenance(
            model="tiny.py",
            sizes={"batch_size": "2"},
            batch={"x": "float32[2, 4]"},
            device_type="cpu",
            device="x86_64",
            versions={"torch": "2.11.0"},
            date="2026-01-01T00:00:00+00:00",
        ),
    )


def with_row(field: str, index: int, **changes: Any) -> Callable[[OperatorGraph], OperatorGraph]:
    """The graph with one row of one table changed."""

    def change(graph: OperatorGraph) -> OperatorGraph:
        rows = list(getattr(graph, field))
        rows[index] = replace(rows[index], **changes)
        changed: Any = {field: tuple(rows)}
        return replace(graph, **changed)

    return change


BROKEN: list[tuple[str, Callable[[OperatorGraph], OperatorGraph]]] = [
    ("operators: must not be empty", lambda g: replace(g, operators=())),
    ("operators: must have unique names, got 'first'", with_row("operators", 2, name="first")),
    ("operators: must have unique names, got ''", with_row("operators", 1, name="")),
    (
        r"operators\[1\].signature: must be indices from 0 to 1",
        with_row("operators", 1, signature=2),
    ),
    (r"operators\[1\].inputs: must be indices from 0 to 4", with_row("operators", 1, inputs=(9,))),
    (r"operators\[1\].inputs: must be one per operand", with_row("operators", 1, inputs=(2, 2))),
    (r"operators\[1\].kind: must be that of its", with_row("operators", 1, kind="gelu")),
    (r"operators\[1\].follows: must be indices", with_row("operators", 1, follows=(1,))),
    (r"operators\[1\].follows: must be given exactly", with_row("operators", 1, follows=())),
    (r"operators\[0\].forward_flops: must be >= 0", with_row("operators", 0, forward_flops=-1)),
    (r"operators\[2\].outputs: must have it as", with_row("operators", 2, outputs=(3,))),
    (r"tensors\[3\].producer: must be given exactly", with_row("tensors", 3, producer=None)),
    (r"tensors\[2\].producer: must stand before", with_row("tensors", 2, producer=1)),
    (r"tensors\[2\].consumers: must be the operators", with_row("tensors", 2, consumers=(1, 2))),
    (r"tensors\[1\].consumers: must ascend", with_row("tensors", 1, consumers=(2, 0))),
    (r"tensors\[1\].parameter: must be given", with_row("tensors", 1, parameter=None)),
    (r"tensors\[2\].held_until: must be given only", with_row("tensors", 2, held_until=0)),
    (r"tensors\[0\].held_until: must be given only", with_row("tensors", 0, held_until=1)),
    (r"tensors\[2\].held_until: must be indices", with_row("tensors", 2, held_until=3)),
    (r"tensors\[1\].size_bytes: must be >= 0", with_row("tensors", 1, size_bytes=-1)),
    (r"saved\[1\].savers: must not be empty", with_row("saved", 1, savers=())),
    (r"saved\[1\].kept_output: must be among", with_row("saved", 1, kept_output=(0,))),
    (r"saved\[1\].tensor: must be indices", with_row("saved", 1, tensor=5)),
    (r"saved\[1\].elements: must be >= 0", with_row("saved", 1, elements=-8)),
    (r"parameters\[0\].operators: must be the", with_row("parameters", 0, operators=(0,))),
    ("parameters: must have unique", with_row("parameters", 0, aliases=("first.weight",))),
    ("gradient_order: must have each once", lambda g: replace(g, gradient_order=(0, 0))),
    ("gradient_order: must be indices", lambda g: replace(g, gradient_order=(1,))),
    ("gradient_order: must have only tr", with_row("parameters", 0, requires_grad=False)),
    ("backward_order: must be the operators", lambda g: replace(g, backward_order=(2, 1))),
    (r"groups\[0\].operators: must be two", with_row("groups", 0, operators=(0,))),
    (r"groups\[0\].operators: must be adjustable", with_row("groups", 0, operators=(0, 1))),
]


@pytest.mark.parametrize(("message", "change"), BROKEN)
def test_a_graph_that_breaks_a_rule_is_refused(
    message: str, change: Callable[[OperatorGraph], OperatorGraph]
) -> None:
    with pytest.raises(GraphError, match="^" + message):
        change(tiny_graph())


def test_what_is_asked_of_a_graph() -> None:
    graph = tiny_graph()
    assert graph.operator_index["second"] == 2
    assert graph.adjustable == (0, 2)
    assert graph.completes == ((0,), (), ())
    assert graph.signature_of(1) is RELU
    assert graph.parameters[0].elements == 16
    assert graph.coverage.share == pytest.approx(0.96)


@pytest.mark.parametrize("dtype", list(Precision))
def test_the_bytes_of_a_copy(dtype: Precision) -> None:
    batch, activation, mask = tiny_graph().saved
    assert activation.bytes_at(dtype) == 8 * dtype.element_bytes
    assert mask.bytes_at(dtype) == 8
    # The batch is there anyway: only another dtype takes more.
    assert batch.bytes_at(dtype) == (
        0 if dtype.storage is Precision.FP32 else 8 * dtype.element_bytes
    )


def test_the_hash_is_that_of_the_step() -> None:
    graph = tiny_graph()
    assert graph.sha256 == tiny_graph().sha256
    later = replace(
        graph,
        name="other",
        coverage=Coverage(forward_s=1, backward_s=1, explained_s=2),
        provenance=replace(graph.provenance, date="2027-01-01T00:00:00+00:00"),
    )
    held = with_row("tensors", 2, held_until=2)(graph)
    for other in (later, held):
        assert other.sha256 == graph.sha256
        assert other != graph
    for change in (
        with_row("operators", 0, name="renamed"),
        with_row("saved", 0, size_bytes=33),
        with_row("signatures", 1, training=False),
        with_row("tensors", 4, shape=(4, 2)),
        lambda g: replace(g, groups=()),
    ):
        assert change(graph).sha256 != graph.sha256


@pytest.mark.parametrize("name", ["graph.json", "graph.json.gz"])
def test_a_graph_comes_back_and_equal_graphs_give_equal_bytes(name: str, tmp_path: Path) -> None:
    graph = with_row("tensors", 2, held_until=2)(tiny_graph())
    save_graph(graph, tmp_path / name)
    again = load_graph(tmp_path / name)
    assert again == graph
    assert again.tensors == graph.tensors
    (tmp_path / "other").mkdir()
    save_graph(again, tmp_path / "other" / name)
    assert (tmp_path / "other" / name).read_bytes() == (tmp_path / name).read_bytes()


def _set(path: list[Any], value: object) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        target: Any = document
        for step in path[:-1]:
            target = target[step]
        target[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("format: must be 'qsync-opt/graph'", _set(["format"], "qsync-opt/plan")),
        ("version: must be a version of qsync-opt/graph", _set(["version"], 2)),
        (r"operators\[0\].role: must be one of adjustable", _set(["operators", 0, "role"], "x")),
        (r"operators\[0\].signature: must be indices", _set(["operators", 0, "signature"], 7)),
        (r"tensors\[0\].origin: must be one of operator", _set(["tensors", 0, "origin"], "x")),
        (r"groups\[0\].reason: must be one of", _set(["groups", 0, "reason"], "x")),
        (r"saved\[0\].bytes: must be a whole number", _set(["saved", 0, "bytes"], 1.5)),
        (r"saved\[0\]: must have only the keys", _set(["saved", 0, "more"], 1)),
        (
            r"signatures\[0\].operands\[0\].bounds: must be the smallest",
            _set(["signatures", 0, "operands", 0, "bounds"], [1]),
        ),
    ],
)
def test_a_bad_file_is_refused_with_its_place(
    message: str, change: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    path = tmp_path / "graph.json"
    save_graph(tiny_graph(), path)
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    with pytest.raises(FormatError, match=message):
        load_graph(path)


def test_a_file_whose_graph_breaks_a_rule_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    save_graph(tiny_graph(), path)
    document = json.loads(path.read_text())
    document["operators"][1]["inputs"] = [3]
    path.write_text(json.dumps(document))
    with pytest.raises(GraphError, match="tensors"):
        load_graph(path)
