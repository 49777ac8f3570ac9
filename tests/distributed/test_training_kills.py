"""A rank that is killed at a random moment ends the job, and the next start goes on."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_killed_ranks_cost_no_more_than_the_steps_since_the_checkpoint() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.distributed.training_kills", "--kills", "3"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    before = 0
    for row in found["kills"]:
        victim = row["victim"]
        assert row["codes"][victim] == -9
        assert row["codes"][1 - victim] == 1
        kind = ("strong", "weak")[victim]
        assert f"rank {victim} ({kind}) is gone; the last step" in row["said"]
        # The survivor may not have heard yet of a checkpoint that was just put in its place.
        told = re.search(r"goes on from step (\d+)", row["said"])
        known = int(told[1]) if told else 0
        assert row["checkpoint"] - found["interval"] <= known <= row["checkpoint"]
        assert row["lost"] <= found["interval"]
        assert row["checkpoint"] >= before
        before = row["checkpoint"]
    assert before > 0, "nothing was ever saved, so nothing was tested"
    assert found["codes"] == [0, 0, 0, 0]
    assert found["same"]
    assert all(found["same"].values()), found["same"]
