"""Costs in files and in memory: what is refused, what comes back, how sizes are priced."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qsync_opt.costs import DeviceCosts, interpolate
from qsync_opt.costs_conversion import from_costs
from qsync_opt.errors import CostsError, FormatError
from qsync_opt.files import load_costs, save_costs
from qsync_opt.precision import Precision
from qsync_opt.strict_json import encode
from tests.cost_cases import made_up_costs
from tests.unit.measure.nets import capture_chain


@pytest.fixture(scope="module")
def costs() -> DeviceCosts:
    return made_up_costs(capture_chain(), steps=True)


def test_writing_then_reading_is_the_identity(costs: DeviceCosts, tmp_path: Path) -> None:
    for number, row in enumerate((costs, replace(costs, all_reduce=None, steps=(), buckets=()))):
        first, second = tmp_path / f"{number}.json.gz", tmp_path / f"{number}b.json.gz"
        save_costs(row, first)
        back = load_costs(first)
        save_costs(back, second)
        assert first.read_bytes() == second.read_bytes()
        assert encode(from_costs(back)) == encode(from_costs(row))
        np.testing.assert_array_equal(back.operators.forward_s, row.operators.forward_s)
        assert (back.all_reduce is None) == (row.all_reduce is None)


def test_what_was_not_measured_is_null(costs: DeviceCosts, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    save_costs(costs, path)
    table = json.loads(path.read_text())["operators"]["forward_s"]
    missing = [[value is None for value in row] for row in table]
    np.testing.assert_array_equal(missing, ~costs.operators.available)


def test_averages_at_other_bits_are_priced_beside_the_all_reduce(costs: DeviceCosts) -> None:
    reduce = costs.all_reduce
    assert reduce is not None
    assert reduce.bits == (32, 16, 8, 4)
    for size in (50, 100, 200, 300, 3000):
        assert reduce.time(size, 32) == reduce.time(size)
        assert reduce.time(size, 8) == pytest.approx(reduce.time(size) * 12 / 32)
    with pytest.raises(CostsError, match=r"it has 32, 16, 8, 4\), got 6\. Measure.*--codes 6"):
        reduce.time(100, 6)


def test_costs_without_other_bits_are_as_in_early_files(costs: DeviceCosts, tmp_path: Path) -> None:
    assert costs.all_reduce is not None
    plain = replace(costs, all_reduce=replace(costs.all_reduce, codes=()))
    save_costs(plain, tmp_path / "costs.json")
    document = json.loads((tmp_path / "costs.json").read_text())
    assert set(document["all_reduce"]) == {"ranks", "backend", "bytes", "time_s", "spread"}
    back = load_costs(tmp_path / "costs.json").all_reduce
    assert back is not None
    assert back.bits == (32,)


def test_arrays_cannot_be_written(costs: DeviceCosts) -> None:
    with pytest.raises(ValueError, match="read-only"):
        costs.operators.forward_s[0, 0] = 1.0


def _edited(costs: DeviceCosts, path: Path, edit: Any) -> Path:
    save_costs(costs, path)
    document = json.loads(path.read_text())
    edit(document)
    path.write_text(json.dumps(document))
    return path


@pytest.mark.parametrize(
    ("edit", "error", "field"),
    [
        (lambda d: d.update(version=2), FormatError, "version"),
        (lambda d: d.update(half="bf8"), FormatError, "half"),
        (lambda d: d["precisions"].append("fp8"), CostsError, "precisions"),
        (lambda d: d["precisions"].__setitem__(0, "fp16"), CostsError, "precisions"),
        (lambda d: d["operators"]["forward_s"].pop(), CostsError, "operators."),
        (lambda d: d["operators"]["forward_s"][0].pop(), FormatError, "operators.forward_s"),
        (
            lambda d: d["operators"]["forward_s"][0].__setitem__(0, -1.0),
            CostsError,
            "operators.forward_s",
        ),
        (
            lambda d: d["operators"]["backward_s"][0].__setitem__(0, None),
            CostsError,
            "operators.backward_s",
        ),
        (lambda d: d["casts"]["elements"].reverse(), CostsError, "casts.elements"),
        (lambda d: d["all_reduce"]["time_s"].pop(), CostsError, "all_reduce"),
        (lambda d: d["all_reduce"]["codes"].reverse(), CostsError, "all_reduce.codes"),
        (lambda d: d["all_reduce"]["codes"][1].update(bits=16), CostsError, "all_reduce.codes"),
        (lambda d: d["all_reduce"]["codes"][0].update(bits=32), CostsError, "all_reduce.codes"),
        (lambda d: d["all_reduce"]["codes"][2].update(bits=1), CostsError, "all_reduce.codes.bits"),
        (
            lambda d: d["all_reduce"]["codes"][0]["time_s"].pop(),
            CostsError,
            "all_reduce.codes.16.time_s",
        ),
        (
            lambda d: d["all_reduce"]["codes"][2]["spread"].__setitem__(0, -1.0),
            CostsError,
            "all_reduce.codes.4.spread",
        ),
        (lambda d: d.update(extra=1), FormatError, "must have only the keys"),
    ],
)
def test_a_broken_file_is_refused(
    costs: DeviceCosts, tmp_path: Path, edit: Any, error: type[Exception], field: str
) -> None:
    with pytest.raises(error, match=field.replace(".", r"\.")):
        load_costs(_edited(costs, tmp_path / "costs.json", edit))


def test_eight_bit_products_hand_on_the_half_of_the_device(costs: DeviceCosts) -> None:
    old = replace(costs, half=Precision.FP16)
    assert old.handed_on(Precision.INT8) is Precision.FP16
    assert old.handed_on(Precision.BF16) is Precision.BF16
    assert costs.handed_on(Precision.INT8) is Precision.BF16
    assert costs.handed_on(Precision.TF32) is Precision.FP32


SIZES = st.lists(st.integers(1, 10**9), min_size=1, max_size=8, unique=True).map(sorted)


@given(sizes=SIZES, data=st.data())
def test_sizes_between_measured_ones_cost_something_in_between(
    sizes: list[int], data: st.DataObject
) -> None:
    times = np.array(data.draw(st.lists(st.floats(1e-9, 1.0), min_size=len(sizes))))[: len(sizes)]
    table = np.array(sizes)
    for size, time_s in zip(sizes, times, strict=True):
        assert interpolate(table, times, size) == pytest.approx(time_s)
    size = data.draw(st.integers(sizes[0], sizes[-1]))
    place = max(i for i, known in enumerate(sizes) if known <= size)
    near = times[place : place + 2]
    assert near.min() * (1 - 1e-9) <= interpolate(table, times, size) <= near.max() * (1 + 1e-9)
    twice = interpolate(table, times, 2 * sizes[-1])
    assert twice == pytest.approx(2 * times[-1])
    assert interpolate(table, times, 0) == pytest.approx(times[0])
