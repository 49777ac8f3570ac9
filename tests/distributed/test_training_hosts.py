"""Two hosts joined by torchrun's rendezvous: two network namespaces on this machine.

The hosts share no folder, and which of them torchrun numbers first is its own affair.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from qsync_opt.files import save_plan
from qsync_opt.plan import PrecisionPlan
from qsync_opt.precision import Precision
from qsync_opt.runtime.checkpoints import CheckpointFolder
from qsync_opt.runtime.metrics import read_metrics

ROOT = Path(__file__).parents[2]
ADDRESSES = ("10.213.77.1", "10.213.77.2")

MODEL = """
import torch
from torch import nn
from torch.nn import functional


def build(batch_size=8):
    torch.manual_seed(0)
    x = torch.randn(batch_size, 6)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
    return model, (x, x[:, :2] * 0.5), functional.mse_loss
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """The names of two namespaces with a cable between them."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("making network namespaces takes root and iproute2")
    names = [f"qs{secrets.token_hex(3)}" for _ in ADDRESSES]
    try:
        for name in names:
            try:
                ip("netns", "add", name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
        ip("link", "add", names[0], "netns", names[0], "type", "veth", "peer", "name", names[1],
           "netns", names[1])  # fmt: skip
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", name)
            ip("-n", name, "link", "set", name, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def run(hosts: list[str], kinds: tuple[str, str], folder: Path, steps: int) -> None:
    """The job on both hosts, to its end; the first host has the rendezvous."""
    processes = []
    for host, address, kind in zip(hosts, ADDRESSES, kinds, strict=True):
        words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
        words += ["--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", f"job{steps}"]
        words += ["--rdzv-endpoint", f"{ADDRESSES[0]}:29417"]
        words += ["--rdzv-conf", f"is_host={int(address == ADDRESSES[0])}"]
        words += ["--local-addr", address, "-m", "qsync_opt.cli", "train"]
        words += ["model.py", "--plan", "plan.json", "--kind", kind, "--steps", str(steps)]
        words += ["-o", kind, "--json"]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "GLOO_SOCKET_IFNAME": host,
        }
        processes.append(
            subprocess.Popen(
                ["ip", "netns", "exec", host, *words],
                cwd=folder,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        outputs = [process.communicate(timeout=200)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)


@pytest.mark.slow
def test_two_hosts_train_and_go_on_from_what_one_of_them_kept(
    hosts: list[str], tmp_path: Path
) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    names = ("0", "2")
    devices = {
        "strong": dict.fromkeys(names, Precision.FP32),
        "weak": dict.fromkeys(names, Precision.INT8),
    }
    save_plan(PrecisionPlan(problem="0" * 64, devices=devices), tmp_path / "plan.json")
    run(hosts, ("strong", "weak"), tmp_path, 4)
    run(hosts, ("weak", "strong"), tmp_path, 8)
    kept = [CheckpointFolder(tmp_path / kind, keep=3).steps() for kind in ("strong", "weak")]
    assert sorted(step for steps in kept for step in steps) == [4, 8]
    for kind in ("strong", "weak"):
        rows = [row for own in read_metrics(tmp_path / kind).values() for row in own]
        assert sorted(row.step for row in rows) == list(range(8))
        assert {row.kind for row in rows} == {kind}
