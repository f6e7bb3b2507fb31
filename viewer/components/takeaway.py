"""Buttons in the corners of figures, which hand on what they show as files."""

from __future__ import annotations

import param

from comgra_decl.viewer.components.base import Component, Message, source


class Takeaway(Component):
    """Puts a button into each of the figures; pictures are made in the browser.

    Says `{"csv": id}` when the user wants the numbers of a figure; `hand_over` gives them.

    Attributes:
        figures: `{"id": id of the Bokeh model, "label": what a screen reader calls it}`.
    """

    figures = param.List(default=[])

    _esm = source("shared.js", "handover.js", "save_menu.js", "takeaway.js")

    def check(self, message: Message) -> bool:
        """Whether the message names a figure that is on the page."""
        return any(figure["id"] == message.get("csv") for figure in self.figures)
