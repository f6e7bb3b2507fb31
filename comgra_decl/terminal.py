"""Print human-readable output to a terminal, a file or a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook
from rich.segment import Segment

from comgra_decl.visible import visible

_WIDTH = 160
"""Number of columns assumed for a file or a pipe."""


def console() -> Console:
    """Return the console for printing tables; does not interpret names in brackets as markup."""
    width = None if sys.stdout.isatty() else _WIDTH
    made = Console(width=width, markup=False, highlight=False, emoji=False)
    made.push_render_hook(_Visible())
    return made


class _Visible(RenderHook):
    """Escapes control characters in everything printed."""

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Spelt(renderable) for renderable in renderables]


class _Spelt:
    def __init__(self, inside: ConsoleRenderable) -> None:
        self._inside = inside

    def __rich_console__(self, out: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for segment in out.render(self._inside, options):
            yield Segment(visible(segment.text), segment.style, segment.control)
