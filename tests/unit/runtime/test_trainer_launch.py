"""Ranks started on this machine: what the option means, and how a job ends with one of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

import pytest
import torch

from qsync_opt.errors import ParameterError, TrainError
from qsync_opt.runtime import launch as launching
from qsync_opt.runtime.checkpoints import Checkpoint, CheckpointFolder
from qsync_opt.runtime.launch import LocalRanks, launch, parse_ranks
from qsync_opt.runtime.metrics import MetricsFile, StepMetrics

RANKS = parse_ranks("strong:1:threads=2,weak:2:threads=1:mps=25")


def test_the_option_names_kinds_counts_and_limits() -> None:
    expected = [
        LocalRanks(kind="strong", count=1, threads=2),
        LocalRanks(kind="weak", count=2, threads=1, mps_percent=25),
    ]
    assert expected == RANKS
    assert RANKS[1].environment() == {
        "OMP_NUM_THREADS": "1",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
    }
    assert parse_ranks("a:3") == [LocalRanks(kind="a", count=3)]


@pytest.mark.parametrize(
    "text", ["", "strong", "strong:", "strong:0", "strong:-1", ":2", "a:1:b=2", "a:1:mps=1:mps=2"]
)
def test_what_is_not_of_its_form_is_refused(text: str) -> None:
    with pytest.raises(ParameterError, match="ranks"):
        parse_ranks(text)


Script = Callable[[int], str]


def scripted(monkeypatch: pytest.MonkeyPatch, script: Script) -> list[Mapping[str, str]]:
    """Let every rank be a small script; returns what the ranks are given."""
    given: list[Mapping[str, str]] = []

    def start(
        rank: int, arguments: Sequence[str], environment: Mapping[str, str], errors: IO[str]
    ) -> subprocess.Popen[str]:
        given.append({**environment, "arguments": " ".join(arguments)})
        code = f"import os, signal, sys, time\n{script(rank)}"
        return subprocess.Popen([sys.executable, "-c", code], stderr=errors, text=True)

    monkeypatch.setattr(launching, "_start", start)
    return given


def test_every_rank_is_told_who_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    given = scripted(monkeypatch, lambda rank: "")
    assert launch(RANKS, ["train", "model.py"], None) == 0
    assert [row["RANK"] for row in given] == ["0", "1", "2"]
    assert {row["WORLD_SIZE"] for row in given} == {"3"}
    assert [row["arguments"].rsplit(" ", 1)[1] for row in given] == ["strong", "weak", "weak"]
    assert [row["OMP_NUM_THREADS"] for row in given] == ["2", "1", "1"]


def test_a_rank_that_dies_ends_the_job_with_its_name_and_last_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    row = StepMetrics(
        step=17,
        rank=1,
        kind="weak",
        loss=1.0,
        samples=1,
        step_s=1.0,
        compute_s=1.0,
        wait_s=0.0,
        memory_bytes=1,
        loss_scale=1.0,
        skipped=False,
    )
    file = MetricsFile(tmp_path, 1, 0)
    file.write(row)
    file.close()
    tensors = {"model/x": torch.zeros(1)}
    CheckpointFolder(tmp_path, keep=1).save(Checkpoint(step=15, facts={}, tensors=tensors))
    monkeypatch.setattr(launching, "_NOTICE_S", 0.2)
    scripted(
        monkeypatch,
        lambda rank: "os.kill(os.getpid(), signal.SIGKILL)" if rank == 1 else "time.sleep(60)",
    )
    began = time.monotonic()
    with pytest.raises(TrainError, match=r"rank 1 \(weak\) died of SIGKILL after step 17.*step 15"):
        launch(RANKS, [], tmp_path)
    assert time.monotonic() - began < 50, "the others were waited for"


def test_a_rank_that_fails_alone_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_NOTICE_S", 0.2)
    scripted(
        monkeypatch,
        lambda rank: "sys.exit('no such plan')" if rank == 2 else "time.sleep(60)",
    )
    with pytest.raises(TrainError, match=r"rank 2 \(weak\) failed: no such plan"):
        launch(RANKS, [], None)


def test_an_error_that_rank_0_cannot_know_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    """It only sees that the other one is gone."""
    scripted(
        monkeypatch,
        lambda rank: (
            "raise ValueError('no picture 7')"
            if rank == 1
            else "time.sleep(0.3); sys.exit('qsync-opt: rank 1 (weak) is gone')"
        ),
    )
    with pytest.raises(TrainError, match=r"rank 1 \(weak\) failed: ValueError: no picture 7"):
        launch(RANKS, [], None)


def test_what_ranks_agreed_on_is_said_by_rank_0_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(
        monkeypatch,
        lambda rank: (
            f"time.sleep({0.3 * (rank == 0)}); print('qsync-opt: no', file=sys.stderr)\nsys.exit(2)"
        ),
    )
    assert launch(RANKS, [], None) == 2


def test_what_all_ranks_say_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, lambda rank: "sys.exit(2)")
    assert launch(RANKS, [], None) == 2


def test_an_interruption_reaches_every_rank(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def script(rank: int) -> str:
        return (
            "signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))\n"
            f"open({str(tmp_path / 'ready')!r} + '{rank}', 'w').close()\n"
            + (
                f"while len(os.listdir({str(tmp_path)!r})) < 3: time.sleep(0.01)\n"
                f"os.kill({os.getpid()}, signal.SIGINT)\n"
                if rank == 0
                else ""
            )
            + "time.sleep(60)"
        )

    scripted(monkeypatch, script)
    assert launch(RANKS, [], None) == 130
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interruption_of_ranks_that_have_not_begun_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They die of the signal that others end their step for; no rank was lost."""
    scripted(
        monkeypatch,
        lambda rank: (
            f"os.kill({os.getpid()}, signal.SIGINT); time.sleep(60)"
            if rank == 0
            else "time.sleep(60)"
        ),
    )
    with pytest.raises(KeyboardInterrupt):
        launch(RANKS, [], None)
