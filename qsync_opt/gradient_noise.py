"""What sending gradients at fewer bits adds to their variance: `GradientRanges`, and the law.

Codes. A quantisation bucket holds n values between its least and its greatest, range apart, and
has 2^b levels, delta = range / (2^b - 1) apart. Stochastic rounding is unbiased, and a value at
u in [0, 1] between two levels gets an error of variance u (1 - u) delta^2: delta^2 / 6 in the
mean over u (the rounding of gradients in QSDP, arXiv 2302.02390). The least and the greatest
value are levels themselves and lose nothing. A vector of several buckets gets

    R / (6 (2^b - 1)^2)    with    R = sum over buckets of (n - 2) range^2.

`runtime.two_phase` codes twice. First every worker codes what it sends. That is W a_r g_r for
one with share a_r of the batch among W workers, and the sum is divided by W: n_r workers of
kind r add n_r a_r^2 R(g_r) / (6 (2^b - 1)^2). Then one worker codes each part of the averaged
gradient g, for all: R(g) / (6 (2^b - 1)^2) once. Both phases round stochastically, and workers
draw apart, so the variances add up. g is taken without the noise of the first phase, which
widens its ranges: at 6 and 8 bits by nothing that shows, at 4 by up to 2 % of the whole (normal
and Laplace values, 2 to 8 workers). Exempt parameters (norms, biases, small ones) are sent as
they are and add nothing.

16 bits. Gradients are cast to bf16, divided by W (exact if W is a power of 2, else rounded once
more) and added up in bf16. With C = sum (g - bf16(g))^2, rounding to the nearest taken for noise,
the casts of W a_r g_r add the sum of n_r a_r^2 C(g_r). A ring rounds after each addition, too,
and C grows with the square of what is rounded. Write S and N for its parts that belong to what
the workers' gradients have in common and to what they do not: W sum n_r a_r^2 C(g_r) = S + N,
C(g) = S + N / W. The partial sum of k workers is then rounded by (k^2 S + k N) / W^2, for k from
2 to W. Numbers with few bits add up to a number in the middle of two more often than others do,
so roundings lose up to a third more than this says.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from qsync_opt.errors import ParameterError
from qsync_opt.optimize.arrays import FloatArray, freeze

#: Bits at which gradients are cast to bf16 instead of being coded.
CAST_BITS = 16

_TABLES = ("own_ranges", "mean_ranges", "own_casts", "mean_casts")


@dataclass(frozen=True, kw_only=True, eq=False)
class GradientRanges:
    """What rounding the gradients of M parameters would lose; unit: that of a squared gradient.

    Attributes:
        parameters: their names in the graph.
        own_ranges: R (see the module) of the gradient of one worker's batch, the mean over
            batches, [M]; 0 for exempt parameters.
        mean_ranges: R of the mean gradient over the batches, [M].
        own_casts: C of the gradient of one worker's batch, the mean over batches, [M].
        mean_casts: C of the mean gradient, [M].

    Raises:
        ParameterError: names that are not unique, or an entry that is no finite number >= 0.
    """

    parameters: tuple[str, ...]
    own_ranges: FloatArray
    mean_ranges: FloatArray
    own_casts: FloatArray
    mean_casts: FloatArray

    def __post_init__(self) -> None:
        if len(set(self.parameters)) != len(self.parameters):
            raise ParameterError("gradients.parameters", "must be unique", self.parameters)
        shape = (len(self.parameters),)
        for name in _TABLES:
            values = np.array(getattr(self, name), dtype=np.float64)
            if values.shape != shape:
                rule = f"must have one entry per parameter ({shape[0]})"
                raise ParameterError(f"gradients.{name}", rule, list(values.shape))
            wrong = ~(np.isfinite(values) & (values >= 0))
            if wrong.any():
                row = int(np.argmax(wrong))
                rule = "must be finite and >= 0"
                raise ParameterError(f"gradients.{name}[{row}]", rule, float(values[row]))
            object.__setattr__(self, name, freeze(values))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, GradientRanges):
            return NotImplemented
        same = (np.array_equal(getattr(self, n), getattr(other, n)) for n in _TABLES)
        return self.parameters == other.parameters and all(same)

    def __hash__(self) -> int:
        return hash((self.parameters, self.own_ranges.tobytes(), self.mean_ranges.tobytes()))


def coded_variance(bits: int, own: float, mean: float) -> float:
    """Variance that two phases of codes add to the averaged gradient; see the module.

    Args:
        bits: of a code.
        own: sum over kinds of n_r a_r^2 R(g_r).
        mean: R of the averaged gradient.
    """
    steps = 2.0**bits - 1
    return (own + mean) / (6 * steps**2)


def cast_variance(workers: int, own: float, mean: float) -> float:
    """Variance that sending in bf16 adds to the averaged gradient; see the module.

    Args:
        workers: W.
        own: sum over kinds of n_r a_r^2 C(g_r).
        mean: C of the averaged gradient.
    """
    casts = own if workers & (workers - 1) == 0 else 2 * own
    if workers == 1:
        return casts
    apart = max(0.0, workers * own - mean) * workers / (workers - 1)
    common = max(0.0, mean - apart / workers)
    sums = sum(k**2 * common + k * apart for k in range(2, workers + 1))
    return casts + sums / workers**2
