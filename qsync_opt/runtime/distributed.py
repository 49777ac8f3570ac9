"""The ranks of a training job: joining them, and exchanging short messages between them.

Gradients go over NCCL between GPUs, and over gloo between CPUs or ranks that share a GPU.
Messages go over a gloo group of their own: it needs no GPU, waits for no gradient, and notices
within milliseconds when the process at the other end is gone. Messages are JSON text or
tensors; nothing is pickled.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import PrefixStore, distributed_c10d  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from qsync_opt.errors import QsyncError, TrainError

#: How long a rank may keep the others waiting in a collective before they give it up.
TIMEOUT_S = 600.0

#: How long ranks have to answer when one of them is missing.
_ROLL_CALL_S = 3.0


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among those of its job.

    Attributes:
        rank: number of this process.
        world: how many processes.
        device: where this rank computes.
        control: the group of the messages; None for a single process.
        store: where ranks leave word for each other; None if the group was not made here.
    """

    rank: int
    world: int
    device: torch.device
    control: Any = None
    store: Any = None

    def gather_bytes(self, message: bytes) -> list[bytes]:
        """The messages of all ranks in the order of their numbers."""
        if self.control is None:
            return [message]
        lengths = self._gather(torch.tensor([len(message)])).flatten().tolist()
        padded = torch.zeros(max(1, *lengths), dtype=torch.uint8)
        if message:
            padded[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        rows = self._gather(padded)
        return [row[:length].numpy().tobytes() for row, length in zip(rows, lengths, strict=True)]

    def broadcast_bytes(self, message: bytes, source: int = 0) -> bytes:
        """The message of one rank on every rank; what the others give is not looked at."""
        if self.control is None:
            return message
        length = torch.tensor([len(message) if self.rank == source else 0])
        distributed.broadcast(length, source, group=self.control)
        content = torch.zeros(int(length), dtype=torch.uint8)
        if self.rank == source and message:
            content = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        distributed.broadcast(content, source, group=self.control)
        return content.numpy().tobytes()

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Fill a CPU tensor with what one rank has in it."""
        if self.control is not None:
            distributed.broadcast(tensor, source, group=self.control)

    def start_max(self, level: int) -> Pending:
        """Begin to ask for the highest level of all ranks; meanwhile the rank can compute."""
        if self.control is None:
            return Pending(level, None)
        told = torch.tensor([level])
        work = distributed.all_reduce(
            told, op=distributed.ReduceOp.MAX, group=self.control, async_op=True
        )
        return Pending(told, work)

    def any(self, flag: bool) -> bool:
        """Whether any rank raises its flag; waits for all of them."""
        return bool(self.start_max(int(flag)).result())

    def share_failure(self, failure: QsyncError | None) -> None:
        """Raise on every rank what went wrong on any of them, if anything did.

        Raises:
            QsyncError: `failure`, on the rank that has it.
            TrainError: with the same words, on the others.
        """
        told = self.gather_bytes(b"" if failure is None else str(failure).encode())
        if failure is not None:
            raise failure
        for rank, text in enumerate(told):
            if text:
                words = text.decode().rstrip(".")
                raise TrainError(f"rank {rank} cannot go on: {words}", f"See rank {rank}")

    def give_up(self) -> None:
        """Leave a job of which a rank is gone, without waiting for what it has not sent.

        Only for a group made here. Destroying an NCCL communicator waits for its kernels, and
        these wait for the lost rank; gloo's sockets are closed already.
        """
        if self.store is None or distributed.get_backend() != "nccl":
            return
        abort = getattr(distributed_c10d, "_abort_process_group", None)  # no public name yet
        if abort is not None:
            with suppress(RuntimeError):
                abort()

    def missing(self, word: str) -> list[int]:
        """The ranks that do not answer a roll call; empty where that cannot be told.

        Args:
            word: names this call; every rank that is alive gives the same.
        """
        if self.store is None:
            return []
        waiting = set(range(self.world)) - {self.rank}
        end = time.monotonic() + _ROLL_CALL_S
        with suppress(RuntimeError):  # the store itself went with the rank that held it
            self.store.set(f"{word}/{self.rank}", "here")
            while waiting and time.monotonic() < end:
                waiting -= {rank for rank in waiting if self.store.check([f"{word}/{rank}"])}
                time.sleep(0.05)
            return sorted(waiting)
        return [0]

    def _gather(self, tensor: Tensor) -> Tensor:
        rows = [torch.empty_like(tensor) for _ in range(self.world)]
        distributed.all_gather(rows, tensor, group=self.control)
        return torch.stack(rows)


class Pending:
    """An answer on its way."""

    def __init__(self, told: Tensor | int, work: Any) -> None:
        self._told = told
        self._work = work

    def check(self) -> None:
        """Raise if it is known already that no answer will come; does not wait.

        Raises:
            RuntimeError: of the network.
        """
        if self._work is not None and self._work.is_completed():
            self._work.wait()

    def result(self) -> int:
        """Wait for it."""
        if self._work is not None:
            self._work.wait()
        return int(self._told)


@contextmanager
def joined(device: torch.device, timeout_s: float = TIMEOUT_S) -> Iterator[Ranks]:
    """This process as a rank of its job.

    A default process group that is there already is used. Otherwise the variables of a
    launcher such as torchrun (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) say which job this
    is; without them it is a job of one process, and nothing is opened.

    Args:
        device: where this rank computes; a GPU must be the current one.
        timeout_s: see `TIMEOUT_S`.

    Raises:
        TrainError: not all ranks could be reached.
    """
    limit = timedelta(seconds=timeout_s)
    if distributed.is_initialized():
        control = distributed.new_group(backend="gloo", timeout=limit)
        try:
            yield _ranks(device, control, None)
        finally:
            with suppress(RuntimeError):  # the group broke with a rank
                distributed.destroy_process_group(control)
        return
    size = os.environ.get("WORLD_SIZE", "1")
    if not size.isdecimal():
        what = f"the ranks of the job cannot be joined: WORLD_SIZE is {size!r}"
        raise TrainError(what, "Let a launcher set it, or unset it")
    if int(size) == 1:
        yield Ranks(rank=0, world=1, device=device)
        return
    try:
        store, rank, world = next(rendezvous("env://", timeout=limit))
        word = PrefixStore(f"qsync_opt/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        # A launcher's store outlives a job; what is left in it is not for the next one.
        word = PrefixStore(f"job {word.add(f'jobs of {rank}', 1)}", word)
        word.set_timeout(limit)
        backend = choose_backend(device, word, rank, world)
        distributed.init_process_group(
            backend,
            store=word,
            rank=rank,
            world_size=world,
            timeout=limit,
            # NCCL then connects at once, and never guesses the GPU of a barrier.
            device_id=device if backend == "nccl" else None,
        )
        control = distributed.new_group(backend="gloo", timeout=limit)
    except (RuntimeError, ValueError, OSError) as error:
        raise TrainError(
            f"the ranks of the job cannot be joined: {first_line(error)}",
            "Check MASTER_ADDR and MASTER_PORT, and that every rank was started",
        ) from error
    try:
        yield _ranks(device, control, word)
    finally:
        if distributed.is_initialized():  # or it was given up
            with suppress(RuntimeError):
                distributed.destroy_process_group()


def choose_backend(device: torch.device, store: Any, rank: int, world: int) -> str:
    """What gradients go over: NCCL where every rank has a GPU of its own, else gloo.

    NCCL refuses two ranks on one GPU, as under MPS; gloo reduces such tensors in the memory of
    the host.

    Args:
        device: of this rank.
        store: that all ranks can read; each leaves word of its device there.
        rank: number of this process.
        world: how many processes.
    """
    name = device.type
    if device.type == "cuda":
        name = f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}"
    store.set(f"device/{rank}", name)
    names = [store.get(f"device/{other}").decode() for other in range(world)]
    apart = len(set(names)) == world and "cpu" not in names
    return "nccl" if device.type == "cuda" and apart else "gloo"


def _ranks(device: torch.device, control: Any, store: Any) -> Ranks:
    world = distributed.get_world_size()
    return Ranks(
        rank=distributed.get_rank(), world=world, device=device, control=control, store=store
    )


def names_of(ranks: Sequence[int], kinds: Sequence[str]) -> str:
    """Ranks with their device kinds, for a message: `rank 1 (weak)`."""
    return ", ".join(f"rank {rank} ({kinds[rank]})" for rank in ranks)


def first_line(error: BaseException) -> str:
    """What an error says, cut at the end of its first line: torch appends a stack of C++."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
