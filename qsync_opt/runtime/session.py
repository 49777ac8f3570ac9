"""What the operators of one converted model have in common, and what each is told.

A `Session` belongs to one call of `convert`: how to round, the seed and step of the random
bits, the shared casts, and which module is running where calls are told apart by module.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from qsync_opt.errors import ParameterError
from qsync_opt.kernels.rounding import Rounding, mix64
from qsync_opt.precision import Precision
from qsync_opt.runtime.casts import CastCache
from qsync_opt.runtime.products import Draw

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from types import TracebackType

_NEAREST: Draw = (int(Rounding.NEAREST), 0, 0, 0)
_SALTS = 4  # tensors that one operator rounds: room in its number


class Session:
    """Shared by the operators of one converted model; a copy of the model gets its own.

    Args:
        rounding: of everything that is quantised.
        seed: of the run, equal on every rank.
        rank: of this process; folded into the seed, so that ranks draw independently.
    """

    def __init__(self, rounding: Rounding, seed: int, rank: int) -> None:
        self.rounding = rounding
        self.seed = _signed(mix64(mix64(seed) + rank)) if rank else seed
        self.step: int | None = None
        self.cache = CastCache()
        self.scope = Scope()
        self.tells_calls_apart = False
        #: Gives a context that puts a name on what an operator runs, while somebody traces.
        self.label: Callable[[str], AbstractContextManager[object]] | None = None
        self._eager = _eager_for(rounding)

    def run(self, function: Callable[..., Tensor], *arguments: Any) -> Tensor:
        """Call an operator.

        Compiled graphs hold integers fast and would be compiled again for every step, so
        operators that round stochastically stay out of them.
        """
        if self.label is not None:
            with self.label(arguments[-1].name):
                return _call(function, *arguments)
        return function(*arguments) if self._eager is None else self._eager(function, *arguments)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        del state["cache"], state["scope"], state["_eager"], state["label"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.cache = CastCache()
        self.scope = Scope()
        self.label = None
        self._eager = _eager_for(self.rounding)


class Scope(threading.local):
    """The module whose own calls are running; checkpoints recompute in other threads."""

    owner: object = None


#: The stack of modes of this thread: torch's own, without types.
_modes: Any = torch.overrides


class OwnerMode(TorchFunctionMode):
    """A mode that sees the calls of the module that owns them."""


class Within:
    """A context in which calls belong to `owner`; None: to nobody whose calls are told apart.

    The mode of the owner before is taken off meanwhile: it would cost the host some
    microseconds for every function and attribute that modules inside make use of.
    """

    def __init__(self, scope: Scope, owner: object) -> None:
        self._scope = scope
        self._owner = owner
        self._mode: TorchFunctionMode | None = None

    def __enter__(self) -> None:
        self._before = self._scope.owner
        self._scope.owner = self._owner
        # The compiler traces through modes, but cannot follow them being taken off.
        told = self._before is not None and not torch.compiler.is_compiling()
        if told and isinstance(_modes._get_current_function_mode(), OwnerMode):
            self._mode = _modes._pop_mode()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._scope.owner = self._before
        if self._mode is not None:
            _modes._push_mode(self._mode)
            self._mode = None


def aside(scope: Scope, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run something whose calls belong to nobody; at once where nobody owns them already."""
    if scope.owner is None:
        return run(*args, **kwargs)
    with Within(scope, None):
        return run(*args, **kwargs)


@dataclass(frozen=True, kw_only=True)
class OperatorSettings:
    """What one operator is told.

    Attributes:
        name: of the operator in the plan.
        precision: of its products.
        source: names what its input is, equal for operators that read one tensor; the random
            bits of the input's cast follow it, so that the cast can be shared.
        session: of the model.
        is_last_reader: no operator that could share the cast of its input comes after it.
    """

    name: str
    precision: Precision
    source: str
    session: Session
    is_last_reader: bool = False

    def draw(self) -> Draw:
        """How to round what this operator alone rounds: weight and gradient.

        Raises:
            ParameterError: stochastic rounding, and nobody said which step it is.
        """
        return self._draw(self.name)

    def input_draw(self) -> Draw:
        """How to round its input; see `source`."""
        return self._draw(self.source)

    def shared(self, x: Tensor, form: str, make: Callable[[], tuple[Tensor, ...]]) -> Any:
        """The cast of an input, made at most once for all its readers of the same `form`."""
        with torch.no_grad():
            key = (form, self.input_draw())
            return self.session.cache.get(x, key, make, hold=not self.is_last_reader)

    def _draw(self, name: str) -> Draw:
        session = self.session
        if session.rounding is Rounding.NEAREST:
            return _NEAREST
        if session.step is None:
            rule = "must be set before stochastic rounding"
            remedy = "Call set_step(model, step) at the start of every step."
            raise ParameterError("step", rule, None, remedy)
        return (int(session.rounding), session.seed, session.step, tensor_number(name))


def _call(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    return function(*arguments)


def _eager_for(rounding: Rounding) -> Callable[..., Tensor] | None:
    if rounding is Rounding.NEAREST:
        return None
    disable: Any = torch.compiler.disable  # loads the compiler: not for those without need
    eager: Callable[..., Tensor] = disable(_call)
    return eager


def tensor_number(name: str) -> int:
    """A number for what a name names, the same in every process; 62 bits, a multiple of 4."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 2) // _SALTS * _SALTS


def _signed(value: int) -> int:
    """An unsigned 64-bit integer as a signed one: what operators take."""
    return value - (1 << 64) if value >> 63 else value
