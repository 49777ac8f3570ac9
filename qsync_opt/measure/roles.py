"""Which operators have a choice of precision, and which of them share it.

Decided by what a call did, never by its name: whether it multiplied matrices, what it reads,
and what it did when it was run again at lower precision (`probe`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from qsync_opt.graph import GroupReason, OperatorGroup, Origin, Role
from qsync_opt.measure.records import LOSS, Call, Value


def role_of(call: Call, inputs: Sequence[Value], differentiable: bool) -> Role:
    """The role of a call that the loss depends on, as far as it alone decides it.

    Args:
        call: what was recorded.
        inputs: the values of its operands, views folded.
        differentiable: whether it has a backward.
    """
    if "float32" not in (dtype for _, dtype in call.output_specs):
        return Role.FIXED
    probe = call.probe
    if call.work.products or (probe is not None and probe.products):
        # What is neither trained nor frozen is a table of constants, such as angles of
        # positions; the loss is no part of the model that a plan is made for.
        learned = differentiable or any(value.origin is Origin.PARAMETER for value in inputs)
        in_loss = call.module == LOSS and not call.module_type
        return Role.ADJUSTABLE if learned and not in_loss else Role.FIXED
    if _looks_up(inputs):
        return Role.ADJUSTABLE
    return Role.FOLLOWER if probe is not None and probe.keeps else Role.FIXED


def _looks_up(inputs: Sequence[Value]) -> bool:
    """Whether a call copies rows of a parameter: it reads indices and no other numbers."""
    floating = [v for v in inputs if v.dtype.startswith(("float", "bfloat", "complex"))]
    indices = [v for v in inputs if v not in floating and v.dtype != "bool" and v.shape]
    only_parameters = all(value.origin is Origin.PARAMETER for value in floating)
    return bool(floating) and only_parameters and bool(indices)


def operator_groups(
    calls: Sequence[Call], roles: Sequence[Role], parameters: Sequence[tuple[int, ...]]
) -> tuple[OperatorGroup, ...]:
    """The groups of operators that share a precision.

    Args:
        calls: of the operators.
        roles: of the operators; only adjustable ones are in groups.
        parameters: which each operator reads.
    """
    adjustable = [index for index, role in enumerate(roles) if role is Role.ADJUSTABLE]
    # The operators of each run of a module: those at the same place are run by one layer.
    runs: dict[tuple[str, int], list[int]] = defaultdict(list)
    for index in adjustable:
        runs[calls[index].module, calls[index].module_call].append(index)
    twins: dict[tuple[str, int], list[int]] = defaultdict(list)
    for (module, _), indices in runs.items():
        for place, index in enumerate(indices):
            twins[module, place].append(index)
    readers: dict[int, list[int]] = defaultdict(list)
    for index in adjustable:
        for parameter in parameters[index]:
            readers[parameter].append(index)
    tied = [
        indices
        for indices in readers.values()
        if len({calls[index].module for index in indices}) > 1
    ]
    return (
        *_groups(twins.values(), GroupReason.SHARED_MODULE),
        *_groups(tied, GroupReason.TIED_PARAMETER),
    )


def _groups(rows: Iterable[Sequence[int]], reason: GroupReason) -> list[OperatorGroup]:
    distinct = sorted({tuple(sorted(row)) for row in rows if len(row) > 1})
    return [OperatorGroup(operators=row, reason=reason) for row in distinct]
