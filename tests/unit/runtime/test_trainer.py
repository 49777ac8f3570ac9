"""`train` in one process: what it computes, what it keeps, what it refuses."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from qsync_opt.errors import ParameterError, PlanError, TrainError
from qsync_opt.kernels.rounding import Rounding
from qsync_opt.optimize.generate import generate_problem
from qsync_opt.plan import PrecisionPlan
from qsync_opt.precision import Precision
from qsync_opt.runtime.convert import convert, set_step
from qsync_opt.runtime.layers import Patched
from qsync_opt.runtime.metrics import StepMetrics, read_metrics
from qsync_opt.runtime.parameters import TrainParameters
from qsync_opt.runtime.trainer import TrainProgress, TrainResult, TrainStatus, train

NAMES = ("0", "3")


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def make_batch(rows: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    targets = torch.randint(3, (rows,), generator=generator)
    return torch.randn(rows, 8, generator=generator), targets


def make_plan(precision: Precision = Precision.INT8) -> PrecisionPlan:
    row = dict.fromkeys(NAMES, precision)
    return PrecisionPlan(problem="0" * 64, devices={"weak": row})


def fit(model: nn.Module, steps: int, report: Any = None, **options: Any) -> TrainResult:
    given = {name: options.pop(name) for name in ("plan", "problem", "batches") if name in options}
    return train(
        model,
        make_batch(),
        functional.cross_entropy,
        parameters=TrainParameters(steps=steps, **options),
        kind="weak",
        report=report,
        **given,
    )


def same(first: nn.Module, second: nn.Module) -> bool:
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


class Root(nn.Module):
    """Its value at 0 is a number, and its gradient there is none."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        scale = 0.0 if self.steps > 5 else 1.0
        return x[:, :3] * self.weight + (self.weight * scale).abs().sqrt()


def test_weights_that_are_no_numbers_are_not_kept(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match=r"not finite after step 5: .*checkpoint of step 4"):
        fit(Root(), 6, folder=tmp_path, checkpoint_interval=2)
    names = sorted(path.name for path in tmp_path.glob("step-*"))
    assert [int(name[5:13]) for name in names] == [2, 4]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"uniform": Precision.BF16}, {"uniform": Precision.INT8}),
        ({"uniform": Precision.BF16}, {"autocast": Precision.BF16}),
        ({"uniform": Precision.BF16}, {}),
        ({}, {"uniform": Precision.FP32}),
    ],
)
def test_a_job_goes_on_at_its_own_precisions(
    first: dict[str, Any], second: dict[str, Any], tmp_path: Path
) -> None:
    fit(make_model(), 2, folder=tmp_path, **first)
    with pytest.raises(PlanError, match="must be of the plan that is given"):
        fit(make_model(), 4, folder=tmp_path, **second)
    assert fit(make_model(), 4, folder=tmp_path, **first).first_step == 2


@pytest.mark.parametrize("rounding", Rounding)
def test_it_computes_what_a_loop_by_hand_does(rounding: Rounding) -> None:
    by_hand = make_model()
    convert(by_hand, dict.fromkeys(NAMES, Precision.INT8), rounding=rounding, seed=5, rank=0)
    optimizer = torch.optim.AdamW(by_hand.parameters(), lr=0.01)
    inputs, targets = make_batch()
    losses = []
    for number in range(4):
        optimizer.zero_grad()
        total = 0.0
        for part in range(2):
            set_step(by_hand, 2 * number + part)
            rows = slice(6 * part, 6 * part + 6)
            loss = functional.cross_entropy(by_hand(inputs[rows]).float(), targets[rows]) / 2
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        optimizer.step()
        losses.append(total)
    model = make_model()
    options = {"rounding": rounding, "seed": 5, "learning_rate": 0.01}
    result = fit(model, 4, plan=make_plan(), accumulation=2, batch_size=12, **options)
    assert same(model, by_hand)
    assert [row.loss for row in result.metrics] == pytest.approx(losses)
    assert result.status is TrainStatus.FINISHED


def test_the_model_is_left_without_layers_and_hooks() -> None:
    model = make_model().eval()
    fit(model, 2, plan=make_plan())
    assert not any(isinstance(module, Patched) for module in model.modules())
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    assert not model.training


def test_an_interrupted_job_goes_on_to_the_bit(tmp_path: Path) -> None:
    whole = make_model()
    fit(whole, 6)

    def interrupt(progress: TrainProgress) -> None:
        if progress.metrics.step == 1:
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    first = fit(make_model(), 6, interrupt, folder=tmp_path)
    assert first.status is TrainStatus.INTERRUPTED
    assert signal.getsignal(signal.SIGINT) is before
    parts = make_model()
    rest = fit(parts, 6, folder=tmp_path)
    assert rest.first_step == first.steps == first.checkpoint_step
    assert same(parts, whole)
    assert [row.step for row in read_metrics(tmp_path)[0]] == list(range(6))


def test_a_second_interrupt_ends_a_step_that_does_not_end() -> None:
    def interrupt_twice(progress: TrainProgress) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        fit(make_model(), 6, interrupt_twice)


def test_the_schedule_scales_the_learning_rate() -> None:
    frozen = make_model()
    before = make_model()
    optimizer = lambda trained: torch.optim.SGD(trained, lr=0.1)  # noqa: E731
    fit(frozen, 3, optimizer=optimizer, schedule=lambda step: 0.0)
    for first, second in zip(frozen.parameters(), before.parameters(), strict=True):
        assert torch.equal(first, second)
    halved, slow = make_model(), make_model()
    fit(halved, 3, optimizer=optimizer, schedule=lambda step: 0.5)
    fit(slow, 3, optimizer=lambda trained: torch.optim.SGD(trained, lr=0.05))
    assert same(halved, slow)


