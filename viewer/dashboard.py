"""One session: the state, the panes, and the one path by which anything on screen changes."""

from __future__ import annotations

import html
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import panel as pn

from comgra_decl.errors import ComgraError
from comgra_decl.viewer import url
from comgra_decl.viewer.components.base import Message
from comgra_decl.viewer.components.urlsync import UrlSync
from comgra_decl.viewer.custom import ViewsFile
from comgra_decl.viewer.files import Files
from comgra_decl.viewer.model.catalogue import Catalogue, RunEntry
from comgra_decl.viewer.model.choices import run_choice
from comgra_decl.viewer.model.compare import DIFFERENCE
from comgra_decl.viewer.model.found import looks
from comgra_decl.viewer.model.other import Other, other_of
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.selection import Selection, resolve
from comgra_decl.viewer.model.states import BRAND, Notice, head_of, notice_for
from comgra_decl.viewer.panes.base import Pane, Shown, html_view, problem_card
from comgra_decl.viewer.panes.graph import GraphPane
from comgra_decl.viewer.panes.selectors import SelectorsPane
from comgra_decl.viewer.panes.steps import StepsPane
from comgra_decl.viewer.sections import sections
from comgra_decl.viewer.state import SECTIONS, SELECTION, ViewState

_LOG = logging.getLogger(__name__)
_FILL = {"flex": "1 1 0", "min-height": "0", "overflow": "hidden"}
_KEPT = ("section", "scale", "expanded", "pass_", "slicing", "order", "window",
         "other", "other_step", "axis")  # fmt: skip
_OTHERS = ("run", "colour", "follow", "revision", "looked", "other_revision", "views", *_KEPT)
_KEYS = """
<div class="keys"><kbd>,</kbd> <kbd>.</kbd> previous, next step &middot; <kbd>Shift</kbd> ten<br>
<kbd>/</kbd> find a node &middot; arrows walk the graph<br>
<kbd>Enter</kbd> open a group &middot; drag in a chart to zoom</div>
"""


