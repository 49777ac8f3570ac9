"""Listening at the operators of a captured graph while its model runs again.

A mode for torch functions sees every call, as in `recorder`, and tells by module, function and
kinds of operands which operator of the graph it is; the sizes of a batch may be other ones.
Tensors that an operator reads or makes are led through a *tap*, which keeps what flows through
it: the values on the way forward, their gradients on the way back and, in further passes, how
some function depends on either. Operators without a choice of precision are kept so that they
can be run again by themselves.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from qsync_opt.errors import CaptureError
from qsync_opt.graph import OperatorGraph, Origin, Role
from qsync_opt.measure.calls import CallListener, function_name, opened, replace_tensors, tensors_in
from qsync_opt.measure.draws import random_state
from qsync_opt.measure.flows import Passes, Product, Replayable, Tap, apply
from qsync_opt.measure.records import LOSS
from qsync_opt.measure.rounding_noise import Form, Part, layout_of


class Taps:
    """The taps of one step of a model.

    Args:
        model: that the graph was captured from; it is not changed.
        graph: of the model.
        replays: listen at operators without a choice too.
        two_weights: tell the two uses of weights apart.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: OperatorGraph,
        *,
        replays: bool = False,
        two_weights: bool = False,
    ) -> None:
        self.products: dict[int, Product] = {}
        self.replayables: dict[int, Replayable] = {}
        self.leaves: list[Tensor] = []
        self.passes = Passes()
        self._graph = graph
        self._replays = replays
        self._two_weights = two_weights
        self._names = {module: name for name, module in model.named_modules()}
        self._functions = frozenset(signature.function for signature in graph.signatures)
        self._waiting: dict[tuple[Any, ...], deque[int]] = {}
        for index, operator in enumerate(graph.operators):
            signature = graph.signature_of(index)
            operands = tuple((len(o.shape), o.dtype) for o in signature.operands)
            key = (operator.module, signature.function, operands)
            self._waiting.setdefault(key, deque()).append(index)
        storages = Counter(tensor.storage for tensor in graph.tensors)
        self._overwritten = {storage for storage, states in storages.items() if states > 1}
        self._scopes = [""]

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Put taps into the calls made inside.

        Raises:
            CaptureError: an adjustable operator did not run.
        """
        with ExitStack() as stack:
            for hook in (
                register_module_forward_pre_hook(self._enter),
                register_module_forward_hook(self._leave, always_call=True),
            ):
                stack.callback(hook.remove)
            stack.enter_context(CallListener(self.run_call))
            yield
        missed = set(self._graph.adjustable) - self.products.keys()
        if missed:
            raise CaptureError(
                f"operator {self._graph.operators[min(missed)].name} of the graph did not run",
                "Give the model that the graph was captured from, and a batch of that kind",
            )

    @contextmanager
    def loss(self) -> Iterator[None]:
        """Calls made inside belong to the loss."""
        self._scopes.append(LOSS)
        try:
            yield
        finally:
            self._scopes.pop()

    def _enter(self, module: nn.Module, args: object) -> None:
        self._scopes.append(self._names.get(module, self._scopes[-1]))

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        self._scopes.pop()

    def run_call(
        self,
        function: Callable[..., Any],
        mode: CallListener,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a call, with taps where it is an operator that is listened at."""
        name = function_name(function)
        if name not in self._functions:
            inner = opened(function)
            if inner is None:
                return function(*args, **kwargs)
            with mode:
                return inner(*args, **kwargs)
        given = tensors_in((args, kwargs))
        operands = tuple(
            (tensor.dim(), str(tensor.dtype).removeprefix("torch.")) for tensor in given
        )
        waiting = self._waiting.get((self._scopes[-1], name, operands))
        if not waiting:
            return function(*args, **kwargs)
        index = waiting.popleft()
        operator = self._graph.operators[index]
        if operator.role is Role.ADJUSTABLE:
            return self._run_product(index, function, args, kwargs)
        if self._replays and operator.differentiable:
            return self._run_other(index, function, args, kwargs)
        return function(*args, **kwargs)

    def _run_product(
        self, index: int, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        layout = layout_of(self._graph, index)
        given = tensors_in((args, kwargs))
        taps: list[Tap] = []
        through: dict[int, Tensor] = {}
        for number, part in layout.parts.items():
            tap = Tap(part, self.passes, self._kept(given[number], index, number))
            through[number] = apply(_ValueTap, self._differentiable(given[number]), tap)
            taps.append(tap)

        run = _caller(function, args, kwargs)
        plain = replace_tensors((args, kwargs), lambda x: x.detach())
        product = Product(
            operator=index, layout=layout, operands=taps, run=_caller(function, *plain)
        )
        self.products[index] = product
        weight = next((n for n, part in layout.parts.items() if part is Part.WEIGHT), None)
        if self._two_weights and weight is not None and layout.form in (Form.LINEAR, Form.CONV2D):
            result = self._run_two_weights(product, run, through, weight)
        else:
            result = run(through)
        if isinstance(result, Tensor):
            if not result.requires_grad:
                result = self._differentiable(result).clone()
            value = result.detach()
            value = value.clone() if self._is_overwritten(index) else value
            product.output = self._hooked(result, value, Part.OUTPUT)
        return result

    def _run_two_weights(
        self,
        product: Product,
        run: Callable[[dict[int, Tensor]], Any],
        through: dict[int, Tensor],
        weight: int,
    ) -> Tensor:
        value = through[weight].detach()
        product.weight_forward = Tap(Part.WEIGHT, self.passes, value)
        product.weight_backward = Tap(Part.WEIGHT, self.passes, value)
        forward = apply(_ValueTap, through[weight], product.weight_forward)
        backward = apply(_ValueTap, through[weight], product.weight_backward)
        others = [number for number in through if number != weight]

        def product_of(w: Tensor, *operands: Tensor) -> Tensor:
            out: Tensor = run({**dict(zip(others, operands, strict=True)), weight: w})
            return out

        return apply(
            _TwoWeights, product_of, forward, backward, *(through[number] for number in others)
        )

    def _run_other(
        self, index: int, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        given = tensors_in((args, kwargs))
        operands = self._graph.signature_of(index).operands
        activations = [
            number
            for number, (operand, tensor) in enumerate(zip(operands, given, strict=True))
            if operand.origin is Origin.OPERATOR
            and tensor.is_floating_point()
            and tensor.requires_grad
        ]
        if not activations:
            return function(*args, **kwargs)
        kept = [self._kept(tensor, index, number) for number, tensor in enumerate(given)]
        numbers = iter(range(len(given)))
        kept_args, kept_kwargs = replace_tensors((args, kwargs), lambda _: kept[next(numbers)])
        replayable = Replayable(
            operator=index,
            function=function,
            args=kept_args,
            kwargs=kept_kwargs,
            activations=activations,
            inputs=[self._hooked(given[n], kept[n], Part.INPUT) for n in activations],
            edges=[get_gradient_edge(given[n]) for n in activations],
            random_state=random_state(given[activations[0]].device),
        )
        self.replayables[index] = replayable
        result = function(*args, **kwargs)
        replayable.outputs = [
            self._hooked(x, x.detach(), Part.OUTPUT)
            for x in tensors_in(result)
            if x.is_floating_point()
        ]
        return result

    def _hooked(self, x: Tensor, value: Tensor, part: Part) -> Tap:
        """A tap on what all readers of a tensor do with it, as it is now."""
        tap = Tap(part, self.passes, value)
        if x.requires_grad:
            hook: Any = x.register_hook
            hook(partial(_arrived, tap))
        return tap

    def _differentiable(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            return x
        leaf = x.detach().requires_grad_()
        self.leaves.append(leaf)
        return leaf

    def _is_overwritten(self, index: int) -> bool:
        """Whether what an operator makes is overwritten later."""
        outputs = self._graph.operators[index].outputs
        return any(self._graph.tensors[i].storage in self._overwritten for i in outputs)

    def _kept(self, x: Tensor, index: int, number: int) -> Tensor:
        """An operand as it is now, whatever is written into it later."""
        tensor = self._graph.tensors[self._graph.operators[index].inputs[number]]
        overwritten = tensor.storage in self._overwritten or tensor.origin is Origin.BUFFER
        return x.detach().clone() if overwritten else x.detach()


def _caller(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[dict[int, Tensor]], Any]:
    """The call with other tensors, by number, in place of its own."""

    def run(changed: dict[int, Tensor]) -> Any:
        numbers = itertools.count()
        new_args, new_kwargs = replace_tensors(
            (args, kwargs), lambda x: changed.get(next(numbers), x)
        )
        return function(*new_args, **new_kwargs)

    return run


class _ValueTap(Function):
    """The identity on a value; tells the tap what comes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tap: Tap) -> Tensor:
        """The value as it is."""
        ctx.tap = tap
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """The gradient as it comes."""
        return ctx.tap.arrived(gradient), None


class _TwoWeights(Function):
    """A product with one weight in the forward and another one for the gradient of the input.

    The two have the same value; they are told apart because int8 layers round only one.
    """

    @staticmethod
    def forward(
        ctx: Any,
        product: Callable[..., Tensor],
        forward: Tensor,
        backward: Tensor,
        *operands: Tensor,
    ) -> Tensor:
        """The product with the first weight."""
        ctx.product = product
        ctx.save_for_backward(forward, backward, *operands)
        return product(forward, *operands)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of the weight goes to the first one."""
        again = torch.is_grad_enabled()
        forward, backward, *operands = ctx.saved_tensors
        wanted = [operand for operand in operands if operand.requires_grad]
        with torch.enable_grad():
            to_weight = torch.autograd.grad(
                ctx.product(forward, *operands), forward, gradient, create_graph=again
            )
            found = iter(
                torch.autograd.grad(
                    ctx.product(backward, *operands), wanted, gradient, create_graph=again
                )
                if wanted
                else ()
            )
        to_operands = [next(found) if o.requires_grad else None for o in operands]
        return None, to_weight[0], None, *to_operands


def _arrived(tap: Tap, gradient: Tensor) -> Tensor:
    return tap.arrived(gradient)
