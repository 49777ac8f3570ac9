"""`PrecisionPlan`: the precision of every operator on every device kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from qsync_opt.errors import PlanError
from qsync_opt.precision import Precision


@dataclass(frozen=True, kw_only=True)
class PrecisionPlan:
    """A full assignment of precisions, bound to the problem it was made for.

    Two plans are equal where problem and precisions are, whatever the order of the names.

    Attributes:
        problem: SHA-256 of the canonical problem (`AllocationProblem.sha256`).
        devices: device kind -> operator name -> precision. Every operator is listed,
            followers and fixed ones too. Strings such as `"bf16"` become `Precision`.

    Raises:
        PlanError: no device kind, a name that is not text, or a precision that is not one.
    """

    problem: str
    devices: Mapping[str, Mapping[str, Precision]]

    def __post_init__(self) -> None:
        _require_text(self.problem, "problem", "must be the SHA-256 of a problem")
        if not isinstance(self.devices, Mapping) or not self.devices:
            rule = "must map at least one device kind to its operators"
            raise PlanError("devices", rule, self.devices)
        frozen = {}
        for kind, operators in self.devices.items():
            _require_text(kind, "devices", "must have names of device kinds as keys")
            where = f"devices.{kind}"
            if not isinstance(operators, Mapping):
                raise PlanError(where, "must map operator names to precisions", operators)
            row = {}
            for name, precision in operators.items():
                _require_text(name, where, "must have operator names as keys")
                row[name] = _precision(precision, f"{where}.{name}")
            frozen[kind] = MappingProxyType(row)
        object.__setattr__(self, "devices", MappingProxyType(frozen))

    def __hash__(self) -> int:
        # Sets, because equality does not look at the order of the names either.
        rows = frozenset((kind, frozenset(row.items())) for kind, row in self.devices.items())
        return hash((self.problem, rows))

    def __reduce__(self) -> tuple[object, ...]:
        # MappingProxyType cannot be copied between processes; plain dicts can.
        devices = {kind: dict(row) for kind, row in self.devices.items()}
        return (_rebuild, (self.problem, devices))

    def for_device(self, kind: str) -> Mapping[str, Precision]:
        """The precision of every operator on one device kind.

        Raises:
            PlanError: the plan has no such device kind.
        """
        if kind not in self.devices:
            raise PlanError("device", f"must be one of {', '.join(self.devices)}", kind)
        return self.devices[kind]

    def counts(self, kind: str) -> dict[Precision, int]:
        """How many operators run at each precision on one device kind.

        Raises:
            PlanError: the plan has no such device kind.
        """
        return dict(Counter(self.for_device(kind).values()))


def _require_text(value: object, field: str, rule: str) -> None:
    """Raise unless `value` is a non-empty string that can be written to a file."""
    if not isinstance(value, str) or not value:
        raise PlanError(field, rule, value)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise PlanError(field, "must be text without lone surrogates", value) from None


def _precision(value: object, field: str) -> Precision:
    try:
        return value if type(value) is Precision else Precision(value)
    except ValueError:
        known = ", ".join(p.value for p in Precision)
        raise PlanError(field, f"must be one of {known}", value) from None


def _rebuild(problem: str, devices: dict[str, dict[str, Precision]]) -> PrecisionPlan:
    return PrecisionPlan(problem=problem, devices=devices)
