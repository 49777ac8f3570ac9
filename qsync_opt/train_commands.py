"""`qsync-opt train`: one rank of a training job, or all ranks of it on this machine."""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qsync_opt import options
from qsync_opt.commands import EXIT_INTERRUPTED, EXIT_PLAN, check_targets, load_plan_of
from qsync_opt.errors import ParameterError
from qsync_opt.precision import Precision

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence

    from qsync_opt.optimize.problem import AllocationProblem
    from qsync_opt.plan import PrecisionPlan
    from qsync_opt.runtime.parameters import TrainParameters
    from qsync_opt.runtime.trainer import TrainProgress, TrainResult


def add_commands(command: options.AddCommand) -> None:
    """Add `train` to the command line."""
    text = "train a model with a plan; under torchrun as one rank of a job"
    sub = command("train", run_train, text)
    sub.add_argument("model", metavar="MODEL", help="Python file with build()")
    for name, text in (
        ("plan", "plan file; without one the model is trained as it is"),
        ("problem", "problem file of the plan, for its batch shares"),
        ("graph", "graph file that the plan was made for"),
    ):
        sub.add_argument(f"--{name}", metavar=name.upper(), help=text)
    ranks = sub.add_mutually_exclusive_group()
    ranks.add_argument("--kind", metavar="NAME", help="device kind of this rank")
    ranks.add_argument(
        "--ranks",
        metavar="KIND:COUNT[:threads=N][:mps=PERCENT],...",
        help="start all ranks on this machine",
    )
    sub.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="an argument of build()"
    )
    sub.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    sub.add_argument("--steps", type=int, required=True, metavar="N", help="steps in all")
    sub.add_argument(
        "--batch-size", type=int, metavar="N", help="of all ranks; default: build()'s times ranks"
    )
    for name, default, text in (
        ("accumulation", 1, "micro-batches of a step"),
        ("seed", 0, "seed of the random numbers"),
        ("checkpoint-interval", 100, "steps between checkpoints; 0: at the end only"),
        ("keep", 3, "newest checkpoints that are kept"),
    ):
        sub.add_argument(
            f"--{name}", type=int, default=default, metavar="N", help=f"{text}; default: {default}"
        )
    sub.add_argument("--optimizer", default="adamw", help="adamw (default), adam or sgd")
    sub.add_argument(
        "--learning-rate",
        type=options.number,
        default=1e-3,
        metavar="X",
        help="default: %(default)s",
    )
    sub.add_argument(
        "--shares", metavar="KIND=X,...", help="of the batch, for one worker of each kind"
    )
    sub.add_argument(
        "--rounding", choices=("nearest", "stochastic"), default="nearest", help="default: nearest"
    )
    rivals = sub.add_mutually_exclusive_group()
    rivals.add_argument("--uniform", metavar="PRECISION", help="one precision instead of the plan")
    rivals.add_argument("--autocast", metavar="bf16|fp16", help="torch.autocast, no plan")
    sub.add_argument(
        "--batch-sizing",
        action="store_true",
        help="choose shares by measured speed, so that ranks finish together",
    )
    sub.add_argument(
        "--refine-interval",
        type=int,
        default=0,
        metavar="N",
        help="renew the plan every N steps; takes --plan, --problem and --graph; default: never",
    )
    sub.add_argument(
        "--refine-samples",
        type=int,
        default=8,
        metavar="N",
        help="of a rank, most that its indicator is gathered on; default: %(default)s",
    )
    sub.add_argument(
        "--find-unused-parameters",
        action="store_true",
        help="for a model that leaves parameters out of some steps",
    )
    sub.add_argument(
        "--communication",
        metavar="WORD",
        help="what ranks send: gradients in fp32 (default), bf16, fp16, or bits such as g8, g4,"
        " g4e; w8g8 shards the weights and sends them in 8 bits too; not for a plan that has bits"
        " for buckets",
    )
    sub.add_argument(
        "--trace", metavar="FILE", help="write some steps as a Chrome trace (.json or .json.gz)"
    )
    sub.add_argument("--trace-steps", type=int, default=3, metavar="N", help="default: %(default)s")
    sub.add_argument(
        "--emulate", action="store_true", help="run precisions that the device lacks all the same"
    )
    sub.add_argument(
        "--timeout",
        type=options.number,
        default=600.0,
        metavar="S",
        help="how long a rank may keep the others waiting; default: %(default)s",
    )
    sub.add_argument(
        "--output",
        "-o",
        metavar="FOLDER",
        default="train-output",
        help="checkpoints and metrics; what is there is gone on from; default: %(default)s",
    )
    sub.add_argument(
        "--no-resume", action="store_true", help="refuse a folder that holds checkpoints"
    )


