"""How much memory a call takes: its peak, and what it leaves behind.

On a GPU the allocator counts, workspaces of libraries included. On a CPU the storages that
low-level operations hand out are counted, which misses what an operation uses inside.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from qsync_opt.costs import FixedMemory
from qsync_opt.graph import OperatorGraph
from qsync_opt.measure.calls import tensors_in

#: The CUDA allocator gives multiples of this (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize).
CUDA_ROUNDING_BYTES = 512

_SMALL_PRODUCT = 256


@dataclass(slots=True)
class MemoryUse:
    """Bytes over what there was before.

    Attributes:
        peak_bytes: at most.
        left_bytes: at the end.
    """

    peak_bytes: int = 0
    left_bytes: int = 0


@contextmanager
def metered(device: torch.device) -> Iterator[MemoryUse]:
    """Count what is allocated inside; the numbers are there when the context ends."""
    use = MemoryUse()
    # Tensors in garbage that is cyclic would be freed at any moment in between.
    collects = gc.isenabled()
    gc.disable()
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
            yield use
            torch.cuda.synchronize(device)
            use.peak_bytes = torch.cuda.max_memory_allocated(device) - before
            use.left_bytes = torch.cuda.memory_allocated(device) - before
        else:
            with _StorageMode() as mode:
                yield use
            use.peak_bytes, use.left_bytes = mode.peak_bytes, mode.live_bytes
    finally:
        if collects:
            gc.enable()


class _StorageMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages that operations make, until they are freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.peak_bytes = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = {t.untyped_storage()._cdata for t in tensors_in((args, kwargs or {}))}
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in given and storage._cdata not in self._known:
                self._add(storage)
        return result

    def _add(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()

        def forget(_: object) -> None:
            self._known.pop(key, None)
            self.live_bytes -= size

        self._known[key] = weakref.ref(storage, forget)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)


def saved_storages(run: Callable[[], Any]) -> tuple[Any, dict[int, int]]:
    """What a call gives, and the storages kept for its backward: address -> bytes."""
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        alias = tensor.detach()  # held until the end, or an address could be used again
        kept.setdefault(alias.untyped_storage().data_ptr(), alias)
        return alias

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    return result, {key: tensor.untyped_storage().nbytes() for key, tensor in kept.items()}


def addresses(tensors: Iterable[Tensor]) -> set[int]:
    """Addresses of the storages of tensors."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def fixed_memory(graph: OperatorGraph, device: torch.device) -> FixedMemory:
    """What is in memory whatever the plan, apart from the optimizer.

    Call it after the libraries have been used, so that their workspaces are there.
    """
    cuda = device.type == "cuda"
    unit = CUDA_ROUNDING_BYTES if cuda else 1
    trained = [parameter for parameter in graph.parameters if parameter.requires_grad]
    sizes = {id(p): rounded(4 * p.elements, unit) for p in graph.parameters}
    workspace = context = 0
    if cuda:
        workspace = _workspace_bytes(device)
        free, total = torch.cuda.mem_get_info(device)
        context = max(0, total - free - torch.cuda.memory_reserved(device))
    else:
        total = _host_memory_bytes()
    return FixedMemory(
        rounding_bytes=unit,
        parameter_bytes=sum(sizes.values()),
        gradient_bytes=sum(sizes[id(parameter)] for parameter in trained),
        buffer_bytes=graph.buffer_bytes,
        batch_bytes=graph.batch_bytes,
        workspace_bytes=workspace,
        context_bytes=context,
        device_bytes=total,
    )


def rounded(size: int, unit: int) -> int:
    """A size rounded up to whole units."""
    return -(-size // unit) * unit


def tensor_bytes(state: Mapping[Any, Any], unit: int, device_type: str) -> int:
    """Bytes of the tensors in an optimizer's state, each rounded up.

    Args:
        state: of the optimizer.
        unit: what the device's allocator rounds up to.
        device_type: tensors elsewhere, such as counters of steps on the host, do not count.
    """
    tensors = [t for row in state.values() for t in tensors_in(row)]
    there = [t for t in tensors if t.device.type == device_type]
    return sum(rounded(t.numel() * t.element_size(), unit) for t in there)


def _workspace_bytes(device: torch.device) -> int:
    """What the matrix libraries keep allocated from their first product on.

    There is one workspace for each thread: the one that runs the forward, and autograd's.
    """
    torch.cuda.synchronize(device)
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated(device)
    for dtype in (torch.float32, torch.float16):
        square = torch.ones(_SMALL_PRODUCT, _SMALL_PRODUCT, device=device, dtype=dtype)
        product = torch.mm(square.requires_grad_(), square)
        torch.autograd.grad(product, square, product.detach())
        del square, product
    torch.cuda.synchronize(device)
    return max(0, torch.cuda.memory_allocated(device) - before)


def _host_memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):  # not on every system
        return 0
