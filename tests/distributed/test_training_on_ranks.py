"""Training on two processes with gloo, each of another device kind.

The processes start once and run every part; starting them takes longer than most parts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in its list

from tests.distributed.training_on_ranks import PARTS

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("training_on_ranks.py")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each rank found: part -> "" or the traceback."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    folder = tmp_path_factory.mktemp("training")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), str(store.port), str(folder)],
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
    for out, err in outputs:
        assert out, err
    return [json.loads(out) for out, _ in outputs]


@pytest.mark.parametrize("part", PARTS)
def test_part(part: str, results: list[dict[str, str]]) -> None:
    for rank, found in enumerate(results):
        assert part in found, f"rank {rank} did not get here"
        assert found[part] == "", f"rank {rank}: {found[part]}"
