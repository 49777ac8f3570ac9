"""A signature at a precision, ready to be run: as the converted model runs it.

A layer is run by the function that the layers of `runtime` call, a call inside a module
through `runtime.calls`, everything else as it is, in the dtype that it would get.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from qsync_opt.graph import OperatorGraph, Origin, Role
from qsync_opt.kernels.rounding import Rounding
from qsync_opt.measure.calls import decode_arguments, find_function, tensors_in
from qsync_opt.measure.operands import gradient_like, make_operand
from qsync_opt.precision import Precision
from qsync_opt.runtime.calls import CallOwner, ModuleCalls
from qsync_opt.runtime.casts import CastCache, compute_dtype
from qsync_opt.runtime.functions import run_call
from qsync_opt.runtime.layers import LAYERS, STATE, derived_class
from qsync_opt.runtime.session import OperatorSettings, Session

_LAYER_TYPES = {f"{layer.base.__module__}.{layer.base.__qualname__}" for layer in LAYERS}


class RecordingCache(CastCache):
    """A cache of casts that remembers what was asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[tuple[Callable[[], tuple[Tensor, ...]], tuple[Tensor, ...]]] = []

    def get(self, x: Tensor, key: Any, make: Any, *, hold: bool = True) -> Any:
        """As `CastCache.get`."""
        found = super().get(x, key, make, hold=hold)
        self.requests.append((make, found))
        return found


class Execution:
    """One operator of a graph, with operands of its own.

    Args:
        graph: the graph.
        operator: index; any operator of the signature.
        precision: what it runs at; a follower: the dtype of its inputs.
        device: where.
        input_dtype: of the float activations of an adjustable operator; default: the one that
            it reads without a cast.
        cache: of casts; default: as the runtime has it.
    """

    def __init__(
        self,
        graph: OperatorGraph,
        operator: int,
        precision: Precision,
        device: torch.device,
        input_dtype: torch.dtype | None = None,
        cache: CastCache | None = None,
    ) -> None:
        self.graph, self.operator, self.precision = graph, operator, precision
        self.row = graph.operators[operator]
        self.signature = graph.signature_of(operator)
        self._device = device
        self._session = Session(Rounding.NEAREST, 0, 0)
        if cache is not None:
            self._session.cache = cache
        natural = compute_dtype(precision, device)
        self._activation_dtype = input_dtype or natural
        #: Activations with a gradient; the leaf behind each, and its version to begin with.
        self.activations: list[Tensor] = []
        self._leaves: list[tuple[Tensor, int]] = []
        self.parameters: list[Tensor] = []
        self.operands = [self._operand(i) for i in range(len(self.signature.operands))]
        function = find_function(self.signature.function)
        args, kwargs = decode_arguments(self.signature.arguments, self.operands, device)
        self._call = self._caller(function, args, kwargs)
        self.outputs: list[Tensor] = []
        self._roots: list[Tensor] = []
        self._gradients: list[Tensor] = []

    def just_written(self, cache_bytes: int, *, casts: bool = True) -> list[Tensor]:
        """What a step has written shortly before the forward, the newest last.

        These are inputs after whose producer the step wrote less than `cache_bytes`.

        Args:
            cache_bytes: size of the device's cache; nothing is in one of 0 bytes.
            casts: with the casts that were made of the inputs.
        """
        recent = recent_inputs(self.graph, self.operator, cache_bytes, self._activation_dtype)
        if not recent:
            return []
        made = self._session.cache.latest if casts else ()
        return [*(self.operands[number] for number in recent), *made]

    @property
    def gradients(self) -> list[Tensor]:
        """Of the outputs: what a step has written just before the backward."""
        return self._gradients

    def forward(self) -> Any:
        """Run the call once; its casts of inputs are made the first time only."""
        return self._call()

    def prepare_backward(self) -> bool:
        """Run forward and make gradients; whether there is a backward."""
        self.outputs = tensors_in(self.forward())
        self._roots = [t for t in self.outputs if t.requires_grad and t.is_floating_point()]
        readers = self._readers()
        self._gradients = [
            gradient_like(out, readers[i] if i < len(readers) else None)
            for i, out in enumerate(self._roots)
        ]
        return bool(self._roots)

    def backward(self, *, retain: bool = True) -> None:
        """Run the backward once, without adding gradients into parameters.

        Args:
            retain: keep what it needs for another time.
        """
        # What the call wrote into is its output by now; its input is the leaf behind it.
        inputs = [
            given if given._version == version else leaf
            for given, (leaf, version) in zip(self.activations, self._leaves, strict=True)
        ]
        inputs += self.parameters
        torch.autograd.grad(
            self._roots, inputs, self._gradients, retain_graph=retain, allow_unused=True
        )

    def _operand(self, index: int) -> Tensor:
        operand = self.signature.operands[index]
        dtype: torch.dtype = getattr(torch, operand.dtype)
        if dtype is torch.float32 and self._is_lowered(index):
            dtype = self._activation_dtype
        tensor = make_operand(operand, dtype, self._device)
        if not operand.requires_grad or not dtype.is_floating_point:
            return tensor
        tensor.requires_grad_()
        if operand.origin is Origin.PARAMETER:
            self.parameters.append(tensor)
            return tensor
        passed = handed(tensor)
        self.activations.append(passed)
        self._leaves.append((tensor, passed._version))
        return passed

    def _is_lowered(self, index: int) -> bool:
        """Whether an operand comes in the dtype that the precision asks for."""
        if self.signature.operands[index].origin is not Origin.OPERATOR:
            return False
        if self.row.role is Role.FOLLOWER:
            producer = self.graph.tensors[self.row.inputs[index]].producer
            if producer is None:
                return False
            # What does not decide the result (a tensor added in place) seldom differs from
            # what does, unless it always comes in fp32.
            fixed = self.graph.operators[producer].role is Role.FIXED
            return producer in self.row.follows or not fixed
        return self.row.role is Role.ADJUSTABLE

    def _caller(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[], Any]:
        is_module = self.row.module_type.startswith("torch.nn.modules.")
        if self.row.role is not Role.ADJUSTABLE:
            if not is_module:
                return lambda: function(*args, **kwargs)
            module: nn.Module = _Plain(function, args, kwargs)
            return module
        settings = OperatorSettings(
            name=self.row.name, precision=self.precision, source="input", session=self._session
        )
        if self.row.module_type in _LAYER_TYPES:
            return _Layer(function, self.signature.kind, args, kwargs, settings)
        owner: nn.Module = _Plain(function, args, kwargs)
        owner.__dict__[STATE] = ModuleCalls(
            module="",
            whole=None,
            planned={self.signature.kind: (settings,)},
            fixed=frozenset(),
            session=self._session,
        )
        owner.__class__ = derived_class(CallOwner, _Plain)
        return owner

    def _readers(self) -> list[Any]:
        """How the last reader with a backward reads each output."""
        graph, found = self.graph, []
        for index in self.row.outputs:
            reader = None
            for consumer in graph.tensors[index].consumers:
                row = graph.operators[consumer]
                if row.differentiable:
                    place = row.inputs.index(index)
                    reader = graph.signature_of(consumer).operands[place]
            found.append(reader)
        return found


