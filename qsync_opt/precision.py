"""The precisions an operator can run at, and the facts about each that everything else needs."""

from __future__ import annotations

from enum import Enum


class Precision(str, Enum):
    """A number format for the matrix products of an operator; never a bare bit count.

    `tf32` is a compute mode, not a dtype: its tensors are stored and handed on as fp32.
    """

    FP32 = "fp32"
    TF32 = "tf32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"
    INT8 = "int8"

    def __str__(self) -> str:
        return self.value

    @property
    def storage(self) -> Precision:
        """The dtype in which a tensor saved for backward is kept at this precision."""
        return Precision.FP32 if self is Precision.TF32 else self

    @property
    def output(self) -> Precision:
        """The dtype that an operator at this precision hands on to its consumers.

        The int8 and fp8 products accumulate in wider registers and write bf16.
        """
        if self in (Precision.INT8, Precision.FP8):
            return Precision.BF16
        return self.storage

    @property
    def element_bytes(self) -> int:
        """Bytes of one stored element."""
        return _ELEMENT_BYTES[self]


_ELEMENT_BYTES = {
    Precision.FP32: 4,
    Precision.TF32: 4,
    Precision.BF16: 2,
    Precision.FP16: 2,
    Precision.FP8: 1,
    Precision.INT8: 1,
}

#: What the promotion of unequal dtypes gives (torch.autocast: the widest input type).
PROMOTED = Precision.FP32

#: The dtypes a tensor can be handed on in: what a follower can be asked to run at.
HANDED_ON = (Precision.FP32, Precision.BF16, Precision.FP16)
