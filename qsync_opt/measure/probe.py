"""How a call treats lower precisions: found by running it again, not by its name.

A call is repeated under torch.autocast with its activations in bf16, and with each of them in
turn left in fp32. What comes out tells whether it keeps a lower precision, and which of its
inputs decide. Equal calls are asked once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from qsync_opt.graph import Operand, Origin
from qsync_opt.measure.calls import encode_arguments, replace_tensors, tensors_in

_LOW = torch.bfloat16


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeResult:
    """What a call does when its activations are in a lower precision.

    Attributes:
        keeps: whether its outputs are in the lower precision then.
        deciding: operands that must all be low for that, by position.
        widens: whether it takes low activations and hands on fp32.
        saved: shape and item size of what it saved for backward then.
        products: matrix products inside, with attention in its plain form.
        forward_flops, backward_flops: of those products.
    """

    keeps: bool
    deciding: tuple[int, ...]
    widens: bool
    saved: tuple[tuple[tuple[int, ...], int], ...]
    products: tuple[str, ...]
    forward_flops: int
    backward_flops: int


class Probe:
    """Repeats calls at lower precision and remembers what came out.

    Args:
        device: where the calls run; its rules of autocast are used.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[object, ProbeResult | None] = {}

    def ask(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str,
        operands: list[Operand],
    ) -> ProbeResult | None:
        """What the call does at lower precision; None without a float activation."""
        activations = [
            index
            for index, operand in enumerate(operands)
            if operand.origin is Origin.OPERATOR and operand.dtype == "float32"
        ]
        if not activations:
            return None
        key = (name, encode_arguments(args, kwargs), tuple(operands))
        if key not in self._known:
            devices = [self._device] if self._device.type == "cuda" else []
            with torch.random.fork_rng(devices=devices):
                self._known[key] = self._run(function, args, kwargs, activations)
        return self._known[key]

    def _run(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        activations: list[int],
    ) -> ProbeResult:
        saved: list[tuple[tuple[int, ...], int]] = []

        def pack(tensor: Tensor) -> Tensor:
            saved.append((tuple(tensor.shape), tensor.element_size()))
            return tensor.detach()

        count = _ProductMode()
        with (
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(pack, _unpack),
            sdpa_kernel(SDPBackend.MATH),
            count,
        ):
            outputs = self._outputs(function, args, kwargs, set(activations))
            forward_flops, products = count.flops, tuple(count.products)
            roots = [t for t in outputs if t.requires_grad and t.is_floating_point()]
            if products and roots:
                torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])
        low = _lowest(outputs)
        keeps = low is not None and low.itemsize < torch.float32.itemsize
        deciding = tuple(activations)
        if keeps and len(activations) > 1:
            alone = []
            for index in activations:
                with torch.no_grad():
                    others = set(activations) - {index}
                    low = _lowest(self._outputs(function, args, kwargs, others))
                if low is None or low.itemsize >= torch.float32.itemsize:
                    alone.append(index)
            deciding = tuple(alone) or deciding
        return ProbeResult(
            keeps=keeps,
            deciding=deciding,
            widens=bool(outputs) and _lowest(outputs) is torch.float32,
            saved=tuple(saved),
            products=products,
            forward_flops=forward_flops,
            backward_flops=count.flops - forward_flops,
        )

    def _outputs(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        low: set[int],
    ) -> list[Tensor]:
        """The tensors that the call gives with these operands low; none where it cannot."""
        position = -1

        def copy(tensor: Tensor) -> Tensor:
            nonlocal position
            position += 1
            own = tensor.detach().clone()
            if position in low:
                own = own.to(_LOW)
            # A copy of the leaf, because a leaf cannot be overwritten in place.
            return own.requires_grad_().clone() if tensor.requires_grad else own

        own_args, own_kwargs = replace_tensors((args, kwargs), copy)
        with torch.autocast(self._device.type, dtype=_LOW):
            try:
                results = tensors_in(function(*own_args, **own_kwargs))
                # What returns nothing writes into what it is given.
                return results or tensors_in((own_args, own_kwargs))[:1]
            except (RuntimeError, TypeError, NotImplementedError):
                return []  # not made for mixed dtypes, so it stays in fp32


class _ProductMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the matrix products that run inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self.products: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.flops += int(count(*args, **(kwargs or {}), out_val=result))
            self.products.append(func._overloadpacket.__name__)
        return result


def _lowest(tensors: list[Tensor]) -> torch.dtype | None:
    """The narrowest floating dtype among the tensors; None without one."""
    dtypes = [tensor.dtype for tensor in tensors if tensor.is_floating_point()]
    return min(dtypes, key=lambda dtype: dtype.itemsize, default=None)


def _unpack(tensor: Tensor) -> Tensor:
    return tensor
