"""Memory that is freed stays with the process: no page of it is faulted in again."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

_FAULTS = """
import resource
import sys
import torch
from qsync_opt.runtime.host_memory import keep_freed_memory

kept = keep_freed_memory() if sys.argv[1] == "keep" else True
def step():
    torch.empty(48 * 2**20, dtype=torch.uint8).fill_(1)
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(24):
    step()
before = faults()
for _ in range(4):
    step()
sys.stdout.write(f"{int(kept)} {faults() - before}")
"""


#: In four blocks; pages of up to 64 KiB.
PAGES = 4 * 48 * 2**20 // 2**16


def faults(word: str) -> int:
    """Page faults of four blocks of 48 MiB, after many."""
    command = [sys.executable, "-c", _FAULTS, word]
    kept, count = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert kept == "1"
    return int(count)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other libraries are left alone")
def test_pages_are_faulted_in_once() -> None:
    # glibc gives blocks of more than 32 MiB back to the system, unless told otherwise.
    assert faults("keep") < PAGES // 100 < PAGES < faults("leave")
