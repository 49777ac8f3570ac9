from __future__ import annotations

import math

import pytest
import torch

from qsync_opt.kernels import rounding
from qsync_opt.kernels.rounding import (
    RandomKey,
    Rounding,
    half_words,
    mix64,
    philox_4x32,
    philox_key,
    round_by_carry,
    round_to_integer,
    uniform,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        # The known answers that the authors of Philox publish (Random123, kat_vectors).
        ((0,) * 4, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_answers(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    assert tuple(philox_4x32((c0, c1, c2, c3), key)[0].tolist()) == expected


def test_mix64_gives_the_published_sequence() -> None:
    # SplitMix64 from seed 1234567: the state moves by one constant, the mix is what is tested.
    step = 0x9E3779B97F4A7C15
    states = [(1234567 + number * step) % 2**64 for number in range(3)]
    assert [mix64(state) for state in states] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


def test_a_number_depends_on_its_own_element_alone() -> None:
    key = RandomKey(seed=-5, step=3, tensor=2**40)
    assert torch.equal(uniform(1000, key, CPU)[:333], uniform(333, key, CPU))


@pytest.mark.parametrize("field", ["seed", "step", "tensor"])
def test_streams_of_different_keys_are_independent(field: str) -> None:
    count = 20_000
    base = uniform(count, RandomKey(), CPU) - 0.5
    other = uniform(count, RandomKey(**{field: 1}), CPU) - 0.5
    # The correlation of independent streams is normal with deviation 1 / sqrt(count).
    assert abs(float((base * other).mean()) * 12) < 5 / math.sqrt(count)


def test_numbers_are_uniform() -> None:
    count = 100_000
    draws = uniform(count, RandomKey(seed=1), CPU)
    assert float(draws.min()) >= 0
    assert float(draws.max()) < 1
    bins = torch.histc(draws, bins=50, min=0, max=1)
    chi_square = float(((bins - count / 50) ** 2 / (count / 50)).sum())
    assert chi_square < 49 + 5 * math.sqrt(2 * 49)


def test_stochastic_rounding_is_unbiased_and_takes_a_neighbour() -> None:
    value = torch.tensor([-3.75, -0.5, 0.0, 0.125, 2.0, 126.9])
    draws = round_to_integer(value.expand(4000, -1), Rounding.STOCHASTIC, RandomKey(step=1))
    assert torch.equal(draws.min(0).values, value.floor())
    assert torch.equal(draws.max(0).values, value.ceil())
    share = value - value.floor()
    bound = 5 * (share * (1 - share) / len(draws)).sqrt() + 2**-24
    assert bool(((draws.mean(0) - value).abs() <= bound).all())


def test_nearest_ties_go_to_even() -> None:
    value = torch.tensor([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5])
    expected = torch.tensor([-2.0, -2.0, 0.0, 0.0, 2.0, 2.0])
    assert torch.equal(round_to_integer(value, Rounding.NEAREST, RandomKey()), expected)


def test_half_words_are_those_of_their_block_from_the_lowest_on() -> None:
    key = RandomKey(seed=2, step=9, tensor=-5)
    found = half_words(21, key, CPU).tolist()
    tensor = torch.tensor([key.tensor & 0xFFFFFFFF]), torch.tensor([0xFFFFFFFF])
    for block in range(3):
        counter = torch.tensor([block]), torch.tensor([0]), *tensor
        words = philox_4x32(counter, philox_key(key))[0].tolist()
        number = sum(word << (32 * place) for place, word in enumerate(words))
        expected = [(number >> (16 * place)) & 0xFFFF for place in range(8)]
        own = found[8 * block : 8 * block + 8]
        assert own == expected[: len(own)]


@pytest.mark.parametrize("fraction_bits", [15, 16])
def test_a_carry_is_off_by_half_a_place_over_all_draws(
    fraction_bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every draw once: the mean is the value at so many places, exactly; whole numbers stay."""
    every = torch.arange(2**16)
    monkeypatch.setattr(rounding, "half_words", lambda *_: every)
    for value in (0.0, 3.0, 127.0, 0.5, 1 / 3, 6.999999, 100.123, 2.0**-16, 2.0**-17, 1e-30):
        given = torch.full((2**16,), value)
        found = round_by_carry(given, fraction_bits, RandomKey()).double()
        exact = given[0].double()
        mean = float(found.mean())
        assert mean * 2**fraction_bits == round(float(exact) * 2**fraction_bits)
        assert abs(mean - float(exact)) <= 2.0 ** -(fraction_bits + 1)
        assert set(found.tolist()) <= {float(exact.floor()), float(exact.ceil())}
        share = float(exact - exact.floor())
        assert float(found.var(correction=0)) == pytest.approx(share * (1 - share), abs=2**-16)
