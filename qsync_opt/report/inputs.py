"""`ReportInputs`: what a report is made of. Everything but the problem may be missing."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING

from qsync_opt.costs import DeviceCosts
from qsync_opt.errors import FormatError, ParameterError
from qsync_opt.optimize.comparison import Comparison, ParetoCurve
from qsync_opt.optimize.evaluate import Evaluation, evaluate
from qsync_opt.optimize.problem import AllocationProblem
from qsync_opt.plan import PrecisionPlan
from qsync_opt.report.measured import MeasuredRun, MeasuredStep
from qsync_opt.simulate.replay import Replay, replay
from qsync_opt.simulate.tasks import HostCosts

if TYPE_CHECKING:
    import os


@dataclass(frozen=True, kw_only=True, slots=True)
class CurvePoint:
    """One method held to one deadline.

    Attributes:
        method: which.
        slack: the deadline relative to the fastest feasible time, minus 1.
        deadline_s: the deadline; None if no plan fits the memory.
        objective, bound: of the method's plan, and what is proven; None without one.
        iteration_time_s: of the plan.
    """

    method: str
    slack: float
    deadline_s: float | None
    objective: float | None
    bound: float | None
    iteration_time_s: float | None


@dataclass(frozen=True, kw_only=True)
class ReportInputs:
    """What a report shows.

    Attributes:
        problem: the problem.
        plans: name -> plan. The first is the one that pictures of one plan show.
        deadline_s: the iteration time that the plans were held to; None: the problem's own.
        comparison: how the plans were found; rows are named like plans.
        curve: perturbation against iteration time.
        hosts: device kind -> what launching takes there, see `replay`.
        costs: device kind -> what was measured there; whole steps are compared with.
        runs: name -> a training job; one named like a plan is compared with it.
        steps: plan name -> one measured step of every rank.

    Raises:
        PlanError: a plan of another problem.
        ParameterError: a kind, or a run's kind, that the problem does not have; or a measured
            step of a plan that is not given.
    """

    problem: AllocationProblem
    plans: Mapping[str, PrecisionPlan] = field(default_factory=dict)
    deadline_s: float | None = None
    comparison: Comparison | None = None
    curve: tuple[CurvePoint, ...] = ()
    hosts: Mapping[str, HostCosts] = field(default_factory=dict)
    costs: Mapping[str, DeviceCosts] = field(default_factory=dict)
    runs: Mapping[str, MeasuredRun] = field(default_factory=dict)
    steps: Mapping[str, tuple[MeasuredStep, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = list(self.problem.device_index)
        for name in ("hosts", "costs"):
            for kind in getattr(self, name):
                if kind not in known:
                    rule = f"must name device kinds of the problem ({', '.join(known)})"
                    raise ParameterError(name, rule, kind)
        for name in self.steps:
            if name not in self.plans:
                rule = f"must be of a plan that is given ({', '.join(self.plans) or 'none is'})"
                raise ParameterError("trace", rule, name)
        if self.deadline_s is None:
            object.__setattr__(self, "deadline_s", self.problem.deadline_s)
        self.evaluations  # noqa: B018  # plans of another problem are refused now

    @cached_property
    def evaluations(self) -> Mapping[str, Evaluation]:
        """Plan name -> what it costs."""
        found = {
            name: evaluate(self.problem, plan, deadline_s=self.deadline_s)
            for name, plan in self.plans.items()
        }
        return MappingProxyType(found)

    @cached_property
    def replays(self) -> Mapping[str, Replay]:
        """Plan name -> its predicted step."""
        found = {
            name: replay(self.problem, plan, hosts=self.hosts) for name, plan in self.plans.items()
        }
        return MappingProxyType(found)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Every plan, method and job once: what is named alike looks alike everywhere."""
        return tuple(dict.fromkeys([*self.plans, *methods_of(self.curve), *self.runs]))


def curve_of(curve: ParetoCurve) -> tuple[CurvePoint, ...]:
    """What `pareto` returned, as points."""
    return tuple(
        CurvePoint(
            method=row.method,
            slack=point.slack,
            deadline_s=point.deadline_s,
            objective=row.objective,
            bound=row.bound,
            iteration_time_s=row.iteration_time_s,
        )
        for point in curve.points
        for row in point.comparison.rows
    )


def read_curve(text: str, where: str | os.PathLike[str]) -> tuple[CurvePoint, ...]:
    """The points that `pareto_csv` wrote.

    Args:
        text: of the file.
        where: its path, for messages.

    Raises:
        FormatError: a column is missing, or a cell is no number.
    """
    rows = csv.DictReader(io.StringIO(text))
    wanted = ("method", "slack", "deadline_s", "objective", "bound", "iteration_time_s")
    missing = [name for name in wanted if name not in (rows.fieldnames or ())]
    if missing:
        rule = f"must have the columns {', '.join(wanted)} of a Pareto curve"
        raise FormatError(str(where), rule, f"no {missing[0]}")
    points = []
    for number, row in enumerate(rows, 2):
        place = f"{where}:{number}"
        values = {name: _number(row[name], f"{place}.{name}") for name in wanted[1:]}
        slack = values.pop("slack")
        if slack is None:
            raise FormatError(f"{place}.slack", "must be a number", row["slack"])
        points.append(CurvePoint(method=row["method"], slack=slack, **values))
    return tuple(points)


def _number(cell: str | None, where: str) -> float | None:
    if cell is None or cell == "":
        return None
    try:
        value = float(cell)
    except ValueError:
        raise FormatError(where, "must be a number", cell) from None
    if not math.isfinite(value):
        raise FormatError(where, "must be finite", cell)
    return value


def methods_of(curve: Sequence[CurvePoint]) -> list[str]:
    """The methods of a curve in the order in which they come."""
    return list(dict.fromkeys(point.method for point in curve))
