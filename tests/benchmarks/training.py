"""What the trainer costs beside a loop by hand: `python -m tests.benchmarks.training`.

Both train the same converted model with the same optimizer on the same batch; the loop does
nothing else, the trainer also keeps metrics, listens to signals and asks the other ranks. Two
loops are compared with: one that reads its loss in every step, as loops that show it do, and
one that never does, so that its host runs ahead of a GPU as far as it can. All three take
turns, because the machine may become slower in between. Under torchrun every rank takes part
in one job; rank 0 prints. `--kills N` also kills a rank N times at random. Prints a table and
keeps it in `results/` with the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from qsync_opt.files import write_atomically
from qsync_opt.measure.clock import spread_of
from qsync_opt.measure.model_file import load_model, parse_sizes
from qsync_opt.measure.step import Loss, split_batch, to_device
from qsync_opt.measure.uniform import run_loss
from qsync_opt.plan import PrecisionPlan
from qsync_opt.precision import Precision
from qsync_opt.runtime.convert import convert, revert
from qsync_opt.runtime.layers import layer_of
from qsync_opt.runtime.parameters import TrainParameters
from qsync_opt.runtime.trainer import train
from tests.benchmarks.tables import describe_machine

RESULTS = Path(__file__).resolve().parent / "results"
MODELS = ("models/small_cnn.py:batch_size=256,width=32", "models/small_gpt.py:batch_size=32")

#: The share by which a step may take longer than by hand.
GOAL = 0.02

#: First steps of a turn that do not count: buckets form, kernels are chosen.
_WARM_UP = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.training")
    parser.add_argument("models", nargs="*", default=MODELS, metavar="FILE[:KEY=VALUE,...]")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--precision", type=Precision, default=Precision.BF16)
    parser.add_argument("--steps", type=int, default=20, help="of a turn; default: %(default)s")
    parser.add_argument("--turns", type=int, default=5, help="default: %(default)s")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="count the time of the process alone: for a machine that is not alone",
    )
    parser.add_argument("--kills", type=int, default=0, help="of a rank of a small job")
    parser.add_argument("--name", default="training", help="of the files")
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="FOLDER")
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank = distributed.get_rank() if distributed.is_initialized() else 0
    rows = [measure_overhead(text, device, options) for text in options.models]
    data: dict[str, Any] = {
        "format": "qsync-opt/benchmark",
        "version": 1,
        "machine": describe_machine(),
        "device": options.device,
        "precision": str(options.precision),
        "timer": "process" if options.cpu_time else "wall",
        "ranks": distributed.get_world_size() if distributed.is_initialized() else 1,
        "overhead": rows,
        "kills": run_kills(options.kills) if options.kills and rank == 0 else None,
    }
    if distributed.is_initialized():
        distributed.destroy_process_group()
    if rank == 0:
        options.output.mkdir(parents=True, exist_ok=True)
        target = options.output / options.name
        raw = json.dumps(data, indent=1, allow_nan=False) + "\n"
        write_atomically(target.with_suffix(".json"), raw.encode())
        write_atomically(target.with_suffix(".md"), to_markdown(data).encode())
        sys.stdout.write(to_markdown(data))
    return 0


def measure_overhead(
    text: str, device: torch.device, options: argparse.Namespace
) -> dict[str, Any]:
    """Mean seconds of a step by hand and of one of the trainer, in turns."""
    path, _, settings = text.partition(":")
    model, batch, loss = load_model(path, parse_sizes(settings.split(",") if settings else []))
    model.to(device)
    batch = to_device(batch, device)
    layers = [name for name, module in model.named_modules() if layer_of(module) is not None]
    row = dict.fromkeys(layers, options.precision)
    by_hand: list[float] = []
    ahead: list[float] = []
    trained: list[float] = []
    for _ in range(options.turns):
        by_hand.append(_by_hand(model, batch, loss, row, options, reads=True))
        trained.append(_with_trainer(model, batch, loss, row, options))
        ahead.append(_by_hand(model, batch, loss, row, options, reads=False))
    # Of each pair of turns the ratio: what slows both cancels.
    ratios = [ours / theirs for ours, theirs in zip(trained, by_hand, strict=True)]
    strict = [ours / theirs for ours, theirs in zip(trained, ahead, strict=True)]
    return {
        "model": text,
        "by_hand_s": statistics.median(by_hand),
        "ahead_s": statistics.median(ahead),
        "trainer_s": statistics.median(trained),
        "overhead": statistics.median(ratios) - 1,
        "overhead_ahead": statistics.median(strict) - 1,
        "spread": spread_of(ratios),
    }


def _by_hand(
    model: nn.Module,
    batch: Any,
    loss: Loss | None,
    row: dict[str, Precision],
    options: argparse.Namespace,
    *,
    reads: bool,
) -> float:
    stamps = _Stamps(options)
    convert(model, row)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    wrapped: nn.Module = model
    if distributed.is_initialized():
        device = next(model.parameters()).device
        wrapped = DistributedDataParallel(
            model,
            device_ids=[device.index] if device.type == "cuda" else None,
            gradient_as_bucket_view=True,
        )
    inputs, target = split_batch(batch, loss)
    for _ in range(options.steps):
        optimizer.zero_grad(set_to_none=True)
        value = run_loss(wrapped, inputs, target, loss)
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if reads:
            value.item()
        stamps.step()
    revert(model)
    return stamps.mean_s()


def _with_trainer(
    model: nn.Module,
    batch: Any,
    loss: Loss | None,
    row: dict[str, Precision],
    options: argparse.Namespace,
) -> float:
    stamps = _Stamps(options)
    rank = distributed.get_rank() if distributed.is_initialized() else 0
    shared = nullcontext(None) if rank else tempfile.TemporaryDirectory()
    with shared as folder:
        place = [folder]
        if distributed.is_initialized():
            distributed.broadcast_object_list(place)
        train(
            model,
            batch,
            loss,
            parameters=TrainParameters(
                steps=options.steps, folder=Path(str(place[0])), checkpoint_interval=0
            ),
            plan=PrecisionPlan(problem="0" * 64, devices={"device": row}),
            report=lambda progress: stamps.step(),
        )
    return stamps.mean_s()


class _Stamps:
    """The clock of a turn: from its first steps to its last one.

    A host that runs ahead of its GPU is waited for at both ends and nowhere else. The last
    step of the trainer is reported when it is over, so there is nothing left to wait for.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._clock: Callable[[], float] = (
            time.process_time if options.cpu_time else time.perf_counter
        )
        self._is_cuda = options.device == "cuda"
        self._steps = int(options.steps)
        self._done = 0
        self._begin = self._end = 0.0

    def step(self) -> None:
        """A step has been taken, or launched."""
        self._done += 1
        if self._done in (_WARM_UP, self._steps):
            if self._is_cuda:
                torch.cuda.synchronize()
            self._begin, self._end = self._end, self._clock()

    def mean_s(self) -> float:
        """Seconds of a step."""
        return (self._end - self._begin) / (self._steps - _WARM_UP)


