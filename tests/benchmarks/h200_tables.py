"""The kept rows of `h200` as one page: `python -m tests.benchmarks.h200_tables`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from qsync_opt.files import write_atomically

RESULTS = Path(__file__).resolve().parent / "results"

#: What issue and README call within the goal: relative error of time and of memory.
TIME_GOAL, MEMORY_GOAL = 0.03, 0.02

_HEAD = """# Predicted against measured steps on an H200

Written by `python -m tests.benchmarks.h200_tables` from what `python -m tests.benchmarks.h200`
left (`h200-MODEL-SHARE.json`): {gpu}, torch {torch}, shares of its multiprocessors by NVIDIA MPS.
Steps are forward and backward with the host kept ahead of the GPU, so that the device's own time
is measured; `host ms` is what launching a step takes where nothing waits. Errors are predicted /
measured - 1: of the sum of measured operators and casts, and of the peak memory against
`torch.cuda.max_memory_allocated`.

- {plans} plans: median error of time {time_median:.2%}, {time_good} within {time_goal:.0%},
  worst {time_worst:.1%}
- {memories} memory peaks: median error {memory_median:.2%}, {memory_good} within {memory_goal:.0%},
  worst {memory_worst:.1%}
"""


def rows_of(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Plan, measured seconds, relative errors (memory's may be None) and host seconds."""
    hosts = {f"all {row['precision']}": row["host_s"] for row in report["uniform"]}
    rows = []
    for plan in report.get("plans", []):
        rows.append(
            {
                "plan": plan["plan"],
                "step_s": plan["forward_s"] + plan["backward_s"],
                "time_error": plan["time_ratio"] - 1,
                "memory_error": plan["memory_ratio"] - 1,
                "host_s": hosts.get(plan["plan"]),
            }
        )
    if rows:
        return rows
    for row in report["uniform"]:
        step_s = row["forward_s"] + row["backward_s"]
        predicted_s = row["predicted_forward_s"] + row["predicted_backward_s"]
        rows.append(
            {
                "plan": f"all {row['precision']}",
                "step_s": step_s,
                "time_error": predicted_s / step_s - 1,
                "memory_error": None,
                "host_s": row["host_s"],
            }
        )
    return rows


def page(reports: Iterable[Mapping[str, Any]]) -> str:
    """The page of some reports."""
    listed = list(reports)
    found = [(report, rows_of(report)) for report in listed]
    times = [abs(row["time_error"]) for _, rows in found for row in rows]
    memories = [
        abs(row["memory_error"])
        for _, rows in found
        for row in rows
        if row["memory_error"] is not None
    ]
    machine = listed[0]["machine"]
    text = _HEAD.format(
        gpu=machine["gpu"],
        torch=machine["torch"],
        plans=len(times),
        time_median=statistics.median(times),
        time_good=sum(error <= TIME_GOAL for error in times),
        time_goal=TIME_GOAL,
        time_worst=max(times),
        memories=len(memories),
        memory_median=statistics.median(memories),
        memory_good=sum(error <= MEMORY_GOAL for error in memories),
        memory_goal=MEMORY_GOAL,
        memory_worst=max(memories),
    )
    for report, rows in found:
        text += f"\n## {Path(report['model']).stem}, {report['share']} %\n\n"
        text += "| plan | step ms | time error | memory error | host ms |\n|---|--:|--:|--:|--:|\n"
        for row in rows:
            memory = "" if row["memory_error"] is None else f"{row['memory_error']:+.2%}"
            host = "" if row["host_s"] is None else f"{1e3 * row['host_s']:.0f}"
            text += f"| {row['plan']} | {1e3 * row['step_s']:.1f} | {row['time_error']:+.2%}"
            text += f" | {memory} | {host} |\n"
    return text


def main() -> None:
    """Write the page beside the rows."""
    paths = sorted(RESULTS.glob("h200-*.json"))
    text = page(json.loads(path.read_text()) for path in paths)
    write_atomically(RESULTS / "h200.md", text.encode())


if __name__ == "__main__":
    main()
