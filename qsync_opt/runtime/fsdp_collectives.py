"""The custom collectives that FSDP2 calls: what it asks of them, and what they hand on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, distributed
from torch.distributed import ReduceOp

from qsync_opt.errors import TrainError


class Sent(Protocol):
    """What one sharded module sends."""

    def gather(self, output: Tensor, own: Tensor, group: Any) -> tuple[Any, Callable[[], None]]:
        """Start to gather weights: what to wait for, and what is to be done then."""

    def scatter(self, output: Tensor, whole: Tensor, group: Any, divisor: int) -> None:
        """Add up gradients, and keep this rank's shards of the sum over the divisor."""


def nothing_left() -> None:
    """What is left to do where weights come as they are."""


class _Collective:
    """What FSDP2 asks of a custom collective: memory, and the call below."""

    def __init__(self, group: Sent) -> None:
        self._group = group

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for FSDP2's buffers."""
        return torch.empty(*size, dtype=dtype, device=device)


class AllGather(_Collective):
    """Of a module's weights."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        """Gather weights; with `async_op` until what is returned is waited for."""
        work, finish = self._group.gather(output_tensor, input_tensor, group)
        if async_op:
            return _Later(work, finish)
        work.wait()
        finish()
        return None


class ReduceScatter(_Collective):
    """Of a module's gradients."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Add up gradients; done, or on a GPU queued, when it returns."""
        if op == ReduceOp.AVG:
            divisor = group.size()
        elif op == ReduceOp.SUM:
            divisor = 1
        else:
            raise TrainError(
                f"coded gradients cannot be reduced with {op}",
                "Call set_force_sum_reduction_for_comms(True)",
            )
        self._group.scatter(output_tensor, input_tensor, group, divisor)


class _Later(distributed.Work):
    """A collective with something to do after it."""

    def __init__(self, work: Any, finish: Callable[[], None]) -> None:
        super().__init__()
        self._work = work
        self._finish: Callable[[], None] | None = finish

    def wait(self, timeout: Any = None) -> bool:
        """Wait, and do it once."""
        self._work.wait()
        if self._finish is not None:
            self._finish()
            self._finish = None
        return True