@pytest.mark.parametrize("rival", ["uniform", "autocast"])
def test_rivals_lower_what_the_plan_does_not(rival: str) -> None:
    seen: list[torch.dtype] = []
    model = make_model()
    model[3].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    fit(model, 2, plan=make_plan(Precision.FP32), **{rival: Precision.BF16})
    assert set(seen) == {torch.bfloat16}
    plain = make_model()
    fit(plain, 2, plan=make_plan(Precision.FP32))
    assert not same(model, plain)


def test_data_is_asked_for_by_step_and_rows() -> None:
    asked: list[tuple[int, range]] = []

    def batches(step: int, rows: range) -> tuple[Tensor, Tensor]:
        asked.append((step, rows))
        return make_batch(len(rows))

    fit(make_model(), 2, batches=batches, batch_size=10, accumulation=2)
    assert asked == [(step, rows) for step in (0, 1) for rows in (range(5), range(5, 10))]


def test_a_plan_of_another_problem_is_refused() -> None:
    problem = generate_problem(operators=4, precisions=2, devices=1, seed=0)
    model = make_model()
    with pytest.raises(PlanError, match="must be of the problem"):
        fit(model, 2, plan=make_plan(), problem=problem)
    assert type(model[0]) is nn.Linear


def test_a_kind_that_the_plan_lacks_is_refused() -> None:
    plan = PrecisionPlan(problem="0" * 64, devices={"strong": {"0": Precision.FP32}})
    with pytest.raises(PlanError, match="strong"):
        fit(make_model(), 2, plan=plan)


def test_traces_are_json() -> None:
    with pytest.raises(ParameterError, match=r"trace: must end in .json or .json.gz"):
        TrainParameters(steps=1, trace=Path("trace.txt"))


@pytest.mark.parametrize(
    ("shares", "words"), [({"strong": 1.0}, "weak"), ({"weak": 0.5}, "must sum to 1")]
)
def test_shares_that_do_not_fit_are_refused(shares: dict[str, float], words: str) -> None:
    with pytest.raises(ParameterError, match=words):
        fit(make_model(), 2, shares=shares)


def test_ranks_that_are_not_those_of_the_problem_are_refused() -> None:
    problem = generate_problem(operators=4, precisions=2, devices=1, seed=0)
    pair = replace(problem.devices[0], name="weak", workers=2, batch_share=0.5)
    problem = replace(problem, devices=(pair,))
    rule = r"ranks: must be those of the problem \(weak x 2\).*, got 'weak x 1'"
    with pytest.raises(ParameterError, match=rule):
        fit(make_model(), 2, problem=problem)
    fit(make_model(), 2, problem=problem, shares={"weak": 1.0})


def test_checkpoints_of_another_plan_or_unwanted_ones_are_refused(tmp_path: Path) -> None:
    fit(make_model(), 2, folder=tmp_path, plan=make_plan())
    with pytest.raises(PlanError, match="checkpoint of step 2"):
        fit(make_model(), 3, folder=tmp_path, plan=make_plan(Precision.BF16))
    with pytest.raises(ParameterError, match="must hold no checkpoints"):
        fit(make_model(), 3, folder=tmp_path, plan=make_plan(), resume=False)


def test_a_loss_that_is_not_finite_ends_the_job_without_a_checkpoint(tmp_path: Path) -> None:
    def batches(step: int, rows: range) -> tuple[Tensor, Tensor]:
        inputs, targets = make_batch(len(rows))
        return inputs * (float("inf") if step == 1 else 1.0), targets

    with pytest.raises(TrainError, match="not finite in step 1"):
        fit(make_model(), 2, batches=batches, batch_size=8, folder=tmp_path)
    assert not list(tmp_path.glob("step-*"))


def test_a_model_with_nothing_to_train_is_refused() -> None:
    with pytest.raises(ParameterError, match="must have parameters that are trained"):
        fit(make_model().requires_grad_(False), 2)


def test_every_step_is_reported() -> None:
    seen: list[StepMetrics] = []
    result = fit(make_model(), 3, lambda progress: seen.append(progress.metrics))
    assert tuple(seen) == result.metrics
    assert [row.step for row in seen] == [0, 1, 2]
    for row in seen:
        assert row.compute_s + row.wait_s <= row.step_s
        assert (row.samples, row.loss_scale, row.skipped) == (12, 1.0, False)
        assert row.memory_bytes > 2**20


def test_a_world_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(TrainError, match="WORLD_SIZE is 'many'"):
        fit(make_model(), 1)


def test_two_jobs_do_not_share_a_folder(tmp_path: Path) -> None:
    """The slower one's checkpoints would be removed, and its lines written over."""
    told: list[str] = []

    def intrude(progress: TrainProgress) -> None:
        with pytest.raises(TrainError, match="another job is at work") as caught:
            fit(make_model(), 9, folder=tmp_path)
        told.append(str(caught.value))

    first = fit(make_model(), 3, intrude, folder=tmp_path, checkpoint_interval=1)
    assert len(told) == 3
    assert [row.step for row in read_metrics(tmp_path)[0]] == [0, 1, 2]
    assert first.checkpoint_step == 3
    assert fit(make_model(), 4, folder=tmp_path).first_step == 3
    with pytest.raises(PlanError):  # one that cannot begin leaves the folder to others
        fit(make_model(), 5, folder=tmp_path, uniform=Precision.BF16)
    assert fit(make_model(), 5, folder=tmp_path).first_step == 4
