"""`evaluate` against a second reading of the design's section 4, and against sums done by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from qsync_opt.errors import ParameterError, PlanError
from qsync_opt.optimize.evaluate import (
    TIME_TOLERANCE,
    evaluate,
    evaluate_columns,
    evaluate_device,
    first_operators,
    follower_columns,
    plan_columns,
    plan_from_columns,
    recurrence_s,
)
from qsync_opt.optimize.problem import (
    AllocationProblem,
    Bucket,
    CastTensors,
    DeviceKind,
    Operator,
    SavedTensors,
)
from qsync_opt.plan import PrecisionPlan
from qsync_opt.precision import Precision
from tests.tiny_problems import random_column, tiny_problem

FP32, BF16, INT8 = Precision.FP32, Precision.BF16, Precision.INT8


# -- the oracle: plain loops, exact fractions ---------------------------------------------------


class NaiveKind:
    """One rank's step, walked through event by event."""

    def __init__(self, problem: AllocationProblem, device: DeviceKind, column: list[int]) -> None:
        self.count = len(problem.operators)
        self.problem, self.device, self.column = problem, device, column
        self.perturbation = sum(
            Fraction(float(device.perturbation[o, column[o]])) for o in range(self.count)
        )
        self._walk()
        self.peak_bytes = max(self._held(i) for i in range(2 * self.count))

    def _casts(self, table: np.ndarray, tensor: int) -> Fraction:
        """Every (p, q) of one tensor once."""
        device, column = self.device, self.column
        source = column[int(device.tensors.producer[tensor])]
        targets = {column[v] for v in device.tensors.consumers_of(tensor).tolist()}
        return sum((Fraction(float(table[tensor, source, q])) for q in targets), Fraction(0))

    def _walk(self) -> None:
        device, tensors = self.device, self.device.tensors
        clock = Fraction(device.optimizer_s)
        for o in range(self.count):
            clock += Fraction(float(device.forward_s[o, self.column[o]]))
        for tensor in range(len(tensors)):
            clock += self._casts(tensors.forward_s, tensor)
        ready = [clock] * len(self.problem.buckets)
        for o in reversed(range(self.count)):
            for tensor in range(len(tensors)):
                if tensors.producer[tensor] == o:
                    clock += self._casts(tensors.backward_s, tensor)
            clock += Fraction(float(device.backward_s[o, self.column[o]]))
            bucket = self.problem.operators[o].bucket
            if bucket is not None:
                ready[bucket] = clock
        self.ready, self.compute = ready, clock

    def _held(self, event: int) -> int:
        """Bytes held during event i: the forwards in order, then the backwards in reverse."""
        device, saved = self.device, self.device.saved
        running = event if event < self.count else 2 * self.count - 1 - event
        transient = (
            device.forward_transient_bytes
            if event < self.count
            else device.backward_transient_bytes
        )
        assert transient is not None
        total = device.fixed_bytes + int(transient[running, self.column[running]])
        for tensor in range(len(saved)):
            savers = saved.savers_of(tensor).tolist()
            first = min(savers)
            if first <= event <= 2 * self.count - 1 - first:
                copies = {self.problem.storage[self.column[o]] for o in savers}
                total += sum(int(saved.size_bytes[tensor, saved.dtypes.index(s)]) for s in copies)
        return total


def naive_time(problem: AllocationProblem, kinds: list[NaiveKind]) -> Fraction:
    """The event recurrence over every rank and bucket, and no rank's own work cut short."""
    ranks = [kind for kind in kinds for _ in range(kind.device.workers)]
    end = Fraction(0)
    for k, bucket in enumerate(problem.buckets):
        for rank in ranks:
            end = max(end, rank.ready[k])
        end += Fraction(bucket.all_reduce_s)
    return max([end, *(rank.compute for rank in ranks)])


