"""Which precisions a device runs in hardware, and which an operator has at all."""

from __future__ import annotations

import torch

from qsync_opt.errors import ParameterError
from qsync_opt.precision import Precision

_FLOATS = frozenset({Precision.FP32, Precision.TF32, Precision.BF16, Precision.FP16})
_ALL = frozenset(Precision)

#: Kinds of operators that have a scaled 8-bit form; every other product runs in floats.
_EIGHT_BIT_KINDS = frozenset(
    {"linear", "conv2d", "embedding", "matmul", "mm", "bmm", "addmm", "baddbmm"}
)

#: Kinds that read their weights where no precision can be put.
_FP32_KINDS = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})


def available_precisions(device: torch.device | str) -> frozenset[Precision]:
    """The precisions that a device computes in hardware, never by emulation.

    NVIDIA GPUs by compute capability: fp16 from 7.0, int8 from 7.5 (Turing), bf16 and tf32
    from 8.0, fp8 from 8.9 (Ada). A CPU has fp32, bf16 and int8. Others are taken to have fp32
    alone, except that AMD GPUs have the 16-bit formats.

    Args:
        device: a device or its name; `cuda` means the current one.

    Raises:
        ParameterError: a CUDA device on a machine or a build without CUDA.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return frozenset({Precision.FP32, Precision.BF16, Precision.INT8})
    if device.type != "cuda":
        return frozenset({Precision.FP32})
    if not torch.cuda.is_available():
        raise ParameterError("device", "must be usable here", str(device), "There is no CUDA.")
    if torch.version.hip is not None:
        return frozenset({Precision.FP32, Precision.BF16, Precision.FP16})
    capability = torch.cuda.get_device_capability(device)
    least = {
        Precision.FP32: (0, 0),
        Precision.FP16: (7, 0),
        Precision.INT8: (7, 5),
        Precision.BF16: (8, 0),
        Precision.TF32: (8, 0),
        Precision.FP8: (8, 9),
    }
    return frozenset(precision for precision, needed in least.items() if capability >= needed)


def supported_precisions(kind: str) -> frozenset[Precision]:
    """The precisions that an operator of some kind has here, on a device that has them.

    Args:
        kind: name of the function, for example `linear` or `scaled_dot_product_attention`.
    """
    if kind in _FP32_KINDS:
        return frozenset({Precision.FP32})
    return _ALL if kind in _EIGHT_BIT_KINDS else _FLOATS
