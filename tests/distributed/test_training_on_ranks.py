"""Training on two processes with gloo, each of another device kind.

The processes start once and run every part; starting them takes longer than most parts.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.training_on_ranks import PARTS
from tests.rank_pairs import run_two_ranks

SCRIPT = Path(__file__).with_name("training_on_ranks.py")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each rank found: part -> "" or the traceback."""
    folder = tmp_path_factory.mktemp("training")
    ranks = run_two_ranks(SCRIPT, str(folder), timeout_s=240)
    for _, out, err in ranks:
        assert out, err
    return [json.loads(out) for _, out, _ in ranks]


@pytest.mark.parametrize("part", PARTS)
def test_part(part: str, results: list[dict[str, str]]) -> None:
    for rank, found in enumerate(results):
        assert part in found, f"rank {rank} did not get here"
        assert found[part] == "", f"rank {rank}: {found[part]}"
