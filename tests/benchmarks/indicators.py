"""Every indicator beside the truth: `python -m tests.benchmarks.indicators`.

The truth is the indicator `measured`. For each model, freshly initialised or trained for some
steps, a row per indicator gives Kendall's tau against it (Kendall, Biometrika 30, 1938; tau-b
as scipy has it) among the operators at each precision, over all entries of the table, the
seconds it took, and for variances of the gradient the ratio to the truth. The row `measured
again` is the truth on other batches: no indicator can be expected to do better. Prints a table
and keeps it in `results/` with the machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.stats import kendalltau
from torch import nn

from qsync_opt.files import write_atomically
from qsync_opt.graph import OperatorGraph
from qsync_opt.measure.capture import capture
from qsync_opt.measure.model_file import further_batches, load_model
from qsync_opt.measure.sensitivity import METHODS, perturbations
from qsync_opt.measure.step import Loss, call_model, loss_of, split_batch
from qsync_opt.precision import Precision
from tests.benchmarks.tables import describe_machine, without_output

RESULTS = Path(__file__).resolve().parent / "results"
MODELS = Path(__file__).resolve().parents[2] / "models"

TRUTH = "measured"
AGAIN = "measured again"
VARIANCES = ("variance", TRUTH, AGAIN)
_OTHER_SEED = 500
_TRAINING_SEED = 1000
LOWERED = tuple(p for p in Precision if p is not Precision.FP32)
_LEARNING_RATE = 1e-3

Table = npt.NDArray[np.float64]
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class IndicatorSpec:
    """One model in one state.

    Attributes:
        model: file in `models/`.
        sizes: arguments of its `build`.
        batches: over which tables are averaged.
        steps: of AdamW before, on batches of their own.
    """

    model: str
    sizes: dict[str, Any] = field(default_factory=dict)
    batches: int = 1
    steps: int = 0

    @property
    def label(self) -> str:
        """What the rows of it are called."""
        return f"{self.model}, {self.steps} steps"


_BERT = {"batch_size": 4, "length": 32, "layers": 2, "heads": 2, "width": 64, "vocabulary": 512}
_GPT = {"batch_size": 8, "length": 32}
_RESNET = {"batch_size": 8, "image_size": 32, "classes": 10, "channels_last": False}
SPECS = (
    IndicatorSpec(model="small_cnn", batches=16),
    IndicatorSpec(model="small_cnn", batches=16, steps=100),
    IndicatorSpec(model="small_gpt", sizes=_GPT, batches=2),
    IndicatorSpec(model="small_gpt", sizes=_GPT, batches=2, steps=100),
    IndicatorSpec(model="bert", sizes=_BERT, batches=2),
    IndicatorSpec(model="resnet50", sizes=_RESNET),
)


def run(spec: IndicatorSpec, methods: Sequence[str] = METHODS) -> list[Row]:
    """A row for every indicator, the truth first."""
    path = MODELS / f"{spec.model}.py"
    model, batch, loss = load_model(path, spec.sizes)
    graph = capture(model, batch, loss, least_coverage=0.0)
    for other in further_batches(path, {**spec.sizes, "seed": _TRAINING_SEED}, spec.steps + 1):
        _train(model, other, loss)
    more = further_batches(path, spec.sizes, spec.batches)

    def fill(method: str, first: Any, others: Sequence[Any], seed: int) -> tuple[Table, float]:
        table = perturbations(
            model,
            first,
            graph,
            precisions=LOWERED,
            method=method,
            batches=others,
            loss=loss,
            seed=seed,
        )
        return table.values[list(graph.adjustable)], table.provenance.elapsed_s

    truth, elapsed_s = fill(TRUTH, batch, more, 0)
    rows = [_row(spec, graph, TRUTH, elapsed_s, truth, truth)]
    fresh = further_batches(path, {**spec.sizes, "seed": _OTHER_SEED}, spec.batches + 1)
    values, elapsed_s = fill(TRUTH, fresh[0], fresh[1:], _OTHER_SEED)
    rows.append(_row(spec, graph, AGAIN, elapsed_s, values, truth))
    for method in methods:
        if method != TRUTH:
            values, elapsed_s = fill(method, batch, more, 0)
            rows.append(_row(spec, graph, method, elapsed_s, values, truth))
    return rows


def _train(model: nn.Module, batch: Any, loss: Loss | None) -> None:
    inputs, target = split_batch(batch, loss)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
    value = loss_of(call_model(model, inputs), target, loss)
    optimizer.zero_grad()
    value.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()


def _row(
    spec: IndicatorSpec,
    graph: OperatorGraph,
    method: str,
    elapsed_s: float,
    values: Table,
    truth: Table,
) -> Row:
    by_precision = {
        str(precision): tau(values[:, column], truth[:, column])
        for column, precision in enumerate(LOWERED)
    }
    known = [value for value in by_precision.values() if value is not None]
    return {
        "case": spec.label,
        "spec": asdict(spec),
        "operators": len(graph.adjustable),
        "method": method,
        "elapsed_s": elapsed_s,
        "tau": by_precision,
        "tau_mean": float(np.mean(known)) if known else None,
        "tau_all": tau(values.ravel(), truth.ravel()),
        "ratio": _ratios(values, truth) if method in VARIANCES else None,
    }


def tau(values: Table, truth: Table) -> float | None:
    """Kendall's tau of the entries that are finite in both; None where one is constant."""
    known = np.isfinite(values) & np.isfinite(truth)
    found = float(kendalltau(values[known], truth[known]).statistic) if known.sum() > 1 else np.nan
    return None if np.isnan(found) else found


