"""One of two processes of `test_training_on_ranks`: runs every part and writes what failed."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in its list
from torch.nn import functional

from qsync_opt.errors import ParameterError, PlanError, QsyncError, TrainError
from qsync_opt.kernels.rounding import Rounding
from qsync_opt.measure.model_file import load_batches, load_model
from qsync_opt.optimize.generate import generate_problem
from qsync_opt.plan import PrecisionPlan
from qsync_opt.precision import Precision
from qsync_opt.runtime.layers import layer_of
from qsync_opt.runtime.metrics import global_losses, read_metrics
from qsync_opt.runtime.parameters import TrainParameters
from qsync_opt.runtime.trainer import TrainProgress, TrainResult, TrainStatus, train
from tests.distributed import changing_plans, training_at_bits, unequal_ranks
from tests.distributed.small_training import (
    KINDS,
    ROWS,
    data,
    plan_of,
    require_equal,
    small_model,
    weights,
)

MODELS = Path(__file__).parents[2] / "models"


def gradient_of_unequal_shares(accumulation: int, rank: int, folder: Path) -> None:
    """A step of SGD at rate 1 shows the gradient: it is that of the whole batch."""
    whole = small_model()
    loss = functional.cross_entropy(whole(data()[0]), data()[1])
    loss.backward()  # type: ignore[no-untyped-call]
    model = small_model()
    before = weights(model)
    parameters = TrainParameters(
        steps=1,
        batch_size=ROWS,
        accumulation=accumulation,
        optimizer=lambda trained: torch.optim.SGD(trained, lr=1.0),
        shares={"strong": 0.7, "weak": 0.3},
    )
    result = train(model, data(), functional.cross_entropy, parameters=parameters, kind=KINDS[rank])
    assert result.metrics[0].samples == (14, 6)[rank]
    for name, parameter in whole.named_parameters():
        gradient = before[name] - model.state_dict()[name]
        assert parameter.grad is not None
        assert torch.allclose(gradient, parameter.grad, rtol=1e-5, atol=1e-6), name


def run(
    rank: int,
    folder: Path | None,
    steps: int,
    report: Callable[[TrainProgress], None] | None = None,
    **options: Any,
) -> tuple[nn.Sequential, TrainResult]:
    """Train the small model with int8 on the weak rank, and everything random there is."""
    model = small_model(dropout=0.2)
    parameters = TrainParameters(
        steps=steps,
        batch_size=ROWS,
        accumulation=2,
        learning_rate=0.02,
        shares={"strong": 0.6, "weak": 0.4},
        schedule=lambda step: 1 / (1 + step),
        rounding=Rounding.STOCHASTIC,
        folder=folder,
        **{"checkpoint_interval": 3, **options},
    )
    result = train(
        model,
        data(),
        functional.cross_entropy,
        parameters=parameters,
        plan=plan_of(Precision.INT8),
        kind=KINDS[rank],
        report=report,
    )
    return model, result


class Shaken(nn.Module):
    """Leaves out a layer now and then, by generators that are not torch's."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        kept = random.random() < 0.5, float(np.random.rand()) < 0.5
        return self.inner(x) * (1.0 + sum(kept))  # type: ignore[no-any-return]


def resume_with_other_generators(rank: int, folder: Path) -> None:
    """Python's and NumPy's numbers go on too, whatever is run before the first step."""
    found = []
    for steps in ((7,), (3, 7)):
        place = folder / f"shaken-{len(steps)}"
        for count in steps:
            model = Shaken(small_model())
            parameters = TrainParameters(steps=count, batch_size=ROWS, folder=place)
            train(model, data(), functional.cross_entropy, parameters=parameters, kind=KINDS[rank])
        found.append(weights(model))
    require_equal(*found)


def resume(rank: int, folder: Path) -> None:
    """Stopped and started again, the weights and the losses are those of a run that went on."""
    whole, full = run(rank, folder / "whole", 8)
    run(rank, folder / "parts", 3)
    run(rank, folder / "parts", 5)
    found, last = run(rank, folder / "parts", 8)
    assert (last.first_step, last.steps, last.status) == (5, 8, TrainStatus.FINISHED)
    require_equal(weights(found), weights(whole))
    assert [row.loss for row in last.metrics] == [row.loss for row in full.metrics[5:]]
    both = [read_metrics(folder / name) for name in ("whole", "parts")]
    assert global_losses(both[0]) == global_losses(both[1])
    assert len(both[1][rank]) == 8
    _, nothing = run(rank, folder / "parts", 8)
    assert nothing.metrics == ()


