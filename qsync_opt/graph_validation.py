"""The rules of an `OperatorGraph`, checked once, when it is built."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from qsync_opt.errors import GraphError
from qsync_opt.graph import OperatorGraph, Origin, Role


def validate_graph(graph: OperatorGraph) -> None:
    """Raise for the first rule that the graph breaks.

    Raises:
        GraphError: names the field, the rule and the value.
    """
    _check_names(graph)
    _check_indices(graph)
    _check_tensors(graph)
    _check_operators(graph)
    _check_saved(graph)
    _check_parameters(graph)
    _check_groups(graph)


def _require(holds: bool, field: str, rule: str, value: object) -> None:
    if not holds:
        raise GraphError(field, rule, value, "Capture the model again with this release")


def _check_names(graph: OperatorGraph) -> None:
    _require(bool(graph.operators), "operators", "must not be empty", graph.operators)
    for field, names in (
        ("operators", [op.name for op in graph.operators]),
        ("parameters", [name for row in graph.parameters for name in (row.name, *row.aliases)]),
    ):
        seen: set[str] = set()
        for name in names:
            _require(bool(name) and name not in seen, field, "must have unique names", name)
            seen.add(name)


def _check_indices(graph: OperatorGraph) -> None:
    """Every index points into its tuple; where an order is promised, it ascends."""
    operators, tensors = len(graph.operators), len(graph.tensors)
    for i, op in enumerate(graph.operators):
        where = f"operators[{i}]"
        _in_range((op.signature,), len(graph.signatures), f"{where}.signature")
        _in_range(op.inputs, tensors, f"{where}.inputs")
        _in_range(op.outputs, tensors, f"{where}.outputs")
        _ascending(op.follows, i, f"{where}.follows")
        _ascending(op.parameters, len(graph.parameters), f"{where}.parameters")
    for i, tensor in enumerate(graph.tensors):
        _ascending(tensor.consumers, operators, f"tensors[{i}].consumers")
        for index, size, name in (
            (tensor.producer, operators, "producer"),
            (tensor.parameter, len(graph.parameters), "parameter"),
            (tensor.held_until, operators, "held_until"),
        ):
            if index is not None:
                _in_range((index,), size, f"tensors[{i}].{name}")
    for i, saved in enumerate(graph.saved):
        _ascending(saved.savers, operators, f"saved[{i}].savers")
        if saved.tensor is not None:
            _in_range((saved.tensor,), tensors, f"saved[{i}].tensor")
    for i, parameter in enumerate(graph.parameters):
        _ascending(parameter.operators, operators, f"parameters[{i}].operators")
    _in_range(graph.gradient_order, len(graph.parameters), "gradient_order")
    _in_range(graph.backward_order, operators, "backward_order")
    for i, group in enumerate(graph.groups):
        _ascending(group.operators, operators, f"groups[{i}].operators")


def _in_range(indices: Iterable[int], size: int, field: str) -> None:
    for index in indices:
        _require(0 <= index < size, field, f"must be indices from 0 to {size - 1}", index)


def _ascending(indices: Sequence[int], size: int, field: str) -> None:
    _in_range(indices, size, field)
    rises = all(a < b for a, b in zip(indices, indices[1:], strict=False))
    _require(rises, field, "must ascend without repeats", indices)


def _check_tensors(graph: OperatorGraph) -> None:
    readers = _users(graph, lambda i: graph.operators[i].inputs, len(graph.tensors))
    for i, tensor in enumerate(graph.tensors):
        where = f"tensors[{i}]"
        made = tensor.origin is Origin.OPERATOR
        _require(
            (tensor.producer is not None) == made,
            f"{where}.producer",
            "must be given exactly where the origin is an operator",
            tensor.producer,
        )
        _require(
            (tensor.parameter is not None) == (tensor.origin is Origin.PARAMETER),
            f"{where}.parameter",
            "must be given exactly where the origin is a parameter",
            tensor.parameter,
        )
        first = tensor.consumers[0] if tensor.consumers else len(graph.operators)
        _require(
            tensor.producer is None or tensor.producer < first,
            f"{where}.producer",
            "must stand before the consumers",
            (tensor.producer, tensor.consumers),
        )
        _require(
            tensor.held_until is None or (made and tensor.held_until == tensor.last_needed),
            f"{where}.held_until",
            "must be given only where the origin is an operator, and not before a consumer",
            tensor.held_until,
        )
        _require(
            tensor.consumers == readers[i],
            f"{where}.consumers",
            "must be the operators that have it as input",
            (tensor.consumers, readers[i]),
        )
        for name in ("size_bytes", "gradients"):
            size = getattr(tensor, name)
            _require(size >= 0, f"{where}.{name}", "must be >= 0", size)


def _users(
    graph: OperatorGraph, used: Callable[[int], Iterable[int]], count: int
) -> list[tuple[int, ...]]:
    """For each of `count` things the operators that use it, ascending."""
    rows: list[list[int]] = [[] for _ in range(count)]
    for operator in range(len(graph.operators)):
        for thing in sorted(set(used(operator))):
            rows[thing].append(operator)
    return list(map(tuple, rows))


def _check_operators(graph: OperatorGraph) -> None:
    for i, op in enumerate(graph.operators):
        where = f"operators[{i}]"
        signature = graph.signatures[op.signature]
        _require(
            len(op.inputs) == len(signature.operands),
            f"{where}.inputs",
            f"must be one per operand of its signature ({len(signature.operands)})",
            op.inputs,
        )
        _require(
            op.kind == signature.kind, f"{where}.kind", "must be that of its signature", op.kind
        )
        _require(
            bool(op.follows) == (op.role is Role.FOLLOWER),
            f"{where}.follows",
            f"must be given exactly for a follower, and {op.name} is {op.role}",
            op.follows,
        )
        producers = {graph.tensors[index].producer for index in op.inputs}
        _require(
            set(op.follows) <= producers,
            f"{where}.follows",
            "must be operators that made an input",
            op.follows,
        )
        for index in op.outputs:
            producer = graph.tensors[index].producer
            _require(producer == i, f"{where}.outputs", "must have it as producer", producer)
        for name in ("forward_flops", "backward_flops"):
            count = getattr(op, name)
            _require(count >= 0, f"{where}.{name}", "must be >= 0", count)
    with_backward = sorted(i for i, op in enumerate(graph.operators) if op.differentiable)
    _require(
        sorted(graph.backward_order) == with_backward,
        "backward_order",
        "must be the operators with a backward, each once",
        graph.backward_order,
    )


def _check_saved(graph: OperatorGraph) -> None:
    for i, saved in enumerate(graph.saved):
        where = f"saved[{i}]"
        _require(bool(saved.savers), f"{where}.savers", "must not be empty", saved.savers)
        _require(
            set(saved.kept_output) <= set(saved.savers),
            f"{where}.kept_output",
            "must be among the savers",
            saved.kept_output,
        )
        for name in ("elements", "size_bytes"):
            count = getattr(saved, name)
            _require(count >= 0, f"{where}.{name}", "must be >= 0", count)


def _check_parameters(graph: OperatorGraph) -> None:
    readers = _users(graph, lambda i: graph.operators[i].parameters, len(graph.parameters))
    for i, parameter in enumerate(graph.parameters):
        _require(
            parameter.operators == readers[i],
            f"parameters[{i}].operators",
            "must be the operators that read it",
            (parameter.operators, readers[i]),
        )
    order = graph.gradient_order
    _require(len(set(order)) == len(order), "gradient_order", "must have each once", order)
    for index in order:
        parameter = graph.parameters[index]
        used = any(graph.operators[i].differentiable for i in parameter.operators)
        _require(
            parameter.requires_grad and used,
            "gradient_order",
            "must have only trained parameters that an operator with a backward reads",
            parameter.name,
        )


def _check_groups(graph: OperatorGraph) -> None:
    for i, group in enumerate(graph.groups):
        where = f"groups[{i}].operators"
        _require(len(group.operators) > 1, where, "must be two or more", group.operators)
        for index in group.operators:
            op = graph.operators[index]
            _require(op.role is Role.ADJUSTABLE, where, "must be adjustable operators", op.name)
