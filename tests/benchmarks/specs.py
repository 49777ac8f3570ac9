"""What the benchmarks measure, and one measurement in this process.

A solver spec is a generated problem and a solver for it: `exact` is this library's exact
method, the others are back ends that get the whole program as it is. Only the call of `solve`
is timed: making the problem and importing the solver are not.
"""

from __future__ import annotations

import importlib
import itertools
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import qsync_opt as qo
from qsync_opt.console import to_json

SIZES = (54, 100, 300, 1_000, 3_000, 10_000)
GRAPHS = ("branching", "chain")
COSTS = ("independent", "correlated")

#: This library, and the plain solvers beside it.
OWN = "exact"
PEERS = ("highs", "scip", "cbc")

PRECISIONS, KINDS, THREADS = 4, 2, 2
RELATIVE_GAP = 1e-4
DEFAULT_LIMIT_S = 60.0

#: The steps of the exact method in the order of its clock, as its statistics name them.
CLOCK = ("graph_s", "bound_s", "heuristic_s")
COUNTS = (
    "first_gap",
    "variables",
    "rounds",
    "branchings",
    "open",
    "classes",
    "items",
    "labels",
    "programs",
)


@dataclass(frozen=True, kw_only=True)
class SolverSpec:
    """One solver on one generated problem.

    Attributes:
        operators: size of the problem.
        graph: `branching` or `chain`.
        costs: `independent` or `correlated`, see `generate_problem`.
        solver: `exact`, or the back end of a plain solve.
        limit_s: time limit of the solve.
        seed: of the problem.
    """

    operators: int
    graph: str
    costs: str
    solver: str
    limit_s: float | None = DEFAULT_LIMIT_S
    seed: int = 0

    @property
    def family(self) -> tuple[str, str]:
        """What the problem shares with those of other sizes."""
        return self.graph, self.costs

    def problem(self) -> qo.AllocationProblem:
        """The problem; equal specs give equal problems."""
        return qo.generate_problem(
            operators=self.operators,
            precisions=PRECISIONS,
            devices=KINDS,
            graph=self.graph,
            costs=self.costs,
            seed=self.seed,
        )

    def parameters(self) -> qo.SolveParameters:
        """The options of the solve."""
        plain = self.solver != OWN
        return qo.SolveParameters(
            relative_gap=RELATIVE_GAP,
            threads=THREADS,
            time_limit_s=self.limit_s,
            plain=plain,
            solver=self.solver if plain else "highs",
        )


def solver_specs(
    sizes: Sequence[int] = SIZES,
    *,
    graphs: Sequence[str] = GRAPHS,
    costs: Sequence[str] = COSTS,
    peers: Sequence[str] = PEERS,
    limit_s: float | None = DEFAULT_LIMIT_S,
) -> list[SolverSpec]:
    """Every solver on every problem, the smallest first; `limit_s` is that of the peers.

    The exact method gets ten times the limit: what counts is the time to its proof.
    """
    return [
        SolverSpec(
            operators=size,
            graph=graph,
            costs=cost,
            solver=solver,
            limit_s=limit_s if solver != OWN or limit_s is None else 10 * limit_s,
        )
        for graph, cost in itertools.product(graphs, costs)
        for size in sorted(sizes)
        for solver in (OWN, *peers)
    ]


def measure(spec: SolverSpec) -> dict[str, Any]:
    """Solve once; plain values for a JSON file.

    The peak memory is that of this process so far, so a fair figure takes a process of its own.
    """
    # Loaded on first use, which would count as solving; MathOpt before anything that has HiGHS.
    for name in ("ortools.math_opt.python.mathopt", "qsync_opt.optimize.solve"):
        importlib.import_module(name)
    problem = spec.problem()
    began = time.perf_counter()
    result = qo.solve(problem, method="exact", parameters=spec.parameters())
    wall_s = time.perf_counter() - began
    row = {
        **_named(spec),
        "problem": problem.sha256,
        "status": result.status.name,
        "reason": result.fallback_reason,
        "objective": result.objective,
        "bound": result.bound,
        "gap": result.gap,
        "wall_s": wall_s,
        "peak_rss_bytes": peak_rss_bytes(),
        "kinds": {
            name: {"solve_s": part.solve_s, **part.statistics}
            for name, part in result.devices.items()
        },
    }
    # JSON has no infinity: a gap to a bound of zero becomes null.
    return cast(dict[str, Any], to_json(row))


def not_measured(spec: SolverSpec, status: str, reason: str) -> dict[str, Any]:
    """The row of a spec that was not run to its end."""
    return {
        **_named(spec),
        "problem": None,
        "status": status,
        "reason": reason,
        "objective": None,
        "bound": None,
        "gap": None,
        "wall_s": None,
        "peak_rss_bytes": None,
        "kinds": {},
    }


def _named(spec: SolverSpec) -> dict[str, Any]:
    names = ("operators", "graph", "costs", "solver", "limit_s")
    return {name: getattr(spec, name) for name in names}


def peak_rss_bytes() -> int:
    """Largest resident memory of this process or of a child that has ended."""
    who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    largest = max(resource.getrusage(one).ru_maxrss for one in who)
    return largest if sys.platform == "darwin" else largest * 1024  # Linux counts KiB
