"""What the viewer's browser components have in common.

A component draws what its parameters say and sends small messages back. Nothing in a message is
trusted: each component checks it against what it shows before any callback sees it.

The browser side keeps at most one message in flight. It waits for `ready` before the first one
(messages that arrive before Panel has finished loading a page are lost half-way) and for a change
of `ack` before the next; of several clicks made meanwhile only the newest is sent.
"""

from __future__ import annotations

import base64
import logging
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


def source(*names: str) -> str:
    """Returns files of this folder joined, so that a component travels as one piece of text.

    The text is handed to Panel as such: paths would be fetched one by one, do not work in every
    template, and not at all in a notebook.
    """
    return "\n".join((_FOLDER / name).read_text(encoding="utf-8") for name in names)


class Component(MessagingComponent):
    """A browser component that answers with checked messages.

    Attributes:
        ready: Whether somebody answers: True once the page is loaded (`pn.state.onload`; at once in
            a notebook), never in a saved file.
        ack: Counts handled messages. The component raises it itself after the callbacks returned.
    """

    __abstract = True

    ready = param.Boolean(default=False)
    ack = param.Integer(default=0)

    def __init__(self, **params: Any) -> None:
        self._callbacks: list[Callback] = []
        super().__init__(**params)

    def on_message(self, callback: Callback) -> None:
        """Calls `callback` with every message that has passed the check, in order.

        The component's own parameters already say what the message says (`selected`, `index`,
        `follow`, `query`).
        The browser hears that a message is done when the callbacks have returned, so they should
        do their work before returning.
        """
        self._callbacks.append(callback)

    def put(self, **changes: Any) -> None:
        """Sets own parameters, those that are new; `param.update` reads all others before it."""
        with pn.io.hold():
            for name, value in changes.items():
                if getattr(self, name) != value:
                    setattr(self, name, value)

    def check(self, message: Message) -> bool:
        """Whether a message means something here and now; to be given by each component."""
        raise NotImplementedError

    def accept(self, message: Message) -> None:
        """Takes a checked message over into the own parameters, before any callback."""

    def hand_over(self, name: str, content: bytes, *, kind: str) -> None:
        """Gives the user a file; nothing of it stays, neither here nor in the page.

        For components whose source has `handover.js`.

        Args:
            name: What the file is called; "" puts the content, a text, on the clipboard.
            content: What is in it.
            kind: Its media type.
        """
        encoded = base64.b64encode(content).decode()
        self.send_to_browser({"name": name, "kind": kind, "content": encoded})

    def on_browser_message(self, data: Any) -> None:
        """Checks a message, hands it to the callbacks, and acknowledges it."""
        with pn.io.hold():  # all that follows from it, and the answer, in one message
            try:
                self._act_on(data)
            finally:
                self.ack += 1

    def _act_on(self, data: Any) -> None:
        if not (isinstance(data, dict) and len(data) == 1 and self.check(data)):
            _LOG.debug("%s ignored the message %.200r", type(self).__name__, data)
            return
        self.accept(data)
        for callback in list(self._callbacks):
            callback(data)
