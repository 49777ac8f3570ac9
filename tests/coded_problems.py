"""Problems whose buckets have codes: of random tiny problems, and of real instances."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np

from qsync_opt.optimize.evaluate import evaluate_columns, evaluate_device, follower_columns
from qsync_opt.optimize.problem import AllocationProblem, Bucket, BucketCode
from qsync_opt.optimize.solve import solve
from tests.tiny_problems import tiny_problem


def tiny_coded_problem(seed: int) -> AllocationProblem:
    """A tiny problem with codes in some of its buckets; every third with a slack.

    Codes may be slower than 32 bits, take no time, or add nothing to the variance; some
    problems have no bucket, a few no code, and every fifth has buckets that are all alike.
    """
    rng = np.random.default_rng([seed, 7])
    problem = tiny_problem(seed, kinds=None if seed % 2 else 1)
    buckets = []
    for bucket in problem.buckets:
        counts = [n for n in (16, 8, 4, 2) if rng.random() < 0.4]
        codes = tuple(
            BucketCode(
                bits=n,
                all_reduce_s=float(bucket.all_reduce_s * rng.uniform(0.0, 1.3)),
                perturbation=float(rng.integers(0, 5) * rng.random()),
            )
            for n in counts
        )
        buckets.append(replace(bucket, codes=codes))
    if seed % 5 == 0:
        buckets = buckets[:1] * len(buckets)
    problem = replace(problem, buckets=tuple(buckets))
    if seed % 3 == 2:
        return replace(problem, deadline_s=None, slack=(0.0, 0.1, 0.5)[seed // 3 % 3])
    return problem


def coded(problem: AllocationProblem, slack: float = 0.1, share: float = 0.6) -> AllocationProblem:
    """An instance with 16, 8 and 4 bits for every bucket, where communication matters.

    Times are proportional to bytes and bits, in all `share` of the slowest kind's fastest
    compute at 32 bits; variances go by 1 / (2^bits - 1)^2 and bytes, in all at 8 bits a
    tenth of the perturbation of the best uniform plan without them.
    """
    compute_s = 0.0
    for device in problem.devices:
        total = np.where(device.available, device.forward_s + device.backward_s, np.inf)
        column = follower_columns(problem, total.argmin(axis=1))
        compute_s = max(compute_s, evaluate_device(problem, device, column).compute_s)
    variance = solve(problem, method="uniform").objective or 1.0
    total_bytes = sum(bucket.size_bytes for bucket in problem.buckets) or 1

    def bucket_of(bucket: Bucket) -> Bucket:
        part = bucket.size_bytes / total_bytes
        full_s = share * compute_s * part
        codes = tuple(
            BucketCode(
                bits=n,
                all_reduce_s=full_s * n / 32,
                perturbation=0.1 * variance * part * (255 / (2**n - 1)) ** 2,
            )
            for n in (16, 8, 4)
        )
        return replace(bucket, all_reduce_s=full_s, codes=codes)

    buckets = tuple(bucket_of(bucket) for bucket in problem.buckets)
    return replace(problem, buckets=buckets, deadline_s=None, slack=slack)


def every_plan(problem: AllocationProblem, most: int) -> list[tuple[float, float, bool]] | None:
    """Perturbation, time and whether memory and rules hold, of every plan at all bits.

    None where there are more than `most`; each is judged by `evaluate` without a deadline.
    """
    parts = []
    for device in problem.devices:
        options = [np.flatnonzero(row).tolist() for row in device.available]
        parts.append([np.array(pick) for pick in itertools.product(*options)])
    bits = list(itertools.product(*([c.bits for c in b.choices] for b in problem.buckets)))
    if math.prod(map(len, parts)) * len(bits) > most:
        return None
    found = []
    for columns in itertools.product(*parts):
        for sent in bits:
            judged = evaluate_columns(problem, list(columns), None, sent)
            found.append((judged.perturbation, judged.iteration_time_s, judged.feasible))
    return found
