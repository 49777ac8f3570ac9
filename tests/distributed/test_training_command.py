"""`qsync-opt train --ranks`: one command, two ranks of unequal kinds, stopped by a signal to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from qsync_opt.files import save_plan
from qsync_opt.plan import PrecisionPlan
from qsync_opt.precision import Precision
from qsync_opt.runtime.metrics import global_losses, read_metrics

ROOT = Path(__file__).parents[2]

MODEL = """
import time
import torch
from torch import nn
from torch.nn import functional


def batches(step, rows):
    time.sleep(0.02)
    x = torch.randn(rows.stop, 6, generator=torch.Generator().manual_seed(step))[rows.start:]
    return x, x[:, :2] * 0.5


def build(batch_size=8):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
    return model, batches(0, range(batch_size)), functional.mse_loss
"""


def test_one_command_trains_on_two_ranks_until_it_is_interrupted(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    row = {"0": Precision.INT8, "2": Precision.BF16}
    devices = {"strong": dict.fromkeys(row, Precision.FP32), "weak": row}
    save_plan(PrecisionPlan(problem="0" * 64, devices=devices), tmp_path / "plan.json")
    words = ["train", "model.py", "--plan", "plan.json", "--ranks", "strong:1:threads=1,weak:1"]
    words += ["--shares", "strong=0.75,weak=0.25", "-o", "job", "--learning-rate", "0.02", "--json"]

    process = subprocess.Popen(
        [sys.executable, "-m", "qsync_opt.cli", *words, "--steps", "100000"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + 120
    lines = tmp_path / "job" / "rank-1.jsonl"
    while not (lines.exists() and lines.read_bytes().count(b"\n") >= 3):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    told = json.loads(out)
    assert told["status"] == "interrupted"
    steps = told["steps"]
    assert told["checkpoint_step"] == steps >= 3
    assert (tmp_path / "job" / f"step-{steps:08d}.safetensors").exists()
    found = read_metrics(tmp_path / "job")
    assert [row.samples for row in (found[0][0], found[1][0])] == [12, 4]
    assert [row.kind for row in (found[0][0], found[1][0])] == ["strong", "weak"]
    losses = global_losses(found)
    assert len(losses) == steps
    assert all(loss > 0 for loss in losses)


TWICE = """
import sys
from model import build, batches
import qsync_opt as qo

for folder in ("first", "second"):
    model, batch, loss = build()
    result = qo.train(
        model, batch, loss, batches=batches,
        parameters=qo.TrainParameters(steps=2, folder=folder, timeout_s=30.0),
    )
    assert len(result.samples) == 2, result
"""


def test_one_process_can_take_part_in_two_jobs(tmp_path: Path) -> None:
    """A launcher's store outlives the first, with all that was said in it."""
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "twice.py").write_text(TWICE)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    done = subprocess.run(
        [*command, "2", "twice.py"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    for folder in ("first", "second"):
        found = read_metrics(tmp_path / folder)
        assert len(global_losses(found)) == 2
        assert set(found) == {0, 1}
