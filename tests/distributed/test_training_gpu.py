"""Training on GPUs: one rank, two ranks that share a GPU, and two GPUs of their own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from qsync_opt.build import build_problem
from qsync_opt.costs import Cluster, ClusterKind, GradientBucket
from qsync_opt.files import save_plan
from qsync_opt.measure.capture import capture
from qsync_opt.measure.measuring import measure
from qsync_opt.measure.model_file import load_model
from qsync_opt.measure.step import to_device
from qsync_opt.measure.uniform import run_loss, uniform_plan
from qsync_opt.optimize.solve import solve
from qsync_opt.plan import PrecisionPlan
from qsync_opt.precision import Precision
from qsync_opt.runtime.availability import available_precisions
from qsync_opt.runtime.convert import convert, revert
from qsync_opt.runtime.metrics import global_losses, read_metrics
from qsync_opt.runtime.parameters import TrainParameters
from qsync_opt.runtime.trainer import train
from qsync_opt.simulate.replay import replay
from qsync_opt.simulate.trace import DEVICE, compare_traces
from tests.cost_cases import made_up_table
from tests.distributed.small_training import data, small_model

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "models"

pytestmark = pytest.mark.gpu


@pytest.fixture
def device() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


def test_late_numbers_are_those_of_a_loop_by_hand(device: torch.device) -> None:
    """Losses arrive a step later, and are those of their own step; so are times."""
    batch = to_device(data(), device)
    row = {"0": Precision.BF16, "3": Precision.BF16}
    by_hand = small_model().to(device)
    convert(by_hand, row)
    optimizer = torch.optim.AdamW(by_hand.parameters(), lr=0.01)
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = run_loss(by_hand, batch[0], batch[1], functional.cross_entropy)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    revert(by_hand)
    model = small_model().to(device)
    result = train(
        model,
        batch,
        functional.cross_entropy,
        parameters=TrainParameters(steps=6, learning_rate=0.01),
        plan=PrecisionPlan(problem="0" * 64, devices={"device": row}),
    )
    assert [row.loss for row in result.metrics] == losses
    for first, second in zip(model.parameters(), by_hand.parameters(), strict=True):
        assert torch.equal(first, second)
    assert all(row.compute_s > 0 and row.memory_bytes > 0 for row in result.metrics)
    assert [row.step for row in result.metrics] == list(range(6))


def test_kernels_of_a_trace_bear_names_of_operators(device: torch.device, tmp_path: Path) -> None:
    model, batch, loss = load_model(MODELS / "small_gpt.py", {"width": 64, "batch_size": 4})
    model.to(device)
    batch = to_device(batch, device)
    graph = capture(model, batch, loss)
    row = uniform_plan(graph, Precision.BF16, available_precisions(device))
    train(
        model,
        batch,
        loss,
        parameters=TrainParameters(steps=6, trace=tmp_path / "trace.json", trace_steps=2),
        plan=PrecisionPlan(problem="0" * 64, devices={"device": row}),
        graph=graph,
    )
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    kernels = [event for event in events if "kernel" in event.get("args", {})]
    assert kernels
    assert all(event["tid"] == DEVICE for event in kernels)
    named = {event["name"].rpartition(" ")[0] for event in kernels}
    adjustable = {graph.operators[index].name for index in graph.adjustable}
    assert adjustable <= named
    known = sum(event["dur"] for event in kernels if event["cat"] != "other")
    assert known > 0.8 * sum(event["dur"] for event in kernels)


def test_a_plan_is_refined_and_the_replay_is_compared(device: torch.device, tmp_path: Path) -> None:
    pytest.importorskip("ortools")
    model, batch, loss = load_model(MODELS / "small_gpt.py", {"width": 64, "batch_size": 4})
    model.to(device)
    batch = to_device(batch, device)
    graph = capture(model, batch, loss)
    costs = measure(graph, device=device, precisions=[Precision.FP32, Precision.BF16])
    names = [graph.parameters[index].name for index in graph.gradient_order]
    costs = replace(costs, buckets=(GradientBucket(size_bytes=1024, parameters=tuple(names)),))
    problem = build_problem(
        graph,
        {"device": costs},
        made_up_table(graph),
        Cluster(kinds=(ClusterKind(name="device"),)),
        slack=5.0,
    )
    plan = solve(problem, method="fastest").plan
    assert plan is not None
    result = train(
        model,
        batch,
        loss,
        parameters=TrainParameters(
            steps=9, refine_interval=3, trace=tmp_path / "trace.json", trace_steps=2
        ),
        plan=plan,
        problem=problem,
        graph=graph,
    )
    told = {row.step: row.refinement for row in result.metrics if row.refinement}
    assert list(told) == [3, 6]
    assert "a new plan" in told[6] or "the plan stays" in told[6]
    rows = compare_traces(problem, replay(problem, plan), tmp_path / "trace.json")
    adjustable = {graph.operators[index].name for index in graph.adjustable}
    assert adjustable <= {row.name for row in rows}


def test_two_ranks_share_a_gpu(tmp_path: Path) -> None:
    """NCCL refuses them; they reduce over gloo."""
    losses = run_unequal(tmp_path, {"CUDA_VISIBLE_DEVICES": "0"})
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])


@pytest.mark.multi_gpu
def test_two_ranks_on_gpus_of_their_own(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("it takes two GPUs")
    losses = run_unequal(tmp_path, {})
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])


#: Ranks that a model is trained by: alone, two that share a GPU, and two with parts of it.
RANKS = {"alone": "all:1", "shared": "strong:1,weak:1", "parts": "strong:1:mps=50,weak:1:mps=25"}


@contextmanager
def sharing() -> Iterator[None]:
    """NVIDIA's MPS runs inside."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        pytest.skip("there is no MPS daemon")
    subprocess.run([control, "-d"], check=True)
    try:
        yield
    finally:
        subprocess.run([control], input=b"quit\n", check=True)


