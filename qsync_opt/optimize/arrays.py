"""Turning what a caller gives into the read-only arrays that the problem's data classes hold.

Nested lists and tuples, numpy arrays and whatever numpy can read as an array are accepted.
Booleans, strings and None are never taken for numbers, although numpy would do so.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from qsync_opt.errors import ProblemError

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

#: Beyond this a JSON reader that uses doubles loses whole bytes.
LARGEST_BYTES = 2**53

_RAGGED = "must be a table with rows of equal length"


def freeze(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The same array, contiguous and read-only (copied only where it must be)."""
    array = np.ascontiguousarray(array)
    if array.flags.writeable:
        array = array.copy() if array.base is not None else array
        array.setflags(write=False)
    return array


def own_array(value: object, field: str) -> npt.NDArray[Any]:
    """An array that nobody else can change; `from_rows` turns lists into arrays.

    Raises:
        ProblemError: no array, or not one of numbers.
    """
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "iuf":
        raise ProblemError(field, "must be an array of numbers (from_rows makes one)", value)
    return freeze(value.copy()) if value.flags.writeable else value


def float_table(value: object, field: str, dimensions: int) -> FloatArray:
    """A read-only float64 array with the given number of dimensions.

    Raises:
        ProblemError: not numbers, ragged, or another number of dimensions.
    """
    entries, shape = _entries(value, field, dimensions)
    _refuse_other_kinds(entries, field, "iuf", "must hold numbers only")
    try:
        array = np.array(entries, dtype=np.float64)
    except OverflowError:
        raise ProblemError(field, "must hold numbers below 1.8e308", max(entries)) from None
    return cast(FloatArray, freeze(array.reshape(shape)))


def int_table(value: object, field: str, dimensions: int) -> IntArray:
    """A read-only int64 array; fractions and numbers beyond 2^53 are refused.

    Raises:
        ProblemError: not whole numbers, ragged, or another number of dimensions.
    """
    entries, shape = _entries(value, field, dimensions)
    _refuse_other_kinds(entries, field, "iuf", "must hold whole numbers only")
    if isinstance(entries, np.ndarray):
        if entries.dtype.kind == "f":
            odd = entries[~(np.isfinite(entries) & (entries == np.floor(entries)))]
            if odd.size:
                raise ProblemError(field, "must hold whole numbers", float(odd.flat[0]))
        ends = (entries.min(), entries.max()) if entries.size else ()
    else:
        if set(map(type, entries)) != {int}:
            for entry in entries:
                if isinstance(entry, (float, np.floating)) and not float(entry).is_integer():
                    raise ProblemError(field, "must hold whole numbers", entry)
            entries = [int(entry) for entry in entries]
        # Compared as Python ints: as doubles, 2^53 + 1 would pass.
        ends = (min(entries), max(entries)) if entries else ()
    for end in ends:
        if abs(int(end)) > LARGEST_BYTES:
            raise ProblemError(field, "must be at most 2^53", int(end))
    return cast(IntArray, freeze(np.array(entries, dtype=np.int64).reshape(shape)))


def bool_table(value: object, field: str, dimensions: int) -> BoolArray:
    """A read-only array of booleans.

    Raises:
        ProblemError: not booleans, ragged, or another number of dimensions.
    """
    entries, shape = _entries(value, field, dimensions)
    _refuse_other_kinds(entries, field, "b", "must hold True and False only")
    return cast(BoolArray, freeze(np.array(entries, dtype=np.bool_).reshape(shape)))


def _entries(
    value: object, field: str, dimensions: int
) -> tuple[npt.NDArray[Any] | list[Any], tuple[int, ...]]:
    """The entries of a table, as an array or as one flat list, and the shape of the table."""
    if isinstance(value, (list, tuple)):
        flat: list[Any] = list(value)
        shape = [len(flat)]
        for _ in range(dimensions - 1):
            if not all(issubclass(kind, (list, tuple)) for kind in set(map(type, flat))):
                break
            lengths = set(map(len, flat))
            if len(lengths) > 1:
                raise ProblemError(field, _RAGGED, f"lengths {sorted(lengths)[:3]}")
            shape.append(lengths.pop() if lengths else 0)
            flat = list(chain.from_iterable(flat))
        if len(shape) == dimensions:
            return flat, tuple(shape)
        if any(isinstance(entry, (list, tuple)) for entry in flat):
            odd = next(entry for entry in flat if not isinstance(entry, (list, tuple)))
            raise ProblemError(field, _RAGGED, odd)
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, OverflowError):
        raise ProblemError(field, _RAGGED, value) from None
    if array.ndim != dimensions:
        if array.size:
            raise ProblemError(field, f"must have {dimensions} dimensions", value)
        array = array.reshape((0,) * dimensions)
    return array, array.shape


def _refuse_other_kinds(
    entries: npt.NDArray[Any] | list[Any], field: str, kinds: str, rule: str
) -> None:
    """Raise unless every entry is of a numpy kind in `kinds`: b(ool), i(nt), u(int), f(loat)."""
    if isinstance(entries, np.ndarray):
        if entries.size and entries.dtype.kind not in kinds:
            raise ProblemError(field, rule, entries.flat[0])
        return
    odd = {kind for kind in set(map(type, entries)) if _kind(kind) not in kinds}
    if odd:
        raise ProblemError(field, rule, next(entry for entry in entries if type(entry) in odd))


def _kind(python_type: type) -> str:
    for kind, members in (
        ("b", (bool, np.bool_)),
        ("i", (int, np.integer)),
        ("f", (float, np.floating)),
    ):
        if issubclass(python_type, members):
            return kind
    return "other"


def whole_number(value: object, field: str, *, least: int) -> int:
    """`value` as an int, refusing booleans, fractions, strings and numbers below `least`."""
    odd = isinstance(value, bool) or not isinstance(value, (int, np.integer))
    if odd or not least <= int(cast(int, value)) <= LARGEST_BYTES:
        raise ProblemError(field, f"must be a whole number from {least} to 2^53", value)
    return int(cast(int, value))


def finite_number(value: object, field: str, *, positive: bool = False) -> float:
    """`value` as a finite float that is >= 0 (or > 0), refusing booleans and strings."""
    rule = "must be a finite number " + ("> 0" if positive else ">= 0")
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise ProblemError(field, rule, value)
    try:
        number = float(value)
    except OverflowError:
        raise ProblemError(field, rule, value) from None
    if not np.isfinite(number) or number < 0 or (positive and number == 0):
        raise ProblemError(field, rule, value)
    return number


def ragged(rows: Sequence[Sequence[int]], field: str) -> tuple[IntArray, IntArray]:
    """Rows of indices as (start, flat): row i is `flat[start[i]:start[i + 1]]`.

    Raises:
        ProblemError: a row that is not a list, or an entry that is not a whole number.
    """
    if not isinstance(rows, (list, tuple, np.ndarray)):
        raise ProblemError(field, "must be a list of lists of operator indices", rows)
    if not all(issubclass(kind, (list, tuple, np.ndarray)) for kind in set(map(type, rows))):
        odd = next(row for row in rows if not isinstance(row, (list, tuple, np.ndarray)))
        raise ProblemError(field, "must be lists of operator indices", odd)
    lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    start = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
    flat = list(chain.from_iterable(rows))
    _refuse_other_kinds(flat, field, "iu", "must hold whole numbers")
    return cast(IntArray, freeze(start)), int_table(flat, field, 1)
