"""Memory of a step: what is predicted for a forward is what its storages take.

Whole forwards run on a CPU, where fp8 is emulated, and every storage that they make is counted.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from qsync_opt.build import build_problem
from qsync_opt.costs import Cluster, ClusterKind, DeviceCosts
from qsync_opt.graph import OperatorGraph
from qsync_opt.measure import measuring
from qsync_opt.measure.capture import capture
from qsync_opt.measure.clock import Clock, Effort
from qsync_opt.measure.communication import read_buckets
from qsync_opt.measure.measuring import measure
from qsync_opt.measure.memory import metered
from qsync_opt.measure.uniform import run_loss, uniform_plan
from qsync_opt.precision import Precision
from qsync_opt.runtime.convert import convert
from qsync_opt.simulate.memory import memory_timeline
from tests.benchmarks.predictions import columns_of, empty_table

CPU = torch.device("cpu")
QUICK = Effort(warm_up=1, samples=2, budget_s=0.0, sample_s=0.0, retries=0)
HAS = frozenset({Precision.FP32, Precision.BF16, Precision.INT8, Precision.FP8})
ONE = Cluster(kinds=(ClusterKind(name="one"),))


class Block(nn.Module):
    """As in BERT: `middle` and `x` live until the norm has run, whatever is kept of them."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(16, 64), nn.Linear(64, 16)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        middle = functional.gelu(self.wide(x))
        out = self.narrow(middle)
        normal: Tensor = self.norm(x + out)
        return normal.float()  # where autocast does not, as on a CPU


class Blocks(nn.Module):
    """Some blocks; `first` lives until the last of them has run."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, 16), nn.Linear(16, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first = self.embed(x)
        h = first
        for block in self.blocks:
            h = block(h)
        return self.head(h)  # type: ignore[no-any-return]


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(256, 8), torch.randint(0, 3, (256,))


@pytest.fixture(scope="module")
def graph() -> OperatorGraph:
    torch.manual_seed(0)
    return capture(Blocks(), batch(), functional.cross_entropy, least_coverage=0.0)


@pytest.fixture(scope="module")
def costs(graph: OperatorGraph) -> DeviceCosts:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "available_precisions", lambda _: HAS)
        found = measure(graph, clock=Clock(CPU, QUICK))
    return replace(found, buckets=read_buckets(Blocks(), batch(), functional.cross_entropy))


def told_bytes(graph: OperatorGraph, costs: DeviceCosts, precision: Precision) -> int:
    """The most that the forward of a uniform plan takes, by the problem."""
    problem = build_problem(graph, {"one": costs}, empty_table(graph, costs), ONE)
    columns = columns_of(graph, problem, uniform_plan(graph, precision, HAS))
    timeline = memory_timeline(problem, problem.devices[0], columns)
    forward = timeline.total_bytes[: len(graph.operators)]
    return int(forward.max()) - timeline.fixed_bytes


def taken_bytes(graph: OperatorGraph, precision: Precision) -> int:
    """The most that it really takes, storage by storage."""
    model, (inputs, target) = Blocks(), batch()
    convert(model, uniform_plan(graph, precision, HAS), graph=graph, emulate=True)
    with metered(CPU) as use:
        run_loss(model, inputs, target, functional.cross_entropy)
    return use.peak_bytes


@pytest.mark.parametrize("precision", sorted(HAS))
def test_a_forward_takes_what_is_predicted(
    graph: OperatorGraph, costs: DeviceCosts, precision: Precision
) -> None:
    assert told_bytes(graph, costs, precision) == taken_bytes(graph, precision)


@pytest.mark.parametrize("precision", [Precision.INT8, Precision.FP8])
def test_held_tensors_count_where_layers_keep_codes_of_them(
    graph: OperatorGraph, costs: DeviceCosts, precision: Precision
) -> None:
    unknown = replace(graph, tensors=tuple(replace(t, held_until=None) for t in graph.tensors))
    assert unknown.sha256 == graph.sha256  # its costs are good for both
    # `first` and the `x` of the last block, when its norm runs: bf16 and fp32.
    least = 256 * 16 * (2 + 4)
    told = told_bytes(graph, costs, precision)
    assert told_bytes(unknown, costs, precision) <= told - least


def test_the_gradient_of_what_a_fixed_operator_made_waits_in_fp32(
    graph: OperatorGraph, costs: DeviceCosts
) -> None:
    problem = build_problem(graph, {"one": costs}, empty_table(graph, costs), ONE)
    index = graph.operator_index["blocks.1.narrow"]
    column = costs.precisions.index(Precision.BF16)
    own = costs.operators.backward_transient_bytes[graph.operators[index].signature, column]
    waiting = problem.devices[0].backward_transient_bytes
    assert waiting is not None
    elements = 256 * 16
    # Beside its own gradient in bf16: the residual's, of what the norm before made.
    assert waiting[index, column] == own + elements * (2 + 4)
