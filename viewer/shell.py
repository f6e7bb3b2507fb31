"""The page frame: header, sidebar and main area, in plain HTML.

Without a widget library, a page appears in half the time.
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
"""Base colours of the page; all other colours are mixed from them."""


_SILENT = 'document.documentElement.classList.add("silent")'


class Plain(Design):
    """A design without Panel's style sheets, which each component would load separately."""


class _Shell(pn.template.Template):
    def __repr__(self) -> str:
        """Return a short text.

        Panel calls this method at each change; its own version would list all parameters.
        """
        return f"{type(self).__name__}()"

    def server_doc(self, doc: Document | None = None, *args: Any, **options: Any) -> Document:
        """Add the page to a document. Resolves references once rather than after each root."""
        doc = doc or pn.state.curdoc
        with ExitStack() as frozen:
            if doc is not None:
                frozen.enter_context(doc.models.freeze())
            made: Document = super().server_doc(doc, *args, **options)
        made.js_on_event("connection_lost", CustomJS(code=_SILENT))
        return made


def shell(*, head: Any, side: Any, main: Any, title: str) -> pn.template.Template:
    """Return a page template with three Panel objects."""
    page = _Shell(_text("shell.html"), design=Plain)
    for name, shown in (("head", head), ("side", side), ("main", main)):
        page.add_panel(name, shown)
    for icon in ("app_favicon", "apple_icon"):  # Panel's icons are unreachable behind a proxy
        page.add_variable(icon, "data:,")
    page.add_variable("shell_title", title)
    page.add_variable("shell_css", _variables() + _text("shell.css") + _text("tour.css"))
    page.add_variable("shell_js", _text("shell.js") + _text("tour.js"))
    return page


def _text(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _variables() -> str:
    """Return both themes' colours as CSS variables with the names that Panel uses."""
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
        # Bokeh draws figures with these; it accepts plain colours only
        f"  --bk-text-color: {text};\n"
        f"  --bk-label-text-color: {text};\n"
        f"  --bk-axis-label-text-color: {soft};\n"
        f"  --bk-major-label-text-color: {soft};\n"
        "}\n"
    )


def _mixed(above: str, below: str, share: float) -> str:
    """Return a mix of two colours, computed as the style sheets do."""
    pairs = ((int(above[i : i + 2], 16), int(below[i : i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{round(a * share + b * (1 - share)):02x}" for a, b in pairs)
