"""Instances made of what was measured: on an H200 and a limited share of it, and on a CPU.

`measured/` holds for each model the captured graph, the perturbations, and the costs of the
device kinds. `python -m tests.benchmarks.h200` measures a GPU at 100 %, 25 % and 12 % of its
multiprocessors, `qsync-opt measure` a CPU with two threads and with one. Here problems are made
of them, without a GPU and the same bytes every time: a strong worker beside a weak one that has
less memory. On a slow link the bits of the gradient buckets are decisions too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from qsync_opt.build import build_problem
from qsync_opt.costs import AllReduceCosts, Cluster, ClusterKind
from qsync_opt.costs_network import CodedTimes
from qsync_opt.files import load_costs, load_graph, load_perturbations
from qsync_opt.optimize.arrays import FloatArray
from qsync_opt.optimize.evaluate import DeviceEvaluation, evaluate_device, follower_columns
from qsync_opt.optimize.problem import AllocationProblem
from qsync_opt.plan import FULL_BITS
from qsync_opt.precision import Precision
from qsync_opt.runtime.communication import all_reduce_bytes

FOLDER = Path(__file__).resolve().parent / "measured"

#: Percentage of the multiprocessors of the weak worker.
SHARES = (25, 12)
STRONG = "h200"

#: All-reduce of 25 MiB between two H200s by NCCL over NVLink, seconds: the one size that was
#: measured, on two GPUs. Smaller buckets are taken to cost as much, larger ones in proportion.
NVLINK_BYTES, NVLINK_S = 25 * 2**20, 0.12e-3
NETWORK = (
    "all-reduce: NCCL over NVLink between two H200s, 25 MiB measured in 0.12 ms, smaller buckets"
    " taken to cost as much, larger ones in proportion"
)

#: The same size by NCCL over TCP on the loopback device (peer-to-peer and shared memory off),
#: taken to be in proportion to the bytes that a rank sends at other sizes and bits.
TCP_BYTES, TCP_S = 25 * 2**20, 8e-3

#: Seconds a value to make messages of codes, decode them and add them up on an H200: 0.194 and
#: 0.102 ms for 2^26 values, tests/benchmarks/results/quantized_comm-h200.md, eight bits.
CODEC_S = 0.296e-3 / 2**26

#: Bits that buckets may be sent at over the slow link, beside 32.
CODES = (16, 8, 4)
SLOW_NETWORK = (
    "all-reduce: NCCL over TCP on the loopback device, 25 MiB of fp32 measured in 8 ms, other"
    " sizes and bits by the bytes that a rank sends, and the measured time of coding"
)

#: Over the pace of the fastest feasible plan; see `measured_problem`.
SLACK = 0.1

#: Names of the device kinds on a CPU: two threads, and one.
CPU_STRONG, CPU_WEAK = "two-threads", "one-thread"


@dataclass(frozen=True, kw_only=True)
class MeasuredModel:
    """What is measured of one model.

    Attributes:
        name: of its files.
        file: model file, from the top of the checkout.
        sizes: arguments of its `build`.
    """

    name: str
    file: str
    sizes: tuple[tuple[str, object], ...] = ()

    @property
    def graph(self) -> str:
        """Name of the file of the graph."""
        return f"{self.name}.graph.json.gz"

    @property
    def perturbations(self) -> str:
        """Name of the file of the perturbations."""
        return f"{self.name}.perturbations.json.gz"

    def costs(self, kind: int | str) -> str:
        """Name of the file of the costs of a kind, or at a percentage of the multiprocessors."""
        return f"{self.name}.{kind}.costs.json.gz"


#: Batches keep the GPU busy in every precision (ResNet-50 waits for the host at 64). Without
#: padding the host need not wait for the GPU in the middle of a forward.
MODELS = (
    MeasuredModel(name="resnet50", file="models/resnet50.py", sizes=(("batch_size", 128),)),
    MeasuredModel(name="vgg16-bn", file="models/vgg16_bn.py", sizes=(("batch_size", 64),)),
    MeasuredModel(
        name="bert-base", file="models/bert.py", sizes=(("batch_size", 32), ("padded", 0))
    ),
    MeasuredModel(
        name="roberta-base", file="models/roberta.py", sizes=(("batch_size", 32), ("padded", 0))
    ),
    MeasuredModel(name="gpt-125m", file="models/gpt.py", sizes=(("batch_size", 8),)),
)


#: Small models with the memory of the weak worker, bytes: between what they take in fp32 and
#: at the least, so that it has to mix precisions (on this CPU fp32 is the fastest).
CPU_MODELS = (
    (MeasuredModel(name="small-cnn", file="models/small_cnn.py"), 1_700_000),
    (MeasuredModel(name="small-gpt", file="models/small_gpt.py"), 10_500_000),
)


#: Models whose gradients take longer over the slow link than their steps.
SLOW_LINK_MODELS = tuple(model for model in MODELS if model.name in ("bert-base", "gpt-125m"))


def is_there(model: MeasuredModel, share: int, folder: Path = FOLDER) -> bool:
    """Whether everything that an instance is made of has been measured."""
    names = (model.graph, model.perturbations, model.costs(100), model.costs(share))
    return all((folder / name).is_file() for name in names)


def measured_problem(model: MeasuredModel, share: int, folder: Path = FOLDER) -> AllocationProblem:
    """A worker on the whole GPU beside one on a share of it, with equal batches.

    The pace to keep is that of the fastest feasible plan and 10 %. Other paces decide a part of
    the problem beforehand: at that of the strong worker in fp32 it stays in fp32 throughout, and
    no plan of a worker on 25 % keeps that of the strong one in tf32. At this one both have to
    choose, and all of fp32, tf32 and 16 bits are worth something to one or the other. The weak
    worker has its share of the memory.

    Args:
        model: one of `MODELS`.
        share: percentage of the multiprocessors of the weak worker.
        folder: where the measured files are.
    """
    reduce = AllReduceCosts(
        ranks=2,
        backend="nccl",
        size_bytes=np.array([NVLINK_BYTES]),
        time_s=np.array([NVLINK_S]),
        spread=np.zeros(1),
    )
    problem = _with_a_share(model, share, folder, reduce)
    return replace(problem, provenance=f"{problem.provenance}; {NETWORK}")


def slow_link_problem(model: MeasuredModel, share: int, folder: Path = FOLDER) -> AllocationProblem:
    """As `measured_problem` over a slow link, with the bits of every bucket to be chosen.

    Args:
        model: one of `MODELS`.
        share: percentage of the multiprocessors of the weak worker.
        folder: where the measured files are.
    """
    buckets = load_costs(folder / model.costs(100)).buckets
    sizes = np.array(sorted({bucket.size_bytes for bucket in buckets}))
    full = all_reduce_bytes(TCP_BYTES // 4, 2, FULL_BITS)

    def times(bits: int) -> FloatArray:
        sent = np.array([all_reduce_bytes(int(size) // 4, 2, bits) for size in sizes])
        coding_s = sizes / 4 * CODEC_S if bits < FULL_BITS else 0.0
        return np.asarray(TCP_S * sent / full + coding_s)

    none = np.zeros(len(sizes))
    reduce = AllReduceCosts(
        ranks=2,
        backend="nccl",
        size_bytes=sizes,
        time_s=times(FULL_BITS),
        spread=none,
        codes=tuple(CodedTimes(bits=bits, time_s=times(bits), spread=none) for bits in CODES),
    )
    problem = _with_a_share(model, share, folder, reduce)
    return replace(
        problem,
        name=f"{problem.name}-tcp",
        provenance=f"{problem.provenance}; {SLOW_NETWORK}",
    )


def _with_a_share(
    model: MeasuredModel, share: int, folder: Path, reduce: AllReduceCosts
) -> AllocationProblem:
    weak = f"{STRONG}-{share}"
    costs = {
        STRONG: load_costs(folder / model.costs(100)),
        weak: load_costs(folder / model.costs(share)),
    }
    memory_bytes = costs[weak].memory.device_bytes * share // 100
    kinds = (ClusterKind(name=STRONG), ClusterKind(name=weak, memory_bytes=memory_bytes))
    return build_problem(
        load_graph(folder / model.graph),
        costs,
        load_perturbations(folder / model.perturbations),
        Cluster(kinds=kinds, all_reduce=reduce),
        name=f"{model.name}-{weak}",
        bits=[row.bits for row in reduce.codes],
        slack=SLACK,
    )


def cpu_problem(
    model: MeasuredModel, weak_memory_bytes: int, folder: Path = FOLDER
) -> AllocationProblem:
    """A worker with two threads of a CPU beside one with one thread and little memory.

    Args:
        model: one of `CPU_MODELS`.
        weak_memory_bytes: of the weak worker.
        folder: where the measured files are.
    """
    costs = {kind: load_costs(folder / model.costs(kind)) for kind in (CPU_STRONG, CPU_WEAK)}
    kinds = (
        ClusterKind(name=CPU_STRONG),
        ClusterKind(name=CPU_WEAK, memory_bytes=weak_memory_bytes),
    )
    return build_problem(
        load_graph(folder / model.graph),
        costs,
        load_perturbations(folder / model.perturbations),
        Cluster(kinds=kinds, all_reduce=costs[CPU_STRONG].all_reduce),
        name=f"{model.name}-cpu",
        slack=SLACK,
    )


def at_uniform(problem: AllocationProblem, kind: str, precision: Precision) -> DeviceEvaluation:
    """A kind with every operator at a precision, or in fp32 where it lacks it."""
    device = problem.devices[problem.device_index[kind]]
    column = problem.precisions.index(precision)
    chosen = np.where(device.available[:, column], column, problem.precisions.index(Precision.FP32))
    return evaluate_device(problem, device, follower_columns(problem, chosen))
