"""Traces of training: names of operators, on a CPU and as a GPU's kernels would have them."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from qsync_opt.errors import TrainError
from qsync_opt.graph import Role
from qsync_opt.measure.capture import capture
from qsync_opt.measure.model_file import load_model
from qsync_opt.measure.uniform import uniform_plan
from qsync_opt.plan import PrecisionPlan
from qsync_opt.precision import Precision
from qsync_opt.runtime.convert import sessions_of
from qsync_opt.runtime.parameters import TrainParameters
from qsync_opt.runtime.tracing import to_events
from qsync_opt.runtime.trainer import TrainProgress, train
from qsync_opt.simulate.trace import DEVICE, HOST, NETWORK

MODELS = Path(__file__).parents[3] / "models"
CPU = frozenset({Precision.FP32, Precision.BF16, Precision.INT8})


def names(file: Path, category: str) -> set[str]:
    events = json.loads(file.read_text())["traceEvents"]
    rows = [event for event in events if event.get("cat") == category]
    return {str(event["name"]).removesuffix(f" {category}") for event in rows}


@pytest.mark.parametrize("precision", [Precision.INT8, Precision.BF16, None])
def test_every_operator_of_a_graph_is_named(tmp_path: Path, precision: Precision | None) -> None:
    """Layers, functional calls such as attention, followers and fixed ones, forward and back."""
    model, batch, loss = load_model(MODELS / "small_gpt.py", {"width": 16, "batch_size": 2})
    graph = capture(model, batch, loss)
    plan = None
    if precision is not None:
        row = uniform_plan(graph, precision, CPU)
        plan = PrecisionPlan(problem="0" * 64, devices={"device": row})
    file = tmp_path / "trace.json"
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    result = train(
        model,
        batch,
        loss,
        parameters=TrainParameters(steps=3, trace=file, trace_steps=1),
        plan=plan,
        graph=graph,
    )
    assert {row.name for row in graph.operators} <= names(file, "forward")
    trained = {row.name for row in graph.operators if row.role is Role.ADJUSTABLE}
    assert trained <= names(file, "backward")
    events = json.loads(file.read_text())["traceEvents"]
    assert sum(event["name"] == "step" for event in events) == 1
    assert sum(event["name"] == "optimizer" for event in events) == 1
    assert {event["pid"] for event in events} == {0}
    assert min(event["ts"] for event in events if event["ph"] == "X") == 0
    # Tracing changes nothing.
    model.load_state_dict(before)
    plain = train(model, batch, loss, parameters=TrainParameters(steps=3), plan=plan, graph=graph)
    assert [row.loss for row in plain.metrics] == [row.loss for row in result.metrics]


def test_without_a_graph_modules_are_named(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)))
    file = tmp_path / "trace.json"
    train(
        model,
        (torch.randn(6, 4), torch.randn(6, 2)),
        functional.mse_loss,
        parameters=TrainParameters(steps=2, trace=file),
    )
    assert names(file, "forward") == names(file, "backward") == {"0", "1.0", "1.1"}
    assert sum(e["name"] == "step" for e in json.loads(file.read_text())["traceEvents"]) == 2
    assert sessions_of(model) == ()


def test_an_interrupted_job_writes_the_steps_there_are(tmp_path: Path) -> None:
    def interrupt(progress: TrainProgress) -> None:
        if progress.metrics.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    file = tmp_path / "trace.json"
    train(
        nn.Linear(4, 2),
        (torch.randn(6, 4), torch.randn(6, 2)),
        functional.mse_loss,
        parameters=TrainParameters(steps=20, trace=file, trace_steps=10),
        report=interrupt,
    )
    steps = [e for e in json.loads(file.read_text())["traceEvents"] if e["name"] == "step"]
    assert len(steps) == 2  # 3, which was interrupted, and 4, which was agreed on before


def test_a_trace_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    with pytest.raises((TrainError, ValueError), match="missing"):
        train(
            model,
            (torch.randn(6, 4), torch.randn(6, 2)),
            functional.mse_loss,
            parameters=TrainParameters(steps=2, trace=tmp_path / "missing" / "trace.json"),
        )


def event(name: str, cat: str, tid: int, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    row = {"ph": "X", "name": name, "cat": cat, "pid": 7, "tid": tid, "ts": ts, "dur": dur}
    return {**row, "args": {key.replace("_", " "): value for key, value in args.items()}}


def test_kernels_belong_to_what_launched_them() -> None:
    """Backward runs in a thread of its own, and kernels long after their launches."""
    node = "autograd::engine::evaluate_function: "
    data = {
        "baseTimeNanoseconds": 5000,
        "traceEvents": [
            event("step", "user_annotation", 1, 0, 100),
            event("step", "gpu_user_annotation", 20, 50, 100),
            event("fc forward", "user_annotation", 1, 5, 10),
            event("fc forward", "gpu_user_annotation", 20, 50, 30),
            event("aten::mm", "cpu_op", 1, 6, 8, Sequence_number=3),
            event("cudaLaunchKernel", "cuda_runtime", 1, 7, 1, correlation=11),
            event("cuLaunchKernel", "cuda_driver", 1, 20, 1, correlation=12),
            event(f"{node}MmBackward0", "cpu_op", 2, 40, 10, Sequence_number=3),
            event(f"{node}SumBackward0", "cpu_op", 2, 30, 5, Sequence_number=9),
            event("cudaLaunchKernel", "cuda_runtime", 2, 45, 1, correlation=13),
            event("optimizer", "user_annotation", 1, 60, 9),
            event("cudaLaunchKernel", "cuda_runtime", 1, 61, 1, correlation=14),
            event("gemm", "kernel", 20, 50, 10, correlation=11),
            event("fill", "kernel", 20, 62, 1, correlation=12),
            event("gemm", "kernel", 20, 70, 20, correlation=13),
            event("ncclDevKernel_AllReduce_Sum_f32", "kernel", 21, 75, 30, correlation=15),
            event("adam", "kernel", 20, 95, 3, correlation=14),
        ],
    }
    base, events = to_events(data, [(2, 5, "fc")])
    assert base == 5000
    lanes: dict[int, list[tuple[str, str, float]]] = {HOST: [], DEVICE: [], NETWORK: []}
    for row in events:
        lanes[row["tid"]].append((row["name"], row["cat"], row["dur"]))
    assert lanes[DEVICE] == [
        ("fc forward", "forward", 10),
        ("fill", "other", 1),
        ("fc backward", "backward", 20),
        ("optimizer", "optimizer", 3),
    ]
    assert lanes[NETWORK] == [("ncclDevKernel_AllReduce_Sum_f32", "communication", 30)]
    # The host's lane does not bear names of operators, or they would count twice.
    assert lanes[HOST] == [
        ("step", "step", 100),
        ("forward", "forward", 10),
        ("backward", "backward", 10),
        ("optimizer", "optimizer", 9),
    ]
