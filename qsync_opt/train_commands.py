"""`qsync-opt train`: one rank of a training job, or all ranks of it on this machine."""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qsync_opt.commands import EXIT_INTERRUPTED, EXIT_PLAN
from qsync_opt.errors import ParameterError
from qsync_opt.precision import Precision

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence

    from qsync_opt.runtime.parameters import TrainParameters
    from qsync_opt.runtime.trainer import TrainProgress, TrainResult


def run_train(arguments: argparse.Namespace) -> int:
    """Train a model file with the precisions of a plan."""
    from qsync_opt.model_commands import require_torch

    require_torch()
    if arguments.ranks is not None:
        return _launch(arguments)
    from qsync_opt import console
    from qsync_opt.files import load_graph, load_plan, load_problem
    from qsync_opt.measure.model_file import load_batches, load_model, parse_sizes
    from qsync_opt.runtime.trainer import TrainStatus, train

    device = _device(arguments.device)
    plan = None if arguments.plan is None else load_plan(arguments.plan)
    problem = None if arguments.problem is None else load_problem(arguments.problem)
    graph = None if arguments.graph is None else load_graph(arguments.graph)
    kind = arguments.kind
    if kind is None:
        if plan is not None and len(plan.devices) > 1:
            rule = "must say which kind this rank is of"
            raise ParameterError("kind", rule, None, f"One of {', '.join(plan.devices)}")
        kind = "device" if plan is None else next(iter(plan.devices))
    # By default the model is built as it was for the graph.
    built = [] if graph is None else [f"{k}={v}" for k, v in graph.provenance.sizes.items()]
    sizes = parse_sizes(arguments.set or built)
    parameters = _parameters(arguments)
    is_first = os.environ.get("RANK", "0") == "0"
    with console.foreign_code(), _progress(is_first) as report:
        model, batch, loss = load_model(arguments.model, sizes)
        result = train(
            model.to(device),
            batch,
            loss,
            parameters=parameters,
            plan=plan,
            kind=kind,
            problem=problem,
            graph=graph,
            batches=load_batches(arguments.model, sizes),
            report=report,
        )
    if is_first:
        if arguments.json:
            console.write_json(_summary(result, arguments.output))
        else:
            console.write(*_lines(result, arguments.output))
    return EXIT_PLAN if result.status is TrainStatus.FINISHED else EXIT_INTERRUPTED


def _launch(arguments: argparse.Namespace) -> int:
    from qsync_opt.runtime.launch import launch, parse_ranks

    if arguments.kind is not None:
        raise ParameterError("kind", "must not be given with --ranks", arguments.kind)
    ranks = parse_ranks(arguments.ranks)
    _parameters(arguments)  # so that a mistake is told once
    folder = None if arguments.output is None else Path(arguments.output)
    return launch(ranks, _without_ranks(arguments.words), folder)


def _without_ranks(words: Sequence[str]) -> list[str]:
    kept, skip = [], False
    for word in words:
        if skip or word.startswith("--ranks="):
            skip = False
        elif word == "--ranks":
            skip = True
        else:
            kept.append(word)
    return kept


def _device(name: str) -> Any:
    import torch

    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ParameterError("device", "must be usable here", "cuda", "There is no CUDA device")
    index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _parameters(arguments: argparse.Namespace) -> TrainParameters:
    from qsync_opt.kernels.rounding import Rounding
    from qsync_opt.runtime.parameters import TrainParameters

    return TrainParameters(
        steps=arguments.steps,
        batch_size=arguments.batch_size,
        accumulation=arguments.accumulation,
        optimizer=arguments.optimizer,
        learning_rate=arguments.learning_rate,
        shares=_shares(arguments.shares),
        seed=arguments.seed,
        rounding=Rounding[arguments.rounding.upper()],
        folder=None if arguments.output is None else Path(arguments.output),
        checkpoint_interval=arguments.checkpoint_interval,
        keep=arguments.keep,
        resume=not arguments.no_resume,
        uniform=_precision("uniform", arguments.uniform),
        autocast=_precision("autocast", arguments.autocast),
        emulate=arguments.emulate,
        timeout_s=arguments.timeout,
    )


def _precision(field: str, text: str | None) -> Precision | None:
    try:
        return None if text is None else Precision(text)
    except ValueError:
        raise ParameterError(field, f"must be one of {', '.join(Precision)}", text) from None


def _shares(text: str | None) -> dict[str, float] | None:
    if text is None:
        return None
    shares = {}
    for word in text.split(","):
        kind, _, number = word.partition("=")
        try:
            shares[kind.strip()] = float(number)
        except ValueError:
            raise ParameterError("shares", "must be KIND=FRACTION,...", text) from None
    return shares


@contextmanager
def _progress(is_shown: bool) -> Iterator[Callable[[TrainProgress], None] | None]:
    from qsync_opt import console

    if not is_shown:
        yield None
        return
    with console.training() as report:
        yield report


def _summary(result: TrainResult, folder: str | None) -> dict[str, object]:
    steady = sorted(row.step_s for row in result.metrics)
    return {
        "status": result.status.name.lower(),
        "first_step": result.first_step,
        "steps": result.steps,
        "loss": result.metrics[-1].loss if result.metrics else None,
        "median_step_s": steady[len(steady) // 2] if steady else None,
        "skipped": sum(row.skipped for row in result.metrics),
        "checkpoint_step": result.checkpoint_step,
        "folder": folder,
    }


def _lines(result: TrainResult, folder: str | None) -> list[str]:
    from qsync_opt import console

    facts = _summary(result, folder)
    lines = [f"{result.status.value}: {result.steps} in all, this run from {result.first_step}"]
    if result.metrics:
        lines.append(
            f"loss of rank 0 {console.number(result.metrics[-1].loss)}, a step takes"
            f" {console.seconds(facts['median_step_s'])}"  # type: ignore[arg-type]
            f" (median), {facts['skipped']} skipped"
        )
    if folder is not None:
        lines.append(f"checkpoints and metrics are in {folder}")
    return lines
