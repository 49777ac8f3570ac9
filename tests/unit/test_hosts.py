"""Launch times of operators: as large together as launching whole steps took."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from qsync_opt.costs import DeviceCosts
from qsync_opt.graph import OperatorGraph, Role
from qsync_opt.hosts import host_costs
from qsync_opt.precision import Precision
from tests.cost_cases import PRECISIONS, made_up_costs
from tests.unit.measure.nets import capture_chain

WIDE, HALF = PRECISIONS.index(Precision.FP32), PRECISIONS.index(Precision.BF16)


@pytest.fixture(scope="module")
def graph() -> OperatorGraph:
    return capture_chain()


@pytest.fixture(scope="module")
def costs(graph: OperatorGraph) -> DeviceCosts:
    made = made_up_costs(graph, 3, steps=True, cuda=True)
    hosts = {Precision.FP32: 0.4, Precision.BF16: 0.9, Precision.INT8: 2.0}
    steps = tuple(replace(step, host_s=hosts[step.precision]) for step in made.steps)
    forward_s, backward_s = np.random.default_rng(0).uniform(
        1e-3, 1e-2, (2, *made.operators.forward_s.shape)
    )
    operators = replace(made.operators, forward_host_s=forward_s, backward_host_s=backward_s)
    return replace(made, steps=steps, operators=operators)


def launched(graph: OperatorGraph, costs: DeviceCosts) -> np.ndarray:
    found = host_costs(graph, costs, PRECISIONS)
    return found.forward_s + found.backward_s


def test_a_step_at_one_precision_takes_what_was_measured(
    graph: OperatorGraph, costs: DeviceCosts
) -> None:
    table = launched(graph, costs)
    assert table[:, WIDE].sum() == pytest.approx(0.4)
    fixed = np.array([row.role is Role.FIXED for row in graph.operators])
    assert fixed.any()
    assert not fixed.all()
    mixed = np.where(fixed, table[:, WIDE], table[:, HALF])
    assert mixed.sum() == pytest.approx(0.9)


def test_shares_of_operators_stay(graph: OperatorGraph, costs: DeviceCosts) -> None:
    scaled = launched(graph, costs)
    alone = launched(graph, replace(costs, steps=()))
    rows = [operator.signature for operator in graph.operators]
    for name, column in (("forward_host_s", WIDE), ("forward_host_s", HALF)):
        told = np.nan_to_num(getattr(costs.operators, name))[rows, column]
        found = host_costs(graph, replace(costs, steps=()), PRECISIONS).forward_s[:, column]
        assert found == pytest.approx(told)  # without steps nothing is known but this
    for column in range(len(PRECISIONS)):
        some = alone[:, column] > 0
        ratio = scaled[some, column] / alone[some, column]
        assert ratio == pytest.approx(ratio[0])


def test_a_step_that_says_nothing_changes_nothing(graph: OperatorGraph, costs: DeviceCosts) -> None:
    """On a host that was too quick to be timed there is nothing to scale to."""
    alone = launched(graph, replace(costs, steps=()))
    silent = tuple(replace(step, host_s=0.0) for step in costs.steps[1:])
    for steps in (costs.steps[1:], (costs.steps[0], *silent)):
        table = launched(graph, replace(costs, steps=steps))
        assert table[:, HALF] == pytest.approx(alone[:, HALF])
