"""The machine, and measured rows as Markdown."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import qsync_opt as qo
from tests.benchmarks.specs import CLOCK, COUNTS, KINDS, OWN, PRECISIONS, RELATIVE_GAP, THREADS

Row = Mapping[str, Any]
_NOTHING = "-"


def describe_machine() -> dict[str, Any]:
    """What the figures depend on beside the code."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": _cpu_model(),
        "cores": usable,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "qsync_opt": qo.__version__,
        **{name: version(name) for name in ("ortools", "pulp", "numpy", "scipy")},
        "date": datetime.now(timezone.utc).date().isoformat(),
    }


def _cpu_model() -> str:
    listing = Path("/proc/cpuinfo")
    if listing.exists():
        for line in listing.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def to_markdown(data: Mapping[str, Any]) -> str:
    """The whole report; `data` is what the JSON file holds."""
    machine = data["machine"]
    parts = [
        "# Benchmarks",
        f"Written by `python -m tests.benchmarks {data['arguments']}`".rstrip() + ".",
        "\n".join(f"- {_machine_line(name, machine[name])}" for name in machine),
        "## Time to the proof",
        f"{PRECISIONS} precisions, {KINDS} device kinds, {THREADS} threads, relative gap"
        f" {RELATIVE_GAP:g}. Seconds of one `solve`, each in a process of its own, without making"
        " the problem or importing the solver. `exact` is this library; the others get the"
        " whole program as it is. Where a solver hit its limit, status and gap reached are"
        " given, and the ratio is at least the one shown.",
        *_family_tables(data["rows"]),
        "## What the steps of the exact method take and leave",
        "Per device kind. Seconds of each step; the gap after bounds and heuristics, before the"
        " core; operators with a choice, rounds of the bound, Lagrangian branchings, open choices"
        " in the last core, classes and items of its knapsack, labels looked at, programs given to"
        " a solver.",
        ablation_table(data["rows"]),
    ]
    if start := data.get("start_up"):
        parts += [
            "## Start-up",
            f"Median of {start['repeats']}: `import qsync_opt` {start['import_s']:.3f} s;"
            f" `qsync-opt solve` of 54 operators, the whole process"
            f" {start['command_line_54_s']:.2f} s.",
        ]
    return "\n\n".join(parts) + "\n"


def _machine_line(name: str, value: Any) -> str:
    return f"memory: {value / 2**30:.1f} GiB" if name == "memory_bytes" else f"{name}: {value}"


def _family_tables(rows: Sequence[Row]) -> list[str]:
    families = dict.fromkeys((row["graph"], row["costs"]) for row in rows)
    tables = []
    for graph, costs in families:
        tables.append(f"### {graph} graph, {costs} costs")
        mine = [row for row in rows if (row["graph"], row["costs"]) == (graph, costs)]
        tables.append(solver_table(mine))
    return tables


def solver_table(rows: Sequence[Row]) -> str:
    """One line per size and solver: seconds, ratio to `exact`, status, gap, memory."""
    own = {row["operators"]: row["wall_s"] for row in rows if row["solver"] == OWN}
    lines = []
    for row in rows:
        seconds, base = row["wall_s"], own.get(row["operators"])
        ratio = _NOTHING
        if seconds is not None and base:
            ratio = f"{'' if row['status'] == 'OPTIMAL' else '>= '}{seconds / base:.1f}"
        rss = row["peak_rss_bytes"]
        status = row["status"].lower()
        lines.append(
            [
                f"{row['operators']:,}",
                row["solver"] if row["solver"] == OWN else f"plain {row['solver']}",
                _figure(seconds, ".2f"),
                ratio if row["solver"] != OWN else "1",
                f"{status}: {row['reason']}" if row["reason"] else status,
                _figure(row["gap"], ".1e"),
                _figure(row["objective"], ".6g"),
                _NOTHING if rss is None else f"{rss / 2**20:.0f}",
            ]
        )
    head = ["operators", "solver", "seconds", "ratio", "status", "gap", "objective", "peak MiB"]
    return _table(head, lines, left=("solver", "status"))


def ablation_table(rows: Sequence[Row]) -> str:
    """One line per problem and device kind: what each step of the exact method took and left."""
    lines = []
    for row in rows:
        if row["solver"] != OWN:
            continue
        for kind, figures in row["kinds"].items():
            clock = [figures.get(name) for name in CLOCK]
            steps = [
                None if after is None else after - (before or 0.0)
                for before, after in zip([0.0, *clock], clock, strict=False)
            ]
            lines.append(
                [
                    f"{row['operators']:,}",
                    f"{row['graph']}, {row['costs']}",
                    kind,
                    _figure(figures.get("greedy_s"), ".3f"),
                    *(_figure(step, ".3f") for step in steps),
                    _figure(figures.get("core_s"), ".3f"),
                    *(
                        _figure(figures.get(name), ".1e" if name == "first_gap" else ".0f")
                        for name in COUNTS
                    ),
                ]
            )
    head = ["operators", "problem", "kind", "greedy s", "graph s", "bound s", "heuristic s"]
    head += ["core s", *(name.replace("_", " ") for name in COUNTS)]
    return _table(head, lines, left=("problem", "kind"))


def _figure(value: float | None, form: str) -> str:
    return _NOTHING if value is None else format(value, form)


def _table(head: Sequence[str], lines: Sequence[Sequence[str]], *, left: Sequence[str]) -> str:
    rule = ["---" if name in left else "--:" for name in head]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, rule, *lines])


def without_output(words: Sequence[str]) -> list[str]:
    """What was run, without where its files went."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--output")
    return parser.parse_known_args(words)[1]
