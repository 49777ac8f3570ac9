"""Problems from graphs and costs: every plan costs what the graph and the tables say.

The oracle walks the graph operator by operator under one plan, with the dtype of every tensor
in hand, and knows nothing of rows, columns and precisions that were not chosen.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional

from qsync_opt.build import build_problem, cluster_kind, network_warnings, version_warnings
from qsync_opt.costs import Cluster, ClusterKind, DeviceCosts
from qsync_opt.errors import CostsError, ParameterError
from qsync_opt.gradient_noise import GradientRanges, cast_variance
from qsync_opt.graph import OperatorGraph, Role
from qsync_opt.measure.capture import capture
from qsync_opt.optimize.evaluate import evaluate_device, follower_columns
from qsync_opt.optimize.problem import AllocationProblem
from qsync_opt.optimize.solve import solve
from qsync_opt.precision import HANDED_ON, Precision
from tests.cost_cases import PRECISIONS, SHARED_KINDS, made_up_costs, made_up_table
from tests.unit.measure.nets import Mixed, capture_chain, mixed_batch

ONE = Cluster(kinds=(ClusterKind(name="one"),))


@pytest.fixture(scope="module")
def graph() -> OperatorGraph:
    torch.manual_seed(0)
    return capture(Mixed(), mixed_batch(), functional.cross_entropy, least_coverage=0.0)


@pytest.fixture(scope="module")
def costs(graph: OperatorGraph) -> DeviceCosts:
    return made_up_costs(graph)


@pytest.fixture(scope="module")
def problem(graph: OperatorGraph, costs: DeviceCosts) -> AllocationProblem:
    return build_problem(graph, {"one": costs}, made_up_table(graph), ONE)


def random_columns(problem: AllocationProblem, seed: int) -> np.ndarray:
    generator = random.Random(seed)
    has = problem.devices[0].available
    columns = np.array([generator.choice(np.flatnonzero(row).tolist()) for row in has])
    for group in problem.groups:
        members = [problem.operator_index[name] for name in group]
        columns[members] = columns[members[0]]
    return follower_columns(problem, columns)


def oracle_s(graph: OperatorGraph, costs: DeviceCosts, columns: np.ndarray) -> float:
    """Forward and backward of one plan, from the graph alone."""
    total = 0.0
    chosen = [PRECISIONS[column] for column in columns]
    table, casts = costs.operators, costs.casts
    for index, row in enumerate(graph.operators):
        total += table.forward_s[row.signature, columns[index]]
        total += table.backward_s[row.signature, columns[index]]
    for tensor in graph.tensors:
        if tensor.dtype != "float32":
            continue
        size = math.prod(tensor.shape)
        handed = Precision.FP32
        if tensor.producer is not None:
            handed = costs.handed_on(chosen[tensor.producer])
        if tensor.producer is not None or tensor.parameter is not None:
            total += max(0, tensor.gradients - 1) * casts.addition(size, handed)
        if tensor.parameter is not None:
            continue
        made: set[tuple[str, Precision]] = set()
        for consumer in tensor.consumers:
            row, precision = graph.operators[consumer], chosen[consumer]
            if row.role is Role.ADJUSTABLE and row.kind in SHARED_KINDS:
                if (row.kind, precision) not in made:
                    made.add((row.kind, precision))
                    source = HANDED_ON.index(handed)
                    total += table.input_cast_s[row.signature, columns[consumer], source]
            elif tensor.producer is not None and precision is not Precision.INT8:
                total += casts.cast(size, handed, precision)
            place = row.inputs.index(graph.tensors.index(tensor))
            wanted = graph.signature_of(consumer).operands[place].requires_grad
            if tensor.producer is not None and row.differentiable and wanted:
                total += casts.cast(size, costs.handed_on(precision), handed)
    return total


def oracle_saved_bytes(graph: OperatorGraph, costs: DeviceCosts, columns: np.ndarray) -> int:
    """What one plan keeps for backward: each tensor once per dtype, and what is inside."""
    copies: Counter[tuple[int, str]] = Counter()
    for index, saved in enumerate(graph.saved):
        for saver in saved.savers if saved.tensor is not None else ():
            dtype = PRECISIONS[columns[saver]].storage
            if not saved.follows_precision:
                dtype = Precision.FP32
            copies[index, str(dtype)] = saved.bytes_at(dtype)
    inside = sum(
        int(costs.operators.own_saved_bytes[row.signature, columns[index]])
        for index, row in enumerate(graph.operators)
    )
    return sum(copies.values()) + inside


@pytest.mark.parametrize("seed", range(10))
def test_every_plan_takes_what_its_operators_and_casts_take(
    graph: OperatorGraph, costs: DeviceCosts, problem: AllocationProblem, seed: int
) -> None:
    columns = random_columns(problem, seed)
    told = evaluate_device(problem, problem.devices[0], columns)
    expected = oracle_s(graph, costs, columns) + costs.optimizer.step_s
    assert told.compute_s == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("seed", range(10))
def test_every_plan_keeps_what_its_savers_ask_for(
    graph: OperatorGraph, costs: DeviceCosts, problem: AllocationProblem, seed: int
) -> None:
    columns = random_columns(problem, seed)
    told = evaluate_device(problem, problem.devices[0], columns)
    assert told.saved_bytes == oracle_saved_bytes(graph, costs, columns)


def test_each_copy_is_rounded_as_the_allocator_rounds(graph: OperatorGraph) -> None:
    rounded = build_problem(
        graph, {"one": made_up_costs(graph, cuda=True)}, made_up_table(graph), ONE
    )
    assert not (rounded.devices[0].saved.size_bytes % 512).any()


def test_operators_keep_their_names_buckets_and_followers(
    graph: OperatorGraph, costs: DeviceCosts, problem: AllocationProblem
) -> None:
    for index, row in enumerate(graph.operators):
        operator = problem.operators[index]
        assert (operator.name, operator.follows) == (row.name, row.follows)
        names = {graph.parameters[i].name for i in graph.completes[index]}
        buckets = {k for k, b in enumerate(costs.buckets) if names & set(b.parameters)}
        assert operator.bucket == min(buckets, default=None)
        options = problem.devices[0].available[index]
        assert options.sum() == 1 or row.role is not Role.FIXED


def test_fixed_memory_is_counted_and_the_context_is_not_the_budgets(
    graph: OperatorGraph, costs: DeviceCosts, problem: AllocationProblem
) -> None:
    memory = costs.memory
    assert problem.devices[0].fixed_bytes == 400 + 400 + 800 + 8 + 16
    assert problem.devices[0].memory_bytes == memory.device_bytes - memory.context_bytes


def test_what_operators_do_not_explain_of_a_cpu_step_lies_between_them(
    graph: OperatorGraph,
) -> None:
    costs = made_up_costs(graph, steps=True)
    problem = build_problem(graph, {"one": costs}, made_up_table(graph), ONE)
    told = evaluate_device(
        problem, problem.devices[0], np.zeros(len(problem.operators), dtype=np.int64)
    )
    step = costs.step_of[Precision.FP32]
    assert told.compute_s - costs.optimizer.step_s == pytest.approx(
        step.forward_s + step.backward_s
    )


def test_several_workers_copy_gradients_into_buckets_and_reduce_them(
    graph: OperatorGraph, costs: DeviceCosts, problem: AllocationProblem
) -> None:
    cluster = Cluster(kinds=(ClusterKind(name="one", workers=2),))
    two = build_problem(graph, {"one": costs}, made_up_table(graph), cluster)
    copies = sum(costs.casts.copy(graph.parameters[i].elements) for i in graph.gradient_order)
    columns = np.zeros(len(problem.operators), dtype=np.int64)
    before = evaluate_device(problem, problem.devices[0], columns).compute_s
    after = evaluate_device(two, two.devices[0], columns).compute_s
    assert after - before == pytest.approx(copies)
    assert [bucket.all_reduce_s for bucket in problem.buckets] == [0.0, 0.0]
    assert [bucket.all_reduce_s for bucket in two.buckets] == pytest.approx([2e-4, 1e-4])


def test_unequal_kinds_make_a_problem_that_is_solved(graph: OperatorGraph) -> None:
    costs = {"weak": made_up_costs(graph, 1), "strong": made_up_costs(graph, 2)}
    kinds = (
        ClusterKind(name="weak", batch_share=0.25),
        ClusterKind(name="strong", batch_share=0.75),
    )
    result = solve(build_problem(graph, costs, made_up_table(graph), Cluster(kinds=kinds)))
    assert result.plan is not None
    assert set(result.plan.devices) == {"weak", "strong"}


def test_tables_can_differ_from_kind_to_kind(graph: OperatorGraph) -> None:
    costs = {name: made_up_costs(graph) for name in ("a", "b")}
    cluster = Cluster(kinds=tuple(ClusterKind(name=name) for name in costs))
    tables = {"a": made_up_table(graph, 1), "b": made_up_table(graph, 2)}
    problem = build_problem(graph, costs, tables, cluster)
    for device in problem.devices:
        expected = np.where(device.available, tables[device.name].values, 0.0)
        np.testing.assert_array_equal(device.perturbation, expected)


def test_buckets_may_be_sent_at_other_bits(graph: OperatorGraph) -> None:
    costs = {name: made_up_costs(graph, seed) for seed, name in enumerate(("a", "b"))}
    tables = {name: made_up_table(graph, seed) for seed, name in enumerate(("a", "b"))}
    shares = {"a": 0.3, "b": 0.35}
    workers = {"a": 1, "b": 2}
    reduce = costs["a"].all_reduce
    assert reduce is not None
    cluster = Cluster(
        kinds=tuple(
            ClusterKind(name=name, workers=workers[name], batch_share=shares[name])
            for name in costs
        ),
        all_reduce=replace(reduce, ranks=3),
    )
    problem = build_problem(graph, costs, tables, cluster, bits=(4, 16, 8))
    plain = build_problem(graph, costs, tables, cluster)
    assert [replace(bucket, codes=()) for bucket in problem.buckets] == list(plain.buckets)
    assert problem.sha256 != plain.sha256
    for bucket, live in zip(problem.buckets, costs["a"].buckets, strict=True):
        assert [code.bits for code in bucket.codes] == [16, 8, 4]
        own = {"ranges": 0.0, "casts": 0.0}
        mean = {"ranges": 0.0, "casts": 0.0}
        for name, table in tables.items():
            found = table.gradients
            assert found is not None
            for row, parameter in enumerate(found.parameters):
                if parameter not in live.parameters:
                    continue
                for what in own:
                    weight = workers[name] * shares[name]
                    own[what] += weight * shares[name] * getattr(found, f"own_{what}")[row]
                    mean[what] += weight * getattr(found, f"mean_{what}")[row]
        expected = {
            16: cast_variance(3, own["casts"], mean["casts"]),
            8: (own["ranges"] + mean["ranges"]) / (6 * 255**2),
            4: (own["ranges"] + mean["ranges"]) / (6 * 15**2),
        }
        for code in bucket.codes:
            assert code.perturbation == pytest.approx(expected[code.bits], rel=1e-12)
            assert code.all_reduce_s == reduce.time(live.size_bytes, code.bits)


def test_other_bits_are_refused_where_something_is_missing(
    graph: OperatorGraph, costs: DeviceCosts
) -> None:
    table = made_up_table(graph)
    two = Cluster(kinds=(ClusterKind(name="one", workers=2),))
    assert table.gradients is not None
    assert costs.all_reduce is not None
    given = {"one": costs}
    with pytest.raises(CostsError, match=r"all_reduce\.codes.*got 6\. Measure.*--codes 6"):
        build_problem(graph, given, table, two, bits=(8, 6))
    with pytest.raises(ParameterError, match="bits: must be fewer than 32"):
        build_problem(graph, given, table, two, bits=(32, 8))
    for method in ("random", "variance_published"):  # of other units than what bits add
        with pytest.raises(ParameterError, match="perturbation of one: must be of variance or"):
            build_problem(graph, given, replace(table, method=method), two, bits=(8,))
    build_problem(graph, given, replace(table, method="measured"), two, bits=(8,))
    bare = replace(table, gradients=None)
    with pytest.raises(ParameterError, match="perturbation of one.*Compute it with --gradients"):
        build_problem(graph, given, bare, two, bits=(8,))
    part = GradientRanges(
        parameters=table.gradients.parameters[1:],
        own_ranges=table.gradients.own_ranges[1:],
        mean_ranges=table.gradients.mean_ranges[1:],
        own_casts=table.gradients.own_casts[1:],
        mean_casts=table.gradients.mean_casts[1:],
    )
    with pytest.raises(ParameterError, match=f"got '{table.gradients.parameters[0]}'"):
        build_problem(graph, given, replace(table, gradients=part), two, bits=(8,))
    # A single worker sends nothing.
    alone = build_problem(graph, given, bare, ONE, bits=(8,))
    assert not alone.has_codes


def test_an_infinite_perturbation_forbids_the_precision(
    graph: OperatorGraph, costs: DeviceCosts, problem: AllocationProblem
) -> None:
    index = graph.adjustable[0]
    table = made_up_table(graph)
    values = table.values.copy()
    values[index, 1] = np.inf
    built = build_problem(graph, {"one": costs}, replace(table, values=values), ONE)
    assert problem.devices[0].available[index, 1]
    assert not built.devices[0].available[index, 1]


def test_costs_of_another_graph_are_refused(graph: OperatorGraph, costs: DeviceCosts) -> None:
    other = replace(costs, graph_sha256="0" * 64)
    with pytest.raises(CostsError, match=r"costs\.one\.graph_sha256.*Measure with this graph"):
        build_problem(graph, {"one": other}, made_up_table(graph), ONE)


def test_a_table_for_another_graph_is_refused(graph: OperatorGraph, costs: DeviceCosts) -> None:
    with pytest.raises(ParameterError, match="perturbation of one: must be for the graph"):
        build_problem(graph, {"one": costs}, made_up_table(capture_chain()), ONE)
    table = made_up_table(graph)
    less = replace(table, operators=table.operators[1:], values=table.values[1:])
    rule = f"every operator of the graph .{re.escape(table.operators[0])} is missing"
    with pytest.raises(ParameterError, match=rule):
        build_problem(graph, {"one": costs}, less, ONE)


def test_missing_pieces_are_named(graph: OperatorGraph, costs: DeviceCosts) -> None:
    table = made_up_table(graph)
    with pytest.raises(CostsError, match="must have every kind"):
        build_problem(graph, {}, table, ONE)
    with pytest.raises(CostsError, match=r"costs\.buckets"):
        build_problem(graph, {"one": replace(costs, buckets=())}, table, ONE)
    three = Cluster(kinds=(ClusterKind(name="one", workers=3),))
    with pytest.raises(CostsError, match="measured on a group of 3 ranks"):
        build_problem(graph, {"one": costs}, table, three)
    with pytest.raises(ParameterError, match="precisions"):
        build_problem(graph, {"one": costs}, table, ONE, precisions=[Precision.FP8])


def test_other_versions_are_a_warning(costs: DeviceCosts) -> None:
    older = replace(costs, provenance=replace(costs.provenance, versions={"torch": "2.9.0"}))
    assert version_warnings({"a": costs, "b": costs}) == ()
    (warning,) = version_warnings({"a": costs, "b": older})
    assert "torch" in warning
    assert "2.9.0" in warning


def test_times_of_another_group_are_a_warning(costs: DeviceCosts) -> None:
    reduce = costs.all_reduce
    assert reduce is not None
    jobs = {
        n: Cluster(kinds=(ClusterKind(name="a", workers=n),), all_reduce=reduce) for n in (1, 5)
    }
    (warning,) = network_warnings(jobs[5])
    assert f"measured on {reduce.ranks} ranks" in warning
    assert network_warnings(jobs[1]) == ()
    assert network_warnings(replace(jobs[5], all_reduce=replace(reduce, ranks=5))) == ()
    assert network_warnings(replace(jobs[5], all_reduce=None)) == ()


def test_settings_of_a_kind() -> None:
    kind = cluster_kind("weak", workers="2", share="0.25", memory_gb="1.5")
    expected = ClusterKind(name="weak", workers=2, batch_share=0.25, memory_bytes=1_500_000_000)
    assert kind == expected
    for wrong in ({"worker": "2"}, {"workers": "two"}):
        with pytest.raises(ParameterError, match="kind"):
            cluster_kind("weak", **wrong)
