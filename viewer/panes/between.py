"""What happens between two nodes in the graph: gains, zeros, and the ranked paths."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, ClassVar

from comgra_decl.query.between import Between, GradientPath
from comgra_decl.viewer.components.base import Message
from comgra_decl.viewer.escaping import html_text as _e
from comgra_decl.viewer.model.between import between_of
from comgra_decl.viewer.model.numbers import count, number
from comgra_decl.viewer.panes.base import TENSOR, Pane, Shown, html_view

_CLOSE = "close"
_CSS = Path(__file__).with_name("between.css").read_text(encoding="utf-8")
_HELP = {
    "signal": "Root mean square of the values at the end, divided by the root mean square at the "
    "beginning",
    "gradient": "Root mean square of the gradient at the beginning, divided by the root mean "
    "square at the end",
    "zeros": "Largest share of zeros among the tensors on the way",
    "share": "Share of the gradient that takes this path, estimated from the gradients of all "
    "tensors that read each tensor",
}


class BetweenPane(Pane):
    """The line below the graph after a Shift-click on a second node; hidden otherwise."""

    reads: ClassVar = TENSOR | {"step", "between", "route"}
    sizing: ClassVar = "stretch_width"

    def build(self) -> Any:
        """Create the HTML view."""
        self.view = html_view(_CSS)
        self.view.on_message(self._on_message)
        return self.view

    def components(self) -> list[Any]:
        """Return the HTML view, which handles clicks."""
        return [self.view]

    def update(self, shown: Shown) -> None:
        """Rewrite the line if a second node is chosen."""
        found = between_of(shown.view, shown.at, shown.between) if shown.between else None
        if self.panel.visible != (found is not None):
            self.panel.visible = found is not None
        if found is not None:
            self.view.tokens = [_CLOSE, *(f"path:{i}" for i in range(len(found.paths)))]
            self.view.put(html=_html(found, shown.route))

    def _on_message(self, message: Message) -> None:
        what, _, place = message["send"].partition(":")
        if what == _CLOSE:
            self.act(between="", route=0)
        else:
            self.act(route=int(place))


def _html(found: Between, route: int) -> str:
    paths = "".join(_line(path, i, i == route) for i, path in enumerate(found.paths))
    more = found.count - len(found.paths)
    ways = f"{count(found.count)} path{'s' if found.count != 1 else ''}"
    if not found.count:
        ways = "no path in the graph at this step"
    rest = f'<li class="soft">and {count(more)} more paths</li>' if more > 0 else ""
    facts = [
        _fact("signal", f"signal {_gain(found.signal)}"),
        _fact("gradient", f"gradient {_gain(found.gradient)}"),
        _fact("zeros", f"zeros {_percent(found.dead)} at {_e(found.dead_at)}")
        if found.dead > 0 else "",
        f'<span class="soft">{ways}</span>',
    ]  # fmt: skip
    return (
        f'<div class="between" data-between="{_e(found.source)} {_e(found.sink)}"><header>'
        f"<b>{_e(found.source)} \u2192 {_e(found.sink)}</b>{''.join(facts)}"
        f'<button type="button" data-send="{_CLOSE}" aria-label="Close the comparison">'
        f"Close</button></header><ol>{paths}{rest}</ol></div>"
    )


def _fact(name: str, text: str) -> str:
    return f'<span title="{_HELP[name]}" data-fact="{name}">{text}</span>'


def _line(path: GradientPath, place: int, chosen: bool) -> str:
    way = " \u2192 ".join(map(_e, path.nodes))
    return (
        f'<li class="{"chosen" if chosen else ""}" data-send="path:{place}" role="button" '
        f'tabindex="0" title="{_HELP["share"]}"><span class="share">{_percent(path.share)}</span>'
        f'<span class="way">{way}</span></li>'
    )


def _gain(value: float) -> str:
    return "not recorded" if math.isnan(value) else f"\u00d7{number(value, digits=3)}"


def _percent(share: float) -> str:
    if math.isnan(share):
        return "\u2013"
    return f"{100 * share:.1f}\u202f%" if 0 < share < 0.9995 else f"{100 * share:.0f}\u202f%"
