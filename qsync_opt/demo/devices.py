"""Two unequal device kinds of this machine: two GPUs, or two processes on its CPU.

Two equal GPUs are made unequal by NVIDIA's MPS, whose daemon is started for it, in folders of
its own, and ended again. On a CPU the strong kind has more threads than the weak one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from qsync_opt.errors import MeasureError

#: Share of a GPU, in percent, that the weak one of two equal GPUs may use.
WEAK_PERCENT = 25

#: Threads that wait for each other do not spin: on a CPU processes may share cores.
_PATIENT = {"OMP_WAIT_POLICY": "PASSIVE"}

_CONTROL = "nvidia-cuda-mps-control"
_FOLDERS = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoDevice:
    """One device kind of one worker.

    Attributes:
        kind: its name.
        words: what it is, for people.
        threads: of a CPU; None for a GPU.
        mps_percent: share of a GPU under MPS; None: all of it.
    """

    kind: str
    words: str
    threads: int | None = None
    mps_percent: int | None = None

    def ranks(self) -> str:
        """The kind as `train --ranks` takes it."""
        parts = [self.kind, "1"]
        if self.threads is not None:
            parts.append(f"threads={self.threads}")
        if self.mps_percent is not None:
            parts.append(f"mps={self.mps_percent}")
        return ":".join(parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoMachine:
    """What the demonstration runs on.

    Attributes:
        device_type: `cuda` or `cpu`.
        devices: the strong kind and the weak one.
        note: what is worth knowing about them; may be empty.
    """

    device_type: str
    devices: tuple[DemoDevice, DemoDevice]
    note: str = ""


@contextmanager
def demo_machine(device_type: str | None = None) -> Iterator[DemoMachine]:
    """The devices of this machine; where they share GPUs, MPS runs inside.

    Args:
        device_type: `cpu` or `cuda`; None: GPUs where there are two.

    Raises:
        MeasureError: two GPUs are asked for, and there are fewer.
    """
    names = [] if device_type == "cpu" else gpu_names()
    if len(names) < 2 and device_type == "cuda":
        raise MeasureError(
            f"torch finds {len(names)} GPUs here, and the demonstration takes two",
            "Run it with --device cpu",
        )
    if len(names) < 2:
        with _environment(_PATIENT):
            yield cpu_machine()
    elif names[0] != names[1]:
        # torch lists the fastest first (CUDA_DEVICE_ORDER).
        strong = DemoDevice(kind="strong", words=names[0])
        yield DemoMachine(
            device_type="cuda", devices=(strong, DemoDevice(kind="weak", words=names[1]))
        )
    elif shutil.which(_CONTROL) is None:
        yield _equal_gpus(names[0], None)
    else:
        with _sharing():
            yield _equal_gpus(names[0], WEAK_PERCENT)


def cpu_machine() -> DemoMachine:
    """Two processes on the CPU: the weak one has one thread, the strong one all others."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    # torch takes no account of the other process: more threads than cores stand in line.
    many = max(2, cores - 1)
    note = ""
    if many + 1 > cores:
        note = f"{many + 1} threads share {cores} cores, so times vary"
    return DemoMachine(
        device_type="cpu",
        devices=(
            DemoDevice(kind="strong", words=f"CPU, {many} threads", threads=many),
            DemoDevice(kind="weak", words="CPU, 1 thread", threads=1),
        ),
        note=note,
    )


def _equal_gpus(name: str, percent: int | None) -> DemoMachine:
    words = name if percent is None else f"{name}, {percent} % of it"
    note = "" if percent else f"{_CONTROL} is not here, so the two GPUs stay equal"
    return DemoMachine(
        device_type="cuda",
        devices=(
            DemoDevice(kind="strong", words=name),
            DemoDevice(kind="weak", words=words, mps_percent=percent),
        ),
        note=note,
    )


def gpu_names() -> list[str]:
    """The names of the GPUs that torch can use.

    Another process is asked: one that has touched a GPU could not be put under MPS any more.
    """
    script = (
        "import json, sys, torch; n = torch.cuda.device_count();"
        "json.dump([torch.cuda.get_device_name(i) for i in range(n)], sys.stdout)"
    )
    import torch

    if torch.version.cuda is None:
        return []
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise MeasureError(f"torch cannot list the GPUs ({lines[-1]})", "Use --device cpu")
    return [str(name) for name in json.loads(done.stdout)]


@contextmanager
def _sharing() -> Iterator[None]:
    """MPS runs inside, for processes that are started inside."""
    # The path of a socket must be short, so the folder is not in that of the demonstration.
    with (
        tempfile.TemporaryDirectory(prefix="qsync-mps-") as folder,
        _environment(dict.fromkeys(_FOLDERS, folder)),
    ):
        _control(["-d"], "")
        try:
            yield
        finally:
            _control([], "quit\n")


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Variables of this process, and so of those that it starts, inside."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _control(arguments: list[str], text: str) -> None:
    done = subprocess.run(
        [_CONTROL, *arguments], input=text, capture_output=True, text=True, check=False
    )
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or [f"code {done.returncode}"]
        raise MeasureError(f"{_CONTROL} fails: {said[-1]}", "Run the demonstration on the CPU")