@pytest.fixture(params=list(RANKS))
def ranks(request: pytest.FixtureRequest) -> Iterator[str]:
    name = str(request.param)
    with sharing() if name == "parts" else nullcontext():
        yield RANKS[name]


@pytest.mark.parametrize("model", ["resnet50.py batch_size=32", "bert.py batch_size=8 padded=0"])
def test_real_models_train_in_sixteen_bits(
    model: str, ranks: str, device: torch.device, tmp_path: Path
) -> None:
    """Losses follow those in fp32 in every way of lowering; none is a NaN."""
    ways = {
        "fp32": ["--uniform", "fp32"],
        "bf16": ["--uniform", "bf16"],
        "fp16": ["--uniform", "fp16"],
        "int8": ["--uniform", "int8"],
        "autocast": ["--autocast", "bf16"],
    }
    found = {}
    for name, words in ways.items():
        words = [*words, "--ranks", ranks, "--steps", "6", "--optimizer", "sgd"]
        words += ["--learning-rate", "1e-4", *sets(model)]
        found[name] = run_job(tmp_path / name, model.split()[0], words, {})
    for name, losses in found.items():
        # A loss of 6 or 7, which six such steps hardly move, and rounding moves no further.
        assert losses == pytest.approx(found["fp32"], abs=0.3), name


@pytest.mark.parametrize("percent", [20, 33, 50, 75])
def test_a_part_of_a_gpu_trains_right_or_not_at_all(
    percent: int, device: torch.device, tmp_path: Path
) -> None:
    """cuBLAS may leave out tiles there, and a user must not find it out by the loss."""
    words = ["--ranks", f"all:1:mps={percent}", "--steps", "4", "--optimizer", "sgd"]
    words += ["--learning-rate", "1e-4", *sets("- batch_size=8 padded=0 layers=4")]
    with sharing():
        expected = run_job(tmp_path / "fp32", "bert.py", ["--uniform", "fp32", *words], {})
        done = start_job(tmp_path / "bf16", "bert.py", ["--uniform", "bf16", *words], {})
    if done.returncode:
        assert "products in bf16: " in done.stderr
        assert f"another part of the GPU than {percent} %" in done.stderr
    else:
        assert losses_of(tmp_path / "bf16") == pytest.approx(expected, abs=0.1)


def run_unequal(folder: Path, variables: dict[str, str]) -> list[float]:
    """Losses of a job of two ranks with unequal plans, interrupted by nothing."""
    model, _, _ = load_model(MODELS / "small_cnn.py", {"width": 8, "batch_size": 16})
    layers = ["conv1", "conv2", "conv3", "fc"]
    assert set(layers) <= {name for name, _ in model.named_modules()}
    devices = {
        "strong": dict.fromkeys(layers, Precision.FP32),
        "weak": dict.fromkeys(layers, Precision.BF16),
    }
    save_plan(PrecisionPlan(problem="0" * 64, devices=devices), folder / "plan.json")
    words = ["--plan", "plan.json", "--ranks", "strong:1,weak:1", "--steps", "20"]
    words += ["--shares", "strong=0.75,weak=0.25", "--learning-rate", "0.02"]
    losses = run_job(folder, "small_cnn.py", [*words, *sets("- width=8 batch_size=16")], variables)
    found = read_metrics(folder / "job")
    assert [row.samples for row in (found[0][0], found[1][0])] == [24, 8]
    return losses


def sets(model: str) -> list[str]:
    """The sizes after the name of a model, as words of a command."""
    return [word for size in model.split()[1:] for word in ("--set", size)]


def start_job(
    folder: Path, model: str, words: list[str], variables: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """`qsync-opt train` on a GPU."""
    folder.mkdir(exist_ok=True)
    command = ["train", str(MODELS / model), "--device", "cuda", "-o", "job", *words]
    return subprocess.run(
        [sys.executable, "-m", "qsync_opt.cli", *command],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), **variables},
        timeout=300,
    )


def run_job(folder: Path, model: str, words: list[str], variables: dict[str, str]) -> list[float]:
    """Losses of every step of such a job, which ends well, all ranks together."""
    done = start_job(folder, model, words, variables)
    assert done.returncode == 0, done.stderr
    return losses_of(folder)


def losses_of(folder: Path) -> list[float]:
    return global_losses(read_metrics(folder / "job"))
