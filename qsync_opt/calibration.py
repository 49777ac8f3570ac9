"""`HeldOutRun`: a predicted step beside a measured one, kept with the costs it was made from.

A plan that was not used in measuring the costs shows how far predictions made of them are off.
What is shown with a prediction (±) is the largest error of the runs kept.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from qsync_opt.errors import CostsError
from qsync_opt.plan import PrecisionPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutRun:
    """One plan, replayed and run.

    Attributes:
        plan: digest of the plan (`plan_digest`).
        ranks: of the job.
        predicted_s, measured_s: iteration time, median over the steps of the run.
        date: ISO 8601, UTC.

    Raises:
        CostsError: times that are not > 0.
    """

    plan: str
    ranks: int
    predicted_s: float
    measured_s: float
    date: str

    def __post_init__(self) -> None:
        for name in ("predicted_s", "measured_s"):
            value = getattr(self, name)
            if not sys.float_info.min <= value < float("inf"):
                rule = "must be a finite number > 0"
                raise CostsError(f"held_out.{name}", rule, value, "Run the plan again")

    @property
    def error(self) -> float:
        """Predicted over measured, less 1: above 0 where the prediction is too slow."""
        return self.predicted_s / self.measured_s - 1.0

    @property
    def missed(self) -> float:
        """Measured over predicted, less 1: what was missed, as a share of the prediction."""
        return self.measured_s / self.predicted_s - 1.0


def largest_error(runs: Sequence[HeldOutRun]) -> float | None:
    """What a prediction may miss, as a share of itself: the most of the runs; None without any."""
    return max((abs(run.missed) for run in runs), default=None)


def median_error(runs: Sequence[HeldOutRun]) -> float | None:
    """As `largest_error`, the median."""
    return statistics.median(abs(run.missed) for run in runs) if runs else None


def with_run(runs: Sequence[HeldOutRun], run: HeldOutRun) -> tuple[HeldOutRun, ...]:
    """The runs and one more; one of the same plan on as many ranks is replaced."""
    others = [row for row in runs if (row.plan, row.ranks) != (run.plan, run.ranks)]
    return (*others, run)


def plan_digest(plan: PrecisionPlan) -> str:
    """SHA-256 of a plan's precisions and bits: what was run, whatever the problem's costs."""
    rows = {
        kind: {name: str(precision) for name, precision in row.items()}
        for kind, row in plan.devices.items()
    }
    # Plans without bits keep the digests that earlier releases gave them.
    run = [rows, plan.communication] if plan.communication else rows
    return hashlib.sha256(json.dumps(run, sort_keys=True).encode()).hexdigest()
