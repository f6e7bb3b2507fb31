"""Download buttons in the corners of figures."""

from __future__ import annotations

import param

from comgra_decl.viewer.components.base import Component, Message, source


class Takeaway(Component):
    """Adds a download button to each figure; the browser itself renders PNG and SVG.

    Sends `{"csv": id}` if the user requests a figure's data. Reply with `hand_over`.

    Attributes:
        figures: `{"id": id of the Bokeh model, "label": accessible name}`.
    """

    figures = param.List(default=[])

    _esm = source("shared.js", "handover.js", "save_menu.js", "takeaway.js")

    def check(self, message: Message) -> bool:
        """Return whether the message names a figure on the page."""
        return any(figure["id"] == message.get("csv") for figure in self.figures)
