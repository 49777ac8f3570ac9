"""The two tasks: digits by a small CNN, Python sources by a small GPT."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import qsync_opt
from qsync_opt.errors import ParameterError


@dataclass(frozen=True, kw_only=True)
class DemoTask:
    """Something to learn.

    Attributes:
        name: of the task and its folder.
        words: what it is, for people.
        model: model file.
        sizes: arguments of its `build`.
        steps: of training.
        learning_rate: of AdamW.
    """

    name: str
    words: str
    model: Path
    sizes: Mapping[str, int] = field(default_factory=dict)
    steps: int
    learning_rate: float

    def settings(self) -> list[str]:
        """The sizes as `--set` takes them."""
        return [f"{key}={value}" for key, value in self.sizes.items()]


#: Name -> words, model file, learning rate, steps, and sizes by type of device: a few
#: milliseconds a step on each, so that launching and waiting do not hide what is computed.
_TASKS = {
    "digits": (
        "A small CNN learns scikit-learn's digits",
        "small_cnn.py",
        3e-3,
        {"cpu": 120, "cuda": 200},
        {
            "cpu": {"batch_size": 64, "width": 32},
            "cuda": {"batch_size": 1024, "width": 256},
        },
    ),
    "text": (
        "A small GPT learns Python's standard library",
        "small_gpt.py",
        2e-3,
        {"cpu": 60, "cuda": 200},
        {
            "cpu": {"batch_size": 8, "length": 64, "width": 128},
            "cuda": {"batch_size": 16, "length": 512, "width": 1024, "layers": 6, "heads": 16},
        },
    ),
}

TASKS = tuple(_TASKS)


def find_task(name: str, device_type: str, steps: int | None = None) -> DemoTask:
    """A task of `TASKS`, in the size for a type of device.

    Args:
        name: of the task.
        device_type: `cpu` or `cuda`.
        steps: of training; None: enough to see the loss fall.

    Raises:
        ParameterError: its model file is not here.
    """
    words, file, learning_rate, default_steps, sizes = _TASKS[name]
    folders = (Path("models"), Path(qsync_opt.__file__).parents[1] / "models")
    found = next((folder / file for folder in folders if (folder / file).is_file()), None)
    if found is None:
        rule = "needs the folder models/ of the project's sources"
        raise ParameterError("task", rule, name, "Run the demo there, or give it a problem file")
    return DemoTask(
        name=name,
        words=words,
        model=found,
        sizes=sizes[device_type],
        steps=default_steps[device_type] if steps is None else steps,
        learning_rate=learning_rate,
    )
