"""Bits closed by what bounds the kinds alone: no bound is above the best, nothing is left out."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from qsync_opt.optimize.arrays import FloatArray, IntArray
from qsync_opt.optimize.climb import Climb
from qsync_opt.optimize.evaluate import evaluate_columns, tails_s
from qsync_opt.optimize.interrupter import Interrupter
from qsync_opt.optimize.joint_alone import KindsAlone
from qsync_opt.optimize.joint_apart import KindsApart
from qsync_opt.optimize.joint_core import open_options
from qsync_opt.optimize.joint_incumbent import JointIncumbent
from qsync_opt.optimize.joint_lagrangian import JointLagrangian, NoPlanError
from qsync_opt.optimize.joint_listing import code_bounds, list_vectors
from qsync_opt.optimize.joint_vectors import (
    KindsBound,
    OpenVectors,
    SolvedKinds,
    priced_kinds,
)
from qsync_opt.optimize.kind import Limits
from qsync_opt.optimize.problem import AllocationProblem
from qsync_opt.optimize.proof import Proof
from qsync_opt.optimize.result import SolveParameters
from qsync_opt.optimize.run import distinct_kinds
from qsync_opt.optimize.solve import solve
from tests.coded_problems import tiny_coded_problem

#: Relative rounding of sums in another order.
_ROUNDING = 1e-9

#: Combinations of bits that are all solved.
_MOST = 70


@dataclass(frozen=True)
class Tiny:
    """A tiny problem, all its combinations of bits, and what the kinds cost at each."""

    seed: int
    problem: AllocationProblem
    deadline_s: float
    joint: JointLagrangian
    codes: IntArray
    variance: FloatArray
    saved_s: FloatArray
    tails_s: FloatArray
    kinds: FloatArray  # [kinds, I], infinite without a plan

    @property
    def costs(self) -> FloatArray:
        """The best objective at every combination, [I]."""
        total: FloatArray = self.kinds.sum(axis=0) + self.variance
        return total

    def climb(self) -> Climb:
        return self.joint.maximise(tolerance=1e-9, visit=lambda _: False, enough=lambda _: False)

    def proof(self, gap: float) -> Proof[JointIncumbent]:
        incumbent = JointIncumbent(self.problem, distinct_kinds(self.problem), self.deadline_s)
        return Proof(incumbent, relative_gap=gap, time_left=lambda: None, stop=lambda: False)


def limits() -> Limits:
    return Limits(began=time.perf_counter(), time_limit_s=None, interrupter=Interrupter())


def parameters(gap: float) -> SolveParameters:
    return SolveParameters(relative_gap=gap, time_limit_s=None, threads=1)


def tiny(seed: int) -> Tiny | None:
    problem = tiny_coded_problem(seed)
    ways = list(itertools.product(*(range(len(b.choices)) for b in problem.buckets)))
    if problem.deadline_s is None or not problem.has_codes or len(ways) > _MOST:
        return None
    kinds = distinct_kinds(problem)
    try:
        joint = JointLagrangian(problem, kinds, problem.deadline_s)
    except NoPlanError:
        return None
    costs, tails = [], []
    for way in ways:
        bits = [b.choices[code].bits for b, code in zip(problem.buckets, way, strict=True)]
        fixed = problem.at_bits(bits)
        best = solve(fixed, method="brute_force")
        tails.append(tails_s(fixed))
        row = []
        for members, weight in zip(kinds, joint.weights, strict=True):
            value = best.devices[problem.devices[members[0]].name].objective
            row.append(np.inf if value is None else weight * value)
        costs.append(row)
    codes = np.array(ways)
    columns = range(codes.shape[1])
    return Tiny(
        seed=seed,
        problem=problem,
        deadline_s=problem.deadline_s,
        joint=joint,
        codes=codes,
        variance=np.sum([joint.variance[k][codes[:, k]] for k in columns], axis=0),
        saved_s=np.stack([joint.saved_s[k][codes[:, k]] for k in columns], axis=1),
        tails_s=np.array(tails),
        kinds=np.array(costs).T,
    )


@pytest.fixture(scope="module")
def problems() -> list[Tiny]:
    found = [tiny(seed) for seed in range(90)]
    kept = [one for one in found if one is not None]
    assert len(kept) > 20
    return kept


def drawn_prices(one: Tiny, rng: np.random.Generator) -> Iterator[FloatArray]:
    size = len(one.joint.limit)
    for scale in (0.0, 0.1, 10.0):
        yield scale * one.joint.reference * rng.random(size) * (rng.random(size) < 0.5)


def test_what_bounds_the_kinds_is_at_no_bits_above_their_best(problems: list[Tiny]) -> None:
    rng = np.random.default_rng(5)
    told = 0
    for one in problems:
        bounds: list[KindsBound] = [
            priced_kinds(one.joint, prices) for prices in drawn_prices(one, rng)
        ]
        line = int(rng.integers(len(one.codes)))
        bounds.append(
            SolvedKinds(tails_s=one.tails_s[line], bounds=one.kinds[:, line], columns=None)
        )
        for bound in bounds:
            least = bound.of(one.saved_s, one.tails_s)
            assert (least <= one.kinds * (1 + _ROUNDING) + _ROUNDING).all(), one.seed
        told += int((least > 0).sum())
    assert told > 100


def test_prices_bound_the_bits_as_the_joint_lagrangian_does(problems: list[Tiny]) -> None:
    rng = np.random.default_rng(6)
    for one in problems:
        for prices in drawn_prices(one, rng):
            bound = priced_kinds(one.joint, prices).of(one.saved_s, one.tails_s)
            least = float((bound.sum(axis=0) + one.variance).min())
            value = one.joint.evaluate(prices).value
            assert least == pytest.approx(value, rel=1e-8, abs=1e-8), one.seed


@pytest.mark.parametrize("room", [1e-6, 0.05, 0.5, 20.0])
def test_bits_that_are_not_listed_hold_nothing_wanted(problems: list[Tiny], room: float) -> None:
    listed = left_out = 0
    for one in problems:
        best = float(one.costs.min())
        climb = one.climb()
        if not np.isfinite(best) or climb.impossible:
            continue
        target = best * (1 + room) + 1e-9
        priced = [priced_kinds(one.joint, point.prices) for point in climb.points]
        least = open_options(one.joint, climb.best)
        codes = code_bounds(one.joint, priced, least.codes, climb.best.value)
        assert codes.soonest(one.joint, target) is not None
        tolerance = 0.01 * abs(best)
        vectors, complete = list_vectors(
            one.problem, one.joint, codes, target=target, tolerance=tolerance
        )
        assert complete
        listed += len(vectors)
        left_out += len(one.codes) - len(vectors)
        for line in np.flatnonzero(one.costs < target).tolist():
            # Listed itself, or stood for by bits that are as fast and as good.
            stands = (vectors.tails_s <= one.tails_s[line] + 1e-12).all(axis=1)
            stands &= vectors.variance <= one.variance[line] + 1e-12
            assert stands.any(), (one.seed, line)
        for line, codes_of in enumerate(vectors.codes):
            same = int(np.flatnonzero((one.codes == codes_of).all(axis=1))[0])
            assert vectors.tails_s[line] == pytest.approx(one.tails_s[same])
            lost = one.variance[same] - vectors.variance[line]
            assert -1e-12 <= lost <= tolerance * (1 + _ROUNDING)
    assert listed
    assert left_out


def test_kinds_are_solved_at_tails_and_not_again_where_that_is_known(
    problems: list[Tiny],
) -> None:
    rng = np.random.default_rng(7)
    spared = 0
    for one in problems:
        alone = KindsAlone(one.problem, one.proof(0.0), parameters(0.0), limits())
        for line in rng.permutation(len(one.codes))[:12].tolist():
            found = alone.solve(one.tails_s[line])
            want = one.kinds[:, line]
            assert found.bounds == pytest.approx(want, rel=1e-8, abs=1e-9), one.seed
            assert (found.columns is None) == bool(np.isinf(want).any())
            if found.columns is not None:
                bits = [
                    b.choices[code].bits
                    for b, code in zip(one.problem.buckets, one.codes[line], strict=True)
                ]
                judged = evaluate_columns(one.problem, found.columns, one.deadline_s, bits)
                assert judged.feasible, one.seed
                assert judged.perturbation == pytest.approx(one.costs[line], rel=1e-8, abs=1e-9)
                room_s = alone.room_s(found.columns)
                assert (one.tails_s[line] <= room_s * (1 + _ROUNDING)).all()
            before = alone.solves
            assert alone.solve(one.tails_s[line]) is found
            assert alone.solves == before
        spared += 12 * len(one.joint.parts) - alone.solves
    assert spared > 100


@pytest.mark.parametrize("gap", [0.0, 1e-4, 0.1])
def test_bits_are_closed_by_a_bound_that_holds(problems: list[Tiny], gap: float) -> None:
    closed = 0
    for one in problems:
        climb = one.climb()
        if climb.impossible:
            continue
        proof = one.proof(gap)
        apart = KindsApart(one.problem, proof, parameters(gap), limits())
        bound = apart.settle(one.joint, climb, open_options(one.joint, climb.best))
        best = float(one.costs.min())
        assert bound is not None, one.seed
        closed += 1
        if np.isinf(best):
            assert np.isinf(bound)
            continue
        assert proof.incumbent.objective <= best * (1 + gap + _ROUNDING) + _ROUNDING, one.seed
        assert bound <= best * (1 + _ROUNDING) + _ROUNDING, one.seed
        assert proof.closes(bound), one.seed
    assert closed > 20


def test_shortest_tails_fall_and_are_no_longer_than_any() -> None:
    rng = np.random.default_rng(8)
    for _ in range(50):
        lines, buckets = int(rng.integers(1, 6)), int(rng.integers(1, 6))
        times_s = rng.random((lines, buckets))
        tails = np.cumsum(times_s[:, ::-1], axis=1)[:, ::-1]
        vectors = OpenVectors(
            codes=np.zeros((lines, buckets), dtype=np.int64),
            variance=np.zeros(lines),
            saved_s=np.zeros((lines, buckets)),
            tails_s=tails,
            kinds=1,
        )
        shortest = vectors.shortest()
        assert (shortest <= tails).all()
        line, rows = int(rng.integers(lines)), rng.random(buckets) < 0.5
        mine = vectors.shortest(line, rows)
        for found in (shortest, mine):
            assert (np.diff(found) <= 0).all()
        assert (mine <= tails[line]).all()
        assert (mine >= shortest).all()
        assert (mine[rows] == tails[line][rows]).all()
