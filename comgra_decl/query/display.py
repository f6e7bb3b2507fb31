"""How runs and groups show themselves in a notebook."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

_TABLE = "border-collapse:collapse;font:13px system-ui,sans-serif"
_CAPTION = "text-align:left;font-weight:600;padding:4px 0"
_CELL = "text-align:left;padding:3px 16px 3px 0;border-top:1px solid rgba(128,128,128,.25)"


def table_html(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a small HTML table; every text is escaped."""
    head = "".join(f'<th style="{_CELL};opacity:.65">{escape(text)}</th>' for text in header)
    body = "".join(
        "<tr>" + "".join(f'<td style="{_CELL}">{escape(cell)}</td>' for cell in row) + "</tr>"
        for row in rows
    )
    return (
        f'<table style="{_TABLE}"><caption style="{_CAPTION}">{escape(title)}</caption>'
        f"<tr>{head}</tr>{body}</table>"
    )
