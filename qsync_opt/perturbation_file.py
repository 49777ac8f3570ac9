"""The format `qsync-opt/perturbation`: the keys of the file, and the table in it.

`values` has one row per operator and one column per precision; null stands for infinity.
"""

from __future__ import annotations

import math
from typing import ClassVar

from msgspec import UNSET, UnsetType

from qsync_opt.errors import FormatError
from qsync_opt.gradient_noise import GradientRanges
from qsync_opt.perturbation import PerturbationProvenance, PerturbationTable
from qsync_opt.precision import Precision
from qsync_opt.strict_json import Document, Part, Whole


class PerturbationProvenancePart(Part, kw_only=True):
    """How the table came about; see `perturbation.PerturbationProvenance`."""

    model: str
    sizes: dict[str, str]
    batches: Whole
    draws: Whole
    rounding: str
    seed: int
    elapsed_s: float
    device: str
    versions: dict[str, str]
    date: str


class GradientRangesPart(Part, kw_only=True):
    """What gradients would lose; see `gradient_noise.GradientRanges`."""

    parameters: list[str]
    own_ranges: list[float]
    mean_ranges: list[float]
    own_casts: list[float]
    mean_casts: list[float]


class PerturbationDocument(Document, kw_only=True):
    """A whole `qsync-opt/perturbation` file."""

    FORMAT: ClassVar[str] = "qsync-opt/perturbation"

    graph: str
    method: str
    provenance: PerturbationProvenancePart
    precisions: list[str]
    operators: list[str]
    values: list[list[float | None]]
    gradients: GradientRangesPart | UnsetType = UNSET  # only where it was asked for


def to_perturbations(document: PerturbationDocument) -> PerturbationTable:
    """The table in a file.

    Raises:
        FormatError: an unknown precision, or rows of unequal length.
        ParameterError: the table breaks a rule.
    """
    precisions = []
    for index, name in enumerate(document.precisions):
        try:
            precisions.append(Precision(name))
        except ValueError:
            rule = f"must be one of {', '.join(map(str, Precision))}"
            raise FormatError(f"precisions[{index}]", rule, name) from None
    for index, row in enumerate(document.values):
        if len(row) != len(precisions):
            rule = f"must have {len(precisions)} entries"
            raise FormatError(f"values[{index}]", rule, len(row))
    if len(document.values) != len(document.operators):
        rule = f"must have {len(document.operators)} rows, one per operator"
        raise FormatError("values", rule, len(document.values))
    rows = [[math.inf if entry is None else entry for entry in row] for row in document.values]
    part = document.provenance
    return PerturbationTable(
        graph=document.graph,
        operators=tuple(document.operators),
        precisions=tuple(precisions),
        values=rows,  # type: ignore[arg-type]  # the table makes an array of it
        method=document.method,
        provenance=PerturbationProvenance(
            model=part.model,
            sizes=part.sizes,
            batches=part.batches,
            draws=part.draws,
            rounding=part.rounding,
            seed=part.seed,
            elapsed_s=part.elapsed_s,
            device=part.device,
            versions=part.versions,
            date=part.date,
        ),
        gradients=_to_ranges(document.gradients),
    )


def from_perturbations(table: PerturbationTable) -> PerturbationDocument:
    """The file of a table."""
    told = table.provenance
    return PerturbationDocument(
        format=PerturbationDocument.FORMAT,
        version=PerturbationDocument.VERSION,
        graph=table.graph,
        method=table.method,
        provenance=PerturbationProvenancePart(
            model=told.model,
            sizes=dict(told.sizes),
            batches=told.batches,
            draws=told.draws,
            rounding=told.rounding,
            seed=told.seed,
            elapsed_s=told.elapsed_s,
            device=told.device,
            versions=dict(told.versions),
            date=told.date,
        ),
        precisions=[precision.value for precision in table.precisions],
        operators=list(table.operators),
        values=[
            [entry if math.isfinite(entry) else None for entry in row]
            for row in table.values.tolist()
        ],
        gradients=_from_ranges(table.gradients),
    )


def _to_ranges(part: GradientRangesPart | UnsetType) -> GradientRanges | None:
    if part is UNSET:
        return None
    rows = {name: getattr(part, name) for name in part.__struct_fields__}
    return GradientRanges(**{**rows, "parameters": tuple(part.parameters)})


def _from_ranges(ranges: GradientRanges | None) -> GradientRangesPart | UnsetType:
    if ranges is None:
        return UNSET
    names = [name for name in GradientRangesPart.__struct_fields__ if name != "parameters"]
    rows = {name: getattr(ranges, name).tolist() for name in names}
    return GradientRangesPart(parameters=list(ranges.parameters), **rows)
