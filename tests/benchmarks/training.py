"""What the trainer costs beside a loop by hand: `python -m tests.benchmarks.training`.

Both train the same converted model with the same optimizer on the same batch; the loop does
nothing else, the trainer also keeps metrics, listens to signals and asks the other ranks. They
take turns, because the machine may become slower in between. Under torchrun every rank takes
part in one job; rank 0 prints. `--kills N` also kills a rank N times at random. Prints a table
and keeps it in `results/` with the machine.
"""

from __future__ import annotations

import argparse
import itertools
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
    """Median seconds of a step by hand and of one of the trainer, in turns."""
    path, _, settings = text.partition(":")
    model, batch, loss = load_model(path, parse_sizes(settings.split(",") if settings else []))
    model.to(device)
    batch = to_device(batch, device)
    layers = [name for name, module in model.named_modules() if layer_of(module) is not None]
    row = dict.fromkeys(layers, options.precision)
    by_hand: list[list[float]] = []
    trained: list[list[float]] = []
    for _ in range(options.turns):
        by_hand.append(_by_hand(model, batch, loss, row, options))
        trained.append(_with_trainer(model, batch, loss, row, options))
    # A turn's median, and of each pair of turns the ratio: what slows both cancels.
    ratios = [
        statistics.median(ours) / statistics.median(theirs)
        for ours, theirs in zip(trained, by_hand, strict=True)
    ]
    return {
        "model": text,
        "by_hand_s": statistics.median(statistics.median(turn) for turn in by_hand),
        "trainer_s": statistics.median(statistics.median(turn) for turn in trained),
        "overhead": statistics.median(ratios) - 1,
        "spread": spread_of(ratios),
    }


def _by_hand(
    model: nn.Module,
    batch: Any,
    loss: Loss | None,
    row: dict[str, Precision],
    options: argparse.Namespace,
) -> list[float]:
    clock = _clock(options)
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
    stamps = []
    for _ in range(options.steps):
        optimizer.zero_grad(set_to_none=True)
        value = run_loss(wrapped, inputs, target, loss)
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        value.item()  # every loop that shows its loss reads it
        stamps.append(clock())
    revert(model)
    return _times(stamps)


def _with_trainer(
    model: nn.Module,
    batch: Any,
    loss: Loss | None,
    row: dict[str, Precision],
    options: argparse.Namespace,
) -> list[float]:
    clock = _clock(options)
    stamps: list[float] = []
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
            report=lambda progress: stamps.append(clock()),
        )
    return _times(stamps)


def _clock(options: argparse.Namespace) -> Callable[[], float]:
    return time.process_time if options.cpu_time else time.perf_counter


def _times(stamps: Sequence[float]) -> list[float]:
    """From the end of a step to the end of the next, without the first ones."""
    return [end - begin for begin, end in itertools.pairwise(stamps)][_WARM_UP:]


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
        "| model | by hand (ms) | trainer (ms) | overhead | spread |",
        "|---|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {row['model']} | {row['by_hand_s'] * 1e3:.2f} | {row['trainer_s'] * 1e3:.2f}"
        f" | {row['overhead']:+.1%} | {row['spread']:.1%} |"
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
