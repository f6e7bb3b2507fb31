"""Reads what is likely to be asked for next, while nobody waits."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable

_LOG = logging.getLogger(__name__)
_PAUSE = 0.01  # seconds: an answer goes out first, and whoever asks comes in between


class Ahead:
    """Does small pieces of work one by one between what users ask for.

    Without an event loop, as in a notebook's cell, nothing is read ahead.
    """

    def __init__(self) -> None:
        self._work: deque[Callable[[], object]] = deque()
        self._next: asyncio.TimerHandle | None = None

    def plan(self, work: Iterable[Callable[[], object]]) -> None:
        """Takes over what is to be done; what was planned before and not done is forgotten."""
        self._work = deque(work)
        if self._work and self._next is None:
            self._continue()

    def _continue(self) -> None:
        try:
            self._next = asyncio.get_running_loop().call_later(_PAUSE, self._do)
        except RuntimeError:
            self._work.clear()

    def _do(self) -> None:
        self._next = None
        if not self._work:
            return
        try:
            self._work.popleft()()
        except Exception:  # noqa: BLE001 - whoever asks for it will be told
            _LOG.debug("could not be read ahead", exc_info=True)
            self._work.clear()
        if self._work:
            self._continue()
