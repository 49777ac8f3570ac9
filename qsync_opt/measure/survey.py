"""The operators of a graph, measured one by one: what cannot run, and what was disturbed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from qsync_opt.costs import AS_DTYPE, LARGEST_SPREAD, OperatorCosts, Unavailable
from qsync_opt.errors import MeasureError, QsyncError
from qsync_opt.graph import OperatorGraph, Role
from qsync_opt.measure.clock import Clock
from qsync_opt.measure.notebook import Notebook, Refusal
from qsync_opt.measure.operators import OperatorMeasurement, OperatorMeter
from qsync_opt.precision import HANDED_ON, Precision
from qsync_opt.runtime.availability import supported_precisions

_WORST_SHOWN = 3

#: Spreads of what takes less than this share of the whole do not matter.
_NEGLIGIBLE = 0.005


class OperatorSurvey:
    """Measures every signature of a graph at every precision; equal ones once.

    Args:
        graph: the graph.
        clock: of the device.
        precisions: columns.
        dtypes: what tensors are handed on in on this device.
        notebook: what is known already, and who keeps it.
        tell: called before each thing that is measured.

    Attributes:
        unavailable: what could not run, and why; filled by `run`.
        warnings: what stayed disturbed; filled by `run`.
    """

    def __init__(
        self,
        graph: OperatorGraph,
        clock: Clock,
        precisions: tuple[Precision, ...],
        dtypes: tuple[Precision, ...],
        notebook: Notebook,
        tell: Callable[[str], None],
    ) -> None:
        self._graph, self._clock, self._notebook, self._tell = graph, clock, notebook, tell
        self._precisions, self._dtypes = precisions, dtypes
        self.unavailable: list[Unavailable] = []
        self.warnings: list[str] = []
        self._entries = self._operator_entries()

    def __len__(self) -> int:
        return len(self._entries)

    def _operator_entries(self) -> dict[tuple[int, Precision], int]:
        """What is measured: (signature, precision) -> an operator of that signature."""
        entries: dict[tuple[int, Precision], int] = {}
        for index, row in enumerate(self._graph.operators):
            for precision in self._precisions:
                if row.role is Role.FIXED and precision is not Precision.FP32:
                    continue
                if row.role is Role.FOLLOWER and precision not in self._dtypes:
                    continue
                entries.setdefault((row.signature, precision), index)
        return entries

    def run(self) -> OperatorCosts:
        """Measure what the notebook does not know.

        Raises:
            MeasureError: an operator that cannot be run even in fp32.
        """
        meter = OperatorMeter(self._graph, self._clock, self._dtypes)
        found: dict[tuple[int, Precision], OperatorMeasurement] = {}
        for (signature, precision), operator in self._entries.items():
            row = self._graph.operators[operator]
            self._tell(f"{row.kind} of {row.name} at {precision}")
            try:
                found[signature, precision] = OperatorMeasurement.from_list(
                    self._notebook.numbers(
                        f"operator {signature} {precision}",
                        lambda o=operator, p=precision: self._take(meter, o, p),  # type: ignore[misc]
                    )
                )
            except Refusal as refusal:
                if precision is Precision.FP32:
                    raise MeasureError(
                        f"{row.kind} of {row.name} cannot be run in fp32: {refusal}",
                        "Register what it uses with torch.library, or capture a smaller batch",
                    ) from None
                self.unavailable.append(
                    Unavailable(signature=signature, precision=precision, reason=str(refusal))
                )
        self._again(meter, found)
        return self._tables(found)

    def _take(self, meter: OperatorMeter, operator: int, precision: Precision) -> list[float]:
        """The numbers of one operator.

        Raises:
            Refusal: it has no form at this precision, ran out of memory, or is refused.
        """
        row = self._graph.operators[operator]
        if row.role is Role.ADJUSTABLE and precision not in supported_precisions(row.kind):
            raise Refusal(f"{row.kind} has no form at {precision}")
        try:
            return meter.measure(operator, precision).to_list()
        except QsyncError as error:
            raise Refusal(str(error)) from None
        except (RuntimeError, TypeError, ValueError, NotImplementedError, AttributeError) as error:
            short = (str(error).strip() or type(error).__name__).splitlines()[0]
            if isinstance(error, torch.OutOfMemoryError) or "not enough memory" in short:
                short = f"out of memory: {short}"
            raise Refusal(short) from None
        finally:
            if self._clock.device.type == "cuda":
                torch.cuda.empty_cache()

    def _again(
        self, meter: OperatorMeter, found: dict[tuple[int, Precision], OperatorMeasurement]
    ) -> None:
        """Measure again, with more time between, what was disturbed; tell what stays disturbed."""
        total = sum(row.forward_s + row.backward_s for row in found.values())
        for key in [key for key, row in found.items() if _is_disturbed(row, total)]:
            operator = self._entries[key]
            with suppress(Refusal):
                numbers = self._take(meter, operator, key[1])
                once_more = OperatorMeasurement.from_list(numbers)
                if _worst(once_more) < _worst(found[key]):
                    found[key] = once_more
                    self._notebook.put(f"operator {key[0]} {key[1]}", numbers)
        disturbed = [key for key, row in found.items() if _is_disturbed(row, total)]
        if disturbed:
            disturbed.sort(key=lambda key: -_worst(found[key]))
            worst = ", ".join(
                f"{self._graph.operators[self._entries[key]].name} at {key[1]}"
                f" {_worst(found[key]):.0%}"
                for key in disturbed[:_WORST_SHOWN]
            )
            self.warnings.append(
                f"{len(disturbed)} of {len(found)} timings spread by more than"
                f" {LARGEST_SPREAD:.0%} ({worst}): the device was busy; measure again alone"
            )

    def _tables(self, found: Mapping[tuple[int, Precision], OperatorMeasurement]) -> OperatorCosts:
        shape = (len(self._graph.signatures), len(self._precisions))
        tables: dict[str, Any] = {}
        for name in OperatorCosts.__dataclass_fields__:
            if name == "input_cast_s":
                tables[name] = np.full((*shape, len(HANDED_ON)), np.nan)
            elif name.endswith("bytes"):
                empty = AS_DTYPE if name == "input_bytes" else 0
                tables[name] = np.full(shape, empty, dtype=np.int64)
            else:
                tables[name] = np.full(shape, np.nan)
        for (signature, precision), row in found.items():
            column = self._precisions.index(precision)
            for name, table in tables.items():
                table[signature, column] = getattr(row, name)
        return OperatorCosts(**tables)


def _worst(row: OperatorMeasurement) -> float:
    return max(row.forward_spread, row.backward_spread)


def _is_disturbed(row: OperatorMeasurement, total_s: float) -> bool:
    return any(
        spread > LARGEST_SPREAD and time_s > _NEGLIGIBLE * total_s
        for time_s, spread in (
            (row.forward_s, row.forward_spread),
            (row.backward_s, row.backward_spread),
        )
    )
