"""Runs `qsync-opt` once for every rank, all as one process group, and waits for them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in its list

from qsync_opt.errors import MeasureError

_POLL_S, _END_S = 0.05, 10.0


def run_group(commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]]) -> None:
    """Run a command line for every rank; what they print is kept out of sight.

    Args:
        commands: arguments of `qsync-opt` by rank.
        environments: variables that are set for a rank.

    Raises:
        MeasureError: a rank failed, with its last line; the others are ended.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {
        **os.environ,
        "WORLD_SIZE": str(len(commands)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is here
    }
    with ExitStack() as stack:
        errors = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in commands]
        processes: list[subprocess.Popen[str]] = []
        try:
            for rank, arguments in enumerate(commands):
                ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "qsync_opt.cli", *arguments],
                        env={**common, **ranks, **environments[rank]},
                        stdout=subprocess.DEVNULL,
                        stderr=errors[rank],
                        text=True,
                    )
                )
            failed = _wait(processes)
        finally:
            _end(processes)
        if failed is not None:
            errors[failed].seek(0)
            said = errors[failed].read().strip().splitlines()
            told = said[-1] if said else f"exit code {processes[failed].returncode}"
            raise MeasureError(f"rank {failed} of the measurement failed: {told}", "See above")


def _wait(processes: Sequence[subprocess.Popen[str]]) -> int | None:
    """Wait until all have ended or one has failed; which."""
    while True:
        codes = [process.poll() for process in processes]
        failed = next((rank for rank, code in enumerate(codes) if code), None)
        if failed is not None or None not in codes:
            return failed
        time.sleep(_POLL_S)


def _end(processes: Sequence[subprocess.Popen[str]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.terminate()
    for process in processes:
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
