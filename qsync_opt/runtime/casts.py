"""Dtypes of precisions, and the cache through which consumers of one tensor share its cast.

Memory decides how long a cast lives. It is held until the next one is asked for, so that
consecutive readers (query, key and value) always share. After that, and after a reader that is
known to be the last, only what autograd saved is left, and later readers find it through weak
references. Nothing outlives its tensor, and a checkpointed region keeps nothing of what it
promised to recompute.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from qsync_opt.errors import ParameterError
from qsync_opt.kernels.native import capability_of, stream_of
from qsync_opt.precision import Precision

#: Dtypes that a precision-aware operator reads.
INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_DTYPES = {
    Precision.FP32: torch.float32,
    Precision.TF32: torch.float32,
    Precision.BF16: torch.bfloat16,
    Precision.FP16: torch.float16,
}
_FIRST_BF16_CAPABILITY = (8, 0)


def half_dtype(device: torch.device) -> torch.dtype:
    """The 16-bit float beside 8-bit products: bf16, or fp16 on GPUs without bf16."""
    if device.type == "cuda" and torch.version.hip is None:
        index = torch.cuda.current_device() if device.index is None else device.index
        has_bf16 = capability_of(index) >= _FIRST_BF16_CAPABILITY
        return torch.bfloat16 if has_bf16 else torch.float16
    return torch.bfloat16


def compute_dtype(precision: Precision, device: torch.device) -> torch.dtype:
    """The float dtype in which an operator multiplies what it does not multiply in 8 bits."""
    return _DTYPES.get(precision) or half_dtype(device)


def require_input(x: Tensor, operator: str) -> None:
    """Refuse what no precision reads.

    Raises:
        ParameterError: neither fp32, bf16 nor fp16, or a single number.
    """
    if x.dim() == 0:
        raise ParameterError(f"input of {operator}", "must have dimensions", tuple(x.shape))
    if x.dtype not in INPUT_DTYPES:
        rule = "must have dtype float32, bfloat16 or float16"
        remedy = "Precisions start from fp32; cast the input, or revert the model."
        raise ParameterError(f"input of {operator}", rule, x.dtype, remedy)


def map_floats(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """A copy of nested lists, tuples and dicts with `change` done to every float tensor."""
    if isinstance(value, Tensor):
        return change(value) if value.is_floating_point() else value
    if type(value) in (list, tuple):
        return type(value)(map_floats(item, change) for item in value)
    if type(value) is dict:
        return {name: map_floats(item, change) for name, item in value.items()}
    return value


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """A copy of nested arguments with every float tensor in `dtype`; other things stay."""
    return map_floats(value, lambda tensor: tensor.to(dtype))


def float_tensors(value: Any) -> list[Tensor]:
    """The float tensors in nested arguments."""
    found: list[Tensor] = []
    map_floats(value, found.append)
    return found


Cast = tuple[Tensor, ...]


class CastCache:
    """Casts of tensors by identity, version and stream.

    A tensor that was written in place, and a reader on another CUDA stream, get a new cast;
    so does everything under torch.compile, which finds common parts by itself. Only what an
    operator that is differentiated has made is shared: what the caller hands in may be a buffer
    that is filled anew in ways that no version tells (`dist.recv`, NumPy, `.data`).
    """

    def __init__(self) -> None:
        self._entries: dict[_Place, _Entry] = {}
        self._latest: tuple[_Place, Cast] | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, x: Tensor, key: Hashable, make: Callable[[], Cast], *, hold: bool = True) -> Cast:
        """The cast of `x` that `key` names, made by `make` where there is none.

        Args:
            x: the tensor.
            key: of the cast.
            make: makes it.
            hold: it until the next one is asked for; False where no other reader will come.
        """
        if torch.compiler.is_compiling() or x.grad_fn is None or torch.is_inference_mode_enabled():
            self._latest = None
            return make()
        stream = stream_of(x.device.index) if x.is_cuda else 0
        place = (id(x), stream, key)
        entry = self._entries.get(place)
        found = entry.find(x) if entry is not None else None
        if found is None:
            found = make()
            source = weakref.ref(x, partial(self._forget, place))
            self._entries[place] = _Entry(source, x._version, found)
        self._latest = (place, found) if hold else None
        return found

    @property
    def latest(self) -> Cast:
        """The cast that was asked for last; empty where none is held."""
        return () if self._latest is None else self._latest[1]

    def clear(self) -> None:
        """Drop every cast that nothing else holds."""
        self._entries.clear()
        self._latest = None

    def _forget(self, place: _Place, dead: weakref.ref[Tensor]) -> None:
        """The tensor of an entry died; by now another one may have its place."""
        entry = self._entries.get(place)
        if entry is not None and entry.source is dead:
            del self._entries[place]
            if self._latest is not None and self._latest[0] == place:
                self._latest = None


_Place = tuple[int, int, Hashable]


class _Entry:
    def __init__(self, source: weakref.ref[Tensor], version: int, cast: Cast) -> None:
        self.source = source
        self._version = version
        self._parts = [TensorWeakRef(part) for part in cast]

    def find(self, x: Tensor) -> Cast | None:
        if self.source() is not x or x._version != self._version:
            return None
        parts = [reference() for reference in self._parts]
        present = tuple(part for part in parts if part is not None)
        return present if len(present) == len(parts) else None
