"""What happens while a step runs: calls, tensors, low-level operations, and what is saved.

Four things listen at once. A mode for torch functions sees each call with its arguments; a
mode for the dispatcher sees the low-level operations inside it, their time and their
floating-point operations; hooks on saved tensors see what backward keeps; hooks on modules
know who is running. Backward is matched to forward by autograd's sequence numbers.

The records are raw: `assembly` makes an `OperatorGraph` of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from qsync_opt.errors import CaptureError
from qsync_opt.graph import Operand, Origin
from qsync_opt.measure.calls import (
    CallListener,
    encode_arguments,
    function_name,
    opened,
    tensors_in,
)
from qsync_opt.measure.probe import Probe
from qsync_opt.measure.records import LOSS, BackwardWork, Call, Phase, Saved, Work
from qsync_opt.measure.values import TensorTable


class Recorder:
    """Everything recorded during one step.

    Args:
        model: the model; it is not changed.
        batch: the tensors of the batch.
        device: where the step runs.
        open_functions: names of Python functions whose inner calls are recorded instead.
        probe: finds out how calls treat precisions; None to leave that out.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Mapping[str, Tensor],
        device: torch.device,
        open_functions: frozenset[str] = frozenset(),
        probe: Probe | None = None,
    ) -> None:
        self.calls: list[Call] = []
        self.saved: list[Saved] = []
        self.outside = Work()
        self.backward: dict[tuple[str, int | None, bool], BackwardWork] = {}
        self.to_open: set[str] = set()
        self.recomputes = False
        self.phase = Phase.IDLE
        self.current: int | None = None
        self.paused = False
        self._device = device
        self._open_functions = open_functions
        self._probe = probe
        self._names = {module: name for name, module in model.named_modules()}
        self._module_calls: dict[str, int] = {}
        self._finished: set[int] = set()
        self._scopes = [("", _type_name(model), model.training, 0)]
        self.tensors = TensorTable(model, batch.values(), lambda: len(self.calls) - 1)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Record nothing for a while."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Record the calls made inside."""
        with ExitStack() as stack:
            for hook in (
                register_module_forward_pre_hook(self._enter_module),
                register_module_forward_hook(self._leave_module, always_call=True),
            ):
                stack.callback(hook.remove)
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack))
            stack.enter_context(_OperationMode(self))
            stack.enter_context(CallListener(self.run_call))
            self.phase = Phase.FORWARD
            stack.callback(self._end_phase)
            yield

    @contextmanager
    def loss(self) -> Iterator[None]:
        """Calls made inside belong to the loss."""
        self._scopes.append((LOSS, "", True, 0))
        try:
            yield
        finally:
            self._scopes.pop()

    @contextmanager
    def backward_pass(self, finished: set[int]) -> Iterator[None]:
        """Record the low-level operations of the backward that runs inside.

        Args:
            finished: sequence numbers of the nodes that have run; grows while it runs.

        Raises:
            CaptureError: a module runs again during backward.
        """
        with ExitStack() as stack:
            hook = register_module_forward_pre_hook(self._enter_module)
            stack.callback(hook.remove)
            self._finished = finished
            stack.enter_context(_OperationMode(self))
            self.phase = Phase.BACKWARD
            stack.callback(self._end_phase)
            yield

    def _end_phase(self) -> None:
        self.phase = Phase.IDLE

    def _enter_module(self, module: nn.Module, args: object) -> None:
        if self.phase is Phase.BACKWARD:
            raise recomputation(self._names.get(module) or _type_name(module))
        if self.phase is not Phase.FORWARD or self.paused:
            return
        name = self._names.get(module)
        if name is None:  # made during the step: its calls count as those of its caller
            self._scopes.append(self._scopes[-1])
            return
        number = self._module_calls.get(name, 0)
        self._module_calls[name] = number + 1
        self._scopes.append((name, _type_name(module), module.training, number))

    def _leave_module(self, module: nn.Module, args: object, output: object) -> None:
        if self.phase is Phase.FORWARD and not self.paused:
            self._scopes.pop()

    # Calls

    def run_call(
        self,
        function: Callable[..., Any],
        mode: CallListener,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a call and record it, unless it computes nothing and returns no tensor."""
        name = function_name(function)
        if self.paused or self.phase is not Phase.FORWARD:
            return function(*args, **kwargs)
        if name in self._open_functions and (inner := opened(function)) is not None:
            with mode:
                return inner(*args, **kwargs)
        given = tensors_in((args, kwargs))
        module, module_type, training, number = self._scopes[-1]
        inputs = [self.tensors.resolve(tensor, module or "the model") for tensor in given]
        call = Call(
            function=name,
            module=module,
            module_type=module_type,
            module_call=number,
            training=training,
            arguments="",
            operands=[self._operand(t, v) for t, v in zip(given, inputs, strict=True)],
            inputs=inputs,
        )
        start = sequence_number()
        self.current = len(self.calls)
        self.calls.append(call)
        try:
            result = function(*args, **kwargs)
        finally:
            self.current = None
        call.sequence = (start, sequence_number())
        if call.written:  # a counter, for example: its value is none of the call's cost
            call.operands = [
                replace(operand, bounds=None)
                if self.tensors.key(tensor) in call.written
                else operand
                for operand, tensor in zip(call.operands, given, strict=True)
            ]
        results = tensors_in(result)
        if not call.computes and not results:
            self._drop_last()
            return result
        call.arguments = encode_arguments(args, kwargs)
        if self._probe is not None:
            with self.pause():
                call.probe = self._probe.ask(function, args, kwargs, call.function, call.operands)
        if not call.computes and call.probe is not None and call.probe.widens:
            # Something like `.float()`: nothing to do here, a cast where the input is lower.
            with self.pause():
                result = torch.ops.aten.alias(result)
            call.sequence = (start, sequence_number())
            call.work.computes = True
            self._add_output(call, result, view_of=None)
            return result
        if not self._record_outputs(call, given, results) and not call.computes:
            self._drop_last()
        if len(call.work.products) > 1 and opened(function) is not None:
            self.to_open.add(name)
        return result

    def _drop_last(self) -> None:
        self.calls.pop()

    def _operand(self, tensor: Tensor, value: int) -> Operand:
        bounds = None
        whole = not (tensor.is_floating_point() or tensor.is_complex())
        if whole and tensor.dtype is not torch.bool and tensor.numel():
            with self.pause():
                low, high = torch.aminmax(tensor)
                bounds = (int(low), int(high))
        return Operand(
            shape=tuple(tensor.shape),
            stride=tuple(tensor.stride()),
            dtype=str(tensor.dtype).removeprefix("torch."),
            origin=self.tensors.root(value).origin,
            requires_grad=tensor.requires_grad,
            bounds=bounds,
        )

    def _record_outputs(self, call: Call, given: list[Tensor], results: list[Tensor]) -> bool:
        """Give the results their values; whether there is a new one."""
        objects = {id(tensor) for tensor in given}
        memory = {self.tensors.key(t): v for t, v in zip(given, call.inputs, strict=True)}
        new = False
        for tensor in results:
            key = self.tensors.key(tensor)
            if key in call.written or id(tensor) in objects:
                continue  # overwritten (below), or handed through as it is
            self._add_output(call, tensor, view_of=memory.get(key))
            new = True
        for tensor in given:
            key = self.tensors.key(tensor)
            if key not in call.written:
                continue
            call.written.discard(key)
            before = self.tensors.root(self.tensors.resolve(tensor))
            if before.origin in (Origin.BUFFER, Origin.PARAMETER):
                continue  # state of the model, such as running statistics
            index = self._add_output(call, tensor, view_of=None)
            self.tensors.overwrite(tensor, index)
            # Where a view was written through, the whole tensor is new.
            self.tensors.values[index].shape = before.shape
            new = True
        return new

    def _add_output(self, call: Call, tensor: Tensor, *, view_of: int | None) -> int:
        if tensor.dtype in (torch.float16, torch.bfloat16):
            raise CaptureError(
                f"{call.kind} in {call.module or 'the model itself'} hands on"
                f" {tensor.dtype}, and a step is captured in float32",
                "Capture the model without autocast and with float32 parameters",
            )
        index = self.tensors.add(
            tensor, Origin.OPERATOR, producer=len(self.calls) - 1, view_of=view_of
        )
        call.outputs.append(index)
        value = self.tensors.values[index]
        call.output_specs.append((value.shape, value.dtype))
        return index

    # Low-level operations

    def run_operation(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a low-level operation and note its time, and what it does."""
        if self.paused or self.phase is Phase.IDLE:
            return operation(*args, **kwargs)
        if self.phase is Phase.BACKWARD and torch.is_grad_enabled():
            self.recomputes = True  # a graph is made, and backward alone makes none
        start = self._mark()
        result = operation(*args, **kwargs)
        end = self._mark()
        work = self._work()
        work.marks.append((start, end))
        count = flop_registry.get(operation._overloadpacket)
        if count is not None:
            work.flops += int(count(*args, **kwargs, out_val=result))
            work.products.append(operation._overloadpacket.__name__)
        written = self._written_by(operation, args, kwargs)
        if self.current is not None and self.phase is Phase.FORWARD:
            self.calls[self.current].written |= set(filter(self.tensors.knows, written))
        memory = {self.tensors.key(t) for t in tensors_in((args, kwargs)) if _has_memory(t)}
        made = [self.tensors.key(t) for t in tensors_in(result) if _has_memory(t)]
        if written or not made or not memory.issuperset(made):
            work.computes = True
        return result

    def _written_by(self, operation: Any, args: tuple[Any, ...], kwargs: Any) -> set[int]:
        schema = operation._schema
        if not schema.is_mutable:
            return set()
        written = set()
        for index, argument in enumerate(schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            written |= {self.tensors.key(t) for t in tensors_in(value)}
        return written

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _work(self) -> Work:
        if self.phase is Phase.FORWARD:
            return self.outside if self.current is None else self.calls[self.current].work
        node = torch._C._current_autograd_node()
        name, sequence = (
            ("outside", None) if node is None else (node.name(), int(node._sequence_nr()))
        )
        adds = sequence in self._finished
        key = (name, sequence, adds)
        if key not in self.backward:
            self.backward[key] = BackwardWork(name=name, sequence=sequence, adds=adds)
        return self.backward[key].work

    # Saved tensors

    def _pack(self, tensor: Tensor) -> Tensor:
        with self.pause():
            alias = tensor.detach()  # the tensor itself would be a cycle
        if not self.paused and self.phase is Phase.FORWARD and self.calls:
            self.saved.append(
                Saved(
                    storage=self.tensors.key(tensor),
                    # A custom Function saves when its calls are over.
                    call=len(self.calls) - 1 if self.current is None else self.current,
                    size_bytes=tensor.untyped_storage().nbytes(),
                    item_bytes=tensor.element_size(),
                    dtype=str(tensor.dtype).removeprefix("torch."),
                    shape=tuple(tensor.shape),
                )
            )
        return alias


class _OperationMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands every low-level operation to the recorder."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return self._recorder.run_operation(func, args, kwargs or {})


def sequence_number() -> int:
    """The number that the next autograd node of this thread gets."""
    return int(torch._C._autograd._get_sequence_nr())


def recomputation(name: str) -> CaptureError:
    """The error for what runs again during backward."""
    return CaptureError(
        f"{name} runs again during backward (gradient checkpointing), which a graph of one"
        " forward and one backward cannot hold",
        "Turn checkpointing off for the capture; lower precisions are found to save memory",
    )


def _unpack(tensor: Tensor) -> Tensor:
    return tensor


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided


def _type_name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"
