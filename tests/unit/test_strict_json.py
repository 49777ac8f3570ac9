"""Strict JSON: what is not the format is refused with its place, the rule and the value."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from qsync_opt.conversion import to_problem
from qsync_opt.errors import FormatError
from qsync_opt.optimize.problem import AllocationProblem
from qsync_opt.schema import PlanDocument, ProblemDocument
from qsync_opt.strict_json import decode
from tests.problems_for_tests import tiny_json, tiny_problem


def text_of(data: object) -> bytes:
    return json.dumps(data, separators=(",", ":")).encode()


def parse(raw: bytes) -> AllocationProblem:
    return to_problem(decode(raw, ProblemDocument, "problem.json"))


TINY = text_of(tiny_json())


def test_every_truncation_is_refused() -> None:
    for length in range(len(TINY)):
        with pytest.raises(FormatError, match="must be complete, valid JSON"):
            parse(TINY[:length])


@pytest.mark.parametrize(
    ("content", "rule", "value"),
    [
        (b"", "complete, valid JSON", "truncated"),
        (b"\xef\xbb\xbf" + TINY, "complete, valid JSON", "byte 0"),
        (TINY.decode().encode("utf-16"), "complete, valid JSON", "malformed"),
        (TINY + b"{}", "complete, valid JSON", "trailing"),
        (TINY.replace(b'"tiny"', b'"\xff"'), "complete, valid JSON", "UTF-8"),
        (TINY.replace(b'"tiny"', b'"\\ud800"'), "complete, valid JSON", ""),
        (TINY.replace(b'"tiny"', b'"\xed\xa0\x80"'), "complete, valid JSON", "UTF-8"),
        (TINY.replace(b"0.001", b"NaN"), "complete, valid JSON", "malformed"),
        (TINY.replace(b"0.001", b"Infinity"), "complete, valid JSON", "malformed"),
        (TINY.replace(b"0.001", b"-Infinity"), "complete, valid JSON", "malformed"),
        (TINY.replace(b"0.001", b"01"), "complete, valid JSON", "number"),
        (b"[" * 100_000, "must be a JSON object", "["),
        (b'{"format":' + b"[" * 100_000, "must not be nested this deeply", ""),
        (TINY[:-1] + b',"x":' + b"[" * 100_000, "must not be nested this deeply", ""),
        (b"[]", "must be a JSON object", "[]"),
        (b"null", "must be a JSON object", "null"),
        (b'"x"', "must be a JSON object", "x"),
        (b"\x00" * 64, "complete, valid JSON", "malformed"),
        (b"PK\x03\x04", "complete, valid JSON", "malformed"),
    ],
)
def test_what_is_not_json_is_refused(content: bytes, rule: str, value: str) -> None:
    with pytest.raises(FormatError) as caught:
        parse(content)
    assert caught.value.field == "problem.json"
    assert rule in caught.value.rule
    assert value in str(caught.value.value)


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        (b'"name":"tiny"', b'"name":"tiny","name":"tiny"', "name"),
        (b'"name":"strong"', b'"name":"strong","workers":1', "workers"),
        (b'"slack":0.1', b'"slack":0.1,"slack":0.1', "slack"),
        (b'"fp32":4096', b'"fp32":4096,"fp32":4096', "fp32"),
        (b'"pins":{"fc":"fp32"}', b'"pins":{"fc":"fp32","fc":"fp32"}', "fc"),
        (b'"bucket":1', b'"bucket":1,"bucket":1', "bucket"),
        (b'"producer":0', b'"producer":0,"producer":0', "producer"),
        (b'"version":1', b'"version":1,"version":1', "version"),
        # With an escaped quotation mark elsewhere, and with the key itself escaped.
        (b'"name":"tiny"', b'"name":"a\\"b\\\\","name":"tiny"', "name"),
        (b'"name":"tiny"', b'"n\\u0061me":"tiny","name":"tiny"', "name"),
    ],
)
def test_repeated_keys_are_refused(old: bytes, new: bytes, key: str) -> None:
    content = TINY.replace(old, new, 1)
    assert content != TINY
    with pytest.raises(FormatError, match="must not repeat a key") as caught:
        parse(content)
    assert caught.value.value == key


def test_repeated_keys_of_a_plan_are_refused() -> None:
    content = (
        b'{"format":"qsync-opt/plan","version":1,"problem":"x",'
        b'"devices":{"a":{"fc":"fp32","fc":"bf16"}}}'
    )
    with pytest.raises(FormatError, match="must not repeat a key"):
        decode(content, PlanDocument, "plan.json")


def test_escapes_in_names_are_read() -> None:
    content = TINY.replace(b'"tiny"', b'"a\\"\\\\\\n\\u00e9\\ud83d\\ude00\\/"')
    assert parse(content).name == 'a"\\\né\U0001f600/'


def test_blanks_between_tokens_are_read() -> None:
    content = json.dumps(tiny_json(), indent=3).replace("\n", "\r\n\t").encode()
    assert parse(content) == tiny_problem()


# Format and version come before everything else.


@pytest.mark.parametrize(
    ("change", "field", "rule", "value"),
    [
        ({"version": 2}, "version", "qsync-opt/problem that this release reads (1)", 2),
        ({"version": 2, "new_key": 1}, "version", "this release reads (1)", 2),
        ({"version": 2, "devices": "elsewhere"}, "version", "this release reads (1)", 2),
        ({"version": 0}, "version", "this release reads (1)", 0),
        ({"version": "1"}, "version", "this release reads (1)", "1"),
        ({"version": True}, "version", "this release reads (1)", True),
        ({"version": 1.0}, "version", "this release reads (1)", 1.0),
        ({"version": None}, "version", "this release reads (1)", None),
        ({"version": 10**30}, "version", "this release reads (1)", 10**30),
        ({"format": "qsync-opt/plan"}, "format", "'qsync-opt/problem'", "qsync-opt/plan"),
        ({"format": None}, "format", "'qsync-opt/problem'", None),
        ({"format": ["qsync-opt/problem"]}, "format", "'qsync-opt/problem'", None),
    ],
)
def test_format_and_version_are_judged_first(
    change: dict[str, Any], field: str, rule: str, value: object
) -> None:
    with pytest.raises(FormatError) as caught:
        parse(text_of(tiny_json() | change))
    assert caught.value.field == field
    assert rule in caught.value.rule
    assert caught.value.value == (value if value is not None else change[field])


def test_a_problem_is_not_a_plan() -> None:
    with pytest.raises(FormatError, match="must be 'qsync-opt/plan' here"):
        decode(TINY, PlanDocument, "plan.json")


def test_an_object_without_header_is_refused() -> None:
    with pytest.raises(FormatError, match="format: must be 'qsync-opt/problem' here, got None"):
        parse(b"{}")


# Keys and types: the path, the rule and the value.

Change = Callable[[dict[str, Any]], object]


def put(*steps: str | int, value: object) -> Change:
    def change(data: Any) -> None:
        for step in steps[:-1]:
            data = data[step]
        data[steps[-1]] = value

    return change


def drop(*steps: str | int) -> Change:
    def change(data: Any) -> None:
        for step in steps[:-1]:
            data = data[step]
        del data[steps[-1]]

    return change


D1 = ("devices", 1)
CASES: list[tuple[Change, str, str, object]] = [
    (
        put("extra", value=1),
        "problem.json",
        "must have only the keys format, version, name",
        "extra",
    ),
    (put(*D1, "extra", value=1), "devices[1]", "only the keys name, workers", "extra"),
    (put("buckets", 0, "size", value=1), "buckets[0]", "only the keys all_reduce_s, bytes", "size"),
    (put("operators", 0, "x y", value=1), "operators[0]", "only the keys name, kind", "x y"),
    (drop("devices"), "problem.json", "must have the keys format, version", "no 'devices'"),
    (drop(*D1, "saved"), "devices[1]", "must have the keys name, workers", "no 'saved'"),
    (drop("buckets", 1, "bytes"), "buckets[1]", "keys all_reduce_s, bytes", "no 'bytes'"),
    (put("precisions", value=[]), "precisions", "must name at least one precision", []),
    (put("name", value=3), "name", "must be a string", 3),
    (put("name", value=None), "name", "must be a string", None),
    (put("operators", value={}), "operators", "must be a list", {}),
    (put("operators", 1, value=[]), "operators[1]", "must be a JSON object", []),
    (put("operators", 1, "name", value=7), "operators[1].name", "must be a string", 7),
    (put("operators", 0, "bucket", value="1"), "operators[0].bucket", "whole number or null", "1"),
    (put("operators", 0, "bucket", value=-1), "operators[0].bucket", "whole number >= 0", -1),
    (put("operators", 0, "bucket", value=True), "operators[0].bucket", "whole number", True),
    (put("operators", 1, "follows", value=[0.5]), "operators[1].follows[0]", "whole number", 0.5),
    (put("operators", 1, "follows", value=0), "operators[1].follows", "must be a list", 0),
    (put("buckets", 0, "bytes", value=1.5), "buckets[0].bytes", "must be a whole number", 1.5),
    (put("buckets", 0, "bytes", value=2**53 + 1), "buckets[0].bytes", "<= 2^53", 2**53 + 1),
    (put("buckets", 0, "bytes", value=10**40), "buckets[0].bytes", "<= 2^53", 10**40),
    (put("buckets", 0, "all_reduce_s", value="1"), "buckets[0].all_reduce_s", "a number", "1"),
    (put("buckets", 0, "all_reduce_s", value=None), "buckets[0].all_reduce_s", "a number", None),
    (put("groups", value=["conv"]), "groups[0]", "must be a list", "conv"),
    (put("groups", 0, 1, value=3), "groups[0][1]", "must be a string", 3),
    (put("deadline_s", value="soon"), "deadline_s", "a number or null", "soon"),
    (put("slack", value=False), "slack", "must be a number", False),
    (put(*D1, "workers", value=1.5), "devices[1].workers", "whole number", 1.5),
    (put(*D1, "workers", value="two"), "devices[1].workers", "whole number", "two"),
    (put(*D1, "memory_bytes", value=-1), "devices[1].memory_bytes", "whole number >= 0", -1),
    (put(*D1, "forward_s", 3, 1, value="x"), "devices[1].forward_s[3][1]", "number or null", "x"),
    (put(*D1, "forward_s", 3, 1, value=True), "devices[1].forward_s[3][1]", "number", True),
    (put(*D1, "forward_s", 3, value=[1, 2]), "devices[1].forward_s[3]", "one entry per", [1, 2]),
    (put(*D1, "backward_s", 3, value=[]), "devices[1].backward_s[3]", "one entry per", []),
    (
        put(*D1, "backward_s", 3, 1, value=None),
        "devices[1].backward_s[3][1]",
        "must be null exactly where forward_s is",
        None,
    ),
    (
        put(*D1, "perturbation", 1, 2, value=4),
        "devices[1].perturbation[1][2]",
        "must be null exactly where forward_s is",
        4.0,
    ),
    (
        put(*D1, "forward_transient_bytes", 0, 0, value=1.5),
        "devices[1].forward_transient_bytes[0][0]",
        "whole number or null",
        1.5,
    ),
    (
        put(*D1, "tensors", 1, "forward_s", 2, 0, value=None),
        "devices[1].tensors[1].forward_s[2][0]",
        "must be a number",
        None,
    ),
    (
        put(*D1, "tensors", 1, "forward_s", value=[[0.0] * 3]),
        "devices[1].tensors[1].forward_s",
        "one row per precision (3)",
        [[0.0] * 3],
    ),
    (
        put(*D1, "tensors", 1, "backward_s", 2, value=[0.0]),
        "devices[1].tensors[1].backward_s[2]",
        "one entry per precision (3)",
        [0.0],
    ),
    (
        put(*D1, "tensors", 0, "producer", value=None),
        "devices[1].tensors[0].producer",
        "must be a whole number",
        None,
    ),
    (
        put(*D1, "saved", 0, "bytes", "bf16", value=-5),
        "devices[1].saved[0].bytes.bf16",
        "must be a whole number >= 0",
        -5,
    ),
    (
        put(*D1, "saved", 0, "bytes", "fp12", value=5),
        "devices[1].saved[0].bytes",
        "must have only the keys fp32, bf16, int8",
        "fp12",
    ),
    (put(*D1, "pins", value=[]), "devices[1].pins", "must be a JSON object", []),
    (put(*D1, "pins", value={"a": "fp32", "fc": 8}), "devices[1].pins.fc", "a string", 8),
]


@pytest.mark.parametrize(("change", "field", "rule", "value"), CASES)
def test_wrong_keys_and_types_are_refused(
    change: Change, field: str, rule: str, value: object
) -> None:
    data = tiny_json()
    change(data)
    with pytest.raises(FormatError) as caught:
        parse(text_of(data))
    assert caught.value.field == field
    assert rule in caught.value.rule
    assert caught.value.value == value
    assert type(caught.value.value) is type(value)


def test_numbers_beyond_a_double_are_refused() -> None:
    for text in (b"1e400", b"-1e400", b"9" * 400):
        with pytest.raises(FormatError, match="that a double can hold") as caught:
            parse(TINY.replace(b"0.001", text))
        assert caught.value.field == "buckets[0].all_reduce_s"


def test_integers_of_any_length_are_refused_where_whole_numbers_stand() -> None:
    content = TINY.replace(b'"bytes":4000', b'"bytes":' + b"9" * 100_000)
    with pytest.raises(FormatError) as caught:
        parse(content)
    assert caught.value.field == "buckets[0].bytes"
