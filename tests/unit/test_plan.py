"""`PrecisionPlan`: equality, hashing, copies, and what is refused."""

from __future__ import annotations

import copy
import multiprocessing
from typing import Any

import pytest

from qsync_opt.errors import PlanError
from qsync_opt.plan import PrecisionPlan
from qsync_opt.precision import Precision

FP32, BF16, INT8 = Precision.FP32, Precision.BF16, Precision.INT8


def plan() -> PrecisionPlan:
    return PrecisionPlan(
        problem="abc", devices={"weak": {"fc": INT8, "relu": BF16}, "strong": {"fc": FP32}}
    )


def test_equality_and_hash_do_not_look_at_the_order_of_names() -> None:
    other = PrecisionPlan(
        problem="abc", devices={"strong": {"fc": FP32}, "weak": {"relu": BF16, "fc": INT8}}
    )
    assert plan() == other
    assert hash(plan()) == hash(other)


@pytest.mark.parametrize(
    "other",
    [
        PrecisionPlan(problem="abd", devices=plan().devices),
        PrecisionPlan(problem="abc", devices={"weak": {"fc": INT8, "relu": BF16}}),
        PrecisionPlan(
            problem="abc", devices={"weak": {"fc": INT8, "relu": FP32}, "strong": {"fc": FP32}}
        ),
        PrecisionPlan(
            problem="abc", devices={"weak": {"fc": FP32}, "strong": {"fc": INT8, "relu": BF16}}
        ),
        "a plan",
    ],
)
def test_different_plans_differ(other: object) -> None:
    assert plan() != other


def test_strings_become_precisions() -> None:
    devices: Any = {"weak": {"fc": "int8", "relu": "bf16"}, "strong": {"fc": "fp32"}}
    made = PrecisionPlan(problem="abc", devices=devices)
    assert made == plan()
    assert all(type(p) is Precision for row in made.devices.values() for p in row.values())


def test_the_plan_does_not_change_with_what_it_was_made_from() -> None:
    row = {"fc": INT8}
    devices = {"weak": row}
    made = PrecisionPlan(problem="abc", devices=devices)
    row["fc"] = FP32
    devices["strong"] = row
    assert made == PrecisionPlan(problem="abc", devices={"weak": {"fc": INT8}})
    for change in (made.devices, made.devices["weak"]):
        with pytest.raises(TypeError):
            change["x"] = row  # type: ignore[index]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copies_are_equal(copied: Any) -> None:
    assert copied(plan()) == plan()
    assert hash(copied(plan())) == hash(plan())


def test_a_plan_crosses_to_another_process_and_back() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        again = pool.apply(copy.deepcopy, (plan(),))
    assert again == plan()
    assert hash(again) == hash(plan())
    assert list(again.devices) == list(plan().devices)


def test_for_device_and_counts() -> None:
    assert plan().for_device("weak") == {"fc": INT8, "relu": BF16}
    assert plan().counts("weak") == {INT8: 1, BF16: 1}
    for ask in (plan().for_device, plan().counts):
        with pytest.raises(PlanError, match="device: must be one of weak, strong, got 'x'"):
            ask("x")


@pytest.mark.parametrize(
    ("problem", "devices", "field", "rule", "value"),
    [
        ("", {"a": {}}, "problem", "must be the SHA-256", ""),
        (None, {"a": {}}, "problem", "must be the SHA-256", None),
        (b"abc", {"a": {}}, "problem", "must be the SHA-256", b"abc"),
        ("\ud800", {"a": {}}, "problem", "without lone surrogates", "\ud800"),
        ("abc", {}, "devices", "must map at least one device kind", {}),
        ("abc", None, "devices", "must map at least one device kind", None),
        ("abc", [("a", {})], "devices", "must map at least one device kind", [("a", {})]),
        ("abc", {1: {}}, "devices", "must have names of device kinds as keys", 1),
        ("abc", {"": {}}, "devices", "must have names of device kinds as keys", ""),
        ("abc", {"a": None}, "devices.a", "must map operator names to precisions", None),
        ("abc", {"a": "fp32"}, "devices.a", "must map operator names", "fp32"),
        ("abc", {"a": {3: FP32}}, "devices.a", "must have operator names as keys", 3),
        ("abc", {"a": {"\udc00": FP32}}, "devices.a", "without lone surrogates", "\udc00"),
        ("abc", {"a": {"fc": 8}}, "devices.a.fc", "must be one of fp32, tf32", 8),
        ("abc", {"a": {"fc": None}}, "devices.a.fc", "must be one of fp32, tf32", None),
        ("abc", {"a": {"fc": "FP32"}}, "devices.a.fc", "must be one of fp32, tf32", "FP32"),
        ("abc", {"a": {"fc": ["fp32"]}}, "devices.a.fc", "must be one of", ["fp32"]),
        ("abc", {"a": {"fc": True}}, "devices.a.fc", "must be one of fp32, tf32", True),
    ],
)
def test_wrong_types_are_refused(
    problem: Any, devices: Any, field: str, rule: str, value: object
) -> None:
    with pytest.raises(PlanError) as caught:
        PrecisionPlan(problem=problem, devices=devices)
    assert caught.value.field == field
    assert rule in caught.value.rule
    assert caught.value.value == value
