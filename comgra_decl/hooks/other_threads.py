"""Tell threads apart, and inspect the frames of all threads from a single thread.

Before Python 3.12, reading a frame of another thread may trigger a garbage collection, whose
callbacks allow the other thread to run. Its frames may then be freed while they are read, which
crashes the process. Garbage collection is therefore disabled during the read.
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType


class _Thread(threading.local):
    """Numbers the threads, from 1.

    Unlike `threading.get_ident`, whose value passes to a new thread as soon as one has ended, a
    number is never used again. Otherwise a new thread could be taken for one that has ended, and
    what that one left unfinished for unfinished work of its own.

    Attributes:
        number: the number of the current thread.
    """

    def __init__(self) -> None:
        self.number = next(_numbers)
        self._life = _Life()  # dies with the thread, with which its thread-local objects are freed
        _lives[self.number] = self._life


class _Life:
    """Exists as long as a thread."""


_numbers = itertools.count(1)
_lives: weakref.WeakValueDictionary[int, _Life] = weakref.WeakValueDictionary()
this_thread = _Thread()


def alive() -> set[int]:
    """Return the numbers of the threads that have asked for theirs and have not ended."""
    return set(_lives)


def running(wanted: Callable[[CodeType], bool]) -> list[int]:
    """Return the current line number of each running call to the given code, in any thread."""
    lines = []
    with uncollected():
        for frame in sys._current_frames().values():
            above: FrameType | None = frame
            while above is not None:
                if wanted(above.f_code):
                    lines.append(above.f_lineno)
                above = above.f_back
    return lines


_lock = threading.RLock()  # otherwise one thread could re-enable collection for another


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable the collector before Python 3.12; later versions collect between instructions."""
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
    """Replace the lock in a forked process, where the thread that held the lock does not exist."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
