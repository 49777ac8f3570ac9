"""Values as messages and back: which tensors are coded, and the bytes of their codes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from qsync_opt.kernels import bucket_library as library
from qsync_opt.kernels.rounding import RandomKey, mix64
from qsync_opt.runtime.communication import BUCKET_SIZE, Layout

#: What the kernels read; other tensors are sent as they are.
CODED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_NORMS = (
    nn.modules.batchnorm._BatchNorm,
    nn.modules.instancenorm._InstanceNorm,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
)


def is_exempt(tensor: Tensor, bucket_size: int = BUCKET_SIZE) -> bool:
    """Whether a tensor is sent as it is: a vector, or one that does not fill a bucket."""
    return tensor.dim() <= 1 or tensor.numel() < bucket_size


def exempt_parameters(model: nn.Module, bucket_size: int = BUCKET_SIZE) -> Iterator[nn.Parameter]:
    """The parameters of a model that are sent as they are: norms, biases, small ones."""
    for module in model.modules():
        is_norm = isinstance(module, _NORMS) or type(module).__name__.endswith("Norm")
        for name, parameter in module.named_parameters(recurse=False):
            if is_norm or name.endswith("bias") or is_exempt(parameter, bucket_size):
                yield parameter


def rank_key(seed: int, rank: int, step: int, tensor: int) -> RandomKey:
    """The key of what a rank draws in a step."""
    mixed = mix64(mix64(seed) + rank)
    return RandomKey(seed=mixed - 2**64 if mixed >> 63 else mixed, step=step, tensor=tensor)


def encode(
    x: Tensor,
    layout: Layout,
    scheme: str,
    key: RandomKey,
    table: Tensor | None = None,
    beside: Tensor | None = None,
) -> Tensor:
    """The messages of a vector, and behind each of them, in the same row, what else is sent.

    Args:
        x: [layout.count].
        layout: of the messages.
        scheme: `nearest`, `stochastic` or `shift`; see `kernels.bucket_reference.bucket_encode`.
        key: of the random bits.
        table: learned levels; None: evenly spaced.
        beside: uint8 [parts, m], as of `as_bytes`; None: nothing else.

    Returns:
        uint8 [parts, message_bytes + m]: least values and steps, then codes. Padding is 0.
    """
    whole = (layout.parts, layout.buckets, layout.bucket, layout.bits)
    return library.message_encode(x, *whole, scheme, key, table, beside)


def decode(
    messages: Tensor,
    layout: Layout,
    scheme: str = "nearest",
    key: RandomKey | None = None,
    table: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The values of messages, which may be other ranks'.

    Args:
        messages: uint8 [parts, at least message_bytes]; more bytes are not looked at.
        layout: as encoded.
        scheme: as encoded; all but `shift` decode alike.
        key: as encoded, where the scheme is `shift`.
        table: as encoded.
        dtype: of the values.

    Returns:
        [parts, chunk] of `dtype`, padding included.
    """
    key = RandomKey() if key is None else key
    whole = (layout.buckets, layout.bucket, layout.bits)
    return library.message_decode(messages, *whole, scheme, key, table, dtype)


def decode_mean(
    messages: Tensor, layout: Layout, divisor: float, table: Tensor | None = None
) -> Tensor:
    """What the messages of all ranks add up to, one after the other, over a divisor.

    Args:
        messages: as of `decode`, without a shift.
        layout: as encoded.
        divisor: their number for a mean.
        table: as encoded.

    Returns:
        float32 [chunk], padding included.
    """
    whole = (layout.buckets, layout.bucket, layout.bits)
    return library.message_mean(messages, *whole, divisor, table)


def as_bytes(values: Tensor, parts: int) -> Tensor:
    """A vector as it is, in `parts` rows: uint8, padded with 0 to whole values."""
    if values.numel() == 0:
        return values.new_empty((parts, 0), dtype=torch.uint8)
    missing = -values.numel() % parts
    filled = torch.cat((values, values.new_zeros(missing))) if missing else values.contiguous()
    return filled.view(parts, -1).view(torch.uint8)


def from_bytes(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The reverse of `as_bytes`: [parts, values of a row]."""
    if rows.numel() == 0:
        return rows.new_empty((*rows.shape[:-1], 0), dtype=dtype)
    return _aligned(rows).view(dtype)


def spans_of(sizes: Iterable[tuple[int, bool]]) -> tuple[list[slice], list[slice]]:
    """Where coded and exempt values lie in a row of tensors; neighbours are joined.

    Args:
        sizes: number of values, and whether they are exempt, in the order of the row.
    """
    spans: tuple[list[slice], list[slice]] = ([], [])
    end = 0
    for size, exempt in sizes:
        own = spans[exempt]
        if own and own[-1].stop == end:
            own[-1] = slice(own[-1].start, end + size)
        elif size:
            own.append(slice(end, end + size))
        end += size
    return spans


def take(row: Tensor, spans: list[slice]) -> Tensor:
    """The values of a vector that lie in spans, joined."""
    if len(spans) == 1:
        return row[spans[0]]
    return torch.cat([row[span] for span in spans]) if spans else row[:0]


def put(row: Tensor, spans: list[slice], values: Tensor) -> None:
    """The reverse of `take`."""
    start = 0
    for span in spans:
        end = start + span.stop - span.start
        row[span].copy_(values[start:end])
        start = end


def _aligned(rows: Tensor) -> Tensor:
    """Bytes that can be looked at as numbers of up to 8 bytes."""
    is_aligned = rows.is_contiguous() and rows.storage_offset() % 8 == 0
    return rows if is_aligned else rows.clone(memory_format=torch.contiguous_format)
