"""Base class of all panes. A pane is built once, then updated in place; its errors stay in it."""

from __future__ import annotations

import logging
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import panel as pn

from comgra_decl.errors import ComgraError
from comgra_decl.viewer.components.htmlview import HtmlView
from comgra_decl.viewer.escaping import html_text as _e
from comgra_decl.viewer.model.brushing import NOTHING, Brush
from comgra_decl.viewer.model.comparison_target import Other
from comgra_decl.viewer.model.runs import DEFAULT, Overlaid
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.selection import Selection
from comgra_decl.viewer.model.takeaway import CSV, clean_name
from comgra_decl.viewer.style import CSS

Act = Callable[..., None]
"""Changes the selection: `act(step=10, node="encoder")`; see `Dashboard.change`."""

_LOG = logging.getLogger(__name__)

PASSES = ("forward", "gradient")
"""Names of two panes shown side by side, in order of position."""

TENSOR = frozenset({"run", "revision", "type", "node", "role", "iteration"})
"""Parameters that identify a tensor."""


@dataclass(frozen=True, slots=True)
class Shown:
    """All data that a pane may read."""

    view: RunView
    at: Selection
    colour: str
    scale: str
    expanded: frozenset[str] | None
    follow: bool
    pass_: str = "forward"
    slicing: str = ""
    order: str = ""
    window: str = ""
    axis: str = "recorded"
    other: Other | None = None
    run: str = ""
    walk: str = ""
    overlaid: Overlaid = DEFAULT
    brush: Brush = NOTHING
    measure: str = "raw"
    between: str = ""
    route: int = 0


@dataclass(frozen=True, slots=True)
class Exhibit:
    """A Bokeh figure of a pane, its accessible name, and the function that returns its CSV."""

    figure: Any
    label: str
    csv: Callable[[], bytes]


class Pane(ABC):
    """A view of the run.

    `reads` names the state parameters that the pane depends on. `build` creates the objects of the
    pane once, `update` changes them in place, and `panel` is placed on the page.
    """

    reads: ClassVar[frozenset[str]]
    sizing: ClassVar[str] = "stretch_both"

    def __init__(self, act: Act) -> None:
        self.act = act
        self._shown: Shown | None = None
        self._problem = pn.pane.HTML("", visible=False, margin=0)  # type: ignore[no-untyped-call]
        self._body = self.build()
        self.panel = pn.Column(
            self._problem, self._body, sizing_mode=self.sizing, margin=0, css_classes=["pane"]
        )

    @abstractmethod
    def build(self) -> Any:
        """Create the pane's objects and return the outermost one."""

    @abstractmethod
    def update(self, shown: Shown) -> None:
        """Update the objects in place to show `shown`."""

    def components(self) -> list[Any]:
        """Return the browser components to notify when the page is ready."""
        return []

    def ahead(self, shown: Shown) -> Iterator[Callable[[], object]]:
        """Yield pieces of work after which the pane shows `shown` sooner."""
        yield from ()

    def exhibits(self) -> list[Exhibit]:
        """Return the figures that users can download."""
        return []

    def _name(self) -> str:
        return type(self).__name__.removesuffix("Pane") + " pane"

    def refresh(self, shown: Shown) -> None:
        """Update the pane. If an error occurs, a message replaces this pane only."""
        self._shown = shown
        try:
            self.update(shown)
        except Exception as error:  # noqa: BLE001 - the page must show any error
            if not isinstance(error, ComgraError):
                _LOG.exception("%s failed to draw", type(self).__name__)
            self._problem.stylesheets = [CSS]  # set on demand, because few panes need it
            self._problem.object = problem_card(f"Cannot show the {self._name()}", error)
            self._problem.visible, self._body.visible = True, False
        else:
            if self._problem.visible:
                self._problem.visible, self._body.visible = False, True

    def again(self) -> None:
        """Update the pane for a reason other than a state change."""
        if self._shown is not None:
            self.refresh(self._shown)


_FAULT = (
    "This is a bug in the viewer. The rest of the page still works. This pane will be redrawn "
    "after your next change. Please include the details in a bug report."
)


def problem_card(title: str, error: BaseException) -> str:
    """Return a card that describes an error, with its code location for a bug report."""
    where = ""
    if not isinstance(error, ComgraError):
        lines = traceback.format_exception(error)
        where = (
            f"<p>{_FAULT}</p>"
            f"<details><summary>Details</summary><pre>{_e(''.join(lines))}</pre></details>"
        )
    text = str(error) or type(error).__name__
    return f'<div class="notice bad"><h2>{_e(title)}</h2><p>{_e(text)}</p>{where}</div>'


SAVE = "save:csv"
"""Message sent by the button that `save_button` returns."""


def save_button(what: str) -> str:
    """Return a button for an `HtmlView` that downloads its table as CSV."""
    return (
        f'<button type="button" class="take" data-send="{SAVE}" '
        f'aria-label="Save {_e(what)} as CSV" title="Save {_e(what)} as CSV">CSV</button>'
    )


def hand_table(view: HtmlView, at: Selection, what: str, content: bytes) -> None:
    """Send a table to the user as a CSV file."""
    name = clean_name(at.node, f"step{at.step}", what, ending=".csv")
    view.hand_over(name, content, kind=CSV)


def html_view(css: str = "", **params: Any) -> HtmlView:
    """Return an `HtmlView` with the viewer's style sheet."""
    params = {"sizing_mode": "stretch_width", "margin": 0, **params}
    return HtmlView(css=CSS + css, **params)
