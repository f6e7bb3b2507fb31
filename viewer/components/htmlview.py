"""HTML created and escaped in Python, with clickable elements."""

from __future__ import annotations

from typing import ClassVar

import param

from comgra_decl.viewer.components.base import Component, Message, source


class HtmlView(Component):
    """Shows HTML and reports clicks on marked elements.

    Mark an element with `data-send="token"`. A click on it, or Enter or Space while it has the
    focus, sends `{"send": token}`. Scripts in the HTML do not run, but names from a run must still
    be escaped.

    Attributes:
        html: HTML to show.
        tokens: Tokens that `html` may send; all other tokens are ignored.
        css: CSS of the content, fixed at construction.
    """

    html = param.String(default="")
    tokens = param.List(default=[], item_type=str)
    css = param.String(default="")

    _esm = source("shared.js", "handover.js", "htmlview.js")
    _rename: ClassVar[dict[str, str | None]] = {"tokens": None}  # used in Python only

    def check(self, message: Message) -> bool:
        """Return whether the message is a token of the current HTML."""
        return message.get("send") in self.tokens
