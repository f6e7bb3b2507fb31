"""Memory of the viewer's own process: tidied up while nobody waits."""

from __future__ import annotations

import ctypes
import gc
import sys
import time
from contextlib import suppress

_BETWEEN = 5.0
"""Seconds between two times, at least; each takes some hundredths of one."""
_RARELY = 200
"""Younger collections after which Python makes a full one by itself, where nobody ever rests."""

_last: float | None = None


def settle() -> None:
    """Prepares a process that is the viewer's own; as often as one likes.

    A collection of all that has been imported takes 200 ms: that is left out for good.
    """
    global _last
    if _last is None:
        gc.collect()
        gc.freeze()
        gc.set_threshold(*gc.get_threshold()[:2], _RARELY)
        _last = time.monotonic()


def sweep() -> None:
    """Collects garbage, unless it was done a moment ago or the process is somebody else's."""
    global _last
    if _last is not None and time.monotonic() - _last > _BETWEEN:
        gc.collect()
        _give_back()
        _last = time.monotonic()


def _give_back() -> None:
    """Gives the holes in the heap back to the system.

    Records and chunks of all sizes come and go; 3,600 changes of the step left holes of 60 MB.
    """
    if sys.platform == "linux":
        with suppress(AttributeError):  # a C library other than glibc
            ctypes.CDLL(None).malloc_trim(0)
