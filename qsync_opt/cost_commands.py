"""The command of `qsync-opt` that makes measured costs: `measure`.

Like those in `commands` it takes the parsed options, shows its result and returns a code.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qsync_opt import options
from qsync_opt.commands import EXIT_PLAN, check_targets
from qsync_opt.errors import FormatError, MeasureError, ParameterError
from qsync_opt.precision import Precision

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from qsync_opt.costs import DeviceCosts
    from qsync_opt.graph import OperatorGraph
    from qsync_opt.measure.measuring import TrainedModel
    from qsync_opt.measure.notebook import Notebook

#: Suffix of the file that keeps what an interrupted measurement has so far.
PARTIAL = ".partial"


def add_commands(command: options.AddCommand) -> None:
    """Add `measure` to the command line."""
    sub = command("measure", run_measure, "measure what a graph costs on this device")
    sub.add_argument("graph", metavar="GRAPH", help="graph file")
    sub.add_argument("--output", "-o", metavar="COSTS", required=True, help="costs file to write")
    model = sub.add_mutually_exclusive_group()
    model.add_argument(
        "--model", metavar="MODEL", help="model file; default: the one that was captured"
    )
    model.add_argument(
        "--no-model", action="store_true", help="measure operators only, no buckets and steps"
    )
    sub.add_argument("--device", choices=("cpu", "cuda"), help="default: that of the graph")
    sub.add_argument("--threads", type=int, metavar="N", help="of a CPU; default: torch's")
    sub.add_argument("--precisions", metavar="A,B,...", help="default: all that the device has")
    sub.add_argument("--optimizer", default="adamw", help="adamw (default), adam or sgd")
    sub.add_argument(
        "--ranks",
        type=int,
        default=1,
        metavar="N",
        help="time all-reduces between N processes on this machine; under torchrun its group is"
        " used instead, and a rank writes its file unless a lower one writes the same",
    )
    sub.add_argument(
        "--codes",
        type=options.whole_numbers,
        default=(),
        metavar="16,8,...",
        help="bits at which averages of gradients are timed between ranks too: 16, or 8 to 2",
    )


def run_measure(arguments: argparse.Namespace) -> int:
    """Measure what a graph's operators cost on the device at hand."""
    from qsync_opt import console
    from qsync_opt.files import load_graph, save_costs
    from qsync_opt.model_commands import require_torch

    check_targets(arguments.output)
    graph = load_graph(arguments.graph)
    require_torch()
    import torch
    from torch import distributed

    from qsync_opt.measure.communication import measure_local_all_reduce, sizes_to_measure
    from qsync_opt.measure.measuring import MeasureProgress, measure

    device = torch.device(arguments.device or graph.provenance.device_type)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ParameterError("device", "must be usable here", "cuda", "There is no CUDA device")
    if arguments.threads is not None:
        if arguments.threads < 1:
            raise ParameterError("threads", "must be at least 1", arguments.threads)
        torch.set_num_threads(arguments.threads)
    precisions = _precisions(arguments.precisions)
    with console.foreign_code(), _group_of_launcher(device), console.counting("measured") as count:
        is_writer = _is_first_to_write(arguments.output, device)
        target = arguments.output
        if not is_writer:
            target = f"{arguments.output}.{distributed.get_rank()}"
        if arguments.codes and arguments.ranks == 1 and not distributed.is_initialized():
            rule = "must be given with --ranks of 2 or more, or under torchrun"
            raise ParameterError("codes", rule, list(arguments.codes))
        trained = None if arguments.no_model else _trained(arguments.model, graph, device)

        def report(progress: MeasureProgress) -> None:
            if count is not None:
                count(progress.done, progress.total)

        costs = measure(
            graph,
            trained=trained,
            device=device,
            precisions=precisions,
            optimizer=arguments.optimizer,
            codes=arguments.codes,
            notebook=notebook_beside(graph, device, precisions, arguments.optimizer, target),
            progress=report,
        )
        if arguments.ranks > 1 and costs.all_reduce is None:
            sizes = sizes_to_measure(costs.buckets)
            reduce = measure_local_all_reduce(sizes, arguments.ranks, device.type, arguments.codes)
            costs = replace(costs, all_reduce=reduce)
    if is_writer:
        save_costs(costs, target)
    with suppress(OSError):
        os.unlink(target + PARTIAL)
    if arguments.json:
        console.write_json({"costs": target, **_summary(costs)})
    else:
        console.write(*_lines(costs), f"wrote {target}")
    return EXIT_PLAN


