"""Starts the ranks of a job on this machine, watches them, and ends the job with the first.

For several machines there is torchrun; a rank cannot tell which of the two has started it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in its list

from qsync_opt.errors import ParameterError, TrainError
from qsync_opt.runtime.checkpoints import CheckpointFolder
from qsync_opt.runtime.interruption import Interruption
from qsync_opt.runtime.metrics import read_metrics

_POLL_S = 0.05

#: How long the others have to notice by themselves that a rank is gone, and then to end.
_NOTICE_S, _END_S = 15.0, 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalRanks:
    """Ranks of one device kind on this machine.

    Attributes:
        kind: name of the device kind.
        count: how many.
        threads: of a CPU for each; None: as torch decides.
        mps_percent: share of a GPU that each may use under NVIDIA's MPS; None: all of it.
    """

    kind: str
    count: int
    threads: int | None = None
    mps_percent: int | None = None

    def environment(self) -> dict[str, str]:
        """The variables that say so."""
        found = {}
        if self.threads is not None:
            found["OMP_NUM_THREADS"] = str(self.threads)
        if self.mps_percent is not None:
            found["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(self.mps_percent)
        return found


def parse_ranks(text: str) -> list[LocalRanks]:
    """`KIND:COUNT[:threads=N][:mps=PERCENT],...` as ranks.

    Raises:
        ParameterError: not of this form.
    """
    rule = "must be KIND:COUNT[:threads=N][:mps=PERCENT], separated by commas"
    found = []
    for word in text.split(","):
        kind, *rest = word.strip().split(":")
        if not kind or not rest:
            raise ParameterError("ranks", rule, word)
        count, *settings = rest
        numbers = {"count": count}
        for setting in settings:
            key, _, value = setting.partition("=")
            name = {"threads": "threads", "mps": "mps_percent"}.get(key)
            if name is None or name in numbers:
                raise ParameterError("ranks", rule, word)
            numbers[name] = value
        if not all(value.isdecimal() and int(value) > 0 for value in numbers.values()):
            raise ParameterError("ranks", rule, word)
        found.append(LocalRanks(kind=kind, **{key: int(n) for key, n in numbers.items()}))
    return found


def launch(
    ranks: Sequence[LocalRanks],
    arguments: Sequence[str],
    folder: Path | None,
    module: str = "qsync_opt.cli",
) -> int:
    """Run `qsync-opt` with some arguments and `--kind` in a process for every rank.

    Rank 0 writes to this process's output and errors; of another rank that fails, the last
    line is shown in the error.

    Args:
        ranks: in the order of their numbers.
        arguments: of the command line.
        folder: of the job: what a message about a lost rank is told from.
        module: that is run instead of `qsync-opt`, with the same options.

    Returns:
        The exit code of the ranks, where they agree on it.

    Raises:
        TrainError: a rank died, with its name and last step.
        KeyboardInterrupt: a signal to this process ended ranks that had not begun yet.
    """
    kinds = [group.kind for group in ranks for _ in range(group.count)]
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {
        **os.environ,
        "WORLD_SIZE": str(len(kinds)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store stays here when rank 0 goes
    }
    groups = [group for group in ranks for _ in range(group.count)]
    with Interruption() as interruption, ExitStack() as stack:
        errors = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in groups]
        processes: list[subprocess.Popen[str]] = []
        try:
            for rank, group in enumerate(groups):
                numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                environment = {**common, **numbers, **group.environment()}
                words = ["-m", module, *arguments, "--kind", group.kind]
                processes.append(_start(rank, words, environment, errors[rank]))
            first = _watch(processes, interruption)
        finally:
            _end(processes)
        codes = [process.returncode for process in processes]
        if interruption.requested and first is not None and codes[first] == -signal.SIGTERM:
            raise KeyboardInterrupt  # before it could take the signal for a wish
        if first is not None and codes[first] < 0:
            raise _died(first, kinds[first], codes[first], folder)
        if first is not None and first > 0:
            errors[first].seek(0)
            said = (errors[first].read().strip().splitlines() or [""])[-1]
            # Rank 0 has said why where ranks agreed on it, but knows no error of another rank.
            if codes[0] <= 0 or (said and not said.startswith(_AGREED)):
                said = said or f"exit code {codes[first]}"
                raise TrainError(f"rank {first} ({kinds[first]}) failed: {said}", _AGAIN)
    return codes[0] if first is None else codes[first]


#: How `qsync-opt` begins to say what it ends for.
_AGREED = "qsync-opt: "

_AGAIN = "Start the job again: it goes on from its newest checkpoint"


def _start(
    rank: int, arguments: Sequence[str], environment: Mapping[str, str], errors: IO[str]
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments],
        env=dict(environment),
        stdout=None if rank == 0 else subprocess.DEVNULL,
        stderr=None if rank == 0 else errors,
        text=True,
    )


def _watch(processes: Sequence[subprocess.Popen[str]], interruption: Interruption) -> int | None:
    """Wait until all have ended; the first that failed, None if none did."""
    first: int | None = None
    end = float("inf")
    is_told = False
    while True:
        codes = [process.poll() for process in processes]
        if first is None:
            first = next((rank for rank, code in enumerate(codes) if code), None)
            if first is not None:
                end = time.monotonic() + _NOTICE_S
        if None not in codes or time.monotonic() > end:
            return first
        if interruption.requested and not is_told:
            is_told = True
            for process in processes:
                process.terminate()  # they end after the step
        time.sleep(_POLL_S)


def _end(processes: Sequence[subprocess.Popen[str]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.terminate()
    end = time.monotonic() + _END_S
    for process in processes:
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _died(rank: int, kind: str, code: int, folder: Path | None) -> TrainError:
    name = signal.Signals(-code).name
    last = "before its first step"
    kept = "from the start"
    if folder is not None:
        rows = read_metrics(folder).get(rank)
        if rows:
            last = f"after step {rows[-1].step}"
        steps = CheckpointFolder(folder, keep=1).steps()
        if steps:
            kept = f"from step {steps[-1]}"
    return TrainError(
        f"rank {rank} ({kind}) died of {name} {last}", f"Start the job again: it goes on {kept}"
    )