class Dashboard:
    """The viewer of one session; `head`, `side` and `main` are what a page puts somewhere.

    Everything that changes goes through `change`: it resolves what is wanted into what exists,
    sets the state once, and redraws the panes that read what has changed, in one message.

    Args:
        catalogue: The runs to choose from, shared with other sessions.
        query: The address' query to start from; untrusted.
        views: The user's own views, if a file of them was given.
    """

    def __init__(
        self, catalogue: Catalogue, *, query: str = "", views: ViewsFile | None = None
    ) -> None:
        self.catalogue = catalogue
        self._views = views
        self._other: Other | None = None
        self.state = ViewState()
        self._view: RunView | None = None
        self._roles: dict[str, str] = {}
        self._entries: object = None
        self._waiting = False
        self._ready = False
        self._build()
        self._first_query: str | None = query
        self._restoring = False
        self.state.param.watch(self._on_state, [*SELECTION, *_OTHERS])
        with self._guarded():
            catalogue.poll(wait=True)
            self._restore(query, first=True)

    # --- building ----------------------------------------------------------------------------

    def _build(self) -> None:
        self.graph = GraphPane(self.change)
        self.steps = StepsPane(self.change)
        self.selectors = SelectorsPane(
            self.change, lambda: run_choice(self._runs(), self.state.run)
        )
        self.sections = sections(self.change, runs=self._runs, views=self._views)
        self.files = Files(
            lambda: (pane for section in self.sections.values() for pane in section.panes),
            lambda: self.state.selection,
        )
        self.url = UrlSync(width=0, height=0, margin=0)
        self.url.on_message(self._on_url)
        self.head = html_view(sizing_mode=None)
        self._tabs = html_view()
        self._tabs.on_message(lambda message: self.change(section=message["send"]))
        self._tabs.tokens = [key for key in SECTIONS if key != "views" or self._views is not None]
        self._banner = html_view(visible=False)
        self._notice = html_view(visible=False)
        self._frame = [self.graph, self.steps]
        self.graph.panel.styles = {"flex": "0 0 auto", "height": "max(210px, 34vh)"}
        self.graph.panel.margin, self.steps.panel.margin = (10, 14, 4, 14), (0, 14)
        self._workspace = pn.Column(
            self.graph.panel, self.steps.panel, self._tabs,
            *(section.holder for section in self.sections.values()),
            sizing_mode="stretch_both", margin=0, visible=False, styles=_FILL,
        )  # fmt: skip
        self.main = pn.Column(
            self._banner, self._notice, self._workspace, self.url, self.files.view,
            sizing_mode="stretch_both", margin=0, styles=_FILL,
        )  # fmt: skip
        keys = html_view()
        keys.html = _KEYS
        self.side = pn.Column(self.selectors.panel, keys, sizing_mode="stretch_width", margin=0)

    def _runs(self) -> tuple[RunEntry, ...]:
        return self.catalogue.entries

    def start(self) -> None:
        """Lets the browser send: to be called when the page has loaded."""
        self._ready = True
        own = [self.url, self.head, self._tabs, self.files.view]
        shown = [pane for section in self.sections.values() for pane in section.panes]
        _make_ready([*self._frame, self.selectors, *shown], own)

    def whole(self) -> pn.Row:
        """Returns selectors, graph, steps and sections for a page of somebody else's."""
        self.side.sizing_mode, self.side.width = "stretch_height", 220
        return pn.Row(self.side, self._workspace, sizing_mode="stretch_both", margin=0)

    def alone(self, what: Any) -> list[Any]:
        """Returns what a page of somebody else's shows for `what`; never the address' keeper."""
        return [self._notice] if self._view is None else [self._banner, what]

    # --- changing ----------------------------------------------------------------------------

    def change(self, **wanted: Any) -> None:
        """Shows something else, as near as possible to what is wanted.

        Args:
            **wanted: Parameters of `ViewState` by name; values need not exist in the run.
        """
        with self._guarded():
            self._change(wanted)

    def _change(self, wanted: dict[str, Any]) -> None:
        run = wanted.pop("run", self.state.run)
        if self.catalogue.entry(run) is None:
            run = self.catalogue.default()
        try:
            look = self.catalogue.look if self._view is None else self.catalogue.open
            view = look(run) if run else None
        except ComgraError as error:
            self.state.run = run
            self._show_notice(notice_for(self.catalogue, run, error))
            return
        if view is None or not len(view.run.records):
            self._view = None
            self.state.run = run
            self._waiting = True
            self._show_notice(notice_for(self.catalogue, run, None))
            return
        if self._waiting:  # who has waited for the first record wants to see the next ones
            self._waiting = False
            wanted.setdefault("follow", view.run.state == "live")
        self._point(run, view, wanted)

    def _point(self, run: str, view: RunView, wanted: dict[str, Any]) -> None:
        state = self.state
        follow = wanted.get("follow", state.follow)
        point = {name: wanted[name] for name in SELECTION if name in wanted}
        if follow:
            point["step"] = None
        if "node" in point and point["node"] != state.node and "role" not in point:
            point["role"] = ""
        before, self._view = self._view, view
        at = resolve(view, replace(state.selection, **point), self._roles)
        self._roles[at.node] = at.role
        colour = wanted.get("colour", state.colour)
        painted = ("forward", DIFFERENCE, "findings", *view.gradient_passes())
        others = {
            "run": run,
            "revision": view.revision,
            "looked": looks(view),
            "follow": follow,
            "colour": colour if colour in painted else "kind",
            **{name: wanted.get(name, getattr(state, name)) for name in _KEPT},
        }
        if others["section"] not in self._tabs.tokens:
            others["section"] = state.param.section.default
        others["views"] = -1 if self._views is None else self._views.version
        if view is before and at.node != state.node and "expanded" not in wanted:
            others["expanded"] = self.graph.revealed(at.node)
        self._compare(view, at, others)
        state.put(at, **others)
        if not self._workspace.visible:  # nothing changed since a notice took its place
            self._refresh(frozenset())

    def _compare(self, view: RunView, at: Selection, others: dict[str, Any]) -> None:
        """Opens what the run is compared with, while something on screen compares."""
        self._other = None
        if others["section"] == "compare" or others["colour"] == DIFFERENCE:
            self._other = other_of(
                self.catalogue, view, at, run=others["other"], step=others["other_step"]
            )
            there = self._other.view
            others["other"] = self._other.run
            others["other_revision"] = -1 if there is None else there.revision

    def _on_state(self, *events: Any) -> None:
        if self._view is not None:
            self._refresh(frozenset(event.name for event in events))

    # --- drawing -----------------------------------------------------------------------------

    def _refresh(self, names: frozenset[str]) -> None:
        """Redraws what reads the changed names, and the address; all in one message."""
        assert self._view is not None
        shown = self._shown(self._view)
        if not self._workspace.visible:
            names = frozenset(self.state.param)
        with pn.io.hold():
            self._show_workspace()
            if "section" in names or not self._tabs.html:
                self._show_section()
            if names & {"run", "revision"}:
                self._show_head(head_of(self._view, self.state.run))
            for pane in (*self._frame, self.selectors):
                if pane.reads & names:
                    pane.refresh(shown)
            for section in self.sections.values():
                section.refresh(names, shown)
            if names & {"run", "revision", "section"}:
                self.files.refresh()
            self._write_url(names)

    def _shown(self, view: RunView) -> Shown:
        state = self.state
        return Shown(
            view, state.selection, state.colour, state.scale, state.expanded, state.follow,
            pass_=state.pass_, slicing=state.slicing, order=state.order, window=state.window,
            axis=state.axis, other=self._other, run=state.run,
        )  # fmt: skip

    def _show_section(self) -> None:
        self._tabs.html = _tabs_html(self.state.section, self._tabs.tokens)
        for key, section in self.sections.items():
            made = section.show(key == self.state.section)
            if self._ready:
                _make_ready(made, [])

    def _show_head(self, content: str) -> None:
        content = f'<div class="head">{content}</div>'
        if self.head.html != content:
            self.head.html = content

    def _show_workspace(self) -> None:
        if not self._workspace.visible:
            self._notice.visible = False
            self._workspace.visible = True
            self._tabs.html = ""

    def _show_notice(self, notice: Notice) -> None:
        self._view = None
        with pn.io.hold():
            self._notice.html = (
                f'<div class="notice big {notice.tone}"><h2>{html.escape(notice.title)}</h2>'
                + "".join(f"<p>{html.escape(line)}</p>" for line in notice.lines)
                + (f"<pre>{html.escape(notice.code)}</pre>" if notice.code else "")
                + "</div>"
            )
            self._workspace.visible = False
            self._notice.visible = True
            self._show_head(BRAND)
            self.selectors.only_runs()
            self._write_url(frozenset({"run"}))

    def _write_url(self, names: frozenset[str]) -> None:
        """Tells the browser the address; going back or forward never makes a new entry."""
        query = url.format_query(self.state)
        if self._ready and query != self.url.query:
            push = not self._restoring and bool(names & url.PUSHED)
            self.url.param.update(query=query, push=push)

    # --- what comes from outside -------------------------------------------------------------

    def poll(self) -> None:
        """Looks for new records and runs; nothing that is looked at moves unless it follows."""
        with self._guarded(quiet=True):
            self.catalogue.poll()
            if self._view is None:
                self._change({})
            else:
                self._look()
            if self.catalogue.entries is not self._entries:
                self._entries = self.catalogue.entries
                self._offer_runs()

    def _look(self) -> None:
        try:
            view = self.catalogue.look(self.state.run)
        except ComgraError as error:
            self._show_notice(notice_for(self.catalogue, self.state.run, error))
            return
        if view is not self._view or view.revision != self.state.revision or self._moved(view):
            self._point(self.state.run, view, {})
        elif self.state.run:
            self._show_head(head_of(view, self.state.run))

    def _moved(self, view: RunView) -> bool:
        """Whether findings, the other run or custom views are newer than what is on screen."""
        if looks(view) != self.state.looked:
            return True
        if self._views is not None and self._views.look() != self.state.views:
            return True
        other = self._other
        if other is None or not other.run or other.view is None:
            return False
        try:
            return self.catalogue.look(other.run).revision != self.state.other_revision
        except ComgraError:
            return True

    def _offer_runs(self) -> None:
        if self._view is None:
            self.selectors.only_runs()
        else:
            self.selectors.refresh(self._shown(self._view))

    def _on_url(self, message: Message) -> None:
        query = message["query"]
        with self._guarded():
            if query != self._first_query:  # that one is told once more when the page is ready
                self._restoring = True
                try:
                    self._restore(query)
                finally:
                    self._restoring = False
            self._first_query = None
            self._write_url(frozenset())

    def _restore(self, query: str, *, first: bool = False) -> None:
        """Shows what an address says; what it leaves out takes its default."""
        fields = (*SELECTION, "run", "colour", *_KEPT)
        wanted = {name: self.state.param[name].default for name in fields}
        found = url.parse(query)
        wanted.update(found)
        run = wanted["run"] if self.catalogue.entry(wanted["run"]) else self.catalogue.default()
        entry = self.catalogue.entry(run)
        live = entry is not None and entry.state in ("live", "waiting")
        wanted["follow"] = "step" not in found and (live if first else self.state.follow)
        self._change(wanted)

    # --- when something goes wrong -----------------------------------------------------------

    @contextmanager
    def _guarded(self, *, quiet: bool = False) -> Iterator[None]:
        """Shows an error above the page instead of leaving it silently dead."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, it must be seen
            if not isinstance(error, ComgraError):
                _LOG.exception("the page could not be updated")
            self._banner.html = problem_card("This change could not be shown", error)
            self._banner.visible = True
        else:
            if self._banner.visible and not quiet:
                self._banner.visible = False


def _make_ready(panes: list[Pane], own: list[Any]) -> None:
    for component in [*own, *(c for pane in panes for c in pane.components())]:
        component.ready = True


def _tabs_html(chosen: str, offered: list[str]) -> str:
    buttons = "".join(
        f'<button type="button" role="tab" data-send="{key}" '
        f'aria-selected="{str(key == chosen).lower()}">{SECTIONS[key]}</button>'
        for key in offered
    )
    return f'<div class="tabs" role="tablist">{buttons}</div>'
