"""While the server is idle, prefetches what users are likely to request next."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable

from comgra_decl.viewer.memory import sweep

_LOG = logging.getLogger(__name__)
_SLICE = 0.008  # seconds of small pieces before a pause
_PAUSE = 0.01  # seconds; lets requests run in between
_PAINTED = 0.08  # seconds; a browser on this machine may need the processor to paint
_REST = 1.0  # seconds of idle time before garbage is collected


class Ahead:
    """Runs small pieces of work one by one between requests.

    Prefetches nothing without an event loop, as in a notebook cell.
    """

    def __init__(self) -> None:
        self._work: deque[Callable[[], object]] = deque()
        self._next: asyncio.TimerHandle | None = None

    def plan(self, work: Iterable[Callable[[], object]], *, soon: bool = False) -> None:
        """Replace the planned work; drops unfinished earlier work.

        Args:
            work: Pieces of work, most urgent first.
            soon: Whether to start immediately, because no painting can be delayed.
        """
        self._work = deque(work)
        if self._next is not None:
            self._next.cancel()
            self._next = None
        self._continue(_REST if not self._work else _PAUSE if soon else _PAINTED)

    def _continue(self, pause: float) -> None:
        try:
            self._next = asyncio.get_running_loop().call_later(pause, self._do)
        except RuntimeError:
            self._work.clear()

    def _do(self) -> None:
        self._next = None
        if not self._work:
            sweep()
            return
        until = time.monotonic() + _SLICE
        try:
            while self._work and time.monotonic() < until:
                self._work.popleft()()
        except Exception:  # noqa: BLE001 - the actual request will report it
            _LOG.debug("prefetching failed", exc_info=True)
            self._work.clear()
        self._continue(_PAUSE if self._work else _REST)
