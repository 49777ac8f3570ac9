"""The rules of one device kind: its tables, tensors, saved tensors, followers and pins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from qsync_opt.errors import ProblemError
from qsync_opt.optimize.arrays import IntArray, ragged
from qsync_opt.precision import HANDED_ON, PROMOTED

if TYPE_CHECKING:
    from qsync_opt.optimize.problem import AllocationProblem, DeviceKind

#: A total beyond this is refused: bytes are summed in 64-bit integers and 2^62 leaves room.
_LARGEST_TOTAL_BYTES = 2**62


def validate_device(problem: AllocationProblem, device: DeviceKind) -> None:
    """Check every rule of a device kind.

    Args:
        problem: what the kind is part of; its operators and precisions have been checked.
        device: the kind.

    Raises:
        ProblemError: the first rule broken.
    """
    where = f"devices.{device.name}"
    if device.batch_share > 1.0:
        rule = "must be a fraction of the global batch, at most 1"
        raise ProblemError(f"{where}.batch_share", rule, device.batch_share)
    _validate_tables(problem, device, where)
    _validate_tensors(problem, device, where)
    _validate_saved(problem, device, where)
    _validate_available(problem, device, where)
    _validate_followers(problem, device, where)
    _validate_pins(problem, device, where)
    _validate_totals(problem, device, where)


def _first(odd: npt.NDArray[np.bool_] | np.bool_) -> tuple[int, ...] | None:
    """The index of the first true entry, None without one."""
    return tuple(map(int, np.unravel_index(odd.argmax(), odd.shape))) if odd.any() else None


def _refused(table: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Where a table is negative, infinite or NaN (which no comparison holds for)."""
    return ~((table >= 0) & (table < np.inf))


def _validate_tables(problem: AllocationProblem, device: DeviceKind, where: str) -> None:
    shape = (len(problem.operators), len(problem.precisions))
    tables = ("available", "forward_s", "backward_s", "perturbation")
    for name in (*tables, "forward_transient_bytes", "backward_transient_bytes"):
        table = getattr(device, name)
        if table.shape != shape:
            rule = f"must have shape {list(shape)} (operators x precisions)"
            raise ProblemError(f"{where}.{name}", rule, list(table.shape))
        if (odd := _first(_refused(table))) is not None:
            row, column = odd
            raise ProblemError(
                f"{where}.{name}[{row}][{column}]",
                f"must be finite and >= 0 (operator {problem.operators[row].name!r}"
                f" at {problem.precisions[column]})",
                table[row, column].item(),
            )


def _validate_members(
    start: IntArray, flat: IntArray, operators: int, where: str, name: str
) -> None:
    """Check rows of operator indices, given as offsets and one flat array."""
    for array in (start, flat):
        if array.dtype != np.int64 or array.ndim != 1:
            rule = "must be one-dimensional arrays of int64 (from_rows makes them)"
            raise ProblemError(f"{where}[*].{name}", rule, f"{array.ndim} x {array.dtype}")
    lengths = np.diff(start)
    if not len(start) or start[0] != 0 or start[-1] != len(flat) or (lengths < 0).any():
        rule = f"must have offsets that rise from 0 to {len(flat)}"
        raise ProblemError(f"{where}[*].{name}", rule, start.tolist()[:8])
    if (odd := _first(lengths == 0)) is not None:
        raise ProblemError(f"{where}[{odd[0]}].{name}", "must name at least one operator", [])
    owner = np.repeat(np.arange(len(lengths)), lengths)
    if (odd := _first((flat < 0) | (flat >= operators))) is not None:
        rule = f"must be operator indices from 0 to {operators - 1}"
        raise ProblemError(f"{where}[{owner[odd[0]]}].{name}", rule, int(flat[odd[0]]))
    keys = np.sort(owner * operators + flat)
    if (odd := _first(np.diff(keys) == 0)) is not None:
        row, index = divmod(int(keys[odd[0]]), operators)
        raise ProblemError(f"{where}[{row}].{name}", "must not name an operator twice", index)


