"""Base class of the viewer's browser components.

A component draws its parameters and sends small messages back. Messages are untrusted: each
component checks them against what it shows before any callback runs.

The browser sends one message at a time. It waits for `ready` before it sends the first
message, because messages sent before Panel has loaded the page are lost. Before each subsequent
message, it waits until `ack` changes. If the user clicks several times in the meantime, only the
newest click is sent. Without a reply, a message is sent again, because a notebook may lose the
first ones; its `serial` prevents it from being handled twice.
"""

from __future__ import annotations

import base64
import logging
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import panel as pn
import param

from comgra_decl.viewer.panel_private import MessagingComponent

Message = dict[str, Any]
Callback = Callable[[Message], object]

_FOLDER = Path(__file__).parent
_LOG = logging.getLogger(__name__)
_REMEMBERED = 64  # serials per component: each browser waits for a reply before its next message
_LONGEST_SERIAL = 40


def source(*names: str) -> str:
    """Return the joined source of files in this folder.

    Panel receives text instead of paths, because it would fetch paths one by one, which fails in
    some templates and in notebooks.
    """
    return "\n".join((_FOLDER / name).read_text(encoding="utf-8") for name in names)


class Component(MessagingComponent):
    """A browser component that sends checked messages.

    Attributes:
        ready: Whether the server answers messages. True once the page has loaded
            (`pn.state.onload`), and immediately in a notebook. Never True in a saved file.
        ack: Number of handled messages, incremented after the callbacks have returned.
    """

    __abstract = True

    ready = param.Boolean(default=False)
    ack = param.Integer(default=0)

    def __init__(self, **params: Any) -> None:
        self._callbacks: list[Callback] = []
        self._handled: deque[str] = deque(maxlen=_REMEMBERED)
        super().__init__(**params)

    def on_message(self, callback: Callback) -> None:
        """Call `callback` with every message that passed the check, in order.

        When the callbacks run, the component's parameters (`selected`, `index`, `follow`, `query`)
        already match the message. The browser sends its next message after the callbacks have
        returned, so they should finish their work before returning.
        """
        self._callbacks.append(callback)

    def put(self, **changes: Any) -> None:
        """Set the component's parameters that have changed, without reading all of them."""
        with pn.io.hold():
            for name, value in changes.items():
                if getattr(self, name) != value:
                    setattr(self, name, value)

    def check(self, message: Message) -> bool:
        """Return whether a message is valid for the displayed content; see subclasses."""
        raise NotImplementedError

    def accept(self, message: Message) -> None:
        """Copy a checked message into the component's parameters before the callbacks run."""

    def hand_over(self, name: str, content: bytes, *, kind: str) -> None:
        """Send a file to the user without storing it on the server or the page.

        Requires `handover.js` in the component's source.

        Args:
            name: File name. If "", the content must be text and is copied to the clipboard.
            content: Content of the file.
            kind: MIME type.
        """
        encoded = base64.b64encode(content).decode()
        self.send_to_browser({"name": name, "kind": kind, "content": encoded})

    def on_browser_message(self, data: Any) -> None:
        """Check a message, pass it to the callbacks, and acknowledge it.

        A message whose serial has been handled is ignored.
        """
        if isinstance(data, dict):
            data = {**data}
            serial = data.pop("serial", None)
            if serial in self._handled:
                return
            if isinstance(serial, str) and len(serial) <= _LONGEST_SERIAL:
                self._handled.append(serial)
        with pn.io.hold():  # one message for all changes and the acknowledgement
            try:
                self.handle(data)
            finally:
                self.ack += 1

    def handle(self, data: Any) -> None:
        """Check a message, and pass it to the callbacks if it is valid."""
        if not (isinstance(data, dict) and len(data) == 1 and self.check(data)):
            _LOG.debug("%s ignored the message %.200r", type(self).__name__, data)
            return
        self.accept(data)
        for callback in list(self._callbacks):
            callback(data)
