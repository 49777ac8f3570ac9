"""Made-up costs for a graph: random, but of the shape that measuring gives."""

from __future__ import annotations

import numpy as np

from qsync_opt.costs import (
    AS_DTYPE,
    AllReduceCosts,
    CostsProvenance,
    DeviceCosts,
    ElementCosts,
    FixedMemory,
    GradientBucket,
    OperatorCosts,
    OptimizerCosts,
    StepCosts,
    Unavailable,
)
from qsync_opt.costs_network import CodedTimes
from qsync_opt.gradient_noise import GradientRanges
from qsync_opt.graph import OperatorGraph, Role
from qsync_opt.perturbation import PerturbationProvenance, PerturbationTable
from qsync_opt.precision import HANDED_ON, Precision
from qsync_opt.runtime.availability import supported_precisions

PRECISIONS = (Precision.FP32, Precision.BF16, Precision.INT8)
SHARED_KINDS = ("linear", "conv2d")


def made_up_costs(
    graph: OperatorGraph, seed: int = 0, *, steps: bool = False, cuda: bool = False
) -> DeviceCosts:
    """Random costs of every signature at the precisions that it has."""
    generator = np.random.default_rng(seed)
    shape = (len(graph.signatures), len(PRECISIONS))
    has = np.zeros(shape, dtype=np.bool_)
    shared = np.zeros(shape[0], dtype=np.bool_)
    for row in graph.operators:
        for column, precision in enumerate(PRECISIONS):
            if row.role is Role.FIXED:
                has[row.signature, column] |= precision is Precision.FP32
            elif row.role is Role.FOLLOWER:
                has[row.signature, column] |= precision in HANDED_ON
            else:
                has[row.signature, column] |= precision in supported_precisions(row.kind)
        shared[row.signature] |= row.role is Role.ADJUSTABLE and row.kind in SHARED_KINDS

    def times() -> np.ndarray:
        return np.where(has, generator.uniform(1e-6, 1e-3, shape), np.nan)

    casts = generator.uniform(1e-6, 1e-4, (*shape, len(HANDED_ON)))
    casts[~shared] = np.nan
    casts[~has] = np.nan
    casts[..., HANDED_ON.index(Precision.FP16)] = np.nan
    for column, precision in enumerate(PRECISIONS):
        if precision in HANDED_ON:  # arrives as it is read
            own = casts[:, column, HANDED_ON.index(precision)]
            own[~np.isnan(own)] = 0.0
    elements = sorted(
        {int(np.prod(tensor.shape, dtype=np.int64)) for tensor in graph.tensors} | {1}
    )
    pairs = generator.uniform(1e-6, 1e-4, (len(elements), len(HANDED_ON), len(HANDED_ON)))
    for index in range(len(HANDED_ON)):
        pairs[:, index, index] = 0.0
    rows = [
        StepCosts(
            precision=p,
            forward_s=1.0,
            backward_s=2.0,
            spread=0.01,
            host_s=3.0,
            peak_bytes=0,
            unused_bytes=0,
        )
        for p in PRECISIONS
    ]
    names = [graph.parameters[index].name for index in graph.gradient_order]
    return DeviceCosts(
        graph_sha256=graph.sha256,
        precisions=PRECISIONS,
        half=Precision.BF16,
        operators=OperatorCosts(
            forward_s=times(),
            backward_s=times(),
            forward_spread=np.where(has, 0.01, np.nan),
            backward_spread=np.where(has, 0.01, np.nan),
            forward_host_s=np.where(has, 0.0, np.nan),
            backward_host_s=np.where(has, 0.0, np.nan),
            input_cast_s=casts,
            input_bytes=np.full(shape, AS_DTYPE),
            own_saved_bytes=np.where(has, generator.integers(0, 50, shape), 0),
            forward_transient_bytes=np.zeros(shape, dtype=np.int64),
            backward_transient_bytes=np.zeros(shape, dtype=np.int64),
        ),
        casts=ElementCosts(
            elements=np.array(elements),
            cast_s=pairs,
            add_s=generator.uniform(1e-6, 1e-4, (len(elements), len(HANDED_ON))),
            copy_s=generator.uniform(1e-6, 1e-4, len(elements)),
        ),
        optimizer=OptimizerCosts(name="adamw", step_s=1e-3, spread=0.0, state_bytes=800),
        memory=FixedMemory(
            rounding_bytes=512 if cuda else 1,
            parameter_bytes=400,
            gradient_bytes=400,
            buffer_bytes=8,
            batch_bytes=16,
            workspace_bytes=0,
            context_bytes=1000,
            device_bytes=10**9,
        ),
        buckets=(
            GradientBucket(size_bytes=300, parameters=tuple(names[: len(names) // 2])),
            GradientBucket(size_bytes=100, parameters=tuple(names[len(names) // 2 :])),
        ),
        all_reduce=AllReduceCosts(
            ranks=2,
            backend="gloo",
            size_bytes=np.array([100, 300]),
            time_s=np.array([1e-4, 2e-4]),
            spread=np.array([0.0, 0.1]),
            codes=tuple(
                CodedTimes(
                    bits=bits,
                    time_s=np.array([1e-4, 2e-4]) * (bits + 4) / 32,
                    spread=np.array([0.0, 0.2]),
                )
                for bits in (16, 8, 4)
            ),
        ),
        steps=tuple(rows) if steps else (),
        unavailable=(Unavailable(signature=None, precision=Precision.FP8, reason="no such unit"),),
        warnings=(),
        provenance=CostsProvenance(
            device_type="cuda" if cuda else "cpu",
            device="made up",
            threads=1,
            share=100,
            driver="",
            versions={"torch": "2.13.0"},
            batch={"0": "float32[5, 4]"},
            date="2026-01-01T00:00:00+00:00",
        ),
    )


def made_up_table(graph: OperatorGraph, seed: int = 0) -> PerturbationTable:
    """Random perturbations of the adjustable operators below fp32, and of gradients at bits."""
    values = np.random.default_rng(seed).uniform(1.0, 2.0, (len(graph.operators), len(PRECISIONS)))
    values[:, 0] = 0.0
    for index, row in enumerate(graph.operators):
        if row.role is not Role.ADJUSTABLE:
            values[index] = 0.0
    draws = np.random.default_rng(seed + 1).uniform(1.0, 2.0, (4, len(graph.gradient_order)))
    ranges = GradientRanges(
        parameters=tuple(graph.parameters[index].name for index in graph.gradient_order),
        own_ranges=draws[0],
        mean_ranges=draws[1],
        own_casts=draws[2],
        mean_casts=draws[3],
    )
    return PerturbationTable(
        graph=graph.sha256,
        operators=tuple(row.name for row in graph.operators),
        precisions=PRECISIONS,
        values=values,
        method="variance",
        provenance=PerturbationProvenance(
            model="nets",
            sizes={},
            batches=1,
            draws=1,
            rounding="nearest",
            seed=seed,
            elapsed_s=0.0,
            device="cpu",
            versions={},
            date="",
        ),
        gradients=ranges,
    )
