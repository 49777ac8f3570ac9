"""`KindsApart`: bits chosen by bounds of the kinds, which are solved alone at few of them.

The kinds fall apart once the bits are fixed (`run`), so a plan is bits and, for each kind, the
best at their tails. The combinations of bits that bounds leave open are listed
(`joint_listing`), and then closed, many at a time:

1. The kinds solved at the soonest of all that is open bound every combination; their plans are
   offered with the best bits that are slow enough for them.
2. The prices that are best at one combination bound all others too (`joint_vectors`). Where
   they leave that one open, the kinds are solved there.

So bits that the kinds' Lagrangians do not tell apart cost a few solves of the kinds, not one
program of all kinds and buckets (a decomposition after Benders, 1962, and Hooker and Ottosson,
2003: prices and solves at some bits are the cuts of a master program over bits, which is small
enough to be listed).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from qsync_opt.optimize.arrays import FloatArray
from qsync_opt.optimize.bits import BitsMethods, BitsPlan
from qsync_opt.optimize.climb import Climb, Point
from qsync_opt.optimize.evaluate import evaluate_columns, tails_s
from qsync_opt.optimize.joint_alone import KindsAlone
from qsync_opt.optimize.joint_core import OpenOptions
from qsync_opt.optimize.joint_incumbent import JointIncumbent
from qsync_opt.optimize.joint_lagrangian import JointLagrangian
from qsync_opt.optimize.joint_listing import code_bounds, list_vectors
from qsync_opt.optimize.joint_vectors import KindsBound, OpenVectors, PricedKinds, priced_kinds
from qsync_opt.optimize.kind import Limits
from qsync_opt.optimize.problem import AllocationProblem
from qsync_opt.optimize.proof import Proof
from qsync_opt.optimize.result import SolveParameters

#: The part of the gap that clusters of codes may lose.
_SPARED = 0.25

#: Solves of a kind, in all.
_MOST_SOLVED = 48

#: Place, among what is open by rising bound, of the combination looked at next: those of low
#: bounds are closed by prices that close few others, those of high ones by a solve only.
_PLACE = 0.7

#: How far above the target prices of a combination are sought, for they close others then, and
#: the points evaluated for it.
_BEYOND = 10.0
_ROUNDS = 25

#: How often combinations are listed, in all: more than once where they are too many at first.
_MOST_LISTED = 16

#: The soonest of what is open is solved again once this part of it is left.
_FEWER = 1 / 8


class KindsApart:
    """What is known of combinations of bits, and the search that closes them; see the module.

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
        self._problem, self._proof = problem, proof
        self._alone = KindsAlone(problem, proof, parameters, limits)
        self._priced: list[PricedKinds] = []
        self._listings = 0

    def settle(self, joint: JointLagrangian, climb: Climb, least: OpenOptions) -> float | None:
        """Close the combinations of bits that a node leaves open.

        Args:
            joint: the Lagrangian.
            climb: the best prices of the node.
            least: lower bounds of every plan of the node that takes a code.

        Returns:
            A lower bound of the node's plans, or None if the combinations are too many.

        Raises:
            SolverUnavailableError: the back end failed.
        """
        proof = self._proof
        points = [climb.best] if self._priced else climb.points
        self._priced += [priced_kinds(joint, point.prices) for point in points]
        reached, alone = math.inf, None
        while self._listings < _MOST_LISTED:
            codes = code_bounds(joint, self._priced, least.codes, climb.best.value, alone or 0.0)
            soonest = codes.soonest(joint, proof.target)
            if soonest is None:
                return min(reached, proof.target)
            if alone is None:  # of what is open: what is closed later needs no bound
                alone = self._solve_at(self._bits(soonest))
                continue
            self._listings += 1
            vectors, complete = list_vectors(
                self._problem,
                joint,
                codes,
                target=proof.target,
                tolerance=_SPARED * proof.gap * abs(climb.best.value),
            )
            proof.count("vectors", len(vectors))
            reached = min(reached, proof.target)
            known: list[KindsBound] = [*self._alone.solved, *reversed(self._priced)]
            for bound in known:
                vectors.learn(bound)
                reached = min(reached, vectors.drop(proof.target))
            if complete:
                return self._close(joint, climb.best.prices, vectors, reached)
            if proof.out_of_time():
                return climb.best.value
            if not len(vectors):
                return None
            before = proof.target
            self._look_at(self._next(vectors), joint, climb.best.prices, vectors)
            if proof.target < before:
                return None  # less is open now, which may be little enough without a list
        return None

    def _close(
        self, joint: JointLagrangian, prices: FloatArray, vectors: OpenVectors, reached: float
    ) -> float | None:
        """Raise the bounds of some combinations until none is below the target.

        Args:
            joint: the Lagrangian.
            prices: of its rows, to start from.
            vectors: all combinations that are open.
            reached: lower bound of all others.

        Returns:
            A lower bound of all plans, or None where no solves are left to close them.
        """
        proof, fewest = self._proof, math.inf
        while True:
            reached = min(reached, vectors.drop(proof.target))
            if not len(vectors):
                # Rounding may leave a combination open whose own plan is known.
                return reached if proof.closes(reached) else None
            if proof.out_of_time():
                return min(reached, float(vectors.bounds().min()))
            if len(vectors) <= fewest:
                fewest = _FEWER * len(vectors)
                self._solve_for(vectors.shortest(), vectors)
                continue
            line = self._next(vectors)
            if not self._look_at(line, joint, prices, vectors):
                return None
            reached = min(reached, float(vectors.bounds()[line]))
            vectors.keep(np.arange(len(vectors)) != line)

    @staticmethod
    def _next(vectors: OpenVectors) -> int:
        """The combination to look at next."""
        return int(np.argsort(vectors.bounds())[int(_PLACE * (len(vectors) - 1))])

    def _look_at(
        self, line: int, joint: JointLagrangian, prices: FloatArray, vectors: OpenVectors
    ) -> bool:
        """Raise bounds by what closes one combination; whether there were solves left for it."""
        best = self._climb(joint, prices, vectors, line)
        for tails in (vectors.shortest(line, best.rows), vectors.tails_s[line]):
            if vectors.bounds()[line] >= self._proof.target:
                return True
            if self._alone.solves >= _MOST_SOLVED:
                return False
            self._solve_for(tails, vectors)
        return True

    def _climb(
        self, joint: JointLagrangian, prices: FloatArray, vectors: OpenVectors, line: int
    ) -> PricedKinds:
        """Raise the bounds by the best prices of a combination, and those on the way to them."""
        proof = self._proof

        def visit(point: Point) -> bool:
            if not (point.excess > 0).any():
                proof.incumbent.offer(joint.columns_of(point.options))
            return proof.out_of_time()

        climb = joint.maximise(
            tolerance=max(proof.gap * 0.1, 1e-9),
            visit=visit,
            enough=lambda value: value >= _BEYOND * proof.target,
            start=prices,
            closed=joint.only(vectors.codes[line].tolist()),
            rounds=_ROUNDS,
        )
        for point in (*climb.points, climb.best):
            self._priced.append(priced_kinds(joint, point.prices))
            vectors.learn(self._priced[-1])
        return self._priced[-1]

    # -- the kinds at given bits -----------------------------------------------------------

    def _solve_at(self, bits: tuple[int, ...]) -> float:
        """Solve the kinds alone at some bits, and offer their plan, with more bits if it can.

        Returns:
            A lower bound of what the kinds cost there.

        Raises:
            SolverUnavailableError: the back end failed.
        """
        incumbent = self._proof.incumbent
        solved = self._alone.solve(tails_s(self._problem.at_bits(bits)))
        if solved.columns is not None and incumbent.deadline_s is not None:
            methods = BitsMethods(self._problem, incumbent.deadline_s, self._proof.out_of_time)
            judged = evaluate_columns(self._problem, solved.columns, incumbent.deadline_s, bits)
            plan = BitsPlan(columns=solved.columns, bits=bits, evaluation=judged)
            plan = methods.raised(plan)
            incumbent.offer(incumbent.flat(plan.columns, plan.bits))
        return float(solved.bounds.sum())

    def _solve_for(self, tails_s: FloatArray, vectors: OpenVectors) -> None:
        """Solve at some tails; offer the plan with the best of the bits that it allows."""
        solved = self._alone.solve(tails_s)
        vectors.learn(solved)
        if solved.columns is None:
            return
        in_time = (vectors.tails_s <= self._alone.room_s(solved.columns)).all(axis=1)
        if in_time.any():
            line = int(np.where(in_time, vectors.variance, np.inf).argmin())
            best = self._bits(vectors.codes[line].tolist())
            self._proof.incumbent.offer(self._proof.incumbent.flat(solved.columns, best))

    def _bits(self, codes: Sequence[int]) -> tuple[int, ...]:
        return tuple(
            bucket.choices[code].bits
            for bucket, code in zip(self._problem.buckets, codes, strict=True)
        )
