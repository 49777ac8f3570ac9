"""Gradients of ranks that share a GPU, averaged in the memory of that GPU.

Such ranks (NVIDIA's MPS, or two processes that take turns) are as near to each other as can be,
yet NCCL refuses them, and through the host 438 MB of gradients of BERT took 200 ms. Here each
rank copies its part to a place that the others read; handles of memory and of events go over
gloo once, and a word for each bucket, by which the host of a rank knows that what its streams
are to wait for has been queued.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, distributed

from qsync_opt.errors import KernelError
from qsync_opt.kernels.native import Native, native
from qsync_opt.kernels.shared_memory import HANDLE_BYTES, SharedEvent, SharedMemory
from qsync_opt.runtime.distributed import Ranks
from qsync_opt.runtime.host_reduction import HostReduction, Reduction

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

#: Places of a board, taken in turn: one is filled while the one before is still read. The word
#: for a bucket tells that its reader has queued all reads of the place that comes next.
_PLACES = 2

_LEAST_BYTES = 2**20

#: Elements that are averaged for a check, and products that make a rank late in it.
_CHECKED, _LATE = 4096, 20

#: How long a rank that leaves waits for the others, which may read its memory.
_FAREWELL = timedelta(seconds=10)


class Board(Protocol):
    """Places where each rank puts a tensor that all ranks read."""

    def write(self, place: int, values: Tensor) -> None:
        """Put this rank's values there, once nobody reads what was there before."""

    def read(self, place: int, like: Tensor) -> list[Tensor]:
        """What each rank has put there; all have queued it. `like` has the shape and dtype."""

    def done(self, place: int) -> None:
        """Let others know that all reads have been queued."""

    def close(self) -> None:
        """Give the memory back; all ranks do so together."""


class SharedReduction(Reduction):
    """Over a board.

    Args:
        group: process group of gloo; None: the default one.
        device: of the tensors.
        make_board: given a group of all ranks and a size in bytes, a board with places of it;
            all ranks call it together.

    Raises:
        KernelError: of `make_board`, on all ranks.
    """

    backend = "shared memory"

    def __init__(
        self, group: Any, device: torch.device, make_board: Callable[[Any, int], Board]
    ) -> None:
        super().__init__(group, device)
        self._make_board = make_board
        self._size_bytes = _LEAST_BYTES
        try:
            self._board = make_board(self._group, _LEAST_BYTES)
        except KernelError:
            super().close()
            raise
        self._count = 0

    def close(self) -> None:
        """End the thread, and give the memory back if all ranks do so now."""
        if not self._has_failed:
            self._worker.submit(self._leave)
            self._worker.shutdown()
        super().close()

    def _begin(self, given: Tensor) -> Tensor:
        return given

    def _add_up(self, begun: Tensor, there: Any, values: Tensor) -> None:
        needed = begun.numel() * begun.element_size()
        if needed > self._size_bytes:  # of equal tensors on all ranks, so all of them are here
            self._board.close()
            self._board = self._make_board(self._group, needed)
            self._size_bytes = needed
        place = self._count % _PLACES
        self._count += 1
        if there is not None:
            self._stream.wait_event(there)
        self._board.write(place, begun)
        tell(self._group)
        rows = self._board.read(place, begun)
        # The ranks in their order, so that all of them round alike.
        total = torch.add(rows[0], rows[1], out=values if values.dtype is begun.dtype else None)
        for row in rows[2:]:
            total.add_(row)
        self._board.done(place)
        if total is not values:
            values.copy_(total)

    def _leave(self) -> None:
        """Memory that another rank might still read is left to the end of the process."""
        with suppress(RuntimeError):  # a rank that is gone, or does something else
            distributed.monitored_barrier(self._group, timeout=_FAREWELL)
            self._board.close()