def run_train(arguments: argparse.Namespace) -> int:
    """Train a model file with the precisions of a plan."""
    from qsync_opt.model_commands import require_torch

    # The profiler's own log would stand between our lines; read when torch is loaded.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    require_torch()
    if arguments.ranks is not None:
        return _launch(arguments)
    from qsync_opt import console
    from qsync_opt.files import load_graph
    from qsync_opt.measure.model_file import load_batches, load_model, parse_sizes
    from qsync_opt.runtime.trainer import TrainStatus, train

    check_targets(arguments.trace)
    device = _device(arguments.device)
    plan, problem = _plan_and_problem(arguments)
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
    traced_at = _written_at(arguments.trace)
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
            if arguments.trace is not None:
                is_new = _written_at(arguments.trace) != traced_at
                console.write(f"{'wrote' if is_new else 'no step was left for'} {arguments.trace}")
    return EXIT_PLAN if result.status is TrainStatus.FINISHED else EXIT_INTERRUPTED


def _launch(arguments: argparse.Namespace) -> int:
    from qsync_opt.runtime.launch import launch, parse_ranks

    if arguments.kind is not None:
        raise ParameterError("kind", "must not be given with --ranks", arguments.kind)
    ranks = parse_ranks(arguments.ranks)
    _parameters(arguments)  # so that a mistake is told once
    plan, _ = _plan_and_problem(arguments)
    unknown = [row.kind for row in ranks if plan is not None and row.kind not in plan.devices]
    if unknown and plan is not None:
        rule = f"must be of the plan's kinds ({', '.join(plan.devices)})"
        raise ParameterError("ranks", rule, unknown[0])
    folder = None if arguments.output is None else Path(arguments.output)
    return launch(ranks, _without_ranks(arguments.words), folder)


def _plan_and_problem(
    arguments: argparse.Namespace,
) -> tuple[PrecisionPlan | None, AllocationProblem | None]:
    from qsync_opt.files import load_plan, load_problem

    problem = None if arguments.problem is None else load_problem(arguments.problem)
    if arguments.plan is None:
        return None, problem
    if problem is None:
        return load_plan(arguments.plan), None
    return load_plan_of(problem, arguments.plan), problem


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
        batch_sizing=arguments.batch_sizing,
        refine_interval=arguments.refine_interval,
        refine_samples=arguments.refine_samples,
        communication=arguments.communication,
        trace=None if arguments.trace is None else Path(arguments.trace),
        trace_steps=arguments.trace_steps,
        emulate=arguments.emulate,
        find_unused_parameters=arguments.find_unused_parameters,
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
        kind = kind.strip()
        if kind in shares:
            raise ParameterError("shares", "must name each device kind once", kind)
        try:
            shares[kind] = float(number)
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
        "sent_bytes": result.metrics[-1].sent_bytes if result.metrics else None,
        "samples": list(result.samples),
        "refinements": [
            {"step": row.step, "told": row.refinement} for row in result.metrics if row.refinement
        ],
        "checkpoint_step": result.checkpoint_step,
        "folder": folder,
    }


def _written_at(path: str | None) -> int | None:
    """When a file was written last, in nanoseconds; None where there is none."""
    return Path(path).stat().st_mtime_ns if path is not None and Path(path).exists() else None


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
    if len(set(result.samples)) > 1:
        lines.append(f"samples of the ranks: {', '.join(map(str, result.samples))}")
    lines += [f"step {row.step}: {row.refinement}" for row in result.metrics if row.refinement]
    if folder is not None:
        lines.append(f"checkpoints and metrics are in {folder}")
    return lines