def run_kills(count: int) -> dict[str, Any]:
    """The result of `tests.distributed.training_kills`."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.distributed.training_kills", "--kills", str(count)],
        check=True,
        capture_output=True,
        text=True,
        env={key: value for key, value in os.environ.items() if key != "RANK"},
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return {
        "kills": len(found["kills"]),
        "most_steps_lost": max(row["lost"] for row in found["kills"]),
        "checkpoint_interval": found["interval"],
        "named": sum(f"rank {row['victim']} " in row["said"] for row in found["kills"]),
        "files_read": sum(row["files"] for row in found["kills"]),  # a broken one ends the run
        "same_weights": all(found["same"].values()),
    }


def to_markdown(data: dict[str, Any]) -> str:
    """The tables."""
    lines = [
        f"# Trainer and a loop by hand, {data['device']}, {data['ranks']} rank(s),"
        f" {data['precision']}, {data['timer']} time",
        "",
        "| model | by hand (ms) | by hand, loss not read (ms) | trainer (ms) | overhead |"
        " of the stricter | spread |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {row['model']} | {row['by_hand_s'] * 1e3:.2f} | {row['ahead_s'] * 1e3:.2f}"
        f" | {row['trainer_s'] * 1e3:.2f} | {row['overhead']:+.1%}"
        f" | {row['overhead_ahead']:+.1%} | {row['spread']:.1%} |"
        for row in data["overhead"]
    ]
    lines += ["", f"Goal: at most {GOAL:.0%}. Medians of turns; overhead is the median ratio."]
    kills = data["kills"]
    if kills is not None:
        lines += [
            "",
            f"{kills['kills']} kills of a random rank at a random moment, a checkpoint every"
            f" {kills['checkpoint_interval']} steps: at most {kills['most_steps_lost']} steps lost,"
            f" {kills['files_read']} files read and whole, {kills['named']} times the survivor"
            " named the rank; final weights"
            f" {'equal' if kills['same_weights'] else 'DIFFERENT FROM'} those of an undisturbed"
            " job.",
        ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
