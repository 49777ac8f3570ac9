"""Gradients of ranks that share a GPU: averaged over gloo in the memory of the host.

NCCL refuses such ranks, and gloo, given tensors of a GPU, copies them on streams that it keeps
to itself. In releases of torch up to 2.10 at least, DDP's reducer did not always wait for these
streams and went on with gradients that were not there yet (pytorch issue 155714). Here every
copy is waited for: the one to the host by a thread beside the backward, the one back by the
stream that reads it.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed
from torch.futures import Future

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel


def goes_by_host(tensor: Tensor, group: Any = None) -> bool:
    """Whether a tensor lies where the backend of a group does not reach by itself."""
    return tensor.is_cuda and distributed.get_backend(group) == "gloo"


class HostReduction:
    """Averages tensors over ranks, one after the other, beside what else this rank does.

    Args:
        group: process group of gloo; None: the default one.
        device: of the tensors.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group = group
        self._world = distributed.get_world_size(group)
        self._worker = ThreadPoolExecutor(1, "gradients")  # one: all ranks in the same order
        self._device = device
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
        is_cuda = self._stream is not None
        staged = torch.empty(given.shape, dtype=given.dtype, pin_memory=is_cuda)
        staged.copy_(given, non_blocking=True)
        there: Any = None
        if is_cuda:
            there = torch.cuda.Event()  # type: ignore[no-untyped-call]
            there.record(torch.cuda.current_stream(self._device))
            values.record_stream(self._stream)
        # Errors are raised in what follows the first future: set on it, C++ would not see them.
        done: Future[None] = Future(devices=[self._device] if is_cuda else None)
        failure: list[Exception] = []

        def result(_: Future[None]) -> Tensor:
            if failure:
                raise failure[0]
            return values

        averaged: Future[Tensor] = done.then(result)
        self._worker.submit(self._run, values, staged, there, done, failure)
        return averaged

    def close(self) -> None:
        """End the thread; what it still does is let go."""
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _run(
        self,
        values: Tensor,
        staged: Tensor,
        there: Any,
        done: Future[None],
        failure: list[Exception],
    ) -> None:
        try:
            if there is not None:
                there.synchronize()
            distributed.all_reduce(staged, group=self._group)
            with torch.cuda.stream(self._stream), torch.no_grad():
                values.copy_(staged.to(values.device, non_blocking=True))
                done.set_result(None)  # remembers where the stream stands
        except Exception as error:  # noqa: BLE001  # whatever it is, the backward waits for it
            failure.append(error)
            done.set_result(None)


def reduce_by_host(model: DistributedDataParallel, device: torch.device) -> HostReduction:
    """Let DDP average its gradients in this way; before the first backward.

    Args:
        model: with a process group of gloo.
        device: of its parameters.
    """
    group: Any = model.process_group
    reduction = HostReduction(group, device)
    # DDP looks at annotations and takes no text for them; a lambda has none.
    model.register_comm_hook(None, lambda state, bucket: reduction.average(bucket.buffer()))
    return reduction
