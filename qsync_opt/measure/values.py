"""The tensors of a running step: which is which, through views and overwriting.

A tensor is known by its identity and by its memory. Nothing is kept alive: a step that is
recorded needs no more memory than one that is not.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

from qsync_opt.errors import CaptureError
from qsync_opt.graph import Origin
from qsync_opt.measure.records import Value

if TYPE_CHECKING:
    from torch import Tensor, nn


class TensorTable:
    """Every tensor met in a step as a `Value`.

    Args:
        model: its parameters and buffers are known from the start.
        batch: so are these.
        newest_call: the call that was recorded last, whenever it is asked.

    Attributes:
        values: in the order in which they were met.
        custom: autograd sequence number -> call, for nodes that a custom Function made around
            the call.
    """

    def __init__(
        self, model: nn.Module, batch: Iterable[Tensor], newest_call: Callable[[], int]
    ) -> None:
        self.values: list[Value] = []
        self.custom: dict[int, int] = {}
        self._by_tensor: Any = WeakTensorKeyDictionary()
        self._newest: dict[int, int] = {}
        self._first: dict[int, int] = {}
        self._written: dict[int, int] = {}
        # As long as a weak reference is there, no other memory gets the same key.
        self._references: dict[int, StorageWeakRef] = {}
        self._newest_call = newest_call
        self._held: dict[int, weakref.ref[Tensor]] = {}
        for index, parameter in enumerate(model.parameters()):
            self.add(parameter, Origin.PARAMETER, parameter=index)
        for buffer in model.buffers():
            self.add(buffer, Origin.BUFFER)
        for tensor in batch:
            self.add(tensor, Origin.BATCH)

    def key(self, tensor: Tensor) -> int:
        """What stands for the memory of a tensor."""
        storage = tensor.untyped_storage()
        key = int(storage._cdata)
        if key not in self._references:
            self._references[key] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        return key

    def add(
        self,
        tensor: Tensor,
        origin: Origin,
        *,
        parameter: int | None = None,
        producer: int | None = None,
        view_of: int | None = None,
    ) -> int:
        """A new value for a tensor; returns its index."""
        key = self.key(tensor)
        node = tensor.grad_fn
        index = len(self.values)
        self.values.append(
            Value(
                storage=key,
                origin=origin,
                parameter=parameter,
                producer=producer,
                view_of=view_of,
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                size_bytes=tensor.untyped_storage().nbytes(),
                node=None if node is None else (node, tensor.output_nr),
            )
        )
        self._by_tensor[tensor] = index
        self._held[index] = weakref.ref(tensor, lambda _: self._give_up(index))
        self._newest[key] = index
        self._first.setdefault(key, index)
        return index

    def _give_up(self, index: int) -> None:
        """Nobody holds the tensor of a value any more."""
        self.values[index].held = self._newest_call()
        del self._held[index]

    def overwrite(self, tensor: Tensor, index: int) -> None:
        """From now on the memory of a tensor holds this value."""
        self._written[self.key(tensor)] = index

    def resolve(self, tensor: Tensor, place: str = "the model") -> int:
        """The value that a tensor has now.

        Args:
            tensor: any tensor.
            place: who asks, for the message.

        Raises:
            CaptureError: it needs a gradient, and nothing recorded made it.
        """
        key = self.key(tensor)
        known = self._by_tensor.get(tensor)
        if known is not None and self.values[known].node is None and tensor.grad_fn is not None:
            self._adopt(self.values[known], tensor.grad_fn, tensor.output_nr)
        written = self._written.get(key)
        if written is not None and (known is None or written > known):
            return written
        if known is not None:
            return int(known)
        newest = self._newest.get(key)
        if newest is not None:  # another name for known memory, for example `.data`
            value = self.values[newest]
            return self.add(
                tensor,
                value.origin,
                parameter=value.parameter,
                producer=value.producer,
                view_of=newest,
            )
        if tensor.grad_fn is not None:
            raise CaptureError(
                f"a tensor of shape {list(tensor.shape)} that {tensor.grad_fn.name()} made was not"
                f" seen: it did not come from a torch function (in {place})",
                "Register the extension with torch.library, or write its forward with torch"
                " functions",
            )
        if tensor.requires_grad:
            raise CaptureError(
                f"a tensor of shape {list(tensor.shape)} is trained and is no parameter of the"
                f" model (in {place})",
                "Register it as nn.Parameter",
            )
        return self.add(tensor, Origin.CONSTANT)

    def _adopt(self, value: Value, node: Any, output: int) -> None:
        """A custom Function gave the result of a call a node after the call was over."""
        value.node = (node, output)
        if value.producer is not None:
            self.custom[int(node._sequence_nr())] = value.producer

    def knows(self, key: int) -> bool:
        """Whether any tensor with this memory has a value."""
        return key in self._newest

    def final(self, key: int) -> int | None:
        """What a memory holds in the end; None where it only existed inside a call."""
        written = self._written.get(key)
        return self._first.get(key) if written is None else written

    def root(self, index: int) -> Value:
        """The value that a view views."""
        found = self.values[index]
        while found.view_of is not None:
            found = self.values[found.view_of]
        return found
