"""The messages of `bucket_reference` as torch operators in the namespace `qsync_opt`.

As in `library`: on a CUDA device the compiled kernels run, elsewhere the plain torch reference,
and the public functions have the signatures and meanings of their namesakes there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qsync_opt.kernels import bucket_launch
from qsync_opt.kernels import bucket_reference as reference
from qsync_opt.kernels.checks import FLOATS, check_messages, check_room
from qsync_opt.kernels.library import define_operators, kernels_for
from qsync_opt.kernels.rounding import RandomKey

_NO_KEY = RandomKey()
_LAYOUT = "int buckets, int bucket_size, int bits"
_CODE = "str scheme, int seed, int step, int tensor, Tensor? table"

#: Of the kernels: block rows of a grid, and elements of a bucket.
_MOST_PARTS, _MOST_BUCKET = 65535, 2**24

#: Operator -> schema, without its name.
SCHEMAS = {
    "message_encode": f"(Tensor x, int parts, {_LAYOUT}, {_CODE}, Tensor? beside) -> Tensor",
    "message_decode": f"(Tensor messages, {_LAYOUT}, {_CODE}, ScalarType dtype) -> Tensor",
    "message_mean": f"(Tensor messages, {_LAYOUT}, float divisor, Tensor? table) -> Tensor",
}


def _takes(parts: int, buckets: int, bucket_size: int) -> bool:
    """Whether the kernels know such messages; else the reference runs."""
    return buckets > 0 and parts <= _MOST_PARTS and bucket_size <= _MOST_BUCKET


# --- the operators ---------------------------------------------------------------------------


def _message_encode(
    x: Tensor,
    parts: int,
    buckets: int,
    bucket_size: int,
    bits: int,
    scheme: str,
    seed: int,
    step: int,
    tensor: int,
    table: Tensor | None,
    beside: Tensor | None,
) -> Tensor:
    reference.check_code(bits, bucket_size, scheme, table)
    check_room(x, parts, parts * buckets * bucket_size, table, beside)
    key = RandomKey(seed=seed, step=step, tensor=tensor)
    arguments = (x, parts, buckets, bucket_size, bits, scheme, key, table, beside)
    kernels = kernels_for(x)
    is_coded = x.numel() > 0 and x.dtype in FLOATS
    if kernels is None or not is_coded or not _takes(parts, buckets, bucket_size):
        return reference.message_encode(*arguments)
    return bucket_launch.message_encode(kernels, *arguments)


def _message_decode(
    messages: Tensor,
    buckets: int,
    bucket_size: int,
    bits: int,
    scheme: str,
    seed: int,
    step: int,
    tensor: int,
    table: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    reference.check_code(bits, bucket_size, scheme, table)
    check_messages(messages, reference.message_bytes(buckets, bucket_size, bits), table)
    key = RandomKey(seed=seed, step=step, tensor=tensor)
    arguments = (messages, buckets, bucket_size, bits, scheme, key, table, dtype)
    kernels = kernels_for(messages)
    if kernels is None or dtype not in FLOATS or not _takes(len(messages), buckets, bucket_size):
        return reference.message_decode(*arguments)
    return bucket_launch.message_decode(kernels, *arguments)


def _message_mean(
    messages: Tensor,
    buckets: int,
    bucket_size: int,
    bits: int,
    divisor: float,
    table: Tensor | None,
) -> Tensor:
    reference.check_code(bits, bucket_size, "nearest", table)
    check_messages(messages, reference.message_bytes(buckets, bucket_size, bits), table)
    arguments = (messages, buckets, bucket_size, bits, divisor, table)
    kernels = kernels_for(messages)
    if kernels is None or not _takes(len(messages), buckets, bucket_size):
        return reference.message_mean(*arguments)
    return bucket_launch.message_mean(kernels, *arguments)


# --- their fake versions ---------------------------------------------------------------------


def _fake_message_encode(
    x: Tensor,
    parts: int,
    buckets: int,
    bucket_size: int,
    bits: int,
    scheme: str,
    seed: int,
    step: int,
    tensor: int,
    table: Tensor | None,
    beside: Tensor | None,
) -> Tensor:
    size = reference.message_bytes(buckets, bucket_size, bits)
    if beside is not None:
        size = size + beside.shape[1]
    return x.new_empty((parts, size), dtype=torch.uint8)


def _fake_message_decode(
    messages: Tensor,
    buckets: int,
    bucket_size: int,
    bits: int,
    scheme: str,
    seed: int,
    step: int,
    tensor: int,
    table: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    return messages.new_empty((messages.shape[0], buckets * bucket_size), dtype=dtype)


def _fake_message_mean(
    messages: Tensor,
    buckets: int,
    bucket_size: int,
    bits: int,
    divisor: float,
    table: Tensor | None,
) -> Tensor:
    return messages.new_empty(buckets * bucket_size, dtype=torch.float32)


define_operators(
    SCHEMAS,
    {
        "message_encode": (_message_encode, _fake_message_encode),
        "message_decode": (_message_decode, _fake_message_decode),
        "message_mean": (_message_mean, _fake_message_mean),
    },
)

_operators = torch.ops.qsync_opt


# --- the public functions --------------------------------------------------------------------


def message_encode(
    x: Tensor,
    parts: int,
    buckets: int,
    bucket_size: int,
    bits: int,
    scheme: str,
    key: RandomKey = _NO_KEY,
    table: Tensor | None = None,
    beside: Tensor | None = None,
) -> Tensor:
    """The messages of a vector; see `bucket_reference.message_encode`."""
    layout, words = (parts, buckets, bucket_size, bits), (key.seed, key.step, key.tensor)
    found: Tensor = _operators.message_encode(x, *layout, scheme, *words, table, beside)
    return found


def message_decode(
    messages: Tensor,
    buckets: int,
    bucket_size: int,
    bits: int,
    scheme: str,
    key: RandomKey = _NO_KEY,
    table: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The values of messages; see `bucket_reference.message_decode`."""
    layout, words = (buckets, bucket_size, bits), (key.seed, key.step, key.tensor)
    found: Tensor = _operators.message_decode(messages, *layout, scheme, *words, table, dtype)
    return found


def message_mean(
    messages: Tensor,
    buckets: int,
    bucket_size: int,
    bits: int,
    divisor: float,
    table: Tensor | None = None,
) -> Tensor:
    """The mean of messages; see `bucket_reference.message_mean`."""
    found: Tensor = _operators.message_mean(
        messages, buckets, bucket_size, bits, float(divisor), table
    )
    return found
