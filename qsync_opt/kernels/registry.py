"""Which implementation of an operation runs: the fastest correct one, by timing, remembered.

For each operation and shape on a device the implementations that can run are checked against
an oracle and timed once, on the arguments of the call that asked first; a file in the cache of
the kernels tells later processes. All int8 products sum exactly and round alike, so the choice
never changes a result, only the time.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import secrets
import statistics
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qsync_opt.errors import FormatError, KernelError
from qsync_opt.kernels import build

FORMAT, VERSION = "qsync-opt/kernel-choices", 1

_WARM_UPS, _ROUNDS, _CALLS = 2, 5, 4

Run = Callable[[], Tensor]

#: Operation, then what a choice depends on: sizes, dtypes, options.
Key = tuple[object, ...]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What runs for one signature, and why.

    Attributes:
        implementation: name of what runs.
        reason: why, in words.
        times_s: median seconds of each implementation that was correct.
        rejected: implementation -> why it cannot be used.
    """

    implementation: str
    reason: str
    times_s: Mapping[str, float]
    rejected: Mapping[str, str]


def round_size(size: int) -> int:
    """The next power of two: neighbouring batch lengths share a choice instead of a timing."""
    return 1 << max(size - 1, 0).bit_length()


def signature(key: Key) -> str:
    """A key as it is written to a file: `int8_matmul 8192 4096 4096 bfloat16 plain`."""
    return " ".join(str(fact).removeprefix("torch.") for fact in key)


class Registry:
    """The choices for one device.

    Args:
        device: description of the device; choices of another one are not read.
        measure: seconds of one run of an implementation.
        file: that keeps the choices for later processes; None: they end with this one.
    """

    def __init__(
        self, device: str, measure: Callable[[Run], float], file: Path | None = None
    ) -> None:
        self.device = device
        self._measure = measure
        self._file = file
        self._choices: dict[str, Choice] = {}
        self._names: dict[Key, str] = {}
        self._lock = threading.Lock()
        if file is not None and file.is_file():
            with suppress(FormatError):  # damaged, or of another version: timed anew
                self.load(file)

    @property
    def choices(self) -> dict[str, Choice]:
        """Signature -> choice, for all signatures seen so far."""
        with self._lock:
            return dict(self._choices)

    def known(self, key: Key) -> str | None:
        """Name of the implementation chosen for a key; None if it was not asked for yet."""
        return self._names.get(key)

    def choose(
        self,
        key: Key,
        candidates: Mapping[str, Run],
        correct: Callable[[Tensor], bool],
        *,
        may_measure: bool = True,
    ) -> str:
        """Name of the implementation to run.

        Args:
            key: what the choice depends on.
            candidates: what can run these arguments, the one expected to be fastest first.
            correct: whether a result is right.
            may_measure: false while the stream is captured: nothing can be timed, so the first
                candidate is taken and not remembered.

        Raises:
            KernelError: no candidate gives a correct result.
        """
        text = signature(key)
        with self._lock:
            choice = self._choices.get(text)
        if choice is None or choice.implementation not in candidates:
            if not may_measure:
                return next(iter(candidates))
            choice = self._compare(text, candidates, correct)
            with self._lock:
                self._choices[text] = choice
            if self._file is not None:
                with suppress(OSError):  # nowhere to write: a later process times again
                    self._file.parent.mkdir(parents=True, exist_ok=True)
                    self.save(self._file)
        with self._lock:
            self._names[key] = choice.implementation
        return choice.implementation

    def _compare(
        self, text: str, candidates: Mapping[str, Run], correct: Callable[[Tensor], bool]
    ) -> Choice:
        times_s: dict[str, float] = {}
        rejected: dict[str, str] = {}
        for name, run in candidates.items():
            try:
                if correct(run()):
                    times_s[name] = self._measure(run)
                else:
                    rejected[name] = "gave a wrong result"
            except (KernelError, RuntimeError) as error:
                rejected[name] = str(error).splitlines()[0]
        if not times_s:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in rejected.items())
            raise KernelError(text, f"no implementation is usable: {reasons}")
        best = min(times_s, key=lambda name: times_s[name])
        others = sorted((time, name) for name, time in times_s.items() if name != best)
        reason = "the only one that is correct"
        if others:
            reason = f"{others[0][0] / times_s[best]:.2f}x as fast as {others[0][1]}"
        return Choice(implementation=best, reason=reason, times_s=times_s, rejected=rejected)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the choices as JSON, for `load` in a later process on such a device."""
        data = {
            "format": FORMAT,
            "version": VERSION,
            "device": self.device,
            "choices": {key: asdict(choice) for key, choice in sorted(self.choices.items())},
        }
        target = Path(path)
        temporary = target.with_name(f".{secrets.token_hex(8)}.tmp")
        temporary.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n")
        os.replace(temporary, target)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Take over the choices of a file.

        Raises:
            FormatError: it is no such file, or its choices are for another device.
        """
        try:
            data = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise FormatError(str(path), "must be a readable JSON file", str(error)) from error
        found = (data.get("format"), data.get("version")) if isinstance(data, dict) else data
        if found != (FORMAT, VERSION):
            raise FormatError("format, version", f"must be {(FORMAT, VERSION)}", found)
        if data.get("device") != self.device:
            remedy = "Choices hold for the device and the kernels they were timed with."
            raise FormatError("device", f"must be {self.device}", data.get("device"), remedy)
        try:
            choices = {key: Choice(**value) for key, value in data["choices"].items()}
        except (KeyError, TypeError, AttributeError) as error:
            raise FormatError("choices", "must hold the fields of a choice", str(error)) from error
        with self._lock:
            self._choices.update(choices)
            self._names.clear()


def _event() -> Any:
    event: Any = torch.cuda.Event  # torch leaves it without annotations
    return event(enable_timing=True)


def measure_on(device: torch.device) -> Callable[[Run], float]:
    """A timer of runs on a CUDA device: device events around a few calls, the median of rounds."""

    def measure(run: Run) -> float:
        with torch.cuda.device(device):
            for _ in range(_WARM_UPS):
                run()
            rounds = []
            for _ in range(_ROUNDS):
                start, stop = _event(), _event()
                start.record()
                for _ in range(_CALLS):
                    run()
                stop.record()
                stop.synchronize()
                rounds.append(float(start.elapsed_time(stop)) / 1e3 / _CALLS)
        return statistics.median(rounds)

    return measure


@functools.cache
def registry_of(device_index: int) -> Registry:
    """The choices for a CUDA device, kept beside the kernels that they are between."""
    properties: Any = torch.cuda.get_device_properties(device_index)
    architecture = build.architecture_of((properties.major, properties.minor))
    kernels = build.library_path(architecture).parent.name
    # A part of a GPU has fewer multiprocessors, and other winners.
    count = f"{properties.multi_processor_count} multiprocessors"
    description = f"{properties.name}, {count}, torch {torch.__version__}, kernels {kernels}"
    name = f"choices-{hashlib.sha256(description.encode()).hexdigest()[:16]}.json"
    measure = measure_on(torch.device("cuda", device_index))
    return Registry(description, measure, build.cache_folder() / name)
