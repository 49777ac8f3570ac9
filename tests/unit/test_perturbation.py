"""The table of perturbations: every rule refused, and files that come back."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qsync_opt.errors import FormatError, ParameterError
from qsync_opt.files import load_perturbations, save_perturbations
from qsync_opt.gradient_noise import GradientRanges
from qsync_opt.perturbation import PerturbationProvenance, PerturbationTable
from qsync_opt.precision import Precision

TABLE = PerturbationTable(
    graph="0123456789abcdef" * 4,
    operators=("conv", "relu", "attention"),
    precisions=(Precision.FP32, Precision.BF16, Precision.INT8),
    values=np.array([[0.0, 1e-30, 0.1], [0.0, 0.0, 0.0], [0.0, 2.5, math.inf]]),
    method="variance",
    provenance=PerturbationProvenance(
        model="model.py",
        sizes={"batch_size": "8"},
        batches=2,
        draws=4,
        rounding="nearest",
        seed=7,
        elapsed_s=0.25,
        device="cpu",
        versions={"torch": "2.13.0"},
        date="2026-01-01T00:00:00+00:00",
    ),
)


RANGES = GradientRanges(
    parameters=("conv.weight", "conv.bias"),
    own_ranges=np.array([1.5, 0.0]),
    mean_ranges=np.array([1.0, 0.0]),
    own_casts=np.array([1e-3, 1e-9]),
    mean_casts=np.array([1e-4, 0.0]),
)


def test_a_table_keeps_its_own_read_only_values() -> None:
    values = np.ones((3, 3))
    table = replace(TABLE, values=values)
    values[0, 0] = -1.0
    assert table.values[0, 0] == 1.0
    with pytest.raises(ValueError, match="read-only"):
        table.values[0, 0] = 2.0


def test_entries_are_found_by_name() -> None:
    assert TABLE.of("conv", Precision.INT8) == 0.1
    assert TABLE.of("attention", Precision.INT8) == math.inf
    with pytest.raises(ParameterError, match="operator"):
        TABLE.of("nothing", Precision.INT8)
    with pytest.raises(ParameterError, match="precision"):
        TABLE.of("conv", Precision.FP8)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"graph": "no hash"}, "graph"),
        ({"graph": "A" * 64}, "graph"),
        ({"operators": ("a", "b", "a")}, "operators"),
        ({"precisions": (Precision.FP32, Precision.FP32, Precision.INT8)}, "precisions"),
        ({"values": np.zeros((3, 2))}, "values"),
        ({"values": np.full((3, 3), math.nan)}, r"values\[0\]\[0\]"),
        ({"values": np.array([[0, 0, 0], [0, 0, -1e-300], [0, 0, 0]])}, r"values\[1\]\[2\]"),
        ({"values": np.full((3, 3), -math.inf)}, r"values\[0\]\[0\]"),
    ],
)
def test_every_rule_is_checked(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ParameterError, match=field):
        replace(TABLE, **change)


@pytest.mark.parametrize("name", ["table.json", "table.json.gz"])
def test_writing_then_reading_is_the_identity(tmp_path: Path, name: str) -> None:
    save_perturbations(TABLE, tmp_path / name)
    assert load_perturbations(tmp_path / name) == TABLE
    assert hash(load_perturbations(tmp_path / name)) == hash(TABLE)


def test_ranges_of_gradients_come_back_and_are_left_out_where_there_are_none(
    tmp_path: Path,
) -> None:
    table = replace(TABLE, gradients=RANGES)
    save_perturbations(table, tmp_path / "with.json")
    save_perturbations(TABLE, tmp_path / "without.json")
    back = load_perturbations(tmp_path / "with.json")
    assert back == table != TABLE
    assert back.gradients == RANGES
    assert hash(back.gradients) == hash(RANGES)
    documents = [json.loads((tmp_path / f"{n}.json").read_text()) for n in ("with", "without")]
    assert set(documents[0]) - set(documents[1]) == {"gradients"}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"parameters": ("a", "a")}, "gradients.parameters"),
        ({"parameters": ("a", "b", "c")}, "gradients.own_ranges"),
        ({"mean_ranges": np.array([1.0, -1.0])}, r"gradients.mean_ranges\[1\]"),
        ({"own_casts": np.array([math.nan, 0.0])}, r"gradients.own_casts\[0\]"),
        ({"mean_casts": np.array([0.0, math.inf])}, r"gradients.mean_casts\[1\]"),
    ],
)
def test_every_rule_of_ranges_is_checked(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ParameterError, match=field):
        replace(RANGES, **change)


def test_infinity_is_null_in_the_file(tmp_path: Path) -> None:
    save_perturbations(TABLE, tmp_path / "table.json")
    document = json.loads((tmp_path / "table.json").read_text())
    assert document["format"] == "qsync-opt/perturbation"
    assert document["version"] == 1
    assert document["values"] == [[0.0, 1e-30, 0.1], [0.0, 0.0, 0.0], [0.0, 2.5, None]]


def other_version(document: dict[str, Any]) -> None:
    document["version"] = 2


def unknown_key(document: dict[str, Any]) -> None:
    document["extra"] = 1


def unknown_precision(document: dict[str, Any]) -> None:
    document["precisions"][1] = "fp4"


def short_row(document: dict[str, Any]) -> None:
    document["values"][2].pop()


def missing_row(document: dict[str, Any]) -> None:
    document["values"].pop()


def negative(document: dict[str, Any]) -> None:
    document["values"][0][1] = -1.0


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (other_version, "version"),
        (unknown_key, "extra"),
        (unknown_precision, r"precisions\[1\]"),
        (short_row, r"values\[2\]"),
        (missing_row, "must have 3 rows"),
        (negative, r"values\[0\]\[1\]"),
    ],
)
def test_files_of_another_form_are_refused(
    tmp_path: Path, damage: Callable[[dict[str, Any]], None], message: str
) -> None:
    save_perturbations(TABLE, tmp_path / "table.json")
    document = json.loads((tmp_path / "table.json").read_text())
    damage(document)
    (tmp_path / "damaged.json").write_text(json.dumps(document))
    with pytest.raises((FormatError, ParameterError), match=message):
        load_perturbations(tmp_path / "damaged.json")


def test_tables_differ_by_any_part() -> None:
    assert replace(TABLE, method="loss") != TABLE
    assert replace(TABLE, values=TABLE.values * 2) != TABLE
    assert replace(TABLE, graph="f" * 64) != TABLE
    assert replace(TABLE, gradients=RANGES) != TABLE
    assert TABLE != "a table"
