"""What `rivals` shows: a row for each method, and the tables."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from qsync_opt.optimize.evaluate import evaluate
from qsync_opt.optimize.problem import AllocationProblem

#: The goal: least throughput of the exact plan, of that of the fastest uniform one.
GOAL = 0.98


def to_row(
    name: str,
    method: Mapping[str, Any],
    turns: Sequence[Mapping[str, Any]],
    problem: AllocationProblem,
) -> dict[str, Any]:
    failed = next((turn["failure"] for turn in turns if turn["failure"]), None)
    judged = None
    if method["judged"] is not None:
        judged = evaluate(problem, method["judged"])
    row: dict[str, Any] = {
        "method": name,
        "failure": failed,
        "perturbation": None if judged is None else judged.perturbation,
        "predicted_s": None if judged is None else judged.iteration_time_s,
    }
    if failed is not None:
        return row
    steps = sorted(turn["step_s"] for turn in turns)
    step_s = statistics.median(steps)
    last = turns[-1]
    return {
        **row,
        "step_s": step_s,
        "spread": (steps[-1] - steps[0]) / step_s,
        "samples_per_s": sum(last["samples"]) / step_s,
        "memory_bytes": last["memory_bytes"],
        "samples": last["samples"],
        "wait": last["wait"],
        "loss": last["loss"],
        "skipped": last["skipped"],
    }


def to_markdown(data: Mapping[str, Any]) -> str:
    """The tables, with the machine above them."""
    lines = [
        "# Plans and their rivals",
        "",
        f"Ranks {data['ranks']}; shares {data['shares'] or 'equal'}. Perturbation: what rounding"
        " adds to the variance of the averaged gradient. Goal: exact at least"
        f" {GOAL:.0%} of the fastest uniform plan's throughput.",
        "",
    ]
    lines += [f"- {key}: {value}" for key, value in data["machine"].items()]
    for model in data["models"]:
        sizes = ", ".join(f"{key}={value}" for key, value in model["sizes"].items())
        lines += ["", f"## {model['model']} {sizes}".rstrip(), ""]
        for method, facts in model["solves"].items():
            gap = facts.get("gap")
            proof = "" if gap is None else f", gap {gap:.1e}"
            lines.append(f"- {method}: {facts['status']}{proof}")
        rows = model["rows"]
        uniform = [r for r in rows if r["failure"] is None and _is_uniform(r["method"])]
        best = max((row["samples_per_s"] for row in uniform), default=None)
        lines += [
            "",
            "| method | step ms | predicted ms | spread | samples/s | of fastest uniform |"
            " perturbation | last loss | skipped steps | peak GiB by rank | waiting by rank |"
            " samples by rank |",
            "|---|--:|--:|--:|--:|--:|--:|--:|--:|---|---|---|",
        ]
        lines += [_line(row, best) for row in rows]
    return "\n".join(lines) + "\n"


def _is_uniform(method: str) -> bool:
    return method.startswith("all ") or method == "uniform by kind"


def _line(row: Mapping[str, Any], best: float | None) -> str:
    told = row["perturbation"]
    perturbation = "-" if told is None else f"{told:.4g}"
    if row["failure"] is not None:
        cells = [row["method"], f"failed: {row['failure']}", *[""] * 4, perturbation, *[""] * 5]
        return "| " + " | ".join(cells) + " |"
    predicted = row["predicted_s"]
    memory = [size for size in row["memory_bytes"] if size is not None]
    cells = [
        row["method"],
        f"{1e3 * row['step_s']:.2f}",
        "-" if predicted is None else f"{1e3 * predicted:.2f}",
        f"{row['spread']:.1%}",
        f"{row['samples_per_s']:.1f}",
        "-" if best is None else f"{row['samples_per_s'] / best:.1%}",
        perturbation,
        "not finite" if row["loss"] is None else f"{row['loss']:.4g}",
        str(row.get("skipped", "")),
        ", ".join(f"{size / 2**30:.2f}" for size in memory) or "-",
        ", ".join(f"{share:.0%}" for share in row["wait"]),
        ", ".join(map(str, row["samples"])),
    ]
    return "| " + " | ".join(cells) + " |"
