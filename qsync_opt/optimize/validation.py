"""`validate`: every rule of an allocation problem, checked before any solver or GPU is used.

Each broken rule raises `ProblemError` with the field, the rule, the value and a remedy. Types
of single entries (`arrays`) and of keys in files (`schema`) are judged where they come in;
the rules of one device kind are in `device_validation`. Not judged here: whether a plan exists
(budgets, and pins on followers), which `explain` answers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from qsync_opt.errors import ProblemError
from qsync_opt.optimize.arrays import finite_number, whole_number
from qsync_opt.optimize.device_validation import validate_device
from qsync_opt.plan import CODE_BITS, FULL_BITS
from qsync_opt.precision import HANDED_ON, Precision

if TYPE_CHECKING:
    from qsync_opt.optimize.problem import AllocationProblem, Bucket, Operator

#: Batch shares are decimal fractions in files; their sum is allowed this rounding error.
SHARE_TOLERANCE = 1e-9

#: Bounds and prices are multiples of objectives, and have to stay numbers, too.
_LARGEST_OBJECTIVE = 1e300

#: A slack beyond this is no pace at all, and would only invite overflow.
LARGEST_SLACK = 1e6


def validate(problem: AllocationProblem) -> None:
    """Check every rule of the format.

    Raises:
        ProblemError: the first rule broken.
    """
    for name in ("name", "provenance"):
        _text(getattr(problem, name), name, empty=True)
    _validate_precisions(problem)
    _validate_operators(problem)
    _validate_buckets(problem)
    _validate_pace(problem)
    if not problem.devices:
        raise ProblemError("devices", "must name at least one device kind", [])
    _unique((device.name for device in problem.devices), "devices[*].name")
    for device in problem.devices:
        validate_device(problem, device)
    _validate_shares(problem)
    _validate_groups(problem)
    _validate_objective(problem)


def _text(value: object, field: str, *, empty: bool = False) -> None:
    """Refuse what is not a string, or cannot be written to a file."""
    if not isinstance(value, str) or not (value or empty):
        raise ProblemError(
            field, "must be a string" if empty else "must be a non-empty string", value
        )
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ProblemError(field, "must be text without lone surrogates", value) from None


def _unique(names: Iterable[object], where: str) -> None:
    seen: set[object] = set()
    for name in names:
        _text(name, where)
        if name in seen:
            raise ProblemError(where, "must be unique", name, "Rename one of the two")
        seen.add(name)


def _validate_precisions(problem: AllocationProblem) -> None:
    if not problem.precisions:
        raise ProblemError("precisions", "must name at least one precision", [])
    for index, precision in enumerate(problem.precisions):
        if precision in problem.precisions[:index]:
            raise ProblemError(f"precisions[{index}]", "must be unique", precision.value)
    for name in ("storage", "output"):
        values: Sequence[Precision] = getattr(problem, name)
        if len(values) != len(problem.precisions):
            rule = f"must have one entry per precision ({len(problem.precisions)})"
            raise ProblemError(name, rule, [value.value for value in values])
        if Precision.TF32 in values:
            field = f"{name}[{values.index(Precision.TF32)}]"
            raise ProblemError(field, "must be a dtype; tf32 is a compute mode", "tf32")
    for index, dtype in enumerate(problem.output):
        if dtype not in HANDED_ON:
            rule = "must be one of " + ", ".join(p.value for p in HANDED_ON)
            raise ProblemError(f"output[{index}]", rule, dtype.value)


def _validate_operators(problem: AllocationProblem) -> None:
    if not problem.operators:
        raise ProblemError("operators", "must hold at least one operator", [])
    _unique((operator.name for operator in problem.operators), "operators[*].name")
    buckets = len(problem.buckets)
    for index, operator in enumerate(problem.operators):
        where = f"operators[{index}]"
        _text(operator.kind, f"{where}.kind", empty=True)
        if operator.bucket is not None:
            whole_number(operator.bucket, f"{where}.bucket", least=0)
            if operator.bucket >= buckets:
                rule = f"must be below the number of buckets ({buckets})"
                raise ProblemError(f"{where}.bucket", rule, operator.bucket)
        if not isinstance(operator.follows, tuple):
            rule = "must be a tuple of operator indices"
            raise ProblemError(f"{where}.follows", rule, operator.follows)
        if operator.follows:
            _validate_follows(operator, index, f"{where}.follows")


def _validate_follows(operator: Operator, index: int, where: str) -> None:
    for source in operator.follows:
        whole_number(source, where, least=0)
        if source >= index:
            raise ProblemError(
                where,
                f"must name operators before this one (index {index})",
                source,
                "Give operators in forward order, without cycles",
            )
    if len(set(operator.follows)) != len(operator.follows):
        raise ProblemError(where, "must not name an operator twice", list(operator.follows))


def _validate_buckets(problem: AllocationProblem) -> None:
    for index, bucket in enumerate(problem.buckets):
        finite_number(bucket.all_reduce_s, f"buckets[{index}].all_reduce_s")
        whole_number(bucket.size_bytes, f"buckets[{index}].bytes", least=0)
        _validate_codes(bucket, f"buckets[{index}].codes")


def _validate_codes(bucket: Bucket, where: str) -> None:
    least, most = CODE_BITS
    before = FULL_BITS
    for index, code in enumerate(bucket.codes):
        field = f"{where}[{index}].bits"
        whole = isinstance(code.bits, (int, np.integer)) and not isinstance(code.bits, bool)
        if not whole or not least <= code.bits <= most:
            rule = f"must be a whole number from {least} to {most}"
            raise ProblemError(field, rule, code.bits)
        if code.bits >= before:
            rule = f"must be below the bits before it ({before})"
            raise ProblemError(field, rule, code.bits, "Give each once, most bits first")
        before = code.bits
        for name in ("all_reduce_s", "perturbation"):
            finite_number(getattr(code, name), f"{where}[{index}].{name}")


def _validate_pace(problem: AllocationProblem) -> None:
    finite_number(problem.slack, "slack")
    if problem.slack > LARGEST_SLACK:
        rule = f"must be at most {LARGEST_SLACK:g} (a fraction of the fastest iteration time)"
        raise ProblemError("slack", rule, problem.slack)
    if problem.deadline_s is not None:
        finite_number(problem.deadline_s, "deadline_s", positive=True)
        if problem.slack:
            raise ProblemError(
                "slack",
                "must be 0 where deadline_s is given",
                problem.slack,
                "Drop one of the two",
            )


def _validate_shares(problem: AllocationProblem) -> None:
    total = math.fsum(device.workers * device.batch_share for device in problem.devices)
    if abs(total - 1.0) > SHARE_TOLERANCE:
        raise ProblemError(
            "devices[*].batch_share",
            "must sum to 1 over all workers (workers x batch_share, every kind)",
            total,
            "Divide each share by this sum",
        )


def _validate_objective(problem: AllocationProblem) -> None:
    """Every objective must be a number; those of the operators alone have been judged."""
    worst = [max(code.perturbation for code in bucket.choices) for bucket in problem.buckets]
    for device in problem.devices:
        worst.append(problem.weight(device) * float(device.perturbation.max(axis=1).sum()))
    total = sum(worst)
    if not total < _LARGEST_OBJECTIVE:
        rule = f"must sum to less than {_LARGEST_OBJECTIVE:g}, with all operators"
        raise ProblemError("buckets[*].codes[*].perturbation", rule, total)


def _validate_groups(problem: AllocationProblem) -> None:
    group_of: dict[str, int] = {}
    for index, group in enumerate(problem.groups):
        where = f"groups[{index}]"
        if not group:
            raise ProblemError(where, "must name at least one operator", list(group))
        for name in group:
            if not isinstance(name, str) or name not in problem.operator_index:
                raise ProblemError(where, "must name operators of the problem", name)
            if name in group_of:
                other = group_of[name]
                rule = f"must not name an operator that groups[{other}] has named"
                raise ProblemError(where, rule, name, "Merge the groups, or name it once")
            group_of[name] = index
        _validate_group_precisions(problem, group, where)


def _validate_group_precisions(
    problem: AllocationProblem, group: tuple[str, ...], where: str
) -> None:
    rows = [problem.operator_index[name] for name in group]
    for device in problem.devices:
        pinned = {device.pins[name] for name in group if name in device.pins}
        if len(pinned) > 1:
            raise ProblemError(
                f"devices.{device.name}.pins",
                f"must not contradict {where} ({', '.join(group)} share a precision)",
                sorted(p.value for p in pinned),
                "Drop one of the pins, or split the group",
            )
        shared = device.available[rows].all(axis=0)
        for precision in pinned:
            shared = shared & (np.array(problem.precisions) == precision)
        if not shared.any():
            raise ProblemError(
                where,
                f"must have a precision that every member has on {device.name}"
                + (" and the pins allow" if pinned else ""),
                list(group),
                "Split the group or measure the missing precision",
            )