def _validate_tensors(problem: AllocationProblem, device: DeviceKind, where: str) -> None:
    tensors, where = device.tensors, f"{where}.tensors"
    count, columns, operators = len(tensors), len(problem.precisions), len(problem.operators)
    producer = tensors.producer
    if producer.dtype != np.int64 or len(tensors.consumer_start) != count + 1:
        rule = f"must have one producer (int64) and one list of consumers per tensor ({count})"
        raise ProblemError(f"{where}[*].consumers", rule, len(tensors.consumer_start) - 1)
    if (odd := _first((producer < 0) | (producer >= operators))) is not None:
        rule = f"must be an operator index from 0 to {operators - 1}"
        raise ProblemError(f"{where}[{odd[0]}].producer", rule, int(producer[odd[0]]))
    _validate_members(tensors.consumer_start, tensors.consumers, operators, where, "consumers")
    owner = np.repeat(np.arange(count), np.diff(tensors.consumer_start))
    if (odd := _first(producer[owner] >= tensors.consumers)) is not None:
        tensor = int(owner[odd[0]])
        raise ProblemError(
            f"{where}[{tensor}].consumers",
            f"must come after the producer (operator {int(producer[tensor])})",
            int(tensors.consumers[odd[0]]),
            "Give operators in forward order, without cycles",
        )
    for name in ("forward_s", "backward_s"):
        table = getattr(tensors, name)
        if table.shape != (count, columns, columns):
            rule = f"must have shape {[count, columns, columns]} (tensors x P x P)"
            raise ProblemError(f"{where}[*].{name}", rule, list(table.shape))
        if (odd := _first(_refused(table))) is not None:
            tensor, row, column = odd
            raise ProblemError(
                f"{where}[{tensor}].{name}[{row}][{column}]",
                "must be finite and >= 0",
                table[odd].item(),
            )


def _validate_saved(problem: AllocationProblem, device: DeviceKind, where: str) -> None:
    saved, where = device.saved, f"{where}.saved"
    _validate_members(saved.saver_start, saved.savers, len(problem.operators), where, "savers")
    count = len(saved)
    if saved.size_bytes.shape != (count, len(saved.dtypes)):
        rule = f"must have shape {[count, len(saved.dtypes)]} (tensors x dtypes)"
        raise ProblemError(f"{where}[*].bytes", rule, list(saved.size_bytes.shape))
    if len(set(saved.dtypes)) != len(saved.dtypes):
        names = [dtype.value for dtype in saved.dtypes]
        raise ProblemError(f"{where}[*].bytes", "must give every dtype once", names)
    if (odd := _first(saved.size_bytes < -1)) is not None:
        field = f"{where}[{odd[0]}].bytes.{saved.dtypes[odd[1]]}"
        raise ProblemError(field, "must be >= 0", int(saved.size_bytes[odd]))
    given = saved.size_bytes >= 0
    column_of = {dtype: column for column, dtype in enumerate(saved.dtypes)}
    for dtype, column in column_of.items():
        if dtype not in problem.storage and given[:, column].any():
            known = ", ".join(dict.fromkeys(p.value for p in problem.storage))
            field = f"{where}[{int(given[:, column].argmax())}].bytes"
            raise ProblemError(
                field, f"must have only storage dtypes as keys ({known})", dtype.value
            )
    owner = np.repeat(np.arange(count), np.diff(saved.saver_start))
    for position, storage in enumerate(problem.storage):
        asks = device.available[saved.savers, position]
        if storage in column_of:
            asks = asks & ~given[owner, column_of[storage]]
        if (odd := _first(asks)) is not None:
            saver = problem.operators[int(saved.savers[odd[0]])].name
            raise ProblemError(
                f"{where}[{int(owner[odd[0]])}].bytes",
                f"must give the bytes in {storage}, which saver {saver!r} can ask for",
                None,
            )


def _validate_available(problem: AllocationProblem, device: DeviceKind, where: str) -> None:
    if (odd := _first(~device.available.any(axis=1))) is not None:
        name = problem.operators[odd[0]].name
        raise ProblemError(
            f"{where}.forward_s[{odd[0]}]",
            f"must leave operator {name!r} at least one precision",
            [None] * len(problem.precisions),
            "Measure it in fp32, or remove the operator",
        )


