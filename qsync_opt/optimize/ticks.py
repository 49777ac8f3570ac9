"""Floats as whole multiples ("ticks") of a power of two: sums without rounding or order.

A tick is given by its exponent e and is worth 2^e. Python's integers have no end, so the sum
of any ticks is exact, and taking a term back restores the sum to the last bit.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from qsync_opt.optimize.arrays import FloatArray

_SIGNIFICAND_BITS = 53  # of a float64: a multiple of 2^(exponent - 53) is exact
_INT64_BITS = 62  # one bit is the sign, one is left for rounding up


def fine_exponent(value: float, bits: int) -> int:
    """The tick of which a value > 0 holds from 2^(bits - 1) to 2^bits."""
    return math.frexp(value)[1] - bits


def exact_exponent(table: FloatArray) -> int:
    """The tick of which every entry is a whole multiple."""
    positive = table[table > 0]
    return fine_exponent(float(positive.min()), _SIGNIFICAND_BITS) if positive.size else 0


def to_ticks(table: FloatArray, exponent: int) -> Any:
    """The entries, >= 0, in ticks, rounded to the nearest: ints nested like the table."""
    mantissa, power = np.frexp(table)
    shift = power.astype(np.int64) - exponent
    if shift.max(initial=0) <= _INT64_BITS:
        rounded = np.rint(np.ldexp(mantissa, np.maximum(shift, -_INT64_BITS)))
        return rounded.astype(np.int64).tolist()
    whole = np.ldexp(mantissa, _SIGNIFICAND_BITS).astype(np.int64).ravel().tolist()
    shifts = (shift - _SIGNIFICAND_BITS).ravel().tolist()
    wide = np.empty(len(whole), dtype=object)
    wide[:] = [_shifted(number, by) for number, by in zip(whole, shifts, strict=True)]
    return wide.reshape(table.shape).tolist()


def _shifted(whole: int, by: int) -> int:
    if by >= 0:
        return whole << by
    return (whole + (1 << (-by - 1))) >> -by


def ticks_down(value: float, exponent: int) -> float:
    """A value in ticks, rounded down to a whole number; infinity stays."""
    if math.isinf(value):
        return value
    numerator, denominator = value.as_integer_ratio()
    if exponent < 0:
        return (numerator << -exponent) // denominator
    return numerator // (denominator << exponent)


def from_ticks(ticks: int, exponent: int) -> float:
    """The float nearest to a number of ticks."""
    return ticks / (1 << -exponent) if exponent < 0 else float(ticks << exponent)


def equal_ticks(first: int, second: int, digits: int) -> bool:
    """Whether two sums >= 0 differ by at most 10^-digits of the larger."""
    scale: int = 10**digits
    return abs(first - second) * scale <= max(first, second)
