"""Image of a slice of raw values. A click moves the table to that position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from bokeh.models import ColumnDataSource, LinearColorMapper
from bokeh.models.annotations import BoxAnnotation

from comgra_decl.viewer.model.numbers import count, number
from comgra_decl.viewer.model.sheet import Picture, Window
from comgra_decl.viewer.palette import RED, signed_faded
from comgra_decl.viewer.panes.figures import IMAGE, Frame, image, whole
from comgra_decl.viewer.panes.hovering import CELL, SUBJECT

_EMPTY: dict[str, list[Any]] = {name: [] for name in IMAGE}
_BACK = 3  # number of cells to show before the clicked cell


class SheetPicture:
    """A figure with an image. `panel` is placed on the page."""

    def __init__(self, look_at: Callable[[int, int], None]) -> None:
        self._drawn: object = None
        self.frame = Frame(tooltips=[SUBJECT, *CELL], both=True)
        fig: Any = self.frame.figure
        self._image = ColumnDataSource(dict(_EMPTY))
        self._photo = ColumnDataSource(dict(_EMPTY))
        self._broken = ColumnDataSource(dict(_EMPTY))
        self._mapper = LinearColorMapper(
            palette=signed_faded(), low=-1, high=1, nan_color="#00000000"
        )
        drawn = image(fig, self._image, self._mapper)
        fig.image_rgba(*IMAGE, source=self._photo)
        marks = LinearColorMapper(palette=[RED, RED], low=0, high=1, nan_color="#00000000")
        image(fig, self._broken, marks)
        fig.hover.renderers = [drawn]
        fig.ygrid.grid_line_color = None
        for axis in (*fig.xaxis, *fig.yaxis):
            axis.formatter = whole()
        self._box = BoxAnnotation(fill_alpha=0, line_color=RED, line_width=1.5, level="overlay")
        fig.add_layout(self._box)
        self.frame.on_tap(lambda x, y: look_at(round(y) - _BACK, round(x) - _BACK))
        self.panel = self.frame.pane()

    def clear(self) -> None:
        """Clear the image."""
        self._drawn = None
        self._image.data = self._broken.data = self._photo.data = dict(_EMPTY)
        self._box.visible = False
        self.frame.title = ""
        self.frame.label("")
        self.frame.show_message("No values at this step.")

    def show(self, picture: Picture, *, key: object) -> None:
        """Draw a slice, unless `key` is identical to the key of the displayed slice."""
        if key == self._drawn:
            return
        self._drawn = key
        self.frame.show_message("")
        rows, columns = picture.image.shape
        height, width = rows * picture.block[0], columns * picture.block[1]
        place = {"x": [-0.5], "y": [-0.5], "dw": [width], "dh": [height]}
        self._mapper.update(low=-picture.limit, high=picture.limit)
        if picture.rgba is None:
            image_ = picture.image.astype(np.float32)
            self._image.data, self._photo.data = {"image": [image_], **place}, dict(_EMPTY)
        else:
            self._image.data, self._photo.data = dict(_EMPTY), {"image": [picture.rgba], **place}
        marks = np.where(picture.marks, np.float32(1), np.float32(np.nan))
        bad = bool(picture.marks.any())
        self._broken.data = {"image": [marks], **place} if bad else dict(_EMPTY)
        self.frame.show(x=(-0.5, width - 0.5), y=(height - 0.5, -0.5))
        self.frame.title = _title(picture)

    def label(self, down: str, across: str) -> None:
        """Labels the axes."""
        self.frame.label(across)
        self.frame.label_left(down)

    def frame_window(self, window: Window, visible: bool) -> None:
        """Outlines the cells that are shown in the table, unless the table shows all cells."""
        height, width = window.cells.shape
        self._box.update(
            left=window.column - 0.5, right=window.column + width - 0.5,
            top=window.row + height - 0.5, bottom=window.row - 0.5,
            visible=visible and window.total != (height, width),
        )  # fmt: skip


def _title(picture: Picture) -> str:
    if picture.rgba is not None:
        return "as colours"
    text = f"\u00b1{number(picture.limit, digits=3)}"
    if picture.block != (1, 1):
        h, w = picture.block
        text += f" \u00b7 largest of every {count(h)}\u00d7{count(w)} cells"
    return text
