"""Tooltips of figures. They show the tensor's name, and numbers in the same format as elsewhere."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import numpy as np
from bokeh.models import CustomJSHover, HoverTool
from numpy.typing import NDArray

from comgra_decl.visible import visible

Kind = Literal["number", "step", "cell", "line", "subject", "text"]
"""How a value is formatted. number: as in `model.numbers.number`; step: as an integer; cell: as a
value of a heat map, see `marked`; line: as the name of this row in `names`; subject: as the
tensor's name; text: unchanged.
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

_CODE = f"""{NUMBER}
if (format === "subject") return subject;
if (format === "line") return names[Math.floor(value)] ?? "";
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
STEP = Row("step", "@x", "step")
CELL = [Row("row", "$y", "step"), Row("column", "$x", "step"), Row("value", "@image")]


class Hover:
    """The tooltip of a figure; `tool` goes into the figure."""

    def __init__(self, rows: list[Row]) -> None:
        self._writer = CustomJSHover(code=_CODE, args={"subject": "", "names": []})
        written = [row for row in rows if row.kind != "text"]
        self.tool = HoverTool(
            tooltips=[(row.label, _shown(row)) for row in rows],
            formatters={row.field: self._writer for row in written},
            mode="mouse",
        )

    def along(self, lines: list[Any]) -> None:
        """Shows the nearest point of each line, even if the pointer is far above or below it."""
        self.tool.update(renderers=lines, line_policy="nearest", mode="vline")

    def name(self, subject: str = "", names: list[str] | None = None) -> None:
        """Sets the name of the tensor, or the names of the rows of a heat map."""
        args = {"subject": visible(subject), "names": [visible(name) for name in names or []]}
        if self._writer.args != args:
            self._writer.args = args


def _shown(row: Row) -> str:
    return row.field if row.kind == "text" else f"{row.field}{{{row.kind}}}"


def marked(values: NDArray[np.float64], broken: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the numbers in a heat map for a tooltip of the "cell" kind, all of the same shape.

    Bokeh replaces NaN with "NaN" before a formatter runs, so missing numbers become minus infinity,
    and numbers of tensors that contained NaN or infinity become infinity.

    Args:
        values: The numbers; NaN for missing ones.
        broken: 1 where the tensor contained NaN or infinity, else NaN.
    """
    shown = np.where(np.isfinite(values), values, -math.inf)
    return np.where(np.isnan(broken), shown, math.inf)
