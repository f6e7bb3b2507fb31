"""Frees memory of the viewer process while it is idle."""

from __future__ import annotations

import ctypes
import gc
import sys
import time
from contextlib import suppress

_BETWEEN = 5.0
"""Minimum interval between collections, in seconds.

Each collection takes a few hundredths of a second.
"""
_RARELY = 200
"""Number of collections of young objects before a full one, if the process is never idle."""

_last: float | None = None


def settle() -> None:
    """Tunes the garbage collector for a dedicated viewer process. Idempotent.

    Excludes imported objects from collections, because checking them each time would take 200 ms.
    """
    global _last
    if _last is None:
        gc.collect()
        gc.freeze()
        gc.set_threshold(*gc.get_threshold()[:2], _RARELY)
        _last = time.monotonic()


def sweep() -> None:
    """Collect garbage, unless it ran recently or the process is not dedicated."""
    global _last
    if _last is not None and time.monotonic() - _last > _BETWEEN:
        gc.collect()
        _give_back()
        _last = time.monotonic()


def _give_back() -> None:
    """Return unused heap memory to the system.

    Records and chunks have different sizes, so freed memory becomes fragmented: 60 MB are unused
    after 3,600 step changes.
    """
    if sys.platform == "linux":
        with suppress(AttributeError):  # not glibc
            ctypes.CDLL(None).malloc_trim(0)
