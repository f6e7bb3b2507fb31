"""Memory of the viewer's own process: collected while nobody waits, and given back."""

from __future__ import annotations

import ctypes
import gc
import sys
import time
from contextlib import suppress

_BETWEEN = 20.0
"""Seconds between two collections, at least; each takes some hundredths of one."""
_RARELY = 200
"""Younger collections after which Python makes a full one by itself, where nobody ever rests."""
_LARGE = 1 << 16
_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h

_last: float | None = None


def settle() -> None:
    """Prepares a process that is the viewer's own; as often as one likes.

    A collection of all that has been imported takes 200 ms: that is left out for good. Arrays of
    more than `_LARGE` bytes are given back to the system at once: reused for others of all sizes,
    their places became holes, and 3,600 changes of the step cost 60 MB.
    """
    global _last
    if _last is None:
        gc.collect()
        gc.freeze()
        gc.set_threshold(*gc.get_threshold()[:2], _RARELY)
        if sys.platform == "linux":
            with suppress(AttributeError):  # another C library
                ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE)
        _last = time.monotonic()


def sweep() -> None:
    """Collects garbage, unless it was done a moment ago or the process is somebody else's."""
    global _last
    if _last is not None and time.monotonic() - _last > _BETWEEN:
        gc.collect()
        _last = time.monotonic()
