"""What gradients go over: told from the devices that ranks leave word of."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]  # not in its list

from qsync_opt.runtime.distributed import choose_backend


def chosen(monkeypatch: pytest.MonkeyPatch, devices: Sequence[str], uuids: Sequence[str]) -> str:
    """What all ranks choose, one thread for each."""
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(uuid=uuids[device.index]),
    )
    store = HashStore()
    with ThreadPoolExecutor(len(devices)) as pool:
        answers = pool.map(
            lambda rank: choose_backend(torch.device(devices[rank]), store, rank, len(devices)),
            range(len(devices)),
        )
    (answer,) = set(answers)
    return answer


def test_nccl_takes_ranks_with_gpus_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(monkeypatch, ["cuda:0", "cuda:1"], ["a", "b"]) == "nccl"


def test_gloo_takes_ranks_that_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Told by the GPU, because each rank may see it under a number of its own."""
    assert chosen(monkeypatch, ["cuda:0", "cuda:0"], ["a"]) == "gloo"
    assert chosen(monkeypatch, ["cuda:0", "cuda:1"], ["a", "a"]) == "gloo"


def test_gloo_takes_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(monkeypatch, ["cpu", "cpu"], []) == "gloo"


def test_equal_gpus_of_two_hosts_are_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """A virtual machine may give its GPU the identity that another one gives its own."""
    names = iter(["first", "second"])
    monkeypatch.setattr(socket, "gethostname", lambda: next(names))
    assert chosen(monkeypatch, ["cuda:0", "cuda:0"], ["a"]) == "nccl"
