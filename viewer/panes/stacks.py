"""A figure with one bar per step or moment, split into parts."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
from bokeh.models import ColumnDataSource, VBar
from bokeh.models.annotations import LegendItem

from comgra_decl.viewer.model.memory_use import OF
from comgra_decl.viewer.model.numbers import count, number
from comgra_decl.viewer.panes.figures import Frame, legend, plainly
from comgra_decl.viewer.panes.hovering import Row
from comgra_decl.visible import visible

_FEWEST = 4  # width of the figure in bars; a single one should not fill it
_ABOVE, _ROW = 1.2, 0.16  # height, relative to the highest bar, and for each row of the legend
_ACROSS, _LETTERS = 3, 22  # parts in a row of a legend with many of them, letters of a part
_FIT = 5  # parts that fit into one row of the legend
_DENSE = 40  # more bars have no gaps


class StackFigure:
    """Bars that are split into parts, such as the phases of a step.

    `table` is what was drawn: one row per bar, one column per part.

    Args:
        title: Title of the figure.
        colours: Colour of each part, from the bottom of a bar.
        words: What the tooltip calls a bar, a part and its size.
    """

    def __init__(self, title: str, colours: Mapping[str, str], words: tuple[str, str, str]) -> None:
        self.table = pd.DataFrame(columns=[*colours])
        self._words = words
        self.frame = Frame(tooltips=[Row(word, f"@{word}", "text") for word in (*words, "share")])
        self.frame.title = title
        self.panel = self.frame.pane()
        self._sources = {part: ColumnDataSource() for part in colours}
        self._glyphs = [
            VBar(x="x", bottom="bottom", top="top", width=0.8, fill_color=colour, line_color=None)
            for colour in colours.values()
        ]
        bars = [
            plainly(self.frame.figure, glyph, source)
            for glyph, source in zip(self._glyphs, self._sources.values(), strict=True)
        ]
        self.frame.hover.tool.update(renderers=bars)
        items = [
            LegendItem(label=_short(visible(part)), renderers=[bar])
            for part, bar in zip(colours, bars, strict=True)
        ]
        self._legend = legend(items)
        if len(items) > _FIT:
            self._legend.ncols = _ACROSS
        self.frame.figure.add_layout(self._legend)

    def draw(self, table: pd.DataFrame, unit: str) -> None:
        """Draw the bars; `table` has the part as columns, and the place of a bar as index."""
        self.table = table
        places = [*map(int, table.index)]
        tops, totals = table.cumsum(axis=1), table.sum(axis=1)
        bar, section, size = self._words
        for part, source in self._sources.items():
            known = table[part]
            source.data = {
                "x": places,
                "bottom": [*(tops[part] - known)],
                "top": [*tops[part]],
                bar: [*map(count, places)],
                section: [visible(part)] * len(places),
                size: [f"{number(value)} {unit}" for value in known],
                "share": [f"{value:.1%}" for value in known / totals.where(totals > 0, 1.0)],
            }
        for glyph in self._glyphs:
            glyph.width = 0.8 if len(places) < _DENSE else 1.0
        middle = (places[0] + places[-1]) / 2
        half = max(places[-1] - places[0] + 1, _FEWEST) / 2
        rows = -(-len(self._sources) // _ACROSS) - 1 if len(self._sources) > _FIT else 0
        high = (_ABOVE + _ROW * rows) * float(totals.max())
        self.frame.show(x=(middle - half, middle + half), y=(0.0, high))


def _short(part: str) -> str:
    """Return the name of a part in the legend: of activations, the end of their node's name."""
    name = part.removeprefix(OF)
    return name if len(name) <= _LETTERS else "\u2026" + name[1 - _LETTERS :]
