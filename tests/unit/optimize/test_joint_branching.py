"""Splits of a node lose no plan: every open option is left in one half or the other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from qsync_opt.optimize.branching import split_options
from qsync_opt.optimize.generate import generate_problem
from qsync_opt.optimize.joint_branching import split_jointly
from qsync_opt.optimize.joint_core import open_options
from qsync_opt.optimize.joint_lagrangian import JointLagrangian
from qsync_opt.optimize.run import distinct_kinds


@pytest.mark.parametrize("room", [1e-3, 0.1, 1.0, 100.0, 1e6])
@pytest.mark.parametrize("seed", range(4))
def test_halves_share_out_what_is_open(seed: int, room: float) -> None:
    problem = generate_problem(operators=20, seed=seed, communication=(16, 8, 4))
    # With variances this large the split is of a bucket, with those drawn mostly of an operator.
    loud = tuple(
        replace(b, codes=tuple(replace(c, perturbation=1e3 * c.perturbation) for c in b.codes))
        for b in problem.buckets
    )
    places = set()
    for posed in (problem, replace(problem, buckets=loud)):
        assert posed.deadline_s is not None
        joint = JointLagrangian(posed, distinct_kinds(posed), posed.deadline_s)
        climb = joint.maximise(tolerance=1e-6, visit=lambda _: False, enough=lambda _: False)
        point = climb.best
        least = open_options(joint, point)
        target = point.value * (1 + room)
        if not least.count(target):
            continue
        sides = split_jointly(joint, point, least, target, point.value)
        masks = [joint.masks(side) for side in sides]
        for index, bounds in enumerate([*least.kinds, *least.codes]):
            one, two = ([*kinds, *codes][index] for kinds, codes in masks)
            assert (np.isinf(one) & np.isinf(two) & (bounds < target)).sum() == 0
            if np.isinf(one).any():
                places.add(index)
                rows = np.isinf(one) & ~np.isinf(two) & (bounds < target)
                assert rows.any()
                assert (np.isinf(two) & ~np.isinf(one) & (bounds < target)).any()
        for part, bounds, weight in zip(joint.parts, least.kinds, joint.weights, strict=True):
            if not ((bounds < target).sum(axis=1) > 1).any():
                continue
            mine = joint.part_points(point)[joint.parts.index(part)]
            split = split_options(
                part, mine, bounds / weight, target / weight, point.value / weight
            )
            closed = np.isinf(split.sides[0]) & np.isinf(split.sides[1])
            assert not (closed & (bounds < target)).any()
    assert places
