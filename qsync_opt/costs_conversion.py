"""From a `qsync-opt/costs` document to `DeviceCosts`, and back."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
from msgspec import UNSET

from qsync_opt.calibration import HeldOutRun
from qsync_opt.costs import (
    AllReduceCosts,
    CostsProvenance,
    DeviceCosts,
    ElementCosts,
    FixedMemory,
    GradientBucket,
    OperatorCosts,
    OptimizerCosts,
    StepCosts,
    Unavailable,
)
from qsync_opt.costs_network import CodedTimes
from qsync_opt.costs_schema import (
    AllReducePart,
    CodedTimesPart,
    CostsDocument,
    CostsProvenancePart,
    ElementTablesPart,
    FixedMemoryPart,
    GradientBucketPart,
    HeldOutRunPart,
    OperatorTablesPart,
    OptimizerPart,
    StepPart,
    UnavailablePart,
)
from qsync_opt.errors import FormatError
from qsync_opt.precision import HANDED_ON, Precision
from qsync_opt.strict_json import Part

C = TypeVar("C")
P = TypeVar("P", bound=Part)


def to_costs(document: CostsDocument) -> DeviceCosts:
    """The costs in a file.

    Raises:
        FormatError: an unknown precision, or a ragged table.
        CostsError: tables that do not fit together.
    """
    columns = len(document.precisions)
    return DeviceCosts(
        graph_sha256=document.graph_sha256,
        precisions=tuple(
            _precision(name, f"precisions[{i}]") for i, name in enumerate(document.precisions)
        ),
        half=_precision(document.half, "half"),
        operators=OperatorCosts(**_tables(document.operators, "operators", columns)),
        casts=ElementCosts(**_tables(document.casts, "casts", len(HANDED_ON))),
        optimizer=_plain(OptimizerCosts, document.optimizer),
        memory=_plain(FixedMemory, document.memory),
        buckets=tuple(
            GradientBucket(size_bytes=row.size_bytes, parameters=tuple(row.parameters))
            for row in document.buckets
        ),
        all_reduce=None
        if document.all_reduce is UNSET
        else _plain(AllReduceCosts, document.all_reduce, codes=_codes(document.all_reduce)),
        steps=tuple(
            _plain(StepCosts, row, precision=_precision(row.precision, f"steps[{i}].precision"))
            for i, row in enumerate(document.steps)
        ),
        held_out=()
        if document.held_out is UNSET
        else tuple(_plain(HeldOutRun, row) for row in document.held_out),
        unavailable=tuple(
            _plain(
                Unavailable, row, precision=_precision(row.precision, f"unavailable[{i}].precision")
            )
            for i, row in enumerate(document.unavailable)
        ),
        warnings=tuple(document.warnings),
        provenance=_plain(CostsProvenance, document.provenance),
    )


def from_costs(costs: DeviceCosts) -> CostsDocument:
    """The file of costs."""
    return CostsDocument(
        format=CostsDocument.FORMAT,
        version=CostsDocument.VERSION,
        provenance=_part(CostsProvenancePart, costs.provenance),
        graph_sha256=costs.graph_sha256,
        precisions=[precision.value for precision in costs.precisions],
        half=costs.half.value,
        warnings=list(costs.warnings),
        unavailable=[
            _part(UnavailablePart, row, precision=row.precision.value) for row in costs.unavailable
        ],
        steps=[_part(StepPart, row, precision=row.precision.value) for row in costs.steps],
        optimizer=_part(OptimizerPart, costs.optimizer),
        memory=_part(FixedMemoryPart, costs.memory),
        buckets=[
            GradientBucketPart(size_bytes=row.size_bytes, parameters=list(row.parameters))
            for row in costs.buckets
        ],
        all_reduce=UNSET
        if costs.all_reduce is None
        else _part(
            AllReducePart,
            costs.all_reduce,
            **_lists(costs.all_reduce),
            codes=[_part(CodedTimesPart, row, **_lists(row)) for row in costs.all_reduce.codes]
            or UNSET,
        ),
        held_out=[_part(HeldOutRunPart, row) for row in costs.held_out] or UNSET,
        operators=OperatorTablesPart(**_lists(costs.operators)),
        casts=ElementTablesPart(**_lists(costs.casts)),
    )


def _codes(part: AllReducePart) -> tuple[CodedTimes, ...]:
    if part.codes is UNSET:
        return ()
    return tuple(_plain(CodedTimes, row) for row in part.codes)


def _precision(name: str, field: str) -> Precision:
    try:
        return Precision(name)
    except ValueError:
        known = ", ".join(Precision)
        raise FormatError(field, f"must be one of {known}", name) from None


def _plain(kind: type[C], row: Part, **others: Any) -> C:
    values = {name: getattr(row, name) for name in row.__struct_fields__}
    return kind(**{**values, **others})


def _part(kind: type[P], row: Any, **others: Any) -> P:
    names = [name for name in kind.__struct_fields__ if name not in others]
    values = {name: getattr(row, name) for name in names}
    plain = {n: dict(v) if hasattr(v, "keys") else v for n, v in values.items()}
    return kind(**{**plain, **others})


def _tables(part: Part, where: str, columns: int) -> dict[str, Any]:
    tables = {}
    for name in part.__struct_fields__:
        value = getattr(part, name)
        try:
            whole = name.endswith("bytes") or name == "elements"
            array = np.array(value, dtype=np.int64 if whole else np.float64)
        except ValueError:
            rule = "must be a table with rows of equal length"
            raise FormatError(f"{where}.{name}", rule, "rows of other lengths") from None
        tables[name] = array if array.size else array.reshape(_empty(name, columns))
    return tables


def _empty(name: str, columns: int) -> tuple[int, ...]:
    dtypes = len(HANDED_ON)
    special: dict[str, tuple[int, ...]] = {
        "elements": (0,),
        "copy_s": (0,),
        "input_cast_s": (0, columns, dtypes),
        "cast_s": (0, dtypes, dtypes),
    }
    return special.get(name, (0, columns))


def _lists(costs: Any) -> dict[str, Any]:
    """Every array of a dataclass as nested lists, NaN as None."""
    lists = {}
    for name in costs.__dataclass_fields__:
        value = getattr(costs, name)
        if isinstance(value, np.ndarray):
            lists[name] = np.where(np.isnan(value), None, value).tolist()  # type: ignore[call-overload]
    return lists
