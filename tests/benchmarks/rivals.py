"""Plans and their rivals on unequal ranks, in one run: `python -m tests.benchmarks.rivals`.

Every rank measures its own costs, rank 0 makes the problem of them and solves it, and then the
same job is trained with each method in turn: the exact and the greedy plan, uniform precisions,
torch.autocast, and fp32 with uneven shares. Kept are throughput, memory, waiting and the
perturbation of each.

    # two GPUs, the second one slowed down; or one GPU that two ranks share
    nvidia-cuda-mps-control -d
    python -m tests.benchmarks.rivals --device cuda --ranks strong:1,weak:1:mps=25 MODEL
    echo quit | nvidia-cuda-mps-control
    # two processes on a CPU, one with three times the samples of the other
    python -m tests.benchmarks.rivals --ranks strong:1:threads=1,weak:1:threads=1 \\
        --shares strong=0.25,weak=0.75 models/small_gpt.py

Under torchrun (`--nproc-per-node 2`) the same options say which rank is what. Ranks that share
a GPU reduce over gloo, because NCCL refuses them. `--steps` are those of a turn; methods take
turns, so that a machine that becomes slower slows all of them.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from qsync_opt.build import build_problem
from qsync_opt.costs import Cluster, ClusterKind
from qsync_opt.errors import ParameterError, QsyncError
from qsync_opt.files import (
    load_costs,
    load_graph,
    load_problem,
    save_costs,
    save_graph,
    save_problem,
    write_atomically,
)
from qsync_opt.graph import OperatorGraph
from qsync_opt.measure.capture import capture
from qsync_opt.measure.clock import Clock, Effort
from qsync_opt.measure.measuring import TrainedModel, measure
from qsync_opt.measure.model_file import load_model, parse_sizes
from qsync_opt.measure.sensitivity import perturbations
from qsync_opt.measure.step import Loss, to_device
from qsync_opt.optimize.problem import AllocationProblem
from qsync_opt.precision import Precision
from qsync_opt.runtime.distributed import Ranks, joined
from qsync_opt.runtime.launch import LocalRanks, launch, parse_ranks
from qsync_opt.runtime.parameters import TrainParameters
from qsync_opt.runtime.trainer import train
from tests.benchmarks.predictions import machine
from tests.benchmarks.rival_methods import all_methods, paced_by_uniform, solve_plans
from tests.benchmarks.rival_tables import to_markdown, to_row

RESULTS = Path(__file__).resolve().parent / "results"
MODELS = ("models/small_cnn.py", "models/small_gpt.py")

#: First steps of a turn that do not count: kernels are chosen, allocators fill.
_WARM_UP = 4


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    options = _options(words)
    groups = parse_ranks(options.ranks)
    if "RANK" not in os.environ:
        return launch(groups, words, None, module="tests.benchmarks.rivals")
    everyone = [group for group in groups for _ in range(group.count)]
    rank = int(os.environ["RANK"])
    if len(everyone) != int(os.environ["WORLD_SIZE"]):
        raise ParameterError("ranks", "must be as many as were started", options.ranks)
    own = everyone[rank]
    os.environ.update(own.environment())  # read when CUDA starts; torchrun has not set it
    device = _device(options, own)
    with joined(device) as ranks:
        models = [_one_model(text, ranks, everyone, options) for text in options.models]
        shown = machine(options.device)
    if rank == 0:
        data = {
            "format": "qsync-opt/benchmark",
            "version": 1,
            "machine": shown,
            "ranks": options.ranks,
            "shares": options.shares,
            "models": models,
        }
        options.output.mkdir(parents=True, exist_ok=True)
        target = options.output / options.name
        raw = json.dumps(data, indent=1, allow_nan=False) + "\n"
        write_atomically(target.with_suffix(".json"), raw.encode())
        write_atomically(target.with_suffix(".md"), to_markdown(data).encode())
        sys.stdout.write(to_markdown(data))
    return 0


def _options(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.rivals")
    parser.add_argument("models", nargs="*", default=MODELS, metavar="FILE[:KEY=VALUE,...]")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--ranks", default="strong:1:threads=1,weak:1:threads=1")
    parser.add_argument("--shares", metavar="KIND=X,...", help="of the batch, for one worker")
    parser.add_argument("--memory-gb", metavar="KIND=X,...", help="that a worker may take")
    parser.add_argument("--precisions", metavar="A,B,...", help="default: all there are")
    parser.add_argument("--methods", metavar="A,B,...", help="default: all there are")
    parser.add_argument("--steps", type=int, default=24, help="of a turn; default: %(default)s")
    parser.add_argument("--turns", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--samples", type=int, default=8, help="for the indicator")
    parser.add_argument("--budget", type=float, default=0.02, help="seconds for each timing")
    parser.add_argument("--time-limit", type=float, default=60.0, help="of a solve, seconds")
    parser.add_argument("--name", default="rivals", help="of the files")
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--kind", help=argparse.SUPPRESS)  # of the launcher
    return parser.parse_args(words)


def _device(options: argparse.Namespace, own: LocalRanks) -> torch.device:
    if options.device == "cpu":
        torch.set_num_threads(own.threads or 1)
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    most = _numbers(options.memory_gb).get(own.kind)
    if most is not None:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, most * 1e9 / total), device)
    return device


def _numbers(text: str | None) -> dict[str, float]:
    pairs = [word.partition("=") for word in (text or "").split(",") if word]
    return {key: float(value) for key, _, value in pairs}


def _one_model(
    text: str, ranks: Ranks, everyone: Sequence[LocalRanks], options: argparse.Namespace
) -> dict[str, Any] | None:
    """Measure, solve and train; the rows on rank 0."""
    path, _, settings = text.partition(":")
    sizes = parse_sizes([part for part in settings.split(",") if part])
    model, batch, loss = load_model(path, sizes)
    model.to(ranks.device)
    batch = to_device(batch, ranks.device)
    begin = time.perf_counter()
    graph, problem, solved = _solved(path, sizes, model, batch, loss, ranks, everyone, options)
    _say(ranks, f"{path}: measured and solved in {time.perf_counter() - begin:.0f} s")
    methods = all_methods(problem, graph, solved, ranks.device)
    wanted = None if options.methods is None else options.methods.split(",")
    names = [name for name in methods if wanted is None or name in wanted]
    start = copy.deepcopy(model.state_dict())
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for _ in range(options.turns):
        for name in names:
            model.load_state_dict(start)
            row = _turn(name, methods[name], model, batch, loss, graph, problem, ranks, options)
            runs[name].append(row)
            _say(ranks, f"{name:16s} {1e3 * row.get('step_s', 0.0):9.2f} ms {row['failure']}")
    if ranks.rank:
        return None
    rows = [to_row(name, methods[name], runs[name], problem) for name in names]
    for row in rows:
        if options.shares is not None or row["method"] == "batch sizing":
            row["predicted_s"] = None  # costs are those of the batch that was captured
    return {
        "model": path,
        "sizes": {key: str(value) for key, value in sizes.items()},
        "operators": len(graph.operators),
        "solves": solved["facts"],
        "rows": rows,
    }


def _solved(
    path: str,
    sizes: dict[str, object],
    model: nn.Module,
    batch: Any,
    loss: Loss | None,
    ranks: Ranks,
    everyone: Sequence[LocalRanks],
    options: argparse.Namespace,
) -> tuple[OperatorGraph, AllocationProblem, dict[str, Any]]:
    """The graph, the problem of what all ranks measured, and its plans, on all ranks."""
    with TemporaryDirectory() as place:
        folder = Path(place)

        def shared(name: str, make: Callable[[], object]) -> Path:
            """What rank 0 writes into a file, in a file on every rank."""
            if ranks.rank == 0:
                make()
            raw = (folder / name).read_bytes() if ranks.rank == 0 else b""
            (folder / name).write_bytes(ranks.broadcast_bytes(raw))
            return folder / name

        graph = load_graph(
            shared(
                "graph.json",
                lambda: save_graph(
                    capture(model, batch, loss, source=path, sizes=sizes), folder / "graph.json"
                ),
            )
        )
        chosen = None
        if options.precisions is not None:
            chosen = [Precision(word) for word in options.precisions.split(",")]
        costs = measure(
            graph,
            trained=TrainedModel(model=model, batch=batch, loss=loss),
            device=ranks.device,
            precisions=chosen,
            clock=Clock(ranks.device, Effort(budget_s=options.budget)),
        )
        save_costs(costs, folder / "own.json")
        all_costs = ranks.gather_bytes((folder / "own.json").read_bytes())
        answer: dict[str, Any] = {}

        def make() -> None:
            kinds = list(dict.fromkeys(one.kind for one in everyone))
            found = {}
            for kind in kinds:
                number = next(n for n, one in enumerate(everyone) if one.kind == kind)
                (folder / "kind.json").write_bytes(all_costs[number])
                found[kind] = load_costs(folder / "kind.json")
            few = {**sizes, "batch_size": options.samples}
            table = perturbations(
                model,
                to_device(load_model(path, few)[1], ranks.device),
                graph,
                loss=loss,
                precisions=tuple(
                    dict.fromkeys(p for row in found.values() for p in row.precisions)
                ),
            )
            share, memory = _numbers(options.shares), _numbers(options.memory_gb)
            cluster = Cluster(
                kinds=tuple(
                    ClusterKind(
                        name=kind,
                        workers=sum(one.kind == kind for one in everyone),
                        batch_share=share.get(kind),
                        memory_bytes=int(memory[kind] * 1e9) if kind in memory else None,
                    )
                    for kind in kinds
                )
            )
            problem = build_problem(graph, found, table, cluster)
            problem = paced_by_uniform(problem, graph, ranks.device)
            save_problem(problem, folder / "problem.json")
            answer.update(solve_plans(problem, options.time_limit))

        problem = load_problem(shared("problem.json", make))
        text = ranks.broadcast_bytes(json.dumps(answer).encode())
        return graph, problem, json.loads(text)


def _turn(
    name: str,
    method: Mapping[str, Any],
    model: nn.Module,
    batch: Any,
    loss: Loss | None,
    graph: OperatorGraph,
    problem: AllocationProblem,
    ranks: Ranks,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Train for some steps with a method; what all ranks say of it."""
    kind = [group.kind for group in parse_ranks(options.ranks) for _ in range(group.count)]
    is_cuda = ranks.device.type == "cuda"
    if is_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(ranks.device)
    given = dict(method["options"])
    if "batch_sizing" not in given and options.shares is not None:
        given["shares"] = _numbers(options.shares)
    mine: dict[str, Any] = {"failure": ""}
    try:
        result = train(
            model,
            batch,
            loss,
            parameters=TrainParameters(steps=options.steps, **given),
            plan=method["plan"],
            kind=kind[ranks.rank],
            problem=problem if method["plan"] is not None else None,
            graph=graph,
        )
        rows = result.metrics[_WARM_UP:]
        mine |= {
            "step_s": statistics.median(row.step_s for row in rows),
            "wait": sum(row.wait_s for row in rows) / sum(row.step_s for row in rows),
            "memory_bytes": rows[-1].memory_bytes if is_cuda else None,
            "samples": rows[-1].samples,
            "loss": rows[-1].loss if math.isfinite(rows[-1].loss) else None,
            "skipped": sum(row.skipped for row in result.metrics),
        }
    except QsyncError as error:
        mine["failure"] = str(error)
    told = [json.loads(raw) for raw in ranks.gather_bytes(json.dumps(mine).encode())]
    failures = [row["failure"] for row in told if row["failure"]]
    if failures:
        return {"failure": failures[0]}
    return {
        "failure": "",
        "step_s": max(row["step_s"] for row in told),
        "wait": [row["wait"] for row in told],
        "memory_bytes": [row["memory_bytes"] for row in told],
        "samples": [row["samples"] for row in told],
        "loss": _mean_loss(told),
        "skipped": max(row["skipped"] for row in told),
    }


def _mean_loss(told: Sequence[Mapping[str, Any]]) -> float | None:
    """Of all samples; None where a rank's is not a number."""
    if any(row["loss"] is None for row in told):
        return None
    samples = sum(row["samples"] for row in told)
    return float(sum(row["loss"] * row["samples"] for row in told) / samples)


def _say(ranks: Ranks, text: str) -> None:
    if ranks.rank == 0:
        sys.stderr.write(text.rstrip() + "\n")
        sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
