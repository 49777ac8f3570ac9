"""`PrecisionPlan`: the precision of every operator on every kind, and the bits of every bucket."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from qsync_opt.errors import PlanError
from qsync_opt.precision import Precision

#: Bits of a gradient that is sent as it is.
FULL_BITS = 32

#: Fewest and most bits of a gradient that is sent as codes.
CODE_BITS = (2, 16)


@dataclass(frozen=True, kw_only=True)
class PrecisionPlan:
    """A full assignment of precisions, bound to the problem it was made for.

    Two plans are equal where problem, precisions and bits are, whatever the order of the names.

    Attributes:
        problem: SHA-256 of the canonical problem (`AllocationProblem.sha256`).
        devices: device kind -> operator name -> precision. Every operator is listed,
            followers and fixed ones too. Strings such as `"bf16"` become `Precision`.
        communication: bits in which the gradients of every bucket are sent, in launch order,
            the same on all kinds; empty where every bucket is sent in 32 bits (which is also
            what 32 for all becomes).

    Raises:
        PlanError: no device kind, a name that is not text, a precision that is not one, or
            bits that are neither 32 nor from 2 to 16.
    """

    problem: str
    devices: Mapping[str, Mapping[str, Precision]]
    communication: tuple[int, ...] = ()

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
        object.__setattr__(self, "communication", _communication(self.communication))

    def __hash__(self) -> int:
        # Sets, because equality does not look at the order of the names either.
        rows = frozenset((kind, frozenset(row.items())) for kind, row in self.devices.items())
        return hash((self.problem, rows, self.communication))

    def __reduce__(self) -> tuple[object, ...]:
        # MappingProxyType cannot be copied between processes; plain dicts can.
        devices = {kind: dict(row) for kind, row in self.devices.items()}
        return (_rebuild, (self.problem, devices, self.communication))

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


def bits_text(bits: Sequence[int]) -> str:
    """How many buckets are sent in how many bits, in words; no bits mean 32 everywhere."""
    counts = Counter(bits)
    if not set(counts) - {FULL_BITS}:
        return f"{FULL_BITS} bits"
    return ", ".join(f"{n} bits x {counts[n]}" for n in sorted(counts))


def sending_text(bits: Sequence[int]) -> str:
    """What a result notes of the bits that gradients are sent in."""
    text = f"gradients are sent in {bits_text(bits)}"
    return f"{text} (bits x buckets)" if " x " in text else text


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


def _communication(bits: object) -> tuple[int, ...]:
    """The bits of every bucket; empty where all are sent in full."""
    if not isinstance(bits, Sequence) or isinstance(bits, str):
        raise PlanError("communication", "must be a list of bits, one entry per bucket", bits)
    least, most = CODE_BITS
    for index, entry in enumerate(bits):
        whole = isinstance(entry, int) and not isinstance(entry, bool)
        if not whole or not (entry == FULL_BITS or least <= entry <= most):
            rule = f"must be {FULL_BITS}, or a whole number from {least} to {most}"
            raise PlanError(f"communication[{index}]", rule, entry)
    return () if set(bits) <= {FULL_BITS} else tuple(bits)


def _rebuild(
    problem: str, devices: dict[str, dict[str, Precision]], communication: tuple[int, ...]
) -> PrecisionPlan:
    return PrecisionPlan(problem=problem, devices=devices, communication=communication)
