"""From documents to problems and plans, and back.

Judged here is only what a document's types leave open: the length of rows, and nulls that do
not agree. Every other rule belongs to `optimize.validation`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, cast

import numpy as np
from msgspec import UNSET

from qsync_opt.errors import FormatError
from qsync_opt.optimize.arrays import BoolArray, FloatArray, IntArray
from qsync_opt.optimize.problem import (
    NOT_GIVEN,
    AllocationProblem,
    Bucket,
    BucketCode,
    CastTensors,
    DeviceKind,
    Operator,
    SavedTensors,
)
from qsync_opt.plan import PrecisionPlan
from qsync_opt.precision import Precision
from qsync_opt.schema import (
    BucketPart,
    CodePart,
    DevicePart,
    OperatorPart,
    PlanDocument,
    ProblemDocument,
    SavedPart,
    TensorPart,
)

_TRANSIENTS = ("forward_transient_bytes", "backward_transient_bytes")


def to_problem(document: ProblemDocument) -> AllocationProblem:
    """The problem in a file.

    Raises:
        FormatError: a row of the wrong length, or a null where there must be a number.
        ProblemError: the problem breaks a rule.
    """
    if not document.precisions:  # or every row would seem too long
        raise FormatError("precisions", "must name at least one precision", [])
    return AllocationProblem(
        name=document.name,
        provenance=document.provenance,
        precisions=cast(Any, document.precisions),  # strings become precisions there
        storage=cast(Any, document.storage),
        output=cast(Any, document.output),
        operators=tuple(
            Operator(
                name=row.name, kind=row.kind, bucket=row.bucket, follows=tuple(row.follows or ())
            )
            for row in document.operators
        ),
        buckets=tuple(map(_to_bucket, document.buckets)),
        groups=tuple(tuple(group) for group in document.groups or ()),
        devices=tuple(
            _to_device(row, f"devices[{index}]", document)
            for index, row in enumerate(document.devices)
        ),
        deadline_s=None if document.deadline_s is UNSET else document.deadline_s,
        slack=0.0 if document.slack is UNSET else document.slack,
    )


def _to_bucket(row: BucketPart) -> Bucket:
    return Bucket(
        all_reduce_s=row.all_reduce_s,
        size_bytes=row.size_bytes,
        codes=tuple(
            BucketCode(bits=c.bits, all_reduce_s=c.all_reduce_s, perturbation=c.perturbation)
            for c in row.codes or ()
        ),
    )


def _to_device(row: DevicePart, where: str, document: ProblemDocument) -> DeviceKind:
    columns = len(document.precisions)
    forward_s = _table(row.forward_s, columns, f"{where}.forward_s")
    available = ~np.isnan(forward_s)
    tables = {"forward_s": forward_s}
    for name in ("backward_s", "perturbation"):
        tables[name] = _table(getattr(row, name), columns, f"{where}.{name}")
        _same_nulls(tables[name], available, f"{where}.{name}")
    transients = {}
    for name in _TRANSIENTS:
        if (given := getattr(row, name)) is not UNSET:
            table = _table(given, columns, f"{where}.{name}")
            transients[name] = np.nan_to_num(table, nan=0.0).astype(np.int64)
    return DeviceKind(
        name=row.name,
        workers=row.workers,
        batch_share=row.batch_share,
        memory_bytes=row.memory_bytes,
        fixed_bytes=row.fixed_bytes,
        optimizer_s=row.optimizer_s,
        available=available,
        forward_s=forward_s,
        backward_s=tables["backward_s"],
        perturbation=tables["perturbation"],
        tensors=_to_tensors(row.tensors, columns, f"{where}.tensors"),
        saved=_to_saved(row.saved, document.storage, f"{where}.saved"),
        pins=cast(Any, row.pins or {}),
        **transients,
    )


def _require_lengths(rows: Sequence[Sequence[Any]], length: int, where: str) -> None:
    if not set(map(len, rows)) <= {length}:
        index = next(i for i, row in enumerate(rows) if len(row) != length)
        rule = f"must have one entry per precision ({length})"
        raise FormatError(f"{where}[{index}]", rule, rows[index])


def _table(rows: list[list[Any]], columns: int, where: str) -> FloatArray:
    """A table of the file; null becomes NaN, which JSON does not have."""
    _require_lengths(rows, columns, where)
    flat = np.array(list(chain.from_iterable(rows)), dtype=np.float64)
    return flat.reshape(len(rows), columns)


def _same_nulls(table: FloatArray, available: BoolArray, where: str) -> None:
    if table.shape != available.shape:
        return  # validation tells which of the two has the wrong shape
    odd = np.argwhere(np.isnan(table) == available)
    if len(odd):
        operator, column = (int(index) for index in odd[0])
        number = table[operator, column].item()
        raise FormatError(
            f"{where}[{operator}][{column}]",
            "must be null exactly where forward_s is",
            None if np.isnan(number) else number,
        )


def _to_tensors(rows: list[TensorPart], columns: int, where: str) -> CastTensors:
    tables = {}
    for name in ("forward_s", "backward_s"):
        squares: list[list[list[float]]] = list(map(attrgetter(name), rows))
        if not set(map(len, squares)) <= {columns}:
            index = next(i for i, square in enumerate(squares) if len(square) != columns)
            rule = f"must have one row per precision ({columns})"
            raise FormatError(f"{where}[{index}].{name}", rule, squares[index])
        lines = list(chain.from_iterable(squares))
        if not set(map(len, lines)) <= {columns}:
            for index, square in enumerate(squares):
                _require_lengths(square, columns, f"{where}[{index}].{name}")
        flat = np.fromiter(chain.from_iterable(lines), np.float64, len(rows) * columns**2)
        tables[name] = flat.reshape(len(rows), columns, columns)
    return CastTensors.from_rows(
        producer=[row.producer for row in rows],
        consumers=[row.consumers for row in rows],
        forward_s=tables["forward_s"],
        backward_s=tables["backward_s"],
        where=where,
    )


def _to_saved(rows: list[SavedPart], storage: list[str], where: str) -> SavedTensors:
    given = set(chain.from_iterable(map(attrgetter("size_bytes"), rows)))
    known = {precision.value for precision in Precision}
    if not given <= known:
        index = next(i for i, row in enumerate(rows) if not known.issuperset(row.size_bytes))
        odd = next(name for name in rows[index].size_bytes if name not in known)
        rule = "must have only the keys " + ", ".join(dict.fromkeys(storage))
        raise FormatError(f"{where}[{index}].bytes", rule, odd)
    # Dtypes that no precision stores in stay, so that validation can tell what is wrong.
    names = (*storage, *sorted(given))
    dtypes = [Precision(name) for name in dict.fromkeys(names) if name in known]
    size_bytes: IntArray = np.full((len(rows), len(dtypes)), NOT_GIVEN, dtype=np.int64)
    for column, dtype in enumerate(dtypes):
        size_bytes[:, column] = [row.size_bytes.get(dtype.value, NOT_GIVEN) for row in rows]
    return SavedTensors.from_rows(
        savers=[row.savers for row in rows],
        size_bytes=size_bytes,
        dtypes=dtypes,
        where=where,
    )


def from_problem(problem: AllocationProblem) -> ProblemDocument:
    """The file of a problem."""
    return ProblemDocument(
        format=ProblemDocument.FORMAT,
        version=ProblemDocument.VERSION,
        name=problem.name,
        provenance=problem.provenance,
        precisions=[p.value for p in problem.precisions],
        storage=[p.value for p in problem.storage],
        output=[p.value for p in problem.output],
        operators=[
            OperatorPart(
                name=operator.name,
                kind=operator.kind,
                bucket=None if operator.bucket is None else int(operator.bucket),
                follows=[int(index) for index in operator.follows] or UNSET,
            )
            for operator in problem.operators
        ],
        buckets=[_from_bucket(bucket) for bucket in problem.buckets],
        groups=[list(group) for group in problem.groups],
        devices=[_from_device(device) for device in problem.devices],
        deadline_s=None if problem.deadline_s is None else float(problem.deadline_s),
        slack=float(problem.slack),
    )


def _from_bucket(bucket: Bucket) -> BucketPart:
    codes = [
        CodePart(
            bits=int(c.bits),
            all_reduce_s=float(c.all_reduce_s),
            perturbation=float(c.perturbation),
        )
        for c in bucket.codes
    ]
    return BucketPart(
        all_reduce_s=float(bucket.all_reduce_s),
        size_bytes=int(bucket.size_bytes),
        codes=codes or UNSET,
    )


def _from_device(device: DeviceKind) -> DevicePart:
    part = DevicePart(
        name=device.name,
        workers=device.workers,
        batch_share=device.batch_share,
        memory_bytes=device.memory_bytes,
        fixed_bytes=device.fixed_bytes,
        optimizer_s=device.optimizer_s,
        forward_s=_masked(device.forward_s, device.available),
        backward_s=_masked(device.backward_s, device.available),
        perturbation=_masked(device.perturbation, device.available),
        tensors=_from_tensors(device.tensors),
        saved=_from_saved(device.saved),
        pins={name: precision.value for name, precision in sorted(device.pins.items())},
    )
    for name in _TRANSIENTS:
        table: IntArray = getattr(device, name)
        if table.any():
            setattr(part, name, _masked(table, device.available))
    return part


def _masked(table: FloatArray | IntArray, available: BoolArray) -> list[list[Any]]:
    """The rows of a table with null where the precision is not available."""
    rows: list[list[Any]] = table.tolist()
    for row, column in np.argwhere(~available).tolist():
        rows[row][column] = None
    return rows


def _from_tensors(tensors: CastTensors) -> list[TensorPart]:
    return [
        TensorPart(
            producer=producer,
            consumers=tensors.consumers_of(index).tolist(),
            forward_s=forward_s,
            backward_s=backward_s,
        )
        for index, (producer, forward_s, backward_s) in enumerate(
            zip(
                tensors.producer.tolist(),
                tensors.forward_s.tolist(),
                tensors.backward_s.tolist(),
                strict=True,
            )
        )
    ]


def _from_saved(saved: SavedTensors) -> list[SavedPart]:
    names = [dtype.value for dtype in saved.dtypes]
    return [
        SavedPart(
            savers=saved.savers_of(index).tolist(),
            size_bytes={
                name: size for name, size in zip(names, sizes, strict=True) if size != NOT_GIVEN
            },
        )
        for index, sizes in enumerate(saved.size_bytes.tolist())
    ]


def to_plan(document: PlanDocument) -> PrecisionPlan:
    """The plan in a file.

    Raises:
        PlanError: a precision that is not one, or bits that no bucket can have.
    """
    return PrecisionPlan(
        problem=document.problem,
        devices=cast(Any, document.devices),
        communication=tuple(document.communication or ()),
    )


def from_plan(plan: PrecisionPlan) -> PlanDocument:
    """The file of a plan."""
    devices = {
        kind: {name: precision.value for name, precision in row.items()}
        for kind, row in plan.devices.items()
    }
    return PlanDocument(
        format=PlanDocument.FORMAT,
        version=PlanDocument.VERSION,
        problem=plan.problem,
        devices=devices,
        communication=list(plan.communication) or UNSET,
    )
