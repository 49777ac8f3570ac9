"""Model files: plain Python files with `build(batch_size=..., ...) -> model, batch, loss`.

A file runs as a script does: what lies beside it can be imported. Nothing else is known
about it.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from qsync_opt.errors import CaptureError, ParameterError
from qsync_opt.measure.step import Loss


def load_model(
    path: str | os.PathLike[str], sizes: Mapping[str, object] | None = None
) -> tuple[nn.Module, Any, Loss | None]:
    """What `build` of a model file returns: the model, a batch, and a loss or None.

    Args:
        path: the file.
        sizes: arguments of `build` by name.

    Raises:
        CaptureError: no such file, it fails, it has no `build`, or `build` returns something
            else.
        ParameterError: `build` does not take an argument.
    """
    file = Path(path)
    with _beside(file):
        build = _find_build(file)
        given = dict(sizes or {})
        _check_arguments(build, given, file)
        try:
            built = build(**given)
        except Exception as error:
            raise _failed(f"build() of {file}", error) from error
    if not isinstance(built, (tuple, list)) or len(built) != 3:
        raise CaptureError(
            f"build() of {file} returned a {type(built).__name__}",
            "Return three things: model, batch, and loss (None if the model returns its loss)",
        )
    model, batch, loss = built
    if not isinstance(model, nn.Module):
        raise CaptureError(
            f"the model that build() of {file} returned is a {type(model).__name__}",
            "Return a torch.nn.Module first, then the batch and the loss",
        )
    if loss is not None and not callable(loss):
        raise CaptureError(
            f"the loss that build() of {file} returned is a {type(loss).__name__}",
            "Return a function loss(output, target), or None if the model returns its loss",
        )
    return model, batch, loss


def further_batches(
    path: str | os.PathLike[str], sizes: Mapping[str, object], count: int
) -> list[Any]:
    """Batches that `build` makes with other seeds, `count - 1` of them.

    Args:
        path: the model file.
        sizes: arguments of `build` by name; the seeds go on from the one among them, or 0.
        count: of all batches, the first one included.

    Raises:
        CaptureError: as `load_model`.
        ParameterError: fewer than one batch, or more and `build` takes no `seed`.
    """
    if count < 1:
        raise ParameterError("batches", "must be at least 1", count)
    first = sizes.get("seed", 0)
    if not isinstance(first, int):
        raise ParameterError("seed", "must be a whole number to draw further batches", first)
    try:
        return [load_model(path, {**sizes, "seed": first + n})[1] for n in range(1, count)]
    except ParameterError as error:
        if error.field != "seed":
            raise
        rule = "must be 1 for a build() that takes no seed"
        raise ParameterError("batches", rule, count) from None


def load_batches(
    path: str | os.PathLike[str], sizes: Mapping[str, object] | None = None
) -> Callable[[int, range], Any] | None:
    """The function `batches(step, rows, ...)` of a model file; None where it has none.

    It gives the samples `rows` of the global batch of a step. What a sample holds may depend
    on the step and the sample's number alone.

    Args:
        path: the file.
        sizes: arguments of `build` by name; `batches` is given those that it takes as well.

    Raises:
        CaptureError: no such file, it fails, or `batches` is no function.
    """
    file = Path(path)
    with _beside(file):
        _find_build(file)
    batches = getattr(sys.modules[_name_of(file)], "batches", None)
    if batches is None:
        return None
    if not callable(batches):
        raise CaptureError(
            f"batches of {file} is a {type(batches).__name__}",
            "Define batches(step, rows, ...) that returns a batch",
        )
    taken = inspect.signature(batches).parameters
    given = {key: value for key, value in (sizes or {}).items() if key in taken}
    return functools.partial(batches, **given)


def parse_sizes(settings: Sequence[str]) -> dict[str, object]:
    """`key=value` texts as arguments; values are Python literals, and else text.

    Raises:
        ParameterError: no `=`, a key that is no name, or a key given twice.
    """
    sizes: dict[str, object] = {}
    for setting in settings:
        key, separator, text = setting.partition("=")
        if not separator or not key.isidentifier():
            raise ParameterError("set", "must be key=value with a name for a key", setting)
        if key in sizes:
            raise ParameterError("set", "must give each key once", setting)
        try:
            sizes[key] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            sizes[key] = text
    return sizes


def _name_of(file: Path) -> str:
    """Of a file as a module; its `build` may come from another one."""
    return f"qsync_opt_model_{file.stem}"


def _find_build(file: Path) -> Any:
    if not file.is_file():
        raise CaptureError(f"{file} is no file", "Give a Python file with a build() function")
    name = _name_of(file)
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise CaptureError(f"{file} is no Python file", "Its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a script that ends when it has done its work
        del sys.modules[name]
        raise _failed(str(file), error) from error
    build = getattr(module, "build", None)
    if not callable(build):
        raise CaptureError(
            f"{file} has no build()",
            "Define build(batch_size=..., ...) that returns model, batch, loss",
        )
    return build


def _check_arguments(build: Any, sizes: Mapping[str, object], file: Path) -> None:
    parameters = inspect.signature(build).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return
    for key in sizes:
        if key not in parameters:
            known = ", ".join(parameters)
            raise ParameterError(
                f"{key}", f"must be an argument of build() in {file}: {known}", key
            )


@contextmanager
def _beside(file: Path) -> Iterator[None]:
    """Let the file import what lies beside it, as a script can."""
    folder = str(file.resolve().parent)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def _failed(what: str, error: BaseException) -> CaptureError:
    text = str(error).strip()
    first = text.splitlines()[0] if text else "no message"
    return CaptureError(
        f"{what} fails: {type(error).__name__}: {first}",
        "Run it with Python alone to see the whole traceback",
    )
