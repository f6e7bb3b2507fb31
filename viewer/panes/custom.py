"""The user's custom views; an error in one does not affect the others."""

from __future__ import annotations

import logging
import traceback
from typing import Any, ClassVar

import panel as pn

from comgra_decl.errors import ComgraError
from comgra_decl.viewer.custom import Look, View, ViewsFile
from comgra_decl.viewer.escaping import html_text as _e
from comgra_decl.viewer.linking import Links
from comgra_decl.viewer.panes.base import Act, Pane, Shown, html_view
from comgra_decl.viewer.state import SELECTION

_LOG = logging.getLogger(__name__)
_GRID = """
:host { display: flex !important; flex-flow: row wrap !important; gap: 10px 20px; }
.scroll-button { display: none !important; }
"""
_NONE = (
    '<div class="notice"><h2>No views yet</h2>'
    "<p>The <code>views</code> function returned an empty list.</p></div>"
)


class CustomPane(Pane):
    """A card per custom view."""

    reads: ClassVar = frozenset({*SELECTION, "run", "revision", "views", "brush"})
    sizing: ClassVar = "stretch_width"

    def __init__(self, act: Act, file: ViewsFile) -> None:
        self._file = file
        self._version = -1
        self._cards: list[_Card] = []
        self._links = Links(act)
        super().__init__(act)

    def build(self) -> Any:
        """Create the container for the cards and for an error in the whole file."""
        self._trouble = html_view(visible=False)
        self._grid = pn.Column(sizing_mode="stretch_width", margin=0, stylesheets=[_GRID])
        return pn.Column(self._trouble, self._grid, sizing_mode="stretch_width", margin=0)

    def update(self, shown: Shown) -> None:
        """Rebuilds the cards if the file was reloaded; otherwise, updates the affected cards."""
        if self._file.version != self._version:
            self._version = self._file.version
            self._links.forget()
            self._take(self._file)
        elif self._links.worn:
            self._links.forget()
            for card in self._cards:
                card.forget()
        look = look_of(shown, self.act, self._links)
        self._links.follow(_followed(look, shown.view.revision))
        for card in self._cards:
            card.update(look, shown.view.revision)

    def _take(self, file: ViewsFile) -> None:
        problem = file.problem
        if problem is not None:
            self._trouble.html = trouble_card(f"Cannot read {file.path.name}", problem)
        elif not file.views:
            self._trouble.html = _NONE
        self._trouble.visible = problem is not None or not file.views
        if problem is None:  # show the last working views while the user edits the file
            self._cards = [_Card(view) for view in file.views]
            self._grid.objects = [card.panel for card in self._cards]


class _Card:
    """One view: its title, its content, or its error."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._key: object = None
        self._content: Any = None
        self._trouble = html_view(visible=False)
        self._place = pn.Column(sizing_mode="stretch_width", margin=0)
        title = html_view()
        title.html = f"<h2>{_e(view.name)}</h2>"
        self.panel = pn.Column(
            title, self._trouble, self._place, margin=0, styles={"flex": "1 1 420px"},
            css_classes=["custom-view"], min_width=320,
        )  # fmt: skip

    def update(self, look: Look, revision: int) -> None:
        """Update the view if something that it reads has changed."""
        key = (look.run, revision if "run" in self._view.reads else 0,
               *(getattr(look, name) for name in sorted(self._view.reads)))  # fmt: skip
        if key == self._key:
            return
        self._key = key
        try:
            self._draw(look)
        except Exception as error:  # noqa: BLE001 - user code; the page shows the error
            _LOG.warning("view %r failed: %r", self._view.name, error)
            self._content = None
            self._trouble.html = trouble_card(f"{self._view.name} failed", error)
            self._trouble.visible, self._place.visible = True, False
        else:
            self._trouble.visible, self._place.visible = False, True

    def forget(self) -> None:
        """Forget what was built, so that the next update builds it anew."""
        self._key = self._content = None

    def _draw(self, look: Look) -> None:
        if self._content is not None and self._view.update is not None:
            self._view.update(self._content, look)
            return
        if look.links is not None:
            look.links.begin(self)
        self._content = self._view.build(look)
        self._place.objects = [pn.panel(self._content, sizing_mode="stretch_width")]


def _followed(look: Look, revision: int) -> dict[str, Any]:
    """Return the values of the stream `Selected`."""
    names = ("run", "node", "role", "iteration", "step", "type", "statistic", "sample")
    brush = look.brush
    brushed = {"samples": brush.samples, "steps": brush.steps, "runs": brush.runs}
    return {name: getattr(look, name) for name in names} | brushed | {"revision": revision}


def look_of(shown: Shown, act: Act, links: Links) -> Look:
    """Return the `Look` for a custom view."""
    at = shown.at
    return Look(
        run=shown.view.run, step=at.step, type=at.type, node=at.node, role=at.role,
        iteration=at.iteration, gradient=at.gradient, batch=at.batch, statistic=at.statistic,
        brush=shown.brush, select=act, links=links,
    )  # fmt: skip


def trouble_card(title: str, error: BaseException) -> str:
    """Return an error card for the user's file. The traceback starts in the user's code."""
    text = str(error) or type(error).__name__
    if not isinstance(error, ComgraError):
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None and _is_ours(trace):
            trace = trace.tb_next
        text = "".join(traceback.format_exception(type(error), error, trace))
    return f'<div class="notice bad wide"><h2>{_e(title)}</h2><pre>{_e(text)}</pre></div>'


def _is_ours(trace: Any) -> bool:
    file: str = trace.tb_frame.f_code.co_filename
    return file.endswith(("viewer/custom.py", "panes/custom.py"))
