"""The name map of an MPS file: which generic name stands for which row and column.

MPS files carry generic names of 8 characters, because readers disagree about blanks, length
and characters. The map beside the file (`qsync-opt/mps-names`, version 1, JSON) gives each its
meaning, with the problem and the deadline it came from. The same JSON stands in the MPS file
itself as comment lines: `*>` starts a line of it, `*+` continues one that grew too long.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import msgspec

from qsync_opt.errors import FormatError, ParameterError
from qsync_opt.files import read_bytes
from qsync_opt.strict_json import Document, decode

#: Digits in a generic name, `C0000001`; more rows or columns than they count are refused.
_DIGITS = 7
LARGEST_COUNT = 10**_DIGITS - 1

#: Some readers copy a line into 256 or 1024 characters; the classic line has 80.
_LINE_PAYLOAD = 76


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramOrigin:
    """Where a linear program came from; None where that is not known.

    Attributes:
        problem: SHA-256 of the allocation problem.
        deadline_s: the iteration time it was formulated for.
        device: the device kind of a program of one kind; None for a joint one.
    """

    problem: str | None = None
    deadline_s: float | None = None
    device: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MpsNames:
    """The name map of one MPS file.

    Attributes:
        program: name of the linear program.
        origin: where it came from.
        rows: meaning of `R0000001`, `R0000002`, ...
        columns: meaning of `C0000001`, `C0000002`, ...
    """

    program: str
    origin: ProgramOrigin
    rows: tuple[str, ...]
    columns: tuple[str, ...]


class NamesDocument(Document, kw_only=True):
    """A whole `qsync-opt/mps-names` file; rows and columns: generic name -> meaning."""

    FORMAT: ClassVar[str] = "qsync-opt/mps-names"

    program: str
    problem: str | None
    deadline_s: float | None
    device: str | None
    rows: dict[str, str]
    columns: dict[str, str]

    def strings(self) -> int:
        """How many strings the text has, keys included."""
        labels = (self.format, self.program, self.problem, self.device)
        given = sum(label is not None for label in labels)
        return len(self.__struct_fields__) + given + 2 * (len(self.rows) + len(self.columns))


def generic_name(letter: str, index: int) -> str:
    """The name of a row or column with the 0-based index: a letter and 7 digits from 1."""
    return f"{letter}{index + 1:0{_DIGITS}d}"


def generic_index(name: str, letters: str, count: int) -> int | None:
    """The 0-based index of a generic name; None for any other name, or one beyond `count`."""
    digits = name[1:]
    if name[:1] not in letters or len(digits) != _DIGITS or not digits.isascii():
        return None
    index = int(digits) - 1 if digits.isdecimal() else -1
    return index if 0 <= index < count else None


def sidecar_path(path: str | os.PathLike[str]) -> Path:
    """`name.names.json` beside `name.mps` or `name.mps.gz`.

    Raises:
        ParameterError: another suffix.
    """
    target = Path(path)
    for suffix in (".mps.gz", ".mps"):
        if target.name.endswith(suffix) and target.name != suffix:
            return target.with_name(target.name[: -len(suffix)] + ".names.json")
    raise ParameterError("path", "must end in .mps or .mps.gz", str(target))


def names_text(names: MpsNames) -> str:
    """The map as JSON text in ASCII, one name a line.

    Raises:
        ParameterError: a name that is not valid Unicode.
    """
    document = NamesDocument(
        format=NamesDocument.FORMAT,
        version=NamesDocument.VERSION,
        program=names.program,
        problem=names.origin.problem,
        deadline_s=names.origin.deadline_s,
        device=names.origin.device,
        rows={generic_name("R", i): meaning for i, meaning in enumerate(names.rows)},
        columns={generic_name("C", i): meaning for i, meaning in enumerate(names.columns)},
    )
    for meaning in (names.program, *names.rows, *names.columns):
        try:
            meaning.encode()
        except UnicodeEncodeError as error:
            raise ParameterError("program", "must have valid names", meaning) from error
    return json.dumps(msgspec.to_builtins(document), indent=0, allow_nan=False) + "\n"


def comment_lines(text: str) -> Iterable[str]:
    """JSON text as MPS comment lines of at most 80 characters."""
    for line in text.splitlines():
        for start in range(0, max(len(line), 1), _LINE_PAYLOAD):
            yield ("*> " if start == 0 else "*+ ") + line[start : start + _LINE_PAYLOAD]


def _parse(raw: bytes, where: str) -> MpsNames:
    document = decode(raw, NamesDocument, where)
    for field, letter in (("rows", "R"), ("columns", "C")):
        _check_order(list(getattr(document, field)), letter, f"{where}: {field}")
    return MpsNames(
        program=document.program,
        origin=ProgramOrigin(
            problem=document.problem, deadline_s=document.deadline_s, device=document.device
        ),
        rows=tuple(document.rows.values()),
        columns=tuple(document.columns.values()),
    )


def _check_order(names: Sequence[str], letter: str, where: str) -> None:
    for index, name in enumerate(names):
        if name != generic_name(letter, index):
            raise FormatError(where, f"must list {generic_name(letter, index)} next", name)


def read_text(path: str | os.PathLike[str], kind: str) -> str:
    """The text of a file, unpacked where its name ends in `.gz`.

    Raises:
        FormatError: missing, unreadable, too large, or not UTF-8.
    """
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(str(path), f"must be a {kind} file in UTF-8", str(error)) from None


def names_of(
    path: str | os.PathLike[str], text: str | None, names_path: str | os.PathLike[str] | None = None
) -> MpsNames:
    """The map of an MPS file: from the file beside it, or from its comment lines.

    Where both exist they must agree, so that a map left over from another export is noticed.

    Args:
        path: the MPS file; it need not exist where the map beside it does.
        text: its text, None to go without.
        names_path: the map; `name.names.json` beside the MPS file by default.

    Raises:
        FormatError: neither exists, one is malformed, or the two differ.
        ParameterError: `path` has another suffix than `.mps` or `.mps.gz`.
    """
    beside = sidecar_path(path) if names_path is None else Path(names_path)
    commented = None if text is None else _commented(text)
    inside = None if commented is None else _parse(commented, f"{path} (comment lines)")
    if not beside.exists():
        if inside is None or names_path is not None:
            rule = "must exist, or the MPS file must carry the map as comment lines"
            raise FormatError(str(beside), rule, "no such file", "Export the problem again")
        return inside
    names = _parse(read_bytes(beside), str(beside))
    if inside not in (None, names):
        raise FormatError(
            str(beside),
            f"must agree with the comment lines of {path}",
            "another map",
            "Delete the stale one of the two files, or export the problem again",
        )
    return names


def _commented(text: str) -> bytes | None:
    """The JSON text in the comment lines at the top of an MPS file; None without any."""
    parts: list[str] = []
    start = 0
    while text.startswith("*", start):
        end = text.find("\n", start)
        line = text[start : end if end >= 0 else len(text)]
        if line.startswith("*> "):
            parts.append("\n" + line[3:])
        elif line.startswith("*+ "):
            parts.append(line[3:])
        start = end + 1 if end >= 0 else len(text)
    return "".join(parts).encode() or None
