"""Predicted steps beside measured ones: `python -m tests.benchmarks.predictions`.

For every model the operators are measured alone, and the step of a plan is predicted from them
as `evaluate` does it. Then whole steps of the converted model are run, unprofiled: for every
uniform precision and for ten random mixed plans. Kept are both times, and the memory that the
step takes beyond what is always there (on a CPU: what is kept for backward, counted by hooks).
Prints a table and keeps it in `results/` with the machine.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qsync_opt.build import build_problem
from qsync_opt.costs import Cluster, ClusterKind, DeviceCosts
from qsync_opt.files import save_costs, save_graph, write_atomically
from qsync_opt.graph import OperatorGraph
from qsync_opt.measure.calls import tensors_in
from qsync_opt.measure.capture import capture
from qsync_opt.measure.clock import Clock, Effort, spread_of
from qsync_opt.measure.measuring import (
    MeasureProgress,
    TrainedModel,
    measure,
)
from qsync_opt.measure.memory import saved_storages
from qsync_opt.measure.model_file import load_model, parse_sizes
from qsync_opt.measure.provenance import processor_name
from qsync_opt.measure.step import split_batch, to_device
from qsync_opt.measure.uniform import (
    Step,
    converted,
    run_loss,
    step_of,
    uniform_plan,
    warmed_up,
)
from qsync_opt.optimize.arrays import IntArray
from qsync_opt.optimize.evaluate import DeviceEvaluation, evaluate_device, follower_columns
from qsync_opt.optimize.problem import AllocationProblem
from qsync_opt.perturbation import PerturbationProvenance, PerturbationTable
from qsync_opt.precision import Precision
from qsync_opt.runtime.availability import available_precisions, supported_precisions

RESULTS = Path(__file__).resolve().parent / "results"
MODELS = ("models/small_cnn.py", "models/small_gpt.py")
MIXED_PLANS = 10
KIND = "device"

#: The goals: share by which a prediction may be off.
TIME_GOAL = {"cpu": 0.08, "cuda": 0.03}
MEMORY_GOAL = 0.02

#: Turns of a plan and of fp32, which shows whether the machine has become slower since.
_TURNS = 4

Plan = Mapping[str, Precision]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.predictions")
    parser.add_argument("models", nargs="*", default=MODELS, metavar="FILE[:KEY=VALUE,...]")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=1, help="of a CPU; default: %(default)s")
    parser.add_argument("--plans", type=int, default=MIXED_PLANS, help="random mixed plans")
    parser.add_argument("--seconds", type=float, default=2.0, help="of steps for each plan")
    parser.add_argument("--budget", type=float, default=0.04, help="seconds for each timing")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="count the thread's own time: for one thread on a machine that is not alone",
    )
    parser.add_argument("--keep", action="store_true", help="keep graphs and costs as well")
    parser.add_argument("--name", default="predictions", help="of the files")
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="FOLDER")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    data: dict[str, Any] = {
        "format": "qsync-opt/benchmark",
        "version": 1,
        "machine": machine(options.device),
        "device": options.device,
        "threads": options.threads,
        "timer": "thread" if options.cpu_time else "wall",
        "models": [],
    }
    options.output.mkdir(parents=True, exist_ok=True)
    for text in options.models:
        data["models"].append(_one_model(text, options))
        raw = json.dumps(data, indent=1, allow_nan=False) + "\n"
        write_atomically(options.output / f"{options.name}.json", raw.encode())
        write_atomically(options.output / f"{options.name}.md", to_markdown(data).encode())
    sys.stdout.write(to_markdown(data))
    return 0


def machine(device: str) -> dict[str, str]:
    """What a benchmark ran on."""
    row: dict[str, str] = {
        "cpu": processor_name(),
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "date": datetime.now(timezone.utc).date().isoformat(),
    }
    if device == "cuda":
        row |= {"gpu": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}
    return row


def _one_model(text: str, options: argparse.Namespace) -> dict[str, Any]:
    path, _, settings = text.partition(":")
    sizes = parse_sizes([part for part in settings.split(",") if part])
    device = torch.device(options.device)
    model, batch, loss = load_model(path, sizes)
    trained = TrainedModel(model=model.to(device), batch=to_device(batch, device), loss=loss)
    graph = capture(trained.model, trained.batch, loss, source=path, sizes=sizes)
    clock = Clock(
        device,
        Effort(budget_s=options.budget),
        time.thread_time if options.cpu_time else time.perf_counter,
    )
    begin = time.perf_counter()
    costs = measure(graph, trained=trained, device=device, clock=clock, progress=_show)
    elapsed_s = time.perf_counter() - begin
    if options.keep:
        stem = f"{options.name}-{Path(path).stem}"
        save_graph(graph, options.output / f"{stem}.graph.json.gz")
        save_costs(costs, options.output / f"{stem}.costs.json.gz")
    problem = single_problem(graph, costs)
    plans = dict(all_plans(graph, costs, options.plans, options.seed))
    rows = measure_plans(graph, trained, problem, costs, plans, clock, options.seconds)
    return {
        "model": path,
        "sizes": {key: str(value) for key, value in sizes.items()},
        "operators": len(graph.operators),
        "signatures": len(graph.signatures),
        "measured_in_s": elapsed_s,
        "warnings": list(costs.warnings),
        "rows": rows,
        "worst": {
            "time": max((abs(row["time_ratio"] - 1) for row in rows), default=0.0),
            "time_without_drift": max(
                (abs(row["time_ratio"] * row["drift"] - 1) for row in rows), default=0.0
            ),
            "memory": max((abs(row["memory_ratio"] - 1) for row in rows), default=0.0),
        },
    }


def single_problem(graph: OperatorGraph, costs: DeviceCosts) -> AllocationProblem:
    """One worker of the measured kind; perturbations play no part."""
    cluster = Cluster(kinds=(ClusterKind(name=KIND),))
    return build_problem(graph, {KIND: costs}, empty_table(graph, costs), cluster)


def empty_table(graph: OperatorGraph, costs: DeviceCosts) -> PerturbationTable:
    """Perturbations that are all 0."""
    names = tuple(row.name for row in graph.operators)
    return PerturbationTable(
        graph=graph.sha256,
        operators=names,
        precisions=costs.precisions,
        values=np.zeros((len(names), len(costs.precisions))),
        method="none",
        provenance=PerturbationProvenance(
            model="",
            sizes={},
            batches=1,
            draws=1,
            rounding="nearest",
            seed=0,
            elapsed_s=0.0,
            device="",
            versions={},
            date="",
        ),
    )


def all_plans(
    graph: OperatorGraph, costs: DeviceCosts, mixed: int, seed: int
) -> Iterator[tuple[str, Plan]]:
    """Every uniform plan, then random ones."""
    available = available_precisions(costs.provenance.device_type)
    for precision in costs.precisions:
        yield f"all {precision}", uniform_plan(graph, precision, available)
    generator = random.Random(seed)
    for number in range(mixed):
        plan: dict[str, Precision] = {}
        for index in graph.adjustable:
            row = graph.operators[index]
            has = supported_precisions(row.kind) & set(costs.precisions)
            plan[row.name] = generator.choice([p for p in Precision if p in has])
        for group in graph.groups:
            for index in group.operators:
                plan[graph.operators[index].name] = plan[graph.operators[group.operators[0]].name]
        yield f"mixed {number}", plan


def predict(graph: OperatorGraph, problem: AllocationProblem, plan: Plan) -> DeviceEvaluation:
    """What the problem says of a plan, without the optimizer's step."""
    return evaluate_device(problem, problem.devices[0], columns_of(graph, problem, plan))


