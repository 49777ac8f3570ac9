"""`KindsApart`: the kinds solved alone at given bits, and what that proves of other bits.

The kinds fall apart once the bits are fixed (`run`); what is proven of them there holds at all
bits whose tails are no shorter (`joint_vectors`).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from qsync_opt.errors import SolverUnavailableError
from qsync_opt.optimize.arrays import FloatArray
from qsync_opt.optimize.climb import Point
from qsync_opt.optimize.evaluate import plan_columns
from qsync_opt.optimize.joint_core import OpenOptions
from qsync_opt.optimize.joint_incumbent import JointIncumbent
from qsync_opt.optimize.joint_lagrangian import JointLagrangian
from qsync_opt.optimize.joint_vectors import BitsVector, KindBounds, open_vectors
from qsync_opt.optimize.kind import Limits
from qsync_opt.optimize.problem import AllocationProblem
from qsync_opt.optimize.proof import ROUNDING, Proof
from qsync_opt.optimize.result import SolveParameters
from qsync_opt.optimize.run import Run

#: Combinations of bits of a node that are looked at one by one.
_MOST_VECTORS = 64

#: The part of the gap that solves at given bits may leave, and the part that clusters of codes
#: may lose.
_OWN_GAP = 0.5
_SPARED = 0.25


class KindsApart:
    """Solves at given bits, each made once.

    Args:
        problem: a problem whose buckets have codes.
        proof: takes plans and statistics.
        parameters: options of the solves.
        limits: when to stop.
    """

    def __init__(
        self,
        problem: AllocationProblem,
        proof: Proof[JointIncumbent],
        parameters: SolveParameters,
        limits: Limits,
    ) -> None:
        self._problem, self._proof, self._limits = problem, proof, limits
        gap = _OWN_GAP * proof.gap
        self._parameters = replace(parameters, threads=1, relative_gap=gap, progress=None)
        kinds = proof.incumbent.kinds
        self._known = KindBounds(len(kinds))
        self._weights = [
            sum(problem.weight(problem.devices[index]) for index in members) for members in kinds
        ]

    def vectors(
        self, joint: JointLagrangian, point: Point, closed: FloatArray, least: OpenOptions
    ) -> list[BitsVector] | None:
        """The combinations of bits that a node leaves open; None where they are many."""
        return open_vectors(
            self._problem,
            least.codes,
            [np.isinf(mask) for mask in joint.masks(closed)[1]],
            value=point.value,
            target=self._proof.target,
            tolerance=_SPARED * self._proof.gap * abs(point.value),
            most=_MOST_VECTORS,
        )

    def least(self, vector: BitsVector) -> float:
        """Lower bound of a combination's plans, from the kinds solved at no longer tails."""
        sent = self._problem.bits_perturbation(vector.bits) - vector.spared
        bounds = self._known.least(self._problem, vector.bits)
        kinds = sum(w * bound for w, bound in zip(self._weights, bounds, strict=True))
        return max(vector.bound, (kinds + sent) * (1 - ROUNDING))

    def solve(self, bits: tuple[int, ...]) -> None:
        """Solve the kinds alone at some bits; keep their bounds, and offer their plan.

        Raises:
            SolverUnavailableError: the back end failed.
        """
        incumbent = self._proof.incumbent
        solved = self._known.solved(self._problem, bits)
        if solved is None:
            self._proof.count("apart")
            deadline_s = incumbent.deadline_s
            fixed = replace(self._problem.at_bits(bits), deadline_s=deadline_s, slack=0.0)
            best = incumbent.column
            hints = None if best is None else incumbent.read(best)[0]
            own = self._parameters
            run = Run(fixed, "exact", own, hints, recovers=False, limits=self._limits)
            found = run.run()
            trouble = run.trouble()
            if trouble is not None:
                raise SolverUnavailableError(own.solver, trouble)
            columns = None if found.plan is None else plan_columns(fixed, found.plan)
            solved = self._known.add(self._problem, bits, run.bounds(), columns)
        if solved.columns is not None:
            incumbent.offer(incumbent.flat(solved.columns, bits))
