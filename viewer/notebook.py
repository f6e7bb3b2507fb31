"""The viewer, or one pane, as an object for notebooks, pages and reports."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from os import PathLike
from typing import IO, Any
from weakref import WeakSet

import holoviews as hv
import numpy as np
import panel as pn
from bokeh.models import ImportedStyleSheet, InlineStyleSheet
from bokeh.models.ui.ui_element import UIElement
from bokeh.resources import INLINE
from panel.io.notebook import block_comm
from panel.io.resources import CDN_DIST, DIST_DIR

from comgra_decl.errors import UnknownNameError, did_you_mean, shown
from comgra_decl.query import Run, RunSummary
from comgra_decl.records import AGGREGATES
from comgra_decl.viewer.components.base import Component
from comgra_decl.viewer.dashboard import Dashboard
from comgra_decl.viewer.model.catalogue import Catalogue, RunEntry
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.panel_private import (
    PreparedColumn,
    extension_is_loaded,
    prepare_everything,
)
from comgra_decl.viewer.panes.base import Pane
from comgra_decl.viewer.screen import FILLING, Screen, resolving_once
from comgra_decl.viewer.state import SECTIONS

_FIELDS = {
    "node": "node",
    "role": "role",
    "step": "step",
    "iteration": "iteration",
    "statistic": "statistic",
    "type": "type",
    "over_batch": "batch",
    "sample": "batch",
    "colour": "colour",
    "scale": "scale",
}
"""Maps argument names of `Run` methods to names of `ViewState` parameters."""

_WHOLE, _SECTION, _PANE = 900, 560, 300  # heights in pixels
_HEIGHTS = {"graph": 420, "steps": 60, "statistics": 560}


class OneRun(Catalogue):
    """A catalogue that contains one open run."""

    def __init__(self, run: Run) -> None:
        super().__init__(run.path)
        self._only = RunView(run)
        steps = run.steps
        self.summaries = {
            run.name: RunSummary(
                run.path, run.group, run.name, run.state, len(run.records),
                int(steps[-1]) if len(steps) else None, run.started, run.error,
            )
        }  # fmt: skip
        self.entries = (RunEntry(run.name, "", run.name, run.state, not len(run.records)),)

    def poll(self, *, wait: bool = False) -> None:
        """Do nothing, because there are no other runs to find."""

    def refresh(self) -> None:
        """Do nothing."""

    def open(self, name: str) -> RunView:
        """Return the run."""
        return self._only

    def look(self, name: str) -> RunView:
        """Return the run without checking for new records."""
        return self._only


class Look(PreparedColumn):
    """A part of the viewer on another page.

    Without a server, Panel would load its style sheets from a CDN, so they are embedded here.
    """

    def __init__(self, *objects: Any, **params: Any) -> None:
        self._roots: WeakSet[Any] = WeakSet()
        super().__init__(*objects, **params)

    @contextmanager
    def building(self) -> Iterator[None]:
        """Send a section that is created within as one message, wherever this part is shown."""
        documents = {root.document for root in self._roots} - {None}
        with block_comm(), resolving_once(*documents):
            yield
        pn.io.push_notebook(self)

    def prepare(self, root: Any) -> None:
        """Embed Panel's style sheets in the page, unless a Panel server sends them."""
        self._roots.add(root)
        _embed_sheets(self, root)

    def save(self, filename: str | PathLike[Any] | IO[Any], *args: Any, **options: Any) -> None:
        """Write a self-contained HTML file that requires no network.

        Leaves out widgets that require a server.

        Args:
            filename: Path or file object.
            *args: Passed to Panel's `save`: `title`, ...
            **options: Passed to Panel's `save`.
        """
        icons = {"app_favicon": "data:,", "apple_icon": "data:,"}
        shown = self.select(Component)  # type: ignore[no-untyped-call]
        answered = [component for component in shown if component.ready]
        _set_ready(answered, False)
        try:
            super().save(
                filename, *args, **{"resources": INLINE, "template_variables": icons, **options}
            )
        finally:
            _set_ready(answered, True)


def _set_ready(components: list[Component], ready: bool) -> None:
    for component in components:
        component.ready = ready


def _embed_sheets(_viewable: Any, root: Any) -> None:
    """Embed Panel's style sheets in the models below `root`, unless a server sends them."""
    if root.document is not None and root.document.session_context is not None:
        return
    for model in root.select({"type": UIElement}):
        sheets = [_inline(sheet) for sheet in model.stylesheets]
        if sheets != model.stylesheets:
            model.stylesheets = sheets


def _inline(sheet: Any) -> Any:
    """Return a Panel style sheet as text, and any other style sheet unchanged."""
    if not isinstance(sheet, ImportedStyleSheet) or not str(sheet.url).startswith(CDN_DIST):
        return sheet
    return InlineStyleSheet(css=_panel_css(str(sheet.url)[len(CDN_DIST) :].partition("?")[0]))


@lru_cache
def _panel_css(name: str) -> str:
    return (DIST_DIR / name).read_text(encoding="utf-8")


