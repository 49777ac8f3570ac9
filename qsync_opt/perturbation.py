"""`PerturbationTable`: what each operator at each precision adds to the variance of the gradient.

The table is what an indicator fills (`measure.sensitivity`) and what a problem takes as its
`perturbation`. One row per operator of a graph, one column per precision.

Unit: that of a squared gradient. An entry of the indicators `measured` and `variance` is
E||g_hat - g||^2, summed over all parameters of the model, where g is the gradient of the loss
in fp32 and g_hat the one with this operator alone at this precision. Other indicators rank
the entries and have units of their own; `method` says which one it was. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from qsync_opt.errors import ParameterError
from qsync_opt.gradient_noise import GradientRanges
from qsync_opt.optimize.arrays import FloatArray, freeze
from qsync_opt.precision import Precision

#: Indicators whose entries are variances of the gradient.
VARIANCES = ("variance", "measured")

_SHA256_DIGITS = 64


@dataclass(frozen=True, kw_only=True)
class PerturbationProvenance:
    """How a table came about.

    Attributes:
        model: the model file, or the class of the model.
        sizes: what `build` was called with, name -> value as text.
        batches: how many batches the table is the mean of.
        draws: random numbers a batch: roundings for `measured`, probe vectors for `variance`
            and `hessian`; 1 where nothing is drawn.
        rounding: `nearest` or `stochastic`, of the operands.
        seed: of everything that is drawn.
        elapsed_s: how long it took.
        device: name of the device.
        versions: library -> version.
        date: ISO 8601, UTC.
    """

    model: str
    sizes: Mapping[str, str]
    batches: int
    draws: int
    rounding: str
    seed: int
    elapsed_s: float
    device: str
    versions: Mapping[str, str]
    date: str


@dataclass(frozen=True, kw_only=True, eq=False)
class PerturbationTable:
    """What each operator of a graph at each precision adds.

    Attributes:
        graph: `OperatorGraph.sha256` of the graph whose operators the rows are.
        operators: names of the operators in forward order, N of them.
        precisions: of the columns, P of them.
        values: float64 [N, P], read-only, >= 0. Infinite where the operator must not run at
            the precision: it has no such form, or its gradient overflowed. Followers, fixed
            operators and fp32 have 0.
        method: the indicator.
        provenance: how the table came about.
        gradients: what sending gradients at fewer bits would lose; None where it was not asked
            for.

    Raises:
        ParameterError: a shape, a name or a value that breaks a rule.
    """

    graph: str
    operators: tuple[str, ...]
    precisions: tuple[Precision, ...]
    values: FloatArray
    method: str
    provenance: PerturbationProvenance
    gradients: GradientRanges | None = None

    def __post_init__(self) -> None:
        if len(self.graph) != _SHA256_DIGITS or not set(self.graph) <= set("0123456789abcdef"):
            raise ParameterError("graph", "must be a SHA-256 in lower case", self.graph)
        for field, names in (("operators", self.operators), ("precisions", self.precisions)):
            if len(set(names)) != len(names):
                raise ParameterError(field, "must be unique", names)
        values = np.array(self.values, dtype=np.float64)
        shape = (len(self.operators), len(self.precisions))
        if values.shape != shape:
            raise ParameterError("values", f"must have shape {list(shape)}", list(values.shape))
        wrong = ~(values >= 0)
        if wrong.any():
            row, column = (int(i) for i in np.argwhere(wrong)[0])
            field = f"values[{row}][{column}]"
            raise ParameterError(field, "must be >= 0 and not NaN", float(values[row, column]))
        object.__setattr__(self, "values", freeze(values))

    def of(self, operator: str, precision: Precision) -> float:
        """One entry.

        Raises:
            ParameterError: no such operator or precision.
        """
        if operator not in self.operators:
            raise ParameterError("operator", "must be an operator of the table", operator)
        if precision not in self.precisions:
            raise ParameterError("precision", "must be a column of the table", precision)
        row, column = self.operators.index(operator), self.precisions.index(precision)
        return float(self.values[row, column])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PerturbationTable):
            return NotImplemented
        names = [name for name in self.__dataclass_fields__ if name != "values"]
        same = all(getattr(self, name) == getattr(other, name) for name in names)
        return same and np.array_equal(self.values, other.values)

    def __hash__(self) -> int:
        return hash((self.graph, self.method, self.values.tobytes()))
