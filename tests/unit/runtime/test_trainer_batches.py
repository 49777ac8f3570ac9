"""Sharing out a global batch: nothing is lost, nothing counts twice, weights make it one mean."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qsync_opt.errors import CaptureError, ParameterError
from qsync_opt.measure.model_file import load_batches
from qsync_opt.measure.step import leaves
from qsync_opt.runtime.batches import Slices, batch_rows, count_samples, micro_batches

MODELS = Path(__file__).parents[3] / "models"


@st.composite
def splits(draw: st.DrawFn) -> tuple[int, list[float], int]:
    parts = draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    accumulation = draw(st.integers(1, 4))
    total = sum(parts)
    least = accumulation * total // min(parts) + total  # the smallest share gets enough
    size = draw(st.integers(least, least + 50))
    return size, [part / total for part in parts], accumulation


@given(splits())
def test_samples_are_given_out_once_and_near_to_the_shares(
    split: tuple[int, list[float], int],
) -> None:
    size, shares, accumulation = split
    counts = count_samples(size, shares, accumulation)
    assert sum(counts) == size
    for count, share in zip(counts, shares, strict=True):
        assert abs(count - size * share) < 1
    rows = [
        row
        for rank in range(len(shares))
        for part in micro_batches(counts, rank, accumulation)
        for row in part.rows
    ]
    assert rows == list(range(size))


@given(splits())
def test_the_average_over_ranks_of_weighted_means_is_the_mean(
    split: tuple[int, list[float], int],
) -> None:
    size, shares, accumulation = split
    counts = count_samples(size, shares, accumulation)
    values = [float((7 * row * row) % 11) for row in range(size)]
    total = 0.0
    for rank in range(len(shares)):
        for part in micro_batches(counts, rank, accumulation):
            mean = sum(values[row] for row in part.rows) / len(part.rows)
            total += part.weight * mean
    assert total / len(shares) == pytest.approx(sum(values) / size)


@pytest.mark.parametrize("shares", [[0.5, 0.4], [1.5, -0.5], [float("nan"), 1.0], [0.0, 1.0]])
def test_shares_that_are_no_shares_are_refused(shares: list[float]) -> None:
    with pytest.raises(ParameterError, match="shares"):
        count_samples(8, shares, 1)


def test_every_micro_batch_gets_a_sample() -> None:
    assert count_samples(8, [0.75, 0.25], 2) == [6, 2]
    with pytest.raises(ParameterError, match="Rank 1 gets 2"):
        count_samples(8, [0.75, 0.25], 3)


def test_slices_begin_again_at_the_end_of_the_batch() -> None:
    batch = ({"x": torch.arange(5)[:, None]}, torch.arange(5))
    slices = Slices(batch, torch.device("cpu"))
    inputs, target = slices(3, range(1, 4))
    assert target.tolist() == [1, 2, 3]
    assert inputs["x"][:, 0].tolist() == [1, 2, 3]
    assert slices(0, range(4, 7))[1].tolist() == [4, 0, 1]
    assert slices(9, range(4, 7)) is slices(0, range(4, 7))


def test_a_batch_must_have_rows() -> None:
    assert batch_rows((torch.zeros(3, 2), torch.tensor(1.0), [torch.zeros(3)])) == 3
    with pytest.raises(ParameterError, match="one row for every sample"):
        batch_rows((torch.zeros(3), torch.zeros(4)))


@pytest.mark.parametrize("name", ["small_cnn", "small_gpt"])
def test_the_data_of_a_step_does_not_depend_on_who_asks_for_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(MODELS))
    monkeypatch.delitem(sys.modules, "gpt", raising=False)
    batches = load_batches(MODELS / f"{name}.py", {"seed": 3, "width": 8})
    assert batches is not None
    whole = [tensor for _, tensor in leaves(batches(5, range(24)))]
    for rows in (range(7), range(7, 24), range(23, 24)):
        for part, full in zip(leaves(batches(5, rows)), whole, strict=True):
            assert torch.equal(part[1], full[rows.start : rows.stop])
    other = next(leaves(batches(6, range(24))))[1]
    assert not torch.equal(other, whole[0])


def test_batches_are_those_of_the_file_that_is_named(tmp_path: Path) -> None:
    """Its `build` may come from another file, which has batches of its own."""
    (tmp_path / "base.py").write_text(
        "def build():\n    return None\n\ndef batches(step, rows):\n    return 'base'\n"
    )
    own = tmp_path / "own.py"
    own.write_text("from base import build\n\ndef batches(step, rows):\n    return 'own'\n")
    batches = load_batches(own, {})
    assert batches is not None
    assert batches(0, range(1)) == "own"
    own.write_text("from base import build\n")
    assert load_batches(own, {}) is None


def test_a_file_that_ends_the_process_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(CaptureError, match=r"script\.py"):
        load_batches(file, {})


def test_a_model_file_need_not_have_batches() -> None:
    assert load_batches(MODELS / "resnet50.py", {}) is None
