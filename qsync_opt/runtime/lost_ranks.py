"""A rank that is gone: which one it was, what was done by then, and where a restart begins."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import distributed

from qsync_opt.errors import QsyncError, TrainError
from qsync_opt.runtime.distributed import Ranks, first_line, names_of


@dataclass(kw_only=True)
class Position:
    """How far a job is; kept up to date while it runs.

    Attributes:
        kinds: device kinds of all ranks.
        done: steps that all ranks have taken.
        saved: step of the newest checkpoint, None without one.
    """

    kinds: list[str]
    done: int = 0
    saved: int | None = None


@contextmanager
def naming_lost_ranks(ranks: Ranks, position: Position) -> Iterator[None]:
    """Turn the failure of a collective into the name of the rank that is gone.

    Raises:
        TrainError: instead of what the network says.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, QsyncError) or not _is_of_the_network(error):
            raise
        ranks.give_up()
        lost = ranks.missing(f"roll call after {position.done}")
        name = names_of(lost, position.kinds) if lost else "a rank"
        last = f"the last step that all ranks took is step {position.done - 1}"
        kept = "from the start" if position.saved is None else f"from step {position.saved}"
        raise TrainError(
            f"{name} is gone; {last if position.done else 'no step was taken'}"
            f" ({first_line(error)})",
            f"Start the job again: it goes on {kept}",
        ) from error


def _is_of_the_network(error: RuntimeError) -> bool:
    text = str(error).lower()
    return isinstance(error, distributed.DistError) or "gloo" in text or "nccl" in text
