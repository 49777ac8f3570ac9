"""The commands of `qsync-opt` that run a model; they need torch.

Like those in `commands` they take the parsed options, show their result and return a code.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from qsync_opt import options
from qsync_opt.commands import EXIT_PLAN, check_targets
from qsync_opt.errors import CaptureError, ParameterError

if TYPE_CHECKING:
    import argparse

    from qsync_opt.graph import OperatorGraph
    from qsync_opt.perturbation import PerturbationTable

#: The same list as in `measure.sensitivity`; a test compares them.
INDICATORS = (
    "variance",
    "variance_published",
    "measured",
    "hessian",
    "loss",
    "divergence",
    "random",
)


def add_commands(command: options.AddCommand) -> None:
    """Add `capture` and `perturb` to the command line."""
    sub = command("capture", run_capture, "record one training step of a model as a graph")
    sub.add_argument("model", metavar="MODEL", help="Python file with build()")
    sub.add_argument("--output", "-o", metavar="GRAPH", required=True, help="graph file to write")
    sub.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an argument of build(), for example batch_size=32; can be repeated",
    )
    sub.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s"
    )

    sub = command(
        "perturb",
        run_perturb,
        "what every operator at every precision adds to the variance of the gradient",
    )
    sub.add_argument("model", metavar="MODEL", help="Python file with build()")
    sub.add_argument("graph", metavar="GRAPH", help="graph file captured from it")
    sub.add_argument(
        "--output", "-o", metavar="TABLE", required=True, help="perturbation file to write"
    )
    sub.add_argument(
        "--method", choices=INDICATORS, default=INDICATORS[0], help="default: %(default)s"
    )
    sub.add_argument(
        "--precisions",
        type=options.words,
        default=("fp32", "tf32", "bf16", "fp16", "fp8", "int8"),
        metavar="A,B,...",
        help="columns of the table; default: all",
    )
    sub.add_argument(
        "--batches", type=int, default=1, metavar="N", help="mean over N; default: %(default)s"
    )
    sub.add_argument("--draws", type=int, metavar="N", help="random draws a batch")
    sub.add_argument(
        "--gradients",
        action="store_true",
        help="gather what sending gradients at fewer bits loses, for build --bits; as many"
        " --batches as the job has workers tell it best",
    )
    sub.add_argument(
        "--rounding",
        choices=("nearest", "stochastic"),
        default="nearest",
        help="of 8-bit operands; default: %(default)s",
    )
    sub.add_argument("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
    sub.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an argument of build(), for example a smaller batch_size; default: as captured",
    )
    sub.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s"
    )


def run_capture(arguments: argparse.Namespace) -> int:
    """Record one training step of a model file as a graph."""
    from qsync_opt import console
    from qsync_opt.files import save_graph

    check_targets(arguments.output)
    require_torch()
    import torch

    from qsync_opt.measure.capture import capture
    from qsync_opt.measure.model_file import load_model, parse_sizes
    from qsync_opt.measure.step import to_device

    sizes = parse_sizes(arguments.set)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise ParameterError("device", "must be usable here", "cuda", "There is no CUDA device")
    device = torch.device(arguments.device)
    with console.foreign_code():
        model, batch, loss = load_model(arguments.model, sizes)
        graph = capture(
            model.to(device), to_device(batch, device), loss, source=arguments.model, sizes=sizes
        )
    save_graph(graph, arguments.output)
    if arguments.json:
        console.write_json({"graph": arguments.output, **_summary(graph)})
    else:
        console.write(*_lines(graph), f"wrote {arguments.output}")
    return EXIT_PLAN


def run_perturb(arguments: argparse.Namespace) -> int:
    """Fill the table of perturbations of a model file by an indicator."""
    from qsync_opt import console
    from qsync_opt.files import load_graph, save_perturbations
    from qsync_opt.precision import Precision

    check_targets(arguments.output)
    graph = load_graph(arguments.graph)
    require_torch()
    import torch

    from qsync_opt.kernels.rounding import Rounding
    from qsync_opt.measure.model_file import further_batches, load_model, parse_sizes
    from qsync_opt.measure.sensitivity import perturbations
    from qsync_opt.measure.step import to_device

    # The model is built as it was for the graph, but for what is given here.
    built = parse_sizes([f"{key}={value}" for key, value in graph.provenance.sizes.items()])
    sizes = {**built, **parse_sizes(arguments.set)}
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise ParameterError("device", "must be usable here", "cuda", "There is no CUDA device")
    device = torch.device(arguments.device)
    try:
        precisions = [Precision(name) for name in arguments.precisions]
    except ValueError:
        rule = f"must be of {', '.join(map(str, Precision))}"
        raise ParameterError("precisions", rule, list(arguments.precisions)) from None
    with console.foreign_code(), console.counting(arguments.method) as report:
        model, batch, loss = load_model(arguments.model, sizes)
        more = further_batches(arguments.model, sizes, arguments.batches)
        table = perturbations(
            model.to(device),
            to_device(batch, device),
            graph,
            precisions=precisions,
            method=arguments.method,
            batches=[to_device(one, device) for one in more],
            loss=loss,
            draws=arguments.draws,
            rounding=Rounding[arguments.rounding.upper()],
            seed=arguments.seed,
            source=arguments.model,
            sizes=sizes,
            gradients=arguments.gradients,
            report=report,
        )
    save_perturbations(table, arguments.output)
    if arguments.json:
        console.write_json(
            {
                "perturbations": arguments.output,
                "graph": table.graph,
                "method": table.method,
                "elapsed_s": table.provenance.elapsed_s,
                "totals": _totals(table),
            }
        )
    else:
        console.write(
            f"{table.method}: {len(graph.adjustable)} adjustable operators,"
            f" {table.provenance.elapsed_s:.1f} s",
            *(
                f"all of them at {name}: {'impossible' if total is None else format(total, '.4g')}"
                for name, total in _totals(table).items()
            ),
            f"wrote {arguments.output}",
        )
    return EXIT_PLAN


def _totals(table: PerturbationTable) -> dict[str, float | None]:
    """Precision -> sum of its column over the operators that have it; None if none has."""
    import numpy as np

    totals: dict[str, float | None] = {}
    for precision, column in zip(table.precisions, table.values.T, strict=True):
        finite = column[np.isfinite(column)]
        totals[str(precision)] = float(finite.sum()) if finite.size else None
    return totals


def require_torch() -> None:
    """Raise unless torch is installed.

    Raises:
        CaptureError: it is not.
    """
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise CaptureError(
            f"torch cannot be imported ({error})", "Install it: pip install 'qsync-opt[torch]'"
        ) from error


def _summary(graph: OperatorGraph) -> dict[str, object]:
    return {
        "name": graph.name,
        "sha256": graph.sha256,
        "operators": len(graph.operators),
        "signatures": len(graph.signatures),
        "roles": dict(Counter(op.role.value for op in graph.operators)),
        "parameters": sum(parameter.elements for parameter in graph.parameters),
        "saved_bytes": sum(row.size_bytes for row in graph.saved if not row.resident),
        "forward_flops": sum(op.forward_flops for op in graph.operators),
        "backward_flops": sum(op.backward_flops for op in graph.operators),
        "coverage": graph.coverage.share,
        "missing_s": dict(graph.coverage.missing),
    }


def _lines(graph: OperatorGraph) -> list[str]:
    roles = Counter(op.role.value for op in graph.operators)
    parameters = sum(parameter.elements for parameter in graph.parameters)
    saved = sum(row.size_bytes for row in graph.saved if not row.resident)
    flops = sum(op.forward_flops + op.backward_flops for op in graph.operators)
    return [
        f"{graph.name}: {len(graph.operators)} operators ("
        + ", ".join(f"{count} {role}" for role, count in sorted(roles.items()))
        + f"), {len(graph.signatures)} different",
        f"{parameters:,} parameters, {saved / 2**20:,.1f} MiB kept for backward,"
        f" {flops / 1e9:,.1f} GFLOP a step",
        f"{graph.coverage.share:.1%} of the step's time explained",
    ]