def recent_inputs(
    graph: OperatorGraph, operator: int, cache_bytes: int, dtype: torch.dtype
) -> list[int]:
    """Which inputs of an operator are still in a cache, by their place, the newest last.

    Args:
        graph: the graph.
        operator: index.
        cache_bytes: what was written longer ago than this many bytes is not in the cache.
        dtype: of float activations.
    """
    inputs = graph.operators[operator].inputs
    found: list[int] = []
    written_bytes = 0
    for earlier in range(operator - 1, -1, -1):
        if written_bytes >= cache_bytes:
            break
        for tensor in graph.operators[earlier].outputs:
            found += [place for place, index in enumerate(inputs) if index == tensor]
            row = graph.tensors[tensor]
            width = dtype.itemsize if row.dtype == "float32" else 0
            written_bytes += math.prod(row.shape) * width if width else row.size_bytes
    return found[::-1]


def handed(leaf: Tensor) -> Tensor:
    """A leaf as an activation: no leaf, so that it can be overwritten, and no copy."""
    try:
        passed: Tensor = torch.ops.aten._unsafe_view(leaf, list(leaf.shape))
    except RuntimeError:  # strides that no view has
        return leaf
    return passed


class _Plain(nn.Module):
    """A module that makes one call."""

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        super().__init__()
        self._made = (function, args, kwargs)

    def forward(self) -> Any:
        """The call."""
        function, args, kwargs = self._made
        return function(*args, **kwargs)


class _Layer(nn.Module):
    """A module that makes one call as a layer does."""

    def __init__(
        self,
        function: Callable[..., Any],
        kind: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        settings: OperatorSettings,
    ) -> None:
        super().__init__()
        self._made = (function, kind, args, kwargs, settings)

    def forward(self) -> Any:
        """The call."""
        return self._made[4].session.run(run_call, *self._made)
