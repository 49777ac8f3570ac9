"""Laws of the files: writing then reading is the identity; bad content is an error, no worse."""

from __future__ import annotations

import copy
import json
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qsync_opt.conversion import from_plan, from_problem, to_plan, to_problem
from qsync_opt.errors import QsyncError
from qsync_opt.optimize.evaluate import plan_from_columns
from qsync_opt.optimize.generate import generate_problem
from qsync_opt.optimize.problem import AllocationProblem
from qsync_opt.plan import PrecisionPlan
from qsync_opt.precision import Precision
from qsync_opt.schema import PlanDocument, ProblemDocument
from qsync_opt.strict_json import decode, encode
from tests.problems_for_tests import problem_from_json, tiny_json, tiny_problem

TABLES = ("forward_s", "backward_s", "perturbation")
NUMBERS = st.floats(min_value=0.0, max_value=1e300)
TEXT = st.text(min_size=1).filter(lambda text: text.isascii() or _writable(text))


def _writable(text: str) -> bool:
    return not any(0xD800 <= ord(letter) <= 0xDFFF for letter in text)


def parse(raw: bytes) -> AllocationProblem:
    return to_problem(decode(raw, ProblemDocument, "problem.json"))


def arrays_of(problem: AllocationProblem) -> list[tuple[str, bytes]]:
    """Every array of a problem, bit for bit."""
    parts = []
    for device in problem.devices:
        for holder in (device, device.tensors, device.saved):
            parts += [
                (f"{name}{value.shape}{value.dtype}", value.tobytes())
                for name, value in vars(holder).items()
                if isinstance(value, np.ndarray)
            ]
    return parts


@given(
    operators=st.integers(1, 30),
    precisions=st.integers(1, 6),
    devices=st.integers(1, 3),
    buckets=st.integers(0, 5),
    seed=st.integers(0, 2**31),
    graph=st.sampled_from(["chain", "branching"]),
    communication=st.lists(st.integers(2, 16), max_size=3),
)
def test_generated_problems_come_back(
    operators: int,
    precisions: int,
    devices: int,
    buckets: int,
    seed: int,
    graph: str,
    communication: list[int],
) -> None:
    problem = generate_problem(
        operators=operators,
        precisions=precisions,
        devices=devices,
        buckets=buckets,
        seed=seed,
        graph=graph,
        communication=communication,
    )
    raw = encode(from_problem(problem))
    again = parse(raw)
    assert again == problem
    assert again.operators == problem.operators
    assert again.buckets == problem.buckets
    assert arrays_of(again) == arrays_of(problem)
    assert encode(from_problem(again)) == raw


@given(values=st.lists(NUMBERS, min_size=18, max_size=18), name=TEXT, kind=TEXT)
def test_any_number_and_any_name_come_back_bit_for_bit(
    values: list[float], name: str, kind: str
) -> None:
    data = tiny_json()
    flat = iter(values)
    for table in TABLES:
        for row in (0, 3):
            data["devices"][0][table][row] = [next(flat) for _ in range(3)]
    data["operators"][2] = {"name": f"op {name}", "kind": kind, "bucket": None}
    problem = problem_from_json(data)
    again = parse(encode(from_problem(problem)))
    for table in TABLES:
        original = [data["devices"][0][table][row] for row in (0, 3)]
        found = getattr(again.devices[0], table)[[0, 3]].tolist()
        assert struct.pack("6d", *sum(found, [])) == struct.pack("6d", *sum(original, []))
    assert again.operators[2].name == f"op {name}"
    assert again.operators[2].kind == kind
    assert again == problem


@given(text=st.from_regex(r"\A(0|[1-9][0-9]{0,25})(\.[0-9]{1,30})?([eE][+-]?[0-9]{1,2})?\Z"))
def test_decimal_numbers_are_read_as_python_reads_them(text: str) -> None:
    data = tiny_json()
    data["buckets"][0]["all_reduce_s"] = "here"
    raw = json.dumps(data).replace('"here"', text).encode()
    assert parse(raw).buckets[0].all_reduce_s.hex() == float(text).hex()


