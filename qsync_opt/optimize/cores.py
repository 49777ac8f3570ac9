"""`CoreSearch`: what the bounds of a node leave open, solved where it is little.

Few open choices are a multiple-choice knapsack over small components (`core`), searched by
labels (`knapsack`); what that does not end, and components too large for it, go to the back end.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from qsync_opt.optimize.arrays import BoolArray, FloatArray, IntArray
from qsync_opt.optimize.climb import Point
from qsync_opt.optimize.core import Core, find_core
from qsync_opt.optimize.core_labels import MERGED_WIDTHS, search_core
from qsync_opt.optimize.incumbent import Incumbent
from qsync_opt.optimize.lagrangian import Lagrangian
from qsync_opt.optimize.proof import Proof
from qsync_opt.optimize.proposals import BackEnd, Program, core_program, flow_program

#: Open choices in the cores that look for better plans, and in one that a proof is left to.
_SMALL_CORES = (60, 240)
_LARGE_CORE = 6_000

#: Open choices from which on a core that does not end soon is branched on instead.
_WIDE_CORE = 1_000

#: Open choices that the back end is given in the edge-flow form: rather than branched on, and
#: rather than as the knapsack that labels did not end (its own cuts do better on the flows).
_FEW = 60
FLOW = 400


class CoreSearch:
    """Looks into the nodes of one proof.

    Args:
        proof: takes plans and statistics.
        back_end: for the programs.
    """

    def __init__(self, proof: Proof[Incumbent], back_end: BackEnd) -> None:
        self._proof, self._back_end = proof, back_end

    def propose(self, program: Program, threshold: float) -> float:
        """Have a program solved; see `BackEnd.solve`."""
        proof = self._proof
        return self._back_end.solve(
            program, proof.incumbent, bound=proof.bound, threshold=threshold
        )

    def flow(self, lagrangian: Lagrangian, keep: BoolArray, threshold: float) -> float:
        """Give some options, [V, P], to the back end in the edge-flow form; see `propose`."""
        domain = lagrangian.graph.operator_options(keep)
        return self.propose(flow_program(self._proof.incumbent, domain), threshold)

    def improve(self, lagrangian: Lagrangian, point: Point, least: FloatArray) -> None:
        """Look for better plans among the choices that are nearest to equal.

        A core that is too small cannot make up for what the minimising plan breaks; it grows
        until it holds all that is still open, which is then left to `_settle`.
        """
        if self._proof.deadline_s is None:
            return
        for size in _SMALL_CORES:
            threshold = self._core_threshold(least, size)
            if threshold >= self._proof.target or self._proof.out_of_time():
                return
            found = self._core(lagrangian, point, least < threshold, threshold)
            if found is None:
                return
            core, column_of, prices = found
            self._search(core, column_of, prices, threshold, ())

    def settle(
        self, lagrangian: Lagrangian, point: Point, least: FloatArray, whole: bool
    ) -> float | None:
        """Solve a node whose open choices are few (or all that is left, if `whole`).

        Returns:
            A lower bound of the node's plans, or None if it should be branched on.
        """
        target = self._proof.target
        keep = least < target
        self._proof.statistics["open"] = float((keep.sum(axis=1) > 1).sum())
        if not keep.any(axis=1).all():
            return target  # no plan of the node is below it
        if self._proof.statistics["open"] > _LARGE_CORE and not whole:
            return None
        began = time.perf_counter()
        found = self._core(lagrangian, point, keep, target)
        if found is None:
            few = self._proof.statistics["open"] <= _FEW
            if not (whole or few or self._proof.deadline_s is None):
                return None
            return self.flow(lagrangian, keep, target)
        core, column_of, prices = found
        if self._proof.deadline_s is not None:
            wide = self._proof.statistics["open"] > _WIDE_CORE and not whole
            widths = MERGED_WIDTHS[:1] if wide else MERGED_WIDTHS
            bound, complete = self._search(core, column_of, prices, target, widths)
            self._proof.count("core_s", time.perf_counter() - began)
            if complete or self._proof.out_of_time():
                return bound
            if self._proof.target < target:  # a better plan leaves fewer choices open: look again
                return self.settle(lagrangian, point, least, whole)
            if wide:
                return None  # where choices are many, one that is fixed lifts the bound at less
        if self._proof.deadline_s is not None and self._proof.statistics["open"] <= FLOW:
            return self.flow(lagrangian, keep, target)
        return self.propose(core_program(core, column_of), target)

    @staticmethod
    def _core_threshold(least: FloatArray, size: int) -> float:
        """Threshold below which about `size` variables have a second option."""
        if least.shape[1] < 2:
            return math.inf
        second = np.sort(least, axis=1)[:, 1]
        second = np.sort(second[np.isfinite(second)])
        return float(second[size]) if len(second) > size else math.inf

    def _core(
        self, lagrangian: Lagrangian, point: Point, keep: BoolArray, threshold: float
    ) -> tuple[Core, Callable[[IntArray], IntArray], FloatArray] | None:
        """The knapsack over some options, its reader, and its prices; None if too large."""
        if not lagrangian.exact:
            return None
        graph = lagrangian.graph.restricted(keep)
        if not graph.feasible:
            return None
        reduced = Lagrangian(
            graph, self._proof.deadline_s, lagrangian.points, self._proof.incumbent.cuts
        )
        core = find_core(reduced, point.prices, threshold)
        if core is None:
            return None
        self._proof.statistics["classes"] = float(len(core.knapsack.start) - 1)
        self._proof.statistics["items"] = float(len(core.knapsack.cost))

        def column_of(items: IntArray) -> IntArray:
            return graph.operator_columns(core.options(items))

        return core, column_of, (point.prices / reduced.scale)[core.rows]

    def _search(
        self,
        core: Core,
        column_of: Callable[[IntArray], IntArray],
        prices: FloatArray,
        threshold: float,
        merged_widths: Sequence[int],
    ) -> tuple[float, bool]:
        """See `search_core`."""
        return search_core(
            self._proof,
            core.knapsack,
            core.constant,
            column_of,
            prices,
            threshold,
            merged_widths,
        )
