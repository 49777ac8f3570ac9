"""How a real number becomes a code: rounding modes, and counter-based random bits for them.

Random bits come from Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as
1, 2, 3", SC 2011). A bit depends on (seed, step, tensor, element) and on nothing else, so a
value rounds the same way in a recomputed forward, after a restart, and on any device.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

_MASK_32 = 0xFFFFFFFF
_MASK_64 = 0xFFFFFFFFFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

#: Random bits behind one uniform number: what a float32 below 1 can hold without rounding.
UNIFORM_BITS = 24

#: Random bits behind one carry: half a word, so that a Philox block serves eight elements.
CARRY_BITS = 16


class Rounding(IntEnum):
    """What becomes of a value between two codes."""

    NEAREST = 0  # ties to the even code
    STOCHASTIC = 1  # up with the probability of its distance from below: no bias


@dataclass(frozen=True, kw_only=True)
class RandomKey:
    """Names a stream of random bits; 64-bit integers, of either sign.

    Attributes:
        seed: of the run; the rank is folded in where ranks must draw independently.
        step: the training step.
        tensor: which tensor of the step is rounded.
    """

    seed: int = 0
    step: int = 0
    tensor: int = 0


def mix64(value: int) -> int:
    """A fixed bijection of 64-bit integers that spreads nearby ones (SplitMix64's finaliser)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)


def philox_key(key: RandomKey) -> tuple[int, int]:
    """The two 32-bit words of the Philox key: mix64(mix64(seed) + step), low word first."""
    mixed = mix64((mix64(key.seed & _MASK_64) + key.step) & _MASK_64)
    return mixed & _MASK_32, mixed >> 32


def philox_4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> Tensor:
    """Ten Philox rounds.

    Args:
        counter: four int64 tensors of equal shape [n], with values in [0, 2^32).
        key: two 32-bit words.

    Returns:
        int64 [n, 4] with values in [0, 2^32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # int64 products wrap modulo 2^64, which keeps both halves of the 64-bit product.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        high0, low0 = (p0 >> 32) & _MASK_32, p0 & _MASK_32
        high1, low1 = (p1 >> 32) & _MASK_32, p1 & _MASK_32
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK_32, (k1 + _WEYL[1]) & _MASK_32
    return torch.stack((c0, c1, c2, c3), dim=-1)


def uniform(count: int, key: RandomKey, device: torch.device) -> Tensor:
    """Numbers in [0, 1) for the elements 0 .. count - 1 of a tensor.

    Element i takes word i % 4 of block i // 4 (see `_words`), and of that word the upper 24 bits.

    Returns:
        float32 [count], multiples of 2^-24.
    """
    words = _words(-(-count // 4), key, device).view(-1)[:count]
    return (words >> (32 - UNIFORM_BITS)).to(torch.float32) * 2.0**-UNIFORM_BITS


def half_words(count: int, key: RandomKey, device: torch.device) -> Tensor:
    """Numbers in [0, 2^16) for the elements 0 .. count - 1 of a tensor.

    Element i takes a half of word i // 2 % 4 of block i // 8: the lower one where i is even.

    Returns:
        int64 [count].
    """
    words = _words(-(-count // 8), key, device)
    halves = torch.stack((words & (2**CARRY_BITS - 1), words >> CARRY_BITS), dim=-1)
    return halves.view(-1)[:count]


def _words(blocks: int, key: RandomKey, device: torch.device) -> Tensor:
    """Random words: int64 [blocks, 4] in [0, 2^32).

    The counter of a block is its number (low and high word) and `key.tensor` (likewise).
    """
    block = torch.arange(blocks, dtype=torch.int64, device=device)
    low, high = key.tensor & _MASK_32, (key.tensor >> 32) & _MASK_32
    tensor = torch.full_like(block, low), torch.full_like(block, high)
    return philox_4x32((block & _MASK_32, block >> 32, *tensor), philox_key(key))


def round_to_integer(value: Tensor, rounding: Rounding, key: RandomKey) -> Tensor:
    """Round float32 values to whole numbers (still float32); a value rounds alone."""
    if rounding is Rounding.NEAREST:
        return value.round()
    below = value.floor()
    draw = uniform(value.numel(), key, value.device).view(value.shape)
    return below + (draw < value - below)


def round_by_carry(value: Tensor, fraction_bits: int, key: RandomKey) -> Tensor:
    """Round float32 values of at least 0 to whole numbers, up or down by chance.

    A value is rounded to so many binary places, ties to even; a random number of `CARRY_BITS`
    places below 1 is added, and what is behind the point dropped. Whole numbers stay. The mean
    is off by what the first rounding took, at most 2^-(fraction_bits + 1).

    Args:
        value: finite, any shape; below 2^31.
        fraction_bits: `CARRY_BITS` at most.
        key: of the random bits.
    """
    fixed = (value * 2.0**fraction_bits).round().to(torch.int64) << (CARRY_BITS - fraction_bits)
    carry = half_words(value.numel(), key, value.device).view(value.shape)
    return ((fixed + carry) >> CARRY_BITS).to(torch.float32)
