"""The canonical form of an allocation problem, and its hash.

Two problems with the same hash mean the same to every plan, whatever the order of their
storage dtypes or the way their tables were given. The form is a JSON header with sorted keys
and no blanks, then every array as little-endian bytes, each preceded by its name and shape.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from qsync_opt.precision import Precision

if TYPE_CHECKING:  # problem.py imports this module
    from hashlib import _Hash

    from qsync_opt.optimize.problem import AllocationProblem, Bucket, DeviceKind, SavedTensors


def problem_sha256(problem: AllocationProblem) -> str:
    """SHA-256 of precisions, operators, buckets, groups and device kinds, as hexadecimal digits.

    Name, provenance, `deadline_s` and `slack` are left out, so one plan can be judged at
    several paces.
    """
    header = {
        "format": "qsync-opt/problem",
        "precisions": [p.value for p in problem.precisions],
        "storage": [p.value for p in problem.storage],
        "output": [p.value for p in problem.output],
        "operators": [
            [o.name, o.kind, None if o.bucket is None else int(o.bucket), *map(int, o.follows)]
            for o in problem.operators
        ],
        "buckets": [_bucket(bucket) for bucket in problem.buckets],
        "groups": [list(group) for group in problem.groups],
        "devices": [
            [kind.name, kind.workers, kind.batch_share, *_numbers(kind)] for kind in problem.devices
        ],
    }
    digest = hashlib.sha256(_json(header))
    for kind in problem.devices:
        _add_arrays(digest, kind)
    return digest.hexdigest()


def kind_sha256(kind: DeviceKind) -> str:
    """SHA-256 of what a plan costs and may do on one kind: all but name, workers and share."""
    digest = hashlib.sha256(_json(_numbers(kind)))
    _add_arrays(digest, kind)
    return digest.hexdigest()


def _bucket(bucket: Bucket) -> list[object]:
    """Without codes as before there were any, so that old plans stay plans of their problems."""
    codes = [[int(c.bits), float(c.all_reduce_s), float(c.perturbation)] for c in bucket.codes]
    numbers: list[object] = [float(bucket.all_reduce_s), int(bucket.size_bytes)]
    return [*numbers, codes] if codes else numbers


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def _numbers(kind: DeviceKind) -> list[object]:
    return [
        kind.memory_bytes,
        kind.fixed_bytes,
        kind.optimizer_s,
        [dtype.value for dtype in _given_dtypes(kind.saved)],
        sorted((name, precision.value) for name, precision in kind.pins.items()),
    ]


def _add_arrays(digest: _Hash, kind: DeviceKind) -> None:
    for name, array in _arrays(kind):
        digest.update(f"{name}{list(array.shape)}".encode())
        digest.update(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())


def _arrays(kind: DeviceKind) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    for name in (
        "available",
        "forward_s",
        "backward_s",
        "perturbation",
        "forward_transient_bytes",
        "backward_transient_bytes",
    ):
        yield name, getattr(kind, name)
    for name in ("producer", "consumer_start", "consumers", "forward_s", "backward_s"):
        yield f"tensors.{name}", getattr(kind.tensors, name)
    for name in ("saver_start", "savers"):
        yield f"saved.{name}", getattr(kind.saved, name)
    given = [kind.saved.dtypes.index(dtype) for dtype in _given_dtypes(kind.saved)]
    yield "saved.size_bytes", np.ascontiguousarray(kind.saved.size_bytes[:, given])


def _given_dtypes(saved: SavedTensors) -> list[Precision]:
    """Storage dtypes that some size is given for, in the order of the enum.

    A file says nothing of the others, and the order of the columns means nothing.
    """
    given = {
        dtype
        for dtype, sizes in zip(saved.dtypes, saved.size_bytes.T, strict=True)
        if (sizes >= 0).any()
    }
    return [precision for precision in Precision if precision in given]
