"""Strict JSON: bytes to typed documents and back, every fault told as a `FormatError`.

A format is a `Document` class: its fields are the keys, its annotations the types. Nothing is
converted or ignored: a string is not a number, an unknown or repeated key is refused, so are
NaN, infinities and numbers that a double cannot hold. Format and version are judged before
anything else is, so that a file of a later release is told apart from a broken one.

Optional keys are declared `X | msgspec.UnsetType = msgspec.UNSET`: what was not in the file is
then told apart from a default, and is not written back.
"""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    NoReturn,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec

from qsync_opt.errors import FormatError

D = TypeVar("D", bound="Document")

#: A count, an index or a number of bytes. Beyond 2^53 a reader that uses doubles loses units.
Whole = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class Part(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, gc=False):
    """Base of every object inside a document."""


class Document(Part, kw_only=True):
    """Base of the versioned formats; `format` and `version` are their first two keys.

    Attributes:
        FORMAT: the format's name, for example `qsync-opt/problem`.
        VERSION: the version that is read and written.
    """

    FORMAT: ClassVar[str]
    VERSION: ClassVar[int] = 1

    format: str
    version: int

    def strings(self) -> int | None:
        """How many strings the text has, keys included; None if that is not counted.

        Where it is counted, repeated keys are found without parsing the text again.
        """
        return None


class _Header(msgspec.Struct):
    """The first two keys, whatever the rest of the document looks like."""

    format: Any = None
    version: Any = None


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keep the garbage collector out of the way while documents are built or taken apart.

    That makes millions of containers and no cycles; the collector would walk through all of
    them again and again, for nothing, and double the time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def decode(raw: bytes, schema: type[D], where: str) -> D:
    """The document in `raw`.

    Args:
        raw: JSON text in UTF-8.
        schema: the format expected.
        where: the file's name, for messages about the text as a whole.

    Raises:
        FormatError: not JSON, of another format or version, or not what the schema asks for;
            `field` is the path of the culprit, for example `devices[0].forward_s[3][1]`.
    """
    try:
        document = msgspec.json.decode(raw, type=schema)
    except msgspec.ValidationError as error:
        header = _decode_header(raw, where)
        _check_header(header.format, header.version, schema)
        _refuse(str(error), raw, schema, where)
    except RecursionError:
        raise FormatError(where, "must not be nested this deeply", "more levels") from None
    except ValueError as error:  # msgspec.DecodeError and UnicodeDecodeError among them
        raise FormatError(where, "must be complete, valid JSON", str(error)) from None
    _check_header(document.format, document.version, schema)
    if document.strings() != _count_strings(raw):
        _refuse_repeated_keys(raw, where)
    return document


def encode(document: Document) -> bytes:
    """The document as JSON text: the same bytes for equal documents, floats read back exactly."""
    return msgspec.json.encode(document) + b"\n"


def _decode_header(raw: bytes, where: str) -> _Header:
    try:
        return msgspec.json.decode(raw, type=_Header)
    except RecursionError:
        raise FormatError(where, "must not be nested this deeply", "more levels") from None
    except msgspec.ValidationError:
        raise FormatError(where, "must be a JSON object", raw[:40]) from None
    except ValueError as error:
        raise FormatError(where, "must be complete, valid JSON", str(error)) from None


def _check_header(name: object, version: object, schema: type[Document]) -> None:
    if name != schema.FORMAT:
        raise FormatError("format", f"must be {schema.FORMAT!r} here", name)
    if type(version) is not int or version != schema.VERSION:
        raise FormatError(
            "version",
            f"must be a version of {schema.FORMAT} that this release reads ({schema.VERSION})",
            version,
            "Write the file again with this release, or install the release that wrote it",
        )


def _count_strings(raw: bytes) -> int:
    """Strings in JSON text, keys included: half of its quotation marks that are not escaped."""
    if b"\\" in raw:
        raw = re.sub(rb"\\.", b"", raw)
    return raw.count(b'"') // 2


def _refuse_repeated_keys(raw: bytes, where: str) -> None:
    def pairs(items: list[tuple[str, object]]) -> None:
        seen = set()
        for key, _ in items:
            if key in seen:
                raise FormatError(where, "must not repeat a key", key)
            seen.add(key)

    json.loads(raw, object_pairs_hook=pairs)


