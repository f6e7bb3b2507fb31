"""HTML created and escaped in Python, with clickable elements."""

from __future__ import annotations

from typing import ClassVar

import param

from comgra_decl.viewer.components.base import Component, Message, source

_DIGITS = 7


class HtmlView(Component):
    """Shows HTML and reports clicks on marked elements.

    Mark an element with `data-send="token"`. A click on it, or Enter or Space while it has the
    focus, sends `{"send": token}`. A picture of cells (`data-cells="token"`, with the names of its
    rows and columns as JSON and its values as little-endian float32 in base64) sends
    `{"send": "token:ROW:COLUMN"}` and shows the value at the pointer in the next `output`.

    In a drawing of marks (`data-lasso="token"` around elements with `data-mark="NUMBER"`), a line
    drawn around some marks sends `{"send": "token:1,4,7"}`, and a click or Enter with Shift adds or
    removes one of those with the class `brushed`. No number means none.

    Scripts in the HTML do not run, but names from a run must still be escaped.

    Attributes:
        html: HTML to show.
        tokens: Tokens that `html` may send; all other tokens are ignored.
        grids: Numbers of rows and columns of what sends the cells that are clicked, by token.
        picks: Numbers of marks in the drawings that send them, by token.
        css: CSS of the content, fixed at construction.
    """

    html = param.String(default="")
    tokens = param.List(default=[], item_type=str)
    grids = param.Dict(default={})
    picks = param.Dict(default={})
    css = param.String(default="")

    _esm = source("shared.js", "handover.js", "htmlview.js")
    _rename: ClassVar[dict[str, str | None]] = {  # Python only
        "tokens": None, "grids": None, "picks": None,
    }  # fmt: skip

    def check(self, message: Message) -> bool:
        """Return whether the message is a token of the current HTML."""
        sent = message.get("send")
        if not isinstance(sent, str):
            return False
        return sent in self.tokens or self._is_cell(sent) or self._is_pick(sent)

    def _is_pick(self, sent: str) -> bool:
        token, _, numbers = sent.rpartition(":")
        most = self.picks.get(token)
        return most is not None and all(
            text.isascii() and text.isdecimal() and len(text) < _DIGITS and int(text) < most
            for text in (numbers.split(",") if numbers else ())
        )

    def _is_cell(self, sent: str) -> bool:
        token, *cell = sent.rsplit(":", 2)
        size = self.grids.get(token)
        return size is not None and all(
            text.isascii() and text.isdecimal() and len(text) < _DIGITS and int(text) < most
            for text, most in zip(cell, size, strict=True)
        )
