"""`qsync-opt replay`: the predicted step of a plan as a table and a trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qsync_opt import options
from qsync_opt.commands import EXIT_PLAN, check_targets, load_plan_of
from qsync_opt.errors import ParameterError
from qsync_opt.measured_costs import add_measured_options, load_measured

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from qsync_opt.optimize.problem import AllocationProblem
    from qsync_opt.simulate.replay import Replay
    from qsync_opt.simulate.trace import Difference

#: Of sums of floats: a share of a step that is none.
_ROUNDING = 1e-9

#: Operators listed by `--against`.
_LISTED = 15


def add_commands(command: options.AddCommand) -> None:
    """Add `replay` to the command line."""
    sub = command("replay", run_replay, "what every rank does in a step, as table and trace")
    sub.add_argument("problem", metavar="PROBLEM", help="problem file")
    sub.add_argument("plan", metavar="PLAN", help="plan file")
    sub.add_argument("--trace", metavar="FILE", help="write a Chrome trace (.json or .json.gz)")
    sub.add_argument(
        "--against", metavar="FILE", help="compare with a measured Chrome trace, and show both"
    )
    sub.add_argument(
        "--rank", type=int, metavar="N", help="of the measured trace, with --against; default: 0"
    )
    add_measured_options(sub)


def run_replay(arguments: argparse.Namespace) -> int:
    """Show what every rank does in a step, write it as a trace, compare it with a measured one."""
    from qsync_opt import console
    from qsync_opt.files import load_problem, require_json_name
    from qsync_opt.simulate.replay import replay
    from qsync_opt.simulate.trace import (
        compare_traces,
        overlaid,
        read_trace,
        save_document,
        to_trace,
    )

    if arguments.trace is not None:
        require_json_name("trace", arguments.trace)
    if arguments.rank is not None and arguments.against is None:
        raise ParameterError("--rank", "must be given with --against", arguments.rank)
    check_targets(arguments.trace)
    problem = load_problem(arguments.problem)
    plan = load_plan_of(problem, arguments.plan)
    replayed = replay(problem, plan, hosts=load_measured(problem, arguments)[1])
    differences: list[Difference] | None = None
    if arguments.against is not None:
        differences = compare_traces(problem, replayed, arguments.against, arguments.rank or 0)
    if arguments.trace is not None:
        document = to_trace(problem, replayed)
        if arguments.against is not None:
            document = overlaid(document, read_trace(arguments.against))
        save_document(document, arguments.trace)
    if arguments.json:
        console.write_json(_to_json(problem, replayed, differences))
    else:
        console.write(*_render(problem, replayed, differences))
        if arguments.trace is not None:
            console.write(f"wrote {arguments.trace}")
    return EXIT_PLAN


def _rows(problem: AllocationProblem, replayed: Replay) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for device in problem.devices:
        part = replayed.kinds[device.name]
        point = part.memory.peak_point
        rows.append(
            {
                "device": device.name,
                "ranks": device.workers,
                "compute_s": part.compute_s,
                "cast_s": part.cast_s,
                "optimizer_s": part.optimizer_s,
                "waiting_s": part.waiting_s,
                "host_bound_s": part.host_bound_s,
                "peak_bytes": part.memory.peak_bytes,
                "memory_bytes": device.memory_bytes,
                "peak_terms": part.memory.terms_at(point),
            }
        )
    return rows


def _to_json(
    problem: AllocationProblem, replayed: Replay, differences: Sequence[Difference] | None
) -> dict[str, object]:
    return {
        "iteration_time_s": replayed.iteration_time_s,
        "error": replayed.error,
        "communication_s": replayed.communication_s,
        "kinds": _rows(problem, replayed),
        "differences": None
        if differences is None
        else [
            {
                "operator": row.name,
                "predicted_s": row.predicted_s,
                "measured_s": row.measured_s,
            }
            for row in differences
        ],
    }


def _render(
    problem: AllocationProblem, replayed: Replay, differences: Sequence[Difference] | None
) -> list[object]:
    from qsync_opt import console

    error = "" if replayed.error is None else f" ± {console.percent(replayed.error)}"
    lines = [
        f"{console.one_line(problem.name)}: a step takes"
        f" {console.seconds(replayed.iteration_time_s)}{error},"
        f" of which the network is busy {console.seconds(replayed.communication_s)}"
    ]
    total = replayed.iteration_time_s
    rows, memory = [], []
    for row in _rows(problem, replayed):
        host = float(row["host_bound_s"]) / total if total else 0.0  # type: ignore[arg-type]
        host = host if host > _ROUNDING else 0.0
        rows.append(
            [
                str(row["device"]),
                str(row["ranks"]),
                *(
                    console.seconds(row[name])  # type: ignore[arg-type]
                    for name in ("compute_s", "cast_s", "optimizer_s", "waiting_s")
                ),
                console.seconds(replayed.communication_s),
                console.percent(host),
            ]
        )
        terms: Mapping[str, int] = row["peak_terms"]  # type: ignore[assignment]
        memory.append(
            [
                str(row["device"]),
                ", ".join(f"{name} {console.size(size)}" for name, size in terms.items() if size),
                console.size(row["peak_bytes"]),  # type: ignore[arg-type]
                console.size(row["memory_bytes"]),  # type: ignore[arg-type]
            ]
        )
    columns = ["device kind", "ranks", "compute", "casts", "optimizer", "waiting"]
    columns += ["network", "host-bound"]
    parts: list[object] = ["\n".join(lines), console.table(columns, rows)]
    parts.append(console.table(["device kind", "at the peak", "peak memory", "of"], memory, left=2))
    if differences is not None:
        listed = [
            [
                row.name,
                console.seconds(row.predicted_s),
                console.seconds(row.measured_s),
                console.percent(row.extra_s / row.predicted_s if row.predicted_s else None),
            ]
            for row in differences[:_LISTED]
        ]
        parts.append(console.table(["operator", "predicted", "measured", "more"], listed))
        count, whole = len(differences), len(problem.operators)
        text = f"the {_LISTED} that differ most of " if count > _LISTED else ""
        parts.append(f"{text}{count} operators in the measured trace; the problem has {whole}")
    return parts
