"""What tables of costs have in common: their rules, and times between the measured sizes."""

from __future__ import annotations

from typing import Any

import numpy as np

from qsync_opt.errors import CostsError
from qsync_opt.optimize.arrays import FloatArray, IntArray, freeze

#: In `OperatorCosts.input_bytes`: the copy has the size that its storage dtype says.
AS_DTYPE = -1


def interpolate(sizes: IntArray, times: FloatArray, size: int) -> float:
    """A time for a size: linear between measured ones, proportional above, constant below."""
    if size >= sizes[-1]:
        return float(times[-1] * (size / sizes[-1] if sizes[-1] else 1.0))
    return float(np.interp(size, sizes, times))


def own_arrays(costs: Any, where: str) -> None:
    """Make every array of a dataclass read-only and of its declared dtype.

    Raises:
        CostsError: no numbers, or negative or infinite ones.
    """
    for name, row in costs.__dataclass_fields__.items():
        if row.type not in ("FloatArray", "IntArray"):
            continue
        dtype = np.float64 if row.type == "FloatArray" else np.int64
        try:
            array = np.array(getattr(costs, name), dtype=dtype)
        except (TypeError, ValueError):
            value = getattr(costs, name)
            raise CostsError(f"{where}.{name}", "must be a table of numbers", value) from None
        least = AS_DTYPE if name == "input_bytes" else 0
        odd = array[array < least]
        require(not odd.size, f"{where}.{name}", "must be >= 0", odd[:1].tolist())
        require(not np.isinf(array).any(), f"{where}.{name}", "must be finite", "inf")
        object.__setattr__(costs, name, freeze(array))


def require(holds: bool, field_name: str, rule: str, value: object) -> None:
    """Refuse costs that break a rule.

    Raises:
        CostsError: it does not hold.
    """
    if not holds:
        raise CostsError(field_name, rule, value, "Measure again with this release")
