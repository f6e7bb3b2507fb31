"""Puts one component after another on a page that stays open, because loading one takes seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from comgra_decl.viewer.components.base import Component
from comgra_decl.viewer.components.urlsync import UrlSync
from tests.viewer.conftest import VIEWPORT, watched

Message = dict[str, Any]
Make = Callable[[], Component]
OTHER = "<input id='other'>"
#: Bokeh would send the server's own models back with the first message about them.
KNOWN = "Bokeh.documents[0]._new_models.clear()"
LOADED = "!!(window.Bokeh && Bokeh.documents[0]?.is_idle)"


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

    def make(self, make: Make) -> None:
        """Makes the component and listens to it."""
        self.component = make()
        self.component.on_message(self.hear)

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
        """Waits until something holds; fails if it does not within a few seconds."""
        for _ in range(250):
            if holds():
                return
            self.page.wait_for_timeout(20)
        assert holds()

    def set(self, **values: Any) -> None:
        """Sets parameters as the server would."""
        self.host.call(lambda: self.component.param.update(**values))


class Stage:
    """A page that stays open for the tests of all components.

    Attributes:
        page: The page.
        dirt: Everything in it that must not happen, during the current test.
    """

    def __init__(self, host: Any, context: Any) -> None:
        pn = pytest.importorskip("panel")
        self._host, self._pn = host, pn
        self._column: Any = None
        self.dirt: list[str] = []
        options = {"port": 0, "address": "127.0.0.1", "show": False, "start": False}
        self._server = host.call(lambda: pn.serve(self._begin, verbose=False, **options))
        host.call(self._server.start)
        self.page = watched(context.new_page(), self.dirt)
        self.page.goto(f"http://127.0.0.1:{self._server.port}/")
        self.page.wait_for_function(LOADED)

    def _begin(self) -> Any:
        self._column = self._pn.Column(width=1200)
        return self._column

    def clear(self) -> None:
        """Makes it as new."""
        self._put()
        self.dirt.clear()
        self.page.locator("#other").wait_for(state="detached")
        self.page.mouse.up()
        self.page.mouse.move(0, 0)
        self.page.set_viewport_size(dict(VIEWPORT))
        self.page.evaluate("scrollTo(0, 0); localStorage.clear(); sessionStorage.clear()")

    def put(self, shown: Shown, make: Make) -> None:
        """Puts the component that `make()` returns on it."""

        def begin() -> None:
            shown.make(make)
            self._put(shown.component, self._pn.pane.HTML(OTHER))

        self._host.call(begin)

    def _put(self, *objects: Any) -> None:
        self._column.objects = [*objects]

    def close(self) -> None:
        """Ends its server."""
        self.page.close()
        self._host.call(self._server.stop)


@pytest.fixture(scope="session")
def stage(host: Any, common_context: Any) -> Iterator[Stage]:
    """The page that stays open."""
    stage = Stage(host, common_context)
    yield stage
    stage.close()


@pytest.fixture
def page(stage: Stage) -> Iterator[Any]:
    """The page that stays open, without what other tests left on it."""
    stage.clear()
    yield stage.page
    assert not stage.dirt, "the page was not clean:\n" + "\n".join(stage.dirt)


@pytest.fixture
def show(stage: Stage, serve: Any, page: Any, host: Any) -> Callable[..., Shown]:
    """`show(make, ready=True)` shows the component that `make()` returns and waits for it.

    `on` names a page of its own, which is loaded for it, with a query.
    """
    pn = pytest.importorskip("panel")

    def show_(make: Make, *, ready: bool = True, on: Any = None, query: str = "") -> Shown:
        shown = Shown(None, on or page, host)

        def factory() -> Any:
            shown.make(make)
            if ready:
                pn.state.onload(lambda: shown.component.param.update(ready=True))
            return pn.Column(shown.component, pn.pane.HTML(OTHER), width=1200)

        if on is None:
            stage.put(shown, make)
        else:
            on.goto(serve(factory) + query)
        shown.page.locator("#other").wait_for()
        shown.page.wait_for_function(LOADED)
        if not isinstance(shown.component, UrlSync):
            shown.page.locator("[data-drawn]").wait_for(state="attached")
        if on is None:
            shown.page.evaluate(KNOWN)
        if ready and on is None:
            shown.set(ready=True)
        if ready:  # changes made while a page is loading may be lost
            shown.until(lambda: bool(shown.component.ready))
        return shown

    return show_
