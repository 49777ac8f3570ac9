"""What the C library does with memory that a process frees."""

from __future__ import annotations

import ctypes

#: Parameters of glibc's `mallopt` (malloc.h), and the most that an int can say.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
_LARGEST = 2**31 - 1


def keep_freed_memory() -> bool:
    """Let the process keep the host memory that it frees; whether the C library can.

    By default glibc gives large blocks back to the system, and from which size on depends on
    what was freed before (mallopt(3), M_MMAP_THRESHOLD). On a CPU a step frees and takes the
    same blocks again: the system then clears every page anew, which can take a third of a
    forward, or nothing, by the history of the process. From here on no block gets a mapping of
    its own: M_MMAP_MAX has no limit, while M_MMAP_THRESHOLD has one of 32 MiB (mallopt(3)), which
    not all releases let pass. Other C libraries are left alone.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, _LARGEST))
