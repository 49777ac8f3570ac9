"""What ranks must have in common before the first step, and how they find out.

DDP takes ranks that differ and fails in the first all-reduce, or hangs in it: it compares
neither dtypes nor plans. So every rank describes itself, the descriptions' digests are
gathered, and only where these differ the descriptions themselves. Then all ranks stop with the
same words.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from qsync_opt.errors import QsyncError, TrainError
from qsync_opt.plan import PrecisionPlan
from qsync_opt.runtime.distributed import Ranks

if TYPE_CHECKING:
    from torch import nn

#: What to do about a difference, by the field it is in.
_REMEDIES = {
    "plan": "Give every rank the same plan file",
    "problem": "Give every rank the same problem file, or none",
    "torch": "Install the same version of torch everywhere",
    "qsync_opt": "Install the same version of qsync_opt everywhere",
    "parameters": "Build the same model everywhere, with fp32 parameters and equal memory format",
}
_REMEDY = "Start every rank with the same options"
_MISSING = "nothing"


def plan_sha256(plan: PrecisionPlan | None) -> str:
    """SHA-256 of a plan: equal for equal plans, whatever the order of their names."""
    if plan is None:
        return "none"
    content: dict[str, Any] = {
        "problem": plan.problem,
        "devices": {
            kind: {name: str(precision) for name, precision in row.items()}
            for kind, row in plan.devices.items()
        },
    }
    if plan.communication:
        content["communication"] = plan.communication
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def describe_parameters(model: nn.Module) -> dict[str, list[Any]]:
    """Name -> dtype, shape, strides and whether it is trained; buffers too."""
    rows = {
        name: [str(tensor.dtype), list(tensor.shape), list(tensor.stride()), tensor.requires_grad]
        for name, tensor in model.named_parameters()
    }
    for name, tensor in model.named_buffers():
        rows[f"buffer {name}"] = [str(tensor.dtype), list(tensor.shape)]
    return rows


def require_agreement(
    ranks: Ranks, description: Mapping[str, Any], kind: str, failure: QsyncError | None = None
) -> list[str]:
    """Stop on every rank unless all ranks describe themselves alike.

    Args:
        ranks: of the job.
        description: what must be equal, ready for JSON.
        kind: device kind of this rank, for messages.
        failure: why this rank cannot take part; then no rank does.

    Returns:
        The device kinds of all ranks.

    Raises:
        QsyncError: `failure`, on the rank that has it.
        TrainError: on the other ranks; or a difference, with the rank and both values.
    """
    text = json.dumps(description, sort_keys=True)
    mine = {
        "kind": kind,
        "digest": hashlib.sha256(text.encode()).hexdigest(),
        "failure": None if failure is None else str(failure),
    }
    heads = [json.loads(raw) for raw in ranks.gather_bytes(json.dumps(mine).encode())]
    if failure is not None:
        raise failure
    kinds = [str(head["kind"]) for head in heads]
    for rank, head in enumerate(heads):
        if head["failure"] is not None:
            raise TrainError(
                f"rank {rank} ({kinds[rank]}) cannot start: {head['failure'].rstrip('.')}",
                "Every rank must be able to run its part of the plan",
            )
    if len({head["digest"] for head in heads}) > 1:
        whole = json.dumps(description).encode()  # in the order that people expect
        rows = [json.loads(raw) for raw in ranks.gather_bytes(whole)]
        raise _difference(rows, kinds)
    return kinds


def _difference(rows: Sequence[Mapping[str, Any]], kinds: Sequence[str]) -> TrainError:
    first = rows[0]
    for rank, row in enumerate(rows):
        for field in [*first, *(key for key in row if key not in first)]:
            ours, theirs = first.get(field, _MISSING), row.get(field, _MISSING)
            if ours == theirs:
                continue
            where = field
            if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
                keys = [*ours, *(key for key in theirs if key not in ours)]
                key = next(key for key in keys if ours.get(key) != theirs.get(key))
                where = f"{field} {key}"
                ours, theirs = ours.get(key, _MISSING), theirs.get(key, _MISSING)
            return TrainError(
                f"rank {rank} ({kinds[rank]}) does not agree with rank 0 ({kinds[0]}):"
                f" {where} is {_short(theirs)} there and {_short(ours)} on rank 0",
                _REMEDIES.get(field, _REMEDY),
            )
    raise ValueError("the descriptions are equal")  # their digests were not


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
