"""Calls of torch functions as text that can be read back and run again.

A call is written as the dotted name of its function and a JSON template of its arguments
(`graph.Signature`), in which tensors stand as numbers of operands. Nothing here knows a
function by name: names come from torch's own list of functions that can be overridden.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache
from importlib import import_module
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name

#: Where functions are looked for that torch's list of overridable functions lacks.
_HOMES = ("torch._C._nn", "torch._VF", "torch.special", "torch.linalg", "torch.fft")


@cache
def function_name(function: Callable[..., Any]) -> str:
    """Dotted name of a torch function, for example `torch.nn.functional.linear`."""
    name = resolve_name(function)
    if name is not None:
        return name if name.startswith("torch.") else f"torch.ops.{name}"
    short = getattr(function, "__name__", type(function).__name__)
    for home in _HOMES:
        if getattr(import_module(home), short, None) is function:
            return f"{home}.{short}"
    module = getattr(function, "__module__", None) or "torch"
    return f"{module}.{getattr(function, '__qualname__', short)}"


def function_kind(name: str) -> str:
    """What a function computes: its name without its place and without double underscores."""
    parts = name.split(".")
    short = parts[-2] if parts[-1] == "__get__" else parts[-1]
    return short[2:-2] if short.startswith("__") and short.endswith("__") else short


def find_function(name: str) -> Callable[..., Any]:
    """The function of a dotted name; the inverse of `function_name`.

    Raises:
        AttributeError: this release of torch has no such function.
    """
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            found: Any = import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found  # type: ignore[no-any-return]
    raise AttributeError(f"no function {name}")


#: The names under which torch's Python functions look for overrides of themselves.
_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def opened(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """The function without its own look for overrides, so that the calls in it are seen.

    Torch's Python functions first ask whether a mode overrides them and hand themselves over
    whole. The copy skips that question; what it calls still asks. None for what is not
    written in Python.
    """
    if not isinstance(function, FunctionType):
        return None
    scope = dict(function.__globals__)
    scope.update({check: _no_override for check in _CHECKS if check in scope})
    copy = FunctionType(
        function.__code__, scope, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _no_override(*_: object) -> bool:
    return False


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of arguments or of a result, in the order in which they stand."""
    found: list[Tensor] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, (tuple, list)):
        for item in value:
            _collect(item, found)
    elif isinstance(value, Mapping):
        for item in value.values():
            _collect(item, found)
    elif isinstance(value, slice):
        _collect((value.start, value.stop, value.step), found)


def replace_tensors(value: Any, make: Callable[[Tensor], Any]) -> Any:
    """The same arguments with `make(tensor)` for every tensor."""
    if isinstance(value, Tensor):
        return make(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple
        return type(value)(*(replace_tensors(item, make) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(replace_tensors(item, make) for item in value)
    if isinstance(value, dict):
        return {key: replace_tensors(item, make) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(replace_tensors(x, make) for x in (value.start, value.stop, value.step)))
    return value


def encode_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Arguments as JSON text; the i-th tensor in them becomes `{"operand": i}`."""
    count = 0

    def encode(value: Any) -> Any:
        nonlocal count
        if isinstance(value, Tensor):
            count += 1
            return {"operand": count - 1}
        if isinstance(value, float) and not math.isfinite(value):
            return {"float": str(value)}
        if isinstance(value, Enum):
            place = f"{type(value).__module__}.{type(value).__qualname__}"
            return {"enum": [place, encode(value.value)]}
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, tuple):
            return {"tuple": [encode(item) for item in value]}
        if isinstance(value, list):
            return [encode(item) for item in value]
        if isinstance(value, Mapping):
            return {"dict": {str(key): encode(item) for key, item in value.items()}}
        if isinstance(value, slice):
            return {"slice": [encode(x) for x in (value.start, value.stop, value.step)]}
        if value is Ellipsis:
            return {"ellipsis": True}
        for kind in (torch.dtype, torch.memory_format, torch.layout):
            if isinstance(value, kind):
                return {kind.__name__: str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": None}
        return {"opaque": f"{type(value).__module__}.{type(value).__qualname__}"}

    positional = [encode(value) for value in args]
    keywords = {key: encode(value) for key, value in kwargs.items()}
    return json.dumps([positional, keywords], separators=(",", ":"))


def decode_arguments(
    text: str, operands: list[Tensor], device: torch.device
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments from JSON text, with these tensors and this device.

    Raises:
        ValueError: something in the call cannot be written as text (`{"opaque": ...}`).
    """

    def decode(value: Any) -> Any:
        if isinstance(value, list):
            return [decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        (key, inner), *_ = value.items()
        if key == "operand":
            return operands[inner]
        if key == "float":
            return float(inner)
        if key == "enum":
            return find_function(inner[0])(decode(inner[1]))
        if key == "tuple":
            return tuple(decode(item) for item in inner)
        if key == "dict":
            return {name: decode(item) for name, item in inner.items()}
        if key == "slice":
            return slice(*(decode(item) for item in inner))
        if key == "ellipsis":
            return Ellipsis
        if key in ("dtype", "memory_format", "layout"):
            return getattr(torch, inner)
        if key == "device":
            return device
        raise ValueError(f"a call with a {inner} as argument cannot be run again")

    positional, keywords = json.loads(text)
    return tuple(decode(item) for item in positional), {
        key: decode(item) for key, item in keywords.items()
    }


class CallListener(TorchFunctionMode):
    """Hands every call of a torch function to somebody.

    Args:
        run_call: makes the call; given the function, this mode, args and kwargs.
    """

    def __init__(self, run_call: Callable[..., Any]) -> None:
        super().__init__()
        self._run_call = run_call

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Hand over a call."""
        return self._run_call(func, self, args, kwargs or {})
