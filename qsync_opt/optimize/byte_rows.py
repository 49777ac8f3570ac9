"""Rows in whole bytes, exact to the byte, and scales that change no digit.

Byte rows are divided by their common divisor; where budgets still exceed 2^22 units they are
split into two rows of half the bits joined by a whole-number carry, which is exact:
sum a x <= b with a = 2^h A + R, b = 2^h B + S holds if and only if a whole number c has
sum A x + c <= B  and  sum R x - 2^h c <= S.  One unit is then far above any solver's tolerance,
so a budget exceeded by one byte is seen.
"""

from __future__ import annotations

import math

import numpy as np

from qsync_opt.optimize.arrays import IntArray
from qsync_opt.optimize.linear import LazyNames, ProgramBuilder

#: Budgets of more units than this are split in two rows: at 2^22 one unit is 2.4e-7 of the
#: budget, above the 1e-7 and 1e-9 to which HiGHS and SCIP are held here.
_LARGEST_UNSPLIT = 2**22


def power_of_two_near(value: float) -> float:
    """The power of two nearest to `value` on a logarithmic scale; multiplying by it is exact."""
    return 2.0 ** round(math.log2(value)) if value > 0 and math.isfinite(value) else 1.0


def add_byte_rows(
    builder: ProgramBuilder, label: str, columns: IntArray, sizes: IntArray, budget: int
) -> None:
    """Require sizes . columns <= budget in whole bytes, exact to the byte (see the module)."""
    keep = sizes > 0
    columns, sizes = columns[keep], sizes[keep]
    unit = int(np.gcd.reduce(sizes)) if len(sizes) else 1
    sizes, budget = sizes // unit, budget // unit
    if len(sizes) and budget >= 0 and int(sizes.sum()) <= budget:
        return  # never binds

    def row(part: str, upper: float) -> IntArray:
        return builder.add_rows(
            LazyNames(1, lambda: [f"{label}{part}"]), lower=-np.inf, upper=upper
        )

    if budget < _LARGEST_UNSPLIT:
        line = row("", float(budget))
        builder.add_entries(np.broadcast_to(line, columns.shape), columns, sizes.astype(np.float64))
        return
    half = 2 ** math.ceil(budget.bit_length() / 2)
    high, low = np.divmod(sizes, half)
    carry = builder.add_columns(
        LazyNames(1, lambda: [f"{label} carry"]), upper=float(budget // half), integer=True
    )
    for part, parts, factor, upper in (
        (" high", high, 1.0, budget // half),
        (" low", low, -float(half), budget % half),
    ):
        line = row(part, float(upper))
        builder.add_entries(np.broadcast_to(line, columns.shape), columns, parts.astype(np.float64))
        builder.add_entries(line, carry, factor)
