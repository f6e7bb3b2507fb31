"""Raw values of the selected tensor: image, table or sorted list, and downloads."""

from __future__ import annotations

from typing import Any, ClassVar

import panel as pn

from comgra_decl.errors import ComgraError
from comgra_decl.viewer.components.base import Message
from comgra_decl.viewer.components.chooser import Chooser
from comgra_decl.viewer.escaping import html_text as _e
from comgra_decl.viewer.model.labels import named, pass_label
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.sheet import (
    TEXT,
    Tensor,
    facts_of,
    listing_of,
    picture_of,
    tensor_of,
    text_of,
    window_of,
)
from comgra_decl.viewer.model.sheet_choices import sample_of, sheet_choices
from comgra_decl.viewer.model.slicing import COLUMNS, ROWS, Slicing
from comgra_decl.viewer.model.takeaway import csv_of, file_name, npy_of, tabbed, written
from comgra_decl.viewer.model.tokens import has_tokens, joined, labels, spelled
from comgra_decl.viewer.panes.base import TENSOR, Exhibit, Pane, Shown, html_view
from comgra_decl.viewer.panes.selectors import offer
from comgra_decl.viewer.panes.sheet_html import (
    INSPECT,
    listing_html,
    missing_html,
    text_html,
    window_html,
)
from comgra_decl.viewer.panes.sheet_picture import SheetPicture
from comgra_decl.viewer.style import UNCUT

_GRID = """
:host {
  box-sizing: border-box; display: grid !important; gap: 0 14px; padding: 8px 14px;
  grid-template-columns: 190px minmax(220px, 2fr) minmax(320px, 3fr);
  grid-template-rows: minmax(0, 1fr);
}
:host(.missing) .cells { grid-column: 2 / span 2; }
:host(.missing) .bk-Figure { display: none !important; }
.choices, .cells { contain: size; min-height: 0; min-width: 0; overflow: auto; }
@container (max-width: 900px) {
  :host {
    grid-template-columns: minmax(0, 1fr); min-height: 840px; row-gap: 12px;
    grid-template-rows: max-content minmax(280px, 1fr) minmax(260px, 1fr);
  }
  .choices { contain: none; }
  :host(.missing) { grid-template-rows: max-content minmax(260px, 1fr); min-height: 0; }
  :host(.missing) .cells { grid-column: 1; }
}
.scroll-button { display: none !important; }
@media print { :host { grid-template-rows: minmax(280px, auto) auto !important; } }
"""
NARROW = """
.chooser { padding: 0 8px 8px 0 !important; }
section { padding: 0 0 4px !important; }
section + section { padding-top: 8px !important; }
"""
ACROSS = """
@container (max-width: 900px) {
  section { display: grid; gap: 0 12px; grid-template-columns: repeat(3, minmax(0, 1fr)); }
  h2 { grid-column: 1 / -1; }
}
"""
"""Style sheet of choices that stand above the figures, in rows of three, on a narrow page."""


