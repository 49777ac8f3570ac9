"""How results become JSON and text."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qsync_opt import console
from qsync_opt.conversion import from_plan
from qsync_opt.optimize.result import SolveStatus
from qsync_opt.plan import PrecisionPlan
from qsync_opt.precision import Precision
from qsync_opt.strict_json import encode


@dataclass(frozen=True, kw_only=True)
class Part:
    value: object
    progress: object = None


@given(st.text())
def test_one_line_is_one_printable_line(text: str) -> None:
    line = console.one_line(text)
    assert line.isprintable()
    assert "\n" not in line


@given(st.text(st.characters(categories=["L", "N", "P"])))
def test_one_line_keeps_plain_text(text: str) -> None:
    assert console.one_line(text) == text


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float64("nan")])
def test_json_has_no_number_that_json_lacks(value: float) -> None:
    assert console.to_json({"gap": value}) == {"gap": None}


def test_json_shows_enums_by_the_word_a_program_compares() -> None:
    assert console.to_json(SolveStatus.TIME_LIMIT) == "time_limit"
    assert console.to_json({Precision.INT8: Precision.FP32}) == {"int8": "fp32"}


def test_json_goes_into_every_part_and_leaves_functions_out() -> None:
    inner = Part(value=MappingProxyType({"weak": (1, 2.5, None, True, "x")}), progress=len)
    shown = console.to_json(Part(value=[inner]))
    assert shown == {"value": [{"value": {"weak": [1, 2.5, None, True, "x"]}}], "progress": None}


def test_json_of_a_plan_is_that_of_its_file() -> None:
    plan = PrecisionPlan(problem="abc", devices={"weak": {"fc": Precision.BF16}})
    assert console.to_json(plan) == {"problem": "abc", "devices": {"weak": {"fc": "bf16"}}}
    sent = replace(plan, communication=(8, 32))
    assert json.loads(encode(from_plan(sent))) == {
        "format": "qsync-opt/plan",
        "version": 1,
        **console.to_json(sent),  # type: ignore[dict-item]
    }


@given(st.recursive(st.none() | st.floats() | st.integers() | st.text(), st.lists))
def test_json_is_always_strict_json(value: object) -> None:
    json.dumps(console.to_json(value), allow_nan=False)


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.0, "0 ms"), (2.5e-6, "2.5 us"), (0.0123, "12.3 ms"), (61.0, "61 s")],
)
def test_seconds(value: float | None, text: str) -> None:
    assert console.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (2**50, "1024 TiB")],
)
def test_size(value: int | None, text: str) -> None:
    assert console.size(value) == text