def look(
    run: Run,
    pane: str | None = None,
    *,
    of: str = "forward",
    height: int | None = None,
    **at: Any,
) -> Look:
    """Return the viewer of a run or one of its panes; see `Run.view`, the caller.

    Raises:
        UnknownNameError: The pane, pass, field or name does not exist.
    """
    load_in_notebook()
    section = (
        pane
        if isinstance(pane, str) and pane in SECTIONS
        else "inspect"
        if pane or "node" in at
        else "overview"
    )
    dashboard = Dashboard(OneRun(run), query=f"?section={section}")
    screen = dashboard.screen
    dashboard.change(**_wanted(run, of, at), follow=False)
    if section == "runs":  # a notebook does not poll, so this reads the table, then the lines
        for _ in range(2):
            dashboard.catalogue.library.wait()
            dashboard.change()
    what = screen.whole() if pane is None else _part(screen, pane, of)
    page = Look(
        *screen.alone(what),
        screen.files.view,
        height=height or _height(pane, screen),
        sizing_mode="stretch_width",
        margin=0,
    )
    screen.building = page.building
    pn.state.onload(screen.start)  # runs immediately if no page is loading
    return page


def _wanted(run: Run, pass_: str, at: Mapping[str, Any]) -> dict[str, Any]:
    """Return `ViewState` parameters; raises an error for names that the run does not have."""
    for name in at:
        _known("argument", name, [*_FIELDS, "of", "height"])
    for name in at.keys() & {"step", "iteration"}:
        if not isinstance(at[name], (int, np.integer)):
            raise UnknownNameError(f"{name} must be an integer, got {shown(at[name])}.")
    known = RunView(run)
    _known("pass", pass_, ["forward", *known.gradient_passes()])
    node = at.get("node")
    choices: dict[str, Iterable[str]] = {
        "node": known.nodes,
        "role": known.roles(node) if isinstance(node, str) and node in known.nodes else [],
        "statistic": run.statistics,
        "type": [*run.types, *run.tags],
        "over_batch": AGGREGATES,
        "sample": map(str, range(run.sample_count)),
        "colour": ["kind", "forward", *known.gradient_passes()],
        "scale": ["linear", "log"],
    }
    for name, value in at.items():
        if name in choices:
            _known(name, _text(value) if name == "sample" else value, choices[name])
    wanted = {_FIELDS[name]: value for name, value in at.items()}
    if "batch" in wanted:
        wanted["batch"] = str(wanted["batch"])
    return wanted if pass_ == "forward" else {**wanted, "gradient": pass_}


def _part(screen: Screen, name: str, pass_: str) -> Any:
    """Return a section, or the pane with a class name for the requested pass."""
    if name in screen.sections:
        return screen.sections[name].holder
    panes: dict[str, list[Pane]] = {"graph": [screen.graph], "steps": [screen.steps]}
    for pane in screen.sections["inspect"].panes:
        panes.setdefault(type(pane).__name__.removesuffix("Pane").lower(), []).append(pane)
    _known("pane", name, [*panes, *screen.sections])
    panel = panes[name][-1 if pass_ != "forward" else 0].panel
    panel.styles, panel.margin = FILLING, 0
    screen.graph_alone = name == "graph"
    return panel


def _height(pane: str | None, screen: Screen) -> int:
    if pane is None:
        return _WHOLE
    return _SECTION if pane in screen.sections else _HEIGHTS.get(pane, _PANE)


def _known(what: str, name: object, names: Iterable[str]) -> None:
    known = list(names)
    if not isinstance(name, str) or name not in known:
        listed = ", ".join(known[:12]) + (", ..." if len(known) > 12 else "")
        hint = did_you_mean(name, known) or "."
        raise UnknownNameError(
            f"There is no {what} {shown(name)}{hint} Available: {listed or 'none'}."
        )


def _text(value: object) -> object:
    """Return a number as text, in the form that the viewer uses."""
    return str(value) if isinstance(value, int) else value


_PAGES: set[str] = set()
"""Sessions of notebook pages that have the files of Panel and HoloViews."""


def load_in_notebook(*, elements: bool = False) -> None:
    """Make the cells of a notebook draw, without a network.

    Loads the files of Panel and HoloViews, unless the notebook has called their extension since its
    page was loaded. Has no effect outside notebooks.

    Args:
        elements: Whether cells must also draw HoloViews elements, which `pn.extension` does not do.
    """
    shell = sys.modules.get("IPython")
    kernel = None if shell is None else getattr(shell.get_ipython(), "kernel", None)
    if kernel is None:
        return
    prepare_everything(_embed_sheets)  # which `inline` would leave at a CDN
    page = kernel.get_parent().get("header", {}).get("session", "")
    loaded = extension_is_loaded(hv.extension) or (extension_is_loaded() and not elements)
    if not loaded or (_PAGES and page not in _PAGES):
        hv.extension("bokeh", inline=True, logo=False)
    _PAGES.add(page)