def _ratios(values: Table, truth: Table) -> list[float] | None:
    """Tenth, fiftieth and ninetieth percentile of the ratio to the truth."""
    known = np.isfinite(values) & np.isfinite(truth) & (truth > 0)
    if not known.any():
        return None
    return [float(x) for x in np.percentile(values[known] / truth[known], [10, 50, 90])]


def to_markdown(data: dict[str, Any]) -> str:
    """The whole report; `data` is what the JSON file holds."""
    command = f"python -m tests.benchmarks.indicators {data['arguments']}".rstrip()
    lines = ["# Indicators", "", f"Written by `{command}`."]
    lines += ["", *(f"- {name}: {value}" for name, value in data["machine"].items()), ""]
    lines += [
        "Kendall's tau against `measured`: among the operators at each precision, its mean over"
        " the precisions, and over all entries. Ratio: an entry to its measured one, 10th, 50th"
        " and 90th percentile.",
    ]
    names = [str(precision) for precision in LOWERED]
    case = None
    for row in data["rows"]:
        if row["case"] != case:
            case = row["case"]
            sizes = ", ".join(f"{k}={v}" for k, v in row["spec"]["sizes"].items()) or "default"
            lines += [
                "",
                f"## {case}",
                "",
                f"{row['operators']} adjustable operators, {row['spec']['batches']} batches,"
                f" sizes {sizes}.",
                "",
                f"| indicator | {' | '.join(names)} | mean | all | ratio | seconds |",
                f"|---|{'--:|' * (len(names) + 4)}",
            ]
        shown = [_number(row["tau"][name]) for name in names]
        shown += [_number(row["tau_mean"]), _number(row["tau_all"])]
        ratio = row["ratio"]
        shown.append("-" if ratio is None else " / ".join(f"{x:.2f}" for x in ratio))
        lines.append(f"| {row['method']} | {' | '.join(shown)} | {row['elapsed_s']:.2f} |")
    return "\n".join(lines) + "\n"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.indicators", description=__doc__.splitlines()[0]
    )
    known = sorted({spec.model for spec in SPECS})
    parser.add_argument("--models", nargs="*", choices=known, default=known)
    parser.add_argument("--name", default="indicators", help="of the files")
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="FOLDER")
    options = parser.parse_args(words)
    return keep_all(
        [spec for spec in SPECS if spec.model in options.models],
        options.output / options.name,
        " ".join(without_output(words)),
        sys.stdout.write,
    )


def keep_all(
    specs: Sequence[IndicatorSpec],
    target: Path,
    arguments: str,
    show: Callable[[str], object],
) -> int:
    """Run specs one after the other; what is measured is stored after each."""
    data: dict[str, Any] = {
        "format": "qsync-opt/indicator-benchmark",
        "version": 1,
        "arguments": arguments,
        "machine": {**describe_machine(), "torch": str(torch.__version__)},
        "rows": [],
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    for spec in specs:
        data["rows"] += run(spec)
        text = json.dumps(data, indent=1, allow_nan=False) + "\n"
        write_atomically(target.with_suffix(".json"), text.encode())
        write_atomically(target.with_suffix(".md"), to_markdown(data).encode())
    show(to_markdown(data))
    return 0


if __name__ == "__main__":
    sys.exit(main())
