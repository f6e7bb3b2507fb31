"""The sections of the page: their panes and layout."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import panel as pn

from comgra_decl.viewer.custom import ViewsFile
from comgra_decl.viewer.model.catalogue import RunEntry
from comgra_decl.viewer.model.library import Library
from comgra_decl.viewer.panes.attention import AttentionPane
from comgra_decl.viewer.panes.base import Act, Pane, Shown
from comgra_decl.viewer.panes.compare import ComparePane
from comgra_decl.viewer.panes.data import DataPane
from comgra_decl.viewer.panes.distribution import DistributionPane
from comgra_decl.viewer.panes.figures import unit_range
from comgra_decl.viewer.panes.findings import FindingsPane
from comgra_decl.viewer.panes.kpis import KpisPane
from comgra_decl.viewer.panes.modules import ModulesPane
from comgra_decl.viewer.panes.notes import NotesPane
from comgra_decl.viewer.panes.overview import OverviewPane
from comgra_decl.viewer.panes.pictures import PicturesPane
from comgra_decl.viewer.panes.run import FactsPane, RunPane
from comgra_decl.viewer.panes.runs import RunsPane
from comgra_decl.viewer.panes.series import SeriesPane
from comgra_decl.viewer.panes.sheet import SheetPane
from comgra_decl.viewer.panes.statistics import StatisticsPane
from comgra_decl.viewer.panes.values import ValuesPane
from comgra_decl.viewer.style import FITTED, PRINTED, UNCUT

_GRID = """
:host {
  box-sizing: border-box;
  display: grid !important;
  gap: 6px 14px;
  flex: 1 0 396px !important;
  grid-template-columns: minmax(300px, 390px) repeat(3, minmax(0, 1fr));
  grid-template-rows: repeat(2, minmax(190px, 1fr));
  height: auto !important;
  min-height: 0;
  padding: 8px 14px;
}
.pane { min-height: 0; min-width: 0; }
.scroll-button { display: none !important; } /* Panel's button would occupy a cell */
.statistics-cell { contain: size; grid-row: 1 / span 2; overflow: auto; }
@container (max-width: 1210px) {
  :host {
    flex: 1 0 600px !important;
    grid-auto-flow: column;
    grid-template-columns: minmax(300px, 390px) repeat(2, minmax(0, 1fr));
    grid-template-rows: repeat(3, minmax(190px, 1fr));
  }
  .statistics-cell { grid-row: 1 / span 3; }
}
@container (max-width: 900px) {
  :host {
    flex: 0 0 auto !important;
    grid-template-columns: minmax(0, 1fr) minmax(0, 1fr);
    grid-template-rows: auto repeat(3, 220px);
  }
  .statistics-cell { contain: none; grid-column: 1 / span 2; grid-row: 1; overflow: visible; }
  .statistics-cell { flex: none !important; height: auto !important; min-height: auto; }
}
"""

_OVERVIEW_GRID = """
:host {
  box-sizing: border-box; display: grid !important; flex: 1 0 640px !important; gap: 6px 14px;
  grid-template-columns: repeat(2, minmax(0, 1fr));
  grid-template-rows: minmax(350px, 3fr) minmax(270px, 2fr);
  height: auto !important; padding: 8px 14px;
}
.facts { contain: size; overflow: auto; }
.pane { min-height: 0; min-width: 0; }
.scroll-button { display: none !important; }
@container (max-width: 900px) {
  :host {
    flex: 0 0 auto !important; grid-template-columns: minmax(0, 1fr);
    grid-template-rows: 350px 350px 270px auto;
  }
  .facts { contain: none; overflow: visible; }
  .facts { flex: none !important; height: auto !important; min-height: auto; }
}
"""

_WHOLE = """
@container (max-width: 900px) {
  .bk-panel-models-esm-ReactiveESM { flex: none !important; height: auto !important; }
}
"""
"""In a narrow section, a table has its own row, which is as high as the table."""

_FILLED = """
:host { flex: 1 0 240px !important; height: auto !important; min-height: 0; }
.pane { min-height: 0; min-width: 0; }
"""

_SECTION_CSS = (
    PRINTED
    + FITTED
    + """
