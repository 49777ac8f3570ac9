"""Reading and writing versioned files: reading is strict, writing all or nothing.

Writing then reading is the identity, and equal objects give equal bytes. Nothing is pickled.
A file is written under a temporary name in the same folder and then moved, so whoever reads
`path` finds the old file or the new one. Names that end in `.gz` are packed.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import secrets
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path

from qsync_opt.conversion import from_plan, from_problem, to_plan, to_problem
from qsync_opt.costs import DeviceCosts
from qsync_opt.costs_conversion import from_costs, to_costs
from qsync_opt.costs_schema import CostsDocument
from qsync_opt.errors import FieldError, FormatError, ParameterError
from qsync_opt.graph import OperatorGraph
from qsync_opt.graph_conversion import from_graph, to_graph
from qsync_opt.graph_schema import GraphDocument
from qsync_opt.optimize.problem import AllocationProblem
from qsync_opt.perturbation import PerturbationTable
from qsync_opt.perturbation_file import (
    PerturbationDocument,
    from_perturbations,
    to_perturbations,
)
from qsync_opt.plan import PrecisionPlan
from qsync_opt.schema import PlanDocument, ProblemDocument
from qsync_opt.strict_json import D, Document, collector_paused, decode, encode

#: A larger file, packed or not, is refused before it is parsed: a problem of 10,000
#: operators, 6 precisions and 4 device kinds takes 75 MB, and parsing takes a multiple.
LARGEST_FILE_BYTES = 2**29

_PACKING_LEVEL = 6  # level 9 takes five times as long and saves a few percent


def load_problem(path: str | os.PathLike[str]) -> AllocationProblem:
    """Read a `qsync-opt/problem` file (`.json` or `.json.gz`).

    Raises:
        FormatError: the file is not of the format.
        ProblemError: the problem in it breaks a rule.
    """
    with collector_paused(), naming(path):
        return to_problem(load_document(path, ProblemDocument))


def save_problem(problem: AllocationProblem, path: str | os.PathLike[str]) -> None:
    """Write a `qsync-opt/problem` file; `.gz` packs it.

    Raises:
        FormatError: the path cannot be written; what was there is left as it was.
    """
    with collector_paused():
        save_document(from_problem(problem), path)


def load_plan(path: str | os.PathLike[str]) -> PrecisionPlan:
    """Read a `qsync-opt/plan` file (`.json` or `.json.gz`).

    Raises:
        FormatError: the file is not of the format.
        PlanError: a precision that is not one, or bits that no bucket can have.
    """
    with naming(path):
        return to_plan(load_document(path, PlanDocument))


def save_plan(plan: PrecisionPlan, path: str | os.PathLike[str]) -> None:
    """Write a `qsync-opt/plan` file; `.gz` packs it.

    Raises:
        FormatError: the path cannot be written; what was there is left as it was.
    """
    save_document(from_plan(plan), path)


def load_graph(path: str | os.PathLike[str]) -> OperatorGraph:
    """Read a `qsync-opt/graph` file (`.json` or `.json.gz`).

    Raises:
        FormatError: the file is not of the format.
        GraphError: the graph in it breaks a rule.
    """
    with collector_paused(), naming(path):
        return to_graph(load_document(path, GraphDocument))


def save_graph(graph: OperatorGraph, path: str | os.PathLike[str]) -> None:
    """Write a `qsync-opt/graph` file; `.gz` packs it.

    Raises:
        FormatError: the path cannot be written; what was there is left as it was.
    """
    with collector_paused():
        save_document(from_graph(graph), path)


def load_perturbations(path: str | os.PathLike[str]) -> PerturbationTable:
    """Read a `qsync-opt/perturbation` file (`.json` or `.json.gz`).

    Raises:
        FormatError: the file is not of the format.
        ParameterError: the table in it breaks a rule.
    """
    with naming(path):
        return to_perturbations(load_document(path, PerturbationDocument))


def save_perturbations(table: PerturbationTable, path: str | os.PathLike[str]) -> None:
    """Write a `qsync-opt/perturbation` file; `.gz` packs it.

    Raises:
        FormatError: the path cannot be written; what was there is left as it was.
    """
    save_document(from_perturbations(table), path)


def load_costs(path: str | os.PathLike[str]) -> DeviceCosts:
    """Read a `qsync-opt/costs` file (`.json` or `.json.gz`).

    Raises:
        FormatError: the file is not of the format.
        CostsError: the tables in it do not fit together.
    """
    with naming(path):
        return to_costs(load_document(path, CostsDocument))


def save_costs(costs: DeviceCosts, path: str | os.PathLike[str]) -> None:
    """Write a `qsync-opt/costs` file; `.gz` packs it.

    Raises:
        FormatError: the path cannot be written; what was there is left as it was.
    """
    save_document(from_costs(costs), path)


def load_document(path: str | os.PathLike[str], schema: type[D]) -> D:
    """Read a file of any versioned format.

    Args:
        path: the file; `.gz` is unpacked.
        schema: the format's class.

    Raises:
        FormatError: missing, unreadable, too large, or not of the format.
    """
    return decode(read_bytes(path), schema, str(path))


def save_document(document: Document, path: str | os.PathLike[str]) -> None:
    """Write a file of any versioned format; `.gz` packs it.

    Raises:
        FormatError: the path cannot be written; what was there is left as it was.
    """
    raw = encode(document)
    if str(path).endswith(".gz"):
        raw = gzip.compress(raw, _PACKING_LEVEL, mtime=0)
    write_atomically(path, raw)


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """The content of a regular file; `.gz` is unpacked.

    Raises:
        FormatError: missing, not a regular file, unreadable, damaged or too large.
    """
    try:
        target = Path(path)
        # Anything else, such as a pipe or a terminal, could make the reader wait for ever.
        if target.exists() and not target.is_file():
            raise FormatError(str(target), "must be a regular file", "something else")
        if target.exists() and target.stat().st_size > LARGEST_FILE_BYTES:
            rule = f"must be at most {LARGEST_FILE_BYTES} bytes"
            raise FormatError(str(target), rule, target.stat().st_size)
        with gzip.open(target) if target.suffix == ".gz" else target.open("rb") as stream:
            raw = stream.read(LARGEST_FILE_BYTES + 1)
    except (OSError, EOFError, ValueError, TypeError, zlib.error) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(_name(path), "must be a file that can be read", _reason(error)) from error
    if len(raw) > LARGEST_FILE_BYTES:
        rule = f"must be at most {LARGEST_FILE_BYTES} bytes (unpacked)"
        raise FormatError(str(target), rule, "more")
    return raw


def require_json_name(field: str, path: str | os.PathLike[str]) -> None:
    """Refuse a name that does not say that JSON is in the file.

    Raises:
        ParameterError: it ends neither in .json nor in .json.gz.
    """
    if not str(path).endswith((".json", ".json.gz")):
        raise ParameterError(field, "must end in .json or .json.gz", str(path))


def write_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Write `data` to a temporary file beside `path`, then move it there.

    A link is followed; the mode of a file that is replaced is kept.

    Raises:
        FormatError: the folder does not exist or cannot be written, or the path is not that
            of a regular file; what was there is left as it was.
    """
    try:
        target = Path(os.path.realpath(path))
        replaced = target.stat().st_mode if target.exists() else None
        if replaced is not None and not stat.S_ISREG(replaced):
            raise FormatError(str(target), "must be a regular file", "something else")
        temporary = target.with_name(f".{secrets.token_hex(8)}.tmp")
        try:
            with temporary.open("xb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())  # or a crash could leave the new name without content
            if replaced is not None:
                temporary.chmod(stat.S_IMODE(replaced))
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
    except (OSError, ValueError, TypeError) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(
            _name(path), "must be a path that can be written", _reason(error)
        ) from error


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Let errors of fields say in which file the field stands."""
    try:
        yield
    except FieldError as error:
        if not error.file and error.field not in (_name(path), str(Path(_name(path)))):
            error.file = _name(path)
        raise


def _name(path: object) -> str:
    return str(path) if isinstance(path, (str, os.PathLike)) else "path"


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
