"""Messages made on a GPU are those made on a CPU, bit for bit, with learned levels too."""

from __future__ import annotations

import pytest
import torch

from qsync_opt.runtime import bucket_codec, levels
from qsync_opt.runtime.communication import layout_of

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", ["nearest", "stochastic", "shift", "learned"])
@pytest.mark.parametrize("bits", [2, 4, 6, 8])
def test_messages_and_values(
    bits: int, scheme: str, dtype: torch.dtype, device: torch.device
) -> None:
    if scheme == "learned" and bits > 6:
        pytest.skip("levels are learned up to 6 bits")
    key = bucket_codec.rank_key(3, 1, 2, 5)
    for count, parts in ((1, 2), (5000, 3), (100_003, 4)):
        x = torch.randn(count, generator=torch.Generator().manual_seed(count)).to(dtype)
        layout = layout_of(count, parts, bits)
        table, own = None, scheme
        if scheme == "learned":
            counts = levels.histogram(x, layout.bucket)
            assert torch.equal(levels.histogram(x.to(device), layout.bucket).cpu(), counts)
            table, own = levels.fit_levels(counts, bits, stochastic=True), "stochastic"
        there = None if table is None else table.to(device)
        beside = bucket_codec.as_bytes(torch.arange(7, dtype=dtype), parts)
        expected = bucket_codec.encode(x, layout, own, key, table, beside)
        found = bucket_codec.encode(x.to(device), layout, own, key, there, beside.to(device))
        assert torch.equal(found.cpu(), expected)
        values = bucket_codec.decode(found, layout, own, key, there, dtype)
        assert torch.equal(
            values.cpu(), bucket_codec.decode(expected, layout, own, key, table, dtype)
        )
        if own != "shift":
            mean = bucket_codec.decode_mean(found, layout, parts, there)
            assert torch.equal(mean.cpu(), bucket_codec.decode_mean(expected, layout, parts, table))
