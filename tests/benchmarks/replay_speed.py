"""How long a replay takes: `python -m tests.benchmarks.replay_speed`.

A hundred ranks of a thousand operators each, with hosts: once as a hundred different kinds of
device, of which each has to be replayed, once as two kinds of fifty ranks. The goal is half a
second. Prints a table and keeps it in `results/` with the machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from qsync_opt.files import write_atomically
from qsync_opt.optimize.evaluate import plan_from_columns
from qsync_opt.optimize.generate import generate_problem
from qsync_opt.optimize.problem import AllocationProblem
from qsync_opt.simulate.replay import replay
from qsync_opt.simulate.tasks import HostCosts
from tests.benchmarks.tables import describe_machine

RESULTS = Path(__file__).resolve().parent / "results"
RANKS = 100
GOAL_S = 0.5


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.replay_speed")
    parser.add_argument("--operators", type=int, default=1_000)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="FOLDER")
    options = parser.parse_args(argv)
    rows = [
        measure_replay(options.operators, kinds, waits, options.repeats)
        for kinds in (RANKS, 2)
        for waits in (False, True)
    ]
    data: dict[str, Any] = {
        "format": "qsync-opt/benchmark",
        "version": 1,
        "machine": describe_machine(),
        "rows": rows,
    }
    options.output.mkdir(parents=True, exist_ok=True)
    raw = json.dumps(data, indent=1, allow_nan=False) + "\n"
    write_atomically(options.output / "replay-speed.json", raw.encode())
    write_atomically(options.output / "replay-speed.md", to_markdown(data).encode())
    sys.stdout.write(to_markdown(data))
    return 0


def measure_replay(operators: int, kinds: int, waits: bool, repeats: int) -> dict[str, Any]:
    """Seconds of a replay of `RANKS` ranks of some kinds, each kind with times of its own."""
    problem = ranks_problem(operators, kinds)
    rng = np.random.default_rng(0)
    columns, hosts = [], {}
    for device in problem.devices:
        options = device.available * rng.random(device.available.shape)
        columns.append(options.argmax(axis=1))
        typical = float(device.forward_s[device.available].mean()) / 2
        shape = device.forward_s.shape
        hosts[device.name] = HostCosts(
            forward_s=rng.uniform(0, typical, size=shape),
            backward_s=rng.uniform(0, typical, size=shape),
            overlap_slowdown=1.1,
            waits=waits,
        )
    plan = plan_from_columns(problem, columns)
    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        replay(problem, plan, hosts=hosts)
        times.append(time.perf_counter() - begin)
    return {
        "ranks": RANKS,
        "kinds": kinds,
        "operators": operators,
        "buckets": len(problem.buckets),
        "waits": waits,
        "replay_s": statistics.median(times[1:]),
        "fastest_s": min(times[1:]),
    }


def ranks_problem(operators: int, kinds: int) -> AllocationProblem:
    """`RANKS` ranks of some kinds of different speeds."""
    problem = generate_problem(operators=operators, devices=1, seed=0)
    (device,) = problem.devices
    speeds = np.random.default_rng(1).uniform(0.5, 2.0, size=kinds)
    return replace(
        problem,
        devices=tuple(
            replace(
                device,
                name=f"kind {number}",
                workers=RANKS // kinds,
                batch_share=1 / RANKS,
                forward_s=device.forward_s * speed,
                backward_s=device.backward_s * speed,
            )
            for number, speed in enumerate(speeds.tolist())
        ),
    )


def to_markdown(data: dict[str, Any]) -> str:
    """The table."""
    lines = ["# Time of a replay", ""]
    lines += [f"- {key}: {value}" for key, value in data["machine"].items()]
    lines += [
        "",
        f"Goal: {RANKS} ranks of 1,000 operators in {GOAL_S} s. Median of a replay from a problem"
        " and a plan in memory, with hosts and memory timelines.",
        "",
        "| ranks | kinds | operators | buckets | hosts | median s | fastest s |",
        "|--:|--:|--:|--:|---|--:|--:|",
    ]
    lines += [
        f"| {row['ranks']} | {row['kinds']} | {row['operators']:,} | {row['buckets']}"
        f" | {'wait' if row['waits'] else 'run ahead'}"
        f" | {row['replay_s']:.3f} | {row['fastest_s']:.3f} |"
        for row in data["rows"]
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
