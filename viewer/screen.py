"""The page of one session: created once, then updated in place, in one message."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import panel as pn
from bokeh.document import Document

from comgra_decl.viewer.components.urlsync import UrlSync
from comgra_decl.viewer.custom import ViewsFile
from comgra_decl.viewer.escaping import html_text as _e
from comgra_decl.viewer.files import Files
from comgra_decl.viewer.model.attention import layers
from comgra_decl.viewer.model.catalogue import RunEntry
from comgra_decl.viewer.model.choices import run_choice
from comgra_decl.viewer.model.headline import tab_counts
from comgra_decl.viewer.model.library import Library
from comgra_decl.viewer.model.states import BRAND, Notice, damage_of, head_of
from comgra_decl.viewer.panes.base import Act, Pane, Shown, html_view, problem_card
from comgra_decl.viewer.panes.between import BetweenPane
from comgra_decl.viewer.panes.graph import GraphPane
from comgra_decl.viewer.panes.selectors import SelectorsPane
from comgra_decl.viewer.panes.steps import StepsPane
from comgra_decl.viewer.panes.strip import StripPane
from comgra_decl.viewer.sections import sections
from comgra_decl.viewer.state import HIDDEN, SECTIONS, ViewState
from comgra_decl.viewer.style import FITTED, PRINTED

FILLING = {"flex": "1 1 0", "min-height": "0"}
_FILL = {**FILLING, "overflow": "hidden"}
_HEIGHTS = {False: "clamp(206px, 34vh - 30px, 460px)", True: "clamp(328px, 34vh - 30px, 560px)"}
_CLOSED = "42px"
"""Heights of the graph: for most networks, for long ones, and for its tools only."""

_WITHOUT_GRAPH = frozenset({"data", "runs", "kpis", "modules", "notes", "run", "views"})
"""Sections about the whole run, in which the graph is closed until the user opens it."""

_KEYS = """
<dl class="keys"><dt><kbd>,</kbd> <kbd>.</kbd></dt><dd>previous, next step</dd>
<dt><kbd>Shift</kbd></dt><dd>with them: ten steps</dd>
<dt><kbd>/</kbd></dt><dd>find a node</dd>
<dt><kbd>&larr;</kbd> <kbd>&rarr;</kbd></dt><dd>follow edges</dd>
<dt><kbd>Enter</kbd></dt><dd>expand a group</dd>
<dt>drag</dt><dd>zoom in a chart</dd></dl>
"""


class Screen:
    """The panes and their layout. Reads the state but never changes it.

    A page places `head`, `side` and `main`. `ready` is True once the browser may send messages.
    `building` is entered while a section is shown for the first time. `graph_alone` is set if the
    page shows only the graph, which then fills it.

    Args:
        act: Changes the selection; see `Dashboard.change`.
        state: State of the session.
        library: Facts and metrics of all runs.
        runs: Returns the available runs.
        views: Custom views; None without a views file.
    """

    def __init__(
        self,
        act: Act,
        *,
        state: ViewState,
        library: Library,
        runs: Callable[[], tuple[RunEntry, ...]],
        views: ViewsFile | None = None,
    ) -> None:
        self._act, self._state = act, state
        self.ready = False
        self.graph_alone = False
        self.building: Callable[[], AbstractContextManager[None]] = _building_on_page
        self.strip = StripPane(act)
        self.graph = GraphPane(self._select)
        self.graph.on_fit(self._size_graph)
        self.between = BetweenPane(act)
        self.steps = StepsPane(act)
        self.selectors = SelectorsPane(act, lambda: run_choice(runs(), state.run))
        self.sections = sections(act, library=library, runs=runs, views=views)
        self.files = Files(lambda: _panes(self), lambda: state.selection)
        self.url = UrlSync(width=0, height=0, margin=0)
        self.head = html_view(sizing_mode=None)
        self.tabs = html_view()
        self.tabs.on_message(lambda message: act(section=message["send"]))
        self.tabs.tokens = [key for key in SECTIONS if key in self.sections]
        self.banner = html_view(visible=False)
        self.notice = html_view(visible=False)
        self.damage = html_view(visible=False)
        self._arrange()

    def _arrange(self) -> None:
        self.graph.panel.margin, self.steps.panel.margin = (10, 14, 4, 14), (0, 14)
        self.workspace = pn.Column(
            self.damage, self.strip.panel, self.graph.panel, self.between.panel,
            self.steps.panel, self.tabs,
            *(section.holder for section in self.sections.values()),
            sizing_mode="stretch_both", margin=0, visible=False, styles=_FILL,
            stylesheets=[PRINTED, FITTED],
        )  # fmt: skip
        self.main = pn.Column(
            self.banner, self.notice, self.workspace, self.url, self.files.view,
            sizing_mode="stretch_both", margin=0, styles=_FILL, stylesheets=[PRINTED],
        )  # fmt: skip
        self.keys = html_view(visible=False)
        self.keys.html = _KEYS
        self.side = pn.Column(
            self.selectors.panel, self.keys, sizing_mode="stretch_width", margin=0
        )

    @property
    def blank(self) -> bool:
        """Whether no run is drawn because the page is still empty or shows a notice."""
        return not self.workspace.visible

    def start(self) -> None:
        """Accept messages from the browser; call it once the page has loaded."""
        self.ready = True
        own = [self.url, self.head, self.tabs, self.files.view]
        fixed = [self.strip, self.graph, self.between, self.steps, self.selectors]
        _make_ready([*fixed, *_panes(self)], own)

    def whole(self) -> pn.Row:
        """Return selectors, graph, steps and sections for embedding in another page."""
        self.side.sizing_mode, self.side.width = "stretch_height", 220
        return pn.Row(self.side, self.workspace, sizing_mode="stretch_both", margin=0)

    def alone(self, what: Any) -> list[Any]:
        """Return the object that another page embeds for `what`, without URL sync."""
        return [self.notice] if self.blank else [self.banner, what]

    def _select(self, **wanted: Any) -> None:
        """Change the selection. Choosing a node in the graph closes the overview."""
        if "node" in wanted and self._state.section == "overview":
            wanted["section"] = "inspect"
        self._act(**wanted)

    # --- drawing -----------------------------------------------------------------------------

    def ahead(self, shown: Shown) -> Iterator[Callable[[], object]]:
        """Yield pieces of work after which the open section shows `shown` sooner."""
        for pane in self.sections[self._state.section].panes:
            yield from pane.ahead(shown)

    def draw(self, names: frozenset[str], shown: Shown) -> None:
        """Redraw panes that read the changed names, or all panes if a notice was shown."""
        if self.blank:
            names = frozenset(self._state.param)
            self.notice.visible = False
            self.workspace.visible = self.keys.visible = True
        new = not self.sections[self._state.section].panes
        with self.building() if new else nullcontext():
            self._draw(names, shown)

    def _draw(self, names: frozenset[str], shown: Shown) -> None:
        if "section" in names:
            self._show_section()
        if names & {"section", "run", "revision", "looked"}:
            counts, section = tab_counts(shown.view), self._state.section
            hidden = {"attention"} - {section} if not layers(shown.view) else set()
            offered = [key for key in self.tabs.tokens if key not in hidden]
            self.tabs.put(html=_tabs_html(section, offered, counts))
        if names & {"run", "revision"}:
            self.show_head(head_of(shown.view, shown.run))
        for pane in (self.strip, self.graph, self.between, self.steps, self.selectors):
            if pane.reads & names:
                pane.refresh(shown)
        self._size_graph()
        for section in self.sections.values():
            section.refresh(names, shown)
        if names & {"run", "revision", "section"}:
            self.files.refresh()
        self._show_damage(damage_of(shown.view))  # last, because drawing finds damage

    def _show_section(self) -> None:
        chosen = self._state.section
        for key, section in self.sections.items():
            made = section.show(key == chosen)
            if self.ready:
                _make_ready(made, [])

    def _size_graph(self) -> None:
        """Set the graph's height to the user's choice, or to what the section requires."""
        state = self._state
        needed = state.walk or state.section not in _WITHOUT_GRAPH
        visible = state.graph != HIDDEN and bool(state.graph or needed)
        height = f"{state.graph}px" if state.graph.isdecimal() else _HEIGHTS[self.graph.tall]
        self.graph.view.put(shown=visible)
        styles = {"flex": "0 0 auto", "height": height if visible else _CLOSED}
        if self.graph_alone and visible and not state.graph:
            styles = FILLING
        if self.graph.panel.styles != styles:
            self.graph.panel.styles = styles

    def show_head(self, content: str) -> None:
        """Show the run's name and state above the page."""
        content = f'<div class="head">{content}</div>'
        if self.head.html != content:
            self.head.html = content

    def _show_damage(self, damage: Notice | None) -> None:
        """Show one line about missing parts of the run; a click opens the details."""
        if damage is not None:
            lines = "".join(f"<p>{_e(line)}</p>" for line in damage.lines)
            self.damage.put(
                html=f'<details class="notice bad thin" role="status"><summary><b>'
                f"{_e(damage.title)}.</b> Everything that can be read is shown. To see what is "
                f"lost and what can be recovered, run <code>{_e(damage.code)}</code></summary>"
                f"{lines}</details>"
            )
        if self.damage.visible != (damage is not None):
            self.damage.visible = damage is not None

    def show_notice(self, notice: Notice) -> None:
        """Show a notice instead of the run."""
        self.notice.html = (
            f'<div class="notice big {notice.tone}"><h2>{_e(notice.title)}</h2>'
            + "".join(f"<p>{_e(line)}</p>" for line in notice.lines)
            + (f"<pre>{_e(notice.code)}</pre>" if notice.code else "")
            + "</div>"
        )
        self.workspace.visible = self.keys.visible = False
        self.notice.visible = True
        self.show_head(BRAND)
        self.selectors.only_runs()

    def warn(self, error: BaseException) -> None:
        """Show an error above the page."""
        self.banner.html = problem_card("Could not show this change", error)
        self.banner.visible = True

    def calm(self) -> None:
        """Remove the error above the page."""
        if self.banner.visible:
            self.banner.visible = False


