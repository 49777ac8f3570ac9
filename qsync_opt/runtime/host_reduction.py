"""Gradients of ranks on GPUs that their backend does not reach: averaged beside the backward.

NCCL refuses ranks that share a GPU, and gloo, given tensors of a GPU, copies them on streams that
it keeps to itself. In releases of torch up to 2.10 at least, DDP's reducer did not always wait
for these streams and went on with gradients that were not there yet (pytorch issue 155714). Here
everything is waited for: what the host does by a thread, what the GPU does by streams.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, ClassVar

import torch
from torch import Tensor, distributed
from torch.futures import Future


def goes_by_host(tensor: Tensor, group: Any = None) -> bool:
    """Whether a tensor lies where the backend of a group does not reach by itself."""
    return tensor.is_cuda and distributed.get_backend(group) == "gloo"


def _twin(group: Any) -> Any:
    """Another process group of all ranks, which waits for them as long.

    A part of the ranks keeps its group: torch names one that only its members make after them,
    and a second one of that name meets what the first has left in the store.
    """
    whole: Any = distributed.group.WORLD
    given = whole if group is None else group
    if distributed.get_world_size(given) < distributed.get_world_size():
        return given
    options = getattr(given._get_backend(torch.device("cpu")), "options", None)
    return distributed.new_group(timeout=getattr(options, "_timeout", None), backend="gloo")


class Reduction(ABC):
    """Averages tensors over ranks, one after the other, beside what else this rank does.

    It talks over a process group of its own, which all ranks make together: gloo tells messages
    apart by their order, and that of two threads is not the same on every rank.

    Args:
        group: process group of gloo; None: the default one.
        device: of the tensors.
    """

    #: What costs call it: the time of an average is that of a way to take it.
    backend: ClassVar[str]

    def __init__(self, group: Any, device: torch.device) -> None:
        self._given: Any = group
        self._group: Any = _twin(group)
        self._world = distributed.get_world_size(group)
        self._worker = ThreadPoolExecutor(1, "gradients")  # one: all ranks in the same order
        self._device = device
        self._has_failed = False
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def average(self, values: Tensor, wire: torch.dtype | None = None) -> Future[Tensor]:
        """Average a tensor in place; the same tensor, once that is done.

        Args:
            values: not to be touched until then.
            wire: dtype in which values are sent and added up; None: that of the values.
        """
        given = values.to(wire or values.dtype).div_(self._world)
        begun = self._begin(given)
        there: Any = None
        if self._stream is not None:
            there = torch.cuda.Event()  # type: ignore[no-untyped-call]
            there.record(torch.cuda.current_stream(self._device))
            for tensor in (values, given):
                tensor.record_stream(self._stream)
        # Errors are raised in what follows the first future: set on it, C++ would not see them.
        devices: Any = None if self._stream is None else [self._device]
        done: Future[Tensor] = Future(devices=devices)
        failure: list[Exception] = []

        def result(_: Future[Tensor]) -> Tensor:
            if failure:
                raise failure[0]
            return values

        averaged: Future[Tensor] = done.then(result)
        self._worker.submit(self._run, values, begun, there, done, failure)
        return averaged

    def close(self) -> None:
        """End the thread; what it still does is let go."""
        self._worker.shutdown(wait=False, cancel_futures=True)
        if self._group is not self._given:
            with suppress(RuntimeError, ValueError):  # it broke, or went with all others
                distributed.destroy_process_group(self._group)

    @abstractmethod
    def _begin(self, given: Tensor) -> Tensor:
        """What the thread is to have of a rank's own part; queued where the caller is."""

    @abstractmethod
    def _add_up(self, begun: Tensor, there: Any, values: Tensor) -> None:
        """In the thread, and on its stream: the sum over ranks into `values`.

        Args:
            begun: from `_begin`.
            there: event after which it is there; None on a CPU.
            values: to be filled.
        """

    def _run(
        self,
        values: Tensor,
        begun: Tensor,
        there: Any,
        done: Future[Tensor],
        failure: list[Exception],
    ) -> None:
        try:
            with torch.cuda.stream(self._stream), torch.no_grad():
                self._add_up(begun, there, values)
                # Remembers where the stream stands: of the devices of its value, so not of None.
                done.set_result(values)
        except Exception as error:  # noqa: BLE001  # whatever it is, the backward waits for it
            self._has_failed = True
            failure.append(error)
            done.set_result(values)


class HostReduction(Reduction):
    """By gloo, in the memory of the host."""

    backend = "gloo"

    def _begin(self, given: Tensor) -> Tensor:
        staged = torch.empty(given.shape, dtype=given.dtype, pin_memory=given.is_cuda)
        return staged.copy_(given, non_blocking=True)

    def _add_up(self, begun: Tensor, there: Any, values: Tensor) -> None:
        if there is not None:
            there.synchronize()
        distributed.all_reduce(begun, group=self._group)
        values.copy_(begun.to(values.device, non_blocking=True))
