"""`Choice`: the independent decisions of one device kind, and when two costs count as equal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np

from qsync_opt.optimize.arrays import IntArray
from qsync_opt.optimize.evaluate import allowed_columns, follower_columns
from qsync_opt.optimize.problem import AllocationProblem, DeviceKind

#: Two sums of floats closer than this fraction count as equal: the order of summation alone
#: moves a sum of 10,000 terms by about 1e-13, and ties must not depend on it.
TIE_TOLERANCE = 1e-12


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One decision: operators that share a precision, and the precisions they may share.

    Attributes:
        operators: indices, ascending; more than one for a group.
        columns: allowed precision columns, ascending; at least one.
    """

    operators: tuple[int, ...]
    columns: tuple[int, ...]

    def summed(self, table: Sequence[list[float]]) -> list[float]:
        """Column sums of a table [N, P], as nested lists, over this choice's operators, [P]."""
        if len(self.operators) == 1:
            return table[self.operators[0]]
        return [sum(column) for column in zip(*(table[row] for row in self.operators), strict=True)]


def movable(problem: AllocationProblem, device: DeviceKind) -> tuple[Choice, ...]:
    """The independent choices of a device kind, by first operator.

    Every operator that follows no other belongs to exactly one choice, those with a single
    option too, so the choices together fix the plan: followers are derived from them. A
    follower in a group takes no part in the choice, but only precisions that it has as well
    are allowed; whether it really arrives at the group's precision is for
    `PlanState.feasible` to say.
    """
    allowed = allowed_columns(problem, device)
    numbers = range(allowed.shape[1])
    columns = [tuple(compress(numbers, row)) for row in allowed.tolist()]
    follows = [bool(operator.follows) for operator in problem.operators]
    members: dict[int, tuple[int, ...]] = {}
    grouped: set[int] = set()
    for group in problem.groups:
        rows = tuple(sorted(problem.operator_index[name] for name in group))
        free = tuple(row for row in rows if not follows[row])
        if free:
            members[free[0]] = free
            grouped.update(free)
    for row, follower in enumerate(follows):
        if not follower and row not in grouped:
            members[row] = (row,)
    return tuple(Choice(operators=members[row], columns=columns[row]) for row in sorted(members))


def picked_columns(
    problem: AllocationProblem, choices: Iterable[Choice], picks: Iterable[int]
) -> IntArray:
    """The plan in which every choice takes the picked column and followers follow, [N]."""
    column = np.zeros(len(problem.operators), dtype=np.int64)
    for choice, pick in zip(choices, picks, strict=True):
        column[list(choice.operators)] = pick
    return follower_columns(problem, column)


def equal_cost(first: float, second: float) -> bool:
    """Whether two costs >= 0 are the same but for rounding (`TIE_TOLERANCE`)."""
    return abs(first - second) <= TIE_TOLERANCE * max(first, second)


def better_cost(first: tuple[float, float], second: tuple[float, float]) -> bool:
    """Whether `first` comes before `second`: by the first cost and, if tied, by the next."""
    for mine, other in zip(first, second, strict=True):
        if not equal_cost(mine, other):
            return mine < other
    return False
