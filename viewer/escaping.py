"""Escapes text from a run so that the page always shows it literally.

There is one function per destination: HTML, HTML attributes that the browser sends back, and
Bokeh text, which treats `$$...$$` as TeX. JavaScript output passes through `visible` in
`shared.js`.
"""

from __future__ import annotations

import html

from bokeh.models import PlainText

from comgra_decl.visible import visible

TEX = ("$$", "\\[", "\\(")
"""Character sequences that begin TeX in Bokeh text."""


def html_text(text: object) -> str:
    """Return text escaped for HTML elements and for attributes that are only displayed."""
    return html.escape(visible(str(text)))


def html_prose(text: str) -> str:
    """Return a sentence as HTML, with code for the parts between backticks."""
    parts = html_text(text).split("`")
    return "".join(f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(parts))


def html_token(text: str) -> str:
    """Return text escaped for an HTML attribute that the browser sends back unchanged."""
    return html.escape(text)


def bokeh_text(*lines: str) -> str | PlainText:
    """Return lines of text that are safe in a Bokeh title, axis label or tick label."""
    shown = "\n".join(map(visible, lines))
    return PlainText(text=shown) if any(sign in shown for sign in TEX) else shown
