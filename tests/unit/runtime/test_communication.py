"""What is sent: its words, its limits, and how vectors are cut into messages."""

from __future__ import annotations

import pytest

from qsync_opt.errors import ParameterError
from qsync_opt.runtime.communication import (
    BUCKET_SIZE,
    CODE_BITS,
    Coding,
    Communication,
    all_reduce_bytes,
    communication_at,
    layout_of,
    parse_communication,
    ring_bytes,
)

WORDS = ("fp32", "fp16", "bf16", "w8g8", "g8", "g4", "g4l", "g4e", "w6", "w4lg4l", "w8g2le")


@pytest.mark.parametrize("word", WORDS)
def test_words_come_back(word: str) -> None:
    assert str(parse_communication(word)) == word


def test_a_word_says_everything() -> None:
    found = parse_communication("w6lg4le")
    assert found.weights == Coding(bits=6, learned=True)
    assert found.gradients == Coding(bits=4, learned=True, feedback=True)
    assert found.cast is None
    assert parse_communication("fp32") == Communication()
    assert parse_communication("bf16").cast == "bf16"


@pytest.mark.parametrize(
    "word", ["", "w", "g", "8", "g8w8", "w8e", "fp64", "g8 ", "G8", "g4el", "g-4", "int8"]
)
def test_other_words_are_refused(word: str) -> None:
    with pytest.raises(ParameterError, match="communication"):
        parse_communication(word)


@pytest.mark.parametrize("word", ["g1", "g9", "w1", "w16g8", "g7l", "w8l"])
def test_bits_out_of_range_are_refused(word: str) -> None:
    with pytest.raises(ParameterError, match="must be a whole number from 2 to"):
        parse_communication(word)


def test_options_that_exclude_each_other() -> None:
    with pytest.raises(ParameterError, match="must not be given with bits"):
        Communication(cast="fp16", gradients=Coding(bits=8))
    with pytest.raises(ParameterError, match="must be off for weights"):
        Communication(weights=Coding(bits=8, feedback=True))
    with pytest.raises(ParameterError, match="multiple of 8"):
        Communication(bucket_size=1020)
    with pytest.raises(ParameterError, match="must be one of fp16, bf16"):
        Communication(cast="fp8")


def test_bits_say_how_gradients_are_sent() -> None:
    assert communication_at(32) == Communication()
    assert communication_at(16) == Communication(cast="bf16")
    for bits in CODE_BITS:
        assert communication_at(bits) == Communication(gradients=Coding(bits=bits))
    for wrong in (0, 1, 9, 12, 24, 64, True):
        with pytest.raises(ParameterError, match="must be 2 to 8, 16 or 32"):
            communication_at(wrong)


def test_bytes_of_values_that_are_not_coded_are_those_of_a_ring() -> None:
    for world in (2, 3, 8):
        whole = all_reduce_bytes(3000, world, 32, exact=24)
        assert whole == 2 * (world - 1) * 4 * 3024 // world
        assert all_reduce_bytes(3000, world, 16, exact=24) == whole // 2
        assert ring_bytes(4 * 3024, world) == whole
    assert ring_bytes(10**6, 1) == 0


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 7, 8, 64])
def test_messages_hold_all_values_in_whole_buckets(parts: int) -> None:
    for count in (0, 1, 7, 8, 9, 255, 1023, 1024, 1025, 8193, 100_003, 6_553_600):
        layout = layout_of(count, parts, 4)
        assert layout.chunk * parts >= count
        assert layout.bucket % 8 == 0
        assert 0 < layout.bucket <= BUCKET_SIZE
        assert layout.message_bytes == layout.chunk // 2 + 8 * layout.buckets
        # At most seven values of each bucket are padding, and whole buckets never.
        padding = layout.chunk * parts - count
        assert padding < 8 * parts * max(layout.buckets, 1)


@pytest.mark.parametrize(
    ("world", "expected"), [(2, 1.01), (4, 1.51), (8, 1.76), (16, 1.89), (32, 1.95)]
)
def test_bytes_an_element_of_two_phases(world: int, expected: float) -> None:
    count = 25 * 2**20 // 4
    assert round(all_reduce_bytes(count, world, 8) / count, 2) == expected
    formula = 2 * (world - 1) / world * (1 + 8 / BUCKET_SIZE)
    assert all_reduce_bytes(count, world, 8) / count == pytest.approx(formula, rel=1e-3)


def test_one_rank_sends_nothing() -> None:
    assert all_reduce_bytes(10**6, 1, 8, exact=100) == 0
