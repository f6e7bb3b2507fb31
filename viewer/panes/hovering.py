"""Tooltips of figures. They show the tensor's name, and numbers in the same format as elsewhere."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
from bokeh.models import CustomJSHover, HoverTool
from numpy.typing import NDArray

from comgra_decl.visible import visible

Kind = Literal["number", "power", "step", "cell", "tile", "line", "subject", "place", "text"]
"""How a value is formatted. number: as in `model.numbers.number`; power: a decimal logarithm, as
the number itself; step: as an integer; cell: as a value of a heat map, see `marked`; tile: as a
number, or as nothing between two tiles; line: as the name of this row in `names`; subject: as the
tensor's name; place: as the index of a cell along each axis, see `drawing.place_of`; text:
unchanged.
"""

NUMBER = """
const number = (value, digits = 4) => {
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "\\u221e" : "\\u2212\\u221e";
  if (value === 0) return "0";
  const [mantissa, exponent] = value.toExponential(digits - 1).split("e");
  const power = Number(exponent);
  const plain = power >= -3 && power < 4;
  const text = plain ? value.toFixed(Math.max(digits - 1 - power, 0)) : `${mantissa}e${power}`;
  return text.replaceAll("-", "\\u2212");
};
const counted = (value) => Math.round(value).toLocaleString("en").replaceAll(",", "\\u202f");
"""
"""JavaScript counterparts of `number` and `count` in `model.numbers`; tested against them."""

PLACED = """
const placed = ({ x, y }) => {
  const [column, row] = [Math.floor(x + 0.5), Math.floor(y + 0.5)];
  const { names, each, width, height, columns, count, per, words, wide } = place;
  const said = (name, index) => `${name || "index"} ${counted(index)}`;
  if (!each?.length) {
    const word = words?.[row * wide + column];
    return (names ?? ["row", "column"]).map((name, i) => [name, i ? column : row])
      .filter(([name]) => name).map(([name, index]) => said(name, index))
      .concat(word === undefined ? [] : [`\u201c${word}\u201d`]).join(" \u00b7 ");
  }
  const [across, down] = [Math.floor(column / (width + 1)), Math.floor(row / (height + 1))];
  const [inside, line] = [column - across * (width + 1), row - down * (height + 1)];
  const tile = down * columns + across;
  if (inside === width || line === height || tile >= count) return "between two";
  const tiles = each.length > 1 ? [said(each[0], Math.floor(tile / per)), said(each[1], tile % per)]
    : [said(each[0], tile)];
  return [...tiles, said(names[0], line), said(names[1], inside)].join(" \u00b7 ");
};
"""

_CODE = f"""{NUMBER}{PLACED}
if (format === "subject") return subject;
if (format === "line") return names[Math.floor(value)] ?? "";
if (format === "power") return number(10 ** value);
if (format === "place") return placed(special_vars);
if (format === "tile" && placed(special_vars) === "between two") return "";
if (format === "step") return counted(value);
if (format === "cell" && !Number.isFinite(value)) {{
  return value > 0 ? "NaN or infinite" : "not recorded";
}}
return number(value);
"""

_ALWAYS_THERE = "$sx"  # a variable in every figure, for rows whose text does not depend on a value


class Row(NamedTuple):
    """A row of a tooltip: a label, a column ("@value") or coordinate ("$x"), and its format."""

    label: str
    field: str
    kind: Kind = "number"


SUBJECT = Row("tensor", _ALWAYS_THERE, "subject")
PLACE = Row("place", _ALWAYS_THERE, "place")
STEP = Row("step", "@x", "step")
CELL = [Row("row", "$y", "step"), Row("column", "$x", "step"), Row("value", "@image")]
TILE = Row("value", "@image", "tile")


class Hover:
    """The tooltip of a figure; `tool` goes into the figure."""

    def __init__(self, rows: list[Row]) -> None:
        self._writer = CustomJSHover(code=_CODE, args={"subject": "", "names": [], "place": {}})
        written = [row for row in rows if row.kind != "text"]
        self.tool = HoverTool(
            tooltips=[(row.label, _shown(row)) for row in rows],
            formatters={row.field: self._writer for row in written},
            mode="mouse",
        )

    def put(self, rows: list[Row]) -> None:
        """Replace the rows, whose fields must have been passed to the constructor."""
        tooltips = [(row.label, _shown(row)) for row in rows]
        if self.tool.tooltips != tooltips:
            self.tool.tooltips = tooltips

    def along(self, lines: list[Any]) -> None:
        """Show the nearest point of each line, even if the pointer is far above or below it."""
        self.tool.update(renderers=lines, line_policy="nearest", mode="vline")

    def name(
        self,
        subject: str = "",
        names: list[str] | None = None,
        place: Mapping[str, object] | None = None,
    ) -> None:
        """Set the name of the tensor, the names of the rows of a heat map, and those of axes."""
        args: dict[str, Any] = {
            "subject": visible(subject),
            "names": [visible(name) for name in names or []],
            "place": dict(place or {}),
        }
        if self._writer.args != args:
            self._writer.args = args


def _shown(row: Row) -> str:
    return row.field if row.kind == "text" else f"{row.field}{{{row.kind}}}"


def marked(values: NDArray[np.float64], broken: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the numbers in a heat map for a tooltip of the "cell" kind, all of the same shape.

    Bokeh replaces NaN with "NaN" before a formatter runs, so missing numbers become minus infinity,
    and numbers of tensors that contained NaN or infinity become infinity.

    Args:
        values: The numbers; NaN for missing ones.
        broken: 1 where the tensor contained NaN or infinity, else NaN.
    """
    shown = np.where(np.isfinite(values), values, -math.inf)
    return np.where(np.isnan(broken), shown, math.inf)
