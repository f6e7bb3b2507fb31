"""Collects garbage while nobody waits: of all that the server has imported it takes 200 ms."""

from __future__ import annotations

import gc
import time

_BETWEEN = 20.0
"""Seconds between two collections, at least; each takes some hundredths of one."""
_RARELY = 200
"""Younger collections after which Python makes a full one by itself, where nobody ever rests."""

_last: float | None = None


def settle() -> None:
    """Leaves out for good what is there now, and waits for a rest with what will be.

    For a process that is the viewer's own; as often as one likes.
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
        _last = time.monotonic()
