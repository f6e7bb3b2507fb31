"""Distribution of the selected tensor's values over training."""

from __future__ import annotations

from math import pi
from typing import Any, ClassVar

import numpy as np
from bokeh.models import ColumnDataSource, Line, LinearColorMapper, Range1d, Scatter
from numpy.typing import NDArray

from comgra_decl.viewer.model.distribution import Distribution, distribution
from comgra_decl.viewer.model.labels import named, pass_label
from comgra_decl.viewer.model.runview import Steps
from comgra_decl.viewer.model.selection import nearest, slots_of
from comgra_decl.viewer.model.series import extent, isolated
from comgra_decl.viewer.model.tables import distribution_csv
from comgra_decl.viewer.palette import AMBER, BLUE, ORANGE, RED, faded
from comgra_decl.viewer.panes.base import PASSES, TENSOR, Act, Exhibit, Pane, Shown
from comgra_decl.viewer.panes.figures import FEW, IMAGE, Frame, image, plainly, put
from comgra_decl.viewer.panes.hovering import STEP, SUBJECT, Row
from comgra_decl.viewer.panes.inline import inline, inline_steps

SHADES = 64
"""Colours from transparent to opaque."""

_NUMBERS = {
    "highest": "highest",
    "upper": "upper quartile",
    "median": "median",
    "lower": "lower quartile",
    "lowest": "lowest",
}
"""Columns of the lines' data source, and what a tooltip calls them."""
_LINES = ("x", *_NUMBERS)


class DistributionPane(Pane):
    """Histograms of one pass over steps: the forward pass at place 0, the gradient at place 1."""

    reads: ClassVar = TENSOR | {"step", "gradient"}

    def __init__(self, act: Act, *, place: int, x_range: Range1d) -> None:
        self._place = place
        self._x_range = x_range
        self._drawn: object = None
        self._steps: Steps = np.empty(0, np.int64)  # of the records that are drawn
        super().__init__(act)

    def build(self) -> Any:
        """Create the figure with one image."""
        numbers = [Row(label, f"@{name}") for name, label in _NUMBERS.items()]
        tooltips = [SUBJECT, STEP, *numbers]
        self.frame = Frame(x_range=self._x_range, tooltips=tooltips, ticks=FEW)
        self._image = ColumnDataSource({name: [] for name in IMAGE})
        mapper = LinearColorMapper(
            palette=faded(ORANGE if self._place else BLUE, SHADES), low=0, high=SHADES
        )
        fig = self.frame.figure
        image(fig, self._image, mapper)
        self._lines, self._dots, self._beyond = (
            ColumnDataSource({name: [] for name in names})
            for names in (_LINES, ("x", "y"), ("x", "y", "angle"))
        )
        ink = BLUE if self._place else AMBER  # visible on the colours of the distribution
        for name in ("lower", "upper"):
            quartile = Line(x="x", y=name, line_color=ink, line_width=1.2, line_dash=[3, 2])
            plainly(fig, quartile, self._lines)
        median = Line(x="x", y="median", line_color=ink, line_width=1.8)
        self.frame.hover.along([plainly(fig, median, self._lines)])
        plainly(fig, Scatter(x="x", y="y", size=4, line_color=ink, fill_color=ink), self._dots)
        further = Scatter(
            x="x", y="y", angle="angle", marker="triangle", size=7, line_color=RED, fill_color=RED
        )
        plainly(fig, further, self._beyond)
        self.frame.on_tap(self._jump)
        self.frame.on_zoom(self.again)
        return self.frame.pane()

    def exhibits(self) -> list[Exhibit]:
        """Return the figure; its CSV contains the histograms as recorded."""
        return [Exhibit(self.frame.figure, f"{PASSES[self._place]} distribution", self._csv)]

    def _csv(self) -> bytes:
        assert self._shown is not None
        view, at = self._shown.view, self._shown.at
        return distribution_csv(view, slots_of(view, at)[self._place], at)

    def update(self, shown: Shown) -> None:
        """Redraw the image if the tensor has changed. Always moves the step marker."""
        at, within = shown.at, self.frame.window
        key = (shown.view, shown.view.revision, at.type, at.node, at.role, at.iteration,
               at.gradient, within)  # fmt: skip
        if key != self._drawn:
            slot = slots_of(shown.view, at)[self._place]
            self.frame.show(x=extent(shown.view.steps(at.type)))
            self.frame.hover.name(named(at))
            self._draw(distribution(shown.view, slot, at, within=within))
            name = pass_label(at.gradient) if self._place else "forward"
            self.frame.title = f"{name} \u00b7 distribution"
            self._drawn = key
        self.frame.mark_step(at.step)

    def _draw(self, picture: Distribution) -> None:
        self._image.data = {
            "image": [] if picture.missing else [inline(shades(picture.image), np.uint8)],
            "x": [] if picture.missing else [picture.x0],
            "y": [] if picture.missing else [picture.y0],
            "dw": [] if picture.missing else [picture.x1 - picture.x0],
            "dh": [] if picture.missing else [picture.y1 - picture.y0],
        }
        numbers = (picture.highest, *picture.quartiles[::-1], picture.lowest)
        columns = zip(_NUMBERS, map(inline, numbers), strict=True)
        put(self._lines, {"x": inline_steps(picture.steps), **dict(columns)})
        alone = isolated(picture.quartiles[1])
        dots = {"x": picture.steps[alone].tolist(), "y": picture.quartiles[1][alone].tolist()}
        put(self._dots, dots)
        below, above = (steps.tolist() for steps in picture.beyond)
        put(
            self._beyond,
            {
                "x": [*below, *above],
                "y": [picture.y0] * len(below) + [picture.y1] * len(above),
                "angle": [pi] * len(below) + [0.0] * len(above),
            },
        )
        self._steps = picture.steps[np.isfinite(picture.lowest)]
        self.frame.show(y=(picture.y0, picture.y1))
        self.frame.show_message(picture.missing)

    def _jump(self, x: float, _: float) -> None:
        step = nearest(self._steps, round(x))  # as in the tooltip
        if self._shown is not None and step is not None:
            self.act(step=step, follow=False)


def shades(image: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Return the shade index of each cell as uint8, an eighth of the size. NaN becomes 0.

    Shade 0 is transparent. The values of `image` [rows, columns] are between 0 and 1.
    """
    known: NDArray[np.float64] = np.fmax(image, 0)  # fmax ignores NaN
    return np.minimum(known * SHADES, SHADES - 1).astype(np.uint8)