@media print { :host(.hidden) { display: none !important; } } /* `PRINTED` would show it */
"""
)

_HIDDEN = ["hidden"]

_PADDED = """
:host { box-sizing: border-box; padding: 8px 14px; }
"""


class Section:
    """Panes shown together. They are created on the first display and refreshed on each display."""

    def __init__(self, make: Callable[[], tuple[list[Pane], Any]]) -> None:
        self._make = make
        self.panes: list[Pane] = []
        self._stale: set[str] = set()
        self.holder = pn.Column(
            visible=False, css_classes=_HIDDEN, sizing_mode="stretch_both", margin=0,
            stylesheets=[_SECTION_CSS],
            styles={"flex": "1 1 0", "min-height": "0", "overflow": "hidden auto"},
        )  # fmt: skip

    def show(self, visible: bool) -> list[Pane]:
        """Show or hide the section, and return the panes that this call created."""
        made: list[Pane] = []
        if visible and not self.panes:
            self.panes, layout = self._make()
            self.holder.objects = [layout]
            made = self.panes
            self._stale = set().union(*(pane.reads for pane in made))
        if self.holder.visible != visible:
            self.holder.param.update(visible=visible, css_classes=[] if visible else _HIDDEN)
        return made

    def refresh(self, names: Collection[str], shown: Shown) -> None:
        """Update panes that read changed names. A hidden section is updated once it is shown."""
        if not self.holder.visible:
            self._stale.update(names)
            return
        changed = self._stale | set(names)
        self._stale = set()
        for pane in self.panes:
            if pane.reads & changed:
                pane.refresh(shown)


def sections(
    act: Act,
    *,
    library: Library,
    runs: Callable[[], tuple[RunEntry, ...]] = tuple,
    views: ViewsFile | None = None,
) -> dict[str, Section]:
    """Return all sections by their key in the URL.

    Args:
        act: Changes the selection.
        library: Facts and metrics of all runs.
        runs: Returns the runs to compare with.
        views: Custom views. If there are none, their section is left out.
    """
    made = {
        "overview": Section(lambda: _overview(act)),
        "inspect": Section(lambda: _inspect(act)),
        "values": Section(lambda: _alone(SheetPane(act), _FILLED)),
        "data": Section(lambda: _alone(DataPane(act), _PADDED)),
        "attention": Section(lambda: _alone(AttentionPane(act), "")),
        "pictures": Section(lambda: _alone(PicturesPane(act), _PADDED)),
        "compare": Section(lambda: _alone(ComparePane(act, runs), _FILLED)),
        "runs": Section(lambda: _alone(RunsPane(act, library), _FILLED)),
        "explore": Section(lambda: _explore(act, library)),
        "kpis": Section(lambda: _alone(KpisPane(act), _PADDED)),
        "modules": Section(lambda: _alone(ModulesPane(act), _PADDED)),
        "findings": Section(lambda: _alone(FindingsPane(act), _PADDED)),
        "notes": Section(lambda: _alone(NotesPane(act), _PADDED)),
        "run": Section(lambda: _alone(RunPane(act), "")),
    }
    if views is not None:
        made["views"] = Section(lambda: _views(act, views))
    return made


def _explore(act: Act, library: Library) -> tuple[list[Pane], Any]:
    from comgra_decl.viewer.panes.explore import ExplorePane  # loads HoloViews

    return _alone(ExplorePane(act, library), _PADDED)


def _views(act: Act, views: ViewsFile) -> tuple[list[Pane], Any]:
    from comgra_decl.viewer.panes.custom import CustomPane  # loads HoloViews

    return _alone(CustomPane(act, views), _PADDED)


def _overview(act: Act) -> tuple[list[Pane], Any]:
    """Return heat maps of both passes, with losses and run facts below."""
    x_range = unit_range()
    panes: list[Pane] = [OverviewPane(act, place=place, x_range=x_range) for place in (0, 1)]
    panes += [KpisPane(act, most=1), FactsPane(act)]
    panes[-1].panel.css_classes = ["pane", "facts"]
    panes[-1].panel.stylesheets = [_WHOLE]
    row = pn.Column(
        *(pane.panel for pane in panes), sizing_mode="stretch_both", margin=0,
        stylesheets=[_OVERVIEW_GRID, UNCUT],
    )  # fmt: skip
    return panes, row


def _inspect(act: Act) -> tuple[list[Pane], Any]:
    """Return the table and one row per pass: series, distribution, values."""
    x_range = unit_range()
    panes: list[Pane] = [StatisticsPane(act)]
    for place in (0, 1):
        panes.append(SeriesPane(act, place=place, x_range=x_range))
        panes.append(DistributionPane(act, place=place, x_range=x_range))
        panes.append(ValuesPane(act, place=place))
    panes[0].panel.css_classes = ["pane", "statistics-cell"]
    panes[0].panel.stylesheets = [_WHOLE]
    grid = pn.Column(
        *(pane.panel for pane in panes),
        sizing_mode="stretch_both",
        margin=0,
        stylesheets=[_GRID, UNCUT],
    )
    return panes, grid


def _alone(pane: Pane, css: str) -> tuple[list[Pane], Any]:
    return [pane], pn.Column(
        pane.panel, sizing_mode=pane.sizing, margin=0, stylesheets=[css, PRINTED]
    )
