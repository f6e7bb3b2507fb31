"""The user's custom views; an error in one does not affect the others."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from typing import Any, ClassVar

import holoviews as hv
import panel as pn
import param

from comgra_decl.errors import ComgraError, UnknownNameError, did_you_mean
from comgra_decl.errors import shown as said
from comgra_decl.viewer.custom import Look, View, ViewsFile
from comgra_decl.viewer.escaping import html_text as _e
from comgra_decl.viewer.linking import Links
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.panes.base import Act, Pane, Shown, html_view
from comgra_decl.viewer.state import SELECTION, ViewState

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
        look = look_of(shown, self._select, self._links)
        self._follow(_followed(look, shown.view.revision))
        for card in self._cards:
            card.update(look, shown.view.revision)

    def _follow(self, now: Mapping[str, Any]) -> None:
        """Tell the stream what the page shows. An error of HoloViews itself replaces no view."""
        try:
            self._links.follow(now)
        except Exception as error:  # noqa: BLE001 - HoloViews raises what it cannot draw
            _LOG.warning("views cannot follow the page: %r", error)
            self._trouble.html = trouble_card("A view could not follow the page", error)
            self._trouble.visible = True
        else:
            self._trouble.visible = self._file.problem is not None or not self._file.views

    def _select(self, **wanted: Any) -> None:
        """Change the selection.

        Raises:
            UnknownNameError: There is no such argument, or the run has no such name.
        """
        for name in wanted:
            _known("argument", name, sorted(ViewState.param))
        if self._shown is not None and wanted.get("run", self._shown.run) == self._shown.run:
            _check(self._shown.view, self._shown.at.node, wanted)
        self.act(**wanted)

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
        self._failed = False  # then it is built anew at the next change
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
        if key == self._key and not self._failed:
            return
        self._key, self._failed = key, False
        try:
            self._draw(look)
        except Exception as error:  # noqa: BLE001 - user code; the page shows the error
            self._content, self._failed = None, True
            self._tell(error)
        else:
            self._tell(None)

    def _tell(self, error: BaseException | None) -> None:
        """Show the view or, in its place, an error."""
        if error is not None:
            _LOG.warning("view %r failed: %r", self._view.name, error)
            self._trouble.html = trouble_card(f"{self._view.name} failed", error)
        self._trouble.visible, self._place.visible = error is not None, error is None

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
        for dynamic in _dynamic(self._content):
            _guard(dynamic, self._tell)
        self._place.objects = [_panel(self._content)]


def _dynamic(content: Any) -> Iterator[hv.DynamicMap]:
    """Yield the DynamicMaps in an element that call the user's functions, inputs included."""
    if not isinstance(content, hv.core.Dimensioned):
        return
    for dynamic in content.traverse(lambda part: part, [hv.DynamicMap]):
        for source in dynamic.callback.inputs:
            yield from _dynamic(source)
        if type(dynamic.callback) is hv.core.spaces.Callable:
            yield dynamic


def _guard(dynamic: hv.DynamicMap, tell: Callable[[BaseException | None], None]) -> None:
    """Let a DynamicMap keep its last element after an error, and tell its view about the error.

    Otherwise, the error would reach whatever changed the stream, and no further view would follow.
    """
    draw = dynamic.callback.callable
    last: list[Any] = []

    @wraps(draw)
    def guarded(*args: Any, **values: Any) -> Any:
        try:
            last[:] = [draw(*args, **values)]
        except Exception as error:
            if not last:
                raise  # while the view is built
            tell(error)
        else:
            tell(None)
        return last[0]

    with param.edit_constant(dynamic.callback):
        dynamic.callback.callable = guarded
    if not dynamic.kdims:
        dynamic[()]  # while an error still concerns this view only


def _check(view: RunView, node: str, wanted: Mapping[str, Any]) -> None:
    """Raise an error for a name that the run does not have."""
    known = {
        "node": view.nodes,
        "role": view.roles(wanted.get("node", node)),
        "statistic": ["", *view.run.statistics],
        "type": ["", *view.run.types, *view.run.tags],
    }
    for name, names in known.items():
        if name in wanted:
            _known(name, wanted[name], names)


def _known(what: str, name: object, names: Iterable[str]) -> None:
    known = list(names)
    if name not in known:
        hint = did_you_mean(str(name), known) or "."
        raise UnknownNameError(f"There is no {what} {said(name)}{hint}")


def _panel(content: Any) -> Any:
    """Return the Panel object of what a view returned. HTML in a text is shown as text."""
    if isinstance(content, str):
        return pn.pane.Markdown(  # type: ignore[no-untyped-call]
            content, renderer_options={"html": False}, sizing_mode="stretch_width"
        )
    return pn.panel(content, sizing_mode="stretch_width")


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
