"""`roofline_problem`: a network on two kinds of GPU as an `AllocationProblem`.

Memory that is always taken: a CUDA context of 500 MiB (assumed), parameters, gradients and
optimizer state in fp32 (Adam: two moments; SGD: one), and one batch of inputs. Gradient
buckets are cut as torch's DistributedDataParallel does by default, in backward order: the
first closes at 1 MiB, the others at 25 MiB. An all-reduce over n workers takes
2 (n - 1) / n . bytes / link + 50 us (ring, assumed latency).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from problems.pricing import COMPUTE_EFFICIENCY, LAUNCH_S, MEMORY_EFFICIENCY, Pricing
from qsync_opt.optimize.problem import (
    AllocationProblem,
    Bucket,
    CastTensors,
    DeviceKind,
    Operator,
    SavedTensors,
)
from qsync_opt.precision import Precision

if TYPE_CHECKING:
    from problems.gpus import Gpu
    from problems.shapes import Network

_CONTEXT_BYTES = 500 * 2**20
_FIRST_BUCKET_BYTES = 2**20
_BUCKET_BYTES = 25 * 2**20
_REDUCE_LATENCY_S = 50e-6
#: fp32 words a parameter takes (value, gradient, state) and the optimizer step moves.
_OPTIMIZERS = {"adam": (4, 7), "sgd": (3, 5)}


@dataclass(frozen=True, kw_only=True)
class Workers:
    """Some workers of one kind.

    Attributes:
        name: name of the device kind.
        gpu: their GPU.
        count: how many.
        batch: samples that each handles in a step.
        memory_bytes: memory that each may use; the GPU's by default.
    """

    name: str
    gpu: Gpu
    count: int
    batch: int
    memory_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Link:
    """The network that carries the gradients.

    Attributes:
        name: for people.
        bytes_per_s: one direction.
    """

    name: str
    bytes_per_s: float


ETHERNET_10 = Link(name="10 Gb/s Ethernet", bytes_per_s=1.25e9)
ETHERNET_100 = Link(name="100 Gb/s Ethernet", bytes_per_s=12.5e9)
INFINIBAND_400 = Link(name="400 Gb/s InfiniBand", bytes_per_s=50e9)


def rounded(value: float) -> float:
    """Six significant digits: a roofline has no more, and the file is the same everywhere."""
    return float(f"{value:.6g}")


def roofline_problem(
    *,
    name: str,
    model: Callable[[int], Network],
    workers: Sequence[Workers],
    link: Link,
    optimizer: str,
    deadline_s: float | None = None,
    slack: float = 0.0,
    note: str = "",
) -> AllocationProblem:
    """Price a model on some workers.

    Args:
        name: name of the problem.
        model: the network for a batch of samples.
        workers: the kinds of worker.
        link: what carries the gradients.
        optimizer: `adam` or `sgd` (with momentum).
        deadline_s: see `AllocationProblem`.
        slack: see `AllocationProblem`.
        note: a sentence for the provenance.
    """
    networks = [model(kind.batch) for kind in workers]
    available = {p for kind in workers for p in kind.gpu.flops}
    precisions = tuple(p for p in Precision if p in available)
    sixteen = Precision.BF16 if Precision.BF16 in available else Precision.FP16
    samples = sum(kind.count * kind.batch for kind in workers)
    bucket_of, buckets = _buckets(networks[0], sum(kind.count for kind in workers), link)
    prices = [
        Pricing(gpu=kind.gpu, sixteen=sixteen, batch=kind.batch, parameters=network.parameters)
        for kind, network in zip(workers, networks, strict=True)
    ]
    return AllocationProblem(
        name=name,
        provenance=_provenance(networks[0], workers, link, optimizer, note),
        precisions=precisions,
        storage=tuple(p.storage for p in precisions),
        output=tuple(prices[0].output(p) for p in precisions),
        operators=tuple(
            Operator(
                name=layer.name,
                kind=layer.kind,
                bucket=bucket_of.get(index),
                follows=layer.reads if layer.role == "follower" else (),
            )
            for index, layer in enumerate(networks[0].layers)
        ),
        buckets=tuple(buckets),
        groups=tuple(networks[0].groups),
        devices=tuple(
            _device(kind, network, price, precisions, optimizer, samples)
            for kind, network, price in zip(workers, networks, prices, strict=True)
        ),
        deadline_s=deadline_s,
        slack=slack,
    )


def _provenance(
    network: Network, workers: Sequence[Workers], link: Link, optimizer: str, note: str
) -> str:
    fleet = " and ".join(f"{w.count} x {w.gpu.name} (batch {w.batch} each)" for w in workers)
    sources = "; ".join(dict.fromkeys(w.gpu.source for w in workers))
    return (
        f"{network.name} on {fleet}, {optimizer}, gradients over {link.name}."
        f" {note + ' ' if note else ''}Shapes from the architecture, prices from a roofline"
        f" ({COMPUTE_EFFICIENCY:g} of peak rate, {MEMORY_EFFICIENCY:g} of memory bandwidth,"
        f" {LAUNCH_S:g} s a kernel) over data-sheet figures: {sources}."
        " Perturbation synthetic (rounding variance x elements x depth). Nothing was measured."
    )


def _buckets(network: Network, ranks: int, link: Link) -> tuple[dict[int, int], list[Bucket]]:
    """Layer index -> bucket, and the buckets, in the order in which gradients come."""
    bucket_of: dict[int, int] = {}
    sizes = [0]
    for index in reversed(range(len(network.layers))):
        parameters = network.layers[index].parameters
        if not parameters:
            continue
        limit = _FIRST_BUCKET_BYTES if len(sizes) == 1 else _BUCKET_BYTES
        if sizes[-1] >= limit:
            sizes.append(0)
        bucket_of[index] = len(sizes) - 1
        sizes[-1] += 4 * parameters
    ring = 2 * (ranks - 1) / ranks / link.bytes_per_s
    buckets = [
        Bucket(all_reduce_s=rounded(ring * size + _REDUCE_LATENCY_S), size_bytes=size)
        for size in sizes
    ]
    return bucket_of, buckets


def _device(
    kind: Workers,
    network: Network,
    price: Pricing,
    precisions: Sequence[Precision],
    optimizer: str,
    samples: int,
) -> DeviceKind:
    words, moved = _OPTIMIZERS[optimizer]
    adjustable = [i for i, layer in enumerate(network.layers) if layer.role == "adjustable"]
    available: list[list[bool]] = []
    forward: list[list[float]] = []
    backward: list[list[float]] = []
    noise: list[list[float]] = []
    held_forward: list[list[int]] = []
    held_backward: list[list[int]] = []
    for index, layer in enumerate(network.layers):
        has = [p in price.options(layer) for p in precisions]
        depth = sum(later >= index for later in adjustable) / len(adjustable)
        first = any(network.layers[read].kind == "input" for read in layer.reads)
        rows: tuple[list[float], list[float], list[float]] = ([], [], [])
        held: tuple[list[int], list[int]] = ([], [])
        for p, there in zip(precisions, has, strict=True):
            rows[0].append(rounded(price.forward_s(layer, p)) if there else 0.0)
            rows[1].append(rounded(price.backward_s(layer, p, first=first)) if there else 0.0)
            rows[2].append(rounded(price.perturbation(layer, p, depth)) if there else 0.0)
            held[0].append(price.forward_transient_bytes(layer, p) if there else 0)
            held[1].append(price.backward_transient_bytes(layer, p) if there else 0)
        available.append(has)
        for table, row in zip((forward, backward, noise), rows, strict=True):
            table.append(row)
        held_forward.append(held[0])
        held_backward.append(held[1])
    return DeviceKind(
        name=kind.name,
        workers=kind.count,
        batch_share=kind.batch / samples,
        memory_bytes=kind.gpu.memory_bytes if kind.memory_bytes is None else kind.memory_bytes,
        fixed_bytes=_CONTEXT_BYTES + 4 * words * network.parameters + network.input_bytes,
        optimizer_s=rounded(price.traffic_s(4 * moved * network.parameters) + LAUNCH_S),
        available=available,  # type: ignore[arg-type]  # becomes an array there
        forward_s=forward,  # type: ignore[arg-type]
        backward_s=backward,  # type: ignore[arg-type]
        perturbation=noise,  # type: ignore[arg-type]
        forward_transient_bytes=held_forward,  # type: ignore[arg-type]
        backward_transient_bytes=held_backward,  # type: ignore[arg-type]
        tensors=_tensors(network, price, precisions),
        saved=_saved(network, precisions),
    )


def _readers(network: Network) -> list[list[int]]:
    readers: list[list[int]] = [[] for _ in network.layers]
    for index, layer in enumerate(network.layers):
        for read in layer.reads:
            readers[read].append(index)
    return readers


def _tensors(network: Network, price: Pricing, precisions: Sequence[Precision]) -> CastTensors:
    """Every tensor that is handed on; its gradient comes back in the consumer's output dtype."""
    producers, consumers, forward, backward = [], [], [], []
    for index, readers in enumerate(_readers(network)):
        if not readers:
            continue
        layer = network.layers[index]

        def cast(source: Precision, target: Precision, elements: int) -> float:
            return rounded(price.cast_s(elements, source, target))

        elements = layer.output_elements
        back = 0 if layer.kind == "input" else elements
        producers.append(index)
        consumers.append(readers)
        forward.append(
            [[cast(price.output(p), q.storage, elements) for q in precisions] for p in precisions]
        )
        backward.append(
            [
                [cast(price.output(q), price.output(p), back) if back else 0.0 for q in precisions]
                for p in precisions
            ]
        )
    return CastTensors.from_rows(
        producer=producers, consumers=consumers, forward_s=forward, backward_s=backward
    )


def _saved(network: Network, precisions: Sequence[Precision]) -> SavedTensors:
    """Every tensor kept for backward, by who keeps it, in the order of the producers."""
    dtypes = tuple(dict.fromkeys(p.storage for p in precisions))
    savers, sizes = [], []
    for index, readers in enumerate(_readers(network)):
        layer = network.layers[index]
        keep = [index] if layer.saves_output else []
        keep += [reader for reader in readers if network.layers[reader].saves_input]
        if keep:
            savers.append(keep)
            sizes.append([layer.output_elements * dtype.element_bytes for dtype in dtypes])
        if layer.mask_bytes:
            savers.append([index])
            sizes.append([layer.mask_bytes] * len(dtypes))
    return SavedTensors.from_rows(savers=savers, size_bytes=sizes, dtypes=dtypes)
