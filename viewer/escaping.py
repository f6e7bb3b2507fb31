"""How text of a run gets onto the page: as text, whatever it looks like.

Three ways lead there, each with a function of its own: HTML, attributes that the browser hands
back, and texts of Bokeh's, which take `$$...$$` for TeX. What JavaScript writes passes `visible` in
`shared.js`.
"""

from __future__ import annotations

import html

from bokeh.models import PlainText

from comgra_decl.visible import visible

_TEX = ("$$", "\\[", "\\(")


def html_text(text: object) -> str:
    """Returns a text as HTML, in an element or an attribute that is only shown."""
    return html.escape(visible(str(text)))


def html_token(text: str) -> str:
    """Returns a text as HTML in an attribute that comes back, so that nothing of it is changed."""
    return html.escape(text)


def bokeh_text(text: str) -> str | PlainText:
    """Returns a text for a title, an axis or a tick of Bokeh's."""
    shown = visible(text)
    return PlainText(text=shown) if any(sign in shown for sign in _TEX) else shown
