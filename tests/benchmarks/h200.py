"""Everything that the measured instances need, from one GPU: `python -m tests.benchmarks.h200`.

For each model: one capture, costs at 100 %, 25 % and 12 % of the multiprocessors (by NVIDIA's
MPS daemon, which is started for it), perturbations, and predicted beside measured steps. Every
share of every model is a process of its own that leaves its files in `problems/measured/` and
its report in `results/`; what is there already is not measured again, and an interrupted
measurement goes on where it was. `--pack` keeps a tar file of it all up to date.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tarfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from problems.measured import (
    FOLDER,
    MODELS,
    SHARES,
    STRONG,
    MeasuredModel,
    is_there,
    measured_problem,
)
from qsync_opt.cost_commands import notebook_beside
from qsync_opt.costs import DeviceCosts
from qsync_opt.device_tables import DeviceTables
from qsync_opt.errors import CaptureError, MeasureError
from qsync_opt.files import (
    load_costs,
    load_graph,
    save_costs,
    save_graph,
    save_perturbations,
    save_problem,
    write_atomically,
)
from qsync_opt.graph import OperatorGraph
from qsync_opt.measure.capture import capture
from qsync_opt.measure.clock import Clock, Effort
from qsync_opt.measure.measuring import TrainedModel, measure
from qsync_opt.measure.model_file import further_batches, load_model, parse_sizes
from qsync_opt.measure.sensitivity import perturbations
from qsync_opt.measure.step import to_device
from qsync_opt.measure.uniform import converted, step_of, uniform_plan, warmed_up
from qsync_opt.runtime.availability import available_precisions
from tests.benchmarks import predictions

ROOT = Path(__file__).resolve().parents[2]
BY_NAME = {model.name: model for model in MODELS}
WHOLE = 100
OPTIMIZER = "adamw"

#: Environment variable of MPS: percentage of the multiprocessors that a process may use.
SHARE_VARIABLE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"

#: Seconds of one timing; see `clock.Effort`.
BUDGET_S = 0.02

#: Batches of the perturbations; each smaller divisor of the batch is tried where memory is short.
BATCHES, DIVISORS = 2, (1, 2, 4, 8)

#: A square product whose rate shows that a share of the multiprocessors holds.
_PROBE_WIDTH = 4096

#: By how much its rate may exceed the share, because fewer multiprocessors clock higher.
_MOST_OF_SHARE = 1.5

#: Seconds between two looks at a running measurement.
_LOOK_S = 10.0

_PROFILED_ROWS = 18


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.h200")
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(BY_NAME))
    parser.add_argument("--shares", default="100,25,12", help="default: %(default)s")
    parser.add_argument("--plans", type=int, default=predictions.MIXED_PLANS)
    parser.add_argument("--limit", type=float, default=560.0, help="seconds for all of it")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the measured files")
    parser.add_argument("--results", type=Path, default=predictions.RESULTS)
    parser.add_argument("--pack", type=Path, metavar="FILE.tar.gz")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: a trial")
    parser.add_argument("--set", action="append", default=[], help="sizes, for a trial")
    parser.add_argument("--one", type=int, metavar="SHARE", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    for folder in (options.folder, options.results):
        folder.mkdir(parents=True, exist_ok=True)
    if options.one is not None:
        return _Session(BY_NAME[options.models[0]], options.one, options).run()
    return _drive(options, list(sys.argv[1:] if argv is None else argv))


# One process for each model and share


def _drive(options: argparse.Namespace, words: list[str]) -> int:
    deadline = time.monotonic() + options.limit
    shares = [int(share) for share in options.shares.split(",")]
    failed = 0
    if options.device == "cuda":
        _run([sys.executable, "-m", "qsync_opt.kernels.build"], deadline, options)
    jobs = [(name, share) for name in options.models or BY_NAME for share in shares]
    plain = [word for word in words if word not in BY_NAME]
    _pack(options)
    for name, share in jobs:
        model = BY_NAME[name]
        if _is_done(model, share, options):
            _say(f"{name} at {share} %: is there")
            continue
        if time.monotonic() > deadline - 30:
            _say(f"{name} at {share} %: no time left")
            failed = 1
            continue
        command = [sys.executable, "-m", "tests.benchmarks.h200", name, "--one", str(share), *plain]
        begin = time.monotonic()
        try:
            with _limited_to(share, options.device):
                code = _run(command, deadline, options, share)
        except (OSError, subprocess.CalledProcessError) as error:
            _say(f"no share of a GPU: {error}")
            code = 2
        failed |= code != 0
        _say(f"{name} at {share} %: {time.monotonic() - begin:.0f} s, exit code {code}\n")
    return int(failed)


def _is_done(model: MeasuredModel, share: int, options: argparse.Namespace) -> bool:
    names = [model.costs(share)]
    if share == WHOLE:
        names += [model.graph, model.perturbations]
    report = _read(options.results / f"{_stem(model, share)}.json")
    return "seconds" in report and all((options.folder / name).is_file() for name in names)


def _run(
    command: list[str], deadline: float, options: argparse.Namespace, share: int = WHOLE
) -> int:
    """Run a process until the deadline, packing what it leaves now and then."""
    # Gloo carries what DDP's constructor exchanges, and has to be told where there is no network.
    environment = {"GLOO_SOCKET_IFNAME": "lo", **os.environ, "PYTHONUNBUFFERED": "1"}
    environment.pop(SHARE_VARIABLE, None)
    if share < WHOLE:
        environment[SHARE_VARIABLE] = str(share)
    process = subprocess.Popen(command, env=environment, cwd=ROOT)
    while True:
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=min(_LOOK_S, max(0.1, deadline - time.monotonic())))
        _pack(options)
        if process.returncode is not None:
            return process.returncode
        if time.monotonic() > deadline:
            process.kill()
            process.wait()


@contextmanager
def _limited_to(share: int, device: str) -> Iterator[None]:
    """The MPS daemon, where a share of the GPU is wanted."""
    if share >= WHOLE or device != "cuda":
        yield
        return
    subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True)
    try:
        yield
    finally:
        subprocess.run(["nvidia-cuda-mps-control"], input=b"quit\n", check=False)


def _pack(options: argparse.Namespace) -> None:
    if options.pack is None:
        return
    options.pack.parent.mkdir(parents=True, exist_ok=True)
    temporary = options.pack.with_name(options.pack.name + ".tmp")
    with tarfile.open(temporary, "w:gz") as archive:
        for path in sorted(options.folder.iterdir()):
            archive.add(path, f"problems/measured/{path.name}")
        for path in sorted(options.results.glob("h200-*")):
            archive.add(path, f"tests/benchmarks/results/{path.name}")
        for name in (f"{model.name}-{STRONG}-{share}" for model in MODELS for share in SHARES):
            path = options.folder.parent / f"{name}.json.gz"
            if path.is_file():
                archive.add(path, f"problems/{path.name}")
    os.replace(temporary, options.pack)


# What a process does


class _Session:
    """One share of one model, measured in this process."""

    def __init__(self, model: MeasuredModel, share: int, options: argparse.Namespace) -> None:
        self._model, self._share, self._options = model, share, options
        self._device = torch.device("cuda:0" if options.device == "cuda" else "cpu")
        self._folder: Path = options.folder
        self._clock = Clock(self._device, Effort(budget_s=BUDGET_S))
        self._seconds: dict[str, float] = {}
        self._sizes = dict(model.sizes) | parse_sizes(options.set)

    def run(self) -> int:
        """Measure; returns the exit code."""
        report: dict[str, Any] = {
            "format": "qsync-opt/benchmark",
            "version": 1,
            "model": self._model.file,
            "sizes": {key: str(value) for key, value in self._sizes.items()},
            "share": self._share,
            "machine": predictions.machine(self._options.device),
        }
        if self._device.type == "cuda":
            report["gpu"] = self._gpu()
        with self._taking("build"):
            self._trained = self._build()
        graph = self._graph()
        costs = self._costs(graph)
        report |= {
            "coverage": graph.coverage.share,
            "operators": len(graph.operators),
            "signatures": len(graph.signatures),
            "unavailable": [
                f"{row.signature} at {row.precision}: {row.reason}" for row in costs.unavailable
            ],
            "warnings": list(costs.warnings),
            "uniform": list(self._uniform(graph, costs)),
        }
        _say(f"coverage {graph.coverage.share:.1%}; warnings: {list(costs.warnings)}")
        self._write(report)
        if self._share == WHOLE:
            self._perturbations(graph)
            report["plans"] = self._plans(graph, costs)
            self._write(report)
            report["kinds"] = self._kinds(graph, costs)
            report["profiles"] = self._profiles(graph, costs)
        self._problems()
        report["seconds"] = self._seconds
        self._write(report)
        _say("seconds: " + ", ".join(f"{k} {v:.0f}" for k, v in self._seconds.items()))
        return 0

    @contextmanager
    def _taking(self, what: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self._seconds[what] = time.perf_counter() - begin

    def _write(self, report: Mapping[str, Any]) -> None:
        raw = json.dumps(report, indent=1, allow_nan=False) + "\n"
        path = self._options.results / f"{_stem(self._model, self._share)}.json"
        write_atomically(path, raw.encode())

    def _gpu(self) -> dict[str, Any]:
        """What this process has of the GPU."""
        properties: Any = torch.cuda.get_device_properties(self._device)
        square = torch.randn(_PROBE_WIDTH, _PROBE_WIDTH, device=self._device)
        seconds = self._clock.time(lambda: square @ square).time_s
        row = {
            "multiprocessors": properties.multi_processor_count,
            "l2_bytes": properties.L2_cache_size,
            "fp32_flops_per_s": 2 * _PROBE_WIDTH**3 / seconds,
        }
        _say(f"{self._model.name} at {self._share} %: {row}")
        whole = _read(self._options.results / f"{_stem(self._model, WHOLE)}.json").get("gpu")
        if self._share < WHOLE and whole:
            rate = row["fp32_flops_per_s"] / whole["fp32_flops_per_s"]
            if rate > _MOST_OF_SHARE * self._share / WHOLE:
                raise MeasureError(
                    f"a product runs at {rate:.0%} of the whole GPU's rate, and {self._share} % of"
                    " its multiprocessors are to be measured",
                    f"Start the MPS daemon; {SHARE_VARIABLE} means nothing without it",
                )
        return row

    def _build(self) -> TrainedModel:
        model, batch, loss = load_model(ROOT / self._model.file, self._sizes)
        device = self._device
        return TrainedModel(model=model.to(device), batch=to_device(batch, device), loss=loss)

    def _graph(self) -> OperatorGraph:
        path = self._folder / self._model.graph
        if path.is_file():
            return load_graph(path)
        trained = self._trained
        with self._taking("capture"):
            graph = capture(
                trained.model,
                trained.batch,
                trained.loss,
                name=self._model.name,
                source=self._model.file,
                sizes=self._sizes,
            )
        save_graph(graph, path)
        return graph

    def _costs(self, graph: OperatorGraph) -> DeviceCosts:
        path = self._folder / self._model.costs(self._share)
        if path.is_file():
            return load_costs(path)
        with self._taking("measure"):
            costs = measure(
                graph,
                trained=self._trained,
                device=self._device,
                optimizer=OPTIMIZER,
                clock=self._clock,
                notebook=notebook_beside(graph, self._device, None, OPTIMIZER, str(path)),
            )
        save_costs(costs, path)
        with suppress(OSError):
            os.unlink(f"{path}.partial")
        return costs

    def _uniform(self, graph: OperatorGraph, costs: DeviceCosts) -> Iterator[dict[str, Any]]:
        """Predicted beside measured steps of every uniform precision, as `measure` ran them."""
        problem = predictions.single_problem(graph, costs)
        available = available_precisions(self._device)
        for step in costs.steps:
            plan = uniform_plan(graph, step.precision, available)
            told = predictions.predict(graph, problem, plan)
            told_forward_s = told.forward_s + told.cast_forward_s
            told_backward_s = told.backward_s + told.cast_backward_s
            casts_s = told.cast_forward_s + told.cast_backward_s
            yield {
                "precision": str(step.precision),
                "forward_s": step.forward_s,
                "backward_s": step.backward_s,
                "host_s": step.host_s,
                "spread": step.spread,
                "predicted_forward_s": told_forward_s,
                "predicted_backward_s": told_backward_s,
                "casts_s": casts_s,
                "peak_bytes": step.peak_bytes,
                "unused_bytes": step.unused_bytes,
            }
            measured_s = step.forward_s + step.backward_s
            told_s = told_forward_s + told_backward_s
            _say(
                f"  {step.precision!s:5} {1e3 * measured_s:9.3f} ms, predicted/measured"
                f" {told_s / measured_s:.4f} (forward"
                f" {told_forward_s / step.forward_s:.4f}, backward"
                f" {told_backward_s / step.backward_s:.4f}, casts"
                f" {1e3 * casts_s:.2f} ms), host {1e3 * step.host_s:.1f} ms, spread"
                f" {step.spread:.3f}"
            )

    def _plans(self, graph: OperatorGraph, costs: DeviceCosts) -> list[dict[str, Any]]:
        problem = predictions.single_problem(graph, costs)
        plans = dict(predictions.all_plans(graph, costs, self._options.plans, 0))
        with self._taking("plans"):
            rows = predictions.measure_plans(
                graph, self._trained, problem, costs, plans, self._clock, 0.0, turns=1
            )
        worst = {
            what: max(abs(row[f"{what}_ratio"] - 1) for row in rows) for what in ("time", "memory")
        }
        _say(f"worst of {len(rows)} plans: {worst}")
        return rows

    def _perturbations(self, graph: OperatorGraph) -> None:
        path = self._folder / self._model.perturbations
        if path.is_file():
            return
        with self._taking("perturbations"):
            for divisor in DIVISORS:
                if self._perturb(graph, path, divisor):
                    return

    def _perturb(self, graph: OperatorGraph, path: Path, divisor: int) -> bool:
        batch_size = max(1, int(str(self._sizes["batch_size"])) // divisor)
        sizes = {**self._sizes, "batch_size": batch_size}
        model, batch, loss = load_model(ROOT / self._model.file, sizes)
        more = further_batches(ROOT / self._model.file, sizes, BATCHES)
        device = self._device
        try:
            table = perturbations(
                model.to(device),
                to_device(batch, device),
                graph,
                batches=[to_device(one, device) for one in more],
                loss=loss,
                source=self._model.file,
                sizes=sizes,
            )
        except CaptureError as error:
            if "memory" not in str(error) or divisor == DIVISORS[-1]:
                raise
            _say(f"perturbations at batch {batch_size}: {error}")
            return False
        finally:
            del model
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        save_perturbations(table, path)
        _say(f"perturbations at batch {batch_size}: {table.provenance.elapsed_s:.1f} s")
        return True

    def _problems(self) -> None:
        """Make the problems of what is there, and write them beside the folder."""
        for share in SHARES:
            if is_there(self._model, share, self._folder):
                problem = measured_problem(self._model, share, self._folder)
                save_problem(problem, self._folder.parent / f"{problem.name}.json.gz")
                _say(
                    f"{problem.name}: {len(problem.operators)} operators, deadline"
                    f" {problem.deadline_s} s, slack {problem.slack}, sha256 {problem.sha256[:12]}"
                )

    # Where a wrong prediction comes from

    def _kinds(self, graph: OperatorGraph, costs: DeviceCosts) -> dict[str, Any]:
        """Predicted seconds by kind of operator, forward and backward, at each precision."""
        problem = predictions.single_problem(graph, costs)
        table = predictions.empty_table(graph, costs)
        tables = DeviceTables(graph, costs, table, problem.precisions, 1)
        forward, backward = tables.times()
        available = available_precisions(self._device)
        found: dict[str, Any] = {}
        for precision in costs.precisions:
            plan = uniform_plan(graph, precision, available)
            columns = predictions.columns_of(graph, problem, plan)
            rows: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
            for index, row in enumerate(graph.operators):
                rows[row.kind][0] += float(forward[index, columns[index]])
                rows[row.kind][1] += float(backward[index, columns[index]])
            found[str(precision)] = dict(rows)
        return found

    def _profiles(self, graph: OperatorGraph, costs: DeviceCosts) -> dict[str, Any]:
        """Device time of one step by low-level operation, as torch's profiler sees it."""
        if self._device.type != "cuda":
            return {}
        found = {}
        available = available_precisions(self._device)
        trained = self._trained
        with self._taking("profiles"):
            for precision in costs.precisions:
                step = step_of(trained.model, trained.batch, trained.loss, self._clock)
                with converted(trained.model, graph, uniform_plan(graph, precision, available)):
                    ahead_s = warmed_up(step)
                    found[str(precision)] = _profile(lambda s=step, a=ahead_s: s(a))
        return found


def _profile(run: Any) -> dict[str, Any]:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        run()
        torch.cuda.synchronize()
    rows = [
        (row.key, row.self_device_time_total / 1e6, row.count)
        for row in seen.key_averages()
        if row.self_device_time_total > 0
    ]
    kernels = [row for row in rows if not row[0].startswith(("aten::", "autograd::"))]
    kernels.sort(key=lambda row: -row[1])
    return {"kernels": [[name[:80], s, n] for name, s, n in kernels[:_PROFILED_ROWS]]}


def _read(path: Path) -> dict[str, Any]:
    """A report; nothing where there is none."""
    data: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return data


def _stem(model: MeasuredModel, share: int) -> str:
    return f"h200-{model.name}-{share}"


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
