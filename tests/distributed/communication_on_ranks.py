"""Groups of forked processes for `test_communication_on_ranks`: every part on 1 to 4 ranks.

The interpreter and torch start once; ranks are forks of it. Prints ranks -> part -> what failed.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

Part = Callable[[int, int, Path], None]

WORLDS = (1, 2, 3, 4)
_TIMEOUT = timedelta(seconds=60)


@contextmanager
def counted() -> Iterator[list[int]]:
    """Count the bytes that this rank hands to collectives for others, apart from our count."""
    sent = [0]
    names = ("all_to_all_single", "all_gather_single", "all_gather_into_tensor")
    originals = {name: getattr(distributed, name) for name in names if hasattr(distributed, name)}

    def counting(name: str, original: Any) -> Any:
        def call(output: torch.Tensor, given: torch.Tensor, **options: Any) -> Any:
            world = distributed.get_world_size(options.get("group"))
            size = given.numel() * given.element_size()
            sent[0] += size * (world - 1) // (world if name == "all_to_all_single" else 1)
            return original(output, given, **options)

        return call

    from qsync_opt.runtime import two_phase

    gather = two_phase._all_gather
    for name, original in originals.items():
        setattr(distributed, name, counting(name, original))
    two_phase._all_gather = counting("all_gather", gather)
    try:
        yield sent
    finally:
        two_phase._all_gather = gather
        for name, original in originals.items():
            setattr(distributed, name, original)


def all_equal(tensor: torch.Tensor) -> bool:
    """Whether every rank has the same bits."""
    own = tensor.detach().contiguous().flatten().view(torch.uint8)
    first = own.clone()
    distributed.broadcast(first, 0)
    different = torch.tensor([int(not torch.equal(own, first))])
    distributed.all_reduce(different)
    return not bool(different)


def _run(rank: int, world: int, folder: Path, parts: dict[str, Part]) -> dict[str, str]:
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder / f'store{world}'}",
        rank=rank,
        world_size=world,
        timeout=_TIMEOUT,
    )
    found = {}
    for name, part in parts.items():
        begin = time.perf_counter()
        try:
            part(rank, world, folder)
            found[name] = ""
        except Exception:  # noqa: BLE001  # the test shows it
            found[name] = traceback.format_exc()
        if rank == 0 and os.environ.get("SHOW_TIMES"):
            sys.stderr.write(f"{world} {name} {time.perf_counter() - begin:.2f} s\n")
    distributed.destroy_process_group()
    return found


def main() -> None:
    """Run the groups one after another."""
    from tests.distributed import (
        bits_on_ranks,
        gradients_on_ranks,
        sharded_training,
        shards_on_ranks,
    )

    torch.set_num_threads(1)
    importlib.import_module("torch._dynamo")  # DDP would load it in every fork
    results: dict[str, list[dict[str, str]]] = {}
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        for world in (*WORLDS, 8):
            parts = {
                name: part
                for module in (gradients_on_ranks, bits_on_ranks, shards_on_ranks, sharded_training)
                for name, (part, worlds) in module.PARTS.items()
                if world in worlds
            }
            children = []
            for rank in range(world):
                child = os.fork()
                if child == 0:
                    code = 1
                    try:
                        found = _run(rank, world, folder, parts)
                        (folder / f"{world}-{rank}.json").write_text(json.dumps(found))
                        code = 0
                    finally:
                        os._exit(code)
                children.append(child)
            codes = [os.waitpid(child, 0)[1] for child in children]
            results[str(world)] = [
                {"": f"ended with {code}"}
                if code
                else json.loads((folder / f"{world}-{rank}.json").read_text())
                for rank, code in enumerate(codes)
            ]
    sys.stdout.write(json.dumps(results))


if __name__ == "__main__":
    main()
