"""Converted models on two processes: DDP with unequal precisions, FSDP2, and random bits.

The processes start once and run every part; starting them takes longer than all parts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in its list

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("layers_on_ranks.py")
PARTS = ("ddp", "fsdp bf16", "fsdp int8", "fsdp fp8", "random bits", "revert")


@pytest.fixture(scope="module")
def results() -> list[dict[str, str]]:
    """What each rank found: part -> "" or the traceback."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), str(store.port)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=240) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], outputs[0][1] + outputs[1][1]
    return [json.loads(out) for out, _ in outputs]


@pytest.mark.parametrize("part", PARTS)
def test_part(part: str, results: list[dict[str, str]]) -> None:
    for rank, found in enumerate(results):
        assert found[part] == "", f"rank {rank}: {found[part]}"
