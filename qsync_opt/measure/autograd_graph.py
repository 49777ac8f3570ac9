"""Walks the graph that autograd built, and watches in which order backward goes through it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn


class AutogradGraph:
    """The nodes that a loss reaches.

    Hooks are set on all of them, so `order` fills while the backward runs.

    Args:
        loss: the scalar that is differentiated.
        model: whose parameters get gradients.

    Attributes:
        sequences: sequence numbers of the nodes reached.
        edges: how many gradients flow into an output of a node, by (id of the node, output).
        parameter_edges: the same for parameters, by index.
        order: sequence numbers in the order in which backward came to the nodes.
        finished: sequence numbers of the nodes that backward has left.
        gradient_order: parameters in the order in which their gradients were complete.
    """

    def __init__(self, loss: Tensor, model: nn.Module) -> None:
        self.sequences: set[int] = set()
        self.edges: Counter[tuple[int, int]] = Counter()
        self.parameter_edges: Counter[int] = Counter()
        self.order: list[int] = []
        self.finished: set[int] = set()
        self.gradient_order: list[int] = []
        self._nodes: list[Any] = []  # kept, so that an id stays that of its node
        self._handles: list[Any] = []
        numbers = {id(parameter): index for index, parameter in enumerate(model.parameters())}
        self._walk(loss.grad_fn, numbers)
        for parameter in model.parameters():
            if parameter.requires_grad:
                number = numbers[id(parameter)]
                note = self._note_gradient(number)
                hook = parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
                self._handles.append(hook)

    def close(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _walk(self, root: Any, numbers: dict[int, int]) -> None:
        waiting = [root]
        seen = {id(root)}
        while waiting:
            node = waiting.pop()
            self._nodes.append(node)
            variable = getattr(node, "variable", None)
            if variable is None:
                sequence = int(node._sequence_nr())
                self.sequences.add(sequence)
                self._handles.append(node.register_prehook(self._note_start(sequence)))
                self._handles.append(node.register_hook(self._note_end(sequence)))
            for below, output in node.next_functions:
                if below is None:
                    continue
                leaf = getattr(below, "variable", None)
                if leaf is not None and id(leaf) in numbers:
                    self.parameter_edges[numbers[id(leaf)]] += 1
                else:
                    self.edges[id(below), output] += 1
                if id(below) not in seen:
                    seen.add(id(below))
                    waiting.append(below)

    def _note_start(self, sequence: int) -> Any:
        def note(gradients: object) -> None:
            self.order.append(sequence)

        return note

    def _note_end(self, sequence: int) -> Any:
        def note(computed: object, gradients: object) -> None:
            self.finished.add(sequence)

        return note

    def _note_gradient(self, number: int) -> Any:
        def note(parameter: Tensor) -> None:
            self.gradient_order.append(number)

        return note
