"""`explain`: why an allocation problem has no plan, and what would give it one.

With the all-reduce times fixed, "iteration time <= deadline" splits exactly into one question
per device kind (design, section 4, item 6), so each kind is explained on its own, in order:

    (a) pins, groups and followers leave some operator no precision;
    (b) the least peak memory of any plan exceeds the budget;
    (c) the least iteration time of any plan exceeds the deadline;
    (d) each limit can be met alone, but not both together.

(a) is found by propagation and search, without a solver; (b) and (c) are refused by arithmetic
where the lower bounds of `floors` exceed the limit; the exact minimum, and (d), take a small
program per kind. Every number is that of a plan judged by `evaluate`. Where buckets have
codes, each is sent in the bits in which it is reduced soonest: no other bits allow a plan
that these do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from qsync_opt.optimize.arrays import IntArray
from qsync_opt.optimize.consistency import (
    SearchLimitError,
    find_conflict,
    rules_to_drop,
)
from qsync_opt.optimize.evaluate import TIME_TOLERANCE, plan_from_columns, tails_s
from qsync_opt.optimize.explanation import (
    Cause,
    Contributor,
    Explanation,
    Nearest,
    describe,
)
from qsync_opt.optimize.floors import is_late
from qsync_opt.optimize.minima import Minimum, SoleKind
from qsync_opt.optimize.problem import AllocationProblem, DeviceKind
from qsync_opt.optimize.result import SolveParameters
from qsync_opt.optimize.rows import first_savers, transient_bytes

#: How many of the largest contributors are named.
_NAMED = 5


def explain(
    problem: AllocationProblem,
    *,
    parameters: SolveParameters = SolveParameters(relative_gap=0.0),  # noqa: B008  # frozen
) -> Explanation:
    """Say why a problem has no plan, or show that it has one.

    Where the problem gives a slack instead of a deadline, only memory, pins and followers can
    be in the way: the deadline then follows from the fastest plan that fits the memory.

    Args:
        problem: the problem.
        parameters: time limit for each device kind, solver, and the gap to which least times
            are proven; least memory is proven to the byte where the time allows it.
    """
    causes: list[Cause] = []
    unknown: list[str] = []
    columns: list[IntArray] = []
    soonest = problem.at_bits(problem.fastest_bits)
    for device in problem.devices:
        found = _explain_kind(soonest, device, parameters)
        causes += found.causes
        if found.column is not None:
            columns.append(found.column)
        elif not found.causes:
            unknown.append(f"{device.name}: {found.reason}")
    feasible = False if causes else None if unknown else True
    return Explanation(
        feasible=feasible,
        causes=tuple(causes),
        plan=plan_from_columns(problem, columns, problem.fastest_bits) if feasible else None,
        unknown=tuple(unknown),
        text=describe(problem, causes, unknown),
    )


@dataclass(frozen=True, kw_only=True)
class _Verdict:
    """What was found out about one kind: causes, or a plan, or a reason for neither."""

    causes: tuple[Cause, ...] = ()
    column: IntArray | None = None
    reason: str = ""


def _explain_kind(
    problem: AllocationProblem, device: DeviceKind, parameters: SolveParameters
) -> _Verdict:
    try:
        conflict = _conflict_cause(problem, device)
    except SearchLimitError:
        conflict = None  # the programs below answer it
    if conflict is not None:
        return _Verdict(causes=(conflict,))
    kind = SoleKind(problem, device, parameters)
    budget, deadline_s = device.memory_bytes, problem.deadline_s
    # What arithmetic has proven impossible needs no program to be refused.
    if kind.memory_floor_bytes > budget or is_late(kind.time_floor_s, deadline_s):
        return _Verdict(causes=_causes(kind, budget, deadline_s))
    smallest = kind.least_memory(deadline_s, enough=budget)
    if smallest.value is not None and smallest.value <= budget:
        return _Verdict(column=smallest.column)
    if not smallest.proven_above(budget):
        return _Verdict(reason=smallest.reason)
    return _Verdict(causes=_causes(kind, budget, deadline_s))


def _conflict_cause(problem: AllocationProblem, device: DeviceKind) -> Cause | None:
    conflict = find_conflict(problem, device)
    if not conflict:
        return None
    # By operator, so that the sentence reads from pin to pin along the chain of followers.
    ordered = sorted(conflict, key=lambda rule: min(rule.scope))
    dropped = rules_to_drop(problem, device)
    return Cause(
        device=device.name,
        resource="pins and followers",
        limit=None,
        minimum=None,
        bound=None,
        shortfall=None,
        where="; ".join(rule.describe(problem) for rule in ordered),
        contributors=(),
        nearest=(
            Nearest(
                memory_bytes=device.memory_bytes,
                deadline_s=problem.deadline_s,
                drop=tuple(rule.describe(problem) for rule in dropped),
            ),
        ),
    )


def _causes(kind: SoleKind, budget: int, deadline_s: float | None) -> tuple[Cause, ...]:
    """The causes for a kind that is known to have no plan within both limits."""
    smallest = kind.least_memory(None, enough=budget)
    if smallest.infeasible:
        return (_unlocated(kind.device.name),)
    fits = smallest.value is not None and smallest.value <= budget
    if not fits:
        smallest = kind.least_memory(None)  # now to the byte
    # Each option is (memory, deadline): what a plan takes, or a limit that it keeps.
    options: list[tuple[float | None, float | None]] = []
    if not fits:
        options.append(_least_pair(kind, smallest, deadline_s))
    quickest = in_time = None
    if deadline_s is not None:
        in_time = kind.least_memory(deadline_s)
        if in_time.value is None:
            quickest = kind.least_time(None)
        options.append((in_time.value, deadline_s))
        if fits:
            options.append((budget, kind.least_time(budget).value))
    nearest = tuple(
        Nearest(memory_bytes=int(memory), deadline_s=pace)
        for memory, pace in dict.fromkeys(options)
        if memory is not None and (pace is not None or deadline_s is None)
    )
    causes = []
    if deadline_s is None or smallest.proven_above(budget):
        causes.append(_cause(kind, "memory", budget, _above(smallest, budget + 1), nearest))
    if deadline_s is not None and in_time is not None and quickest is not None:
        if in_time.infeasible:
            # Proven by the deadline itself, perhaps more sharply than by the least time.
            quickest = _above(quickest, deadline_s * (1 + TIME_TOLERANCE))
        if quickest.bound is not None and (
            in_time.infeasible or is_late(quickest.bound, deadline_s)
        ):
            causes.append(_cause(kind, "deadline", deadline_s, quickest, nearest))
    if not causes and in_time is not None:
        both = _above(in_time, budget + 1)
        causes.append(_cause(kind, "memory and deadline", budget, both, nearest))
    return tuple(causes)


def _least_pair(
    kind: SoleKind, smallest: Minimum, deadline_s: float | None
) -> tuple[float | None, float | None]:
    """The least memory of all, with the deadline it allows."""
    if smallest.value is None or deadline_s is None:
        return smallest.value, None
    pace = kind.least_time(int(smallest.value)).value
    return smallest.value, pace if pace is not None and is_late(pace, deadline_s) else deadline_s


def _above(minimum: Minimum, bound: float) -> Minimum:
    """`minimum` of an amount known to be at least `bound`, even if its own search was stopped."""
    return replace(minimum, bound=max(minimum.bound or 0, bound))


def _unlocated(device: str) -> Cause:
    """A program, not the search, found that the rules leave no plan."""
    return Cause(
        device=device,
        resource="pins and followers",
        limit=None,
        minimum=None,
        bound=None,
        shortfall=None,
        where="the pins, groups and followers of this kind together",
        contributors=(),
        nearest=(),
    )


def _cause(
    kind: SoleKind,
    resource: str,
    limit: float,
    minimum: Minimum,
    nearest: tuple[Nearest, ...],
) -> Cause:
    amount = minimum.bound if minimum.value is None else minimum.value
    where = ""
    contributors: tuple[Contributor, ...] = ()
    if minimum.column is not None:
        weigh = _weigh_time if resource == "deadline" else _weigh_memory
        where, contributors = weigh(kind, minimum.column)
    return Cause(
        device=kind.device.name,
        resource=resource,
        limit=limit,
        minimum=minimum.value,
        bound=minimum.bound,
        shortfall=None if amount is None else amount - limit,
        where=where,
        contributors=contributors,
        nearest=nearest,
    )


def _largest(names: Sequence[str], amounts: Sequence[float]) -> tuple[Contributor, ...]:
    parts = [
        Contributor(name=name, amount=amount)
        for name, amount in zip(names, amounts, strict=True)
        if amount > 0
    ]
    return tuple(sorted(parts, key=lambda part: -part.amount)[:_NAMED])


def _weigh_memory(kind: SoleKind, column: IntArray) -> tuple[str, tuple[Contributor, ...]]:
    """The operator at the peak, and whose copies and transient take most there."""
    problem, device = kind.problem, kind.device
    names = [operator.name for operator in problem.operators]
    peak = names.index(kind.evaluate(column).peak_operator)
    held = np.zeros(len(names), dtype=np.int64)
    saved, first = device.saved, first_savers(device)
    for tensor in np.flatnonzero(first <= peak).tolist():
        dtypes = {problem.storage[column[saver]] for saver in saved.savers_of(tensor).tolist()}
        sizes = (saved.size_bytes[tensor, saved.dtypes.index(dtype)] for dtype in dtypes)
        held[first[tensor]] += sum(int(size) for size in sizes)
    held[peak] += transient_bytes(device)[peak, column[peak]]
    amounts = [device.fixed_bytes, *held.tolist()]
    return names[peak], _largest(["fixed", *names], amounts)


def _weigh_time(kind: SoleKind, column: IntArray) -> tuple[str, tuple[Contributor, ...]]:
    """The bucket that binds (or `compute`), and what takes longest before it ends."""
    problem, device = kind.problem, kind.device
    part = kind.evaluate(column)
    tails = tails_s(problem).tolist()
    ends = [part.compute_s, *(a + b for a, b in zip(part.ready_s, tails, strict=True))]
    binding = int(np.argmax(ends)) - 1
    where, tail, first = "compute", 0.0, 0
    if binding >= 0:
        where, tail = f"bucket {binding}", tails[binding]
        owned = np.flatnonzero(problem.operator_bucket == binding)
        first = int(owned[0]) if len(owned) else len(problem.operators)
    rows = np.arange(len(problem.operators))
    step = device.forward_s[rows, column] + np.where(
        rows >= first, device.backward_s[rows, column], 0
    )
    names = ["optimizer", "all-reduce", *(operator.name for operator in problem.operators)]
    return where, _largest(names, [device.optimizer_s, tail, *step.tolist()])