def columns_of(graph: OperatorGraph, problem: AllocationProblem, plan: Plan) -> IntArray:
    """The precision of every operator, as its column in the problem."""
    columns = [
        problem.precisions.index(plan.get(row.name, Precision.FP32)) for row in graph.operators
    ]
    return follower_columns(problem, np.array(columns, dtype=np.int64))


def measure_plans(
    graph: OperatorGraph,
    trained: TrainedModel,
    problem: AllocationProblem,
    costs: DeviceCosts,
    plans: Mapping[str, Plan],
    clock: Clock,
    seconds: float,
    turns: int = _TURNS,
) -> list[dict[str, Any]]:
    """Predicted and measured numbers of every plan.

    Args:
        graph: of the model.
        trained: the model and its batch.
        problem: of one worker; see `single_problem`.
        costs: what the problem was made of.
        plans: name -> plan.
        clock: of the device.
        seconds: of steps for each plan.
        turns: of each plan and of fp32.
    """
    rows = []
    step = step_of(trained.model, trained.batch, trained.loss, clock)
    kind = problem.devices[0]
    reference = uniform_plan(graph, Precision.FP32, frozenset({Precision.FP32}))
    before = costs.step_of[Precision.FP32]
    for name, plan in plans.items():
        told = predict(graph, problem, plan)
        times, reference_s = _alternate(graph, trained, plan, reference, step, seconds, turns)
        with converted(trained.model, graph, plan):
            memory = _memory(trained, clock.device)
        forward_s, backward_s, host_s = (
            statistics.median(column) for column in zip(*times, strict=True)
        )
        told_s = told.compute_s - kind.optimizer_s
        told_bytes = told.saved_bytes
        if clock.device.type == "cuda":
            told_bytes = told.peak_memory_bytes - kind.fixed_bytes
        row = {
            "plan": name,
            "forward_s": forward_s,
            "backward_s": backward_s,
            "host_s": host_s,
            "spread": spread_of([forward + backward for forward, backward, _ in times]),
            "predicted_forward_s": told.forward_s + told.cast_forward_s,
            "predicted_backward_s": told.backward_s + told.cast_backward_s,
            "casts_s": told.cast_forward_s + told.cast_backward_s,
            "time_ratio": told_s / (forward_s + backward_s),
            "drift": reference_s / (before.forward_s + before.backward_s),
            "memory_bytes": memory,
            "predicted_memory_bytes": told_bytes,
            "memory_ratio": told_bytes / memory,
        }
        rows.append(row)
        sys.stderr.write(
            f"{name:12s} {1e3 * (forward_s + backward_s):9.3f} ms"
            f"  forward {row['predicted_forward_s'] / forward_s:.3f}"
            f"  backward {row['predicted_backward_s'] / backward_s:.3f}"
            f"  step {row['time_ratio']:.3f} x drift {row['drift']:.3f}"
            f" = {row['time_ratio'] * row['drift']:.3f} (spread {row['spread']:.2f})"
            f"  memory {memory:,} {row['memory_ratio']:.4f}\n"
        )
    return rows