_PLACE = re.compile(r" - at `\$(?P<path>(?:\.\w+|\[\d+\]|\[\.\.\.\])*)`$")
_STEP = re.compile(r"\.(?P<key>\w+)|\[(?P<index>\d+)\]|\[\.\.\.\]")


def _refuse(message: str, raw: bytes, schema: type[Document], where: str) -> NoReturn:
    """Raise the `FormatError` for what msgspec reports as `<fault> - at `$.path``."""
    place = _PLACE.search(message)
    fault = message[: place.start()] if place else message
    path, value, annotation = _follow(place["path"] if place else "", raw, schema)
    field = path or where
    if fault.startswith("Object contains unknown field"):
        known = _keys(annotation)
        odd = [key for key in value if key not in known] if isinstance(value, dict) else [fault]
        raise FormatError(field, "must have only the keys " + ", ".join(known), odd[0])
    if fault.startswith("Object missing required field"):
        missing = fault.split("`")[1]
        rule = "must have the keys " + ", ".join(_keys(annotation, required=True))
        raise FormatError(field, rule, f"no {missing!r}")
    raise FormatError(field, _rule(fault), value)


_NAMES = {
    "int": "a whole number",
    "float": "a number",
    "str": "a string",
    "array": "a list",
    "object": "a JSON object",
    "null": "null",
}


def _rule(fault: str) -> str:
    """The rule behind a fault, in the words of the other messages."""
    expected = re.match(r"Expected `(?P<types>[^`]+)`(?P<bound> [<>]=? \S+)?", fault)
    if expected is None:
        if fault.startswith("Number out of range"):
            return "must be a number that a double can hold (below 1.8e308)"
        return f"must follow the format ({fault})"
    names = [_NAMES.get(name.strip(), name.strip()) for name in expected["types"].split("|")]
    bound = (expected["bound"] or "").replace(str(2**53), "2^53")
    return "must be " + " or ".join(names) + bound


def _follow(path: str, raw: bytes, schema: type[Document]) -> tuple[str, Any, Any]:
    """What stands at a path: the path with its keys filled in, the value and its annotation.

    msgspec writes `[...]` for a key of a free mapping; the culprit is then the first entry
    that does not convert to the mapping's type.
    """
    try:
        value: Any = json.loads(raw)
    except (ValueError, RecursionError):
        return path.lstrip("."), f"... {path}", schema
    annotation: Any = schema
    filled = ""
    for step in _STEP.finditer(path):
        kind = _container(annotation, value)
        if step["key"] is not None:
            annotation, value = _fields(kind)[step["key"]], value[step["key"]]
            filled += f".{step['key']}"
        elif step["index"] is not None:
            annotation, value = get_args(kind)[0], value[int(step["index"])]
            filled += f"[{step['index']}]"
        else:
            annotation = get_args(kind)[1]
            key = _culprit(value, annotation)
            value = value[key]
            filled += f".{key}"
    return filled.lstrip("."), value, _container(annotation, value)


def _culprit(value: Mapping[str, object], annotation: object) -> str:
    for key, entry in value.items():
        try:
            msgspec.convert(entry, type=annotation)
        except msgspec.ValidationError:
            return key
    return next(iter(value))


def _container(annotation: Any, value: object) -> Any:
    """The member of a union that fits a list, an object with fixed keys or a free mapping."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) not in (Union, UnionType):
        return annotation
    for member in get_args(annotation):
        origin = get_origin(member) or member
        fits_list = origin is list and isinstance(value, list)
        if fits_list or (isinstance(value, dict) and (origin is dict or _is_part(origin))):
            return member
    return annotation


def _is_part(annotation: object) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, msgspec.Struct)


def _fields(part: Any) -> dict[str, Any]:
    """JSON key -> annotation."""
    hints = get_type_hints(part, include_extras=True)
    return {field.encode_name: hints[field.name] for field in msgspec.structs.fields(part)}


def _keys(part: Any, *, required: bool = False) -> list[str]:
    if not _is_part(part):
        return []
    fields = msgspec.structs.fields(part)
    return [field.encode_name for field in fields if field.required or not required]
