"""Times of passing over tensors element by element: casts, additions of gradients, copies."""

from __future__ import annotations

import math

import torch

from qsync_opt.graph import OperatorGraph
from qsync_opt.measure.clock import Clock
from qsync_opt.measure.operands import DTYPES
from qsync_opt.precision import HANDED_ON, Precision


def element_counts(graph: OperatorGraph) -> list[int]:
    """The sizes of all float tensors of a graph, ascending."""
    floats = (tensor for tensor in graph.tensors if tensor.dtype == "float32")
    return sorted({math.prod(tensor.shape) for tensor in floats} - {0}) or [1]


def measure_elements(
    clock: Clock, elements: int, dtypes: tuple[Precision, ...]
) -> tuple[list[list[float]], list[float], float]:
    """Seconds for one size.

    Args:
        clock: of the device.
        elements: the size.
        dtypes: what tensors are handed on in on this device.

    Returns:
        Casts from (row) and to (column) each of `HANDED_ON`, additions in each, and an fp32
        copy; NaN for dtypes that the device lacks.
    """
    tensors = {
        dtype: torch.randn(elements, device=clock.device).to(DTYPES[dtype]) for dtype in dtypes
    }

    def cast_s(source: Precision, target: Precision) -> float:
        if source not in tensors or target not in tensors:
            return math.nan
        if source is target:
            return 0.0
        tensor, dtype = tensors[source], DTYPES[target]
        return clock.time(lambda: tensor.to(dtype), warm=[tensor]).time_s

    casts = [[cast_s(source, target) for target in HANDED_ON] for source in HANDED_ON]
    additions = [_addition_s(clock, tensors.get(dtype)) for dtype in HANDED_ON]
    full = tensors[Precision.FP32]
    copy = torch.empty_like(full)
    return casts, additions, clock.time(lambda: copy.copy_(full), warm=[full]).time_s


def _addition_s(clock: Clock, tensor: torch.Tensor | None) -> float:
    """Autograd adds a second gradient into the first, which nobody else holds, in place."""
    if tensor is None:
        return math.nan
    total = torch.zeros_like(tensor)
    return clock.time(lambda: total.add_(tensor), warm=[tensor]).time_s
