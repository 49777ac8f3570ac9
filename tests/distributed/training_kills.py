"""Kills a rank of a job at random moments, and looks at what is left each time.

`python -m tests.distributed.training_kills --kills 20` writes one JSON object: for every kill
the rank, the steps that were lost and what the survivor said; and at the end whether the weights
are those of a job that nobody disturbed. Ranks are forked from this process, which never
computes, so that starting them takes no time.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in its list
from torch.nn import functional

from qsync_opt.errors import QsyncError
from qsync_opt.kernels.rounding import Rounding
from qsync_opt.plan import PrecisionPlan
from qsync_opt.precision import Precision
from qsync_opt.runtime.checkpoints import CheckpointFolder
from qsync_opt.runtime.metrics import read_metrics
from qsync_opt.runtime.parameters import TrainParameters
from qsync_opt.runtime.trainer import TrainProgress, train

KINDS = ("strong", "weak")
INTERVAL = 3

#: So long a step takes at least, or all would be over before the first kill.
_STEP_S = 0.002


def rank_main(rank: int, port: int, folder: str, steps: int, word: str) -> None:
    """One rank; it writes `<word>-<rank>` when it has begun, and appends what ended it."""
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(len(KINDS)),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 3))
    batch = (torch.randn(8, 8), torch.randint(3, (8,)))
    names = ("0", "3")
    devices = {
        "strong": dict.fromkeys(names, Precision.FP32),
        "weak": dict.fromkeys(names, Precision.INT8),
    }
    told = Path(f"{folder}.{word}-{rank}")

    def report(progress: TrainProgress) -> None:
        if progress.metrics.step == progress.first_step:
            told.write_text("")
        time.sleep(_STEP_S)

    try:
        train(
            model,
            batch,
            functional.cross_entropy,
            parameters=TrainParameters(
                steps=steps,
                batch_size=8,
                folder=Path(folder),
                checkpoint_interval=INTERVAL,
                rounding=Rounding.STOCHASTIC,
            ),
            plan=PrecisionPlan(problem="0" * 64, devices=devices),
            kind=KINDS[rank],
            report=report,
        )
    except QsyncError as error:
        told.write_text(str(error))
        os._exit(1)  # quick, and without the parent's clean-up
    os._exit(0)


def start(folder: Path, steps: int, word: str) -> tuple[list[Any], TCPStore]:
    """The processes of a job, and the store that they meet at."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    fork = multiprocessing.get_context("fork")
    processes = [
        fork.Process(target=rank_main, args=(rank, store.port, str(folder), steps, word))
        for rank in range(len(KINDS))
    ]
    for process in processes:
        process.start()
    return processes, store


def finish(processes: Sequence[Any], limit_s: float = 60.0) -> list[int | None]:
    """Exit codes; a process that does not end has None and is ended."""
    end = time.monotonic() + limit_s
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    return codes


def one_kill(folder: Path, word: str, draw: random.Random) -> dict[str, Any]:
    """Start the job, kill a rank after a while, and describe what is left."""
    victim = draw.randrange(len(KINDS))
    processes, _store = start(folder, 10**8, word)
    marks = [Path(f"{folder}.{word}-{rank}") for rank in range(len(KINDS))]
    end = time.monotonic() + 60
    while not all(mark.exists() for mark in marks) and time.monotonic() < end:
        time.sleep(0.002)
    time.sleep(draw.uniform(0, 0.25))
    os.kill(processes[victim].pid, signal.SIGKILL)
    codes = finish(processes)
    said = marks[1 - victim].read_text()
    checkpoints = CheckpointFolder(folder, keep=3)
    steps = checkpoints.steps()
    for step in steps:
        checkpoints.load(step)  # raises if it is broken
    taken = min(rows[-1].step for rows in read_metrics(folder).values()) + 1
    return {
        "victim": victim,
        "files": len(steps),
        "codes": codes,
        "said": said,
        "steps": taken,
        "checkpoint": steps[-1] if steps else 0,
        "lost": taken - (steps[-1] if steps else 0),
    }


def run(kills: int, seed: int, folder: Path) -> dict[str, Any]:
    """All kills, then the same number of steps undisturbed, and whether the weights agree."""
    draw = random.Random(seed)
    rows = [one_kill(folder / "killed", f"kill{number}", draw) for number in range(kills)]
    steps = rows[-1]["steps"] + 2
    codes = []
    for name in ("killed", "whole"):
        processes, _store = start(folder / name, steps, "last")
        codes += finish(processes)
    found = [CheckpointFolder(folder / name, keep=3).load(steps) for name in ("killed", "whole")]
    same = {
        name: torch.equal(tensor, found[1].tensors[name])
        for name, tensor in found[0].tensors.items()
    }
    return {"kills": rows, "steps": steps, "codes": codes, "interval": INTERVAL, "same": same}


def main() -> None:
    """Run it and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    importlib.import_module("torch._dynamo")  # stochastic rounding loads it; once is enough
    with tempfile.TemporaryDirectory() as folder:
        sys.stdout.write(json.dumps(run(options.kills, options.seed, Path(folder))) + "\n")


if __name__ == "__main__":
    main()
