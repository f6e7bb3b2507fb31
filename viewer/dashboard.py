"""One browser session: its state, and the only code path that changes the screen."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import panel as pn

from comgra_decl.errors import ComgraError
from comgra_decl.viewer import url
from comgra_decl.viewer.components.base import Message
from comgra_decl.viewer.custom import ViewsFile
from comgra_decl.viewer.model import likely_reads as likely
from comgra_decl.viewer.model.catalogue import Catalogue
from comgra_decl.viewer.model.clouds import laid_out
from comgra_decl.viewer.model.compare import DIFFERENCE
from comgra_decl.viewer.model.comparison_target import Other, other_of
from comgra_decl.viewer.model.edge_paint import EFFECTS, painted_interventions
from comgra_decl.viewer.model.findings import opening, painted_rule
from comgra_decl.viewer.model.memory_use import MEMORY, has_memory
from comgra_decl.viewer.model.partings import ended
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.selection import Selection, resolve
from comgra_decl.viewer.model.states import head_of, notice_for
from comgra_decl.viewer.model.time_use import TIME, has_times
from comgra_decl.viewer.model.unusual import UNUSUAL
from comgra_decl.viewer.model.verdicts import looks
from comgra_decl.viewer.panes.base import Shown
from comgra_decl.viewer.prefetching import Ahead
from comgra_decl.viewer.screen import Screen
from comgra_decl.viewer.state import SELECTION, ViewState
from comgra_decl.visible import visible

_LOG = logging.getLogger(__name__)
_KEPT = ("section", "scale", "measure", "expanded", "graph", "between", "route", "pass_",
         "slicing", "order", "window", "other", "other_step", "other_type", "axis", "ticked",
         "smoothing", "x_axis", "metric", "against", "brush")  # fmt: skip
_OTHERS = ("run", "colour", "follow", "revision", "looked", "other_revision", "views", "walk",
           "library", *_KEPT)  # fmt: skip
_OF_ALL_RUNS = ("runs", "explore")
"""Sections that show what the library has read."""


class Dashboard:
    """The viewer of one session; `screen` contains what the page shows.

    Every change goes through `change`, which resolves the request to values that exist, sets the
    state once and redraws the affected panes in one message.

    Args:
        catalogue: Available runs, shared between sessions.
        query: Initial URL query; untrusted.
        views: Custom views; None without a views file.
    """

    def __init__(
        self, catalogue: Catalogue, *, query: str = "", views: ViewsFile | None = None
    ) -> None:
        self.catalogue = catalogue
        self._views = views
        self._library = catalogue.library
        self._other: Other | None = None
        self._view: RunView | None = None
        self._roles: dict[str, str] = {}
        self._iteration = 0  # the last choice, kept while a node without this iteration is selected
        self._entries: object = None
        self._waiting = False
        self._first_query: str | None = query
        self._restoring = False
        self.state = ViewState()
        self.screen = Screen(
            self.change, state=self.state, library=self._library, runs=lambda: catalogue.entries,
            views=views,
        )  # fmt: skip
        self._ahead = Ahead()
        self.screen.url.on_message(self._on_url)
        self.screen.graph.on_look(self._look_ahead)
        self.state.param.watch(self._on_state, [*SELECTION, *_OTHERS])
        with self._guarded():
            catalogue.poll(wait=True)
            self._restore(query, first=True)

    # --- changing ----------------------------------------------------------------------------

    def change(self, **wanted: Any) -> None:
        """Change what is shown, falling back to the nearest values that exist.

        Args:
            **wanted: Parameters of `ViewState` by name. Values may be missing from the run.
        """
        with self._guarded():
            self._change(wanted)

    def _change(self, wanted: dict[str, Any]) -> None:
        run = wanted.pop("run", self.state.run)
        if not run or not self.catalogue.entries:
            run = self.catalogue.default()
        try:
            look = self.catalogue.look if self._view is None else self.catalogue.open
            view = look(run) if run else None
        except ComgraError as error:
            self._give_notice(run, error, wanted)
            return
        if view is None or not len(view.run.records):
            self._waiting = True
            self._give_notice(run, None, wanted)
            return
        if self._waiting:  # after waiting for the first record, follow new records
            self._waiting = False
            wanted.setdefault("follow", view.run.state == "live")
        self._point(run, view, wanted)

    def _point(self, run: str, view: RunView, wanted: dict[str, Any]) -> None:
        state = self.state
        follow = wanted.get("follow", state.follow)
        point = self._wanted_point(view, wanted)
        if follow:
            point["step"] = None
        before, self._view = self._view, view
        at = resolve(view, replace(state.selection, **point), self._roles)
        self._roles[at.node] = at.role
        if "iteration" in wanted:
            self._iteration = at.iteration
        colour = wanted.get("colour", state.colour)
        known = {TIME: has_times(view), MEMORY: has_memory(view)}
        measured = (name for name, there in known.items() if there)
        edges = (f"{EFFECTS}{name}" for name in painted_interventions(view))
        painted = ("forward", DIFFERENCE, UNUSUAL, *measured, *edges, *view.gradient_passes())
        others = {
            "run": run,
            "revision": view.revision,
            "looked": _finished(view),
            "follow": follow,
            "colour": colour
            if colour in painted or painted_rule(view, colour) is not None
            else "kind",
            **{name: wanted.get(name, getattr(state, name)) for name in _KEPT},
        }
        if others["section"] not in self.screen.sections:
            others["section"] = state.param.section.default
        others["walk"] = wanted.get("walk", state.walk if run == state.run else "")
        if others["section"] in _OF_ALL_RUNS:
            self._library.refresh()
            others["library"] = self._library.version
        others["views"] = -1 if self._views is None else self._views.version
        if view is before and at.node != state.node and "expanded" not in wanted:
            others["expanded"] = self.screen.graph.revealed(at.node)
        self._compare(view, at, others)
        was = state.selection, state.colour
        state.put(at, **others)
        if self.screen.blank:  # a notice is shown; there is nothing to redraw
            self._draw(frozenset())
        if was != (at, state.colour):
            self._ahead.plan(self._likely_work(view, at, was[0]))

    def _likely_work(self, view: RunView, at: Selection, was: Selection) -> Iterator[likely.Work]:
        """Yield what prepares the likely next changes; what the open section draws comes first."""
        shown = self._shown(view)
        for other in likely.neighbours(view, at, was.step):
            yield from self.screen.ahead(replace(shown, at=other))
        yield from likely.next_to(view, at, was, self.state.colour)

    def _wanted_point(self, view: RunView, wanted: dict[str, Any]) -> dict[str, Any]:
        """Return the requested fields of the selection, and what they imply for other fields."""
        brush = wanted.get("brush")
        was = self.state.brush
        if brush is not None and brush.runs and brush.runs != was.runs:
            wanted["ticked"] = tuple(
                name
                for name in self.catalogue.summaries
                if {name, visible(name), name.rpartition("/")[2]} & {*brush.runs}
            )
        single = brush is not None and len(brush.samples) == 1 and brush.samples != was.samples
        if brush is not None and single:  # one sample can be shown everywhere
            wanted.setdefault("batch", str(brush.samples[0]))
        point: dict[str, Any] = {"iteration": self._iteration}
        point |= {name: wanted[name] for name in SELECTION if name in wanted}
        for name in ("statistic", "batch"):
            if name in point:
                point[f"auto_{name}"] = point[name] == ""
        now = self.state.node
        if not point.get("node", now):  # nothing is selected yet
            point |= opening(view, step=point.get("step"))
        if "node" in point and point["node"] != now and "role" not in point:
            point["role"] = ""
        return point

    def _compare(self, view: RunView, at: Selection, others: dict[str, Any]) -> None:
        """Open the run to compare with if a visible pane compares."""
        self._other = None
        if others["section"] == "compare" or others["colour"] == DIFFERENCE:
            self._other = other_of(
                self.catalogue, view, at, run=others["other"], step=others["other_step"],
                type_=others["other_type"],
            )  # fmt: skip
            there = self._other.view
            others["other"] = self._other.run
            if self._other.type is None:
                others["other_type"] = ""
            others["other_revision"] = -1 if there is None else there.revision

    def _on_state(self, *events: Any) -> None:
        if self._view is not None:
            self._draw(frozenset(event.name for event in events))

    # --- drawing -----------------------------------------------------------------------------

    def _draw(self, names: frozenset[str]) -> None:
        """Redraw panes that read the changed names and update the URL, in one message."""
        assert self._view is not None
        with pn.io.hold():
            self.screen.draw(names, self._shown(self._view))
            self._write_url(names)

    def _shown(self, view: RunView) -> Shown:
        state = self.state
        return Shown(
            view, state.selection, state.colour, state.scale, state.expanded, state.follow,
            pass_=state.pass_, slicing=state.slicing, order=state.order, window=state.window,
            axis=state.axis, other=self._other, run=state.run, walk=state.walk,
            overlaid=state.overlaid, brush=state.brush,
            measure=state.measure, between=state.between, route=state.route,
        )  # fmt: skip

    def _give_notice(self, run: str, error: ComgraError | None, wanted: dict[str, Any]) -> None:
        """Show a notice if the run cannot be shown, and keep the request for later."""
        self._view = None
        self.state.param.update(**wanted, run=run)
        with pn.io.hold():
            self.screen.show_notice(notice_for(self.catalogue, run, error))
            self._write_url(frozenset({"run"}))

    def _look_ahead(self, node: str, role: str) -> None:
        """While the pointer rests on a node, prefetches what a click on the node would show."""
        if self._view is not None:
            at = self.state.selection
            wanted = replace(at, node=node, role=role, iteration=self._iteration)
            at = resolve(self._view, wanted, self._roles)
            self._ahead.plan(likely.tensor(self._view, at), soon=True)

    # --- new data on disk --------------------------------------------------------------------

    def poll(self) -> None:
        """Check for new records and runs. The selection moves only in follow mode."""
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
            self._give_notice(self.state.run, error, {})
            return
        if view is not self._view or view.revision != self.state.revision or self._moved(view):
            self._point(self.state.run, view, {})
        elif self.state.run:
            self.screen.show_head(head_of(view, self.state.run))

    def _moved(self, view: RunView) -> bool:
        """Return whether findings, other runs or custom views have changed since drawing."""
        if _finished(view) != self.state.looked:
            return True
        if self.state.section in _OF_ALL_RUNS:
            self._library.refresh()
            if self._library.version != self.state.library:
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
            self.screen.selectors.only_runs()
        else:
            self.screen.selectors.refresh(self._shown(self._view))

    # --- the address -------------------------------------------------------------------------

    def _write_url(self, names: frozenset[str]) -> None:
        """Send the URL to the browser. Going back or forward adds no history entry."""
        query, address = url.format_query(self.state), self.screen.url
        if self.screen.ready and query != address.query:
            push = not self._restoring and bool(names & url.PUSHED)
            address.put(query=query, push=push)

    def _on_url(self, message: Message) -> None:
        query = message["query"]
        with self._guarded():
            if query != self._first_query:  # sent again once the page is ready
                self._restoring = True
                try:
                    self._restore(query)
                finally:
                    self._restoring = False
            self._first_query = None
            self._write_url(frozenset())

    def _restore(self, query: str, *, first: bool = False) -> None:
        """Show the state described by a URL query; missing fields take their defaults."""
        fields = (*SELECTION, "run", "colour", *_KEPT)
        wanted = {name: self.state.param[name].default for name in fields}
        found = url.parse(query)
        wanted.update(found)
        entry = self.catalogue.entry(wanted["run"] or self.catalogue.default())
        live = entry is not None and entry.state in ("live", "waiting")
        wanted["follow"] = "step" not in found and (live if first else self.state.follow)
        self._change(wanted)

    # --- when something goes wrong -----------------------------------------------------------

    @contextmanager
    def _guarded(self, *, quiet: bool = False) -> Iterator[None]:
        """Show an error above the page instead of leaving the page unresponsive."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the page must show any error
            if not isinstance(error, ComgraError):
                _LOG.exception("failed to update the page")
            self.screen.warn(error)
        else:
            if not quiet:
                self.screen.calm()


def _finished(view: RunView) -> int:
    """Return how much work on the run has ended in the background."""
    return looks(view) + ended(view) + laid_out(view)
