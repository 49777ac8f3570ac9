"""Bits of buckets without a proof: uniform, greedy and random choices, and all of a tiny problem.

A plan is held here as precision columns, one array [N] per device kind, and the bits of every
bucket. Once the bits are fixed (`AllocationProblem.at_bits`) the kinds split as they do where
buckets have no codes, so each method takes the one of that name kind by kind, at several bits:

- uniform: the best single bit count, and for each kind the best single precision there;
- greedy: QSync's recovery at every single bit count, from the fastest plan; then the bits of
  the bucket that gains most are raised for as long as the deadline holds;
- random: bits drawn for every bucket, and the fastest bits, with random repaired plans;
- brute force: every combination of bits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

import numpy as np

from qsync_opt.errors import ParameterError
from qsync_opt.optimize.arrays import IntArray
from qsync_opt.optimize.baselines import random_columns, uniform_columns
from qsync_opt.optimize.brute_force import brute_force_columns
from qsync_opt.optimize.choices import better_cost
from qsync_opt.optimize.evaluate import Evaluation, evaluate_columns
from qsync_opt.optimize.greedy import greedy_columns
from qsync_opt.optimize.problem import AllocationProblem, DeviceKind
from qsync_opt.optimize.run import distinct_kinds

#: Combinations of bits that brute force tries.
_MOST_COMBINATIONS = 4096

#: Bits that the random method draws, and plans for each of them.
_RANDOM_BITS = 3
_RANDOM_TRIES = 4

KindMethod = Callable[[AllocationProblem, DeviceKind], IntArray | None]


@dataclass(frozen=True, kw_only=True)
class BitsPlan:
    """A plan with its bits.

    Attributes:
        columns: precision column of every operator, [N] per device kind.
        bits: of every bucket, [K].
        evaluation: what it costs.
    """

    columns: list[IntArray] = field(repr=False)
    bits: tuple[int, ...]
    evaluation: Evaluation

    @property
    def cost(self) -> tuple[float, float]:
        """Perturbation, then time."""
        return self.evaluation.perturbation, self.evaluation.iteration_time_s


class BitsMethods:
    """The methods at one deadline.

    Args:
        problem: a problem whose buckets have codes.
        deadline_s: iteration time to keep.
        stop: whether to give up now, with what was found.

    Attributes:
        tried: combinations of bits that were tried.
    """

    def __init__(
        self, problem: AllocationProblem, deadline_s: float, stop: Callable[[], bool]
    ) -> None:
        self._problem, self._deadline_s, self._stop = problem, deadline_s, stop
        self._kinds = distinct_kinds(problem)
        self.tried = 0

    def uniform(self) -> BitsPlan | None:
        """One bit count for all buckets, and one precision for each kind."""

        def best(fixed: AllocationProblem, device: DeviceKind) -> IntArray | None:
            return uniform_columns(fixed, device, self._deadline_s)

        return self._best(single_bit_counts(self._problem), best)

    def greedy(self, fastest: Sequence[IntArray] | None) -> BitsPlan | None:
        """QSync's recovery at each bit count, then raised bits; never worse than `uniform`.

        Args:
            fastest: plan of least time at the fastest bits, [N] per device kind; None where
                it was not found.
        """
        starts: dict[str, IntArray] = {}
        if fastest is not None:
            starts = {d.name: c for d, c in zip(self._problem.devices, fastest, strict=True)}

        def recovered(fixed: AllocationProblem, device: DeviceKind) -> IntArray | None:
            found = [uniform_columns(fixed, device, self._deadline_s)]
            if device.name in starts:
                start = starts[device.name]
                found.append(greedy_columns(fixed, device, self._deadline_s, start, self._stop))
            plans = [column for column in found if column is not None]
            rows = np.arange(len(fixed.operators))
            return min(plans, key=lambda c: device.perturbation[rows, c].sum(), default=None)

        # All of it before anything that a time limit may cut short: it takes little.
        best = self.uniform()
        # The fastest first: there the fastest plan is in time, if any plan is.
        counts = dict.fromkeys([self._problem.fastest_bits, *single_bit_counts(self._problem)])
        for bits in counts:
            plan = self._at(bits, recovered)
            if plan is not None:
                plan = self.raised(plan)
                best = plan if best is None or better_cost(plan.cost, best.cost) else best
            if self._stop():
                break
        return best

    def random(self, seed: int) -> BitsPlan | None:
        """The best of some random bits, and the fastest ones, with random plans."""
        rng = np.random.default_rng(seed)
        drawn = [
            tuple(int(rng.choice([c.bits for c in b.choices])) for b in self._problem.buckets)
            for _ in range(_RANDOM_BITS)
        ]

        def any_plan(fixed: AllocationProblem, device: DeviceKind) -> IntArray | None:
            return random_columns(fixed, device, self._deadline_s, seed, tries=_RANDOM_TRIES)

        return self._best(dict.fromkeys([self._problem.fastest_bits, *drawn]), any_plan)

    def brute_force(self) -> BitsPlan | None:
        """The best plan at each combination of bits, and the best of those.

        Raises:
            ParameterError: there are too many combinations or plans.
        """
        count = math.prod(len(bucket.choices) for bucket in self._problem.buckets)
        if count > _MOST_COMBINATIONS:
            raise ParameterError(
                "method",
                f"must not be brute_force beyond {_MOST_COMBINATIONS} combinations of bits",
                count,
                "Use method 'exact' for problems of this size",
            )

        def best(fixed: AllocationProblem, device: DeviceKind) -> IntArray | None:
            return brute_force_columns(fixed, device, self._deadline_s)

        ways = ([code.bits for code in bucket.choices] for bucket in self._problem.buckets)
        return self._best(itertools.product(*ways), best)

    def raised(self, plan: BitsPlan) -> BitsPlan:
        """A feasible plan with the bits raised that gain most, while the deadline holds."""
        ladders = [list(_raises(self._problem, k, plan.bits[k])) for k in range(len(plan.bits))]
        heap = [(-steps[0][1], k, 0) for k, steps in enumerate(ladders) if steps]
        heapify(heap)
        while heap and not self._stop():
            _, k, step = heappop(heap)
            bits = (*plan.bits[:k], ladders[k][step][0], *plan.bits[k + 1 :])
            evaluation = evaluate_columns(self._problem, plan.columns, self._deadline_s, bits)
            if evaluation.feasible and evaluation.perturbation <= plan.evaluation.perturbation:
                plan = BitsPlan(columns=plan.columns, bits=bits, evaluation=evaluation)
            if step + 1 < len(ladders[k]):
                heappush(heap, (-ladders[k][step + 1][1], k, step + 1))
        return plan

    def _best(self, candidates: Iterable[tuple[int, ...]], method: KindMethod) -> BitsPlan | None:
        best: BitsPlan | None = None
        for bits in candidates:
            plan = self._at(bits, method)
            if plan is not None and (best is None or better_cost(plan.cost, best.cost)):
                best = plan
            if self._stop():
                break
        return best

    def _at(self, bits: tuple[int, ...], method: KindMethod) -> BitsPlan | None:
        """A method's plans of all kinds at some bits; None where a kind has none."""
        self.tried += 1
        fixed = self._problem.at_bits(bits)
        columns: list[IntArray] = [np.zeros(0, dtype=np.int64)] * len(fixed.devices)
        for members in self._kinds:
            column = method(fixed, fixed.devices[members[0]])
            if column is None:
                return None
            for index in members:
                columns[index] = column
        evaluation = evaluate_columns(self._problem, columns, self._deadline_s, bits)
        return BitsPlan(columns=columns, bits=bits, evaluation=evaluation)


def single_bit_counts(problem: AllocationProblem) -> list[tuple[int, ...]]:
    """One bit count for all buckets, most bits first; [K] each.

    A bucket without it is sent in the next more bits that it has (all have 32).
    """
    counts = sorted({c.bits for b in problem.buckets for c in b.choices}, reverse=True)
    found = (
        tuple(min(c.bits for c in b.choices if c.bits >= count) for b in problem.buckets)
        for count in counts
    )
    return list(dict.fromkeys(found))


def _raises(problem: AllocationProblem, bucket: int, bits: int) -> Iterator[tuple[int, float]]:
    """More bits that a bucket may be sent in, and what each step up gains in perturbation."""
    choices = problem.buckets[bucket].choices
    before = next(code.perturbation for code in choices if code.bits == bits)
    for code in reversed(choices):
        if code.bits > bits and code.perturbation < before:
            yield code.bits, before - code.perturbation
            before = code.perturbation
