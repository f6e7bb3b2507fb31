"""A tab that is closed while it is told something is no fault, and worth no traceback."""

from __future__ import annotations

import logging

from tornado.iostream import StreamClosedError
from tornado.websocket import WebSocketClosedError

_LOGGERS = ("asyncio", "tornado.application", "tornado.general")


class _HungUp(logging.Filter):
    """Drops records whose exception says no more than that the other side is gone."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, (WebSocketClosedError, StreamClosedError))


_HUNG_UP = _HungUp()


def forgive_hangups() -> None:
    """Keeps closed tabs out of the log of this process; as often as one likes.

    A message that is on its way when a tab closes ends in a task of tornado's that nobody awaits,
    and asyncio then logs a traceback of thirty lines.
    """
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_HUNG_UP)
