"""What the command line shows: tables for people, JSON for programs, a progress line.

Names come from files that others wrote, so nothing is taken for markup and control
characters are shown escaped.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from qsync_opt.plan import PrecisionPlan, bits_text

if TYPE_CHECKING:
    from qsync_opt.optimize.comparison import Comparison, ComparisonRow, ParetoCurve
    from qsync_opt.optimize.evaluate import Evaluation
    from qsync_opt.optimize.explanation import Explanation
    from qsync_opt.optimize.problem import AllocationProblem
    from qsync_opt.optimize.result import DeviceResult, Progress, SolveResult
    from qsync_opt.runtime.trainer import TrainProgress

#: Where the output is no terminal, tables take the width they need up to this.
_PIPE_WIDTH = 200
_LARGEST_LIST = 10
_NOTHING = "-"


def counted(count: int, noun: str) -> str:
    """`1 bucket`, `2 buckets`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def one_line(text: str) -> str:
    """`text` on one line, with control characters escaped."""
    words = " ".join(text.split())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in words)


@contextmanager
def foreign_code() -> Iterator[None]:
    """What code of others prints goes to standard error: standard output is for the result."""
    with redirect_stdout(sys.stderr or open(os.devnull, "w")):  # noqa: SIM115
        yield


def to_json(value: object) -> object:
    """Results as plain JSON values: infinities and NaN become null, a status its name."""
    if isinstance(value, PrecisionPlan):
        rows = {"problem": value.problem, "devices": to_json(value.devices)}
        return rows | ({"communication": list(value.communication)} if value.communication else {})
    if is_dataclass(value) and not isinstance(value, type):
        shown = {field.name: getattr(value, field.name) for field in fields(value)}
        return {name: to_json(part) for name, part in shown.items() if not callable(part)}
    if isinstance(value, Enum):
        # A str enum whose values are sentences for people is known to programs by its names.
        return value.value if value.value.isidentifier() else value.name.lower()
    if isinstance(value, Mapping):
        return {str(to_json(key)): to_json(part) for key, part in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [to_json(part) for part in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return str(value)


def comparison_to_json(comparison: Comparison) -> dict[str, object]:
    """A comparison without its plans, which `solve` gives; their bits are kept."""
    return {
        "problem": comparison.problem,
        "deadline_s": comparison.deadline_s,
        "bound": to_json(comparison.bound),
        "rows": [_row_to_json(row) for row in comparison.rows],
    }


def pareto_to_json(curve: ParetoCurve) -> dict[str, object]:
    """A Pareto curve without its plans."""
    points = [
        {"slack": point.slack, **comparison_to_json(point.comparison)} for point in curve.points
    ]
    return {
        "problem": curve.problem,
        "fastest_time_s": curve.fastest_time_s,
        "points": points,
    }


def _row_to_json(row: ComparisonRow) -> dict[str, object]:
    left_out = ("plan", "evaluation")
    values = {f.name: to_json(getattr(row, f.name)) for f in fields(row) if f.name not in left_out}
    if row.plan is not None and row.plan.communication:
        values["communication"] = to_json(row.plan.communication)
    return values


def write_json(value: object) -> None:
    """One JSON object and a newline on standard output."""
    sys.stdout.write(json.dumps(to_json(value), allow_nan=False) + "\n")


@contextmanager
def solving() -> Iterator[Callable[[Progress], None] | None]:
    """Around every solve: gives a progress callback, and keeps standard output for the result."""
    with output_dropped(), status_line() as progress:
        yield progress


@contextmanager
def output_dropped() -> Iterator[None]:
    """Drop what is written to descriptor 1, by C code and by processes that are started inside.

    HiGHS prints lines that no option turns off.
    """
    sys.stdout.flush()
    try:
        kept = os.dup(1)
    except OSError:  # closed by the caller: there is nothing to keep clean
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        _flush_c_streams()
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def _flush_c_streams() -> None:
    """Write out what C has buffered, or it would come out with the result after all."""
    import ctypes

    # Where the C library cannot be reached by this call (Windows), its lines may come late.
    with suppress(OSError, TypeError, AttributeError):
        ctypes.CDLL(None).fflush(None)


@contextmanager
def status_line() -> Iterator[Callable[[Progress], None] | None]:
    """A progress callback that keeps one line on standard error; None without a terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status("") as status:

        def report(progress: Progress) -> None:
            parts = [progress.device, progress.phase]
            if progress.objective is not None:
                parts.append(f"objective {progress.objective:.6g}")
            if progress.bound is not None:
                parts.append(f"bound {progress.bound:.6g}")
            parts.append(f"{progress.elapsed_s:.1f} s")
            status.update(Text(one_line("  ".join(filter(None, parts)))))

        yield report


@contextmanager
def counting(what: str) -> Iterator[Callable[[int, int], None] | None]:
    """A callback (done, all) that keeps one line on standard error; None without a terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status("") as status:

        def report(done: int, total: int) -> None:
            status.update(Text(f"{what}  {done} of {total}"))

        yield report


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """One line on standard error that moves while something is done; none without a terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import Progress as Bars
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        bars.add_task(one_line(what), total=None)
        yield


@contextmanager
def training() -> Iterator[Callable[[TrainProgress], None] | None]:
    """A callback that keeps a bar of steps on standard error; None without a terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress as Bars

    with Bars(console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("", total=None)

        def report(progress: TrainProgress) -> None:
            row = progress.metrics
            waiting = percent(row.wait_s / row.step_s if row.step_s else None)
            text = f"loss {row.loss:.4g}  {seconds(row.step_s)} a step, {waiting} waiting"
            bars.update(task, description=text, total=progress.steps, completed=row.step + 1)

        yield report


def is_terminal() -> bool:
    """Whether a person reads standard output as it comes."""
    return sys.stdout.isatty()


def write(*parts: object) -> None:
    """Text and tables on standard output."""
    from rich.console import Console
    from rich.text import Text

    class OneThatTells(Console):
        """Rich's own ends the process with code 1, which says that there is no plan."""

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    options: dict[str, Any] = {"highlight": False, "emoji": False, "markup": False}
    console = OneThatTells(file=sys.stdout, width=width, **options)
    for part in parts:
        text = isinstance(part, str)
        console.print(Text(part) if isinstance(part, str) else part, soft_wrap=text)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> object:
    """A table whose first `left` columns are text and whose other columns are aligned right."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    result = Table(box=box.SIMPLE_HEAD)
    for index, column in enumerate(columns):
        result.add_column(
            Text(column), justify="left" if index < left else "right", overflow="fold"
        )
    for row in rows:
        result.add_row(*(Text(one_line(cell)) for cell in row))
    return result


# --- quantities -------------------------------------------------------------------------


def number(value: float | None) -> str:
    """Six digits, or a dash."""
    return _NOTHING if value is None else f"{value:.6g}"


def seconds(value: float | None) -> str:
    """Seconds in the unit that suits a step."""
    if value is None:
        return _NOTHING
    if value >= 1:
        return f"{value:.4g} s"
    return f"{value * 1e3:.4g} ms" if value >= 1e-3 or value == 0 else f"{value * 1e6:.4g} us"


def size(value: int | None) -> str:
    """Bytes in the binary unit that suits them."""
    if value is None:
        return _NOTHING
    amount = float(value)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(amount) < 1024:
            return f"{amount:.4g} {unit}"
        amount /= 1024
    return f"{amount:.4g} TiB"


def percent(value: float | None) -> str:
    """A fraction in percent; three digits."""
    return _NOTHING if value is None else f"{value * 100:.3g} %"


def status_name(name: str) -> str:
    """`TIME_LIMIT` as `time limit`."""
    return name.lower().replace("_", " ")


# --- results ----------------------------------------------------------------------------


def render_result(problem: AllocationProblem, result: SolveResult) -> list[object]:
    """A solve: why it stopped, the objective and its bound, one row per device kind."""
    lines = [
        f"{one_line(problem.name)}, method {result.method}: {result.status.value}",
        f"objective {number(result.objective)}, bound {number(result.bound)},"
        f" gap {percent(result.gap)}, solved in {seconds(result.solve_s)}",
    ]
    if result.evaluation is not None:
        lines.append(
            f"iteration time {seconds(result.evaluation.iteration_time_s)}"
            f" of {seconds(result.deadline_s)} allowed"
        )
    if result.replayed is not None:
        replayed = result.replayed
        lines.append(
            f"replayed {seconds(replayed.iteration_time_s)}: the sum alone is off by"
            f" {percent(replayed.additive_error)}; {replayed.cuts} cuts"
        )
    if result.fallback_reason:
        lines.append(f"fallback: {one_line(result.fallback_reason)}")
    lines += [f"note: {one_line(note)}" for note in result.notes]
    if result.plan is None:
        lines.append("no plan; `qsync-opt explain` says which budget is too small")
    parts: list[object] = ["\n".join(lines)]
    if result.plan is not None and result.evaluation is not None:
        parts.append(_device_table(problem, result.plan, result.evaluation, result.devices))
    return parts


def render_evaluation(
    problem: AllocationProblem, plan: PrecisionPlan, evaluation: Evaluation
) -> list[object]:
    """An evaluation: the totals, one row per device kind, and every rule broken."""
    deadline = evaluation.deadline_s
    pace = "no deadline given" if deadline is None else f"{seconds(deadline)} allowed"
    lines = [
        f"{one_line(problem.name)}: {'feasible' if evaluation.feasible else 'infeasible'}",
        f"iteration time {seconds(evaluation.iteration_time_s)} ({pace}),"
        f" perturbation {number(evaluation.perturbation)}",
    ]
    if plan.communication:
        lines.append(
            f"gradients in {bits_text(plan.communication)},"
            f" which adds {number(evaluation.communication_perturbation)} of it"
        )
    broken = evaluation.violations
    lines += [f"broken: {one_line(str(violation))}" for violation in broken[:_LARGEST_LIST]]
    if len(broken) > _LARGEST_LIST:
        lines.append(f"and {len(broken) - _LARGEST_LIST} more")
    return ["\n".join(lines), _device_table(problem, plan, evaluation, {})]


def _device_table(
    problem: AllocationProblem,
    plan: PrecisionPlan,
    evaluation: Evaluation,
    results: Mapping[str, DeviceResult],
) -> object:
    rows = []
    for device in problem.devices:
        part = evaluation.devices[device.name]
        counts = plan.counts(device.name)
        result = results.get(device.name)
        rows.append(
            [
                device.name,
                ", ".join(f"{p.value} {counts[p]}" for p in problem.precisions if p in counts),
                number(part.perturbation),
                percent(result.gap) if result else _NOTHING,
                seconds(part.iteration_time_s),
                size(part.peak_memory_bytes),
                size(device.memory_bytes),
            ]
        )
    columns = ["device kind", "operators", "perturbation", "gap", "time", "peak memory", "of"]
    return table(columns, rows, left=2)


def render_comparison(comparison: Comparison) -> list[object]:
    """One row per method, and under the table what went wrong."""
    title = f"{one_line(comparison.problem)}: methods held to {seconds(comparison.deadline_s)}"
    columns = ["method", "status", "objective", "bound", "gap", "times best"]
    columns += ["iteration time", "peak memory", "solved in"]
    rows = [
        [
            row.method,
            status_name(row.status.name),
            number(row.objective),
            number(row.bound),
            percent(row.gap),
            _NOTHING if row.ratio is None else f"{row.ratio:.4g}",
            seconds(row.iteration_time_s),
            size(row.peak_memory_bytes),
            seconds(row.solve_s),
        ]
        for row in comparison.rows
    ]
    if any(row.plan is not None and row.plan.communication for row in comparison.rows):
        columns.append("gradients")
        for row, cells in zip(comparison.rows, rows, strict=True):
            cells.append(_NOTHING if row.plan is None else bits_text(row.plan.communication))
    reasons = [f"{row.method}: {one_line(row.reason)}" for row in comparison.rows if row.reason]
    parts: list[object] = [title, table(columns, rows, left=2)]
    return [*parts, "\n".join(reasons)] if reasons else parts


def render_pareto(curve: ParetoCurve) -> list[object]:
    """One row per slack, one column of objectives per method."""
    if not curve.points:
        return [f"{one_line(curve.problem)}: no points"]
    methods = [row.method for row in curve.points[0].comparison.rows]
    rows = [
        [
            percent(point.slack),
            seconds(point.deadline_s),
            *(number(row.objective) for row in point.comparison.rows),
        ]
        for point in curve.points
    ]
    title = (
        f"{one_line(curve.problem)}: objective by method and slack, relative to the fastest"
        f" feasible time {seconds(curve.fastest_time_s)}"
    )
    return [title, table(["slack", "deadline", *methods], rows, left=0)]


def render_explanation(explanation: Explanation) -> list[object]:
    """The explanation in its own words."""
    return ["\n".join(one_line(line) for line in explanation.text.splitlines())]
