"""Laws that hold for every problem and plan, whatever the numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from qsync_opt.optimize.choices import movable
from qsync_opt.optimize.evaluate import Evaluation, evaluate_columns, evaluate_device
from qsync_opt.optimize.generate import generate_problem
from qsync_opt.optimize.problem import AllocationProblem, DeviceKind
from qsync_opt.optimize.state import PlanState, Undo
from tests.tiny_problems import random_column, tiny_problem

#: Sums in another order differ by this much; every law below is about more than that.
ROUNDING = 1e-12

seeds = st.integers(min_value=0, max_value=2**32 - 1)


def plan_for(problem: AllocationProblem, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [random_column(problem, device, rng) for device in problem.devices]


def changed(problem: AllocationProblem, index: int, **fields: object) -> AllocationProblem:
    devices = list(problem.devices)
    devices[index] = replace(devices[index], **fields)  # type: ignore[arg-type]
    return replace(problem, devices=tuple(devices))


def times(evaluation: Evaluation) -> list[float]:
    result = [evaluation.iteration_time_s]
    for part in evaluation.devices.values():
        result += [part.iteration_time_s, part.compute_s, *part.ready_s]
    return result


@given(seed=seeds, slower_s=st.floats(min_value=0, max_value=1e3), data=st.data())
@settings(max_examples=80)
def test_slowing_anything_never_shortens_an_iteration(
    seed: int, slower_s: float, data: st.DataObject
) -> None:
    problem = tiny_problem(seed)
    columns = plan_for(problem, seed)
    index = data.draw(st.integers(0, len(problem.devices) - 1), label="kind")
    device = problem.devices[index]
    row = data.draw(st.integers(0, len(problem.operators) - 1), label="operator")
    field = data.draw(st.sampled_from(["forward_s", "backward_s"]), label="field")
    table = getattr(device, field).copy()
    table[row, columns[index][row]] += slower_s
    slower = changed(problem, index, **{field: table})
    before = times(evaluate_columns(problem, columns, None))
    after = times(evaluate_columns(slower, columns, None))
    for old, new in zip(before, after, strict=True):
        assert new >= old * (1 - ROUNDING)
        assert new <= (old + slower_s) * (1 + ROUNDING)


@given(seed=seeds, slower_s=st.floats(min_value=0, max_value=1e3), data=st.data())
@settings(max_examples=60)
def test_slowing_an_all_reduce_delays_the_end_and_no_gradient(
    seed: int, slower_s: float, data: st.DataObject
) -> None:
    problem = tiny_problem(seed)
    if not problem.buckets:
        return
    columns = plan_for(problem, seed)
    buckets = list(problem.buckets)
    k = data.draw(st.integers(0, len(buckets) - 1), label="bucket")
    buckets[k] = replace(buckets[k], all_reduce_s=buckets[k].all_reduce_s + slower_s)
    before = evaluate_columns(problem, columns, None)
    after = evaluate_columns(replace(problem, buckets=tuple(buckets)), columns, None)
    assert after.iteration_time_s >= before.iteration_time_s * (1 - ROUNDING)
    assert after.iteration_time_s <= (before.iteration_time_s + slower_s) * (1 + ROUNDING)
    for name, part in after.devices.items():
        assert part.ready_s == before.devices[name].ready_s


@given(seed=seeds, more_bytes=st.integers(0, 2**40), slack=st.floats(0, 10))
@settings(max_examples=80)
def test_more_memory_or_time_never_makes_a_feasible_plan_infeasible(
    seed: int, more_bytes: int, slack: float
) -> None:
    problem = tiny_problem(seed)
    columns = plan_for(problem, seed)
    # A deadline and budgets that the plan meets exactly, so that the law says something.
    tight = evaluate_columns(problem, columns, None)
    for index, device in enumerate(problem.devices):
        peak = tight.devices[device.name].peak_memory_bytes
        problem = changed(problem, index, memory_bytes=peak, pins={})
    problem = replace(problem, groups=())
    deadline_s = max(tight.iteration_time_s, 1e-9)
    assert evaluate_columns(problem, columns, deadline_s).feasible
    for index, device in enumerate(problem.devices):
        problem = changed(problem, index, memory_bytes=device.memory_bytes)
        larger = tight.devices[device.name].peak_memory_bytes + more_bytes
        problem = changed(problem, index, memory_bytes=larger)
    assert evaluate_columns(problem, columns, deadline_s * (1 + slack)).feasible


@given(seed=seeds, power=st.integers(-9, 9))
@settings(max_examples=60)
def test_the_unit_of_time_only_scales_the_times(seed: int, power: int) -> None:
    problem = tiny_problem(seed)
    columns = plan_for(problem, seed)
    factor = 10.0**power

    def scaled(device: DeviceKind) -> DeviceKind:
        tensors = device.tensors
        return replace(
            device,
            optimizer_s=device.optimizer_s * factor,
            forward_s=device.forward_s * factor,
            backward_s=device.backward_s * factor,
            tensors=replace(
                tensors,
                forward_s=tensors.forward_s * factor,
                backward_s=tensors.backward_s * factor,
            ),
        )

    other = replace(
        problem,
        devices=tuple(scaled(device) for device in problem.devices),
        buckets=tuple(replace(b, all_reduce_s=b.all_reduce_s * factor) for b in problem.buckets),
    )
    assert problem.deadline_s is not None
    before = evaluate_columns(problem, columns, problem.deadline_s)
    after = evaluate_columns(other, columns, problem.deadline_s * factor)
    for old, new in zip(times(before), times(after), strict=True):
        assert math.isclose(new, old * factor, rel_tol=ROUNDING)
    assert after.peak_memory_bytes == before.peak_memory_bytes
    assert after.perturbation == before.perturbation
    for device, twin, column in zip(problem.devices, other.devices, columns, strict=True):
        state, twin_state = PlanState(problem, device, column), PlanState(other, twin, column)
        time_s = twin_state.iteration_time_s
        assert math.isclose(time_s, state.iteration_time_s * factor, rel_tol=ROUNDING)


@given(seed=seeds, workers=st.integers(1, 64))
@settings(max_examples=60)
def test_more_workers_of_a_kind_change_the_objective_and_no_time(seed: int, workers: int) -> None:
    """The same batch shared by n workers of one kind: n (1/n)^2 of its perturbation."""
    problem = tiny_problem(seed, kinds=1)
    (device,) = problem.devices
    columns = plan_for(problem, seed)
    problem = changed(problem, 0, workers=workers, batch_share=1 / workers)
    got = evaluate_columns(problem, columns, None)
    part = evaluate_device(problem, device, columns[0])
    assert math.isclose(got.iteration_time_s, part.iteration_time_s, rel_tol=ROUNDING)
    assert got.devices[device.name] == part
    assert math.isclose(got.perturbation, part.perturbation / workers, rel_tol=ROUNDING)


@given(seed=st.integers(0, 10**6), operators=st.integers(1, 40), precisions=st.integers(1, 6))
@settings(max_examples=40)
def test_all_fp32_perturbs_nothing_and_anything_else_no_less(
    seed: int, operators: int, precisions: int
) -> None:
    problem = generate_problem(operators=operators, precisions=precisions, seed=seed)
    full = [np.zeros(operators, dtype=np.int64) for _ in problem.devices]
    got = evaluate_columns(problem, full, None)
    assert got.perturbation == 0
    assert got.feasible or {v.resource for v in got.violations} <= {"memory", "deadline"}
    assert evaluate_columns(problem, plan_for(problem, seed), None).perturbation >= 0


class MovesAndUndos(RuleBasedStateMachine):
    """`PlanState` under any sequence of moves, undos and loads is what `evaluate` says."""

    @initialize(seed=seeds)
    def build(self, seed: int) -> None:
        self.problem = tiny_problem(seed, kinds=1)
        (self.device,) = self.problem.devices
        self.choices = movable(self.problem, self.device)
        column = plan_for(self.problem, seed)[0]
        self.state = PlanState(self.problem, self.device, column)
        self.history: list[tuple[np.ndarray, Undo]] = []

    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        choice = data.draw(st.sampled_from(self.choices))
        column = data.draw(st.sampled_from(choice.columns))
        before = self.state.columns()
        self.history.append((before, self.state.move(choice.operators, column)))

    @precondition(lambda self: self.history)
    @rule()
    def undo(self) -> None:
        before, moved = self.history.pop()
        self.state.undo(moved)
        np.testing.assert_array_equal(self.state.columns(), before)

    @rule(seed=seeds)
    def load(self, seed: int) -> None:
        self.state.load(plan_for(self.problem, seed)[0])
        self.history.clear()

    @invariant()
    def agrees(self) -> None:
        part = evaluate_device(self.problem, self.device, self.state.columns())
        assert self.state.peak_memory_bytes == part.peak_memory_bytes
        assert math.isclose(self.state.iteration_time_s, part.iteration_time_s, rel_tol=ROUNDING)
        assert math.isclose(self.state.perturbation, part.perturbation, rel_tol=ROUNDING)


TestMovesAndUndos = MovesAndUndos.TestCase
TestMovesAndUndos.settings = settings(max_examples=40, stateful_step_count=20)
