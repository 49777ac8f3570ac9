"""One device kind solved to proven optimality: bounds first, then only what they leave open.

1. The Lagrangian (`lagrangian`) gives a lower bound L, prices, and plans close to the best.
2. Those plans, the caller's starts, and plans from raised prices, polished by local moves,
   give an incumbent U.
3. With the best prices, the least cost of every plan that uses a given option is known
   (`Elimination.conditional_minima`). Options for which it is not below U (1 - gap) are
   dropped: no plan that uses one can be better than the incumbent by more than the gap.
4. What remains open is solved as a mixed-integer program, smallest part first: options are
   let in by rising conditional minimum until the program has about `_FIRST_CORE` open
   choices (a core, after Pisinger, 1995, but with a proof: no plan outside the core is
   better than the threshold). Its solution improves U, which drops more options; then the
   threshold is raised until it meets U (1 - gap).

Every plan is verified by `evaluate_device`; one that a solver's tolerance let through is cut
off by a row and the program solved again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from qsync_opt.errors import SolverUnavailableError
from qsync_opt.optimize.arrays import BoolArray, FloatArray, IntArray
from qsync_opt.optimize.backends import solve_program
from qsync_opt.optimize.baselines import improve_columns
from qsync_opt.optimize.core import find_core
from qsync_opt.optimize.evaluate import TIME_TOLERANCE, allowed_columns, evaluate_device
from qsync_opt.optimize.factors import FactorGraph
from qsync_opt.optimize.formulation import formulate
from qsync_opt.optimize.knapsack import KnapsackSearch
from qsync_opt.optimize.lagrangian import Lagrangian, Point
from qsync_opt.optimize.linear import LinearProgram, ProgramSolution, without_plan
from qsync_opt.optimize.problem import AllocationProblem, DeviceKind
from qsync_opt.optimize.result import SolveStatus

#: Reads (precision columns, columns that are 1) from a program's solution.
_Reader = Callable[[FloatArray], tuple[IntArray, IntArray]]

#: Part of the gap that a back end may leave: rounding and the objective's change take the rest.
_OWN_GAP = 0.9

#: Open choices in the first mixed-integer program; later ones are four times larger.
_FIRST_CORE = 60

#: Steps of the search for prices that give a feasible plan.
_RAISES = 8

#: Plans cut off before a solver is given up on: each is a plan that its tolerance let through.
_MOST_CUTS = 100

#: Rounding of sums of floats, relative: conditional minima this close count as equal.
_ROUNDING = 1e-11


@dataclass(frozen=True, kw_only=True, eq=False)
class KindSolution:
    """What was found for one device kind.

    Attributes:
        status: why it stopped.
        column: precision column of every operator, [N]; None without a plan.
        objective: perturbation (not weighted), or iteration time; None without a plan.
        bound: proven lower bound; infinite where no plan exists.
        statistics: counts and times of the steps.
    """

    status: SolveStatus
    column: IntArray | None
    objective: float | None
    bound: float
    statistics: dict[str, float] = field(default_factory=dict)


class KindSolver:
    """Solves one device kind; see the module.

    Args:
        problem: the problem.
        device: the kind.
        deadline_s: iteration time to keep; None minimises the iteration time.
        relative_gap: gap to prove.
        solver: back end for the mixed-integer programs.
        seed: for back ends that take one.
        time_left: seconds left, or None for no limit.
        stop: whether to give up now.
        report: called with (phase, objective, bound) as the work goes on.
        plain: skip steps 1 to 3.
    """

    def __init__(
        self,
        problem: AllocationProblem,
        device: DeviceKind,
        *,
        deadline_s: float | None,
        relative_gap: float,
        solver: str,
        seed: int,
        time_left: Callable[[], float | None],
        stop: Callable[[], bool],
        report: Callable[[str, float | None, float | None], None],
        plain: bool = False,
        interrupter: object = None,
    ) -> None:
        self._problem, self._device = problem, device
        self._deadline_s = deadline_s
        # A little less than asked, so that rounding cannot push the proven gap above it.
        self._gap = relative_gap * (1 - 1e-6)
        self._solver, self._seed = solver, seed
        self._time_left, self._stop, self._report = time_left, stop, report
        self._plain, self._interrupter = plain, interrupter
        self._best: tuple[float, float, IntArray] | None = None
        self._bound = -math.inf
        self._statistics: dict[str, float] = {}

    # -- incumbent -------------------------------------------------------------------------

    def offer(self, column: IntArray) -> bool:
        """Take a plan as the incumbent if it is feasible and better; says whether it was."""
        part = evaluate_device(self._problem, self._device, column)
        if part.peak_memory_bytes > self._device.memory_bytes:
            return False
        if self._deadline_s is None:
            objective = part.iteration_time_s
        else:
            objective = part.perturbation
            if part.iteration_time_s > self._deadline_s * (1 + TIME_TOLERANCE):
                return False
        if self._best is not None:
            if (objective, part.iteration_time_s) >= self._best[:2]:
                return False
        self._best = (objective, part.iteration_time_s, column)
        return True

    @property
    def _upper(self) -> float:
        return math.inf if self._best is None else self._best[0]

    def _target(self) -> float:
        """No plan below this is wanted: U (1 - gap)."""
        upper = self._upper
        return upper - max(self._gap, _ROUNDING) * abs(upper) if math.isfinite(upper) else math.inf

    def _closed(self) -> bool:
        reached = self._bound + 2 * _ROUNDING * abs(self._bound)
        return reached >= self._target() or self._bound >= self._upper

    def _out_of_time(self) -> bool:
        left = self._time_left()
        return self._stop() or (left is not None and left <= 0)

    # -- the whole -------------------------------------------------------------------------

    def solve(self, starts: Sequence[IntArray]) -> KindSolution:
        """Solve, from plans that may or may not be feasible.

        Raises:
            SolverUnavailableError: the back end failed; the incumbent is lost to the caller
                only if there was none (`solution` gives it).
        """
        for column in starts:
            self.offer(column)
        domain = allowed_columns(self._problem, self._device)
        graph = FactorGraph(self._problem, self._device, domain)
        if not graph.feasible:
            return self._finish(SolveStatus.INFEASIBLE)
        if self._plain:
            return self._solve_core(domain, math.inf)
        began = time.perf_counter()
        lagrangian = Lagrangian(graph, self._deadline_s)
        self._statistics["variables"] = float((graph.allowed.sum(axis=1) > 1).sum())
        self._statistics["exact_tables"] = float(lagrangian.exact)
        self._statistics["graph_s"] = time.perf_counter() - began
        point, impossible = self._climb(lagrangian)
        self._statistics["bound_s"] = time.perf_counter() - began
        if impossible:
            return self._finish(SolveStatus.INFEASIBLE)
        self._raise_prices(lagrangian, point)
        self._polish()
        self._statistics["heuristic_s"] = time.perf_counter() - began
        self._statistics["first_gap"] = (
            (self._upper - self._bound) / abs(self._upper) if self._best and self._upper else 0.0
        )
        self._report("bounds and heuristics", self._objective(), self._bound)
        if self._closed() or self._out_of_time():
            return self._finish(None)
        result = self._close(lagrangian, point)
        self._statistics["total_s"] = time.perf_counter() - began
        return result

    def solution(self) -> KindSolution:
        """The state as it is, for a caller whose back end failed."""
        return self._finish(None)

    def _objective(self) -> float | None:
        return None if self._best is None else self._best[0]

    def _finish(self, status: SolveStatus | None) -> KindSolution:
        if status is None:
            if self._best is not None and self._closed():
                status = SolveStatus.OPTIMAL
            elif self._best is None and math.isinf(self._bound) and self._bound > 0:
                status = SolveStatus.INFEASIBLE
            elif self._stop():
                status = SolveStatus.INTERRUPTED
            else:
                status = SolveStatus.TIME_LIMIT
        if status is SolveStatus.INFEASIBLE and self._best is not None:
            # A verified plan contradicts the proof: believe the plan, claim nothing.
            status, self._bound = SolveStatus.TIME_LIMIT, -math.inf
        bound = math.inf if status is SolveStatus.INFEASIBLE else min(self._bound, self._upper)
        return KindSolution(
            status=status,
            column=None if self._best is None else self._best[2],
            objective=self._objective(),
            bound=bound,
            statistics=dict(self._statistics),
        )

    # -- steps 1 and 2 ---------------------------------------------------------------------

    def _climb(self, lagrangian: Lagrangian) -> tuple[Point, bool]:
        rounds = 0

        def visit(point: Point) -> bool:
            nonlocal rounds
            rounds += 1
            if not (point.excess[self._own_rows(lagrangian) :] > 0).any():
                self.offer(lagrangian.graph.operator_columns(point.options))
            return self._out_of_time()

        def enough(value: float) -> bool:
            self._bound = max(self._bound, value - _ROUNDING * abs(value))
            return self._closed()

        tolerance = max(self._gap * 0.02, 1e-9)
        climb = lagrangian.maximise(tolerance=tolerance, visit=visit, enough=enough)
        enough(climb.best.value)
        self._statistics["rounds"] = float(rounds)
        return climb.best, climb.impossible

    def _own_rows(self, lagrangian: Lagrangian) -> int:
        """Rows that a plan may break: none of time's where time is the objective."""
        return lagrangian.time_rows if self._deadline_s is None else 0

    def _raise_prices(self, lagrangian: Lagrangian, point: Point) -> None:
        """Bisect for the smallest factor on the prices whose plan is feasible."""
        if self._deadline_s is None or not point.prices.any() or self._closed():
            return
        low, high = 1.0, 1.0 + 1e-3
        for _ in range(_RAISES):
            if self._out_of_time():
                return
            middle = high if low == 1.0 else math.sqrt(low * high)
            raised = lagrangian.evaluate(point.prices * middle)
            if (raised.excess > 0).any():
                low, high = middle, max(high, 1.0 + (middle - 1.0) * 8)
            else:
                self.offer(lagrangian.graph.operator_columns(raised.options))
                high = middle
                if low == 1.0:
                    return
        return

    def _polish(self) -> None:
        if self._best is None or self._deadline_s is None or self._closed():
            return
        column = improve_columns(
            self._problem, self._device, self._deadline_s, self._best[2], self._out_of_time
        )
        if column is not None:
            self.offer(column)

    # -- steps 3 and 4 ---------------------------------------------------------------------

    def _close(self, lagrangian: Lagrangian, point: Point) -> KindSolution:
        graph = lagrangian.graph
        least = lagrangian.elimination.conditional_minima(lagrangian.costs(point.prices))
        least = least - lagrangian.constant(point.prices)
        # Sums in another order differ by rounding; never drop an option because of it.
        least -= _ROUNDING * np.abs(point.value)
        least = np.where(graph.allowed, least, math.inf)
        size = _FIRST_CORE
        while True:
            target = self._target()
            threshold = min(target, self._core_threshold(least, size))
            keep = least < threshold
            whole = threshold >= target
            self._statistics["open"] = float((keep.sum(axis=1) > 1).sum())
            self._count("cores")
            if not keep.any(axis=1).all():
                self._bound = max(self._bound, threshold)  # no plan is below it
            else:
                began = time.perf_counter()
                solution = self._solve_core(
                    self._domain(graph, keep), threshold, (point.prices, lagrangian.points)
                )
                self._statistics["core_s"] = (
                    self._statistics.get("core_s", 0.0) + time.perf_counter() - began
                )
                if solution.status is SolveStatus.SOLVER_ERROR:
                    return solution
            self._report("core", self._objective(), self._bound)
            if self._closed() or self._out_of_time():
                return self._finish(None)
            if whole and self._target() >= target:
                return self._finish(None)
            size *= 4

    @staticmethod
    def _core_threshold(least: FloatArray, size: int) -> float:
        """Threshold below which about `size` variables have a second option."""
        second = np.sort(least, axis=1)[:, 1] if least.shape[1] > 1 else np.full(len(least), np.inf)
        second = np.sort(second[np.isfinite(second)])
        return float(second[size]) if len(second) > size else math.inf

    @staticmethod
    def _domain(graph: FactorGraph, keep: BoolArray) -> BoolArray:
        """Options of variables as options of operators, [N, P]."""
        domain = np.zeros((len(graph.variable_of), graph.columns), dtype=np.bool_)
        for option in range(graph.columns):
            live = np.flatnonzero(keep[graph.variable_of, option])
            domain[live, graph.column_of[live, option]] = True
        return domain

    def _solve_core(
        self,
        domain: BoolArray,
        threshold: float,
        priced: tuple[FloatArray, IntArray] | None = None,
    ) -> KindSolution:
        """The program over some options; no plan outside them is below `threshold`.

        Args:
            domain: the options, [N, P].
            threshold: see above.
            priced: the best prices and the memory points they belong to; with them the
                knapsack over components is tried before the edge-flow form.
        """
        if priced is not None:
            found = self._search(domain, threshold, *priced)
            if found is not None:
                return found
        program, read, unit, constant = self._program(domain)
        for cuts in range(_MOST_CUTS):
            answer = self._run(program, unit, constant, threshold)
            self._count("programs")
            if answer.status == "infeasible":
                self._bound = max(self._bound, threshold)
                return self._finish(None)
            if math.isfinite(answer.bound):
                bound = constant + answer.bound * unit
                self._bound = max(self._bound, min(bound - _ROUNDING * abs(bound), threshold))
            if answer.values is None:
                return self._finish(None)
            column, chosen = read(answer.values)
            if self.offer(column) or self._verified(column):
                return self._finish(None)
            self._count("cuts")
            program = without_plan(program, chosen)
        raise SolverUnavailableError(
            self._solver,
            f"proposed {_MOST_CUTS} plans for {self._device.name} that break a budget",
            "Choose another with SolveParameters(solver=...)",
        )

    def _search(
        self, domain: BoolArray, threshold: float, prices: FloatArray, points: IntArray
    ) -> KindSolution | None:
        """Solve what is left as a knapsack over components; None where that does not work."""
        graph = FactorGraph(self._problem, self._device, domain)
        lagrangian = Lagrangian(graph, self._deadline_s, points)
        core = find_core(lagrangian, prices, threshold) if lagrangian.exact else None
        if core is None or self._deadline_s is None:
            return None
        self._statistics["classes"] = float(len(core.knapsack.start) - 1)
        self._statistics["items"] = float(len(core.knapsack.cost))

        def accept(items: IntArray) -> bool:
            column = graph.operator_columns(core.options(items))
            self.offer(column)
            return self._verified(column)

        search = KnapsackSearch(
            core.knapsack,
            prices=(prices / lagrangian.scale)[None, core.rows],
            target=min(threshold, self._target()) - core.constant,
            gap=self._gap * abs(min(threshold, self._upper)),
            stop=self._out_of_time,
            accept=accept,
        )
        solution = search.solve()
        self._statistics["nodes"] = self._statistics.get("nodes", 0.0) + solution.nodes
        bound = core.constant + solution.bound
        self._bound = max(self._bound, min(bound - _ROUNDING * abs(bound), threshold))
        return self._finish(None) if solution.complete or self._out_of_time() else None

    def _program(self, domain: BoolArray) -> tuple[LinearProgram, _Reader, float, float]:
        """The edge-flow program, its reader, its objective's unit and constant."""
        built = formulate(
            self._problem,
            deadline_s=self._deadline_s,
            device=self._device.name,
            objective="time" if self._deadline_s is None else "perturbation",
            domains=[domain],
            named=False,
        )
        ((_, choices),) = built.choices

        def read_choices(values: FloatArray) -> tuple[IntArray, IntArray]:
            ((_, column),) = built.read(values)
            return column, np.unique(choices[np.arange(len(column)), column])

        return built.program, read_choices, built.objective_unit, 0.0

    def _count(self, name: str) -> None:
        self._statistics[name] = self._statistics.get(name, 0.0) + 1.0

    def _verified(self, column: IntArray) -> bool:
        """Whether the plan keeps every budget (it may be no better than the incumbent)."""
        part = evaluate_device(self._problem, self._device, column)
        late = self._deadline_s is not None and part.iteration_time_s > self._deadline_s * (
            1 + TIME_TOLERANCE
        )
        return part.peak_memory_bytes <= self._device.memory_bytes and not late

    def _run(
        self, program: LinearProgram, unit: float, constant: float, threshold: float
    ) -> ProgramSolution:
        # The gap is a fraction of the whole objective, of which the program may hold a part.
        whole = min(self._upper, threshold)
        if not math.isfinite(whole):
            whole = constant
        return solve_program(
            program,
            solver=self._solver,
            time_limit_s=self._time_left(),
            relative_gap=self._gap * _OWN_GAP,
            absolute_gap=self._gap * _OWN_GAP * abs(whole) / unit,
            seed=self._seed,
            interrupter=self._interrupter,
        )
