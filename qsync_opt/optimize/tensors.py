"""`CastTensors` and `SavedTensors`: what operators hand on, and what is kept for backward.

As in `problem`: columnar, read-only, times in seconds and memory in whole bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qsync_opt.optimize.arrays import (
    FloatArray,
    IntArray,
    float_table,
    freeze,
    int_table,
    own_array,
    ragged,
)
from qsync_opt.optimize.fields import as_precisions
from qsync_opt.precision import Precision

#: In `SavedTensors.size_bytes`: no size was given for this dtype.
NOT_GIVEN = -1


@dataclass(frozen=True, kw_only=True, eq=False)
class CastTensors:
    """Tensors handed from one operator to others, and what casting them costs (T tensors).

    A cast from precision p (row: the producer's) to q (column: a consumer's) is paid once
    per tensor and pair (p, q), however many consumers share it.

    Attributes:
        producer: operator index, shape [T].
        consumer_start: consumers of tensor t are `consumers[start[t]:start[t + 1]]`, [T + 1].
        consumers: operator indices, flat.
        forward_s: cast of the activation, seconds, [T, P, P].
        backward_s: cast of its gradient, paid just before the producer's backward, [T, P, P].
    """

    producer: IntArray
    consumer_start: IntArray
    consumers: IntArray
    forward_s: FloatArray
    backward_s: FloatArray

    def __post_init__(self) -> None:
        for name in ("producer", "consumer_start", "consumers", "forward_s", "backward_s"):
            own = own_array(getattr(self, name), f"tensors[*].{name}")
            object.__setattr__(self, name, own)

    @staticmethod
    def from_rows(
        *,
        producer: Sequence[int],
        consumers: Sequence[Sequence[int]],
        forward_s: object,
        backward_s: object,
        where: str = "tensors",
    ) -> CastTensors:
        """Build from one row per tensor; `forward_s` and `backward_s` are [T, P, P]."""
        start, flat = ragged(consumers, f"{where}[*].consumers")
        return CastTensors(
            producer=int_table(producer, f"{where}[*].producer", 1),
            consumer_start=start,
            consumers=flat,
            forward_s=float_table(forward_s, f"{where}[*].forward_s", 3),
            backward_s=float_table(backward_s, f"{where}[*].backward_s", 3),
        )

    def __len__(self) -> int:
        return len(self.producer)

    def consumers_of(self, tensor: int) -> IntArray:
        """The consumers of one tensor."""
        return self.consumers[self.consumer_start[tensor] : self.consumer_start[tensor + 1]]


@dataclass(frozen=True, kw_only=True, eq=False)
class SavedTensors:
    """Tensors kept for backward, once per storage dtype that any saver asks for (S tensors).

    A tensor is live from the forward of its first saver to the backward of its first saver.

    Attributes:
        saver_start: savers of tensor s are `savers[start[s]:start[s + 1]]`, [S + 1].
        savers: operator indices, flat.
        dtypes: the storage dtypes, one per column of `size_bytes`.
        size_bytes: bytes of one copy in each dtype, `NOT_GIVEN` where no saver can ask for
            it, [S, len(dtypes)].
    """

    saver_start: IntArray
    savers: IntArray
    dtypes: tuple[Precision, ...]
    size_bytes: IntArray

    def __post_init__(self) -> None:
        for name, field_name in (
            ("saver_start", "savers"),
            ("savers", "savers"),
            ("size_bytes", "bytes"),
        ):
            own = own_array(getattr(self, name), f"saved[*].{field_name}")
            object.__setattr__(self, name, own)
        object.__setattr__(self, "dtypes", as_precisions(self.dtypes, "saved[*].dtypes"))

    @staticmethod
    def from_rows(
        *,
        savers: Sequence[Sequence[int]],
        size_bytes: object,
        dtypes: Sequence[Precision],
        where: str = "saved",
    ) -> SavedTensors:
        """Build from one row per tensor; `size_bytes` is [S, len(dtypes)]."""
        dtypes = as_precisions(dtypes, f"{where}[*].dtypes")
        start, flat = ragged(savers, f"{where}[*].savers")
        table = int_table(size_bytes, f"{where}[*].bytes", 2)
        if not len(savers):
            table = np.zeros((0, len(dtypes)), dtype=np.int64)
        return SavedTensors(
            saver_start=start,
            savers=flat,
            dtypes=dtypes,
            size_bytes=freeze(table),
        )

    def __len__(self) -> int:
        return len(self.saver_start) - 1

    def savers_of(self, tensor: int) -> IntArray:
        """The operators that save one tensor."""
        return self.savers[self.saver_start[tensor] : self.saver_start[tensor + 1]]
