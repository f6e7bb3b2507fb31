"""A real browser for the viewer's tests.

Fixtures:
    page: A fresh page. After the test, fails if the page logged an error or a warning to the
        console, raised an exception, or sent a request outside this machine. Use `page.goto(url)`,
        then wait with `playwright.sync_api.expect`, never with sleep.
    open_page: Opens further pages with the same checks, `open_page(viewport=...)`. They share a
        browser context, so that scripts are fetched and compiled once, which takes seconds; a page
        with a colour scheme (`open_page(color_scheme="dark")`) begins with empty storage, as in a
        new browser.
    serve: Serves Panel objects from this process: `url = serve(factory)`, where `factory()` is
        called for each browser session and returns a viewable. A test may keep what the factory
        returned, and read and set its parameters (Panel passes changes on to the browser). Fails
        the test if the server logged an error.
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

PATIENCE = 30_000  # milliseconds for anything to happen, on a busy machine
VIEWPORT = {"width": 1400, "height": 840}

#: Before the first document of a page, whatever other pages have stored.
EMPTY_STORAGE = """if (location.protocol.startsWith("http") && !sessionStorage.getItem("empty")) {
    localStorage.clear();
    sessionStorage.setItem("empty", "yes");
}"""
LOCAL = re.compile(
    r"^(https?|wss?)://(127\.0\.0\.1|localhost)(:\d+)?(/|$)|^(data|blob|about|file):"
)

#: What a software renderer says about itself, what a page closed in mid-push leaves behind, and
#: what Panel's Vega says of charts by an Altair of another minor version.
HARMLESS = re.compile(
    r"GL Driver Message|StreamClosedError|WebSocketClosedError|The input spec uses Vega-Lite"
)


@pytest.fixture(scope="session")
def common_context(chromium: Any) -> Iterator[Any]:
    """The context of all pages that need none of their own."""
    context = chromium.new_context()
    context.new_page()  # keeps the window, because a new one costs a second per page
    yield context
    context.close()


@pytest.fixture
def open_page(common_context: Any, serve: object) -> Iterator[Callable[..., Any]]:
    """Opens pages that must log no errors."""
    assert serve, "pages close before the servers that they show, so `serve` comes first"
    opened: list[Any] = []
    dirt: list[str] = []

    def open_(
        *,
        viewport: Mapping[str, int] = VIEWPORT,
        color_scheme: str | None = None,
        permissions: Sequence[str] = (),
    ) -> Any:
        common_context.grant_permissions([*permissions])
        page = common_context.new_page()
        page.set_viewport_size(dict(viewport))
        if color_scheme is not None:
            page.emulate_media(color_scheme=color_scheme)
            page.add_init_script(EMPTY_STORAGE)
        opened.append(page)
        return watched(page, dirt)

    yield open_
    for page in opened:
        page.close()
    common_context.clear_cookies()
    common_context.clear_permissions()
    assert not dirt, "the page was not clean:\n" + "\n".join(dirt)


@pytest.fixture
def page(open_page: Callable[..., Any]) -> Any:
    """One such page."""
    return open_page()


def watched(page: Any, dirt: list[str]) -> Any:
    """Collects everything in `page` that must not happen, and returns it."""

    def note(text: str) -> None:
        if not HARMLESS.search(text):
            dirt.append(text)

    def on_console(message: Any) -> None:
        if message.type in ("error", "warning"):
            note(f"console {message.type}: {message.text}")

    def on_request(request: Any) -> None:
        if not LOCAL.match(request.url):
            note(f"request off the machine: {request.url}")

    page.on("console", on_console)
    page.on("pageerror", lambda error: note(f"uncaught: {error}"))
    page.on("request", on_request)
    page.on("websocket", on_request)
    page.set_default_timeout(PATIENCE)
    return page


class Host:
    """A thread with its own event loop, on which Panel servers run."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], Any]) -> Any:
        """Returns the result of `function`, called on the loop's thread."""

        async def run() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(timeout=30)

    def close(self) -> None:
        """Ends what is still running, then the loop."""

        async def cancel() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(cancel(), self._loop).result(timeout=30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=30)
        self._loop.close()


@pytest.fixture(scope="session")
def host() -> Iterator[Host]:
    """The thread on which `serve` serves; `host.call(function)` runs a function there."""
    host = Host()
    yield host
    host.close()


@pytest.fixture
def serve(
    host: Host, caplog: pytest.LogCaptureFixture
) -> Iterator[Callable[[Callable[[], Any]], str]]:
    """Serves a factory of Panel objects on a free port of this machine."""
    pn = pytest.importorskip("panel")
    servers: list[Any] = []

    def serve_(factory: Callable[[], Any]) -> str:
        options = {"port": 0, "address": "127.0.0.1", "show": False, "start": False}
        server = host.call(lambda: pn.serve({"app": factory}, verbose=False, **options))
        host.call(server.start)
        servers.append(server)
        return f"http://127.0.0.1:{server.port}/app"

    yield serve_
    for server in servers:
        host.call(server.stop)
    errors = [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]
    errors = [text for text in errors if not HARMLESS.search(text)]
    assert not errors, "the server logged errors:\n" + "\n".join(errors)
