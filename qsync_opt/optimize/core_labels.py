"""`search_core`: a core searched by labels, for one kind of device or for all together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from qsync_opt.optimize.arrays import FloatArray, IntArray
from qsync_opt.optimize.knapsack import Knapsack, KnapsackSearch
from qsync_opt.optimize.proof import ROUNDING, B, Proof

#: Labels of the search, one pass after another: the first, and those in which they are merged.
_WIDTH = 100
MERGED_WIDTHS = (300, 500, 1_000)


def search_core(
    proof: Proof[B],
    knapsack: Knapsack,
    constant: float,
    column_of: Callable[[IntArray], IntArray],
    prices: FloatArray,
    threshold: float,
    merged_widths: Sequence[int],
) -> tuple[float, bool]:
    """Search a core: lower bound of its plans and those left out, and whether it ended.

    Args:
        proof: takes plans and statistics.
        knapsack: the core.
        constant: what is added to the cost of its items.
        column_of: from items to the column of a plan, as the incumbent takes it.
        prices: of the knapsack's rows.
        threshold: plans that were left out cost at least this.
        merged_widths: see `MERGED_WIDTHS`.
    """

    def accept(items: IntArray) -> bool:
        column = column_of(items)
        return proof.incumbent.offer(column) or proof.incumbent.keeps(column)

    solution = KnapsackSearch(
        knapsack,
        prices=prices,
        # A plan above the threshold is welcome too: it may be the best there is.
        target=proof.target - constant,
        # Of the bound, not of the incumbent: a better plan makes the gap allowed smaller.
        gap=proof.gap * max(proof.bound, 0.0),
        width=_WIDTH,
        merged_widths=merged_widths,
        stop=proof.out_of_time,
        accept=accept,
    ).solve()
    proof.count("relaxations", solution.relaxations)
    proof.count("labels", solution.labels)
    bound = constant + solution.bound
    if math.isfinite(bound):  # infinite where no plan is below the target
        bound -= ROUNDING * abs(bound)
    return min(bound, threshold), solution.complete
