"""Suppresses log messages about closed browser tabs."""

from __future__ import annotations

import logging

from tornado.iostream import StreamClosedError
from tornado.websocket import WebSocketClosedError

_LOGGERS = ("asyncio", "tornado.application", "tornado.general")


class _HungUp(logging.Filter):
    """Drops log records whose exception means that the client closed the connection."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, (WebSocketClosedError, StreamClosedError))


_HUNG_UP = _HungUp()


def forgive_hangups() -> None:
    """Suppresses this process's log messages about closed tabs. Idempotent.

    If a tab closes while a message is being sent, the message fails in a Tornado task that no code
    awaits. Without this filter, asyncio would log a traceback of 30 lines.
    """
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_HUNG_UP)
