"""Launches of the bucket codec: messages written in place, and read from wherever they lie.

Every function takes CUDA tensors and means what its namesake in `bucket_reference` means.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qsync_opt.kernels.bucket_reference import SCHEMES, message_bytes
from qsync_opt.kernels.launch import random_words
from qsync_opt.kernels.native import ELEMENTS, Native
from qsync_opt.kernels.rounding import RandomKey

_SCHEMES = {name: place for place, name in enumerate(SCHEMES)}


def message_encode(
    native: Native,
    x: Tensor,
    parts: int,
    buckets: int,
    bucket_size: int,
    bits: int,
    scheme: str,
    key: RandomKey,
    table: Tensor | None,
    beside: Tensor | None,
) -> Tensor:
    """The messages of a vector that is not empty."""
    x = x.reshape(-1).contiguous()
    size = message_bytes(buckets, bucket_size, bits)
    stride = size if beside is None else size + beside.shape[1]
    messages = torch.empty((parts, stride), dtype=torch.uint8, device=x.device)
    native.launch(
        "message_encode",
        x.device,
        x,
        ELEMENTS[x.dtype],
        x.numel(),
        bits,
        bucket_size,
        _SCHEMES[scheme],
        None if table is None else table.contiguous(),
        *random_words(key),
        messages,
        stride,
        parts,
        buckets,
    )
    if beside is not None:
        messages[:, size:].copy_(beside)
    return messages


def message_decode(
    native: Native,
    messages: Tensor,
    buckets: int,
    bucket_size: int,
    bits: int,
    scheme: str,
    key: RandomKey,
    table: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """The values of messages that are not empty."""
    messages = _rows(messages)
    parts = messages.shape[0]
    out = torch.empty((parts, buckets * bucket_size), dtype=dtype, device=messages.device)
    native.launch(
        "message_decode",
        messages.device,
        messages,
        messages.stride(0),
        parts,
        buckets,
        bucket_size,
        bits,
        _SCHEMES[scheme],
        None if table is None else table.contiguous(),
        *random_words(key),
        out,
        ELEMENTS[dtype],
    )
    return out


def message_mean(
    native: Native,
    messages: Tensor,
    buckets: int,
    bucket_size: int,
    bits: int,
    divisor: float,
    table: Tensor | None,
) -> Tensor:
    """The mean of messages that are not empty."""
    messages = _rows(messages)
    out = torch.empty(buckets * bucket_size, dtype=torch.float32, device=messages.device)
    native.launch(
        "message_mean",
        messages.device,
        messages,
        messages.stride(0),
        messages.shape[0],
        buckets,
        bucket_size,
        bits,
        None if table is None else table.contiguous(),
        divisor,
        out,
    )
    return out


def _rows(messages: Tensor) -> Tensor:
    return messages if messages.stride(1) == 1 else messages.contiguous()
