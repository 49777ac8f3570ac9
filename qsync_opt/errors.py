"""The one family of errors that the library raises for a user's mistake or an unusable tool.

Each message names the field, the rule it breaks, the value found, and what to do next.
Everything here derives from `QsyncError`, so one `except` clause catches the family; the
classes also derive from the built-in exception that fits (`ValueError`, `RuntimeError`).
"""

from __future__ import annotations

from enum import Enum

_LONGEST_VALUE = 120


def _shorten(value: object) -> str:
    if isinstance(value, Enum):
        value = value.value
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print integers of more than 4300 digits
        text = f"{type(value).__name__} too long to print"
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."


class QsyncError(Exception):
    """Base class of every error that this library raises on purpose."""


class FieldError(QsyncError, ValueError):
    """A value breaks a rule.

    Args:
        field: where the value stands, for example `devices[0].forward_s[3][1]`.
        rule: the rule, for example `must be finite and >= 0`.
        value: the value found.
        remedy: what to do next; may be empty.

    Attributes:
        file: that holds the field; empty where it comes from no file.
    """

    def __init__(self, field: str, rule: str, value: object, remedy: str = "") -> None:
        self.field = field
        self.rule = rule
        self.value = value
        self.remedy = remedy
        self.file = ""
        message = f"{field}: {rule}, got {_shorten(value)}"
        super().__init__(f"{message}. {remedy}" if remedy else message)

    def __str__(self) -> str:
        message = super().__str__()
        return f"{self.file}: {message}" if self.file else message


class ProblemError(FieldError):
    """An allocation problem is malformed or contradicts itself."""


class PlanError(FieldError):
    """A plan does not fit the problem it is used with."""


class FormatError(FieldError):
    """A file is not what its format asks for: syntax, version, or an unknown or missing key."""


class ParameterError(FieldError):
    """An option of a call is out of its range or unknown."""


class GraphError(FieldError):
    """A graph of operators is malformed or contradicts itself."""


class CostsError(FieldError):
    """Measured costs are malformed, or do not belong to the graph that they are used with."""


class MeasureError(QsyncError, RuntimeError):
    """A device cannot be measured, or not in this state.

    Args:
        what: what was found, and where.
        remedy: what to do next.
    """

    def __init__(self, what: str, remedy: str) -> None:
        self.what = what
        self.remedy = remedy
        super().__init__(f"{what}. {remedy}")


class InfeasibleError(QsyncError, RuntimeError):
    """A plan was asked for and there is none; the message carries the reason.

    Args:
        message: the reason, and what to do next.
        proven: whether it is proven that no plan exists; else none was found.
    """

    def __init__(self, message: str, *, proven: bool = False) -> None:
        self.proven = proven
        super().__init__(message)


class SolverUnavailableError(QsyncError, RuntimeError):
    """A solver back end is missing, refuses the model, or crashed.

    Args:
        solver: name of the back end.
        reason: what happened, in the solver's own words where there are any.
        remedy: what to do next.
    """

    def __init__(self, solver: str, reason: str, remedy: str = "") -> None:
        self.solver = solver
        self.reason = reason
        super().__init__(f"solver {solver}: {reason}" + (f". {remedy}" if remedy else ""))


class CaptureError(QsyncError, RuntimeError):
    """A training step cannot be recorded, or holds what a graph cannot describe.

    Args:
        what: what was found, and where.
        remedy: what to do next.
    """

    def __init__(self, what: str, remedy: str) -> None:
        self.what = what
        self.remedy = remedy
        super().__init__(f"{what}. {remedy}")


class KernelError(QsyncError, RuntimeError):
    """A kernel could not be built, the device refused its launch, or its results are wrong.

    Args:
        kernel: what was built, launched or checked.
        reason: what happened, in the tool's own words where there are any.
        remedy: what to do next.
    """

    def __init__(self, kernel: str, reason: str, remedy: str = "") -> None:
        self.kernel = kernel
        self.reason = reason
        super().__init__(f"kernel {kernel}: {reason}" + (f". {remedy}" if remedy else ""))


class TrainError(QsyncError, RuntimeError):
    """A training job cannot start or go on; every rank that can say so says the same.

    Args:
        what: what was found, and on which rank.
        remedy: what to do next.
    """

    def __init__(self, what: str, remedy: str) -> None:
        self.what = what
        self.remedy = remedy
        super().__init__(f"{what}. {remedy}")
