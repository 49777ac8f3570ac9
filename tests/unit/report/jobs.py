"""Metrics of a training job that took no time: every number is known beforehand."""

from __future__ import annotations

from pathlib import Path

from qsync_opt.optimize.problem import AllocationProblem
from qsync_opt.runtime.metrics import MetricsFile, StepMetrics

STEPS = 30


def write_metrics(folder: Path, problem: AllocationProblem) -> None:
    """Steps of every rank: rank r takes (10 + r) ms, and its loss falls."""
    kinds = [device.name for device in problem.devices for _ in range(device.workers)]
    for rank, kind in enumerate(kinds):
        file = MetricsFile(folder, rank, 0)
        for step in range(STEPS):
            file.write(
                StepMetrics(
                    step=step,
                    rank=rank,
                    kind=kind,
                    loss=2.0 + rank - 0.01 * step,
                    samples=8 * (rank + 1),
                    step_s=1e-3 * (10 + rank) if step else 5.0,
                    compute_s=8e-3,
                    wait_s=1e-3 * (2 + rank),
                    memory_bytes=2**20 * (step + 1),
                    loss_scale=1.0,
                    skipped=False,
                )
            )
        file.close()
