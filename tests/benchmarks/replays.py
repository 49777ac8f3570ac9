"""Replayed steps of held-out plans beside real ones: `python -m tests.benchmarks.replays`.

For every model the operators are measured alone, and the step of at least thirty plans (uniform,
greedy, exact at several slacks, random mixed) is predicted from them by `replay`; then each plan
is trained with for some steps, unprofiled. Started by torchrun, every rank is a device kind of
its own, measured at the same time as the others, and the steps are DDP's. `--shares 100,25` gives
each rank its part of a GPU through NVIDIA's MPS, whose daemon must run; ranks that outnumber the
GPUs share them, and reduce by gloo. `--measured` takes what `problems/` holds for a GPU, and
times no more than how this host launches whole steps. Kept in `results/` are the error of every
plan, the term that is off by most, and the machine. Where no solver is installed more plans are
random.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from problems.measured import FOLDER
from problems.measured import MODELS as KEPT
from qsync_opt.build import build_problem
from qsync_opt.costs import Cluster, ClusterKind, DeviceCosts
from qsync_opt.costs_conversion import from_costs, to_costs
from qsync_opt.costs_schema import CostsDocument
from qsync_opt.files import load_costs, load_graph, write_atomically
from qsync_opt.graph import OperatorGraph
from qsync_opt.hosts import host_costs
from qsync_opt.measure.capture import capture
from qsync_opt.measure.clock import Clock, Effort
from qsync_opt.measure.measuring import MeasureProgress, TrainedModel, measure
from qsync_opt.measure.model_file import load_model, parse_sizes
from qsync_opt.measure.step import to_device
from qsync_opt.optimize.problem import AllocationProblem
from qsync_opt.plan import PrecisionPlan
from qsync_opt.simulate.replay import replay
from qsync_opt.strict_json import decode, encode
from tests.benchmarks.predictions import machine
from tests.benchmarks.replay_runs import (
    Measured,
    Runner,
    adjustable,
    from_first,
    gathered,
    held_out_plans,
    random_table,
    with_hosts_of_today,
)

RESULTS = Path(__file__).resolve().parent / "results"
MODELS = ("models/small_cnn.py:batch_size=128,width=32", "models/small_gpt.py:batch_size=32")

#: The goals on a GPU, for steps that take longer than `LONG_S`.
MEDIAN_GOAL, WORST_GOAL, MEMORY_GOAL, LONG_S = 0.02, 0.05, 0.02, 0.02


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.replays")
    parser.add_argument("models", nargs="*", default=MODELS, metavar="FILE[:KEY=VALUE,...]")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=1, help="of a CPU; default: %(default)s")
    parser.add_argument("--plans", type=int, default=30, help="in all; default: %(default)s")
    parser.add_argument("--seconds", type=float, default=2.0, help="of steps for each plan")
    parser.add_argument("--budget", type=float, default=0.04, help="seconds for each timing")
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument(
        "--measured",
        type=int,
        metavar="PERCENT",
        help="predict from what problems/measured holds at this share of an H200, in place of"
        " measuring: one rank, models that are there at the sizes that they have there",
    )
    parser.add_argument("--shares", help="percent of a GPU that each rank may use: 100,25")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="count the thread's own time: for one rank on a machine that is not alone",
    )
    parser.add_argument("--name", default="replays", help="of the files")
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="FOLDER")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    device = _join(options)
    rank = distributed.get_rank() if distributed.is_initialized() else 0
    data: dict[str, Any] = {
        "format": "qsync-opt/benchmark",
        "version": 1,
        "machine": machine(options.device),
        "device": options.device,
        "ranks": gathered(os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "100")),
        "backend": distributed.get_backend() if distributed.is_initialized() else "",
        "timer": "thread" if options.cpu_time else "wall",
        "optimizer": options.optimizer,
        "models": [],
    }
    try:
        for text in options.models:
            data["models"].append(_one_model(text, device, options))
            if rank == 0:  # so that what was measured is there if a later model fails
                options.output.mkdir(parents=True, exist_ok=True)
                raw = json.dumps(data, indent=1, allow_nan=False) + "\n"
                write_atomically(options.output / f"{options.name}.json", raw.encode())
                write_atomically(options.output / f"{options.name}.md", to_markdown(data).encode())
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()
    if rank == 0:
        sys.stdout.write(to_markdown(data))
    return 0


def _join(options: argparse.Namespace) -> torch.device:
    """The device of this process, and the group of its job if it is one of several ranks."""
    local, world = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if options.shares is not None:  # read when the device is first used
        os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = options.shares.split(",")[local]
    device = torch.device("cpu")
    backend = "gloo"
    if options.device == "cuda":
        count = torch.cuda.device_count()
        device = torch.device("cuda", local % count)
        torch.cuda.set_device(device)
        backend = "nccl" if count >= int(os.environ.get("LOCAL_WORLD_SIZE", world)) else "gloo"
    if world > 1:
        distributed.init_process_group(backend)
    return device


def _one_model(text: str, device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    path, _, settings = text.partition(":")
    sizes = parse_sizes([part for part in settings.split(",") if part])
    model, batch, loss = load_model(path, sizes)
    trained = TrainedModel(model=model.to(device), batch=to_device(batch, device), loss=loss)
    timer = time.thread_time if options.cpu_time else time.perf_counter
    clock = Clock(device, Effort(budget_s=options.budget), timer)
    begin = time.perf_counter()
    if options.measured is not None:
        kept = next(row for row in KEPT if row.file == path)
        graph = load_graph(FOLDER / kept.graph)
        before = load_costs(FOLDER / kept.costs(options.measured))
        own = with_hosts_of_today(graph, trained, before, clock)
    else:
        graph = capture(trained.model, trained.batch, loss, source=path, sizes=sizes)
        own = measure(
            graph,
            trained=trained,
            device=device,
            optimizer=options.optimizer,
            clock=clock,
            progress=_show,
        )
    measured_in_s = time.perf_counter() - begin
    texts = gathered(encode(from_costs(own)))
    kinds = [f"rank {rank}" for rank in range(len(texts))]
    costs = {
        kind: to_costs(decode(text, CostsDocument, kind))
        for kind, text in zip(kinds, texts, strict=True)
    }
    cluster = Cluster(kinds=tuple(ClusterKind(name=kind) for kind in kinds))
    problem = build_problem(graph, costs, random_table(graph, own, options.seed), cluster)
    plans: dict[str, PrecisionPlan] = from_first(
        held_out_plans(graph, problem, costs, options.plans, options.seed)
        if not distributed.is_initialized() or distributed.get_rank() == 0
        else None
    )
    own_kind = kinds[distributed.get_rank() if distributed.is_initialized() else 0]
    runner = Runner(graph, trained, options.optimizer, clock, options.seconds)
    reference = adjustable(graph, plans["all fp32"], own_kind)
    rows, first = [], None
    for name, plan in plans.items():
        drift = 1.0
        if device.type == "cpu":  # a GPU is not shared, and its clock is steady under load
            now = runner.measure(reference).step_s  # whether the machine has become slower
            first = now if first is None else first
            drift = now / first
        found = runner.measure(adjustable(graph, plan, own_kind))
        told = predict(graph, problem, costs, plan)
        rows.append(_row(name, told, found, drift))
        if own_kind == kinds[0]:
            sys.stderr.write(_line(rows[-1]) + "\n")
    return {
        "model": path,
        "sizes": {key: str(value) for key, value in sizes.items()},
        "operators": len(graph.operators),
        "measured_in_s": measured_in_s,
        "warnings": [text for row in costs.values() for text in row.warnings],
        "rows": rows,
        "summary": summary(rows),
    }


def predict(
    graph: OperatorGraph,
    problem: AllocationProblem,
    costs: Mapping[str, DeviceCosts],
    plan: PrecisionPlan,
) -> dict[str, float]:
    """What the replay says of a plan: its time, and the terms of the rank that is slowest alone."""
    # gloo hands on what it reduced by waiting for it on the host.
    waits = any(
        row.all_reduce is not None
        and row.all_reduce.backend == "gloo"
        and row.provenance.device_type == "cuda"
        for row in costs.values()
    )
    hosts = {
        kind: host_costs(graph, row, problem.precisions, waits=waits) for kind, row in costs.items()
    }
    told = replay(problem, plan, hosts=hosts)
    free = replay(problem, plan)
    slowest = max(told.kinds, key=lambda k: told.kinds[k].compute_s + told.kinds[k].cast_s)
    part = told.kinds[slowest]
    tasks, spent = part.tasks, part.end_s - part.start_s
    works = [str(type(part.tasks).WORKS[work]) for work in tasks.work.tolist()]
    by_work = {
        name: sum(s for w, s in zip(works, spent.tolist(), strict=True) if w.startswith(name))
        for name in ("forward", "backward", "optimizer")
    }
    fixed = next(d.fixed_bytes for d in problem.devices if d.name == slowest)
    return {
        "step_s": told.iteration_time_s,
        "without_hosts_s": free.iteration_time_s,
        "forward_s": by_work["forward"],
        "backward_s": by_work["backward"],
        "casts_s": part.cast_s,
        "optimizer_s": by_work["optimizer"],
        "host_s": float(tasks.launch_s[1:].sum()),
        "communication_s": told.communication_s,
        "waiting_s": max(kind.waiting_s for kind in told.kinds.values()),
        "peak_bytes": float(part.memory.peak_bytes - fixed),
    }


def _row(name: str, told: Mapping[str, float], found: Measured, drift: float) -> dict[str, Any]:
    row: dict[str, Any] = {
        "plan": name,
        "measured_s": found.step_s,
        "spread": found.spread,
        "predicted_s": told["step_s"],
        "error": told["step_s"] / found.step_s - 1,
        "drift": drift,
        "predicted": dict(told),
        "measured": {
            "forward_s": found.forward_s,
            "backward_s": found.backward_s,
            "host_s": found.host_s,
            "peak_bytes": found.peak_bytes,
        },
        "memory_error": told["peak_bytes"] / found.peak_bytes - 1 if found.peak_bytes else None,
        "wrong_term": None,
    }
    if found.forward_s:  # the terms can be told apart
        rest = found.step_s - found.forward_s - found.backward_s
        off = {
            "forward": told["forward_s"] - found.forward_s,
            "backward": told["backward_s"] - found.backward_s,
            "optimizer and gaps": told["step_s"] - told["forward_s"] - told["backward_s"] - rest,
        }
        worst = max(off, key=lambda term: abs(off[term]))
        row["wrong_term"] = worst
        row["wrong_by"] = off[worst] / found.step_s
    return row


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Median and worst error of all plans, and of those whose steps are long."""

    def of(chosen: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        errors = [abs(row["error"]) for row in chosen]
        steady = [abs((1 + row["error"]) * row["drift"] - 1) for row in chosen]
        worst = max(chosen, key=lambda row: abs(row["error"]), default=None)
        return {
            "plans": len(chosen),
            "median": statistics.median(errors) if errors else None,
            "worst": max(errors, default=None),
            "worst_plan": None if worst is None else worst["plan"],
            "median_without_drift": statistics.median(steady) if steady else None,
            "worst_without_drift": max(steady, default=None),
        }

    memory = [abs(row["memory_error"]) for row in rows if row["memory_error"] is not None]
    terms = [row["wrong_term"] for row in rows if row["wrong_term"] is not None]
    return {
        "all": of(rows),
        "long": of([row for row in rows if row["measured_s"] > LONG_S]),
        "memory_worst": max(memory, default=None),
        "wrong_term": statistics.mode(terms) if terms else None,
    }


def _line(row: Mapping[str, Any]) -> str:
    return (
        f"{row['plan']:12s} {1e3 * row['measured_s']:9.3f} ms"
        f"  predicted {1e3 * row['predicted_s']:9.3f} ms  {row['error']:+.1%}"
        f"  drift {row['drift']:.3f}  spread {row['spread']:.1%}"
    )


def _show(progress: MeasureProgress) -> None:
    if progress.done % 20 == 0:
        sys.stderr.write(f"{progress.done}/{progress.total} {progress.what}\n")


def to_markdown(data: Mapping[str, Any]) -> str:
    """The tables, with the machine above them."""
    ranks = data["ranks"]
    who = f"{len(ranks)} rank(s)"
    if data["device"] == "cuda":
        who += " at " + ", ".join(f"{share} %" for share in ranks)
    lines = [
        "# Replayed and measured steps of held-out plans",
        "",
        f"{data['device']}, {who} {data['backend']}, {data['optimizer']}, {data['timer']} time."
        f" Goals on a GPU, where a step takes more than {LONG_S * 1e3:.0f} ms: median error"
        f" {MEDIAN_GOAL:.0%}, worst {WORST_GOAL:.0%}; memory {MEMORY_GOAL:.0%}.",
        "",
        *(f"- {key}: {value}" for key, value in data["machine"].items()),
    ]
    for model in data["models"]:
        sizes = ", ".join(f"{key}={value}" for key, value in model["sizes"].items())
        lines += ["", f"## {model['model']} {sizes}".rstrip(), ""]
        lines += [
            "| steps | plans | median error | worst error | worst plan | median, drift taken out |"
            " worst, drift taken out |",
            "|---|---|---|---|---|---|---|",
        ]
        for name, label in (("all", "all"), ("long", f"above {LONG_S * 1e3:.0f} ms")):
            part = model["summary"][name]
            cells = [label, str(part["plans"]), *map(_percent, (part["median"], part["worst"]))]
            cells += [part["worst_plan"] or "-"]
            cells += map(_percent, (part["median_without_drift"], part["worst_without_drift"]))
            lines.append("| " + " | ".join(cells) + " |")
        told = model["summary"]
        lines += [
            "",
            f"{model['operators']} operators, measured in {model['measured_in_s']:.0f} s."
            f" Memory: worst {_percent(told['memory_worst'])}."
            f" The term that is off by most, most often: {told['wrong_term'] or '-'}.",
            "",
            "| plan | measured ms | predicted ms | error | without hosts | drift | spread |"
            " forward | backward | host | casts ms | network ms | memory | wrong term |",
            "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
            *map(_cells, model["rows"]),
        ]
    return "\n".join(lines) + "\n"


def _cells(row: Mapping[str, Any]) -> str:
    told, found = row["predicted"], row["measured"]

    def ratio(name: str) -> str:
        return _percent(told[name] / found[name] - 1) if found[name] and told[name] else "-"

    wrong = "-" if row["wrong_term"] is None else f"{row['wrong_term']} {row['wrong_by']:+.1%}"
    cells = (
        row["plan"],
        f"{1e3 * row['measured_s']:.3f}",
        f"{1e3 * row['predicted_s']:.3f}",
        f"{row['error']:+.1%}",
        f"{told['without_hosts_s'] / row['measured_s'] - 1:+.1%}",
        f"{row['drift']:.3f}",
        f"{row['spread']:.1%}",
        ratio("forward_s"),
        ratio("backward_s"),
        ratio("host_s"),
        f"{1e3 * told['casts_s']:.3f}",
        f"{1e3 * told['communication_s']:.3f}",
        _percent(row["memory_error"]),
        wrong,
    )
    return "| " + " | ".join(cells) + " |"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1%}"


if __name__ == "__main__":
    sys.exit(main())
