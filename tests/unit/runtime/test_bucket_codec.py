"""Messages bring values back: nothing lost but rounding, which has the variance it should."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from qsync_opt.kernels.rounding import RandomKey
from qsync_opt.runtime import bucket_codec as codec
from qsync_opt.runtime.communication import layout_of
from tests.low_precision import TinyCnn, TinyGpt


def values(count: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("parts", [1, 2, 3, 8])
@pytest.mark.parametrize("bits", [2, 3, 8])
def test_values_come_back_within_a_step(bits: int, parts: int) -> None:
    for count in (1, 5, 8, 100, 1024, 5000):
        x = values(count)
        layout = layout_of(count, parts, bits)
        messages = codec.encode(x, layout, "stochastic", RandomKey())
        assert messages.shape == (parts, layout.message_bytes)
        back = codec.decode(messages, layout)
        assert back.shape == (parts, layout.chunk)
        step = float(x.max() - x.min()) / (2**bits - 1)
        assert float((back.flatten()[:count] - x).abs().max()) <= step * (1 + 1e-5)


def test_a_message_is_read_alone_and_from_anywhere() -> None:
    x = values(5000)
    layout = layout_of(5000, 3, 5)
    key = RandomKey(seed=4)
    messages = codec.encode(x, layout, "nearest", key)
    whole = codec.decode(messages, layout)
    longer = torch.cat((messages, torch.full((3, 5), 255, dtype=torch.uint8)), dim=1)
    assert torch.equal(codec.decode(longer, layout), whole)
    for part in range(3):
        assert torch.equal(codec.decode(longer[part : part + 1], layout)[0], whole[part])


@pytest.mark.parametrize(("scheme", "parts_of_variance"), [("stochastic", 6), ("shift", 12)])
def test_rounding_is_unbiased_with_its_variance(scheme: str, parts_of_variance: int) -> None:
    """Stochastic step^2 p (1 - p), step^2 / 6 on average; a shift step^2 / 12 for every value."""
    count, draws = 512, 4000
    # Evenly spread between codes, so that the mean over p is that over [0, 1].
    x = torch.linspace(-1, 1, count + 1)[:count] * (1 + 1 / count)
    x[0], x[-1] = -1.0, 1.0
    layout = layout_of(count * draws, draws, 4, count)
    assert layout.bucket == count
    key = RandomKey(seed=9)
    messages = codec.encode(x.repeat(draws), layout, scheme, key)
    found = codec.decode(messages, layout, scheme, key).double()
    step = 2 / 15
    mean_error = (found.mean(0) - x).abs()
    # The shift's error is at most half a step, the coin's a whole one.
    assert float(mean_error.max()) < 5 * step * (1 / parts_of_variance) ** 0.5 / draws**0.5 * 1.25
    spread = float(((found - x) ** 2).mean())
    assert spread == pytest.approx(step**2 / parts_of_variance, rel=0.04)


def test_ranks_draw_apart_and_steps_too() -> None:
    keys = {codec.rank_key(1, rank, step, 0) for rank in range(4) for step in range(4)}
    assert len(keys) == 16
    assert all(-(2**63) <= key.seed < 2**63 for key in keys)


def test_values_that_are_sent_as_they_are() -> None:
    for count in (0, 1, 7, 8):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            x = values(count).to(dtype)
            rows = codec.as_bytes(x, 3)
            assert rows.shape == (3, -(-count // 3) * dtype.itemsize)
            # Behind codes nothing is aligned.
            behind = torch.cat((torch.zeros((3, 5), dtype=torch.uint8), rows), dim=1)[:, 5:]
            back = codec.from_bytes(behind, dtype).flatten()
            assert torch.equal(back[:count], x)
            assert not bool(back[count:].any())


def test_spans_split_and_join_a_row() -> None:
    sizes = [(3, False), (2, False), (4, True), (0, False), (1, True), (6, False)]
    coded, exact = codec.spans_of(sizes)
    assert (coded, exact) == ([slice(0, 5), slice(10, 16)], [slice(5, 10)])
    row = torch.arange(16.0)
    taken = codec.take(row, coded)
    assert taken.tolist() == [*range(5), *range(10, 16)]
    codec.put(row, coded, -taken)
    assert torch.equal(row[5:10], torch.arange(5.0, 10.0))
    assert torch.equal(codec.take(row, coded), -taken)
    assert codec.take(row, []).shape == (0,)


def test_norms_biases_and_small_tensors_are_exempt() -> None:
    class RowNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(64, 64))

    model = nn.ModuleDict(
        {"gpt": TinyGpt(width=64), "cnn": TinyCnn(), "norm": nn.LayerNorm((64, 64))}
    )
    model["own"] = RowNorm()
    names = {id(p): name for name, p in model.named_parameters()}
    exempt = {names[id(p)] for p in codec.exempt_parameters(model)}
    assert {"norm.weight", "norm.bias", "own.gain", "gpt.norm.weight"} <= exempt
    for name, parameter in model.named_parameters():
        if name in exempt:
            continue
        assert parameter.dim() > 1
        assert parameter.numel() >= 1024
    assert "gpt.words.weight" not in exempt
    assert "gpt.blocks.0.up.weight" not in exempt
    assert "gpt.blocks.0.up.bias" in exempt
