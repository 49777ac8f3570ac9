"""Instances made of what was measured on an H200: all of it, and a limited share of it.

`measured/` holds for each model the captured graph, the perturbations, and the costs at 100 %,
25 % and 12 % of the multiprocessors; `python -m tests.benchmarks.h200` measures them on such a
GPU. Here problems are made of them, without a GPU and the same bytes every time: one worker on
the whole GPU beside one that has a share of its multiprocessors and of its memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from qsync_opt.build import build_problem
from qsync_opt.costs import AllReduceCosts, Cluster, ClusterKind
from qsync_opt.files import load_costs, load_graph, load_perturbations
from qsync_opt.optimize.evaluate import DeviceEvaluation, evaluate_device, follower_columns
from qsync_opt.optimize.problem import AllocationProblem
from qsync_opt.precision import Precision

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

#: Over the pace of the fastest feasible plan; see `measured_problem`.
SLACK = 0.1


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

    def costs(self, share: int) -> str:
        """Name of the file of the costs at a percentage of the multiprocessors."""
        return f"{self.name}.{share}.costs.json.gz"


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
    weak = f"{STRONG}-{share}"
    costs = {
        STRONG: load_costs(folder / model.costs(100)),
        weak: load_costs(folder / model.costs(share)),
    }
    reduce = AllReduceCosts(
        ranks=2,
        backend="nccl",
        size_bytes=np.array([NVLINK_BYTES]),
        time_s=np.array([NVLINK_S]),
        spread=np.zeros(1),
    )
    memory_bytes = costs[weak].memory.device_bytes * share // 100
    kinds = (ClusterKind(name=STRONG), ClusterKind(name=weak, memory_bytes=memory_bytes))
    problem = build_problem(
        load_graph(folder / model.graph),
        costs,
        load_perturbations(folder / model.perturbations),
        Cluster(kinds=kinds, all_reduce=reduce),
        name=f"{model.name}-{weak}",
        slack=SLACK,
    )
    return replace(problem, provenance=f"{problem.provenance}; {NETWORK}")


def at_uniform(problem: AllocationProblem, kind: str, precision: Precision) -> DeviceEvaluation:
    """A kind with every operator at a precision, or in fp32 where it lacks it."""
    device = problem.devices[problem.device_index[kind]]
    column = problem.precisions.index(precision)
    chosen = np.where(device.available[:, column], column, problem.precisions.index(Precision.FP32))
    return evaluate_device(problem, device, follower_columns(problem, chosen))
