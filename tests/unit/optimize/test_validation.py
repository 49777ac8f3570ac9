"""Every rule of an allocation problem: what breaks it, and the field, rule and value named."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from qsync_opt.errors import ProblemError, QsyncError
from qsync_opt.optimize.evaluate import evaluate_device
from qsync_opt.optimize.problem import (
    AllocationProblem,
    Bucket,
    CastTensors,
    DeviceKind,
    Operator,
    SavedTensors,
)
from qsync_opt.precision import Precision
from tests.problems_for_tests import problem_from_json, tiny_json, tiny_problem

Change = Callable[[Any], object]


def put(*steps: str | int, value: object) -> Change:
    def change(data: Any) -> None:
        for step in steps[:-1]:
            data = data[step]
        data[steps[-1]] = value

    return change


def fewer_rows(name: str) -> Change:
    return lambda data: data["devices"][0][name].pop()


def both(*changes: Change) -> Change:
    return lambda data: [change(data) for change in changes]


CODE = {"bits": 8, "all_reduce_s": 0.001, "perturbation": 0.5}
D0 = ("devices", 0)
WEAK = "devices.weak"
TRANSIENTS = ("forward_transient_bytes", "backward_transient_bytes")

#: What is changed in the tiny problem's JSON, and the field, rule and value of the error.
CASES: list[tuple[Change, str, str, object]] = [
    # Precisions.
    (put("precisions", 1, value="fp31"), "precisions[1]", "must be one of fp32, tf32", "fp31"),
    (put("precisions", 1, value="fp32"), "precisions[1]", "must be unique", "fp32"),
    (put("storage", 2, value=""), "storage[2]", "must be one of fp32, tf32", ""),
    (put("storage", value=["fp32"]), "storage", "one entry per precision (3)", ["fp32"]),
    (put("storage", 1, value="tf32"), "storage[1]", "tf32 is a compute mode", "tf32"),
    (put("output", value=[]), "output", "one entry per precision (3)", []),
    (put("output", 1, value="tf32"), "output[1]", "tf32 is a compute mode", "tf32"),
    (put("output", 2, value="int8"), "output[2]", "must be one of fp32, bf16, fp16", "int8"),
    # Operators and buckets.
    (put("operators", value=[]), "operators", "must hold at least one operator", []),
    (put("operators", 0, "name", value=""), "operators[*].name", "non-empty string", ""),
    (put("operators", 1, "name", value="conv"), "operators[*].name", "must be unique", "conv"),
    (put("operators", 0, "bucket", value=2), "operators[0].bucket", "number of buckets (2)", 2),
    (put("operators", 1, "follows", value=[1]), "operators[1].follows", "before this one", 1),
    (put("operators", 1, "follows", value=[3]), "operators[1].follows", "before this one", 3),
    (put("operators", 1, "follows", value=[99]), "operators[1].follows", "before this one", 99),
    (put("operators", 3, "follows", value=[0, 0]), "operators[3].follows", "twice", [0, 0]),
    (
        put("buckets", 0, "all_reduce_s", value=-1e-9),
        "buckets[0].all_reduce_s",
        "must be a finite number >= 0",
        -1e-9,
    ),
    *(
        (
            put("buckets", 0, "codes", value=[{**CODE, name: bad}]),
            f"buckets[0].codes[0].{name}",
            rule,
            bad,
        )
        for name, bad, rule in (
            ("bits", 1, "must be a whole number from 2 to 16"),
            ("bits", 17, "must be a whole number from 2 to 16"),
            ("all_reduce_s", -1.0, "must be a finite number >= 0"),
            ("perturbation", -1.0, "must be a finite number >= 0"),
        )
    ),
    (
        put("buckets", 1, "codes", value=[CODE, CODE]),
        "buckets[1].codes[1].bits",
        "must be below the bits before it (8)",
        8,
    ),
    (
        both(
            *(put("buckets", k, "codes", value=[{**CODE, "perturbation": 1e308}]) for k in range(2))
        ),
        "buckets[*].codes[*].perturbation",
        "must sum to less than 1e+300",
        math.inf,
    ),
    (
        both(
            put("buckets", 0, "codes", value=[{**CODE, "perturbation": 1.7e308}]),
            put(*D0, "perturbation", 0, 1, value=1.7e308),
        ),
        "buckets[*].codes[*].perturbation",
        "must sum to less than 1e+300, with all operators",
        math.inf,
    ),
    # Pace.
    (put("slack", value=-0.1), "slack", "must be a finite number >= 0", -0.1),
    (put("deadline_s", value=0), "deadline_s", "must be a finite number > 0", 0.0),
    (put("deadline_s", value=-1.0), "deadline_s", "must be a finite number > 0", -1.0),
    (put("deadline_s", value=1.0), "slack", "must be 0 where deadline_s is given", 0.1),
    # Device kinds.
    (put("devices", value=[]), "devices", "must name at least one device kind", []),
    (put(*D0, "name", value=""), "devices[*].name", "must be a non-empty string", ""),
    (put(*D0, "name", value="strong"), "devices[*].name", "must be unique", "strong"),
    (put(*D0, "workers", value=0), f"{WEAK}.workers", "must be a whole number from 1", 0),
    (put(*D0, "batch_share", value=0), f"{WEAK}.batch_share", "finite number > 0", 0.0),
    (put(*D0, "batch_share", value=1.5), f"{WEAK}.batch_share", "at most 1", 1.5),
    (put(*D0, "batch_share", value=1e308), f"{WEAK}.batch_share", "at most 1", 1e308),
    (put(*D0, "batch_share", value=0.3), "devices[*].batch_share", "must sum to 1", 1.1),
    (put(*D0, "optimizer_s", value=-1), f"{WEAK}.optimizer_s", "finite number >= 0", -1.0),
    *(
        (
            put(*D0, name, 3, 1, value=-1),
            f"{WEAK}.{name}[3][1]",
            "must be finite and >= 0 (operator 'fc' at bf16)",
            -1.0,
        )
        for name in ("forward_s", "backward_s", "perturbation")
    ),
    *(
        (fewer_rows(name), f"{WEAK}.{name}", "must have shape [4, 3]", [3, 3])
        for name in ("backward_s", "perturbation", "forward_transient_bytes")
    ),
    (
        both(*(fewer_rows(name) for name in ("forward_s", "backward_s", "perturbation"))),
        f"{WEAK}.available",
        "must have shape [4, 3] (operators x precisions)",
        [3, 3],
    ),
    (
        both(
            *(
                put(*D0, name, 2, value=[None] * 3)
                for name in ("forward_s", "backward_s", "perturbation")
            )
        ),
        f"{WEAK}.forward_s[2]",
        "must leave operator 'norm é' at least one precision",
        [None] * 3,
    ),
    # Tensors that are handed on.
    (
        put(*D0, "tensors", 1, "producer", value=4),
        f"{WEAK}.tensors[1].producer",
        "must be an operator index from 0 to 3",
        4,
    ),
    (
        put(*D0, "tensors", 1, "consumers", value=[]),
        f"{WEAK}.tensors[1].consumers",
        "must name at least one operator",
        [],
    ),
    (
        put(*D0, "tensors", 1, "consumers", value=[4]),
        f"{WEAK}.tensors[1].consumers",
        "must be operator indices from 0 to 3",
        4,
    ),
    (
        put(*D0, "tensors", 0, "consumers", value=[3, 1, 3]),
        f"{WEAK}.tensors[0].consumers",
        "must not name an operator twice",
        3,
    ),
    (  # a cycle, in whatever order the operators are given
        put(*D0, "tensors", 1, "consumers", value=[3, 0]),
        f"{WEAK}.tensors[1].consumers",
        "must come after the producer (operator 2)",
        0,
    ),
    (
        put(*D0, "tensors", 1, "producer", value=3),
        f"{WEAK}.tensors[1].consumers",
        "must come after the producer (operator 3)",
        3,
    ),
    *(
        (
            put(*D0, "tensors", 1, name, 2, 0, value=-1),
            f"{WEAK}.tensors[1].{name}[2][0]",
            "must be finite and >= 0",
            -1.0,
        )
        for name in ("forward_s", "backward_s")
    ),
    # Saved tensors.
    (
        put(*D0, "saved", 0, "savers", value=[]),
        f"{WEAK}.saved[0].savers",
        "must name at least one operator",
        [],
    ),
    (
        put(*D0, "saved", 1, "savers", value=[7]),
        f"{WEAK}.saved[1].savers",
        "must be operator indices from 0 to 3",
        7,
    ),
    (
        put(*D0, "saved", 1, "savers", value=[2, 2]),
        f"{WEAK}.saved[1].savers",
        "must not name an operator twice",
        2,
    ),
    (
        put(*D0, "saved", 0, "bytes", value={"fp32": 1, "bf16": 1}),
        f"{WEAK}.saved[0].bytes",
        "must give the bytes in int8, which saver 'fc' can ask for",
        None,
    ),
    (
        put(*D0, "saved", 1, "bytes", value={}),
        f"{WEAK}.saved[1].bytes",
        "must give the bytes in fp32, which saver 'norm é' can ask for",
        None,
    ),
    (
        put(*D0, "saved", 1, "bytes", value={"fp32": 400, "fp8": 100}),
        f"{WEAK}.saved[1].bytes",
        "must have only storage dtypes as keys (fp32, bf16, int8)",
        "fp8",
    ),
    # Followers.
    (
        both(
            *(
                put(*D0, name, 1, value=[0.1, None, None])
                for name in ("forward_s", "backward_s", "perturbation")
            )
        ),
        f"{WEAK}.forward_s[1]",
        "must give follower 'relu' a cost at bf16, which its inputs can hand on",
        None,
    ),
    (
        put("output", value=["fp32", "fp16", "fp16"]),
        f"{WEAK}.forward_s[1]",
        "must give follower 'relu' a cost at fp16, which its inputs can hand on",
        None,
    ),
    # Pins and groups.
    (put(*D0, "pins", value={"fd": "fp32"}), f"{WEAK}.pins", "operators of the problem", "fd"),
    (put(*D0, "pins", value={"fc": "fp8"}), f"{WEAK}.pins.fc", "one of fp32, bf16, int8", "fp8"),
    (put(*D0, "pins", value={"fc": "x"}), f"{WEAK}.pins.fc", "must be one of fp32, tf32", "x"),
    (
        put(*D0, "pins", value={"norm é": "bf16"}),
        f"{WEAK}.pins.norm é",
        "must be a precision that the operator has on this kind",
        "bf16",
    ),
    (
        put(*D0, "pins", value={"fc": "fp32", "conv": "bf16"}),
        f"{WEAK}.pins",
        "must not contradict groups[0] (conv, fc share a precision)",
        ["bf16", "fp32"],
    ),
    (put("groups", value=[[]]), "groups[0]", "must name at least one operator", []),
    (put("groups", value=[["fc", "fd"]]), "groups[0]", "operators of the problem", "fd"),
    (put("groups", value=[["fc"], ["fc"]]), "groups[1]", "that groups[0] has named", "fc"),
    (put("groups", value=[["fc", "fc"]]), "groups[0]", "that groups[0] has named", "fc"),
    (
        both(
            *(
                put(*D0, name, 0, 0, value=None)
                for name in ("forward_s", "backward_s", "perturbation")
            ),
            put("groups", value=[["conv", "norm é"]]),
        ),
        "groups[0]",
        "must have a precision that every member has on weak",
        ["conv", "norm é"],
    ),
    (
        both(put("groups", value=[["conv", "norm é"]]), put(*D0, "pins", value={"conv": "bf16"})),
        "groups[0]",
        "must have a precision that every member has on weak and the pins allow",
        ["conv", "norm é"],
    ),
    # Totals.
    (
        both(*(put(*D0, name, 3, 1, value=1e308) for name in ("forward_s", "backward_s"))),
        f"{WEAK}.forward_s",
        "must sum to a number that a double can hold (below 1.8e308), with all other times",
        float("inf"),
    ),
    (
        both(
            put(*D0, "perturbation", 3, 2, value=1e308), put(*D0, "perturbation", 0, 2, value=1e308)
        ),
        f"{WEAK}.perturbation",
        "must sum to a number that a double can hold",
        float("inf"),
    ),
]


@pytest.mark.parametrize(("change", "field", "rule", "value"), CASES)
def test_rules(change: Change, field: str, rule: str, value: object) -> None:
    data = tiny_json()
    change(data)
    with pytest.raises(ProblemError) as caught:
        problem_from_json(data)
    assert caught.value.field == field
    assert rule in caught.value.rule
    assert caught.value.value == value
    assert str(caught.value).startswith(f"{field}: ")


def test_a_follower_of_inputs_that_can_differ_needs_fp32() -> None:
    data = tiny_json()
    names = ("forward_s", "backward_s", "perturbation")
    data["operators"][3] = {"name": "add", "kind": "add", "bucket": None, "follows": [0, 2]}
    data["groups"], data["buckets"], data["operators"][0]["bucket"] = [], [], None
    for device in data["devices"]:
        device["pins"] = {}
        for name in names:
            device[name][0] = [0.0, 0.0, 0.0]
            device[name][2] = [0.0, None, None]
            device[name][3] = [None, 0.0, None]
    with pytest.raises(ProblemError, match="follower 'add' a cost at fp32"):
        problem_from_json(data)
    for device in data["devices"]:  # equal inputs: only what both can hand on is asked for
        for name in names:
            device[name][0] = [None, 0.0, 0.0]
            device[name][1] = [None, 0.0, None]
            device[name][2] = [None, 0.0, None]
        device["saved"] = []
    problem_from_json(data)


def test_bytes_are_summed_with_both_transients_and_without_overflow() -> None:
    """At the limit of 2^62 nothing is refused and `evaluate` still counts exactly."""
    most = 2**53
    problem = tiny_problem()
    device = problem.devices[0]
    rows = 2**9 - 2  # with fixed memory and one transient: 2^9 times 2^53 bytes

    def changed(saved: int, transient: str, size: int) -> AllocationProblem:
        table = np.zeros((4, 3), dtype=np.int64)
        table[3, 0] = size
        tensors = SavedTensors.from_rows(
            savers=[[2]] * saved, size_bytes=[[most]] * saved, dtypes=[Precision.FP32]
        )
        sizes: dict[str, Any] = dict.fromkeys(TRANSIENTS) | {transient: table}
        one = replace(device, saved=tensors, fixed_bytes=most, **sizes)
        return replace(problem, devices=(one, problem.devices[1]))

    for transient in TRANSIENTS:
        accepted = changed(rows, transient, most)
        column = np.zeros(4, dtype=np.int64)
        peak = evaluate_device(accepted, accepted.devices[0], column).peak_memory_bytes
        assert peak == 2**62
        with pytest.raises(ProblemError, match="must sum to less than 2\\^62"):
            changed(rows + 1, transient, most)


# What only Python code can give.


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), -1.0])
@pytest.mark.parametrize("name", ["forward_s", "backward_s", "perturbation"])
def test_tables_are_finite_and_not_negative(name: str, bad: float) -> None:
    device = tiny_problem().devices[0]
    table = getattr(device, name).copy()
    table[1, 1] = bad
    changed = replace(device, **{name: table})
    with pytest.raises(ProblemError) as caught:
        replace(tiny_problem(), devices=(changed, tiny_problem().devices[1]))
    assert caught.value.field == f"devices.weak.{name}[1][1]"
    assert repr(caught.value.value) == repr(bad)


@pytest.mark.parametrize("name", ["forward_s", "backward_s"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_casts_are_finite_and_not_negative(name: str, bad: float) -> None:
    problem = tiny_problem()
    device = problem.devices[1]
    table = getattr(device.tensors, name).copy()
    table[1, 2, 0] = bad
    changed = replace(device, tensors=replace(device.tensors, **{name: table}))
    with pytest.raises(ProblemError) as caught:
        replace(problem, devices=(problem.devices[0], changed))
    assert caught.value.field == f"devices.strong.tensors[1].{name}[2][0]"


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("workers", True),
        ("workers", 1.0),
        ("workers", "1"),
        ("workers", None),
        ("workers", 2**53 + 1),
        pytest.param("workers", 10**6000, id="longer than Python prints"),
        ("memory_bytes", -1),
        ("memory_bytes", 1e9),
        ("fixed_bytes", False),
        ("fixed_bytes", np.float64(3)),
        ("batch_share", True),
        ("batch_share", "0.5"),
        ("batch_share", 10**400),
        ("optimizer_s", None),
        ("optimizer_s", float("nan")),
        ("optimizer_s", np.bool_(True)),
        ("forward_s", "0.1"),
        ("forward_s", [[True, 1.0, 2.0]] * 4),
        ("forward_s", [["1", "2", "3"]] * 4),
        ("forward_s", [[1.0, None, 2.0]] * 4),
        ("forward_s", [[1.0, 2.0, 3.0], [1.0]]),
        ("forward_s", [1.0, 2.0]),
        ("forward_s", [[1.0, 2.0, 10**400]] * 4),
        ("forward_s", np.zeros((4, 3), dtype=bool)),
        ("forward_s", np.zeros((4, 3), dtype=complex)),
        ("available", [["yes", "no", "no"]] * 4),
        ("available", [[1, 0, 0]] * 4),
        ("available", [[True], [True, False]]),
        ("forward_transient_bytes", [[1, 2, 3.5]] * 4),
        ("forward_transient_bytes", [[1, 2, 2**53 + 1]] * 4),
        ("forward_transient_bytes", np.full((4, 3), np.nan)),
        ("backward_transient_bytes", np.full((4, 3), 2**64 - 1, dtype=np.uint64)),
        ("tensors", []),
        ("saved", None),
        ("pins", ["fc"]),
        ("pins", None),
    ],
)
def test_wrong_types_are_refused_by_name(name: str, bad: Any) -> None:
    with pytest.raises(ProblemError) as caught:
        replace(tiny_problem().devices[0], **{name: bad})
    assert caught.value.field == f"devices.weak.{name}"
    assert str(caught.value)


def test_numpy_scalars_are_numbers() -> None:
    problem = tiny_problem()
    first, second = problem.devices
    bucket: dict[str, Any] = {"all_reduce_s": np.float32(0.5), "size_bytes": np.int32(4)}

    def numpy_operator(operator: Operator) -> Operator:
        follows: Any = tuple(np.array(operator.follows, dtype=np.int64))
        index: Any = None if operator.bucket is None else np.int64(operator.bucket)
        return replace(operator, bucket=index, follows=follows)

    workers: dict[str, Any] = {"workers": np.int64(2), "batch_share": np.float32(0.25)}
    memory: dict[str, Any] = {"memory_bytes": np.uint64(100_000)}
    changed = replace(
        problem,
        slack=np.float64(0.1),
        buckets=(Bucket(**bucket),) * 2,
        operators=tuple(map(numpy_operator, problem.operators)),
        devices=(replace(first, **workers), replace(second, **memory)),
    )
    plain = replace(problem, buckets=(Bucket(all_reduce_s=0.5, size_bytes=4),) * 2)
    assert changed == plain
    assert changed.sha256 == plain.sha256


@pytest.mark.parametrize(
    "change",
    [
        {"precisions": ()},
        {"name": 3},
        {"provenance": None},
        {"name": "\ud800"},
        {"slack": "0"},
        {"slack": True},
        {"slack": float("nan")},
        {"deadline_s": float("inf"), "slack": 0.0},
        {"deadline_s": True, "slack": 0.0},
        {"slack": 1.1e6},
        {"groups": ((1,),)},
        {"groups": ("fc",)},
        {"groups": 5},
        {"precisions": "fp32"},
        {"precisions": 5},
        {"storage": None},
        {"operators": 5},
        {"operators": ("conv",)},
        {"operators": {"conv": 1}},
        {"buckets": ({"all_reduce_s": 0.1, "size_bytes": 1},)},
        {"buckets": (Bucket(all_reduce_s=0.1, size_bytes=1, codes=(8,)),) * 2},  # type: ignore[arg-type]
        {"buckets": None},
        {"devices": tiny_problem().devices[0]},
        {"devices": (None,)},
    ],
)
def test_wrong_types_of_the_problem_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ProblemError) as caught:
        replace(tiny_problem(), **change)
    assert caught.value.field.startswith(next(iter(change)))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"name": 5}, "operators[*].name"),
        ({"name": "\udfff"}, "operators[*].name"),
        ({"kind": None}, "operators[0].kind"),
        ({"kind": "\ud83d"}, "operators[0].kind"),
        ({"bucket": True}, "operators[0].bucket"),
        ({"bucket": 0.0}, "operators[0].bucket"),
        ({"bucket": "0"}, "operators[0].bucket"),
        ({"follows": (-1,)}, "operators[0].follows"),
        ({"follows": 0}, "operators[0].follows"),
        ({"follows": np.array([0, 1])}, "operators[0].follows"),
        ({"follows": ("conv",)}, "operators[0].follows"),
    ],
)
def test_wrong_types_of_an_operator_are_refused(change: dict[str, Any], field: str) -> None:
    problem = tiny_problem()
    operator = replace(problem.operators[0], **change)
    with pytest.raises(ProblemError) as caught:
        replace(problem, operators=(operator, *problem.operators[1:]), groups=())
    assert caught.value.field == field


@pytest.mark.parametrize(
    "name", ["\x00", " ", "a\nb", "é", "层", "\U0001f600", "x" * 10_000, "a.b[0]"]
)
def test_any_text_is_a_name(name: str) -> None:
    problem = tiny_problem()
    operators = (replace(problem.operators[0], name=name), *problem.operators[1:])
    assert replace(problem, operators=operators, groups=()).operator_index[name] == 0


def test_arrays_built_past_from_rows_are_checked() -> None:
    problem = tiny_problem()
    device = problem.devices[0]

    def tensors(**parts: Any) -> DeviceKind:
        return replace(device, tensors=replace(device.tensors, **parts))

    def saved(**parts: Any) -> DeviceKind:
        return replace(device, saved=replace(device.saved, **parts))

    for changed, field in (
        (tensors(producer=np.array([0.0, 2.0])), "devices.weak.tensors[*].consumers"),
        (tensors(producer=np.array([0])), "devices.weak.tensors[*].consumers"),
        (tensors(consumer_start=np.array([0, 3, 2])), "devices.weak.tensors[*].consumers"),
        (tensors(consumer_start=np.array([1, 2, 3])), "devices.weak.tensors[*].consumers"),
        (tensors(consumers=np.array([1.0, 3, 3])), "devices.weak.tensors[*].consumers"),
        (tensors(forward_s=np.zeros((2, 2, 2))), "devices.weak.tensors[*].forward_s"),
        (saved(saver_start=np.array([], dtype=np.int64)), "devices.weak.saved[*].savers"),
        (saved(size_bytes=np.zeros((1, 3), dtype=np.int64)), "devices.weak.saved[*].bytes"),
        (saved(dtypes=(Precision.FP32,) * 3), "devices.weak.saved[*].bytes"),
        (saved(size_bytes=np.full((2, 3), -2)), "devices.weak.saved[0].bytes.fp32"),
        (
            saved(dtypes=(Precision.FP32, Precision.BF16, Precision.FP8)),
            "devices.weak.saved[0].bytes",
        ),
    ):
        with pytest.raises(ProblemError) as caught:
            replace(problem, devices=(changed, problem.devices[1]))
        assert caught.value.field == field


@pytest.mark.parametrize("name", ["producer", "consumers", "forward_s"])
@pytest.mark.parametrize("bad", [[0, 1], None, "0", np.array(["0"])])
def test_what_is_no_array_is_refused_by_tensors(name: str, bad: Any) -> None:
    tensors = tiny_problem().devices[0].tensors
    with pytest.raises(ProblemError, match=rf"tensors\[\*\].{name}: must be an array"):
        replace(tensors, **{name: bad})


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"savers": [0]}, "saved[*].savers"),
        ({"size_bytes": None}, "saved[*].bytes"),
        ({"dtypes": 5}, "saved[*].dtypes"),
        ({"dtypes": ("fp31",)}, "saved[*].dtypes[0]"),
    ],
)
def test_what_is_no_array_is_refused_by_saved(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ProblemError) as caught:
        replace(tiny_problem().devices[0].saved, **change)
    assert caught.value.field == field


def test_nobody_else_can_change_the_arrays_of_a_problem() -> None:
    """Arrays that a caller still holds are copied; those made by `from_rows` are not."""
    tensors = tiny_problem().devices[0].tensors
    mine = tensors.forward_s.copy()
    other = replace(tensors, forward_s=mine)
    mine[:] = 7.0
    assert (other.forward_s == tensors.forward_s).all()
    with pytest.raises(ValueError, match="read-only"):
        other.forward_s[0, 0, 0] = 1.0
    assert replace(tensors).forward_s is tensors.forward_s


@pytest.mark.parametrize(
    "rows", [[["a"]], [[0.5]], [[True]], [[None]], ["ab"], [3], [[10**30]], 5, None]
)
def test_rows_of_indices_hold_whole_numbers(rows: Any) -> None:
    empty = np.zeros((1, 1, 1))
    with pytest.raises(ProblemError, match=r"tensors\[\*\].consumers"):
        CastTensors.from_rows(producer=[0], consumers=rows, forward_s=empty, backward_s=empty)


def test_the_hash_does_not_depend_on_how_the_same_problem_was_given() -> None:
    """Order and surplus of dtype columns, tables without tensors, ints for floats."""
    problem = tiny_problem()
    device = problem.devices[0]
    order = [2, 0, 1]
    shuffled = replace(
        device,
        saved=replace(
            device.saved,
            dtypes=tuple(device.saved.dtypes[i] for i in order),
            size_bytes=device.saved.size_bytes[:, order],
        ),
    )
    assert replace(problem, devices=(shuffled, problem.devices[1])) == problem
    nothing = [
        CastTensors.from_rows(
            producer=[], consumers=[], forward_s=np.zeros(shape), backward_s=np.zeros(shape)
        )
        for shape in ((0, 3, 3), (0,))
    ]
    first, second = (
        replace(problem, devices=(replace(device, tensors=tensors), problem.devices[1]))
        for tensors in nothing
    )
    assert first == second


def test_the_error_belongs_to_the_family() -> None:
    with pytest.raises(QsyncError):
        replace(tiny_problem(), operators=(Operator(name="", kind="x"),))