def _validate_followers(problem: AllocationProblem, device: DeviceKind, where: str) -> None:
    """A follower has every dtype that its inputs can hand on, and fp32 where they can differ."""
    rows = [index for index, operator in enumerate(problem.operators) if operator.follows]
    if not rows:
        return
    start, inputs = ragged([problem.operators[row].follows for row in rows], "follows")
    # Sets of dtypes as bits: what each operator can hand on, and what it can run at.
    bit = {dtype: 1 << index for index, dtype in enumerate(HANDED_ON)}
    output_bits = np.array([bit[dtype] for dtype in problem.output])
    own_bits = np.array([bit.get(precision, 0) for precision in problem.precisions])
    handed = np.bitwise_or.reduce(device.available * output_bits, axis=1)[inputs]
    common = np.bitwise_and.reduceat(handed, start[:-1])
    united = np.bitwise_or.reduceat(handed, start[:-1])
    can_differ = (np.diff(start) > 1) & ((united & (united - 1)) != 0)
    asked = common | np.where(can_differ, bit[PROMOTED], 0)
    missing = asked & ~np.bitwise_or.reduce(device.available[rows] * own_bits, axis=1)
    if (odd := _first(missing > 0)) is not None:
        row = rows[odd[0]]
        dtype = next(dtype for dtype in HANDED_ON if bit[dtype] & missing[odd])
        raise ProblemError(
            f"{where}.forward_s[{row}]",
            f"must give follower {problem.operators[row].name!r} a cost at {dtype},"
            " which its inputs can hand on",
            None,
            f"Measure it at {dtype}",
        )


def _validate_pins(problem: AllocationProblem, device: DeviceKind, where: str) -> None:
    for name, precision in device.pins.items():
        if name not in problem.operator_index:
            raise ProblemError(f"{where}.pins", "must name operators of the problem", name)
        if precision not in problem.precisions:
            known = ", ".join(p.value for p in problem.precisions)
            raise ProblemError(f"{where}.pins.{name}", f"must be one of {known}", precision.value)
        row, column = problem.operator_index[name], problem.precisions.index(precision)
        if not device.available[row, column]:
            raise ProblemError(
                f"{where}.pins.{name}",
                "must be a precision that the operator has on this kind",
                precision.value,
            )


def _validate_totals(problem: AllocationProblem, device: DeviceKind, where: str) -> None:
    """Sums over a whole plan stay within a 64-bit integer or a double, whatever the plan."""
    saved, forward, backward = (
        device.saved,
        device.forward_transient_bytes,
        device.backward_transient_bytes,
    )
    total_bytes = float(np.maximum(saved.size_bytes, 0).sum(dtype=np.float64))
    # One operator runs at a time, in its forward or its backward: the largest entry counts.
    total_bytes += float(max(table.max(initial=0) for table in (forward, backward)))  # type: ignore[union-attr]
    if total_bytes + device.fixed_bytes > _LARGEST_TOTAL_BYTES:
        rule = "must sum to less than 2^62, with fixed_bytes and the largest transient"
        raise ProblemError(f"{where}.saved[*].bytes", rule, total_bytes + device.fixed_bytes)
    tensors = device.tensors
    with np.errstate(over="ignore"):
        times = [table.max(axis=1).sum() for table in (device.forward_s, device.backward_s)]
        times += [tensors.forward_s.sum(), tensors.backward_s.sum(), device.optimizer_s]
        times += [max(c.all_reduce_s for c in bucket.choices) for bucket in problem.buckets]
        totals = {
            "forward_s": np.array(times, dtype=np.float64).sum(),
            "perturbation": device.perturbation.max(axis=1).sum(),
        }
    for name, total in totals.items():
        if not np.isfinite(total):
            what = "with all other times" if name == "forward_s" else "over the operators"
            rule = f"must sum to a number that a double can hold (below 1.8e308), {what}"
            raise ProblemError(f"{where}.{name}", rule, float(total))