class SheetPane(Pane):
    """Choices on the left, an image of the whole slice, and exact numbers on the right."""

    reads: ClassVar = TENSOR | {"step", "batch", "pass_", "slicing", "order", "window", "brush"}

    def build(self) -> Any:
        """Create the choices, the figure and the table."""
        self._tensor = Tensor()
        self._slicing = Slicing(())
        self._key: object = None
        self.choices = Chooser(sizing_mode="stretch_both", margin=0, stylesheets=[NARROW, ACROSS])
        self.choices.css_classes = ["choices"]
        self.choices.on_message(self._choose)
        self.picture = SheetPicture(self._look_at)
        self.view = html_view(sizing_mode="stretch_both", css_classes=["cells"])
        self.view.on_message(self._on_message)
        self.box = pn.Column(
            self.choices, self.picture.panel, self.view, sizing_mode="stretch_both", margin=0,
            stylesheets=[_GRID, UNCUT],
        )  # fmt: skip
        return self.box

    def components(self) -> list[Any]:
        """Return choices and cells, which handle clicks."""
        return [self.choices, self.view]

    def exhibits(self) -> list[Exhibit]:
        """Return the image; its CSV contains the slice."""
        return [Exhibit(self.picture.frame.figure, "raw values", self._csv)]

    def _csv(self) -> bytes:
        assert self._shown is not None
        if self._tensor.missing is not None:
            return written(["value"], [])
        return csv_of(self._tensor, self._slicing, self._shown.order)

    def update(self, shown: Shown) -> None:
        """Read the tensor if it has changed, and draw the slice and the table."""
        at = shown.at
        key = (shown.view, shown.view.revision, at, shown.pass_)
        if key != self._key:
            self._tensor = tensor_of(shown.view, at, shown.pass_)
            self._key = key
        tensor = self._tensor
        self._slicing = tensor.slicing(shown.slicing)
        self._offer(shown.view)
        self._make_room(picture=tensor.missing is None)
        if tensor.missing is not None:
            self.picture.clear()
            body, tokens = missing_html(tensor.missing, preview=_has_preview(shown))
            self._write(f"{_title(shown, tensor)}{body}", tokens)
            return
        if shown.order:
            page = listing_of(tensor, shown.order, shown.window)
            body, tokens = listing_html(page, tensor.dims)
        else:
            window = window_of(tensor, self._slicing, shown.window)
            words = labels(shown.view, window.cells) if _spells(shown, tensor) else None
            brushed = shown.brush.samples if self._axes()[0] == "sample" else ()
            body, tokens = window_html(window, self._axes(), words=words, brushed=brushed)
        self.picture.show(picture_of(tensor, self._slicing), key=(key, self._slicing))
        self.picture.frame.hover.name(named(shown.at))
        self.picture.label(*self._axes())
        self.picture.frame_window(window_of(tensor, self._slicing, shown.window), shown.order == "")
        text = text_of(tensor)
        if _spells(shown, tensor) and tensor.chosen.ndim == 1:
            text = joined(spelled(shown.view, tensor.chosen))[:TEXT]
        self._write(_title(shown, tensor) + text_html(text) + body, tokens)

    def _make_room(self, *, picture: bool) -> None:
        """Show the image, or only the reason why there is none, in its place too."""
        classes = [] if picture else ["missing"]
        if self.box.css_classes != classes:
            self.box.css_classes = classes

    def _write(self, content: str, tokens: list[str]) -> None:
        self.view.param.update(html=content, tokens=tokens)

    def _offer(self, view: RunView) -> None:
        assert self._shown is not None
        groups = sheet_choices(
            view, self._shown.at, self._tensor,
            slicing=self._slicing, order=self._shown.order, pass_=self._shown.pass_,
        )  # fmt: skip
        offer(self.choices, groups)

    def _axes(self) -> tuple[str, str]:
        """Return the names of rows and columns."""
        dims = (self._slicing.dim(ROWS), self._slicing.dim(COLUMNS))
        down, across = ("" if i is None else self._tensor.dims[i].name for i in dims)
        return down, across

    def _look_at(self, row: int, column: int) -> None:
        self.act(window=f"{max(row, 0)},{max(column, 0)}", order="")

    def _on_message(self, message: Message) -> None:
        kind, _, rest = message["send"].partition(":")
        if kind == "window":
            self.act(window=rest)
        elif message["send"] == INSPECT:
            self.act(section=INSPECT)
        else:
            self._show_cell([int(i) for i in rest.split(",")])

    def _show_cell(self, index: list[int]) -> None:
        """Scrolls the table to an element of the list."""
        slicing, corner = self._slicing, [0, 0]
        for dim, i in enumerate(index):
            place = slicing.places[dim]
            if place in (ROWS, COLUMNS):
                corner[place == COLUMNS] = max(i - 3, 0)
            elif not isinstance(place, str):
                slicing = slicing.put(dim, i)
        self.act(slicing=slicing.text, window=f"{corner[0]},{corner[1]}", order="")

    def _choose(self, message: Message) -> None:
        ((name, value),) = message.items()
        kind, _, dim = name.partition(":")
        if kind == "file":
            self._hand_over(value)
        elif kind == "sample":
            self.act(batch=sample_of(value))
        elif kind in ("place", "index"):
            place = 0 if value == "index" else int(value) if kind == "index" else value
            self.act(slicing=self._slicing.put(int(dim), place).text, window="")
        else:
            self.act(**{name: value}, **({"window": ""} if kind == "order" else {}))

    def _hand_over(self, what: str) -> None:
        assert self._shown is not None
        shown, tensor = self._shown, self._tensor
        if what == "copy":
            window = window_of(tensor, self._slicing, shown.window)
            listing = csv_of(tensor, self._slicing, shown.order).replace(b",", b"\t")
            content = listing if shown.order else tabbed(window)
            self.choices.hand_over("", content, kind="text/plain")
        elif what == "csv":
            content = csv_of(tensor, self._slicing, shown.order)
            self.choices.hand_over(file_name(shown.at, tensor, ".csv"), content, kind="text/csv")
        else:
            name = file_name(shown.at, tensor, ".npy")
            self.choices.hand_over(name, npy_of(tensor), kind="application/octet-stream")


def _has_preview(shown: Shown) -> bool:
    """Return whether *Inspect* shows a preview of the tensor at this step."""
    slot = shown.view.passes(shown.at.node, shown.at.role, shown.at.iteration).get(shown.pass_)
    if slot is None or shown.at.step is None:
        return False
    try:
        shown.view.preview(slot, shown.at.step, shown.at.type)
    except ComgraError:
        return False
    return True


def _spells(shown: Shown, tensor: Tensor) -> bool:
    """Return whether the values are ids of tokens."""
    return tensor.slot is not None and has_tokens(shown.view, tensor.slot)


def _title(shown: Shown, tensor: Tensor) -> str:
    at = shown.at
    pass_ = pass_label(tensor.slot.pass_) if tensor.slot is not None else ""
    sample = [] if tensor.fixed is None else [f"sample {tensor.fixed}"]
    facts = [] if tensor.missing is not None else [facts_of(tensor)]
    chips = "".join(
        f'<span class="chip">{_e(text)}</span>'
        for text in (at.role, pass_, f"step {at.step}", *sample, *facts)
        if text
    )
    name = _e(at.node)
    return f'<div class="node-title" data-step="{at.step}"><h2>{name}</h2>{chips}</div>'
