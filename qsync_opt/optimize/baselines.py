"""Plans without a solver and without a search: uniform precision, and random plans repaired.

Both work on one device kind and on precision columns, are held to a deadline in seconds
(infinity for none), and return feasible columns [N] or None. Ties are broken the same way in
every method (`greedy`, `polish` too): less perturbation, then the smaller iteration time of
the kind, then lower columns.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qsync_opt.errors import ParameterError
from qsync_opt.optimize.arrays import IntArray
from qsync_opt.optimize.choices import Choice, better_cost, movable, picked_columns
from qsync_opt.optimize.evaluate import (
    TIME_TOLERANCE,
    DeviceEvaluation,
    broken_rules,
    evaluate_device,
)
from qsync_opt.optimize.problem import AllocationProblem, DeviceKind
from qsync_opt.optimize.state import PlanState
from qsync_opt.precision import Precision


@dataclass(frozen=True, kw_only=True)
class UniformCandidate:
    """The plan that runs one precision wherever it can.

    Attributes:
        precision: the precision asked of every operator.
        column: precision column per operator, [N].
        evaluation: what it costs.
        feasible: whether memory, deadline, pins, groups and followers hold.
    """

    precision: Precision
    column: IntArray
    evaluation: DeviceEvaluation
    feasible: bool


def uniform_candidates(
    problem: AllocationProblem, device: DeviceKind, deadline_s: float
) -> tuple[UniformCandidate, ...]:
    """One plan per precision p of the problem, in the order of its columns.

    Every choice runs at p where it may. Elsewhere (the device lacks p there, or a pin
    forbids it) it takes the nearest wider precision it may run at, and only where there is
    none the nearest narrower one; `Precision` lists them from the widest to the narrowest.
    So uniform bf16 leaves an operator without bf16 in tf32 or fp32, as autocast does.
    """
    choices = movable(problem, device)
    options = {choice.columns for choice in choices}
    result = []
    for target, precision in enumerate(problem.precisions):
        nearest = {columns: _nearest(problem, columns, target) for columns in options}
        picks = [nearest[choice.columns] for choice in choices]
        column = picked_columns(problem, choices, picks)
        evaluation = evaluate_device(problem, device, column)
        feasible = (
            evaluation.peak_memory_bytes <= device.memory_bytes
            and evaluation.iteration_time_s <= deadline_s * (1 + TIME_TOLERANCE)
            and not broken_rules(problem, device, column)
        )
        result.append(
            UniformCandidate(
                precision=precision, column=column, evaluation=evaluation, feasible=feasible
            )
        )
    return tuple(result)


def _nearest(problem: AllocationProblem, columns: Sequence[int], target: int) -> int:
    """The column that stands in for `target`; see `uniform_candidates`."""
    widest_first = list(Precision)
    rank = {column: widest_first.index(problem.precisions[column]) for column in columns}
    limit = widest_first.index(problem.precisions[target])
    wider = [column for column in columns if rank[column] <= limit]
    return max(wider, key=rank.__getitem__) if wider else min(columns, key=rank.__getitem__)


def uniform_columns(
    problem: AllocationProblem, device: DeviceKind, deadline_s: float
) -> IntArray | None:
    """The best feasible plan of `uniform_candidates`; None if none is feasible."""
    best = best_uniform([c for c in uniform_candidates(problem, device, deadline_s) if c.feasible])
    return None if best is None else best.column


def best_uniform(candidates: Sequence[UniformCandidate]) -> UniformCandidate | None:
    """The candidate of least perturbation, then of least time, then the first; None of none."""
    best: UniformCandidate | None = None
    for candidate in candidates:
        if best is None or better_cost(_cost(candidate.evaluation), _cost(best.evaluation)):
            best = candidate
    return best


def _cost(evaluation: DeviceEvaluation) -> tuple[float, float]:
    return evaluation.perturbation, evaluation.iteration_time_s


def random_columns(
    problem: AllocationProblem, device: DeviceKind, deadline_s: float, seed: int, tries: int = 8
) -> IntArray | None:
    """The best of some random plans, each repaired until it is feasible.

    The random numbers depend on the seed and the kind's name alone, so adding, removing or
    reordering other kinds changes nothing. A repair visits the choices in random order and
    keeps every change that brings the plan nearer to its limits.

    Args:
        problem: the problem.
        device: one of its device kinds.
        deadline_s: iteration time to keep; infinity for none.
        seed: whole number >= 0.
        tries: plans to draw, at least 1.

    Returns:
        A feasible plan; None if no repair succeeded (one may exist all the same).

    Raises:
        ParameterError: `tries` or `seed` is out of range.
    """
    for name, value, least in (("seed", seed, 0), ("tries", tries, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ParameterError(name, f"must be a whole number >= {least}", value)
    digest = hashlib.sha256(device.name.encode()).digest()
    rng = np.random.default_rng([seed, int.from_bytes(digest[:8], "big")])
    choices = movable(problem, device)
    state: PlanState | None = None
    best: IntArray | None = None
    best_cost = (0.0, 0.0)
    for _ in range(tries):
        picks = [choice.columns[int(rng.integers(len(choice.columns)))] for choice in choices]
        column = picked_columns(problem, choices, picks)
        if state is None:
            state = PlanState(problem, device, column)
        else:
            state.load(column)
        if not _repair(state, choices, deadline_s, rng):
            continue
        cost = (state.perturbation, state.iteration_time_s)
        if best is None or better_cost(cost, best_cost):
            best, best_cost = state.columns(), cost
    return best


def _repair(
    state: PlanState, choices: Sequence[Choice], deadline_s: float, rng: np.random.Generator
) -> bool:
    """Change choices in random order until the plan is feasible; False if that fails."""
    for number in rng.permutation(len(choices)).tolist():
        excess = state.excess(deadline_s)
        if not excess:
            return True
        operators = choices[number].operators
        kept = state.column_of(operators[0])
        for column in choices[number].columns:
            if column == kept:
                continue
            moved = state.move(operators, column)
            after = state.excess(deadline_s)
            if after < excess:
                excess = after
            else:
                state.undo(moved)
    return not state.excess(deadline_s)
