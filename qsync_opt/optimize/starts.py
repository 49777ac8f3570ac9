"""Better plans before the branching: from raised prices, by exchanges, by single changes."""

from __future__ import annotations

import math

from qsync_opt.optimize.climb import Point
from qsync_opt.optimize.incumbent import Incumbent
from qsync_opt.optimize.lagrangian import Lagrangian
from qsync_opt.optimize.moves import exchanged
from qsync_opt.optimize.polish import improve_columns
from qsync_opt.optimize.proof import Proof

#: Exchanges that are made before a plan is evaluated; one at a time once they meet. With fewer
#: variables than this the cores hold as many of the choices, and find as much sooner.
_EXCHANGES = (6, 1)
_EXCHANGE_FROM = 1_500

#: Steps of the search for prices that give a feasible plan.
_RAISES = 8


def raise_prices(proof: Proof[Incumbent], lagrangian: Lagrangian, point: Point) -> None:
    """Bisect for the smallest factor on the prices whose plan is feasible."""
    if proof.deadline_s is None or not point.prices.any() or proof.is_closed:
        return
    low, high = 1.0, 1.0 + 1e-3
    for _ in range(_RAISES):
        if proof.out_of_time():
            return
        middle = high if low == 1.0 else math.sqrt(low * high)
        raised = lagrangian.evaluate(point.prices * middle)
        if (raised.excess > 0).any():
            low, high = middle, max(high, 1.0 + (middle - 1.0) * 8)
        else:
            proof.incumbent.offer(lagrangian.graph.operator_columns(raised.options))
            high = middle
            if low == 1.0:
                return


def polish(proof: Proof[Incumbent]) -> None:
    """Polish the incumbent by moves that are evaluated one by one."""
    found = proof.incumbent
    if found.column is None or proof.deadline_s is None or proof.is_closed:
        return  # nothing to polish, or nothing to gain
    column = improve_columns(
        found.problem, found.device, proof.deadline_s, found.column, proof.out_of_time
    )
    if column is not None:
        proof.incumbent.offer(column)


def exchange_options(proof: Proof[Incumbent], lagrangian: Lagrangian, point: Point) -> None:
    """Exchange one option or two of the incumbent for as long as that helps."""
    few = len(lagrangian.graph.allowed) < _EXCHANGE_FROM
    if proof.deadline_s is None or few or not lagrangian.exact:
        return
    for rounds in _EXCHANGES:
        while not (proof.is_closed or proof.out_of_time()):
            if proof.incumbent.column is None:
                return
            options = exchanged(
                lagrangian,
                lagrangian.graph.options_of(proof.incumbent.column),
                point.prices,
                rounds=rounds,
                stop=proof.out_of_time,
            )
            if not proof.incumbent.offer(lagrangian.graph.operator_columns(options)):
                break
