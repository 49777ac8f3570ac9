"""Coded communication on 1 to 8 gloo processes; see `communication_on_ranks`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed import (
    bits_on_ranks,
    gradients_on_ranks,
    sharded_training,
    shards_on_ranks,
)

ROOT = Path(__file__).parents[2]
PARTS = {
    **gradients_on_ranks.PARTS,
    **bits_on_ranks.PARTS,
    **shards_on_ranks.PARTS,
    **sharded_training.PARTS,
}
CASES = [(world, name) for name, (_, worlds) in PARTS.items() for world in worlds]


@pytest.fixture(scope="module")
def results() -> dict[str, list[dict[str, str]]]:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.distributed.communication_on_ranks"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, list[dict[str, str]]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(("world", "part"), CASES)
def test_part(world: int, part: str, results: dict[str, list[dict[str, str]]]) -> None:
    for rank, found in enumerate(results[str(world)]):
        assert found.get(part, found.get("", "did not run")) == "", f"rank {rank}: {found}"
