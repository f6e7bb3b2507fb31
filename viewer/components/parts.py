"""HTML in parts, of which the browser receives only those that it does not have."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import groupby
from typing import Any, ClassVar

import panel as pn
import param

from comgra_decl.viewer.components.base import source
from comgra_decl.viewer.components.htmlview import HtmlView

_KEPT = 24_000_000
"""Most characters of parts that a browser keeps, apart from those of the page that it shows."""

_AHEAD = 4_000_000
"""Most characters of a page that is sent ahead."""

_MISSING = {"send": "missing"}
"""What the browser sends if it lacks a part, because it shows the view for a second time."""


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of HTML that is replaced as a whole.

    Attributes:
        key: its place on the page; no two parts of a page have the same one.
        html: the content, in which all elements are closed.
        boxed: whether it stands among the cards.
        name: tells parts with different keys or contents apart.
    """

    key: str
    html: str
    boxed: bool = False
    name: str = field(init=False)

    def __post_init__(self) -> None:
        content = f"{self.key}\n{self.html}".encode()
        object.__setattr__(self, "name", blake2b(content, digest_size=9).hexdigest())


def joined(parts: Iterable[Part]) -> str:
    """Return the HTML of a page, with cards that follow each other in one box."""
    groups = groupby(parts, key=lambda part: part.boxed)
    inner = ((boxed, "".join(part.html for part in group)) for boxed, group in groups)
    return "".join(f'<div class="cards">{html}</div>' if boxed else html for boxed, html in inner)


class PartsView(HtmlView):
    """Shows HTML in parts. A page that the browser has is shown without waiting for Python.

    The browser keeps the parts of earlier pages and of those that were sent ahead. `html` is the
    whole page, which stays in Python.

    Attributes:
        page: What the browser shows, as JSON: `frame`, `step`, `parts` (key, name, and whether it
            stands among the cards), `fresh` (the HTML of parts that the browser does not have, by
            name) and `gone` (names that it should forget).
        ahead: The same for another step that is likely to be shown next.
    """

    page = param.String(default="")
    ahead = param.String(default="")

    _esm = source("shared.js", "handover.js", "parts.js", "htmlview.js")
    _rename: ClassVar[dict[str, str | None]] = {  # Python only
        "tokens": None, "grids": None, "picks": None, "html": None,
    }  # fmt: skip

    def __init__(self, **params: Any) -> None:
        self._there: OrderedDict[str, int] = OrderedDict()  # what the browser has, and its size
        self._shown: tuple[Sequence[Part], str, int] = ((), "", -1)
        self._turn = 0
        super().__init__(**params)

    def show_page(
        self,
        parts: Sequence[Part],
        *,
        frame: str,
        step: int,
        tokens: list[str],
        grids: Mapping[str, tuple[int, int]],
        picks: Mapping[str, int],
    ) -> None:
        """Show a page.

        Args:
            parts: The parts of the page, from the top.
            frame: What is selected apart from the step. The browser shows pages by itself only
                while it stays the same.
            step: The step.
            tokens: Tokens that the page may send; see `HtmlView`.
            grids: Sizes of pictures of cells.
            picks: Numbers of marks in drawings.
        """
        self._shown = parts, frame, step
        with pn.io.hold():
            self.param.update(
                html=joined(parts), tokens=tokens, grids={**grids}, picks={**picks},
                page=self._message(parts, frame, step),
            )  # fmt: skip

    def has(self, parts: Iterable[Part]) -> bool:
        """Return whether the browser has all of these parts."""
        return all(part.name in self._there for part in parts)

    def send_ahead(self, parts: Sequence[Part], *, frame: str, step: int) -> None:
        """Send a page of another step, unless it is too large or the browser is not ready."""
        if self.ready and sum(len(part.html) for part in parts) <= _AHEAD:
            self.ahead = self._message(parts, frame, step)

    def send_all(self) -> None:
        """Send the page again with all of its parts, to a browser that has none of them."""
        self._there.clear()
        self.ahead, self.page = "", self._message(*self._shown)

    def _message(self, parts: Sequence[Part], frame: str, step: int) -> str:
        fresh = {part.name: part.html for part in parts if part.name not in self._there}
        for part in parts:
            self._there[part.name] = len(part.html)
            self._there.move_to_end(part.name)
        needed = {part.name for part in (*parts, *self._shown[0])}
        size, gone = sum(self._there.values()), []
        for name in [name for name in self._there if name not in needed]:
            if size <= _KEPT:
                break
            size -= self._there.pop(name)
            gone.append(name)
        self._turn += 1  # the same content is a new message
        listed = [(part.key, part.name, part.boxed) for part in parts]
        return json.dumps(
            {"turn": self._turn, "frame": frame, "step": step, "parts": listed,
             "fresh": fresh, "gone": gone}
        )  # fmt: skip

    def handle(self, data: Any) -> None:
        """Send all parts if the browser lacks some; pass other messages on."""
        if data == _MISSING:
            self.send_all()
        else:
            super().handle(data)

    def before_display(self) -> None:
        """Send the whole page to the next browser, which has nothing yet."""
        self.send_all()
