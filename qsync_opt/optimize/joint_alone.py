"""`KindsAlone`: the device kinds solved alone where only the tails of the buckets are given.

A kind depends on the bits through the tails S_k = sum_{j >= k} c_j only. What is proven of it
at some tails holds at all that are no shorter, and a plan of it is in time at all tails that
leave it room; so a kind is solved only where neither tells its best yet.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np

from qsync_opt.errors import SolverUnavailableError
from qsync_opt.optimize.arrays import FloatArray, IntArray
from qsync_opt.optimize.evaluate import TIME_TOLERANCE, evaluate_device
from qsync_opt.optimize.joint_incumbent import JointIncumbent
from qsync_opt.optimize.joint_vectors import SolvedKinds
from qsync_opt.optimize.kind import KindJob, Limits
from qsync_opt.optimize.problem import AllocationProblem
from qsync_opt.optimize.proof import Proof
from qsync_opt.optimize.result import SolveParameters

#: The part of the gap that a solve may leave of a kind's perturbation, or, shared out equally
#: among the kinds, of the objective: kinds that hardly count need hardly be solved.
_OWN_GAP = 0.35
_WIDEST_GAP = 0.1


@dataclass(frozen=True, kw_only=True, eq=False)
class _Column:
    """A plan of one kind: its precision columns, [N], perturbation, and ready times, [K]."""

    column: IntArray
    perturbation: float
    ready_s: FloatArray


@dataclass(frozen=True, kw_only=True, eq=False)
class _Kind:
    """What is known of one kind: (tails, bound there) of every solve, and the plans found."""

    members: tuple[int, ...]
    weight: float
    bounds: list[tuple[FloatArray, float]] = field(default_factory=list)
    columns: list[_Column] = field(default_factory=list)


class KindsAlone:
    """Solves at given tails; see the module.

    Args:
        problem: a problem whose buckets have codes.
        proof: of all kinds together; tells the deadline and the gap.
        parameters: options of the solves.
        limits: when to stop.

    Attributes:
        solved: what was found, at all tails asked for.
        solves: how often a kind was solved.
    """

    def __init__(
        self,
        problem: AllocationProblem,
        proof: Proof[JointIncumbent],
        parameters: SolveParameters,
        limits: Limits,
    ) -> None:
        self._problem, self._proof, self._limits = problem, proof, limits
        self._parameters = replace(parameters, threads=1, progress=None)
        self._kinds = [
            _Kind(
                members=tuple(members),
                weight=sum(problem.weight(problem.devices[index]) for index in members),
            )
            for members in proof.incumbent.kinds
        ]
        self.solved: list[SolvedKinds] = []
        self.solves = 0

    def solve(self, tails_s: FloatArray) -> SolvedKinds:
        """The best of every kind at some tails, falling, [K].

        Raises:
            SolverUnavailableError: the back end failed.
        """
        for known in self.solved:
            if np.array_equal(known.tails_s, tails_s):
                return known
        found = [self._solve(kind, tails_s) for kind in self._kinds]
        columns: list[IntArray] | None = None
        if all(best is not None for _, best in found):
            columns = [np.zeros(0, dtype=np.int64)] * len(self._problem.devices)
            for kind, (_, best) in zip(self._kinds, found, strict=True):
                for index in kind.members:
                    columns[index] = np.zeros(0, dtype=np.int64) if best is None else best.column
        solved = SolvedKinds(
            tails_s=tails_s,
            bounds=np.array(
                [kind.weight * bound for kind, (bound, _) in zip(self._kinds, found, strict=True)]
            ),
            columns=columns,
        )
        self.solved.append(solved)
        return solved

    def room_s(self, columns: list[IntArray]) -> FloatArray:
        """The longest tails at which a plan, [N] per device kind, is in time, [K]."""
        ready_s = [
            evaluate_device(self._problem, device, column).ready_s
            for device, column in zip(self._problem.devices, columns, strict=True)
        ]
        room_s: FloatArray = self._latest_s - np.max(ready_s, axis=0)
        return room_s

    @property
    def _latest_s(self) -> float:
        deadline_s = self._proof.deadline_s
        return math.inf if deadline_s is None else deadline_s * (1 + TIME_TOLERANCE)

    def _solve(self, kind: _Kind, tails_s: FloatArray) -> tuple[float, _Column | None]:
        """A lower bound of a kind's perturbation, not weighted, and the best plan known."""
        bound = max(
            (least for tails, least in kind.bounds if (tails_s >= tails).all()), default=0.0
        )
        best = self._best(kind, tails_s)
        gap = self._gap(kind, bound)
        if math.isinf(bound) or (best is not None and bound >= best.perturbation * (1 - gap)):
            return bound, best
        self.solves += 1
        self._proof.count("apart")
        times_s = (tails_s - np.append(tails_s[1:], 0.0)).tolist()
        buckets = tuple(
            replace(bucket, all_reduce_s=seconds, codes=())
            for bucket, seconds in zip(self._problem.buckets, times_s, strict=True)
        )
        deadline_s = self._proof.deadline_s
        fixed = replace(self._problem, buckets=buckets, deadline_s=deadline_s, slack=0.0)
        device = fixed.devices[kind.members[0]]
        incumbent = self._proof.incumbent
        hints = [] if best is None else [best.column]
        if incumbent.column is not None:
            hints.append(incumbent.read(incumbent.column)[0][kind.members[0]])
        job = KindJob(
            fixed,
            device,
            kind.members,
            method="exact",
            parameters=replace(self._parameters, relative_gap=gap),
            hints=hints,
            limits=self._limits,
            recovers=False,
        )
        job.perform(deadline_s)
        if job.trouble is not None:
            raise SolverUnavailableError(self._parameters.solver, job.trouble)
        if job.solution is not None:
            bound = max(bound, job.solution.bound)
            kind.bounds.append((tails_s, bound))
            if job.solution.column is not None:
                judged = evaluate_device(fixed, device, job.solution.column)
                best = _Column(
                    column=job.solution.column,
                    perturbation=judged.perturbation,
                    ready_s=np.array(judged.ready_s),
                )
                kind.columns.append(best)
        return bound, best

    def _best(self, kind: _Kind, tails_s: FloatArray) -> _Column | None:
        """The best plan found anywhere that is in time at some tails."""
        in_time = (
            found for found in kind.columns if (found.ready_s + tails_s <= self._latest_s).all()
        )
        return min(in_time, key=lambda found: found.perturbation, default=None)

    def _gap(self, kind: _Kind, bound: float) -> float:
        gap, target = _OWN_GAP * self._proof.gap, self._proof.target
        if not (0 < bound < math.inf and target < math.inf):
            return gap
        share = target / (len(self._kinds) * kind.weight * bound)
        return min(gap * max(share, 1.0), max(gap, _WIDEST_GAP))
