"""`perturbations`: what each operator of a model at each precision adds, by an indicator.

    variance            what rounding adds to the variance of the gradient, predicted
                        (`variance`); the default
    variance_published  QSync's own formula (`indicators.published_variance`)
    measured            the same quantity, measured operator by operator (`ground_truth`):
                        what the others are judged by
    hessian             trace of the Hessian x squared weight error (`indicators.hessian`)
    loss                first-order error of the loss (`indicators.loss_error`)
    divergence          of loss and weights (`indicators.divergence`)
    random              a random order (`indicators.random_table`)

Only `variance` and `measured` are variances of the gradient, in whose sum over device kinds the
objective of an allocation problem has a meaning. All but `hessian`, `divergence`, `random` and
`variance_published` grow with the square of the loss.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import numpy as np
import torch
from torch import nn

from qsync_opt import __version__
from qsync_opt.errors import ParameterError
from qsync_opt.graph import OperatorGraph
from qsync_opt.kernels.rounding import Rounding
from qsync_opt.measure import indicators
from qsync_opt.measure.capture import device_of, left_as_found
from qsync_opt.measure.gradients import gradient_ranges
from qsync_opt.measure.ground_truth import Report, measured_variance
from qsync_opt.measure.moments import observe
from qsync_opt.measure.step import Loss
from qsync_opt.measure.variance import added_variance
from qsync_opt.optimize.arrays import FloatArray
from qsync_opt.perturbation import PerturbationProvenance, PerturbationTable
from qsync_opt.precision import Precision


@dataclass(frozen=True, kw_only=True)
class _Indicator:
    """An indicator that one observed step is enough for.

    Attributes:
        fill: makes the table of one batch.
        draws: probe vectors by default; 0 where none are needed.
        replays: whether followers and kinks are needed.
    """

    fill: Callable[..., FloatArray]
    draws: int = 0
    replays: bool = False


_OBSERVED = {
    "variance": _Indicator(fill=added_variance, draws=2, replays=True),
    "variance_published": _Indicator(fill=indicators.published_variance),
    "hessian": _Indicator(fill=indicators.hessian, draws=8),
    "loss": _Indicator(fill=indicators.loss_error),
    "divergence": _Indicator(fill=indicators.divergence),
}
_STOCHASTIC_DRAWS = 4

#: Every indicator, the default first.
METHODS = (
    "variance",
    "variance_published",
    "measured",
    "hessian",
    "loss",
    "divergence",
    "random",
)


def perturbations(
    model: nn.Module,
    batch: Any,
    graph: OperatorGraph,
    *,
    precisions: Sequence[Precision] = tuple(Precision),
    method: str = "variance",
    batches: Sequence[Any] = (),
    loss: Loss | None = None,
    draws: int | None = None,
    rounding: Rounding = Rounding.NEAREST,
    seed: int = 0,
    source: str | None = None,
    sizes: dict[str, object] | None = None,
    gradients: bool = False,
    report: Report | None = None,
) -> PerturbationTable:
    """Fill the table of perturbations of a model.

    The model, its gradients, its buffers and the random number generators are left as they
    were.

    Args:
        model: that the graph was captured from, in the mode it is trained in.
        batch: as in `capture`; a smaller one than the graph's will do where memory is short,
            and its gradient is then noisier.
        graph: of the model.
        precisions: columns of the table.
        method: one of `METHODS`.
        batches: further batches; the table is the mean over all.
        loss: as in `capture`.
        draws: probe vectors (`variance`: 2, `hessian`: 8), or draws of stochastic rounding
            (`measured`: 4); None for these numbers.
        rounding: of what the layers quantise to 8 bits.
        seed: of the model's random numbers and of everything drawn here.
        source: the model file, for the provenance.
        sizes: what the model was built with, for the provenance.
        gradients: gather too what sending gradients at fewer bits would lose: one more step a
            batch, see `gradients.gradient_ranges`.
        report: told how much is done, as (done, all).

    Returns:
        The table; followers, fixed operators and fp32 have 0.

    Raises:
        ParameterError: an unknown method, no precision, or no draw.
        CaptureError: the step fails, is not the one that was captured, or is not finite.
    """
    if method not in METHODS:
        raise ParameterError("method", f"must be one of {', '.join(METHODS)}", method)
    columns = tuple(Precision(precision) for precision in precisions)
    if not columns or len(set(columns)) != len(columns):
        raise ParameterError("precisions", "must be at least one, each once", list(precisions))
    if draws is not None and draws < 1:
        raise ParameterError("draws", "must be at least 1", draws)
    start = time.perf_counter()
    device = device_of(model, batch)
    _require_same_parameters(model, graph)
    number = _draws(method, draws, rounding)
    every = [batch, *batches]
    if method == "random":
        mean = indicators.random_table(graph, columns, seed)
    else:
        tables = []
        with left_as_found(model, device):
            for index, one in enumerate(every):
                told = _part(report, index, len(every))
                if method == "measured":
                    table = measured_variance(
                        model,
                        one,
                        graph,
                        columns,
                        loss=loss,
                        draws=number,
                        rounding=rounding,
                        seed=seed + index,
                        report=told,
                    )
                else:
                    indicator = _OBSERVED[method]
                    observation = observe(
                        model,
                        one,
                        graph,
                        loss=loss,
                        probes=number if indicator.draws else 0,
                        replays=indicator.replays,
                        seed=seed + index,
                    )
                    with torch.no_grad():
                        table = indicator.fill(observation, graph, columns, rounding)
                    del observation  # two of them would not fit where one just does
                    if told is not None:
                        told(1, 1)
                tables.append(table)
        mean = np.mean(tables, axis=0)
    ranges = None
    if gradients:
        with left_as_found(model, device):
            ranges = gradient_ranges(model, every, graph, loss=loss, seed=seed)
    return PerturbationTable(
        graph=graph.sha256,
        operators=tuple(operator.name for operator in graph.operators),
        precisions=columns,
        values=mean,
        method=method,
        provenance=PerturbationProvenance(
            model=source or f"{type(model).__module__}.{type(model).__qualname__}",
            sizes={key: str(value) for key, value in (sizes or {}).items()},
            batches=len(every),
            draws=number,
            rounding=rounding.name.lower(),
            seed=seed,
            elapsed_s=time.perf_counter() - start,
            device=_name(device),
            versions={
                "python": platform.python_version(),
                "qsync_opt": __version__,
                "torch": str(torch.__version__),
            },
            date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        ),
        gradients=ranges,
    )


def _require_same_parameters(model: nn.Module, graph: OperatorGraph) -> None:
    found = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    expected = {parameter.name: parameter.shape for parameter in graph.parameters}
    if found == expected:
        return
    name = next(name for name in [*found, *expected] if found.get(name) != expected.get(name))
    rule = f"must be {list(expected[name])} as in the graph" if name in expected else "is not known"
    value = list(found[name]) if name in found else None
    remedy = "Give the model that the graph was captured from, of the same sizes"
    raise ParameterError(f"parameter {name}", rule, value, remedy)


def _draws(method: str, draws: int | None, rounding: Rounding) -> int:
    if method == "measured":
        if rounding is Rounding.NEAREST:
            return 1  # nothing is drawn
        return draws or _STOCHASTIC_DRAWS
    default = _OBSERVED[method].draws if method in _OBSERVED else 0
    return (draws or default) if default else 1


def _part(report: Report | None, index: int, count: int) -> Report | None:
    if report is None:
        return None
    return lambda done, total: report(index * total + done, count * total)


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.machine()
