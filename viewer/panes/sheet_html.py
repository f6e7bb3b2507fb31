"""Raw values as tables."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from comgra_decl.viewer.escaping import html_text as _e
from comgra_decl.viewer.model.numbers import count, number
from comgra_decl.viewer.model.sheet import COLUMNS, LISTED, ROWS, Dim, Listing, Window
from comgra_decl.viewer.model.unrecorded import Unrecorded

INSPECT = "inspect"
"""The section with the preview, and the message that opens it."""

_DIGITS = 6
_MARK = ' class="brushed"'


def window_html(
    window: Window,
    axes: tuple[str, str],
    *,
    words: NDArray[np.object_] | None = None,
    brushed: tuple[int, ...] = (),
) -> tuple[str, list[str]]:
    """Return the cells with row and column numbers as HTML, and its messages.

    Args:
        window: The cells [rows, columns].
        axes: Names of rows and columns.
        words: The token of each cell, if the values are ids of tokens.
        brushed: Numbers of the rows to mark.
    """
    height, width = window.cells.shape
    moves, tokens = _moves(window)
    heads = "".join(f'<th scope="col">{window.column + i}</th>' for i in range(width))
    lines = "".join(
        f'<tr{_MARK * (window.row + i in brushed)}><th scope="row">{window.row + i}</th>'
        f"{''.join(map(_cell, row, [None] * width if words is None else words[i]))}</tr>"
        for i, row in enumerate(window.cells)
    )
    down = _span(window.row, height, window.total[0], axes[0] or "row")
    across = _span(window.column, width, window.total[1], axes[1] or "column")
    content = (
        f'<div class="moves">{moves}<span>{down} \u00b7 {across}</span></div>'
        f'<table class="cells" aria-label="values: {down}, {across}">'
        f"<thead><tr><td></td>{heads}</tr></thead><tbody>{lines}</tbody></table>"
    )
    return content, tokens


def listing_html(listing: Listing, dims: tuple[Dim, ...]) -> tuple[str, list[str]]:
    """Return the list with each value's indices as HTML, and its messages."""
    last = listing.first + len(listing.values)
    steps = [
        ("previous page", "\u2191", listing.first - LISTED, listing.first > 0),
        ("next page", "\u2193", last, last < listing.total),
    ]
    tokens = [f"window:{max(to, 0)},0" for _, _, to, there in steps if there]
    moves = "".join(
        _button(f"window:{max(to, 0)},0", sign, label, there) for label, sign, to, there in steps
    )
    heads = "".join(f'<th scope="col">{_e(dim.name)}</th>' for dim in dims)
    lines = []
    for index, value in zip(listing.indices.tolist(), listing.values, strict=True):
        token = "at:" + ",".join(map(str, index[: len(dims)]))
        tokens.append(token)
        places = "".join(f"<td>{i}</td>" for i in index[: len(dims)])
        lines.append(f'<tr tabindex="0" data-send="{token}">{places}{_cell(value)}</tr>')
    span = _span(listing.first, len(listing.values), listing.total, "value")
    content = (
        f'<div class="moves">{moves}<span>{span}</span></div>'
        f'<table class="cells list"><thead><tr>{heads}<th scope="col">value</th></tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table>"
    )
    return content, tokens


def missing_html(missing: Unrecorded, *, preview: bool) -> tuple[str, list[str]]:
    """Return why there are no values, and the spec lines to add, as HTML, and its messages.

    Args:
        missing: The reason, and the lines.
        preview: Whether there is a preview, to which a button then leads.
    """
    spec = ""
    if missing.spec:
        spec = f"<p>To record them, add to the spec:</p><pre>{_e(missing.spec)}</pre>"
    button = f'<button type="button" class="act" data-send="{INSPECT}">Show the preview</button>'
    content = (
        f'<div class="notice left"><h2>No values recorded</h2><p>{_e(missing.reason)}</p>{spec}'
        f"{f'<p>{button}</p>' if preview else ''}</div>"
    )
    return content, [INSPECT] if preview else []


def text_html(text: str) -> str:
    """Return the text decoded from the values as HTML; "" if there is none."""
    return f'<pre class="spelled" aria-label="as text">{_e(text)}</pre>' if text else ""


def value_text(value: Any) -> str:
    """Return one recorded value. Integers are exact; other values have six digits."""
    if value.dtype.kind in "biu":
        return str(value)
    if value.dtype.kind == "c":
        imaginary = number(float(value.imag), digits=_DIGITS - 2)
        sign = "" if imaginary.startswith("\u2212") else "+"
        return f"{number(float(value.real), digits=_DIGITS - 2)}{sign}{imaginary}i"
    return number(float(value), digits=_DIGITS)


def _cell(value: Any, word: str | None = None) -> str:
    finite = math.isfinite(abs(complex(value)))
    kind = "" if finite else ' class="broken"'
    title = "" if value.dtype.kind in "biu" or not finite else f' title="{value!s}"'
    token = "" if word is None else f" <small>{_e(word)}</small>"
    return f"<td{kind}{title}>{value_text(value)}{token}</td>"


def _moves(window: Window) -> tuple[str, list[str]]:
    row, column = window.row, window.column
    height, width = window.cells.shape
    steps = (
        ("previous rows", "\u2191", (max(row - ROWS, 0), column), row > 0),
        ("next rows", "\u2193", (row + ROWS, column), row + height < window.total[0]),
        ("previous columns", "\u2190", (row, max(column - COLUMNS, 0)), column > 0),
        ("next columns", "\u2192", (row, column + COLUMNS), column + width < window.total[1]),
    )
    tokens = [f"window:{to[0]},{to[1]}" for _, _, to, there in steps if there]
    buttons = [_button(f"window:{to[0]},{to[1]}", sign, label, there)
               for label, sign, to, there in steps]  # fmt: skip
    return "".join(buttons), tokens


def _button(token: str, sign: str, label: str, there: bool) -> str:
    if not there:
        return f'<button type="button" disabled aria-label="{label}">{sign}</button>'
    return (
        f'<button type="button" data-send="{token}" aria-label="{label}" title="{label}">'
        f"{sign}</button>"
    )


def _span(first: int, length: int, total: int, name: str) -> str:
    if length >= total:
        return _e(f"{name} 0\u2013{total - 1}" if total > 1 else f"one {name}")
    return _e(f"{name} {count(first)}\u2013{count(first + length - 1)} of {count(total)}")
