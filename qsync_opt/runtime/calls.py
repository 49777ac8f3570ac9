"""Operators that are plain calls, such as `torch.matmul` or attention, told apart by module.

While a module that makes such calls runs, a mode for torch functions sees them. A call is
known by its function and by how many calls of that function the module made before it in the
same run, as in the names of a captured graph. Calls of modules inside are not the module's
own: those modules say so (`layers.Bystander`). A function that a checkpoint runs again outside
of its module is not seen; checkpoint the module instead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from qsync_opt.errors import PlanError
from qsync_opt.runtime.casts import cast_floats
from qsync_opt.runtime.functions import run_call
from qsync_opt.runtime.layers import Patched, without_fast_path
from qsync_opt.runtime.session import OperatorSettings, OwnerMode, Session, Within, aside

#: Kinds of functions that multiply matrices or look up rows.
PRODUCTS = frozenset(
    {
        *("linear", "bilinear", "matmul", "rmatmul", "mm", "bmm", "mv", "addmm", "addmv"),
        *("addbmm", "baddbmm", "einsum", "tensordot", "inner", "chain_matmul", "multi_dot"),
        *("conv1d", "conv2d", "conv3d", "conv_tbc", "embedding", "embedding_bag"),
        *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
        *("scaled_dot_product_attention", "lstm", "gru", "rnn_tanh", "rnn_relu"),
        *("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"),
    }
)

#: Where functions are that models call.
_HOMES: tuple[Any, ...] = (torch, torch.Tensor, functional, torch._C._nn, torch._VF, torch.linalg)

#: Python functions of torch whose calls inside are operators of the module that calls them.
_OPENED = frozenset({"multi_head_attention_forward"})


_NOTHING = nullcontext()


@dataclass(frozen=True, kw_only=True)
class ModuleCalls:
    """What a module is told of its own calls.

    Attributes:
        module: fully qualified name.
        whole: of the one operator that the module is, where it is one.
        planned: kind of function -> settings of the first call, the second and so on; None
            for a call that needs nothing done.
        fixed: kinds whose calls always run in fp32.
        session: of the model.
    """

    module: str
    whole: OperatorSettings | None
    planned: Mapping[str, tuple[OperatorSettings | None, ...]]
    fixed: frozenset[str]
    session: Session

    @cached_property
    def kinds(self) -> Mapping[Any, str]:
        """Function -> kind, of the functions that need a look."""
        return functions_of({*PRODUCTS, *self.planned, *self.fixed, *_OPENED})

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        state.pop("kinds", None)  # functions of torch that cannot be pickled
        return state


class CallOwner(Patched):
    """Takes over a module that makes calls which are operators."""

    _qsync_state: ModuleCalls

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the class that it takes over."""
        calls = self._qsync_state
        run = super().forward  # type: ignore[misc]  # the compiler cannot do this in a mode
        fused = isinstance(self, nn.MultiheadAttention)
        with (
            without_fast_path() if fused else _NOTHING,
            Within(calls.session.scope, calls),
            CallMode(calls),
        ):
            return run(*args, **kwargs)


class CallMode(OwnerMode):
    """Sees every call of a torch function during one run of a module."""

    def __init__(self, calls: ModuleCalls) -> None:
        super().__init__()
        self._calls = calls
        self._counts: dict[str, int] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a call: as the plan says if it is an operator of the module, else as it is."""
        named = kwargs or {}
        calls = self._calls
        if calls.session.scope.owner is not calls:
            return func(*args, **named)
        kind = calls.kinds.get(func)
        if kind is None:
            return func(*args, **named)
        if kind in PRODUCTS or kind in calls.planned:
            settings = self._next(kind)
            if settings is None:
                return func(*args, **named)
            session = calls.session
            return aside(session.scope, session.run, run_call, func, kind, args, named, settings)
        if kind in calls.fixed:
            args, named = cast_floats((args, named), torch.float32)
            return func(*args, **named)
        with self:
            return _opened(func)(*args, **named)

    def _next(self, kind: str) -> OperatorSettings | None:
        calls = self._calls
        if calls.whole is not None:
            return calls.whole
        number = self._counts.get(kind, 0)
        self._counts[kind] = number + 1
        planned = calls.planned.get(kind, ())
        if number < len(planned):
            return planned[number]
        base = f"{calls.module}.{kind}" if calls.module else kind
        name = f"{base}.{number}" if number else base
        remedy = "Capture the model again, as it runs now, and plan with that graph."
        raise PlanError(name, "must be in the plan, because the model calls it", None, remedy)


def functions_of(kinds: Collection[str]) -> dict[Any, str]:
    """The functions of torch that a graph counts to some kinds, each with its kind.

    A kind is the name of a function without its place and without double underscores. The
    functions themselves are compared, because the compiler does not read their names.
    """
    found: dict[Any, str] = {}
    for kind in kinds:
        for home in _HOMES:
            for name in (kind, f"__{kind}__"):
                function = getattr(home, name, None)
                if callable(function):
                    found[function] = kind
    return found


def _opened(function: Any) -> Callable[..., Any]:
    """A copy of a Python function of torch that does not hand itself over to modes whole."""
    scope = dict(function.__globals__)
    scope.update({name: _no_override for name in scope if name.startswith("has_torch_function")})
    copy = FunctionType(
        function.__code__, scope, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _no_override(*_: object) -> bool:
    return False
