"""What holds for every test."""

from __future__ import annotations

import gc
import os
import signal

# Before torch is imported, here and in the programs that tests start: tests run side by side, and
# nets of a few numbers only wait for a second thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure() -> None:
    """Lets the programs that tests start be interrupted.

    A job that a script starts in the background ignores SIGINT, and so does everything it starts:
    Ctrl-C could not be tested there, nor would servers end.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Takes what was imported out of every later collection: a million objects that stay."""
    gc.collect()
    gc.freeze()
