"""Values of the selected tensor at the current step, drawn according to their axes."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import panel as pn
from bokeh.models import (
    ColumnDataSource,
    FixedTicker,
    ImageRGBA,
    Line,
    LinearColorMapper,
    Rect,
    Text,
    VBar,
)

from comgra_decl.viewer.escaping import bokeh_text
from comgra_decl.viewer.model.drawing import Drawing, Ticks, fitted, labels_of, place_of, tile_ticks
from comgra_decl.viewer.model.labels import named, pass_label
from comgra_decl.viewer.model.numbers import number
from comgra_decl.viewer.model.selection import slots_of
from comgra_decl.viewer.model.sheet import Tensor, tensor_of
from comgra_decl.viewer.model.tables import values_csv
from comgra_decl.viewer.model.values import ValuesPicture, values_picture
from comgra_decl.viewer.palette import BLUE, GREY, INK, ORANGE, RED, signed_faded
from comgra_decl.viewer.panes.base import PASSES, TENSOR, Act, Exhibit, Pane, Shown
from comgra_decl.viewer.panes.figures import FEW, IMAGE, Frame, image, plainly, put
from comgra_decl.viewer.panes.hovering import PLACE, SUBJECT, TILE
from comgra_decl.viewer.panes.inline import inline

_EMPTY: dict[str, list[Any]] = {name: [] for name in IMAGE}
_POINTS: dict[str, list[Any]] = {"x": [], "y": []}
_TEXTS: dict[str, list[Any]] = {"x": [], "y": [], "text": []}
_BOXES: dict[str, list[Any]] = {"x": [], "y": [], "width": [], "height": []}

_WIDTH, _HEIGHT = 400, 200  # of a figure, until the browser tells
_NUMBERED = 6  # tiles along an axis that are numbered
_LETTER, _LINE = 6.5, 11  # pixels that a letter and a line take


class ValuesPane(Pane):
    """Values of one pass: the forward pass at place 0, the gradient at place 1."""

    reads: ClassVar = TENSOR | {"step", "gradient", "batch", "measure"}

    def __init__(self, act: Act, *, place: int) -> None:
        self._place = place
        self._drawn: object = None
        super().__init__(act)

    def build(self) -> Any:
        """Create the figure: one renderer for each form of drawing, and the marks on them."""
        tooltips = [SUBJECT, PLACE, TILE]
        self.frame = Frame(tooltips=tooltips, both=True, ticks=FEW)
        self._image = ColumnDataSource(dict(_EMPTY))
        self._broken = ColumnDataSource(dict(_EMPTY))
        self._mapper = LinearColorMapper(
            palette=signed_faded(), low=-1, high=1, nan_color="#00000000"
        )
        fig = self.frame.figure
        drawn = image(fig, self._image, self._mapper)
        self._photo = ColumnDataSource(dict(_EMPTY))
        columns: dict[str, Any] = {name: name for name in IMAGE}
        plainly(fig, ImageRGBA(**columns), self._photo)
        marks = LinearColorMapper(palette=[RED, RED], low=0, high=1, nan_color="#00000000")
        image(fig, self._broken, marks)
        colour = ORANGE if self._place else BLUE
        self._bars, self._line = ColumnDataSource(dict(_POINTS)), ColumnDataSource(dict(_POINTS))
        bar = VBar(x="x", top="y", bottom=0, width=0.8, fill_color=colour, line_color=None)
        plainly(fig, bar, self._bars)
        plainly(fig, Line(x="x", y="y", line_color=colour, line_width=1.2), self._line)
        self._zeros = ColumnDataSource(dict(_BOXES))
        box = Rect(
            x="x", y="y", width="width", height="height", fill_color=None, line_color=RED,
            line_dash="dashed",
        )  # fmt: skip
        plainly(fig, box, self._zeros)
        self._numbers = ColumnDataSource(dict(_TEXTS))
        text = Text(
            x="x", y="y", text="text", text_font_size="9px", text_color=GREY,
            text_baseline="top", x_offset=2,
        )  # fmt: skip
        plainly(fig, text, self._numbers)
        self._words = ColumnDataSource(dict(_TEXTS))
        word = Text(
            x="x", y="y", text="text", text_font_size="10px", text_color=INK,
            text_align="center", text_baseline="middle",
        )  # fmt: skip
        plainly(fig, word, self._words)
        self._cells: Drawing | None = None  # shown now
        self._size = {"inner_width": 0, "inner_height": 0}  # until the browser tells
        for name in self._size:
            fig.on_change(name, self._on_size)
        fig.hover.renderers = [drawn]
        fig.ygrid.grid_line_color = None
        axes = fig.xaxis[0], fig.yaxis[0]
        self._axes: list[Any] = [(axis, axis.ticker, FixedTicker(ticks=[])) for axis in axes]
        return self.frame.pane()

    def exhibits(self) -> list[Exhibit]:
        """Return the figure; its CSV contains every recorded value."""
        return [Exhibit(self.frame.figure, f"{PASSES[self._place]} values", self._csv)]

    def _csv(self) -> bytes:
        assert self._shown is not None
        at = self._shown.at
        pass_ = at.gradient if self._place else "forward"
        tensor = tensor_of(self._shown.view, at, pass_)
        other = tensor.slot is not None and tensor.slot.pass_ != pass_
        return values_csv(Tensor() if other else tensor)

    def update(self, shown: Shown) -> None:
        """Redraw if the tensor, the step or the sample has changed."""
        at = shown.at
        key = (shown.view, at.type, at.step, at.node, at.role, at.iteration, at.gradient, at.sample,
               shown.measure)  # fmt: skip
        if key != self._drawn:
            slot, relative = slots_of(shown.view, at)[self._place], shown.measure == "relative"
            picture = values_picture(shown.view, slot, at, relative=relative)
            self.frame.title = _title(shown, self._place, picture)
            self.frame.hover.name(named(at), place=place_of(picture.drawing))
            self._draw(picture)
            self._drawn = key

    def _draw(self, picture: ValuesPicture) -> None:
        drawing, shown = picture.drawing, "" if picture.missing else picture.drawing.form
        self._draw_cells(drawing if shown in ("map", "colours") else None, picture.limit)
        self._number_axes(drawing if shown in ("map", "colours") else None)
        numbered = labels_of(drawing) if shown in ("map", "colours") else ()
        zeros = [tile for tile in drawing.tiles if tile.zero] if shown == "map" else []
        put(
            self._numbers,
            {
                "x": [tile.left - 0.5 for tile in numbered],
                "y": [tile.top - 0.5 for tile in numbered],
                "text": [str(tile.number) for tile in numbered],
            },
        )
        put(
            self._zeros,
            {
                "x": [tile.left + tile.width / 2 - 0.5 for tile in zeros],
                "y": [tile.top + tile.height / 2 - 0.5 for tile in zeros],
                "width": [tile.width for tile in zeros],
                "height": [tile.height for tile in zeros],
            },
        )
        for form, source in (("bars", self._bars), ("line", self._line)):
            put(source, _row(drawing) if shown == form else dict(_POINTS))
        if not shown:
            self.frame.show(x=(0.0, 1.0), y=(0.0, 1.0))
        elif shown in ("bars", "line"):
            columns = drawing.image.shape[1]
            self.frame.show(x=(-0.5, columns - 0.5), y=_heights(drawing, picture.limit))
            self.frame.label(drawing.facts, drawing.notes)
        else:
            self._show_cells(drawing)
            colours = shown == "map" and drawing.words is None  # those of tokens mean nothing
            unit = " standard deviations" if picture.relative else ""
            scale = [f"\u00b1{number(picture.limit, digits=3)}{unit}"] if colours else []
            notes = [drawing.notes] if drawing.notes else []
            self.frame.label(drawing.facts, " \u00b7 ".join([*notes, *scale]))
        self.frame.show_message(picture.missing)

    def _show_cells(self, drawing: Drawing) -> None:
        """Show all cells. Square cells are in the middle of the figure, whatever its size."""
        rows, columns = drawing.image.shape
        x, y = float(columns), float(rows)
        if drawing.to_scale:
            size = self._size["inner_width"], self._size["inner_height"]
            x, y = fitted(columns, rows, *size, aspect=drawing.aspect)
        left, top = (columns - x) / 2 - 0.5, (rows - y) / 2 - 0.5
        self.frame.show(x=(left, left + x), y=(top + y, top))
        put(self._words, self._labels(drawing))

    def _number_axes(self, drawing: Drawing | None) -> None:
        """Show the numbers of tiles at the axes, instead of those of the cells between them."""
        ticks: tuple[Ticks, Ticks] = ({}, {})
        if drawing is not None:
            ticks = tile_ticks(drawing, _NUMBERED)
        for (axis, usual, fixed), named_at in zip(self._axes, ticks, strict=True):
            labels = {at - 0.5: text for at, text in named_at.items()}
            if labels != axis.major_label_overrides:
                fixed.ticks = [*labels]
                axis.major_label_overrides = {at: bokeh_text(t) for at, t in labels.items()}
            ticker = fixed if labels else usual
            if axis.ticker is not ticker:
                axis.ticker = ticker

    def _labels(self, drawing: Drawing) -> dict[str, Any]:
        """Return the words of a map of tokens, if its cells have room for letters."""
        rows, columns = drawing.image.shape
        width, height = (
            (self._size[name] or likely) / cells
            for name, likely, cells in (
                ("inner_width", _WIDTH, columns), ("inner_height", _HEIGHT, rows),
            )
        )  # fmt: skip
        room = int(width / _LETTER)
        if drawing.words is None or room < 1 or height < _LINE:
            return dict(_TEXTS)
        places = np.indices((rows, columns)).reshape(2, -1)
        words = [_cut(word, room) for word in drawing.words.ravel().tolist()]
        return {"x": places[1].tolist(), "y": places[0].tolist(), "text": words}

    def _on_size(self, name: str, _old: object, pixels: int) -> None:
        self._size[name] = pixels
        if self._cells is not None and (self._cells.to_scale or self._cells.words is not None):
            with pn.io.hold():
                self._show_cells(self._cells)

    def _draw_cells(self, drawing: Drawing | None, limit: float) -> None:
        self._cells = drawing
        if drawing is None:
            for source in (self._image, self._photo, self._broken):
                put(source, dict(_EMPTY))
            put(self._words, dict(_TEXTS))
            return
        rows, columns = drawing.image.shape
        place = {"x": [-0.5], "y": [-0.5], "dw": [columns], "dh": [rows]}
        self._mapper.update(low=-limit, high=limit)
        cells = drawing.rgba is None
        put(
            self._image,
            {"image": [inline(drawing.image, np.float64)], **place} if cells else dict(_EMPTY),
        )
        put(
            self._photo,
            dict(_EMPTY) if drawing.rgba is None
            else {"image": [inline(drawing.rgba, np.uint32)], **place},
        )  # fmt: skip
        marks = drawing.marks
        put(
            self._broken,
            {"image": [inline(np.where(marks, 1.0, np.nan))], **place}
            if marks.any()
            else dict(_EMPTY),
        )


def _cut(word: str, room: int) -> str:
    return word if len(word) <= room else word[: room - 1] + "\u2026" if room > 2 else word[:room]


def _row(drawing: Drawing) -> dict[str, Any]:
    values = drawing.image[0]
    return {"x": inline(np.arange(len(values))), "y": inline(values, np.float64)}


def _heights(drawing: Drawing, limit: float) -> tuple[float, float]:
    """Return the range of the values, which includes the scale of all steps and zero."""
    finite = drawing.image[np.isfinite(drawing.image)]
    low, high = (min(finite.min(), 0.0), max(finite.max(), 0.0)) if len(finite) else (0.0, 0.0)
    low, high = (-max(limit, -low) if low < 0 else 0.0), (max(limit, high) if high > 0 else 0.0)
    margin = (high - low or 1.0) * 0.05
    return low - margin * (low < 0), high + margin


def _title(shown: Shown, place: int, picture: ValuesPicture) -> str:
    at = shown.at
    what = f"sample {at.sample}" if at.sample is not None and not picture.missing else "values"
    what += " relative to the batch" if picture.relative else ""
    parts = [pass_label(at.gradient) if place else "forward", what]
    if not (picture.missing or picture.whole):
        parts[1] = "preview" if what == "values" else f"preview, {what}"
        parts += [f"step {picture.step}"] if picture.step != at.step else []
    parts += [f"{picture.broken} not finite"] if picture.broken else []
    return " \u00b7 ".join(parts)