class GpuBoard:
    """A board in the memory of a GPU that all ranks share.

    Args:
        group: process group of gloo; None: the default one.
        device: the GPU; calls queue their work on its current stream.
        native: its kernels.
        size_bytes: of a place.

    Raises:
        KernelError: on every rank, if one could not make or open what it needs.
    """

    def __init__(self, group: Any, device: torch.device, native: Native, size_bytes: int) -> None:
        self._group, self._device = group, device
        self._rank = distributed.get_rank(group)
        self._size_bytes = -(-size_bytes // HANDLE_BYTES) * HANDLE_BYTES  # aligned for any dtype
        whole = self._size_bytes * _PLACES
        self._memory: list[SharedMemory] = []
        self._staged: list[list[SharedEvent]] = []  # of each rank, of each place
        self._done: list[list[SharedEvent]] = []
        with torch.cuda.device(device):
            mine = self._together(lambda: _Own(native, device, whole))
            handles = _ranks_of(group).gather_bytes(mine.handles)
            self._together(lambda: self._open(native, whole, mine, handles))
        self._views = [
            [memory.tensor()[i * self._size_bytes :] for i in range(_PLACES)]
            for memory in self._memory
        ]

    def write(self, place: int, values: Tensor) -> None:
        """See `Board`."""
        for events in self._done:
            events[place].wait(self._stream())
        self._at(self._rank, place, values).copy_(values)
        self._staged[self._rank][place].record(self._stream())

    def read(self, place: int, like: Tensor) -> list[Tensor]:
        """See `Board`."""
        for events in self._staged:
            events[place].wait(self._stream())
        return [self._at(rank, place, like) for rank in range(len(self._memory))]

    def done(self, place: int) -> None:
        """See `Board`."""
        self._done[self._rank][place].record(self._stream())

    def close(self) -> None:
        """See `Board`."""
        torch.cuda.synchronize(self._device)
        tell(self._group)
        with torch.cuda.device(self._device):
            for rank in range(len(self._memory)):
                if rank != self._rank:
                    self._close(rank)
            tell(self._group)  # nobody has it open any more
            self._close(self._rank)

    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def _at(self, rank: int, place: int, like: Tensor) -> Tensor:
        size = like.numel() * like.element_size()
        return self._views[rank][place][:size].view(like.dtype).view(like.shape)

    def _close(self, rank: int) -> None:
        for event in (*self._staged[rank], *self._done[rank]):
            event.close()
        self._memory[rank].close()

    def _open(self, native: Native, whole: int, mine: _Own, handles: list[bytes]) -> None:
        for rank, text in enumerate(handles):
            parts = [text[i : i + HANDLE_BYTES] for i in range(0, len(text), HANDLE_BYTES)]
            if rank == self._rank:
                self._memory.append(mine.memory)
                events = mine.events
            else:
                self._memory.append(SharedMemory(native, self._device, whole, parts[0]))
                events = [SharedEvent(native, part) for part in parts[1:]]
            self._staged.append(events[:_PLACES])
            self._done.append(events[_PLACES:])

    def _together(self, run: Callable[[], Any]) -> Any:
        """Do something on all ranks, or fail on all of them."""
        failure: KernelError | None = None
        made = None
        try:
            made = run()
        except KernelError as error:
            failure = error
        if failure is not None or not all_say_yes(failure is None, self._group):
            raise failure or KernelError("shared memory", "another rank could not open it")
        return made


class _Own:
    """What a rank makes, for all to open."""

    def __init__(self, native: Native, device: torch.device, size_bytes: int) -> None:
        self.memory = SharedMemory(native, device, size_bytes)
        self.events = [SharedEvent(native) for _ in range(2 * _PLACES)]
        self.handles = b"".join([self.memory.handle, *(event.handle for event in self.events)])


def reduction_for(group: Any, device: torch.device) -> Reduction:
    """What averages tensors that the group's backend does not reach; all ranks call it together.

    Args:
        group: process group of gloo; None: the default one.
        device: of the tensors, a GPU.
    """
    kernels = native(device.index) if device.type == "cuda" else None
    if all_say_yes(kernels is not None, group) and kernels is not None:
        place = f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}"
        if len(set(_ranks_of(group).gather_bytes(place.encode()))) == 1:
            return _on_one_gpu(group, device, kernels)
    return HostReduction(group, device)


def _on_one_gpu(group: Any, device: torch.device, kernels: Native) -> Reduction:
    def make_board(group: Any, size_bytes: int) -> Board:
        return GpuBoard(group, device, kernels, size_bytes)

    try:
        shared = SharedReduction(group, device, make_board)
    except KernelError:  # processes of two containers, say; all ranks know
        return HostReduction(group, device)
    if adds_up(shared, device, group):
        return shared
    shared.close()
    return HostReduction(group, device)


def adds_up(reduction: Reduction, device: torch.device, group: Any) -> bool:
    """Whether averages over ranks are right, in turns in which one rank is late; on all of them.

    What processes share of a GPU depends on the driver, on MPS and on containers, and a gradient
    that is wrong is not seen later.

    Args:
        reduction: of the group.
        device: of its tensors.
        group: of the ranks.
    """
    rank, world = distributed.get_rank(group), distributed.get_world_size(group)
    places = torch.arange(_CHECKED, device=device, dtype=torch.float32)
    work = torch.eye(_CHECKED // 8, device=device)
    pending = []
    for turn in range(2 * _PLACES * world):
        if rank == turn % world:
            for _ in range(_LATE):
                work = work @ work
        values = places * (turn + 1) + rank * work[0, 0]
        pending.append((reduction.average(values), places * (turn + 1) + (world - 1) / 2))
    is_right = all(torch.allclose(found.wait(), wanted) for found, wanted in pending)
    return all_say_yes(is_right, group)


def reduce_beside(model: DistributedDataParallel, device: torch.device) -> Reduction:
    """Let DDP average its gradients in this way; on all ranks, before the first backward.

    Args:
        model: with a process group of gloo.
        device: of its parameters.
    """
    group: Any = model.process_group
    reduction = reduction_for(group, device)
    # DDP looks at annotations and takes no text for them; a lambda has none.
    model.register_comm_hook(None, lambda state, bucket: reduction.average(bucket.buffer()))
    return reduction


def tell(group: Any) -> None:
    """Wait until all ranks are here."""
    all_say_yes(True, group)


def all_say_yes(mine: bool, group: Any) -> bool:
    """Whether all ranks do."""
    return not _ranks_of(group).any(not mine)


def _ranks_of(group: Any) -> Ranks:
    """The ranks of a group of gloo, to send one another words; None: of the default one."""
    control: Any = distributed.group.WORLD if group is None else group
    rank, world = distributed.get_rank(control), distributed.get_world_size(control)
    return Ranks(rank=rank, world=world, device=torch.device("cpu"), control=control)
