"""Ranks that are made to finish together, and traces of them: parts of `training_on_ranks`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.nn import functional

from qsync_opt.runtime import batch_sizing
from qsync_opt.runtime.parameters import TrainParameters
from qsync_opt.runtime.trainer import train
from qsync_opt.simulate.replay import replay
from qsync_opt.simulate.trace import compare_traces
from tests.distributed import changing_plans
from tests.distributed.small_training import KINDS, ROWS, data, small_model, weights

#: What a sample takes on each rank, in seconds.
SAMPLE_S = (1.0, 4.0)


def batch_sizing_on_ranks(rank: int, folder: Path) -> None:
    """A rank that is four times slower gets a fifth of the batch, and again after a restart."""

    def seconds(work: object, samples: int, device: torch.device) -> tuple[float, int]:
        return SAMPLE_S[rank] * samples, 0

    def fit(steps: int) -> Any:
        parameters = TrainParameters(
            steps=steps,
            batch_size=ROWS,
            optimizer=lambda trained: torch.optim.SGD(trained, lr=1.0),
            batch_sizing=True,
            folder=folder,
        )
        model = small_model()
        before = weights(model)
        result = train(
            model, data(), functional.cross_entropy, parameters=parameters, kind=KINDS[rank]
        )
        return before, model, result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_sizing, "_run", seconds)
        before, model, result = fit(1)
    assert result.samples == (16, 4)
    assert result.metrics[0].samples == (16, 4)[rank]
    whole = small_model()
    functional.cross_entropy(whole(data()[0]), data()[1]).backward()  # type: ignore[no-untyped-call]
    for name, parameter in whole.named_parameters():
        gradient = before[name] - model.state_dict()[name]
        assert parameter.grad is not None
        assert torch.allclose(gradient, parameter.grad, rtol=1e-5, atol=1e-6), name
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_sizing, "_run", lambda *_: 1 / 0)  # not asked for again
        assert fit(2)[2].samples == (16, 4)


def trace_of_two_ranks(rank: int, folder: Path) -> None:
    """One file with a process for each rank; `compare_traces` finds every operator of both."""
    graph, problem, plan = changing_plans.case()
    folder.mkdir(exist_ok=True)
    file = folder / "trace.json.gz"
    model = small_model(dropout=0.2)
    train(
        model,
        data(),
        functional.cross_entropy,
        parameters=TrainParameters(steps=6, batch_size=ROWS, trace=file, trace_steps=2),
        plan=plan,
        kind=KINDS[rank],
        problem=problem,
        graph=graph,
    )
    distributed.barrier()
    replayed = replay(problem, plan)
    found = compare_traces(problem, replayed, file, rank)
    assert {row.name for row in found} == {operator.name for operator in problem.operators}
    assert all(row.measured_s > 0 for row in found)


def coded_gradients(rank: int, folder: Path) -> None:
    """What coding took away is in the checkpoint: a job that stopped goes on to the bit."""

    def fit(place: Path, steps: int) -> dict[str, torch.Tensor]:
        model = small_model(width=256)
        train(
            model,
            data(),
            functional.cross_entropy,
            parameters=TrainParameters(
                steps=steps, batch_size=ROWS, communication="g4e", folder=place
            ),
            kind=KINDS[rank],
        )
        return weights(model)

    whole = fit(folder / "whole", 5)
    fit(folder / "parts", 2)
    parts = fit(folder / "parts", 5)
    assert all(torch.equal(parts[name], tensor) for name, tensor in whole.items())
    distributed.barrier()


PARTS: Mapping[str, Callable[[int, Path], None]] = {
    "batch sizing": batch_sizing_on_ranks,
    "trace": trace_of_two_ranks,
    "coded gradients": coded_gradients,
}
