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

    Element i takes word i % 4 of the Philox block with the counter (low and high word of
    i // 4, low and high word of `key.tensor`), and of that word the upper 24 bits.

    Returns:
        float32 [count], multiples of 2^-24.
    """
    block = torch.arange((count + 3) // 4, dtype=torch.int64, device=device)
    low, high = key.tensor & _MASK_32, (key.tensor >> 32) & _MASK_32
    tensor = torch.full_like(block, low), torch.full_like(block, high)
    words = philox_4x32((block & _MASK_32, block >> 32, *tensor), philox_key(key))
    bits = words.reshape(-1)[:count] >> (32 - UNIFORM_BITS)
    return bits.to(torch.float32) * 2.0**-UNIFORM_BITS


def round_to_integer(value: Tensor, rounding: Rounding, key: RandomKey) -> Tensor:
    """Round float32 values to whole numbers (still float32); a value rounds alone."""
    if rounding is Rounding.NEAREST:
        return value.round()
    below = value.floor()
    draw = uniform(value.numel(), key, value.device).view(value.shape)
    return below + (draw < value - below)
