"""`memory_timeline`: what is in memory at every program point of a step, term by term.

Program points are the forward of every operator, then their backward in reverse order. A saved
tensor is there from the forward of its first saver to the backward of its first saver, in one
copy per storage dtype that a saver asks for (design, section 4, items 3 and 4).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from qsync_opt.optimize.arrays import IntArray, freeze
from qsync_opt.optimize.problem import AllocationProblem, DeviceKind
from qsync_opt.optimize.rows import first_savers
from qsync_opt.precision import Precision


@dataclass(frozen=True, kw_only=True, eq=False)
class MemoryTimeline:
    """Bytes at the 2 N program points of a step: forward in order, backward in reverse.

    Attributes:
        fixed_bytes: context, parameters, gradients, optimizer state: always there.
        saved_bytes: storage dtype -> copies kept for backward in it, [2 N].
        transient_bytes: what only the operator that runs takes, [2 N].
    """

    fixed_bytes: int
    saved_bytes: Mapping[Precision, IntArray]
    transient_bytes: IntArray

    @property
    def total_bytes(self) -> IntArray:
        """All terms, [2 N]."""
        total = self.fixed_bytes + self.transient_bytes
        for saved in self.saved_bytes.values():
            total = total + saved
        return total

    @property
    def peak_point(self) -> int:
        """The first program point of the largest total."""
        return int(self.total_bytes.argmax())

    @property
    def peak_bytes(self) -> int:
        """The largest total."""
        return int(self.total_bytes.max())

    def terms_at(self, point: int) -> dict[str, int]:
        """The terms of one program point, by name."""
        saved = {f"saved {dtype}": int(row[point]) for dtype, row in self.saved_bytes.items()}
        transient = int(self.transient_bytes[point])
        return {"fixed": self.fixed_bytes, **saved, "transient": transient}


def memory_timeline(
    problem: AllocationProblem, device: DeviceKind, column: IntArray
) -> MemoryTimeline:
    """Memory of a rank of one kind under a plan; `column` is its precision per operator, [N]."""
    count = len(problem.operators)
    rows = np.arange(count)
    forward, backward = device.forward_transient_bytes, device.backward_transient_bytes
    transient = np.concatenate(
        [forward[rows, column], backward[rows, column][::-1]]  # type: ignore[index]  # set
    )
    saved = device.saved
    steps = np.zeros((len(saved.dtypes), 2 * count + 1), dtype=np.int64)
    if len(saved):
        # A dtype that no saver can ask for has no column; 0 stands for it.
        dtype_of = np.array(
            [saved.dtypes.index(s) if s in saved.dtypes else 0 for s in problem.storage]
        )
        owner = np.repeat(np.arange(len(saved)), np.diff(saved.saver_start))
        kept = np.unique(owner * len(saved.dtypes) + dtype_of[column[saved.savers]])
        tensor, dtype = np.divmod(kept, len(saved.dtypes))
        start, size = first_savers(device)[tensor], saved.size_bytes[tensor, dtype]
        np.add.at(steps, (dtype, start), size)
        np.subtract.at(steps, (dtype, 2 * count - start), size)  # after point 2N - 1 - start
    return MemoryTimeline(
        fixed_bytes=device.fixed_bytes,
        saved_bytes=MappingProxyType(
            {
                dtype: freeze(np.cumsum(step)[:-1])
                for dtype, step in zip(saved.dtypes, steps, strict=True)
                if step.any()
            }
        ),
        transient_bytes=freeze(transient),
    )
