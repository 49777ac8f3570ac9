"""Write the instances again, byte for byte: `python -m problems.build`.

With `--solve` each is also solved, its plan stored and `index.json` filled; with `--mps` the
MPS files are written; with `--check` nothing is written and the exit code says whether the
folder is up to date. `--only NAME` limits any of these.

A packed file is the same bytes for the same compression library; its content is the same
everywhere.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from problems.catalogue import BY_NAME, INSTANCES, Instance
from qsync_opt.files import save_plan, save_problem, write_atomically
from qsync_opt.optimize.problem import AllocationProblem

FOLDER = Path(__file__).resolve().parent
INDEX = FOLDER / "index.json"
README = FOLDER / "README.md"
INDEX_FORMAT = "qsync-opt/instances"
INDEX_VERSION = 1
REGENERATE = "python -m problems.build --only {name}"
TABLE_BEGIN, TABLE_END = "<!-- table -->", "<!-- end of table -->"
_RELATIVE_GAP = 1e-9
_TIME_LIMIT_S = 120.0
#: What solving adds to an entry of the index.
_SOLVED = ("objective", "bound", "gap", "deadline_s", "method", "plan")


def content(path: Path) -> bytes:
    """The bytes of a file, unpacked."""
    raw = path.read_bytes()
    return gzip.decompress(raw) if path.suffix == ".gz" else raw


def read_index() -> dict[str, dict[str, Any]]:
    """The entries of `index.json` by instance name; empty where there is no index yet."""
    if not INDEX.exists():
        return {}
    data = json.loads(INDEX.read_text())
    return {entry["name"]: entry for entry in data["instances"]}


def describe(instance: Instance, problem: AllocationProblem) -> dict[str, Any]:
    """The part of an index entry that does not need solving."""
    entry: dict[str, Any] = {
        "name": instance.name,
        "file": instance.file,
        "origin": instance.origin,
        "units": instance.units,
        "regenerate": REGENERATE.format(name=instance.name),
        "sha256": problem.sha256,
        "operators": len(problem.operators),
        "precisions": [p.value for p in problem.precisions],
        "kinds": [device.name for device in problem.devices],
        "pace": {"deadline_s": problem.deadline_s, "slack": problem.slack},
        "feasible": instance.feasible,
        "mps": f"{instance.name}.mps.gz" if instance.mps else None,
    }
    if not instance.feasible:
        entry["shortfall_bytes"] = instance.shortfall_bytes
    return entry | dict.fromkeys(_SOLVED)


def keep_solution(entry: dict[str, Any], before: Mapping[str, Any] | None) -> dict[str, Any]:
    """`entry` with the solution of an earlier one, if the problem and its pace are the same."""
    if before is None or any(before[key] != entry[key] for key in ("sha256", "pace")):
        return entry
    return entry | {key: before[key] for key in _SOLVED}


def solution(instance: Instance, problem: AllocationProblem) -> dict[str, Any]:
    """Solve an instance, store its plan, and return what the index says about it."""
    from qsync_opt.optimize.result import SolveParameters
    from qsync_opt.optimize.solve import solve

    parameters = SolveParameters(relative_gap=_RELATIVE_GAP, time_limit_s=_TIME_LIMIT_S)
    result = solve(problem, method="exact", parameters=parameters)
    plan = None
    if result.plan is not None:
        plan = f"plans/{instance.name}.json"
        (FOLDER / "plans").mkdir(exist_ok=True)
        save_plan(result.plan, FOLDER / plan)
    method = f"{result.method}, relative gap {_RELATIVE_GAP:g}: {result.status.value}"
    return {
        "objective": result.objective,
        "bound": result.bound,
        "gap": result.gap,
        "deadline_s": result.deadline_s,
        "method": method,
        "plan": plan,
    }


def write_index(entries: Mapping[str, Mapping[str, Any]]) -> None:
    """Write `index.json`, in the order of the catalogue."""
    data = {
        "format": INDEX_FORMAT,
        "version": INDEX_VERSION,
        "instances": [entries[i.name] for i in INSTANCES if i.name in entries],
    }
    write_atomically(INDEX, (json.dumps(data, indent=1) + "\n").encode())


def write_table(entries: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the table of `README.md`, between its two markers."""
    rows = [
        "| Instance | Operators | Precisions | Kinds | Best objective | Bound | Deadline, s |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for entry in (entries[i.name] for i in INSTANCES if i.name in entries):
        cells = [
            f"`{entry['name']}`",
            str(entry["operators"]),
            " ".join(entry["precisions"]),
            " ".join(entry["kinds"]),
            *(_figure(entry[key], entry) for key in ("objective", "bound", "deadline_s")),
        ]
        rows.append("| " + " | ".join(cells) + " |")
    before, rest = README.read_text().split(TABLE_BEGIN)
    _, after = rest.split(TABLE_END)
    text = f"{before}{TABLE_BEGIN}\n" + "\n".join(rows) + f"\n{TABLE_END}{after}"
    write_atomically(README, text.encode())


def _figure(value: float | None, entry: Mapping[str, Any]) -> str:
    if value is not None:
        return f"{value:.6g}"
    return "not solved yet" if entry["feasible"] else "infeasible"


def is_current(instance: Instance, problem: AllocationProblem) -> bool:
    """Whether the stored file holds exactly what writing the problem again would give."""
    stored = FOLDER / instance.file
    if not stored.exists():
        return False
    with tempfile.TemporaryDirectory() as folder:
        again = Path(folder) / instance.file
        save_problem(problem, again)
        return content(again) == content(stored)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m problems.build", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=sorted(BY_NAME), metavar="NAME")
    parser.add_argument("--solve", action="store_true", help="solve and fill the index")
    parser.add_argument("--mps", action="store_true", help="write the MPS files")
    parser.add_argument("--check", action="store_true", help="write nothing; compare")
    options = parser.parse_args(arguments)
    chosen = [i for i in INSTANCES if not options.only or i.name in options.only]
    entries = read_index()
    outdated = 0
    for instance in chosen:
        problem = instance.make()
        if options.check:
            current = is_current(instance, problem)
            outdated += not current
            _say(f"{instance.name}: {'up to date' if current else 'differs'}")
            continue
        save_problem(problem, FOLDER / instance.file)
        entry = describe(instance, problem)
        entry = keep_solution(entry, entries.get(instance.name))
        if options.solve:
            entry |= solution(instance, problem)
        if options.mps and instance.mps:
            from qsync_opt.optimize.export import write_mps

            write_mps(problem, FOLDER / f"{instance.name}.mps.gz")
        entries[instance.name] = entry
        write_index(entries)
        write_table(entries)
        _say(f"{instance.name}: objective {entry['objective']}, bound {entry['bound']}")
    return 1 if outdated else 0


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
