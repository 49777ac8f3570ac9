"""What `rivals` compares: plans, uniform precisions, autocast and uneven shares."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from qsync_opt.errors import QsyncError
from qsync_opt.graph import OperatorGraph
from qsync_opt.measure.uniform import uniform_plan
from qsync_opt.optimize.arrays import IntArray
from qsync_opt.optimize.evaluate import evaluate, follower_columns, plan_from_columns
from qsync_opt.optimize.problem import AllocationProblem
from qsync_opt.optimize.result import SolveParameters
from qsync_opt.optimize.solve import solve
from qsync_opt.plan import PrecisionPlan
from qsync_opt.precision import Precision
from qsync_opt.runtime.availability import available_precisions


def solve_plans(problem: AllocationProblem, time_limit_s: float) -> dict[str, Any]:
    """The plans of the methods that lower operators one by one, and how they came about."""
    plans: dict[str, Any] = {}
    facts: dict[str, dict[str, Any]] = {}
    for method in ("exact", "greedy"):
        try:
            found = solve(
                problem, method=method, parameters=SolveParameters(time_limit_s=time_limit_s)
            )
        except QsyncError as error:
            facts[method] = {"status": str(error)}
            continue
        facts[method] = {
            "status": found.status.name.lower(),
            "objective": found.objective,
            "gap": found.gap,
            "solve_s": found.solve_s,
            "deadline_s": found.deadline_s,
        }
        if found.plan is not None:
            plans[method] = {
                kind: {name: str(precision) for name, precision in row.items()}
                for kind, row in found.plan.devices.items()
            }
    return {"plans": plans, "facts": facts}


def paced_by_uniform(
    problem: AllocationProblem, graph: OperatorGraph, device: torch.device
) -> AllocationProblem:
    """The problem with the pace of the fastest uniform plan, where that fits in memory.

    Plans are compared at one pace: the fastest plan of all may be faster by less than can be
    measured, and perturb more than the uniform one.
    """
    plan = _fastest_uniform(problem, graph, available_precisions(device))
    told = evaluate(problem, plan)
    if any(broken.resource == "memory" for broken in told.violations):
        return problem
    return replace(problem, deadline_s=told.iteration_time_s, slack=0.0)


def all_methods(
    problem: AllocationProblem,
    graph: OperatorGraph,
    solved: Mapping[str, Any],
    device: torch.device,
) -> dict[str, dict[str, Any]]:
    """Method -> options of the trainer, and the plan by which it is judged."""
    methods: dict[str, dict[str, Any]] = {}
    for name, rows in solved["plans"].items():
        plan = PrecisionPlan(problem=problem.sha256, devices=rows)
        methods[name] = {"plan": plan, "judged": plan, "options": {}}
    available = available_precisions(device)
    plan = _fastest_uniform(problem, graph, available)
    methods["uniform by kind"] = {"plan": plan, "judged": plan, "options": {}}
    for precision in problem.precisions:
        judged = _uniform(problem, graph, precision, available)
        given = {"uniform": precision}
        methods[f"all {precision}"] = {"plan": None, "judged": judged, "options": given}
    for precision in (Precision.BF16, Precision.FP16):
        if precision in problem.precisions or device.type == "cuda":
            known = precision in problem.precisions
            judge = _uniform(problem, graph, precision, available) if known else None
            given = {"autocast": precision}
            methods[f"autocast {precision}"] = {"plan": None, "judged": judge, "options": given}
    judged = _uniform(problem, graph, Precision.FP32, available)
    methods["batch sizing"] = {"plan": None, "judged": judged, "options": {"batch_sizing": True}}
    return methods


def _fastest_uniform(
    problem: AllocationProblem, graph: OperatorGraph, available: frozenset[Precision]
) -> PrecisionPlan:
    """One precision for each kind: those that are fastest together, by prediction.

    Among equal ones that with the least perturbation; a plan that needs more memory than there
    is only where all do.
    """
    rows = {p: _uniform_column(problem, graph, p, available) for p in problem.precisions}
    choices = itertools.product(problem.precisions, repeat=len(problem.devices))
    plans = [plan_from_columns(problem, [rows[p] for p in choice]) for choice in choices]

    def cost(plan: PrecisionPlan) -> tuple[bool, float, float]:
        told = evaluate(problem, plan)
        lacks = any(broken.resource == "memory" for broken in told.violations)
        return lacks, told.iteration_time_s, told.perturbation

    return min(plans, key=cost)


def _uniform(
    problem: AllocationProblem,
    graph: OperatorGraph,
    precision: Precision,
    available: frozenset[Precision],
) -> PrecisionPlan:
    """One precision on all kinds, where operators have it."""
    column = _uniform_column(problem, graph, precision, available)
    return plan_from_columns(problem, [column] * len(problem.devices))


def _uniform_column(
    problem: AllocationProblem,
    graph: OperatorGraph,
    precision: Precision,
    available: frozenset[Precision],
) -> IntArray:
    row = uniform_plan(graph, precision, available & set(problem.precisions))
    columns = [
        problem.precisions.index(row.get(operator.name, Precision.FP32))
        for operator in problem.operators
    ]
    return follower_columns(problem, np.array(columns, dtype=np.int64))
