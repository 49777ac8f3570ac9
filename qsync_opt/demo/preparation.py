"""From a task to an allocation problem: capture, perturb, measure, build."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from qsync_opt import console
from qsync_opt.build import build_problem
from qsync_opt.costs import Cluster, ClusterKind, DeviceCosts
from qsync_opt.demo.devices import DemoMachine
from qsync_opt.demo.group import run_group
from qsync_opt.demo.lines import Lines
from qsync_opt.demo.tasks import DemoTask
from qsync_opt.files import load_costs, save_graph, save_perturbations, save_problem
from qsync_opt.graph import OperatorGraph
from qsync_opt.hosts import host_costs
from qsync_opt.measure.capture import capture
from qsync_opt.measure.model_file import load_model
from qsync_opt.measure.sensitivity import perturbations
from qsync_opt.measure.step import to_device
from qsync_opt.optimize.baselines import uniform_candidates
from qsync_opt.optimize.problem import AllocationProblem, DeviceKind
from qsync_opt.perturbation import PerturbationTable
from qsync_opt.precision import Precision
from qsync_opt.simulate.tasks import HostCosts


@dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """A problem, and what it was made of.

    Attributes:
        problem: held to the pace of the fastest uniform precision.
        graph_file: where the graph is.
        costs: device kind -> what was measured there.
        hosts: device kind -> what launching takes there.
    """

    problem: AllocationProblem
    graph_file: Path
    costs: Mapping[str, DeviceCosts]
    hosts: Mapping[str, HostCosts]


def prepare(machine: DemoMachine, task: DemoTask, folder: Path, lines: Lines) -> Prepared:
    """Everything up to the problem; its files are in `folder`."""
    with _one_thread():
        graph, table = _captured(machine, task, folder, lines)
    costs = _measured(machine, folder / "graph.json", folder, lines)
    with lines.step("build", "building the problem") as line:
        problem, told = _built(machine, task, graph, table, costs)
        save_problem(problem, folder / "problem.json")
        line.text = told
        line.facts = {"sha256": problem.sha256, "deadline_s": problem.deadline_s}
    hosts = {name: host_costs(graph, row, problem.precisions) for name, row in costs.items()}
    return Prepared(problem=problem, graph_file=folder / "graph.json", costs=costs, hosts=hosts)


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread of torch inside: for tensors this small, more wait longer than they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _captured(
    machine: DemoMachine, task: DemoTask, folder: Path, lines: Lines
) -> tuple[OperatorGraph, PerturbationTable]:
    device = torch.device(machine.device_type)
    with lines.step("capture", f"capturing a step of {task.model.name}") as line:
        with console.foreign_code():
            model, batch, loss = load_model(task.model, task.sizes)
        model, batch = model.to(device), to_device(batch, device)
        graph = capture(model, batch, loss, source=str(task.model), sizes=task.sizes)
        save_graph(graph, folder / "graph.json")
        flops = sum(row.forward_flops + row.backward_flops for row in graph.operators)
        line.text = (
            f"{len(graph.operators)} operators, {len(graph.adjustable)} with a choice,"
            f" {flops / 1e9:.2g} GFLOP a step"
        )
        line.facts = {"operators": len(graph.operators), "adjustable": len(graph.adjustable)}
    with lines.step("perturb", "computing what precisions do to the gradient") as line:
        table = perturbations(
            model,
            batch,
            graph,
            precisions=list(Precision),
            loss=loss,
            source=str(task.model),
            sizes=dict(task.sizes),
        )
        save_perturbations(table, folder / "perturbation.json")
        sums = np.where(np.isfinite(table.values), table.values, 0.0).sum(axis=0).tolist()
        totals = dict(zip(table.precisions, sums, strict=True))
        line.text = f"all in int8 adds {totals[Precision.INT8]:.3g} of gradient variance"
        line.text += f", all in bf16 {totals[Precision.BF16]:.3g}"
        line.facts = {str(precision): total for precision, total in totals.items()}
    return graph, table


def _measured(
    machine: DemoMachine, graph_file: Path, folder: Path, lines: Lines
) -> dict[str, DeviceCosts]:
    """Both kinds at the same time, as they will train, and all-reduces between them."""
    files = {device.kind: folder / f"costs-{device.kind}.json" for device in machine.devices}
    commands, environments = [], []
    for device in machine.devices:
        words = ["measure", str(graph_file), "-o", str(files[device.kind])]
        environment = {}
        if device.threads is not None:
            words += ["--threads", str(device.threads)]
            environment["OMP_NUM_THREADS"] = str(device.threads)
        if device.mps_percent is not None:
            environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(device.mps_percent)
        commands.append(words)
        environments.append(environment)
    with lines.step("measure", "measuring both device kinds") as line:
        run_group(commands, environments)
        costs = {kind: load_costs(path) for kind, path in files.items()}
        steps = {
            kind: {step.precision: step.forward_s + step.backward_s for step in row.steps}
            for kind, row in costs.items()
        }
        line.text = "a step alone: " + "; ".join(
            f"{kind} {_fastest(times)}" for kind, times in steps.items()
        )
        line.facts = {
            kind: {str(precision): time_s for precision, time_s in times.items()}
            for kind, times in steps.items()
        }
    return costs


def _fastest(times: Mapping[Precision, float]) -> str:
    text = f"{console.seconds(times[Precision.FP32])} in fp32"
    best = min(times, key=lambda precision: times[precision])
    return text if best is Precision.FP32 else f"{text}, {console.seconds(times[best])} in {best}"


def _built(
    machine: DemoMachine,
    task: DemoTask,
    graph: OperatorGraph,
    table: PerturbationTable,
    costs: Mapping[str, DeviceCosts],
) -> tuple[AllocationProblem, str]:
    """The problem at the pace of the fastest uniform precision, and what is said of it.

    On a CPU the weak kind is given less memory than all of fp32 takes: both kinds are the same
    processor, and where that is fastest in fp32 there would be nothing to decide.
    """
    kinds = tuple(ClusterKind(name=device.kind) for device in machine.devices)
    problem = build_problem(graph, costs, table, Cluster(kinds=kinds), name=task.words)
    buckets = console.counted(len(problem.buckets), "bucket")
    text = f"{len(problem.precisions)} precisions, {buckets}"
    if machine.device_type == "cpu":
        weak = problem.devices[1]
        budget, needed = _budget(problem, weak)
        kinds = (kinds[0], replace(kinds[1], memory_bytes=budget))
        problem = build_problem(graph, costs, table, Cluster(kinds=kinds), name=task.words)
        text += (
            f"; {weak.name} may use {console.size(budget)}"
            f" (all in fp32 takes {console.size(needed)})"
        )
    deadline_s = max(_fastest_uniform_s(problem, device) for device in problem.devices)
    problem = replace(problem, deadline_s=deadline_s)
    return problem, f"{text}; pace of the fastest uniform precision: {console.seconds(deadline_s)}"


def _budget(problem: AllocationProblem, device: DeviceKind) -> tuple[int, int]:
    """Half way between the least and the all-fp32 peak of uniform plans; and the latter."""
    peaks = {
        row.precision: row.evaluation.peak_memory_bytes
        for row in uniform_candidates(problem, device, float("inf"))
    }
    needed = peaks[Precision.FP32]
    return (needed + min(peaks.values())) // 2, needed


def _fastest_uniform_s(problem: AllocationProblem, device: DeviceKind) -> float:
    return min(
        row.evaluation.iteration_time_s
        for row in uniform_candidates(problem, device, float("inf"))
        if row.feasible
    )
