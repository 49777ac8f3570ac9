"""The training jobs of the demonstration: each in processes of its own, as a user starts them."""

from __future__ import annotations

from pathlib import Path

from qsync_opt import console
from qsync_opt.commands import EXIT_INTERRUPTED
from qsync_opt.demo.devices import DemoMachine
from qsync_opt.demo.tasks import DemoTask
from qsync_opt.errors import TrainError


def train_job(
    machine: DemoMachine,
    task: DemoTask,
    graph: Path,
    folder: Path,
    *,
    plan: tuple[Path, Path] | None,
    uniform: str | None = None,
) -> None:
    """Train with a plan, or with one precision throughout; metrics and a trace are in `folder`.

    Args:
        machine: whose devices train.
        task: what is learnt.
        graph: file of the graph.
        folder: of the job; it is empty or not there.
        plan: files of the plan and of its problem.
        uniform: a precision instead.

    Raises:
        TrainError: the job did not finish.
        KeyboardInterrupt: it was interrupted.
    """
    from qsync_opt.runtime.launch import launch, parse_ranks

    words = ["train", str(task.model), "--graph", str(graph), "--steps", str(task.steps)]
    for setting in task.settings():
        words += ["--set", setting]
    words += ["--device", machine.device_type, "--learning-rate", str(task.learning_rate)]
    words += ["--checkpoint-interval", "0", "--keep", "1", "--output", str(folder)]
    words += ["--trace", str(folder / "trace.json.gz")]
    if plan is not None:
        words += ["--plan", str(plan[0]), "--problem", str(plan[1])]
    if uniform is not None:
        words += ["--uniform", uniform]
    folder.mkdir(parents=True, exist_ok=True)
    ranks = parse_ranks(",".join(device.ranks() for device in machine.devices))
    with console.output_dropped():  # what rank 0 says of its result is said here
        code = launch(ranks, words, folder)
    if code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    if code:
        raise TrainError(f"training {folder.name} ended with code {code}", "See above")
