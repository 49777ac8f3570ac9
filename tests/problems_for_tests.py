"""A tiny problem that uses every key of the format, as parsed JSON and as an object."""

from __future__ import annotations

import json
from typing import Any

from qsync_opt.conversion import to_problem
from qsync_opt.optimize.problem import AllocationProblem
from qsync_opt.schema import ProblemDocument
from qsync_opt.strict_json import decode

_CASTS = [[0.0, 0.001, 0.002], [0.003, 0.0, 0.004], [0.003, 0.0, 0.004]]
_TIMES = [
    [0.4, 0.2, 0.1],
    [0.04, 0.02, None],
    [0.1, None, None],
    [0.5, 0.25, 0.125],
]

_DEVICE: dict[str, Any] = {
    "name": "weak",
    "workers": 2,
    "batch_share": 0.25,
    "memory_bytes": 100_000,
    "fixed_bytes": 1_000,
    "optimizer_s": 0.002,
    "forward_s": _TIMES,
    "backward_s": _TIMES,
    "perturbation": [
        [0.0, 1.5, 20.0],
        [0.0, 0.0, None],
        [0.0, None, None],
        [0.0, 1e-30, 1e30],
    ],
    "forward_transient_bytes": [[10, 20, 30], [0, 0, None], [5, None, None], [0, 1, 2]],
    "backward_transient_bytes": [[1, 2, 3], [0, 0, None], [5, None, None], [0, 1, 2]],
    "tensors": [
        {"producer": 0, "consumers": [1, 3], "forward_s": _CASTS, "backward_s": _CASTS},
        {"producer": 2, "consumers": [3], "forward_s": _CASTS, "backward_s": _CASTS},
    ],
    "saved": [
        {"savers": [1, 3], "bytes": {"fp32": 4096, "bf16": 2048, "int8": 1024}},
        {"savers": [2], "bytes": {"fp32": 400}},
    ],
    "pins": {"fc": "fp32"},
}

_PROBLEM: dict[str, Any] = {
    "format": "qsync-opt/problem",
    "version": 1,
    "name": "tiny",
    "provenance": "made by hand",
    "precisions": ["fp32", "bf16", "int8"],
    "storage": ["fp32", "bf16", "int8"],
    "output": ["fp32", "bf16", "bf16"],
    "operators": [
        {"name": "conv", "kind": "conv2d", "bucket": 1},
        {"name": "relu", "kind": "relu", "bucket": None, "follows": [0]},
        {"name": "norm é", "kind": "layer_norm", "bucket": None},
        {"name": "fc", "kind": "linear", "bucket": 0},
    ],
    "buckets": [{"all_reduce_s": 0.001, "bytes": 4000}, {"all_reduce_s": 0.002, "bytes": 8000}],
    "groups": [["conv", "fc"]],
    "devices": [
        _DEVICE,
        {**_DEVICE, "name": "strong", "workers": 1, "batch_share": 0.5, "pins": {}},
    ],
    "deadline_s": None,
    "slack": 0.1,
}


def tiny_json() -> dict[str, Any]:
    """The problem as parsed JSON, a copy to change at will."""
    data: dict[str, Any] = json.loads(json.dumps(_PROBLEM))  # the kinds then share no part
    return data


def problem_from_json(data: object) -> AllocationProblem:
    """The problem that a file with this content holds."""
    return to_problem(decode(json.dumps(data).encode(), ProblemDocument, "problem.json"))


def tiny_problem() -> AllocationProblem:
    """The problem as an object."""
    return problem_from_json(tiny_json())
