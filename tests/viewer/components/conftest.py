"""Puts one component on a page of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from comgra_decl.viewer.components.base import Component
from comgra_decl.viewer.components.urlsync import UrlSync

Message = dict[str, Any]


@dataclass
class Shown:
    """A component, the page that shows it, and the messages it has sent so far.

    Messages about hovering are kept separately, because their timing depends on the clock. So is
    the size of the drawing area, which a graph reports before anything else.
    """

    component: Any
    page: Any
    host: Any
    messages: list[Message] = field(default_factory=list)
    looks: list[str] = field(default_factory=list)
    rooms: list[list[int]] = field(default_factory=list)

    def hear(self, message: Message) -> None:
        """Receives a message from the component."""
        if "look" in message:
            self.looks.append(message["look"])
        elif "room" in message:
            self.rooms.append(message["room"])
        else:
            self.messages.append(dict(message))

    def heard(self, *expected: Message) -> None:
        """Waits until these are all messages since the last call, in this order."""
        self.until(lambda: len(self.messages) >= len(expected))
        self.page.wait_for_timeout(60)  # anything that should not arrive
        assert self.messages == list(expected)
        self.messages.clear()

    def until(self, holds: Callable[[], bool]) -> None:
        """Waits until something holds, for a few seconds at most."""
        for _ in range(250):
            if holds():
                break
            self.page.wait_for_timeout(20)

    def set(self, **values: Any) -> None:
        """Sets parameters as the server would."""
        self.host.call(lambda: self.component.param.update(**values))


@pytest.fixture
def show(serve: Any, page: Any, host: Any) -> Callable[..., Shown]:
    """`show(make, ready=True)` serves the component that `make()` returns and waits for it."""
    pn = pytest.importorskip("panel")

    def show_(make: Callable[[], Component], *, ready: bool = True, query: str = "") -> Shown:
        shown = Shown(None, page, host)

        def factory() -> Any:
            shown.component = make()
            shown.component.on_message(shown.hear)
            if ready:
                pn.state.onload(lambda: shown.component.param.update(ready=True))
            return pn.Column(shown.component, pn.pane.HTML("<input id='other'>"), width=1200)

        page.goto(serve(factory) + query)
        page.wait_for_function("!!(window.Bokeh && Bokeh.documents[0]?.is_idle)")
        if not isinstance(shown.component, UrlSync):
            page.locator("[data-drawn]").wait_for(state="attached")
        if ready:  # changes made while a page is loading may be lost
            shown.until(lambda: bool(shown.component.ready))
        return shown

    return show_
