"""The public surface is a list in a file: a change to it is a decision, not an accident.

After a deliberate change write the list again and review it with the change:

    python -m tests.unit.test_public_names
"""

from __future__ import annotations

import inspect
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path

import pytest

import qsync_opt
from qsync_opt.measure.measuring import measure

GOLDEN = Path(__file__).parents[1] / "golden" / "public_names.txt"
UPDATE = "if this is meant, run: python -m tests.unit.test_public_names"


def describe(name: str) -> str:
    """One line: what a public name is and how it is called."""
    value = getattr(qsync_opt, name)
    if isinstance(value, type) and issubclass(value, Enum):
        return f"{name}: enum {', '.join(value.__members__)}"
    if isinstance(value, type) and issubclass(value, BaseException):
        bases = ", ".join(base.__name__ for base in value.__bases__)
        return f"{name}({bases}): error {inspect.signature(value.__init__)}"
    if is_dataclass(value):
        # Defaults are left to the code: what callers spell out are the names and types.
        return f"{name}: " + ", ".join(f"{field.name}: {field.type}" for field in fields(value))
    return f"{name}{inspect.signature(value)}"


def surface() -> list[str]:
    return [describe(name) for name in qsync_opt.__all__]


def test_the_public_names_are_those_of_the_list() -> None:
    expected = [line.split("(")[0].split(":")[0] for line in GOLDEN.read_text().splitlines()]
    assert qsync_opt.__all__ == expected, UPDATE


def test_the_signatures_are_those_of_the_list() -> None:
    assert surface() == GOLDEN.read_text().splitlines(), UPDATE


def test_every_public_name_is_documented() -> None:
    bare = [name for name in qsync_opt.__all__ if not inspect.getdoc(getattr(qsync_opt, name))]
    assert not bare


def test_the_names_for_type_checkers_are_the_names_at_run_time() -> None:
    source = Path(qsync_opt.__file__).read_text()
    block = source[source.index("if TYPE_CHECKING:") : source.index("__version__ =")]
    typed = [line.split()[1::2] for line in block.splitlines() if "import" in line]
    home = {pair[1].split()[0]: pair[0] for pair in typed}
    found = {name: getattr(qsync_opt, name) for name in qsync_opt.__all__}
    found["measure"] = measure  # the package of that name is called in its place
    assert home == {name: value.__module__ for name, value in found.items()}


def test_the_package_is_called_like_the_function_of_its_name() -> None:
    import qsync_opt.measure as package

    called: object = package
    assert callable(called)
    assert inspect.signature(called) == inspect.signature(measure)
    with pytest.raises(TypeError, match="measure"):
        qsync_opt.measure()  # type: ignore[call-arg]  # what is missing is measure's to say


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="qsync_opt.*no attribute 'solv'"):
        qsync_opt.solv  # noqa: B018


def test_dir_lists_what_can_be_used() -> None:
    assert set(qsync_opt.__all__) <= set(dir(qsync_opt))


if __name__ == "__main__":
    GOLDEN.write_text("\n".join(surface()) + "\n")
