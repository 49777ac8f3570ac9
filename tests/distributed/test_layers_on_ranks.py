"""Converted models on two processes: DDP with unequal precisions, FSDP2, and random bits.

The processes start once and run every part; starting them takes longer than all parts.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.rank_pairs import run_two_ranks

SCRIPT = Path(__file__).with_name("layers_on_ranks.py")
PARTS = ("ddp", "fsdp bf16", "fsdp int8", "fsdp fp8", "random bits", "revert")


@pytest.fixture(scope="module")
def results() -> list[dict[str, str]]:
    """What each rank found: part -> "" or the traceback."""
    ranks = run_two_ranks(SCRIPT, timeout_s=240)
    assert [code for code, _, _ in ranks] == [0, 0], "".join(err for _, _, err in ranks)
    return [json.loads(out) for _, out, _ in ranks]


@pytest.mark.parametrize("part", PARTS)
def test_part(part: str, results: list[dict[str, str]]) -> None:
    for rank, found in enumerate(results):
        assert found[part] == "", f"rank {rank}: {found[part]}"
