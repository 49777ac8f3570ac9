"""Ways to solve exactly, and in what their results differ from those of trying every plan."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from qsync_opt.optimize.evaluate import evaluate
from qsync_opt.optimize.problem import AllocationProblem
from qsync_opt.optimize.result import SolveParameters, SolveResult
from qsync_opt.optimize.solve import solve
from tests.tiny_problems import tiny_problem

#: Sums of the same few floats in another order differ by less than this fraction.
ROUNDING = 1e-9


@dataclass(frozen=True)
class Way:
    """A way to solve a problem exactly, used for every so many problems."""

    solver: str
    plain: bool
    every: int

    @property
    def parameters(self) -> SolveParameters:
        # CP-SAT rounds the objective to 2^30 whole steps, and can prove no finer gap.
        gap = 1e-6 if self.solver == "cp_sat" else 0.0
        return SolveParameters(
            solver=self.solver, plain=self.plain, relative_gap=gap, time_limit_s=None, threads=1
        )


WAYS = (
    Way("highs", plain=False, every=1),
    Way("highs", plain=True, every=1),
    Way("scip", plain=True, every=4),
    Way("cp_sat", plain=True, every=4),
    Way("cbc", plain=True, every=13),
)


def posed(seed: int) -> AllocationProblem:
    """A tiny problem; every fourth one with a slack in place of the deadline.

    Two of three have one device kind, because each kind is solved alone.
    """
    problem = tiny_problem(seed, kinds=None if seed % 3 == 0 else 1)
    if seed % 4 == 3:
        slack = (0.0, 0.1, 0.5)[seed // 4 % 3]
        return replace(problem, deadline_s=None, slack=slack)
    return problem


def faults(problem: AllocationProblem, want: SolveResult, got: SolveResult) -> list[str]:
    """In what a result differs from that of brute force."""
    if got.status is not want.status:
        return [f"status {got.status.name}, not {want.status.name} ({got.fallback_reason})"]
    found = []
    if want.deadline_s is None or got.deadline_s is None:
        if want.deadline_s is not got.deadline_s:
            found.append(f"deadline {got.deadline_s}, not {want.deadline_s}")
    elif not math.isclose(got.deadline_s, want.deadline_s, rel_tol=ROUNDING):
        found.append(f"deadline {got.deadline_s}, not {want.deadline_s}")
    if want.objective is None:
        if got.plan is not None or got.objective is not None:
            found.append("a plan where there is none")
        return found
    if got.objective is None or got.plan is None or got.bound is None:
        return [*found, "no plan, objective or bound"]
    if not math.isclose(got.objective, want.objective, rel_tol=ROUNDING):
        found.append(f"objective {got.objective}, not {want.objective}")
    if got.bound > want.objective * (1 + ROUNDING):
        found.append(f"bound {got.bound} above the optimum {want.objective}")
    if got.gap is None or got.gap > got.parameters.relative_gap + ROUNDING:
        found.append(f"gap {got.gap}")
    judged = evaluate(problem, got.plan, deadline_s=want.deadline_s)
    if not judged.feasible:
        found.append(f"the plan breaks {judged.violations[0]}")
    if not math.isclose(judged.perturbation, got.objective, rel_tol=ROUNDING):
        found.append(f"objective {got.objective}, but evaluate says {judged.perturbation}")
    return found


def wrong_results(seeds: range) -> list[str]:
    """What the ways get wrong on some of the problems, each line with its seed."""
    wrong = []
    for seed in seeds:
        problem = posed(seed)
        want = solve(problem, method="brute_force")
        for way in WAYS:
            if seed % way.every == 0:
                got = solve(problem, method="exact", parameters=way.parameters)
                wrong += [f"seed {seed}, {way}: {fault}" for fault in faults(problem, want, got)]
    return wrong
