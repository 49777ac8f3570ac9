"""Ranks that die or come late while buckets are averaged at bits of their own.

`python -m tests.distributed.lost_at_bits` runs one job of three ranks for every way in which a
rank fails the others, all at once, for they mostly wait. It writes what each rank said, and how
long it took, as JSON.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in its list
from torch.nn import functional

from qsync_opt.build import build_problem
from qsync_opt.costs import Cluster, ClusterKind
from qsync_opt.errors import QsyncError
from qsync_opt.measure.capture import capture
from qsync_opt.plan import PrecisionPlan
from qsync_opt.precision import Precision
from qsync_opt.runtime import quantized_comm, two_phase
from qsync_opt.runtime.parameters import TrainParameters
from qsync_opt.runtime.trainer import train
from tests.cost_cases import made_up_costs, made_up_table

KINDS = ("strong", "weak", "weak")
VICTIM = 1

#: How long a rank may keep the others waiting, and how long all may take to say so: the ranks
#: are called once more, and start on a machine that does other things.
TIMEOUT_S = 3.0
LIMIT_S = 20.0

#: Calls of a phase before the victim fails: those of the rehearsal and of two steps.
_CALLS = 3


def dies(original: Any) -> Any:
    """A phase that its rank does not survive."""
    return _failing(original, lambda: os._exit(9))


def sleeps(original: Any) -> Any:
    """A phase that its rank comes to too late."""
    return _failing(original, lambda: time.sleep(3 * TIMEOUT_S))


def _failing(original: Any, fail: Callable[[], None]) -> Any:
    calls = [0]

    def phase(self: Any, given: Any, *others: Any) -> Any:
        # Before training the exchange compares what ranks have in common, in whole numbers.
        calls[0] += getattr(given, "dtype", None) is not torch.int64
        if calls[0] > _CALLS:
            fail()
        return original(self, given, *others)

    return phase


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a rank fails the others.

    Attributes:
        bits: of both buckets.
        holder, phase: method that it happens in.
        make: turns the method into one that fails; None: it joins late.
    """

    bits: int = 8
    holder: Any = two_phase.Exchange
    phase: str = "all_to_all"
    make: Callable[[Any], Any] | None = None


WAYS = {
    "dies in the first phase": Way(make=dies),
    "dies in the second phase": Way(phase="all_gather", make=dies),
    "dies in a cast all-reduce": Way(
        bits=16, holder=quantized_comm.GradientHook, phase="_send_whole", make=dies
    ),
    "is late in the first phase": Way(make=sleeps),
    "joins late": Way(),
}


def job(rank: int, bits: int) -> None:
    """Train a small model with a plan that has bits for its buckets."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 160), nn.Tanh(), nn.Linear(160, 32))
    batch = (torch.randn(12, 8), torch.randint(32, (12,)))
    graph = capture(model, batch, functional.cross_entropy, least_coverage=0.0)
    costs = {kind: made_up_costs(graph) for kind in set(KINDS)}
    kinds = tuple(ClusterKind(name=kind) for kind in sorted(set(KINDS)))
    problem = build_problem(graph, costs, made_up_table(graph), Cluster(kinds=kinds), bits=(16, 8))
    row = dict.fromkeys((operator.name for operator in graph.operators), Precision.FP32)
    train(
        model,
        batch,
        functional.cross_entropy,
        parameters=TrainParameters(
            steps=10**6, batch_size=12, shares=dict.fromkeys(KINDS, 1 / 3), timeout_s=TIMEOUT_S
        ),
        plan=PrecisionPlan(
            problem=problem.sha256,
            devices=dict.fromkeys(KINDS, row),
            communication=(bits,) * len(problem.buckets),
        ),
        kind=KINDS[rank],
        problem=problem,
        graph=graph,
    )


def rank_main(rank: int, port: int, way: str, told: Path) -> None:
    """One rank of a job; leaves what ended it in a file."""
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(len(KINDS)),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    how = WAYS[way]
    code = 0
    with pytest.MonkeyPatch.context() as patch:
        if rank == VICTIM and how.make is not None:
            patch.setattr(how.holder, how.phase, how.make(getattr(how.holder, how.phase)))
        elif rank == VICTIM:
            time.sleep(1.5 * TIMEOUT_S)
        begin = time.monotonic()
        try:
            job(rank, how.bits)
        except QsyncError as error:
            code = 1
            content = {"said": str(error), "seconds": time.monotonic() - begin}
            told.write_text(json.dumps(content))
    os._exit(code)  # quick, and without the parent's clean-up


def run(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Way -> what each rank of its job ended with; code None: it was still there at the end."""
    fork = multiprocessing.get_context("fork")
    jobs: dict[str, list[tuple[Any, Path]]] = {}
    stores = []  # they end with their last reference
    for number, way in enumerate(WAYS):
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        stores.append(store)
        files = [folder / f"{number}-{rank}" for rank in range(len(KINDS))]
        jobs[way] = [
            (fork.Process(target=rank_main, args=(rank, store.port, way, file)), file)
            for rank, file in enumerate(files)
        ]
    processes = [process for rows in jobs.values() for process, _ in rows]
    for process in processes:
        process.start()
    end = time.monotonic() + LIMIT_S
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    found = {}
    for way, rows in jobs.items():
        found[way] = [
            {"code": process.exitcode, **(json.loads(file.read_text()) if file.exists() else {})}
            for process, file in rows
        ]
    for process in processes:
        process.kill()
        process.join()
    return found


def main() -> None:
    """Run every way and write what came of it."""
    torch.set_num_threads(1)
    importlib.import_module("torch._dynamo")  # DDP would load it in every fork
    with tempfile.TemporaryDirectory() as folder:
        sys.stdout.write(json.dumps(run(Path(folder))) + "\n")


if __name__ == "__main__":
    main()
