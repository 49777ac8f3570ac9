"""`BackEnd`: programs of one device kind given to a solver, whose plans are proposals only.

Every plan is verified; one that a solver's tolerance let through is cut off by a row, and the
program solved again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from qsync_opt.errors import SolverUnavailableError
from qsync_opt.optimize.arrays import BoolArray, FloatArray, IntArray
from qsync_opt.optimize.backends import solve_program
from qsync_opt.optimize.core import Core
from qsync_opt.optimize.formulation import formulate
from qsync_opt.optimize.incumbent import Best, Incumbent
from qsync_opt.optimize.interrupter import Interrupter
from qsync_opt.optimize.linear import LinearProgram, without_plan

#: Part of the gap that a back end may leave: rounding and the objective's change take the rest.
_OWN_GAP = 0.9

#: Plans cut off before a solver is given up on: each is a plan that its tolerance let through.
_MOST_CUTS = 100

#: Rounding of sums of floats, relative.
_ROUNDING = 1e-11


@dataclass(frozen=True, kw_only=True, eq=False)
class Program:
    """A program, and what its solutions mean.

    Attributes:
        program: the program.
        read: values of its columns -> precision columns [N], and the columns that are 1.
        unit: what one unit of its objective is worth.
        constant: what its objective lacks.
    """

    program: LinearProgram
    read: Callable[[FloatArray], tuple[IntArray, IntArray]]
    unit: float
    constant: float


def core_program(core: Core, column_of: Callable[[IntArray], IntArray]) -> Program:
    """A knapsack core; `column_of` gives the precision columns of its items."""
    program, unit = core.program()

    def read(values: FloatArray) -> tuple[IntArray, IntArray]:
        items = core.chosen(values)
        return column_of(items), items

    return Program(program=program, read=read, unit=unit, constant=core.constant)


def flow_program(incumbent: Incumbent, domain: BoolArray) -> Program:
    """The edge-flow program of the incumbent's kind over some options, [N, P]."""
    minimise_time = incumbent.deadline_s is None
    built = formulate(
        incumbent.problem,
        deadline_s=incumbent.deadline_s,
        device=incumbent.device.name,
        objective="time" if minimise_time else "perturbation",
        domains=[domain],
        named=False,
        cuts=incumbent.cuts,
    )
    ((_, choices),) = built.choices

    def read(values: FloatArray) -> tuple[IntArray, IntArray]:
        ((_, column),) = built.read(values)
        return column, np.unique(choices[np.arange(len(column)), column])

    return Program(program=built.program, read=read, unit=built.objective_unit, constant=0.0)


@dataclass(frozen=True, kw_only=True, eq=False)
class BackEnd:
    """A solver for the programs of one kind.

    Attributes:
        solver: its name, see `SolveParameters`.
        seed: for solvers that take one.
        relative_gap: gap to prove.
        time_left: seconds left, or None for no limit.
        count: takes what was done, by name.
        interrupter: makes the solver stop soon.
    """

    solver: str
    seed: int
    relative_gap: float
    time_left: Callable[[], float | None]
    count: Callable[[str], None]
    interrupter: Interrupter | None

    def solve(self, built: Program, incumbent: Best, *, bound: float, threshold: float) -> float:
        """Solve a program, and offer what the solver proposes.

        Args:
            built: the program.
            incumbent: takes the plans.
            bound: lower bound of all plans known, of which the gap allowed is a fraction.
            threshold: what was left out of the program is not below this.

        Returns:
            A lower bound of the program's plans and of those left out.

        Raises:
            SolverUnavailableError: the solver failed, or proposes only plans that break a
                budget.
        """
        program, reached = built.program, -math.inf
        # The gap is a fraction of the whole objective, of which the program may hold a part;
        # of its bound, because a better plan makes the gap allowed smaller.
        gap = self.relative_gap * _OWN_GAP
        whole = max(bound, built.constant, 0.0)
        for _ in range(_MOST_CUTS):
            answer = solve_program(
                program,
                solver=self.solver,
                time_limit_s=self.time_left(),
                relative_gap=gap,
                absolute_gap=gap * abs(whole) / built.unit,
                seed=self.seed,
                interrupter=self.interrupter,
            )
            self.count("programs")
            if answer.status == "infeasible":
                return threshold
            if math.isfinite(answer.bound):
                proven = built.constant + answer.bound * built.unit
                reached = max(reached, min(proven - _ROUNDING * abs(proven), threshold))
            if answer.values is None:
                return reached
            column, chosen = built.read(answer.values)
            if incumbent.offer(column) or incumbent.keeps(column):
                return reached
            self.count("cuts")
            program = without_plan(program, chosen)
        raise SolverUnavailableError(
            self.solver,
            f"proposed {_MOST_CUTS} plans for {incumbent.name} that break a budget",
            "Choose another with SolveParameters(solver=...)",
        )
