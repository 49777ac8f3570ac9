"""The law of what codes add to the variance, against sums over every draw in exact numbers."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from qsync_opt.gradient_noise import cast_variance, coded_variance


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_coin_flip_between_levels_adds_a_sixth_of_their_distance_squared(bits: int) -> None:
    """One value at every place between two levels: the mean over places, draw by draw."""
    levels, places = 2**bits - 1, 400
    step = Fraction(1, levels)
    total = Fraction(0)
    for place in range(places):
        above = Fraction(2 * place + 1, 2 * places)  # the chance of the upper level
        error = above * (1 - above) ** 2 + (1 - above) * above**2
        total += error * step**2
    # The midpoint rule of a square function is off by 1 / (12 places^2) of it.
    expected = step**2 * (Fraction(1, 6) + Fraction(1, 12 * places**2))
    assert total / places == expected
    assert coded_variance(bits, 1.0, 0.0) == pytest.approx(float(step**2 / 6))


def test_both_phases_add_up_and_a_bit_more_is_a_quarter() -> None:
    assert coded_variance(4, 2.0, 3.0) == pytest.approx(5 / (6 * 225))
    ratios = [coded_variance(b, 1.0, 1.0) / coded_variance(b + 1, 1.0, 1.0) for b in range(2, 8)]
    assert all(4 < ratio < 6 for ratio in ratios)
    assert sorted(ratios, reverse=True) == ratios


@pytest.mark.parametrize("workers", [2, 3, 4, 8])
@pytest.mark.parametrize("common", [0.0, 0.3, 1.0])
def test_partial_sums_of_a_ring_are_rounded_by_their_size(workers: int, common: float) -> None:
    """Of numbers of any size the square of a rounding goes with the square of the number."""
    apart = 1.0 - common
    own = 1.0 / workers  # workers x (1 / workers)^2
    mean = common + apart / workers
    sums = sum(k**2 * common + k * apart for k in range(2, workers + 1)) / workers**2
    casts = own * (1 if workers in (2, 4, 8) else 2)
    assert cast_variance(workers, own, mean) == pytest.approx(casts + sums)


def test_one_worker_only_casts() -> None:
    assert cast_variance(1, 0.5, 0.5) == 0.5
    assert np.isfinite(cast_variance(3, 0.0, 0.0))