def _precisions(text: str | None) -> tuple[Precision, ...] | None:
    if text is None:
        return None
    found = []
    for word in text.split(","):
        try:
            found.append(Precision(word.strip()))
        except ValueError:
            known = ", ".join(Precision)
            raise ParameterError("precisions", f"must be of {known}", word) from None
    return tuple(found)


def _trained(path: str | None, graph: OperatorGraph, device: Any) -> TrainedModel:
    """The model that the graph was captured from, built again with the same sizes."""
    from qsync_opt.measure.measuring import TrainedModel
    from qsync_opt.measure.model_file import load_model, parse_sizes
    from qsync_opt.measure.step import to_device

    file = path or graph.provenance.model
    if not Path(file).is_file():
        raise MeasureError(
            f"the model file {file} that the graph was captured from is not here",
            "Give it with --model, or pass --no-model to measure neither buckets nor steps",
        )
    sizes = parse_sizes([f"{key}={value}" for key, value in graph.provenance.sizes.items()])
    model, batch, loss = load_model(file, sizes)
    return TrainedModel(model=model.to(device), batch=to_device(batch, device), loss=loss)


def notebook_beside(
    graph: OperatorGraph,
    device: Any,
    precisions: tuple[Precision, ...] | None,
    optimizer: str,
    target: str,
) -> Notebook:
    """A notebook in a file beside the target, with what an interrupted run left there."""
    from qsync_opt.costs_schema import PartialCostsDocument
    from qsync_opt.files import load_document, save_document
    from qsync_opt.measure.measuring import measurement_key
    from qsync_opt.measure.notebook import Notebook

    path = target + PARTIAL
    key = measurement_key(graph, device, precisions or (), optimizer)

    def keep(entries: Mapping[str, Any]) -> None:
        document = PartialCostsDocument(
            format=PartialCostsDocument.FORMAT,
            version=PartialCostsDocument.VERSION,
            key=key,
            entries=dict(entries),
        )
        save_document(document, path)

    entries: Mapping[str, Any] = {}
    with suppress(FormatError):  # none, or a broken one: nothing to go on from
        document = load_document(path, PartialCostsDocument)
        entries = document.entries if document.key == key else {}
    return Notebook(entries, keep)


@contextmanager
def _group_of_launcher(device: Any) -> Iterator[None]:
    """The default process group where a launcher such as torchrun has started this process."""
    from torch import distributed

    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield
        return
    import torch

    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield
    finally:
        distributed.destroy_process_group()


def _is_first_to_write(path: str, device: Any) -> bool:
    """Whether no lower rank of the group writes the same file: equal ranks write it once."""
    import torch
    from torch import distributed

    if not distributed.is_initialized():
        return True
    digest = hashlib.sha256(os.path.abspath(path).encode()).digest()
    mine = torch.tensor(list(digest), dtype=torch.uint8, device=device)
    found = [torch.empty_like(mine) for _ in range(distributed.get_world_size())]
    distributed.all_gather(found, mine)
    return not any(torch.equal(mine, other) for other in found[: distributed.get_rank()])


def _summary(costs: DeviceCosts) -> dict[str, Any]:
    where = costs.provenance
    return {
        "device": where.device,
        "threads": where.threads,
        "share": where.share,
        "precisions": list(costs.precisions),
        "signatures": int(costs.operators.forward_s.shape[0]),
        "buckets": [bucket.size_bytes for bucket in costs.buckets],
        "optimizer_s": costs.optimizer.step_s,
        "steps": {step.precision: step.forward_s + step.backward_s for step in costs.steps},
        "unavailable": [
            {"signature": row.signature, "precision": row.precision, "reason": row.reason}
            for row in costs.unavailable
        ],
        "warnings": list(costs.warnings),
    }


def _lines(costs: DeviceCosts) -> list[str]:
    where = costs.provenance
    limit = f"{where.threads} threads" if where.device_type == "cpu" else f"{where.share} %"
    lines = [f"{where.device} ({limit}): {len(costs.operators.forward_s)} different operators"]
    for step in costs.steps:
        total_ms = 1e3 * (step.forward_s + step.backward_s)
        lines.append(f"a step at {step.precision}: {total_ms:.2f} ms")
    everywhere = [row for row in costs.unavailable if row.signature is None]
    some = [row for row in costs.unavailable if row.signature is not None]
    lines += [f"{row.precision}: {row.reason}" for row in everywhere]
    lines += [f"signature {row.signature} at {row.precision}: {row.reason}" for row in some]
    return [*lines, *(f"warning: {text}" for text in costs.warnings)]