def interruption(rank: int, folder: Path) -> None:
    """A signal to one rank stops both after the same step, and nothing is lost by it."""
    whole, _ = run(rank, folder / "whole", 6, checkpoint_interval=0)

    def interrupt(progress: TrainProgress) -> None:
        if rank == 1 and progress.metrics.step == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    _, stopped = run(rank, folder / "parts", 6, interrupt, checkpoint_interval=0)
    assert stopped.status is TrainStatus.INTERRUPTED
    assert 2 <= stopped.steps < 6
    assert stopped.checkpoint_step == stopped.steps
    found, last = run(rank, folder / "parts", 6, checkpoint_interval=0)
    assert last.first_step == stopped.steps
    require_equal(weights(found), weights(whole))


def refusal(rank: int, model: nn.Module, **options: Any) -> str:
    """What `train` says when it will not start; both ranks must say the same."""
    given: dict[str, Any] = {"parameters": TrainParameters(steps=2, batch_size=ROWS), **options}
    with pytest.raises(TrainError) as caught:
        train(model, data(), functional.cross_entropy, kind=KINDS[rank], **given)
    text = str(caught.value)
    other = [b"", b""]
    length = torch.tensor([len(text)])
    lengths = [torch.empty_like(length) for _ in other]
    distributed.all_gather(lengths, length)
    assert lengths[0] == lengths[1], text
    return text


def disagreement(rank: int, folder: Path) -> None:
    """Whatever ranks differ in is named, with the rank, before the first step."""
    plan = plan_of((Precision.INT8, Precision.BF16)[rank])
    assert "rank 1 (weak) does not agree with rank 0 (strong): plan" in refusal(
        rank, small_model(), plan=plan
    )
    text = refusal(rank, small_model().to((torch.float32, torch.bfloat16)[rank]))
    assert "parameters 0.weight" in text
    assert "bfloat16" in text
    text = refusal(rank, small_model(width=24 + rank))
    assert '["torch.float32", [25, 8], [8, 1], true] there' in text
    conv = nn.Conv2d(8, 3, 1)
    weight = torch.empty_strided((3, 8, 3, 3), ((72, 9, 3, 1), (72, 1, 24, 8))[rank])
    conv.weight = nn.Parameter(weight)
    assert "parameters weight" in refusal(rank, conv)
    problem = generate_problem(operators=3, precisions=2, devices=2, seed=rank)
    assert "problem is" in refusal(rank, small_model(), problem=problem)
    shares = {"strong": 0.5, "weak": 0.5, "ghost": 0.1}
    options = TrainParameters(steps=2, batch_size=9, shares=shares)
    with pytest.raises(ParameterError, match=r"device kinds of the job \(strong, weak\)"):
        train(small_model(), data(), functional.cross_entropy, kind=KINDS[rank], parameters=options)
    text = refusal(rank, small_model(), parameters=TrainParameters(steps=2 + rank, batch_size=9))
    assert "options steps is 3 there and 2 on rank 0" in text
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "__version__", ("2.11.0+cu130", "2.13.0+cpu")[rank])
        text = refusal(rank, small_model())
    assert "torch is 2.13.0 there and 2.11.0 on rank 0" in text
    assert "Install the same version" in text


class Branch(nn.Module):
    """Uses one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.unused = nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)  # type: ignore[no-any-return]


def unused_parameters(rank: int, folder: Path) -> None:
    """They are named as the trouble, with what to do; done, the job runs."""
    text = refusal(rank, Branch(), parameters=TrainParameters(steps=3, batch_size=ROWS))
    assert "leaves parameters out of a step" in text
    assert "find_unused_parameters" in text
    parameters = TrainParameters(steps=3, batch_size=ROWS, find_unused_parameters=True)
    result = train(
        Branch(), data(), functional.cross_entropy, parameters=parameters, kind=KINDS[rank]
    )
    assert len(result.metrics) == 3


def failure_on_one_rank(rank: int, folder: Path) -> None:
    """A rank that cannot run its part tells the others, which would wait for it otherwise."""
    with pytest.raises((PlanError, TrainError)[1 - rank]) as caught:
        train(
            small_model(),
            data(),
            functional.cross_entropy,
            parameters=TrainParameters(steps=2),
            plan=plan_of(Precision.FP8),
            kind=KINDS[rank],
        )
    assert "fp8" in str(caught.value)
    if rank == 0:
        assert "rank 1 (weak) cannot start" in str(caught.value)


def overflow(rank: int, folder: Path) -> None:
    """One rank's overflow makes both leave out the step, and halves the scale on both."""
    seen: list[dict[str, Tensor]] = []
    model = small_model()

    def batches(step: int, rows: range) -> tuple[Tensor, Tensor]:
        inputs, targets = (part[rows.start : rows.stop] for part in data())
        return (inputs * 1e30 if (step, rank) == (1, 1) else inputs), targets

    def loss(output: Tensor, target: Tensor) -> Tensor:
        assert output.dtype is torch.float32
        return functional.cross_entropy(output, target)

    parameters = TrainParameters(steps=4, batch_size=ROWS, loss_scale=2.0**10, emulate=True)
    result = train(
        model,
        data(),
        loss,
        parameters=parameters,
        plan=plan_of(Precision.FP16),
        kind=KINDS[rank],
        batches=batches,
        report=lambda progress: seen.append(weights(model)),
    )
    assert [row.skipped for row in result.metrics] == [False, True, False, False]
    assert [row.loss_scale for row in result.metrics] == [2.0**10, 2.0**10, 2.0**9, 2.0**9]
    require_equal(seen[1], seen[0])
    assert not torch.equal(seen[2]["0.weight"], seen[1]["0.weight"])
    for name, tensor in model.state_dict().items():
        other = tensor.clone()
        distributed.broadcast(other, 0)
        assert torch.equal(tensor, other), name


