"""Recorded values of the selected tensor at the current step."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from bokeh.models import ColumnDataSource, LinearColorMapper
from bokeh.models.formatters import BasicTickFormatter

from comgra_decl.viewer.model.labels import pass_label
from comgra_decl.viewer.model.numbers import number
from comgra_decl.viewer.model.selection import slots_of
from comgra_decl.viewer.model.sheet import Tensor, tensor_of
from comgra_decl.viewer.model.tables import values_csv
from comgra_decl.viewer.model.values import ValuesPicture, values_picture
from comgra_decl.viewer.palette import RED, signed_faded
from comgra_decl.viewer.panes.base import PASSES, TENSOR, Act, Exhibit, Pane, Shown
from comgra_decl.viewer.panes.figures import FEW, IMAGE, Frame, image, put
from comgra_decl.viewer.panes.inline import inline

_EMPTY: dict[str, list[Any]] = {name: [] for name in IMAGE}


class ValuesPane(Pane):
    """Values of one pass. Place 0 is the forward pass, place 1 the gradient."""

    reads: ClassVar = TENSOR | {"step", "gradient", "batch"}

    def __init__(self, act: Act, *, place: int) -> None:
        self._place = place
        self._drawn: object = None
        super().__init__(act)

    def build(self) -> Any:
        """Creates the figure with an image of the values and an image of non-finite values."""
        tooltips = [("row, column", "$y{0}, $x{0}"), ("value", "@image")]
        self.frame = Frame(tooltips=tooltips, both=True, ticks=FEW)
        self._image = ColumnDataSource(dict(_EMPTY))
        self._broken = ColumnDataSource(dict(_EMPTY))
        self._mapper = LinearColorMapper(
            palette=signed_faded(), low=-1, high=1, nan_color="#00000000"
        )
        fig = self.frame.figure
        drawn = image(fig, self._image, self._mapper)
        marks = LinearColorMapper(palette=[RED, RED], low=0, high=1, nan_color="#00000000")
        image(fig, self._broken, marks)
        fig.hover.renderers = [drawn]
        fig.ygrid.grid_line_color = None
        fig.xaxis.formatter = BasicTickFormatter(use_scientific=False)
        fig.yaxis.formatter = BasicTickFormatter(use_scientific=False)
        return self.frame.pane()

    def exhibits(self) -> list[Exhibit]:
        """Returns the figure; its CSV contains every recorded value."""
        return [Exhibit(self.frame.figure, f"{PASSES[self._place]} values", self._csv)]

    def _csv(self) -> bytes:
        assert self._shown is not None
        at = self._shown.at
        pass_ = at.gradient if self._place else "forward"
        tensor = tensor_of(self._shown.view, at, pass_)
        other = tensor.slot is not None and tensor.slot.pass_ != pass_
        return values_csv(Tensor() if other else tensor)

    def update(self, shown: Shown) -> None:
        """Redraws if the tensor, the step or the sample has changed."""
        at = shown.at
        key = (shown.view, at.type, at.step, at.node, at.role, at.iteration, at.gradient, at.sample)
        if key != self._drawn:
            picture = values_picture(shown.view, slots_of(shown.view, at)[self._place], at)
            self.frame.title = _title(shown, self._place, picture)
            self._draw(picture)
            self._drawn = key

    def _draw(self, picture: ValuesPicture) -> None:
        if picture.missing:
            put(self._image, dict(_EMPTY))
            put(self._broken, dict(_EMPTY))
            self.frame.show(x=(0.0, 1.0), y=(0.0, 1.0))
        else:
            rows, columns = picture.image.shape
            place = {"x": [-0.5], "y": [-0.5], "dw": [columns], "dh": [rows]}
            self._mapper.update(low=-picture.limit, high=picture.limit)
            self._image.data = {"image": [inline(picture.image, np.float64)], **place}
            marks = np.where(picture.marks, 1.0, np.nan)
            put(
                self._broken,
                {"image": [inline(marks)], **place} if picture.broken else dict(_EMPTY),
            )
            self.frame.show(x=(-0.5, columns - 0.5), y=(rows - 0.5, -0.5))
            self.frame.label(f"{picture.facts} \u00b7 \u00b1{number(picture.limit, digits=3)}")
        self.frame.show_message(picture.missing)


def _title(shown: Shown, place: int, picture: ValuesPicture) -> str:
    at = shown.at
    what = f"sample {at.sample}" if at.sample is not None and not picture.missing else "values"
    parts = [pass_label(at.gradient) if place else "forward", what]
    parts += [f"{picture.broken} not finite"] if picture.broken else []
    return " \u00b7 ".join(parts)
