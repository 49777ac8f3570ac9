"""Learned levels: codes whose values are fitted to what is coded, for few bits.

A bucket's values are moved to [0, 1] by its least and greatest value; a table of 2^bits
increasing numbers from 0 to 1 says where codes lie there. Between two of its entries a value
rounds as it does between evenly spaced ones, so stochastic rounding stays unbiased with every
table (`kernels.bucket_reference` says how). The table that loses least is found from a histogram:

- nearest rounding: every level is the mean of what rounds to it (Lloyd, IEEE Trans. Inf.
  Theory 28, 1982);
- stochastic rounding, whose variance is (above - v)(v - below): the distribution function at a
  level is its mean between the neighbouring levels (Faghri et al., "Adaptive gradient
  quantization", NeurIPS 2020, coordinate descent).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Cells of a histogram: a sixteenth of the distance of 6-bit levels and less.
CELLS = 2048

#: Values that a histogram is taken of, at most; whole buckets, evenly spread.
_SAMPLE = 2**20

_SWEEPS = 100
_TOLERANCE = 1e-5

#: Share of the values that is spread over all cells, so that no cell is empty.
_SMOOTHING = 1e-3


def even_levels(bits: int) -> Tensor:
    """Evenly spaced levels: float32 [2^bits]."""
    return torch.linspace(0, 1, 2**bits)


def histogram(x: Tensor, bucket: int) -> Tensor:
    """How often values lie where between the least and the greatest of their bucket.

    Args:
        x: [n].
        bucket: values of a quantisation bucket.

    Returns:
        int64 [CELLS], on x's device; buckets that are constant or not finite do not count.
    """
    rows = _sampled(x, bucket)
    low = rows.amin(1, keepdim=True)
    span = rows.amax(1, keepdim=True) - low
    counted = (torch.isfinite(span) & (span > 0)).expand_as(rows)
    place = torch.where(counted, (rows - low) / span, 0.0)
    cell = (place * CELLS).long().clamp(0, CELLS - 1).flatten()
    # The weights keep the shape: picking the counted values would make a GPU wait.
    weights = counted.flatten().to(torch.float64)
    found = torch.zeros(CELLS, dtype=torch.float64, device=x.device)
    return found.scatter_add_(0, cell, weights).long()


def fit_levels(counts: Tensor, bits: int, *, stochastic: bool) -> Tensor:
    """The table of levels that loses least.

    Args:
        counts: from `histogram`.
        bits: of a code.
        stochastic: whether values round stochastically, not to the nearest level.

    Returns:
        float32 [2^bits] on the CPU, strictly increasing from 0 to 1.
    """
    weights = counts.cpu().numpy().astype(np.float64)
    total = weights.sum()
    if total == 0:
        return even_levels(bits)
    weights = weights / total * (1 - _SMOOTHING) + _SMOOTHING / CELLS
    edges = np.linspace(0.0, 1.0, CELLS + 1)
    share = _running(weights)
    area = _running((share[1:] + share[:-1]) / 2 / CELLS)
    moment = _running(weights * (edges[1:] + edges[:-1]) / 2)
    # With many levels their density goes with the cube root of the values' (Panter and Dite,
    # Proc. IRE 39, 1951): a start that few sweeps improve.
    density = _running(np.cbrt(weights))
    levels = np.interp(np.linspace(0.0, density[-1], 2**bits), density, edges)
    for _ in range(_SWEEPS):
        before = levels = _separate(levels)
        if stochastic:
            for start in (1, 2):  # odd and even levels: neighbours stay while one moves
                levels = _separate(levels)
                inner = np.arange(start, len(levels) - 1, 2)
                below, above = levels[inner - 1], levels[inner + 1]
                between = np.interp(above, edges, area) - np.interp(below, edges, area)
                levels[inner] = np.interp(between / (above - below), share, edges)
        else:
            cuts = np.concatenate(([0.0], (levels[1:] + levels[:-1]) / 2, [1.0]))
            mass = np.diff(np.interp(cuts, edges, share))
            levels = levels.copy()
            levels[1:-1] = (np.diff(np.interp(cuts, edges, moment)) / mass)[1:-1]
        if np.abs(levels - before).max() < _TOLERANCE:
            break
    return torch.from_numpy(_separate(levels).astype(np.float32))


def _sampled(x: Tensor, bucket: int) -> Tensor:
    """Buckets of a vector as rows in float32: so many that they hold `_SAMPLE` values at most."""
    value = x.flatten()
    whole = value.numel() // bucket
    every = -(-(-(-value.numel() // bucket) * bucket) // _SAMPLE)
    rows = value[: whole * bucket].view(whole, bucket)[::every]
    rest = value[whole * bucket :]
    if rest.numel() and whole % every == 0:  # the short bucket's turn; its last value stands again
        padded = torch.cat((rest, rest[-1:].expand(bucket - rest.numel())))
        rows = torch.cat((rows, padded[None]))
    return rows.to(torch.float32)


def _running(parts: NDArray[np.float64]) -> NDArray[np.float64]:
    """What the parts up to each edge of a cell add up to."""
    return np.concatenate(([0.0], np.cumsum(parts)))


def _separate(levels: NDArray[np.float64]) -> NDArray[np.float64]:
    """Levels at least a sixteenth of a cell apart: equal ones would divide by 0."""
    gaps = np.arange(len(levels)) / (16 * CELLS)
    rising = np.maximum.accumulate(levels - gaps) + gaps
    table = np.minimum(rising, 1 - gaps[::-1])
    table[0] = 0.0
    return table
