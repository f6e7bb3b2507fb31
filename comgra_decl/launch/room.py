"""Whether there is memory left to begin with, and to go on with.

Where the system refuses memory (`ulimit -v`, batch systems, strict overcommit), the C++ libraries
that tracing needs do not raise: a thread that cannot be made ends the whole program. So it is
asked before they need any, and tracing leaves the last of it to the training.
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


def demand(size: int) -> None:
    """Asks for memory that is given back at once, untouched, where the system may refuse it.

    Args:
        size: how much, in bytes.

    Raises:
        NoMemoryError: it is refused.
    """
    if not (_is_limited() or _is_strict()):
        return  # a program that takes too much is ended, and nobody is asked
    try:
        mmap.mmap(-1, size).close()
    except (OSError, MemoryError) as error:
        raise NoMemoryError(
            f"the system refuses {size >> 20} MiB of memory ({error}): raise the limit "
            "(`ulimit -v`, what a batch system was asked for) or record less (fewer nodes, no "
            "values, a smaller store.queue_mb)"
        ) from error


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