def random_plans(problem: AllocationProblem, seed: int, count: int) -> list[list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [[random_column(problem, d, rng) for d in problem.devices] for _ in range(count)]


@pytest.mark.parametrize("whole", [True, False])
def test_evaluate_agrees_with_the_walk_through_the_step(whole: bool) -> None:
    # Whole numbers of seconds sum exactly in any order: then the times must be equal.
    tolerance = 0.0 if whole else 1e-12
    for seed in range(150):
        problem = tiny_problem(seed, whole=whole)
        for columns in random_plans(problem, seed, 3):
            kinds = [
                NaiveKind(problem, device, column.tolist())
                for device, column in zip(problem.devices, columns, strict=True)
            ]
            got = evaluate_columns(problem, columns, problem.deadline_s)
            expected = float(naive_time(problem, kinds))
            assert math.isclose(got.iteration_time_s, expected, rel_tol=tolerance)
            objective = sum(
                kind.device.workers * Fraction(kind.device.batch_share) ** 2 * kind.perturbation
                for kind in kinds
            )
            assert math.isclose(got.perturbation, float(objective), rel_tol=1e-12)
            for kind in kinds:
                part = got.devices[kind.device.name]
                assert part.peak_memory_bytes == kind.peak_bytes
                assert math.isclose(part.compute_s, float(kind.compute), rel_tol=tolerance)
                assert math.isclose(part.perturbation, float(kind.perturbation), rel_tol=tolerance)
                for mine, ready in zip(part.ready_s, kind.ready, strict=True):
                    assert math.isclose(mine, float(ready), rel_tol=tolerance)


def test_the_recurrence_over_all_kinds_is_the_slowest_kind_alone() -> None:
    """T(x) = max_r T_r(x_r), and T_r is the unrolled form (design, section 4, item 6)."""
    several = 0
    for seed in range(250):
        problem = tiny_problem(seed, whole=True)
        tails = [
            sum(bucket.all_reduce_s for bucket in problem.buckets[k:])
            for k in range(len(problem.buckets))
        ]
        several += len(problem.devices) > 1 and len(problem.buckets) > 1
        for columns in random_plans(problem, seed, 8):
            got = evaluate_columns(problem, columns, None)
            for part in got.devices.values():
                ends = [ready + tail for ready, tail in zip(part.ready_s, tails, strict=True)]
                assert part.iteration_time_s == max([part.compute_s, *ends])
            assert got.iteration_time_s == max(p.iteration_time_s for p in got.devices.values())
    assert several > 60  # the cases meant are among those drawn


def test_feasible_means_that_no_kind_breaks_a_limit() -> None:
    both = {True: 0, False: 0}
    for seed in range(200):
        problem = tiny_problem(seed)
        assert problem.deadline_s is not None
        for columns in random_plans(problem, seed, 3):
            got = evaluate_columns(problem, columns, problem.deadline_s)
            limits_hold = all(
                got.devices[d.name].peak_memory_bytes <= d.memory_bytes
                and got.devices[d.name].iteration_time_s
                <= problem.deadline_s * (1 + TIME_TOLERANCE)
                for d in problem.devices
            )
            rules_hold = all(
                _rules_hold(problem, device, column.tolist())
                for device, column in zip(problem.devices, columns, strict=True)
            )
            assert got.feasible == (limits_hold and rules_hold) == (not got.violations)
            both[got.feasible] += 1
    assert min(both.values()) > 50


def _rules_hold(problem: AllocationProblem, device: DeviceKind, column: list[int]) -> bool:
    picked = {o.name: problem.precisions[column[i]] for i, o in enumerate(problem.operators)}
    return all(picked[name] is precision for name, precision in device.pins.items()) and all(
        len({picked[name] for name in group}) == 1 for group in problem.groups
    )


# -- by hand ------------------------------------------------------------------------------------


def make_problem(
    count: int,
    *,
    forward: float = 1.0,
    backward: float = 2.0,
    tensors: CastTensors | None = None,
    saved: SavedTensors | None = None,
    transient: list[list[int]] | None = None,
    buckets: list[float] | None = None,
    bucket_of: dict[int, int] | None = None,
    follows: dict[int, tuple[int, ...]] | None = None,
    memory: int = 2**53,
    fixed: int = 0,
    pins: dict[str, Precision] | None = None,
    groups: tuple[tuple[str, ...], ...] = (),
) -> AllocationProblem:
    """One kind, fp32, bf16 and int8, every operator with the same times."""
    shape = (count, 3)
    zero = np.zeros((0, 3, 3))
    kind = DeviceKind(
        name="only",
        workers=1,
        batch_share=1.0,
        memory_bytes=memory,
        fixed_bytes=fixed,
        optimizer_s=0.5,
        available=np.ones(shape, dtype=bool),
        forward_s=np.full(shape, forward),
        backward_s=np.full(shape, backward),
        perturbation=np.tile([0.0, 1.0, 4.0], (count, 1)),
        forward_transient_bytes=transient,  # type: ignore[arg-type]  # converted
        backward_transient_bytes=None,
        tensors=tensors
        or CastTensors.from_rows(producer=[], consumers=[], forward_s=zero, backward_s=zero),
        saved=saved or SavedTensors.from_rows(savers=[], size_bytes=[], dtypes=(FP32, BF16, INT8)),
        pins=pins or {},
    )
    return AllocationProblem(
        name="hand",
        provenance="by hand",
        precisions=(FP32, BF16, INT8),
        storage=(FP32, BF16, INT8),
        output=(FP32, BF16, BF16),
        operators=tuple(
            Operator(
                name=f"op{o}",
                kind="any",
                bucket=(bucket_of or {}).get(o),
                follows=(follows or {}).get(o, ()),
            )
            for o in range(count)
        ),
        buckets=tuple(Bucket(all_reduce_s=s, size_bytes=1) for s in buckets or []),
        devices=(kind,),
        groups=groups,
    )


def part_of(problem: AllocationProblem, *column: int):  # type: ignore[no-untyped-def]
    return evaluate_device(problem, problem.devices[0], np.array(column))


#: Row: the producer's precision, column: a consumer's; every entry tells its casts apart.
CAST_FORWARD = [[0.0, 10.0, 20.0], [30.0, 0.0, 40.0], [50.0, 60.0, 70.0]]
CAST_BACKWARD = [[0.0, 100.0, 200.0], [300.0, 0.0, 400.0], [500.0, 600.0, 700.0]]


@pytest.mark.parametrize(
    ("column", "forward", "backward"),
    [
        ((0, 0, 0), 0.0, 0.0),
        ((0, 1, 0), 10.0, 100.0),
        ((0, 1, 1), 10.0, 100.0),  # two consumers, one cast
        ((0, 1, 2), 30.0, 300.0),  # two consumers, two casts
        ((1, 0, 2), 70.0, 700.0),
        ((2, 2, 2), 70.0, 700.0),  # int8 hands on bf16: quantised again for an int8 reader
        ((2, 1, 0), 110.0, 1100.0),
    ],
)
def test_a_cast_is_paid_once_per_tensor_and_target(
    column: tuple[int, ...], forward: float, backward: float
) -> None:
    tensors = CastTensors.from_rows(
        producer=[0], consumers=[[1, 2]], forward_s=[CAST_FORWARD], backward_s=[CAST_BACKWARD]
    )
    part = part_of(make_problem(3, tensors=tensors), *column)
    assert (part.cast_forward_s, part.cast_backward_s) == (forward, backward)
    assert part.compute_s == 0.5 + 3 * 1.0 + 3 * 2.0 + forward + backward


def test_two_tensors_of_one_producer_are_cast_apart() -> None:
    tensors = CastTensors.from_rows(
        producer=[0, 0],
        consumers=[[1], [2]],
        forward_s=[CAST_FORWARD] * 2,
        backward_s=[CAST_BACKWARD] * 2,
    )
    part = part_of(make_problem(3, tensors=tensors), 0, 1, 1)
    assert (part.cast_forward_s, part.cast_backward_s) == (20.0, 200.0)


def test_a_backward_cast_delays_the_producer_but_not_the_consumer() -> None:
    tensors = CastTensors.from_rows(
        producer=[1], consumers=[[2]], forward_s=[CAST_FORWARD], backward_s=[CAST_BACKWARD]
    )
    problem = make_problem(
        3, tensors=tensors, buckets=[0.25, 0.125, 1000.0], bucket_of={2: 0, 1: 1, 0: 2}
    )
    part = part_of(problem, 0, 0, 1)
    start = 0.5 + 3.0 + 10.0  # optimizer, three forwards, one forward cast
    assert part.ready_s == (start + 2.0, start + 2.0 + 100.0 + 2.0, start + 100.0 + 6.0)
    assert part.iteration_time_s == start + 100.0 + 6.0 + 1000.0


def test_a_bucket_is_ready_after_the_first_of_its_operators() -> None:
    problem = make_problem(4, buckets=[1.0, 1.0, 1.0], bucket_of={3: 0, 1: 0, 2: 1})
    assert first_operators(problem).tolist() == [1, 2, 4]
    part = part_of(problem, 0, 0, 0, 0)
    start = 0.5 + 4.0
    assert part.ready_s == (start + 3 * 2.0, start + 2 * 2.0, start)  # no operator: no wait


def test_an_all_reduce_waits_for_the_one_before_it() -> None:
    problem = make_problem(2, buckets=[5.0, 7.0], bucket_of={1: 0, 0: 1})
    assert recurrence_s(problem, [(10.0, 11.0)]) == 10.0 + 5.0 + 7.0
    assert recurrence_s(problem, [(10.0, 18.0)]) == 18.0 + 7.0
    assert recurrence_s(problem, [(10.0, 11.0), (12.0, 11.0)]) == 12.0 + 5.0 + 7.0


SIZES = {"fp32": 4000, "bf16": 2000, "int8": 1000}


@pytest.mark.parametrize(
    ("column", "kept"),
    [
        ((0, 0), 4000),
        ((0, 1), 6000),  # lowering one of two readers adds a copy
        ((1, 1), 2000),
        ((1, 2), 3000),
        ((2, 2), 1000),
    ],
)
def test_a_saved_tensor_is_kept_once_per_dtype(column: tuple[int, ...], kept: int) -> None:
    saved = SavedTensors.from_rows(
        savers=[[0, 1]], size_bytes=[list(SIZES.values())], dtypes=(FP32, BF16, INT8)
    )
    part = part_of(make_problem(2, saved=saved, fixed=7), *column)
    assert part.saved_bytes == kept
    assert part.peak_memory_bytes == 7 + kept


def test_the_peak_is_where_transient_and_saved_together_are_largest() -> None:
    # Saved from operators 0, 1, 2 on: 100, 110, 111 bytes; transients tilt the balance.
    saved = SavedTensors.from_rows(
        savers=[[0], [1], [2]],
        size_bytes=[[100], [10], [1]],
        dtypes=(FP32,),
    )
    transient = [[0, 0, 0], [50, 12, 12], [48, 48, 13]]
    problem = make_problem(3, saved=None, transient=transient)
    kind = replace(problem.devices[0], saved=saved, available=np.eye(3, dtype=bool)[[0, 0, 0]])
    problem = replace(problem, devices=(kind,))
    part = part_of(problem, 0, 0, 0)
    assert (part.peak_memory_bytes, part.peak_operator) == (160, "op1")
    assert part.saved_bytes == 111


def test_a_tensor_counts_from_its_first_saver_on_whatever_the_order_given() -> None:
    saved = SavedTensors.from_rows(
        savers=[[2, 1]], size_bytes=[[8, 4, 2]], dtypes=(FP32, BF16, INT8)
    )
    transient = [[7, 7, 7], [0, 0, 0], [0, 0, 0]]
    part = part_of(make_problem(3, saved=saved, transient=transient), 0, 0, 0)
    assert (part.peak_memory_bytes, part.peak_operator) == (8, "op1")


def test_followers_take_the_promotion_of_what_is_handed_on() -> None:
    problem = make_problem(5, follows={2: (0, 1), 3: (2,), 4: (2, 0)})

    def followed(first: int, second: int) -> list[int]:
        column = follower_columns(problem, np.array([first, second, 0, 0, 0]))
        return [int(pick) for pick in column[2:]]

    assert followed(1, 1) == [1, 1, 1]
    assert followed(1, 2) == [1, 1, 1]  # int8 hands on bf16
    assert followed(2, 2) == [1, 1, 1]
    assert followed(0, 1) == [0, 0, 0]
    assert followed(1, 0) == [0, 0, 0]  # the last one reads fp32 and bf16


# -- limits and errors --------------------------------------------------------------------------


@pytest.mark.parametrize("peak", [17, 100 * 10**9 + 1, 2**52 + 1])
def test_a_budget_met_exactly_is_feasible_and_one_byte_less_is_not(peak: int) -> None:
    for spare, feasible in ((0, True), (1, True), (-1, False)):
        problem = make_problem(2, fixed=peak, memory=peak + spare)
        got = evaluate_columns(problem, [np.zeros(2, dtype=np.int64)], None)
        assert got.feasible is feasible
        if not feasible:
            (violation,) = got.violations
            assert (violation.device, violation.resource) == ("only", "memory")
            assert (violation.value, violation.limit) == (peak, peak - 1)


def test_a_deadline_met_exactly_is_feasible_and_one_missed_is_named() -> None:
    problem = make_problem(2)
    columns = [np.zeros(2, dtype=np.int64)]
    time_s = evaluate_columns(problem, columns, None).iteration_time_s
    assert evaluate_columns(problem, columns, time_s).feasible
    got = evaluate_columns(problem, columns, time_s * (1 - 3 * TIME_TOLERANCE))
    (violation,) = got.violations
    assert (violation.device, violation.resource, violation.value) == ("only", "deadline", time_s)


def test_broken_rules_are_named() -> None:
    problem = make_problem(4, follows={2: (1,)}, pins={"op0": BF16}, groups=(("op1", "op3"),))
    got = evaluate_columns(problem, [np.array([0, 0, 1, 2])], None)
    found = {(v.resource, v.where, v.value, v.limit) for v in got.violations}
    assert found == {
        ("follower", "op2", "bf16", "fp32"),
        ("pin", "op0", "fp32", "bf16"),
        ("group", "op3", "int8", "fp32 like op1"),
    }
    assert evaluate_columns(problem, [np.array([1, 0, 0, 0])], None).feasible


@pytest.mark.parametrize("deadline_s", [0.0, -1.0, math.nan, math.inf])
def test_a_deadline_must_be_a_positive_number(deadline_s: float) -> None:
    problem = make_problem(1)
    plan = plan_from_columns(problem, [np.zeros(1, dtype=np.int64)])
    with pytest.raises(ParameterError, match="deadline_s: must be a finite number > 0"):
        evaluate(problem, plan, deadline_s=deadline_s)


def test_a_plan_and_its_columns_are_the_same_thing() -> None:
    for seed in range(50):
        problem = tiny_problem(seed)
        (columns,) = random_plans(problem, seed, 1)
        plan = plan_from_columns(problem, columns)
        for mine, other in zip(plan_columns(problem, plan), columns, strict=True):
            np.testing.assert_array_equal(mine, other)
        assert evaluate(problem, plan) == evaluate_columns(problem, columns, problem.deadline_s)


def test_a_plan_that_does_not_fit_is_refused_with_the_place() -> None:
    problem = make_problem(2)
    kind = replace(problem.devices[0], available=np.array([[1, 1, 0], [1, 1, 1]], dtype=bool))
    problem = replace(problem, devices=(kind,))

    def refused(match: str, devices: dict[str, dict[str, Precision]], sha: str) -> None:
        with pytest.raises(PlanError, match=match):
            evaluate(problem, PrecisionPlan(problem=sha, devices=devices))

    good = {"op0": FP32, "op1": FP32}
    refused("problem: must be the hash", {"only": good}, "0" * 64)
    refused("devices: must name exactly", {"other": good}, problem.sha256)
    refused("devices: must name exactly", {"only": good, "more": good}, problem.sha256)
    refused("must list every operator, got \"no 'op1'\"", {"only": {"op0": FP32}}, problem.sha256)
    refused("must name operators of the problem", {"only": good | {"op9": FP32}}, problem.sha256)
    refused("devices.only.op0: must be a prec", {"only": good | {"op0": INT8}}, problem.sha256)
    refused(
        "devices.only.op0: must be a prec", {"only": good | {"op0": Precision.FP8}}, problem.sha256
    )
