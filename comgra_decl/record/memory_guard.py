"""Whether there is memory left to begin with, and to go on with.

Where the system refuses memory (`ulimit -v`, batch systems, strict overcommit), the C++ libraries
that tracing needs do not raise: a thread that cannot be made ends the whole program. So it is
asked before they need any, and tracing leaves the last of it to the training. A limit can also come
while a program runs (`prlimit`), when tracing has taken its part already: it holds addresses, not
memory, in reserve for that.
"""

from __future__ import annotations

import functools
import mmap
import sys
from pathlib import Path

from comgra_decl.errors import NoMemoryError

STARTING = 1 << 30
"""Bytes: imports, threads and their stacks took 0.9 GB of addresses (not of memory)."""
LEFT = 1 << 28
"""Bytes that are left to the training. A thread takes 0.14 GB of addresses."""
STEP = 1 << 28
"""Bytes that there must be for recording a step."""


class Room:
    """The memory that is left while a run is recorded.

    Raises:
        NoMemoryError: there is too little to begin with.
    """

    def __init__(self) -> None:
        demand(STARTING)
        self._reserve = None if _may_refuse() else _addresses(LEFT + STEP)

    def for_a_step(self) -> None:
        """Asks, before a step is recorded, for what it may take and what the training may.

        Raises:
            NoMemoryError: it is refused.
        """
        if _may_refuse():
            self.give_back()
            demand(LEFT + STEP)

    def give_back(self) -> None:
        """Holds nothing in reserve any more: the training may need it."""
        reserve, self._reserve = self._reserve, None
        if reserve is not None:
            reserve.close()


def _addresses(size: int) -> mmap.mmap | None:
    if sys.platform == "win32":  # which has no such limits
        return None
    try:
        return mmap.mmap(-1, size)  # takes no memory: nothing is ever written there
    except (OSError, MemoryError):
        return None


def demand(size: int) -> None:
    """Asks for memory that is given back at once, untouched, where the system may refuse it.

    Args:
        size: how much, in bytes.

    Raises:
        NoMemoryError: it is refused.
    """
    if not _may_refuse():
        return  # a program that takes too much is ended, and nobody is asked
    try:
        mmap.mmap(-1, size).close()
    except (OSError, MemoryError) as error:
        raise NoMemoryError(
            f"the system refuses {size >> 20} MiB of memory ({error}): raise the limit "
            "(`ulimit -v`, what a batch system was asked for) or record less (fewer nodes, no "
            "values, a smaller store.queue_mb)"
        ) from error


def _may_refuse() -> bool:
    return _is_limited() or _is_strict()


def _is_limited() -> bool:
    """Whether this process may have only so many addresses."""
    if sys.platform == "win32":
        return False
    import resource

    return resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY


@functools.cache
def _is_strict() -> bool:
    """Whether the system gives out no more memory than there is."""
    setting = Path("/proc/sys/vm/overcommit_memory")
    return setting.exists() and setting.read_text().strip() == "2"
