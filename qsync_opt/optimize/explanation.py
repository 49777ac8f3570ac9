"""`Explanation`: why a problem has no plan, as data and in sentences."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from qsync_opt.optimize.problem import AllocationProblem, DeviceKind
from qsync_opt.plan import PrecisionPlan

#: How close bound and minimum must be to count as one number: bytes are exact, times are
#: proven to a solver's tolerance.
_PROVEN = {"memory": 0.0, "memory and deadline": 0.0, "deadline": 1e-6}


@dataclass(frozen=True, kw_only=True, slots=True)
class Contributor:
    """A part of a minimum.

    Attributes:
        name: operator, or `fixed` (memory always taken), `optimizer`, `all-reduce`.
        amount: bytes held at the peak, or seconds on the path that binds.
    """

    name: str
    amount: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Nearest:
    """A change after which the kind has a plan; a plan was found that shows it.

    Attributes:
        memory_bytes: the memory budget to give it.
        deadline_s: the deadline to give it; None where the problem sets none.
        drop: pins or groups to drop, in words. The other rules can then be kept; whether
            memory and deadline can is to be asked again.
    """

    memory_bytes: int
    deadline_s: float | None
    drop: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """One reason why a device kind has no plan.

    Attributes:
        device: the device kind.
        resource: `memory`, `deadline`, `memory and deadline` (each can be met alone, not both
            together) or `pins and followers`.
        limit: the budget in bytes or the deadline in seconds; for both together the budget;
            None for pins.
        minimum: the least amount that a plan takes (for both together: the least memory of a
            plan that meets the deadline), attained by a plan; None where no plan was found
            within the limits of the search, and for pins.
        bound: proven lower bound of `minimum`; equal to it unless the search was stopped.
        shortfall: minimum - limit (bound - limit without a minimum); None for pins.
        where: operator at the peak, bucket (or `compute`) that binds, or the rules that contradict.
        contributors: what weighs most in the minimum, largest first; none for pins.
        nearest: alternatives, each of which gives the kind a plan.
    """

    device: str
    resource: str
    limit: float | None
    minimum: float | None
    bound: float | None
    shortfall: float | None
    where: str
    contributors: tuple[Contributor, ...]
    nearest: tuple[Nearest, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """Whether a problem has a plan, and if not, why.

    Attributes:
        feasible: True with a plan that shows it, False with the causes; None where the search
            was stopped before it could tell.
        causes: the reasons, by device kind.
        plan: a plan that obeys every limit, where there is one; not the best one.
        unknown: per device kind that could not be settled, why.
        text: the whole in sentences.
    """

    feasible: bool | None
    causes: tuple[Cause, ...]
    plan: PrecisionPlan | None
    unknown: tuple[str, ...]
    text: str


def describe(problem: AllocationProblem, causes: Sequence[Cause], unknown: Sequence[str]) -> str:
    """The sentences of an explanation: causes and remedies, one line per device kind and cause."""
    lines = []
    for device in problem.devices:
        own = [cause for cause in causes if cause.device == device.name]
        lines += [f"{device.name}: {_reason(cause)}." for cause in own]
        # Every cause of a kind carries the same remedies: they concern all its limits at once.
        remedies = [_remedy(problem, device, option) for option in own[0].nearest] if own else []
        if remedies:
            lines[-1] += f" To have a plan: {'; or '.join(remedies)}."
    lines += [f"{reason}; whether a plan exists is not known." for reason in unknown]
    if lines:
        return "\n".join(lines)
    held = "its memory"
    if problem.deadline_s is not None:
        held += f" and the deadline of {_seconds(problem.deadline_s)}"
    return f"A plan exists: every device kind keeps {held}."


def _reason(cause: Cause) -> str:
    if cause.resource == "pins and followers":
        return f"no precision is left ({cause.where})"
    amount = _seconds if cause.resource == "deadline" else _whole_bytes
    text = _need(cause, amount)
    if cause.where:
        text += f" ({cause.where})" if cause.resource == "deadline" else f" at {cause.where}"
    if cause.resource == "memory and deadline":
        text += " to keep the deadline"
    limit, shortfall = cause.limit or 0.0, cause.shortfall or 0.0
    if cause.resource == "deadline":
        text += f" but the deadline is {amount(limit)}: late by {shortfall * 1e3:.6g} ms"
    else:
        text += f" but has {amount(limit)}: short by {amount(shortfall)}"
        text += f" ({shortfall / 2**20:.2f} MiB)"
    if cause.resource == "memory and deadline":
        text += "; either limit can be kept alone"
    if cause.contributors:
        parts = (f"{part.name} {amount(part.amount)}" for part in cause.contributors)
        text += f"; largest parts: {', '.join(parts)}"
    return text


def _need(cause: Cause, amount: Callable[[float], str]) -> str:
    minimum, bound = cause.minimum, cause.bound
    if bound is None:
        return "needs more than the search could find"
    if minimum is None or minimum <= bound * (1 + _PROVEN[cause.resource]):
        return f"needs at least {amount(bound if minimum is None else minimum)}"
    return f"needs {amount(minimum)} in the best plan found and at least {amount(bound)} in any"


def _remedy(problem: AllocationProblem, device: DeviceKind, option: Nearest) -> str:
    if option.drop:
        return "drop " + " and ".join(option.drop)
    changes = []
    if option.memory_bytes != device.memory_bytes:
        changes.append(f"set memory_bytes to {option.memory_bytes:,}")
    if option.deadline_s is not None and option.deadline_s != problem.deadline_s:
        changes.append(f"set deadline_s to {option.deadline_s!r}")
    return " and ".join(changes)


def _whole_bytes(amount: float) -> str:
    return f"{math.ceil(amount):,} bytes"


def _seconds(amount: float) -> str:
    return f"{amount:.9g} s"
