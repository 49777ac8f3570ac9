"""Two ranks of a script, which find each other through a store of this process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in its list

ROOT = Path(__file__).parents[1]


def run_two_ranks(script: Path, *arguments: str, timeout_s: float) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each rank.

    Args:
        script: given the rank, the store's port and the arguments.
        arguments: the same for both.
        timeout_s: for the output of one rank.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(store.port), *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=timeout_s) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, out, err) for rank, (out, err) in zip(ranks, outputs, strict=True)]
