"""What every pane is: built once, changed in place, and never the cause of a dead page."""

from __future__ import annotations

import logging
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import panel as pn

from comgra_decl.errors import ComgraError
from comgra_decl.viewer.components.htmlview import HtmlView
from comgra_decl.viewer.escaping import html_text as _e
from comgra_decl.viewer.model.comparison_target import Other
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.selection import Selection
from comgra_decl.viewer.model.takeaway import CSV, clean_name
from comgra_decl.viewer.style import CSS

Act = Callable[..., None]
"""Changes what is shown: `act(step=10, node="encoder")`; see `Dashboard.change`."""

_LOG = logging.getLogger(__name__)

PASSES = ("forward", "gradient")
"""What the first and the second of two panes beside each other show."""

TENSOR = frozenset({"run", "revision", "type", "node", "role", "iteration"})
"""What chooses a tensor."""


@dataclass(frozen=True, slots=True)
class Shown:
    """All that a pane may look at."""

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


@dataclass(frozen=True, slots=True)
class Exhibit:
    """A Bokeh figure of a pane, what a screen reader calls it, and what gives its numbers."""

    figure: Any
    label: str
    csv: Callable[[], bytes]


class Pane(ABC):
    """A view of the run.

    `reads` names the parameters of the state that it depends on; `build` makes its objects once,
    `update` changes them in place. `panel` is what goes on the page.
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
        """Makes the objects of the pane and returns the outermost."""

    @abstractmethod
    def update(self, shown: Shown) -> None:
        """Changes the objects in place so that they show `shown`."""

    def components(self) -> list[Any]:
        """Browser components that must hear when the page is ready."""
        return []

    def exhibits(self) -> list[Exhibit]:
        """Figures that can be taken away as files."""
        return []

    def _name(self) -> str:
        return type(self).__name__.removesuffix("Pane") + " pane"

    def refresh(self, shown: Shown) -> None:
        """Updates; what goes wrong is shown in place of this pane alone."""
        self._shown = shown
        try:
            self.update(shown)
        except Exception as error:  # noqa: BLE001 - whatever it is, it must be seen
            if not isinstance(error, ComgraError):
                _LOG.exception("%s could not be drawn", type(self).__name__)
            self._problem.stylesheets = [CSS]  # so late because hardly any pane ever needs it
            self._problem.object = problem_card(f"{self._name()} cannot be shown", error)
            self._problem.visible, self._body.visible = True, False
        else:
            if self._problem.visible:
                self._problem.visible, self._body.visible = False, True

    def again(self) -> None:
        """Updates for another reason than a change of what is shown."""
        if self._shown is not None:
            self.refresh(self._shown)


_FAULT = (
    "This is a fault of the viewer. The next change tries again, and the rest of the page goes on; "
    "the details help whoever mends it."
)


def problem_card(title: str, error: BaseException) -> str:
    """Returns a card that says what went wrong, with the place in the code for a bug report."""
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
"""What the button of `save_button` sends."""


def save_button(what: str) -> str:
    """Returns a button for an `HtmlView`, which gives the numbers of its table as a file."""
    return (
        f'<button type="button" class="take" data-send="{SAVE}" '
        f'aria-label="Save {_e(what)} as CSV" title="Save {_e(what)} as CSV">CSV</button>'
    )


def hand_table(view: HtmlView, at: Selection, what: str, content: bytes) -> None:
    """Gives the user a table as a file."""
    name = clean_name(at.node, f"step{at.step}", what, ending=".csv")
    view.hand_over(name, content, kind=CSV)


def html_view(css: str = "", **params: Any) -> HtmlView:
    """Returns an `HtmlView` in the viewer's style."""
    params = {"sizing_mode": "stretch_width", "margin": 0, **params}
    return HtmlView(css=CSS + css, **params)
