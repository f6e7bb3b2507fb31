"""Reads what is likely to be asked for next, while nobody waits."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable

from comgra_decl.viewer.memory import sweep

_LOG = logging.getLogger(__name__)
_PAUSE = 0.01  # seconds: whoever asks comes in between
_PAINTED = 0.08  # seconds: until a browser, perhaps on this machine, has painted an answer
_REST = 1.0  # seconds without anything to do, after which it is time to tidy up


class Ahead:
    """Does small pieces of work one by one between what users ask for.

    Without an event loop, as in a notebook's cell, nothing is read ahead.
    """

    def __init__(self) -> None:
        self._work: deque[Callable[[], object]] = deque()
        self._next: asyncio.TimerHandle | None = None

    def plan(self, work: Iterable[Callable[[], object]], *, soon: bool = False) -> None:
        """Takes over what is to be done; what was planned before and not done is forgotten.

        Args:
            work: Pieces of work, the most urgent first.
            soon: Whether nothing is being painted meanwhile that it could delay.
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
        try:
            self._work.popleft()()
        except Exception:  # noqa: BLE001 - whoever asks for it will be told
            _LOG.debug("could not be read ahead", exc_info=True)
            self._work.clear()
        self._continue(_PAUSE if self._work else _REST)
