"""Names of operators on what a step runs, for a profiler.

The names are those of a captured graph. Whole modules are labelled by hooks, converted
operators by what they were told, and other calls by a mode for torch functions, which knows
them by module, function and the dimensions of their operands, as in `measure.taps`. A label
inside another one is left out: what an operator calls is its own.

Backward is told by autograd's sequence numbers: the nodes that are made under a label are its.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from qsync_opt.graph import OperatorGraph
from qsync_opt.measure.calls import CallListener, function_name, opened, tensors_in
from qsync_opt.measure.recorder import sequence_number
from qsync_opt.measure.records import LOSS

FORWARD = "forward"

_Key = tuple[str, str, tuple[int, ...]]


class OperatorLabels:
    """Labels of the operators of a model.

    Args:
        model: converted or not; it is not changed.
        graph: of the model; without one modules that have none inside are labelled.

    Attributes:
        ranges: sequence numbers of autograd nodes, from the first to before the last, and the
            name of the operator that made them.
    """

    def __init__(self, model: nn.Module, graph: OperatorGraph | None) -> None:
        self.ranges: list[tuple[int, int, str]] = []
        self._names = {module: name for name, module in model.named_modules()}
        self._calls: dict[_Key, list[str]] = {}
        if graph is None:
            self._whole = {
                name for module, name in self._names.items() if name and not _has_children(module)
            }
        else:
            modules = set(self._names.values())
            self._whole = {row.name for row in graph.operators if row.name in modules}
            for index, row in enumerate(graph.operators):
                if row.name not in self._whole:
                    signature = graph.signature_of(index)
                    dimensions = tuple(len(operand.shape) for operand in signature.operands)
                    key = (row.module, signature.function, dimensions)
                    self._calls.setdefault(key, []).append(row.name)
        self._functions = {function for _, function, _ in self._calls}
        self._waiting: dict[_Key, deque[str]] = {}
        self._labelled: set[str] = set()
        self._scopes = [""]
        self._depth = 0

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Labels for the forward that runs inside."""
        self._waiting = {key: deque(names) for key, names in self._calls.items()}
        self._labelled = set()
        self._scopes = [""]
        with ExitStack() as stack:
            open_labels: list[ExitStack] = []

            def enter(module: nn.Module, args: object) -> None:
                name = self._names.get(module, self._scopes[-1])
                self._scopes.append(name)
                label = ExitStack()
                if name in self._whole and module in self._names:
                    label.enter_context(self.label(name))
                open_labels.append(label)

            def leave(module: nn.Module, args: object, output: object) -> None:
                self._scopes.pop()
                open_labels.pop().close()

            for hook in (
                register_module_forward_pre_hook(enter),
                register_module_forward_hook(leave, always_call=True),
            ):
                stack.callback(hook.remove)
            stack.enter_context(CallListener(self.run_call))
            yield

    @contextmanager
    def loss(self) -> Iterator[None]:
        """Labels for the loss that runs inside."""
        self._scopes.append(LOSS)
        try:
            with CallListener(self.run_call):
                yield
        finally:
            self._scopes.pop()

    @contextmanager
    def other(self, name: str) -> Iterator[None]:
        """A label that is no operator's."""
        with torch.profiler.record_function(name):
            yield

    @contextmanager
    def label(self, name: str) -> Iterator[None]:
        """The label of an operator, unless there is one already."""
        self._depth += 1
        try:
            if self._depth > 1:
                yield
                return
            self._labelled.add(name)
            start = sequence_number()
            with torch.profiler.record_function(f"{name} {FORWARD}"):
                yield
            end = sequence_number()
            if end > start:
                self.ranges.append((start, end, name))
        finally:
            self._depth -= 1

    def run_call(
        self,
        function: Callable[..., Any],
        mode: CallListener,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a call, with a label where it is an operator."""
        if self._depth:
            return function(*args, **kwargs)
        name = function_name(function)
        if name not in self._functions:
            inner = opened(function)
            if inner is None:
                return function(*args, **kwargs)
            with mode:
                return inner(*args, **kwargs)
        dimensions = tuple(tensor.dim() for tensor in tensors_in((args, kwargs)))
        waiting = self._waiting.get((self._scopes[-1], name, dimensions), ())
        while waiting:
            operator = waiting.popleft()
            if operator not in self._labelled:
                with self.label(operator):
                    return function(*args, **kwargs)
        return function(*args, **kwargs)


def _has_children(module: nn.Module) -> bool:
    return next(module.children(), None) is not None
