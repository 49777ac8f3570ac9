"""Checkpoint files: written under another name and moved, the newest few kept.

A checkpoint is one file of named tensors and one JSON text: safetensors where that can be
imported, otherwise torch's own format, read with `weights_only`. No code is stored or run.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from qsync_opt.errors import FormatError, TrainError

try:
    import safetensors
    from safetensors.torch import save_file
except ImportError:  # torch's own format serves
    safetensors = None  # type: ignore[assignment]

#: What the library that writes raises where the system refuses; the reason is in its words.
_Refused: type[Exception] = RuntimeError if safetensors is None else safetensors.SafetensorError

FORMAT, VERSION = "qsync-opt/checkpoint", 1

_NAME = re.compile(r"step-(\d{8,})\.(safetensors|pt)")
_TEMPORARY = re.compile(r"\.step-\d{8,}\.[0-9a-f]{16}\.tmp")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What one file holds.

    Attributes:
        step: how many steps had been taken.
        facts: plain values, ready for JSON.
        tensors: by name, on the CPU.
    """

    step: int
    facts: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


class CheckpointFolder:
    """The checkpoints in a folder; one process at a time writes there.

    Args:
        folder: made where it is missing.
        keep: how many to keep; older ones are removed once a newer one is in its place.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self._keep = keep
        self._lock: IO[bytes] | None = None

    def prepare(self, rank: int = 0) -> None:
        """Make the folder, keep other jobs out, and remove what a killed process left unfinished.

        Args:
            rank: of this process in its job; those of a job share the folder.

        Raises:
            TrainError: it cannot be made or written, or another job is at work there.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._keep_out(rank)
            for path in self.folder.iterdir():
                if _TEMPORARY.fullmatch(path.name):
                    path.unlink(missing_ok=True)  # another rank may be as quick
        except OSError as error:
            raise self._unwritable(error) from error

    def close(self) -> None:
        """Let other jobs in; a process that ends does so too, however it ends."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _keep_out(self, rank: int) -> None:
        if self._lock is not None:
            return
        lock = (self.folder / f".rank-{rank}.lock").open("wb")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):  # a file system without locks
                self._lock = lock
                return
            lock.close()
            raise TrainError(
                f"another job is at work in {self.folder}: rank {rank} of it holds {lock.name}",
                "Give each job a folder of its own, or wait for that one",
            ) from None
        self._lock = lock

    def steps(self) -> list[int]:
        """The steps there are checkpoints of, ascending."""
        return sorted(self._files())

    def save(self, checkpoint: Checkpoint) -> Path:
        """Write a checkpoint and remove those that are too many.

        Raises:
            TrainError: the file system refuses; earlier checkpoints are left as they were.
        """
        suffix = "pt" if safetensors is None else "safetensors"
        target = self.folder / f"step-{checkpoint.step:08d}.{suffix}"
        temporary = self.folder / f".step-{checkpoint.step:08d}.{secrets.token_hex(8)}.tmp"
        header = {"format": FORMAT, "version": VERSION, "step": checkpoint.step}
        text = json.dumps({**header, "facts": dict(checkpoint.facts)}, allow_nan=False)
        try:
            try:
                _write(temporary, dict(checkpoint.tensors), text)
                # safetensors keeps others from reading; the folder says whether they may.
                temporary.chmod(self.folder.stat().st_mode & 0o666)
                _to_disk(temporary)
                os.replace(temporary, target)
                _to_disk(self.folder)
            except BaseException:
                with contextlib.suppress(OSError):
                    temporary.unlink()
                raise
            files = self._files()
            for step in sorted(files)[: -self._keep]:
                files[step].unlink()
        except OSError as error:
            raise self._unwritable(error) from error
        except _Refused as error:  # a full disk, say: it hides the number of the error
            raise self._unwritable(OSError(None, str(error).splitlines()[0])) from error
        return target

    def load(self, step: int) -> Checkpoint:
        """Read the checkpoint of a step.

        Raises:
            FormatError: there is none, or it cannot be read.
        """
        path = self._files().get(step)
        if path is None:
            raise FormatError(str(self.folder), "must have a checkpoint of the step", step)
        remedy = "Remove the file to go on from the one before"
        try:
            tensors, text = _read(path)
            content = json.loads(text)
        except Exception as error:  # noqa: BLE001  # each library has errors of its own
            rule = "must be a checkpoint that can be read"
            raise FormatError(
                str(path), rule, str(error) or type(error).__name__, remedy
            ) from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise FormatError(str(path), f"must be a {FORMAT} file", content, remedy)
        if content.get("version") != VERSION:
            rule = f"must have version {VERSION}"
            raise FormatError(str(path), rule, content.get("version"), remedy)
        found, facts = content.get("step"), content.get("facts")
        if not isinstance(found, int) or not isinstance(facts, dict):
            rule = "must hold the step and the facts of a job"
            raise FormatError(str(path), rule, {"step": found, "facts": facts}, remedy)
        return Checkpoint(step=found, facts=facts, tensors=tensors)

    def _files(self) -> dict[int, Path]:
        found = {}
        if self.folder.is_dir():
            for path in self.folder.iterdir():
                match = _NAME.fullmatch(path.name)
                if match:
                    found[int(match[1])] = path
        return found

    def _unwritable(self, error: OSError) -> TrainError:
        return TrainError(
            f"checkpoints cannot be written to {self.folder}: {error.strerror or error}",
            "Give another folder, or make room",
        )


def _write(path: Path, tensors: dict[str, Tensor], text: str) -> None:
    if safetensors is None:
        torch.save({"text": text, "tensors": tensors}, path)
    else:
        save_file(tensors, path, metadata={"text": text})


def _read(path: Path) -> tuple[dict[str, Tensor], str]:
    if path.suffix == ".pt":
        content = torch.load(path, map_location="cpu", weights_only=True)
        return content["tensors"], content["text"]
    if safetensors is None:
        raise ImportError("it needs safetensors: pip install safetensors")
    opened: Any = safetensors.safe_open(path, framework="pt")
    with opened as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()["text"]  # noqa: SIM118


def _to_disk(path: Path) -> None:
    """Make sure that it outlives a crash of the machine: a folder, that its names do."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
