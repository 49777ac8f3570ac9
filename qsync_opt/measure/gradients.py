"""How far the values of gradients range: what `gradient_noise` needs of a model and its batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from qsync_opt.gradient_noise import GradientRanges
from qsync_opt.graph import OperatorGraph
from qsync_opt.measure.moments import observe
from qsync_opt.measure.step import Loss
from qsync_opt.runtime.bucket_codec import exempt_parameters
from qsync_opt.runtime.communication import BUCKET_SIZE


def gradient_ranges(
    model: nn.Module,
    batches: Sequence[Any],
    graph: OperatorGraph,
    *,
    loss: Loss | None = None,
    seed: int = 0,
) -> GradientRanges:
    """Run one step in fp32 for every batch and look at the gradients.

    The mean gradient of a job is that over its workers, so as many batches as workers tell it
    best; of one batch alone the mean is its own gradient, which ranges wider.

    Quantisation buckets are taken inside each parameter. In a message they run on into the next
    one, whose values may range wider: R of a message is 0 to 3 % larger in a small GPT, a fifth
    in a small CNN whose kernels do not fill whole buckets.

    Args:
        model: that the graph was captured from, in the mode it is trained in.
        batches: as in `capture`, at least one.
        graph: of the model.
        loss: as in `capture`.
        seed: of the model's random numbers, which differ from batch to batch.

    Raises:
        CaptureError: see `moments.observe`.
    """
    exempt = {id(parameter) for parameter in exempt_parameters(model)}
    is_coded = [id(parameter) not in exempt for parameter in model.parameters()]

    def powers(index: int, gradient: Tensor) -> tuple[float, float]:
        coded = range_power(gradient) if is_coded[index] else 0.0
        return coded, cast_power(gradient)

    own: dict[int, list[tuple[float, float]]] = {}
    mean: dict[int, Tensor] = {}
    for number, batch in enumerate(batches):
        found = observe(model, batch, graph, loss=loss, seed=seed + number).gradients
        for index, gradient in found.items():
            share = gradient / len(batches)
            mean[index] = mean[index] + share if index in mean else share
            own.setdefault(index, []).append(powers(index, gradient))
    indices = sorted(mean)
    of_own = np.array([np.sum(own[i], axis=0) / len(batches) for i in indices])
    of_mean = np.array([powers(i, mean[i]) for i in indices])
    return GradientRanges(
        parameters=tuple(graph.parameters[index].name for index in indices),
        own_ranges=of_own[:, 0],
        mean_ranges=of_mean[:, 0],
        own_casts=of_own[:, 1],
        mean_casts=of_mean[:, 1],
    )


def range_power(values: Tensor, bucket: int = BUCKET_SIZE) -> float:
    """R of a vector: the sum over its quantisation buckets of (n - 2) range^2.

    Args:
        values: of a gradient, in any shape.
        bucket: values of a quantisation bucket; the last one may be short.
    """
    flat = values.detach().flatten().to(torch.float64)
    missing = -flat.numel() % bucket
    # The padding repeats a value of the last bucket: its least and greatest stay.
    rows = functional.pad(flat[None], (0, missing), mode="replicate").view(-1, bucket)
    counts = torch.full((rows.shape[0],), bucket, dtype=torch.float64, device=flat.device)
    counts[-1] -= missing
    spans = rows.amax(1) - rows.amin(1)
    return float(((counts - 2).clamp(min=0) * spans.square()).sum())


def cast_power(values: Tensor) -> float:
    """C of a vector: the sum of (g - bf16(g))^2."""
    exact = values.detach().float()
    return float((exact - exact.bfloat16().float()).square().sum(dtype=torch.float64))
