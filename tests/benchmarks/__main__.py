"""The benchmarks: `python -m tests.benchmarks` (`make bench`).

Prints a table and keeps it, with the description of the machine, as Markdown and JSON in
`tests/benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qsync_opt.files import write_atomically
from tests.benchmarks.runner import run_solvers, run_start_up
from tests.benchmarks.specs import COSTS, DEFAULT_LIMIT_S, GRAPHS, PEERS, SIZES, solver_specs
from tests.benchmarks.tables import describe_machine, to_markdown, without_output

RESULTS = Path(__file__).resolve().parent / "results"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmarks; returns the exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("--sizes", type=_sizes, default=SIZES, metavar="N,N,...", help="operators")
    parser.add_argument(
        "--limit",
        type=float,
        default=DEFAULT_LIMIT_S,
        metavar="SECONDS",
        help="time limit of each plain solve; default: %(default)s",
    )
    for name, choices in (("graphs", GRAPHS), ("costs", COSTS), ("peers", PEERS)):
        parser.add_argument(f"--{name}", nargs="*", choices=choices, default=choices)
    parser.add_argument("--name", default="solvers", help="of the files; default: %(default)s")
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="FOLDER")
    options = parser.parse_args(words)
    specs = solver_specs(
        options.sizes,
        graphs=options.graphs,
        costs=options.costs,
        peers=options.peers,
        limit_s=options.limit,
    )
    data: dict[str, Any] = {
        "format": "qsync-opt/benchmark",
        "version": 1,
        "arguments": shlex.join(without_output(words)),
        "machine": describe_machine(),
        "start_up": run_start_up(),
        "rows": [],
    }
    options.output.mkdir(parents=True, exist_ok=True)

    def keep(row: dict[str, Any]) -> None:
        """Show a row, and store all so far: a long run that is stopped loses nothing."""
        shown = (row[key] for key in ("operators", "graph", "costs", "solver", "status"))
        seconds = "-" if row["wall_s"] is None else f"{row['wall_s']:.2f} s"
        sys.stderr.write("  ".join([*map(str, shown), seconds]) + "\n")
        data["rows"].append(row)
        target = options.output / options.name
        text = json.dumps(data, indent=1, allow_nan=False) + "\n"
        write_atomically(target.with_suffix(".json"), text.encode())
        write_atomically(target.with_suffix(".md"), to_markdown(data).encode())

    run_solvers(specs, report=keep)
    sys.stdout.write(to_markdown(data))
    return 0


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(part.replace("_", "")) for part in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
