"""`OpenVectors`: combinations of bits that may still hold a better plan, and their bounds.

Once the bits are fixed, a plan costs their variance and what the kinds cost alone, and the
kinds depend on the bits through the tails S_k = sum_{j >= k} c_j only. So whatever bounds the
kinds at some tails (`KindsBound`) bounds a combination by addition: at any prices the kinds
are bounded by an affine function of what the codes save, and kinds solved at some tails are no
better at longer ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from qsync_opt.optimize.arrays import BoolArray, FloatArray, IntArray
from qsync_opt.optimize.joint_lagrangian import JointLagrangian
from qsync_opt.optimize.proof import ROUNDING

#: A price of this part of the largest is none.
_NEGLIGIBLE = 1e-9


class KindsBound(Protocol):
    """A lower bound of every kind's part of the objective, at all bits."""

    def of(self, saved_s: FloatArray, tails_s: FloatArray) -> FloatArray:
        """The bounds of some combinations, [kinds, I].

        Args:
            saved_s: by how much the code of every bucket is faster than its slowest, [I, K].
            tails_s: S of every bucket, [I, K].
        """


@dataclass(frozen=True, kw_only=True, eq=False)
class PricedKinds:
    """The kinds' Lagrangians at some prices.

    Attributes:
        constant: value at the slowest bits, [kinds].
        worth: what a second saved of every bucket takes off, [kinds, K].
    """

    constant: FloatArray
    worth: FloatArray

    def of(self, saved_s: FloatArray, tails_s: FloatArray) -> FloatArray:
        """See `KindsBound`."""
        del tails_s
        less = np.einsum("rk,ik->ri", self.worth, saved_s)
        # High prices make both parts large; what their difference may be off by is given up.
        slack = ROUNDING * (np.abs(self.constant)[:, None] + less)
        result: FloatArray = self.constant[:, None] - less - slack
        return result

    @property
    def rows(self) -> BoolArray:
        """The buckets whose rows have a price, [K]."""
        prices = np.diff(self.worth.sum(axis=0), prepend=0.0)
        result: BoolArray = np.greater(prices, _NEGLIGIBLE * float(prices.max(initial=0.0)))
        return result


def priced_kinds(joint: JointLagrangian, prices: FloatArray) -> PricedKinds:
    """The bound at some prices, [R], of all kinds' rows."""
    constant, worth = [], []
    for share, part, weight, counts in zip(
        joint.split(prices), joint.parts, joint.weights, joint.counts, strict=True
    ):
        constant.append(weight * part.evaluate(share / weight).value)
        worth.append((share / part.scale) @ counts)
    return PricedKinds(constant=np.array(constant), worth=np.array(worth))


@dataclass(frozen=True, kw_only=True, eq=False)
class SolvedKinds:
    """The kinds solved alone at some bits.

    Attributes:
        tails_s: S of every bucket there, [K].
        bounds: proven of every kind's part of the objective, [kinds].
        columns: the plans found, [N] per device kind; None without one.
    """

    tails_s: FloatArray
    bounds: FloatArray
    columns: list[IntArray] | None

    def of(self, saved_s: FloatArray, tails_s: FloatArray) -> FloatArray:
        """See `KindsBound`."""
        del saved_s
        no_shorter: BoolArray = np.all(tails_s >= self.tails_s, axis=1)
        # Neither a perturbation nor its weight is negative.
        return np.where(no_shorter[None, :], self.bounds[:, None], 0.0)


class OpenVectors:
    """Some combinations of bits, each with a lower bound of its plans.

    Args:
        codes: the code of every bucket, [I, K].
        variance: what they add to the objective at least, [I].
        saved_s: see `KindsBound`.
        tails_s: see `KindsBound`.
        kinds: how many distinct kinds there are.
    """

    def __init__(
        self,
        codes: IntArray,
        variance: FloatArray,
        saved_s: FloatArray,
        tails_s: FloatArray,
        kinds: int,
    ) -> None:
        self.codes, self.variance = codes, variance
        self.saved_s, self.tails_s = saved_s, tails_s
        self._kinds: FloatArray = np.zeros((kinds, len(codes)))

    def __len__(self) -> int:
        return len(self.codes)

    def bounds(self) -> FloatArray:
        """No plan with the bits of a combination is below this, [I]."""
        result: FloatArray = (self._kinds.sum(axis=0) + self.variance) * (1 - ROUNDING)
        return result

    def learn(self, bound: KindsBound) -> None:
        """Raise the bounds by what is known of the kinds."""
        np.maximum(self._kinds, bound.of(self.saved_s, self.tails_s), out=self._kinds)

    def keep(self, which: BoolArray) -> None:
        """Drop all other combinations."""
        self.codes, self.variance = self.codes[which], self.variance[which]
        self.saved_s, self.tails_s = self.saved_s[which], self.tails_s[which]
        self._kinds = self._kinds[:, which]

    def drop(self, target: float) -> float:
        """Drop those that hold nothing below a target; the least bound of these."""
        bounds = self.bounds()
        wanted = bounds < target
        if wanted.all():
            return np.inf
        self.keep(wanted)
        return float(bounds[~wanted].min())

    def shortest(self, line: int | None = None, rows: BoolArray | None = None) -> FloatArray:
        """Tails no longer than those of any combination, [K].

        Args:
            line: a combination to be like in some rows.
            rows: the buckets in whose rows it is, [K]; solves at these tails bound, of all,
                those that are as slow there.
        """
        tails_s = self.tails_s.min(axis=0)
        if line is not None and rows is not None:
            tails_s = np.where(rows, self.tails_s[line], tails_s)
        # A tail is no shorter than the next one.
        longest: FloatArray = np.maximum.accumulate(tails_s[::-1])[::-1]
        return longest
