"""A piece of HTML, made and escaped in Python, whose marked parts answer to a click."""

from __future__ import annotations

from typing import ClassVar

import param

from comgra_decl.viewer.components.base import Component, Message, source


class HtmlView(Component):
    """Shows HTML and says which of its marked elements the user chose.

    Mark an element with `data-send="token"`; a click on it, or Enter or Space while it has the
    focus, sends `{"send": token}`. Scripts in the HTML do not run, but names that come from a run
    must be escaped all the same.

    Attributes:
        html: What to show.
        tokens: The tokens that `html` may send; anything else is ignored.
        css: Style of the content, fixed at construction.
    """

    html = param.String(default="")
    tokens = param.List(default=[], item_type=str)
    css = param.String(default="")

    _esm = source("shared.js", "handover.js", "htmlview.js")
    _rename: ClassVar[dict[str, str | None]] = {"tokens": None}  # for Python's own check

    def check(self, message: Message) -> bool:
        """Whether the message is one of the tokens on screen."""
        return message.get("send") in self.tokens
