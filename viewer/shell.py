"""The page around the dashboard: a head, a side bar and the rest, in plain HTML.

A frame that is there at once, and style sheets that do without a library of widgets, cost a page
half of the time that it takes to come up.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import panel as pn
from bokeh.document import Document
from bokeh.models import CustomJS
from panel.theme.base import Design

_FOLDER = Path(__file__).parent

THEMES: dict[str, dict[str, str]] = {
    "light": {
        "primary": "#3f5fd0",
        "background": "#f6f7fa",
        "surface": "#ffffff",
        "text": "#1c2333",
    },
    "dark": {
        "primary": "#8ea2ff",
        "background": "#12151c",
        "surface": "#171b24",
        "text": "#e6e9f2",
    },
}
"""Colours of the page; all others are mixed of them."""


_SILENT = 'document.documentElement.classList.add("silent")'


class Plain(Design):
    """Components without styles of Panel's own, which each of them would load by itself."""


class _Shell(pn.template.Template):
    def __repr__(self) -> str:
        """Returns a short text: Panel asks for it at each change, and its own describes all."""
        return f"{type(self).__name__}()"

    def server_doc(self, doc: Document | None = None, *args: Any, **options: Any) -> Document:
        """Adds the page to a document; what refers to what is looked up once and not after each."""
        doc = doc or pn.state.curdoc
        with ExitStack() as frozen:
            if doc is not None:
                frozen.enter_context(doc.models.freeze())
            made: Document = super().server_doc(doc, *args, **options)
        made.js_on_event("connection_lost", CustomJS(code=_SILENT))
        return made


def shell(*, head: Any, side: Any, main: Any, title: str) -> pn.template.Template:
    """Returns a page that holds three objects of Panel's."""
    page = _Shell(_text("shell.html"), design=Plain)
    for name, shown in (("head", head), ("side", side), ("main", main)):
        page.add_panel(name, shown)
    for icon in ("app_favicon", "apple_icon"):  # Panel's own are not found behind a proxy
        page.add_variable(icon, "data:,")
    page.add_variable("shell_title", title)
    page.add_variable("shell_css", _variables() + _text("shell.css"))
    page.add_variable("shell_js", _text("shell.js"))
    return page


def _text(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _variables() -> str:
    """Returns the colours of both themes, by the names that Panel's themes have for them."""
    return "".join(_rule(name, colours) for name, colours in THEMES.items())


def _rule(name: str, colours: Mapping[str, str]) -> str:
    text, surface = colours["text"], colours["surface"]
    soft = _mixed(text, surface, 0.72)
    return (
        f"html[data-theme={name}] {{\n"
        f"  color-scheme: {name};\n"
        f"  --panel-primary-color: {colours['primary']};\n"
        f"  --panel-background-color: {colours['background']};\n"
        f"  --panel-on-background-color: {text};\n"
        f"  --panel-surface-color: {surface};\n"
        f"  --panel-on-surface-color: {text};\n"
        # what figures are drawn with; Bokeh looks these up, and knows plain colours only
        f"  --bk-text-color: {text};\n"
        f"  --bk-label-text-color: {text};\n"
        f"  --bk-axis-label-text-color: {soft};\n"
        f"  --bk-major-label-text-color: {soft};\n"
        "}\n"
    )


def _mixed(above: str, below: str, share: float) -> str:
    """Returns a colour between two, as the style sheets mix them."""
    pairs = ((int(above[i : i + 2], 16), int(below[i : i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{round(a * share + b * (1 - share)):02x}" for a, b in pairs)
