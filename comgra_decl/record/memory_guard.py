"""Check that enough memory is available to start and to continue recording.

A system may refuse memory because of `ulimit -v`, a batch system or strict overcommit. In that
case, the C++ libraries that tracing uses do not raise an exception: if a thread cannot be created,
the whole program ends. Memory is therefore requested before these libraries need it, and tracing
stops while training still has enough memory. A limit can also be set (with `prlimit`) while a
program is running, after tracing has already allocated its share. For that case, tracing reserves
address space, which takes no memory.
"""

from __future__ import annotations

import functools
import mmap
import sys
from pathlib import Path

from comgra_decl.errors import NoMemoryError

STARTING = 1 << 30
"""Number of bytes required to start. Imports, threads and their stacks took 0.9 GB of address space
(not memory)."""
LEFT = 1 << 28
"""Number of bytes to leave for training. A thread takes 0.14 GB of address space."""
STEP = 1 << 28
"""Number of bytes required to record a step."""


class Room:
    """Monitors the available memory while a run is recorded.

    Raises:
        NoMemoryError: there is too little memory to start.
    """

    def __init__(self) -> None:
        demand(STARTING)
        self._reserve = None if _may_refuse() else _addresses(LEFT + STEP)

    def for_a_step(self) -> None:
        """Check, before a step is recorded, that there is enough memory to record and to train.

        Raises:
            NoMemoryError: the system refuses the memory.
        """
        if _may_refuse():
            self.give_back()
            demand(LEFT + STEP)

    def give_back(self) -> None:
        """Release the reserved address space, which training may need."""
        reserve, self._reserve = self._reserve, None
        if reserve is not None:
            reserve.close()


def _addresses(size: int) -> mmap.mmap | None:
    if sys.platform == "win32":  # has no such limits
        return None
    try:
        return mmap.mmap(-1, size)  # uses no memory, because nothing is ever written to it
    except (OSError, MemoryError):
        return None


def demand(size: int) -> None:
    """Check that memory is available, by allocating it and immediately releasing it.

    Does nothing on systems that do not refuse memory.

    Args:
        size: the amount, in bytes.

    Raises:
        NoMemoryError: the system refuses the memory.
    """
    if not _may_refuse():
        return  # such a system never refuses memory, but kills a program that uses too much
    try:
        mmap.mmap(-1, size).close()
    except (OSError, MemoryError) as error:
        raise NoMemoryError(
            f"the system refuses to allocate {size >> 20} MiB of memory ({error}): raise the limit "
            "(`ulimit -v`, or the memory requested from the batch system) or record less (fewer "
            "nodes, no values, a smaller store.queue_mb)"
        ) from error


def _may_refuse() -> bool:
    return _is_limited() or _is_strict()


def _is_limited() -> bool:
    """Return whether the address space of this process is limited."""
    if sys.platform == "win32":
        return False
    import resource

    return resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY


@functools.cache
def _is_strict() -> bool:
    """Return whether the system uses strict overcommit and therefore refuses memory it lacks."""
    setting = Path("/proc/sys/vm/overcommit_memory")
    return setting.exists() and setting.read_text().strip() == "2"