@contextmanager
def resolving_once(*documents: Document) -> Iterator[None]:
    """Find the models of documents once at the end rather than after each model that is added.

    Bokeh searches all models of the page each time, so ten new figures would take seconds.
    """
    problem: BaseException | None = None
    with ExitStack() as frozen:
        for document in documents:
            frozen.enter_context(document.models.freeze())
        try:
            yield
        except BaseException as error:  # noqa: BLE001 - after an error, Bokeh would stay frozen
            problem = error
    if problem is not None:
        raise problem


def _building_on_page() -> AbstractContextManager[None]:
    document = pn.state.curdoc
    return nullcontext() if document is None else resolving_once(document)


def _panes(screen: Screen) -> Iterable[Pane]:
    return (pane for section in screen.sections.values() for pane in section.panes)


def _make_ready(panes: list[Pane], own: list[Any]) -> None:
    for component in [*own, *(c for pane in panes for c in pane.components())]:
        component.ready = True


def _tabs_html(chosen: str, offered: list[str], counts: Mapping[str, tuple[str, str]]) -> str:
    buttons = "".join(
        f'<button type="button" role="tab" data-send="{key}" '
        f'aria-selected="{str(key == chosen).lower()}">{SECTIONS[key]}'
        f"{_count(*counts.get(key, ('', '')))}</button>"
        for key in offered
    )
    return f'<div class="tabs" role="tablist">{buttons}</div>'


def _count(text: str, tone: str) -> str:
    return f' <span class="count tone-{tone or "none"}">{text}</span>' if text else ""
