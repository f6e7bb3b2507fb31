"""What holds for every test."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Lets the programs that tests start be interrupted.

    A job that a script starts in the background ignores SIGINT, and so does everything it starts:
    Ctrl-C could not be tested there, nor would servers end.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
