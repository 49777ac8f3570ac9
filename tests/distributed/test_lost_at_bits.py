"""A rank that dies or comes late during coded averages ends the job with its name, in time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.lost_at_bits import KINDS, LIMIT_S, VICTIM, WAYS

ROOT = Path(__file__).parents[2]
GONE = f"rank {VICTIM} ({KINDS[VICTIM]}) is gone; the last step that all ranks took is step 1"


@pytest.fixture(scope="module")
def found() -> dict[str, list[dict[str, Any]]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.distributed.lost_at_bits"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        timeout=3 * LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows: dict[str, list[dict[str, Any]]] = json.loads(done.stdout)
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_the_others_name_it(way: str, found: dict[str, list[dict[str, Any]]]) -> None:
    for rank, row in enumerate(found[way]):
        if rank == VICTIM:
            assert row["code"] == (9 if way.startswith("dies") else 1), row
            continue
        assert row["code"] == 1, row
        expected = "cannot be joined" if way == "joins late" else GONE
        assert expected in row["said"]
