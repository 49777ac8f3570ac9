"""Which bits a live bucket is sent at: the plan's, by place and size or by its parameters."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qsync_opt.build import build_problem
from qsync_opt.costs import Cluster, ClusterKind, GradientBucket
from qsync_opt.errors import ParameterError, PlanError
from qsync_opt.optimize.buckets import BucketCode
from qsync_opt.optimize.problem import AllocationProblem
from qsync_opt.plan import PrecisionPlan
from qsync_opt.precision import Precision
from qsync_opt.runtime.agreement import plan_sha256
from qsync_opt.runtime.bucket_bits import PlannedBits, Uniform
from qsync_opt.runtime.communication import communication_at, parse_communication
from qsync_opt.runtime.parameters import TrainParameters
from qsync_opt.runtime.plan_bits import bits_of_job, planned_bits
from tests.cost_cases import made_up_costs, made_up_table
from tests.unit.measure.nets import capture_chain

BITS = PlannedBits(
    bits=(4, 32, 16),
    size_bytes=(100, 200, 300),
    bucket_of={"a": 0, "b": 1, "c": 2, "d": 2, "bias": 0},
)
ONE = TrainParameters(steps=1)


@pytest.mark.parametrize(
    ("sizes", "bits"),
    [
        ({"a": 100}, 4),
        ({"b": 200}, 32),
        ({"c": 100, "d": 200}, 16),
        # A bias on the other side of a border, and one that came from there.
        ({"a": 95}, 4),
        ({"c": 100, "d": 200, "bias": 5}, 16),
    ],
)
def test_a_bucket_that_is_nearly_the_problems_takes_its_bits(
    sizes: dict[str, int], bits: int
) -> None:
    assert BITS.of(sizes) == communication_at(bits)


@pytest.mark.parametrize(
    ("sizes", "bits"),
    [
        ({"a": 50}, 4),
        ({"a": 100, "c": 100}, 16),
        ({"d": 200}, 16),
        ({"c": 100, "d": 200, "a": 100}, 16),
        ({"a": 100, "b": 200}, 32),
        ({"a": 50, "new": 50}, 32),
    ],
)
def test_another_bucket_takes_the_most_bits_of_its_parameters(
    sizes: dict[str, int], bits: int
) -> None:
    assert BITS.of(sizes) == communication_at(bits)


def test_another_plan_has_other_bits_for_the_same_buckets() -> None:
    other = BITS.at((8, 8, 2))
    assert other.of({"c": 100, "d": 200}) == communication_at(2)
    assert BITS.at(()).bits == (32, 32, 32)
    assert other.facts() != BITS.facts()
    with pytest.raises(PlanError, match=r"one entry per bucket \(3\)"):
        BITS.at((8,))
    with pytest.raises(ParameterError, match="must be 2 to 8, 16 or 32"):
        BITS.at((8, 12, 8))


def test_buckets_sent_alike_differ_by_every_option() -> None:
    words = ("g8", "g8e", "g4l", "g4", "bf16", "fp16")
    facts = [tuple(Uniform(communication=parse_communication(w)).facts()) for w in words]
    assert len(set(facts)) == len(words)


def problem_and_plan(bits: tuple[int, ...]) -> tuple[AllocationProblem, PrecisionPlan]:
    graph = capture_chain()
    two = Cluster(kinds=(ClusterKind(name="one", workers=2),))
    costs = {"one": made_up_costs(graph)}
    problem = build_problem(graph, costs, made_up_table(graph), two, bits=(16, 8, 4))
    row = dict.fromkeys((operator.name for operator in graph.operators), Precision.FP32)
    plan = PrecisionPlan(problem=problem.sha256, devices={"one": row}, communication=bits)
    return problem, plan


def test_every_parameter_is_found_in_its_bucket_wherever_buckets_end() -> None:
    graph = capture_chain()
    order = [graph.parameters[index] for index in graph.gradient_order]
    costs, table = made_up_costs(graph), made_up_table(graph)
    two = Cluster(kinds=(ClusterKind(name="one", workers=2),))
    for first in range(1, len(order) - 1):
        for second in range(first + 1, len(order)):
            parts = (order[:first], order[first:second], order[second:])
            buckets = tuple(
                GradientBucket(
                    size_bytes=4 * sum(parameter.elements for parameter in part),
                    parameters=tuple(parameter.name for parameter in part),
                )
                for part in parts
            )
            given = {"one": replace(costs, buckets=buckets)}
            problem = build_problem(graph, given, table, two, bits=(16, 8, 4))
            row = dict.fromkeys((operator.name for operator in graph.operators), Precision.FP32)
            plan = PrecisionPlan(
                problem=problem.sha256, devices={"one": row}, communication=(8, 32, 4)
            )
            found = planned_bits(plan, problem, graph)
            assert found.bits == (8, 32, 4)
            assert found.bucket_of == {
                parameter.name: k for k, part in enumerate(parts) for parameter in part
            }


def test_bits_are_wanted_where_the_plan_has_some_or_may_get_some() -> None:
    graph = capture_chain()
    problem, plan = problem_and_plan((8, 16))
    whole = replace(plan, communication=())
    assert bits_of_job(None, problem, graph, ONE) is None
    assert bits_of_job(plan, problem, graph, ONE) is not None
    for rival in (replace(ONE, uniform=Precision.BF16), replace(ONE, autocast=Precision.BF16)):
        assert bits_of_job(plan, problem, graph, rival) is None
    found = bits_of_job(whole, problem, graph, ONE)
    assert found is not None
    assert found.bits == (32, 32)
    assert bits_of_job(whole, problem, None, ONE) is None
    assert bits_of_job(whole, problem.at_bits(()), graph, ONE) is None
    word = replace(ONE, communication="g8")
    assert bits_of_job(whole, problem, graph, word) is None
    for given, parameters in ((plan, word), (whole, replace(word, refine_interval=3))):
        with pytest.raises(ParameterError, match="communication: must not be given with a plan"):
            bits_of_job(given, problem, graph, parameters)
    with pytest.raises(ParameterError, match="problem: must be given with a plan"):
        bits_of_job(plan, None, graph, ONE)
    with pytest.raises(ParameterError, match="graph: must be given with a plan"):
        bits_of_job(plan, problem, None, ONE)


def test_bits_that_could_not_be_sent_are_refused_before_training() -> None:
    graph = capture_chain()
    problem, plan = problem_and_plan((8, 16))
    with pytest.raises(PlanError, match=r"communication\[0\]: must be bits that the bucket has"):
        planned_bits(replace(plan, communication=(7, 16)), problem, graph)
    code = BucketCode(bits=12, all_reduce_s=1.0, perturbation=0.0)
    first, second = problem.buckets
    odd = replace(problem, buckets=(first, replace(second, codes=(code,))))
    whole = replace(plan, communication=())
    assert bits_of_job(whole, odd, graph, ONE) is not None
    with pytest.raises(ParameterError, match=r"problem\.buckets\[1\]\.codes: must be .*, got 12"):
        bits_of_job(whole, odd, graph, replace(ONE, refine_interval=3))


def test_plans_differ_by_their_bits() -> None:
    _, plan = problem_and_plan((8, 16))
    digests = {plan_sha256(replace(plan, communication=bits)) for bits in ((), (8, 16), (16, 8))}
    assert len(digests) == 3
