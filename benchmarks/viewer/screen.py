"""A page of the viewer in a real browser, driven by mouse and keyboard and timed from inside."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
SIZE = {"width": 1600, "height": 960}
PATIENCE = 60_000  # ms
FIRST_PAINT = """() => performance.getEntriesByName("first-contentful-paint")[0].startTime"""
_PROBE = Path(__file__).with_name("probe.js")
ANSWERED = "answered"
"""Condition for changes that query the server: its reply is complete."""

_READY = ("article[data-step]", ".node")


@contextmanager
def browser() -> Iterator[Any]:
    """Start a headless Chromium: `$CHROMIUM`, or /usr/bin/chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        path = os.environ.get("CHROMIUM", "/usr/bin/chromium")
        chromium = driver.chromium.launch(executable_path=path, args=FLAGS)
        yield chromium
        chromium.close()


class Screen:
    """A tab with an empty cache, by default in the Inspect section, which has the most to draw.

    Attributes:
        usable: milliseconds from the request until the page is drawn and accepts input.
        painted: milliseconds from the request until the browser first paints any content.
    """

    def __init__(
        self,
        chromium: Any,
        url: str,
        *,
        ready: Sequence[str] = _READY,
        section: str = "inspect",
    ) -> None:
        self._context = chromium.new_context(viewport=SIZE)
        self.page = self._context.new_page()
        self.page.set_default_timeout(PATIENCE)
        self.page.add_init_script(path=_PROBE)
        whole = f"{url}{'&' if '?' in url else '?'}section={section}"
        self.page.goto(whole, wait_until="commit")
        self.usable: float = self.page.evaluate("(wanted) => probe.usable(wanted)", list(ready))
        self.painted: float = self.page.evaluate(FIRST_PAINT)

    def close(self) -> None:
        """Close the tab."""
        self._context.close()

    @property
    def at(self) -> dict[str, str]:
        """The selection that the table shows: node, step, batch and statistic."""
        marks: dict[str, str] = self.page.locator("article").evaluate("(e) => ({...e.dataset})")
        return marks

    def change(
        self, event: str, act: Callable[[], None], *wanted: str, first: str = "", pause: int = 150
    ) -> dict[str, float]:
        """Return ms from an event until `wanted` (CSS) is painted ("all"), and until `first` is.

        Before the event, the page has `pause` ms to itself.
        """
        self.page.wait_for_timeout(pause)
        self.page.evaluate(
            "([event, wanted, first]) => { probe.expect(event, wanted, first); }",
            [event, list(wanted), first],
        )
        act()
        times: dict[str, float] = self.page.evaluate("probe.result")
        return times

    def choose(self, field: str, value: str, *wanted: str) -> float:
        """Select a value in a menu of the sidebar, and return the time of the change."""
        menu = self.page.locator(f'[data-field="{field}"] select')
        return self.change("input", lambda: menu.select_option(value), *wanted, ANSWERED)["all"]