@given(
    problem=TEXT,
    devices=st.dictionaries(
        TEXT, st.dictionaries(TEXT, st.sampled_from(list(Precision)), max_size=6), min_size=1
    ),
    bits=st.lists(st.sampled_from([2, 3, 4, 8, 16, 32]), max_size=4),
)
def test_plans_come_back(
    problem: str, devices: dict[str, dict[str, Precision]], bits: list[int]
) -> None:
    plan = PrecisionPlan(problem=problem, devices=devices, communication=tuple(bits))
    raw = encode(from_plan(plan))
    again = to_plan(decode(raw, PlanDocument, "plan.json"))
    assert again == plan
    assert hash(again) == hash(plan)
    assert encode(from_plan(again)) == raw


@given(columns=st.lists(st.integers(0, 2), min_size=8, max_size=8))
def test_columns_plan_file_plan(columns: list[int]) -> None:
    problem = tiny_problem()
    plan = plan_from_columns(problem, [np.array(columns[:4]), np.array(columns[4:])])
    assert to_plan(decode(encode(from_plan(plan)), PlanDocument, "plan.json")) == plan


# Junk.

JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([-1, 0, 1, 2, 3, 4, 2**53, 2**53 + 1, 2**63, 2**64, 10**400]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([-0.0, 5e-324, 1.7976931348623157e308, 1e-300]),
    st.text(max_size=5),
    st.sampled_from(["fp32", "tf32", "bf16", "fp8", "int8", "conv", "fc", "weak", "strong"]),
    st.lists(st.none() | st.integers(-1, 5) | st.floats(0, 1) | st.text(max_size=2), max_size=4),
    st.dictionaries(st.sampled_from(["fp32", "bf16", "name", "fc", ""]), st.integers(-1, 5)),
    # A new table every time: later changes reach into it.
    st.sampled_from([3, 4]).map(lambda rows: [[0.0] * 3 for _ in range(rows)]),
)


def places(data: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value in parsed JSON."""
    found = [prefix] if prefix else []
    entries = data.items() if isinstance(data, dict) else enumerate(data)
    for key, value in entries:
        if isinstance(value, (dict, list)):
            found += places(value, (*prefix, key))
        else:
            found.append((*prefix, key))
    return found


PLACES = places(tiny_json())


@st.composite
def damaged(draw: st.DrawFn) -> Any:
    """The tiny problem with values replaced, removed, repeated or exchanged."""
    data = tiny_json()
    for _ in range(draw(st.integers(1, 3))):
        *steps, last = draw(st.sampled_from(PLACES))
        holder: Any = data
        try:
            for step in steps:
                holder = holder[step]
            deed = draw(st.sampled_from(["replace", "remove", "repeat", "copy"]))
            if deed == "replace":
                holder[last] = draw(JUNK)
            elif deed == "remove":
                del holder[last]
            elif deed == "repeat" and isinstance(holder, list):
                holder.append(copy.deepcopy(holder[last]))
            else:
                source: Any = data
                for step in draw(st.sampled_from(PLACES)):
                    source = source[step]
                holder[last] = copy.deepcopy(source)
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change took the place away
    return data


def parse_or_error(raw: bytes) -> AllocationProblem | str:
    """The problem, or the message of an error of the family; any other error passes."""
    try:
        return parse(raw)
    except QsyncError as error:
        return str(error)


@given(data=damaged())
def test_a_damaged_problem_is_a_problem_or_an_error_of_the_family(data: Any) -> None:
    outcome = parse_or_error(json.dumps(data).encode())
    if isinstance(outcome, str):
        assert outcome.encode()  # it can be shown
    else:
        assert parse(encode(from_problem(outcome))) == outcome


@given(
    position=st.integers(0, 10**6), junk=st.binary(min_size=0, max_size=4), cut=st.integers(0, 4)
)
def test_damaged_bytes_are_a_problem_or_an_error_of_the_family(
    position: int, junk: bytes, cut: int
) -> None:
    raw = encode(from_problem(tiny_problem()))
    position %= len(raw)
    outcome = parse_or_error(raw[:position] + junk + raw[position + cut :])
    assert not isinstance(outcome, str) or outcome.encode()


@given(raw=st.binary() | st.text().map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes_are_refused(raw: bytes) -> None:
    for schema in (ProblemDocument, PlanDocument):
        with pytest.raises(QsyncError):
            decode(raw, schema, "file.json")
