"""Download menus for figures: the figures on the page, and their data."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from comgra_decl.viewer.components.base import Message
from comgra_decl.viewer.components.takeaway import Takeaway
from comgra_decl.viewer.model.selection import Selection
from comgra_decl.viewer.model.takeaway import CSV, clean_name
from comgra_decl.viewer.panes.base import Exhibit, Pane


class Files:
    """Adds a download button to every figure of some panes; `view` is added to the page.

    Args:
        panes: Returns the current panes.
        at: Returns the selection, which is part of the file names.
    """

    def __init__(self, panes: Callable[[], Iterable[Pane]], at: Callable[[], Selection]) -> None:
        self._panes, self._at = panes, at
        self.view = Takeaway(width=0, height=0, margin=0)
        self.view.on_message(self._hand_over)

    def refresh(self) -> None:
        """Update the page's list of figures."""
        now = [{"id": key, "label": exhibit.label} for key, exhibit in self._exhibits().items()]
        if now != self.view.figures:
            self.view.figures = now

    def _exhibits(self) -> dict[str, Exhibit]:
        shown = (exhibit for pane in self._panes() for exhibit in pane.exhibits())
        return {exhibit.figure.ref["id"]: exhibit for exhibit in shown}

    def _hand_over(self, message: Message) -> None:
        exhibit, at = self._exhibits()[message["csv"]], self._at()
        name = clean_name(at.node, at.role, f"step{at.step}", exhibit.label, ending=".csv")
        self.view.hand_over(name, exhibit.csv(), kind=CSV)