def _alternate(
    graph: OperatorGraph,
    trained: TrainedModel,
    plan: Plan,
    reference: Plan,
    step: Step,
    seconds: float,
    turns: int,
) -> tuple[list[tuple[float, float, float]], float]:
    """Steps of a plan, and the median seconds of fp32 steps run in between."""
    rows: list[tuple[float, float, float]] = []
    references = []
    for _ in range(turns):
        with converted(trained.model, graph, plan):
            rows += _times(step, seconds / 2 / turns)
        with converted(trained.model, graph, reference):
            references += _times(step, seconds / 2 / turns)
    return rows, statistics.median(forward + backward for forward, backward, _ in references)


def _times(step: Step, seconds: float) -> list[tuple[float, float, float]]:
    ahead_s = warmed_up(step)
    rows: list[tuple[float, float, float]] = []
    end = time.perf_counter() + seconds
    while len(rows) < 3 or time.perf_counter() < end:
        rows.append(step(ahead_s))
    return rows


def _memory(trained: TrainedModel, device: torch.device) -> int:
    """Bytes of a step beyond what is always there.

    On a GPU the largest allocation of a step whose gradients are there before, as DDP's are; on
    a CPU what is kept for backward.
    """
    inputs, target = split_batch(trained.batch, trained.loss)
    model = trained.model

    def forward() -> torch.Tensor:
        return run_loss(model, inputs, target, trained.loss)

    if device.type == "cuda":
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        gc.collect()
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        forward().backward()  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    value, saved = saved_storages(forward)
    there = {
        tensor.untyped_storage().data_ptr()
        for tensor in (*model.parameters(), *model.buffers(), *tensors_in(trained.batch))
    }
    del value
    return sum(size for key, size in saved.items() if key not in there)


def to_markdown(data: Mapping[str, Any]) -> str:
    """The table, with the machine above it."""
    goal = TIME_GOAL[data["device"]]
    lines = [
        "# Predicted and measured steps",
        "",
        f"{data['device']}, {data['threads']} threads, {data['timer']} time. Goals: time within"
        f" {goal:.0%}, memory within {MEMORY_GOAL:.0%}.",
        "",
    ]
    lines += [f"- {key}: {value}" for key, value in data["machine"].items()]
    for model in data["models"]:
        sizes = ", ".join(f"{key}={value}" for key, value in model["sizes"].items())
        lines += [
            "",
            f"## {model['model']} {sizes}".rstrip(),
            "",
            f"{model['operators']} operators, {model['signatures']} different, measured in"
            f" {model['measured_in_s']:.0f} s. Worst: time {model['worst']['time']:.1%} (with the"
            f" drift of the machine taken out {model['worst']['time_without_drift']:.1%}), memory"
            f" {model['worst']['memory']:.1%}.",
            "",
            "| plan | measured ms | predicted ms | ratio | drift | ratio x drift | forward |"
            " backward | spread | memory MiB | predicted MiB | ratio |",
            "|---|---|---|---|---|---|---|---|---|---|---|---|",
        ]
        for row in model["rows"]:
            measured = row["forward_s"] + row["backward_s"]
            cells = (
                row["plan"],
                f"{1e3 * measured:.3f}",
                f"{1e3 * measured * row['time_ratio']:.3f}",
                f"{row['time_ratio']:.3f}",
                f"{row['drift']:.3f}",
                f"{row['time_ratio'] * row['drift']:.3f}",
                f"{row['predicted_forward_s'] / row['forward_s']:.3f}",
                f"{row['predicted_backward_s'] / row['backward_s']:.3f}",
                f"{row['spread']:.2f}",
                f"{row['memory_bytes'] / 2**20:.3f}",
                f"{row['predicted_memory_bytes'] / 2**20:.3f}",
                f"{row['memory_ratio']:.4f}",
            )
            lines.append("| " + " | ".join(cells) + " |")
        lines += [f"\nwarning: {text}" for text in model["warnings"]]
    return "\n".join(lines) + "\n"


def _show(progress: MeasureProgress) -> None:
    if progress.done % 25 == 0:
        sys.stderr.write(f"{progress.done} of {progress.total}: {progress.what}\n")


if __name__ == "__main__":
    sys.exit(main())
