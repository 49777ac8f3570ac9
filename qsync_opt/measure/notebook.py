"""What has been measured so far, kept so that an interrupted measurement can go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

#: Seconds between two times that the entries are kept.
_INTERVAL_S = 2.0

Keep = Callable[[Mapping[str, Any]], None]


class Refusal(Exception):  # noqa: N818  # an answer that is passed on, no fault
    """Something cannot be measured; the text says why."""


class Notebook:
    """Entries by name: numbers, or the reason why there are none.

    Args:
        entries: what is known already.
        keep: called with all entries now and then, and by `close`; it may write a file.
    """

    def __init__(self, entries: Mapping[str, Any] | None = None, keep: Keep | None = None) -> None:
        self.entries = dict(entries or {})
        self._keep = keep
        self._kept_at = time.monotonic()

    def numbers(self, name: str, take: Callable[[], list[float]]) -> list[float]:
        """The numbers of an entry, measured by `take` where they are not known.

        Raises:
            Refusal: they cannot be measured, now or when it was tried before.
        """
        found = self.entries.get(name)
        if found is None:
            try:
                found = take()
            except Refusal as refusal:
                found = str(refusal)
            self.put(name, found)
        if isinstance(found, str):
            raise Refusal(found)
        return [float(value) for value in found]

    def put(self, name: str, entry: list[float] | str) -> None:
        """Set an entry."""
        self.entries[name] = entry
        if time.monotonic() - self._kept_at > _INTERVAL_S:
            self.close()

    def close(self) -> None:
        """Keep what there is."""
        self._kept_at = time.monotonic()
        if self._keep is not None:
            self._keep(self.entries)
