"""`JointIncumbent`: the best plan of all kinds with its bits so far, each judged by `evaluate`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from qsync_opt.optimize.arrays import IntArray
from qsync_opt.optimize.evaluate import Evaluation, evaluate_columns
from qsync_opt.optimize.problem import AllocationProblem
from qsync_opt.plan import FULL_BITS


class JointIncumbent:
    """The best plan so far; less perturbation first, then less time.

    A plan is one flat array: the precision columns of the distinct kinds, [N] each, then which
    of its choices every bucket takes, [K].

    Args:
        problem: a problem whose buckets have codes.
        kinds: indices of equal device kinds, one list for each distinct kind.
        deadline_s: iteration time to keep.

    Attributes:
        kinds: see above.
        name: for messages.
        deadline_s: see above.
        column: the best plan; None before the first.
        objective: of that plan; infinite before the first.
        tried: bits of the plans that were judged.
    """

    def __init__(
        self, problem: AllocationProblem, kinds: Sequence[Sequence[int]], deadline_s: float
    ) -> None:
        self._problem, self.kinds = problem, kinds
        self.name = "all device kinds"
        self.deadline_s: float | None = deadline_s
        self.column: IntArray | None = None
        self.objective = math.inf
        self._time_s = math.inf
        self.tried: set[tuple[int, ...]] = set()

    def offer(self, column: IntArray) -> bool:
        """Take a plan if it is feasible and better; says whether it was."""
        judged = self._judge(column)
        cost = (judged.perturbation, judged.iteration_time_s)
        if not judged.feasible or cost >= (self.objective, self._time_s):
            return False
        self.column, (self.objective, self._time_s) = column, cost
        return True

    def keeps(self, column: IntArray) -> bool:
        """Whether a plan keeps every budget (it may be no better than the incumbent)."""
        return self._judge(column).feasible

    def codes(self, bits: Sequence[int]) -> list[int]:
        """Which of its choices every bucket takes at some bits (none: 32)."""
        bits = bits or [FULL_BITS] * len(self._problem.buckets)
        return [
            [code.bits for code in bucket.choices].index(wanted)
            for bucket, wanted in zip(self._problem.buckets, bits, strict=True)
        ]

    def flat(self, columns: Sequence[IntArray], bits: Sequence[int]) -> IntArray:
        """A plan given by columns of every device kind, and bits (none: 32), as one array."""
        rows = np.arange(len(self._problem.operators))

        def cost(index: int) -> float:
            perturbation = self._problem.devices[index].perturbation
            return float(perturbation[rows, columns[index]].sum())

        # A solver takes equal kinds for different ones: the best of their plans serves all.
        mine = [columns[min(members, key=cost)] for members in self.kinds]
        return np.concatenate([*mine, np.array(self.codes(bits), dtype=np.int64)])

    def read(self, column: IntArray) -> tuple[list[IntArray], tuple[int, ...]]:
        """Columns of every device kind, and the bits, of a plan given as one array."""
        count = len(self._problem.operators)
        columns: list[IntArray] = [np.zeros(0, dtype=np.int64)] * len(self._problem.devices)
        for position, members in enumerate(self.kinds):
            for index in members:
                columns[index] = column[position * count : (position + 1) * count]
        codes = column[len(self.kinds) * count :].tolist()
        bits = (b.choices[code].bits for b, code in zip(self._problem.buckets, codes, strict=True))
        return columns, tuple(bits)

    def _judge(self, column: IntArray) -> Evaluation:
        columns, bits = self.read(column)
        self.tried.add(bits)
        return evaluate_columns(self._problem, columns, self.deadline_s, bits)
