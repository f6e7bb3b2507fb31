"""What all threads are doing, seen from one of them.

Before Python 3.12, where a frame of another thread is looked at, garbage may be collected, and what
is run for that lets the other thread go on: its frames are freed while they are read, and the
process dies of it. So nothing is collected meanwhile.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType


def alive() -> set[int]:
    """Returns the identifiers of all threads that run Python."""
    with uncollected():
        return set(sys._current_frames())


def running(wanted: Callable[[CodeType], bool]) -> list[int]:
    """Returns the line in which each thread is in each call of some code."""
    lines = []
    with uncollected():
        for frame in sys._current_frames().values():
            above: FrameType | None = frame
            while above is not None:
                if wanted(above.f_code):
                    lines.append(above.f_lineno)
                above = above.f_back
    return lines


_lock = threading.RLock()  # else one thread that is done would end the pause of another


@contextmanager
def uncollected() -> Iterator[None]:
    """Holds the collector off before Python 3.12; later ones collect between instructions only."""
    with _lock:
        pauses = sys.version_info < (3, 12) and gc.isenabled()
        if pauses:
            gc.disable()
        try:
            yield
        finally:
            if pauses:
                gc.enable()


def _renew() -> None:
    """A process that is forked while another thread reads has nobody to give the lock back."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
