"""Layers of awkward shapes, and how much noise each precision may add, for tests."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from qsync_opt.kernels import host_library
from qsync_opt.precision import Precision
from qsync_opt.runtime import operators
from qsync_opt.runtime.convert import convert

EIGHT_BITS = (Precision.INT8, Precision.FP8)

#: Significant bits of the formats that the products multiply: output, grad_input, grad_weight.
#: Of tf32 one less than its 11: hardware may drop the bits behind them instead of rounding.
BITS = {
    Precision.FP32: (24, 24, 24),
    Precision.TF32: (10, 10, 10),
    Precision.BF16: (8, 8, 8),
    Precision.FP16: (11, 11, 11),
    Precision.FP8: (4, 3, 3),
    Precision.INT8: (7, 8, 7),
}


def floors(precision: Precision, terms: int = 100) -> tuple[float, float, float]:
    """Lowest signal-to-noise ratio accepted, in dB.

    Rounding to p significant bits leaves a relative error of at most 2^-p, on average about
    4.8 dB less; two rounded operands and a rounded result take that back: 6.02 p dB, less 2.
    An int8 code counts from the largest value of its row, so its bits are worth 6.02 each,
    less about 4 dB for the spread of normal values. In fp32 the sums decide: one of n terms
    that is rounded at each of them loses 10 log10(n) dB (Higham and Mary, "A new approach to
    probabilistic rounding error analysis", 2019: errors grow as the root of n).

    Args:
        precision: of the products.
        terms: of the longest sum.
    """
    slack = {Precision.FP32: 10 * math.log10(terms), Precision.INT8: 6.0}.get(precision, 2.0)
    output, grad_input, grad_weight = (6.02 * bits - slack for bits in BITS[precision])
    return output, grad_input, grad_weight


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


#: A name, a layer, and the shape of its input.
Case = tuple[str, Callable[[], nn.Module], tuple[int, ...]]

CASES: list[Case] = [
    ("odd", lambda: nn.Linear(37, 53), (19, 37)),
    ("three dimensions", lambda: nn.Linear(32, 48), (3, 7, 32)),
    ("one row", lambda: nn.Linear(100, 30), (1, 100)),
    ("vector", lambda: nn.Linear(64, 16), (64,)),
    ("no bias", lambda: nn.Linear(33, 65, bias=False), (16, 33)),
    ("one input", lambda: nn.Linear(1, 7), (9, 1)),
    ("one output", lambda: nn.Linear(80, 1), (40, 80)),
    ("plain", lambda: nn.Conv2d(5, 7, 3), (2, 5, 9, 8)),
    ("stride", lambda: nn.Conv2d(8, 16, 3, stride=(2, 1), padding=1), (2, 8, 9, 8)),
    ("groups", lambda: nn.Conv2d(12, 18, 3, padding=1, groups=6), (2, 12, 6, 6)),
    ("depthwise", lambda: nn.Conv2d(16, 16, 3, groups=16, bias=False), (2, 16, 6, 6)),
    ("dilation", lambda: nn.Conv2d(4, 6, 3, dilation=(2, 1), padding=2), (1, 4, 9, 9)),
    ("same", lambda: nn.Conv2d(4, 6, 3, padding="same"), (2, 4, 7, 6)),
    ("same, even", lambda: nn.Conv2d(4, 6, (2, 4), padding="same"), (2, 4, 7, 6)),
    ("valid", lambda: nn.Conv2d(4, 6, 5, padding="valid"), (2, 4, 7, 6)),
    ("circular", lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"), (2, 4, 7, 6)),
    ("reflect", lambda: nn.Conv2d(4, 6, 3, padding=2, padding_mode="reflect"), (2, 4, 7, 6)),
    ("pointwise", lambda: nn.Conv2d(16, 24, 1), (2, 16, 5, 5)),
    ("pointwise, stride", lambda: nn.Conv2d(16, 24, 1, stride=2), (2, 16, 5, 5)),
    ("three channels", lambda: nn.Conv2d(3, 8, 7, stride=2, padding=3), (1, 3, 17, 17)),
    ("one image", lambda: nn.Conv2d(5, 7, 3), (5, 9, 8)),
]


class Pair:
    """A converted layer twice: one that runs compiled, and one in Python."""

    def __init__(
        self,
        layer: nn.Module,
        monkeypatch: pytest.MonkeyPatch,
        precision: Precision = Precision.BF16,
    ) -> None:
        self._monkeypatch = monkeypatch
        self._models = [nn.Sequential(layer), nn.Sequential(copy.deepcopy(layer))]
        for model in self._models:
            convert(model, {"0": precision}, emulate=True)

    def __iter__(self) -> Iterator[nn.Module]:
        found = host_library.compiled_layers()
        for model, how in zip(self._models, (found, None), strict=True):
            self._monkeypatch.setattr(operators, "compiled_layers", lambda how=how: how)
            yield model