def divergence(rank: int, folder: Path) -> None:
    """Without scaling, a loss that is not finite ends the job on both ranks, and is not saved."""

    def batches(step: int, rows: range) -> tuple[Tensor, Tensor]:
        inputs, targets = (part[rows.start : rows.stop] for part in data())
        return (inputs * float("nan") if (step, rank) == (3, 1) else inputs), targets

    parameters = TrainParameters(steps=6, batch_size=ROWS, folder=folder, checkpoint_interval=2)
    with pytest.raises(TrainError, match=r"rank 1 \(weak\) is not finite in step 3.*step 2 comes"):
        train(
            small_model(),
            data(),
            functional.cross_entropy,
            parameters=parameters,
            kind=KINDS[rank],
            batches=batches,
        )
    distributed.barrier()
    assert [path.name for path in folder.glob("step-*")] == ["step-00000002.safetensors"]


def mixed_plan(name: str, rank: int, folder: Path) -> None:
    """A model trains with fp32 on one rank and int8 and bf16 on the other."""
    sizes = {"width": 8, "batch_size": 16}
    model, batch, loss = load_model(MODELS / f"{name}.py", sizes)
    layers = [path for path, module in model.named_modules() if layer_of(module) is not None]
    weak = {
        path: (Precision.INT8, Precision.BF16)[number % 2] for number, path in enumerate(layers)
    }
    devices = {"strong": dict.fromkeys(layers, Precision.FP32), "weak": weak}
    result = train(
        model,
        batch,
        loss,
        parameters=TrainParameters(steps=20, learning_rate=2e-2, folder=folder),
        plan=PrecisionPlan(problem="0" * 64, devices=devices),
        kind=KINDS[rank],
        batches=load_batches(MODELS / f"{name}.py", sizes),
    )
    assert result.status is TrainStatus.FINISHED
    distributed.barrier()
    found = read_metrics(folder)
    assert [row.kind for row in (found[0][0], found[1][0])] == list(KINDS)
    assert all(row.compute_s > 0 and row.wait_s >= 0 for row in found[rank])
    losses = global_losses(found)
    assert sum(losses[-5:]) / 5 < 0.8 * losses[0], losses


def unwritable_folder(rank: int, folder: Path) -> None:
    """Rank 0 cannot write there, and rank 1 is told."""
    folder.mkdir(exist_ok=True)
    place = folder / "file"
    place.write_text("not a folder")
    with pytest.raises(QsyncError, match="cannot be written"):
        train(
            small_model(),
            data(),
            functional.cross_entropy,
            parameters=TrainParameters(steps=2, batch_size=ROWS, folder=place),
            kind=KINDS[rank],
        )


PARTS: Mapping[str, Callable[[int, Path], None]] = {
    "gradient": partial(gradient_of_unequal_shares, 1),
    "accumulated gradient": partial(gradient_of_unequal_shares, 3),
    "resume": resume,
    "resume, other generators": resume_with_other_generators,
    "interruption": interruption,
    "disagreement": disagreement,
    "unused parameters": unused_parameters,
    "failure on one rank": failure_on_one_rank,
    "overflow": overflow,
    "divergence": divergence,
    "mixed plan cnn": partial(mixed_plan, "small_cnn"),
    "mixed plan gpt": partial(mixed_plan, "small_gpt"),
    "unwritable folder": unwritable_folder,
    **changing_plans.PARTS,
    **training_at_bits.PARTS,
    **unequal_ranks.PARTS,
}


def main() -> None:
    """Run every part and write part -> traceback as JSON."""
    rank, port, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    store = TCPStore("127.0.0.1", port, is_master=False)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    found = {}
    for name, part in PARTS.items():
        try:
            part(rank, folder / name.replace(" ", "-"))
            found[name] = ""
        except BaseException:  # noqa: BLE001  # the test shows it
            found[name] = traceback.format_exc()
            break  # the other rank may wait for this one
    sys.stdout.write(json.dumps(found))
    sys.stdout.flush()
    if all(not text for text in found.values()):
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
