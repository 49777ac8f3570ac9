"""Raw records of a step: what `recorder` writes and `assembly` reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from qsync_opt.graph import Operand, Origin
from qsync_opt.measure.calls import function_kind
from qsync_opt.measure.probe import ProbeResult

#: Sequence number of the nodes that hand a gradient to a parameter.
ACCUMULATE = 2**64 - 1

#: The module of calls that the loss makes.
LOSS = "loss"


class Phase(Enum):
    """Where in the step the listeners are."""

    IDLE = 0
    FORWARD = 1
    BACKWARD = 2


@dataclass(slots=True)
class Value:
    """A tensor, or one state of it where calls overwrite it.

    Attributes:
        view_of: the value whose memory a call without computation made this from.
        held: the newest call when the tensor was given up; None while it is held. What backward
            keeps does not count.
        node: its autograd node and which output of the node it is; None without gradient.
    """

    storage: int
    origin: Origin
    parameter: int | None
    producer: int | None
    view_of: int | None
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    node: tuple[object, int] | None
    held: int | None = None


@dataclass(slots=True)
class Work:
    """Low-level operations that one call, or one part of the backward, ran.

    Attributes:
        marks: start and end of each operation; numbers of seconds, or device events.
        computes: whether any of them does more than make a view.
    """

    flops: int = 0
    products: list[str] = field(default_factory=list)
    marks: list[tuple[Any, Any]] = field(default_factory=list)
    computes: bool = False


@dataclass(slots=True)
class Call:
    """A call of a torch function during forward or in the loss."""

    function: str
    module: str
    module_type: str
    module_call: int
    training: bool
    arguments: str
    operands: list[Operand]
    inputs: list[int]
    outputs: list[int] = field(default_factory=list)
    output_specs: list[tuple[tuple[int, ...], str]] = field(default_factory=list)
    sequence: tuple[int, int] = (0, 0)
    work: Work = field(default_factory=Work)
    written: set[int] = field(default_factory=set)
    probe: ProbeResult | None = None

    @property
    def kind(self) -> str:
        """What it computes."""
        return function_kind(self.function)

    @property
    def computes(self) -> bool:
        """Whether it does more than make a view."""
        return self.work.computes


@dataclass(slots=True)
class Saved:
    """A tensor that a call keeps for backward."""

    storage: int
    call: int
    size_bytes: int
    item_bytes: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(slots=True)
class BackwardWork:
    """Low-level operations of one autograd node; `sequence` None outside of every node.

    Attributes:
        adds: whether they add up gradients that came from several users of a tensor, which
            the engine does after the node.
    """

    name: str
    sequence: int | None
    adds: bool
    work: Work = field(default_factory=Work)
