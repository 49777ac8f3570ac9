"""A problem whose perturbations were gathered anew, solved again in a process of its own.

`python -m qsync_opt.optimize.refresh FOLDER` reads the problem, the plan in use and the new
perturbations from a folder, and leaves its answer there. Training starts it beside itself: a
solver that is slow, or ends its process, does not concern the step that is running.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from qsync_opt.errors import ParameterError, PlanError, QsyncError
from qsync_opt.files import load_plan, load_problem, save_plan, save_problem, write_atomically
from qsync_opt.optimize.arrays import FloatArray
from qsync_opt.optimize.problem import AllocationProblem
from qsync_opt.plan import PrecisionPlan

PROBLEM, PLAN, VALUES, ANSWER = "problem.json.gz", "plan.json", "values.npy", "answer.json"

#: Share of the perturbation that must be gained before a plan is exchanged: less is within
#: what one more batch would change in the table.
LEAST_GAIN = 0.01

#: A solve beside a training job leaves the processor to it.
_NICENESS = 19


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What came of solving again.

    Attributes:
        plan: a better one, bound to the problem that the job was started with; None: keep the
            plan in use.
        told: what happened, in a sentence.
    """

    plan: PrecisionPlan | None
    told: str


def refreshed(problem: AllocationProblem, values: FloatArray) -> AllocationProblem:
    """A problem with other perturbations; what it costs is as before.

    Args:
        problem: the problem.
        values: for its operators and precisions, [N, P]; infinite where an operator must not
            run at a precision any more.

    Raises:
        ParameterError: a wrong shape, or NaN.
        ProblemError: an operator has no precision left.
    """
    shape = (len(problem.operators), len(problem.precisions))
    if values.shape != shape or np.isnan(values).any():
        rule = f"must be numbers in the shape {list(shape)}"
        found = f"{list(values.shape)}, {int(np.isnan(values).sum())} of them NaN"
        raise ParameterError("perturbation", rule, found)
    devices = tuple(
        replace(
            device,
            available=device.available & np.isfinite(values),
            perturbation=np.where(np.isfinite(values), values, 0.0),
            pins=dict(device.pins),
        )
        for device in problem.devices
    )
    return replace(problem, devices=devices)


def solve_again(
    problem: AllocationProblem, plan: PrecisionPlan, values: FloatArray, time_limit_s: float
) -> Answer:
    """Solve with other perturbations, from the plan in use.

    Args:
        problem: that the job was started with.
        plan: in use; of that problem.
        values: see `refreshed`.
        time_limit_s: of the solve.
    """
    from qsync_opt.optimize.evaluate import evaluate
    from qsync_opt.optimize.result import SolveParameters
    from qsync_opt.optimize.solve import solve

    begin = time.perf_counter()
    renewed = refreshed(problem, values)
    hint: PrecisionPlan | None = replace(plan, problem=renewed.sha256)
    before: float | None = None
    try:
        before = evaluate(renewed, replace(plan, problem=renewed.sha256)).perturbation
    except PlanError:  # it uses what has become impossible
        hint = None
    parameters = SolveParameters(time_limit_s=time_limit_s, threads=1)
    result = solve(renewed, parameters=parameters, hint=hint)
    seconds = f"{time.perf_counter() - begin:.1f} s"
    if result.plan is None or result.objective is None:
        return Answer(plan=None, told=f"the plan stays: {result.status.value} ({seconds})")
    if before is not None and result.objective > (1 - LEAST_GAIN) * before:
        told = f"the plan stays: {result.objective:.4g} would not be better than {before:.4g}"
        return Answer(plan=None, told=f"{told} ({seconds})")
    found = replace(result.plan, problem=plan.problem)
    changed = sum(
        precision is not plan.devices[kind].get(name)
        for kind, row in found.devices.items()
        for name, precision in row.items()
    )
    old = "impossible" if before is None else f"{before:.4g}"
    bits = "" if found.communication == plan.communication else ", and the bits of gradients"
    return Answer(
        plan=found,
        told=f"a new plan: perturbation {old} -> {result.objective:.4g},"
        f" {changed} precisions changed{bits} ({seconds})",
    )


def write_problem(folder: Path, problem: AllocationProblem) -> None:
    """Put what stays the same into a folder."""
    save_problem(problem, folder / PROBLEM)


def write_question(folder: Path, plan: PrecisionPlan, values: FloatArray) -> None:
    """Put a question into a folder, and take the answer to an earlier one away."""
    (folder / ANSWER).unlink(missing_ok=True)
    save_plan(plan, folder / PLAN)
    with (folder / VALUES).open("wb") as stream:
        np.save(stream, values, allow_pickle=False)


def read_answer(folder: Path) -> Answer | None:
    """The answer in a folder; None where there is none."""
    path = folder / ANSWER
    if not path.exists():
        return None
    content: Mapping[str, Any] = json.loads(path.read_text())
    plan = load_plan(folder / PLAN) if content["changed"] else None
    return Answer(plan=plan, told=content["told"])


def main(argv: Sequence[str] | None = None) -> int:
    """Answer the question in a folder; ends with whoever holds the other end of its input."""
    words = sys.argv[1:] if argv is None else list(argv)
    folder, time_limit_s = Path(words[0]), float(words[1])
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.nice(_NICENESS)
    try:
        problem, plan = load_problem(folder / PROBLEM), load_plan(folder / PLAN)
        values = np.load(folder / VALUES, allow_pickle=False)
        answer = solve_again(problem, plan, values, time_limit_s)
    except QsyncError as error:
        answer = Answer(plan=None, told=f"the plan stays: {error}")
    if answer.plan is not None:
        save_plan(answer.plan, folder / PLAN)
    content = {"changed": answer.plan is not None, "told": answer.told}
    write_atomically(folder / ANSWER, json.dumps(content).encode())
    return 0


def _end_with_parent() -> None:
    # Not through sys.stdin: Python cannot end while another thread holds its lock.
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
