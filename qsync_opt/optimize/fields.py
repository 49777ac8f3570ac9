"""Checks of the fields of data classes that `arrays` does not cover.

All raise `ProblemError` with the field, the rule and the value.
"""

from __future__ import annotations

from typing import Any, TypeVar

from qsync_opt.errors import ProblemError
from qsync_opt.precision import Precision

Member = TypeVar("Member")


def require_type(value: object, kind: type, field_name: str) -> None:
    """Refuse a value that is no instance of a class."""
    if not isinstance(value, kind):
        raise ProblemError(field_name, f"must be a {kind.__name__}", value)


def as_sequence(values: object, field_name: str) -> tuple[Any, ...]:
    """The values as a tuple; a text is no sequence of names, nor is a mapping."""
    if not isinstance(values, (tuple, list)):
        raise ProblemError(field_name, "must be a tuple or a list", values)
    return tuple(values)


def as_members(values: object, kind: type[Member], field_name: str) -> tuple[Member, ...]:
    """The values as a tuple, all of them instances of a class."""
    members = as_sequence(values, field_name)
    for index, member in enumerate(members):
        require_type(member, kind, f"{field_name}[{index}]")
    return members


def as_precision(value: object, field_name: str) -> Precision:
    """The precision that a value is or names."""
    try:
        return Precision(value)
    except ValueError:
        known = ", ".join(p.value for p in Precision)
        raise ProblemError(field_name, f"must be one of {known}", value) from None


def as_precisions(values: object, name: str) -> tuple[Precision, ...]:
    """The precisions that values are or name."""
    listed = enumerate(as_sequence(values, name))
    return tuple(as_precision(value, f"{name}[{index}]") for index, value in listed)
