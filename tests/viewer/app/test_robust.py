"""Failures between a viewer and its pages: the viewer survives."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import pytest
from tornado.httpclient import AsyncHTTPClient, HTTPRequest
from tornado.websocket import WebSocketClientConnection, WebSocketClosedError, websocket_connect

from tests.viewer.app.served import Viewed
from tests.viewer.conftest import PATIENCE

T = TypeVar("T")


@pytest.fixture(scope="module")
def viewed(root: Path) -> Iterator[Viewed]:
    """A viewer of one run."""
    viewed = Viewed(root)
    yield viewed
    viewed.stop()


# ---- what happens to the connections


async def _session(url: str) -> WebSocketClientConnection:
    place = urlsplit(url)
    answer = await AsyncHTTPClient().fetch(HTTPRequest(url, request_timeout=120))
    found = re.search(rb'"token":"([^"]+)"', answer.body)
    assert found is not None
    token = found[1].decode()
    headers = {"Origin": f"http://{place.netloc}", "Sec-WebSocket-Protocol": f"bokeh, {token}"}
    asked = HTTPRequest(f"ws://{place.netloc}{place.path}/ws", headers=headers, request_timeout=60)
    opened = await websocket_connect(asked, subprotocols=["bokeh", token])
    assert "ACK" in str(await opened.read_message())
    return opened


def _memory(viewed: Viewed) -> float:
    status = Path(f"/proc/{viewed.pid}/status")
    if not status.exists():
        pytest.skip("no /proc on this machine")
    found = re.search(r"VmRSS:\s+(\d+)", status.read_text())
    assert found is not None
    return int(found[1]) / 1024


def _sessions(viewed: Viewed, count: int) -> float:
    """Opens sessions, a few at a time, sends garbage through some; returns MB for each."""

    async def run() -> float:
        (await _session(viewed.url)).close()
        before = _memory(viewed)
        few = asyncio.Semaphore(4)

        async def one() -> WebSocketClientConnection:
            async with few:
                return await _session(viewed.url)

        opened = await asyncio.gather(*(one() for _ in range(count)))
        grown = (_memory(viewed) - before) / count
        with suppress(WebSocketClosedError):  # closed before all of it is sent
            await opened[0].write_message("x" * (25 << 20))  # more than is taken
        while await opened[0].read_message() is not None:  # until that one is closed
            pass
        for connection in opened:
            connection.close()
        (await _session(viewed.url)).close()  # and the server goes on
        return grown

    return _finished(run())


async def _opened_and_closed(url: str) -> None:
    (await _session(url)).close()


def _finished(work: Coroutine[Any, Any, T]) -> T:
    """Runs it in a separate thread, because a browser's loop may be running in this one."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()


@pytest.mark.slow
def test_some_sessions_at_once_and_a_message_that_is_too_large(viewed: Viewed) -> None:
    assert _sessions(viewed, 5) < 40


@pytest.mark.slow
def test_two_hundred_sessions_at_once(viewed: Viewed) -> None:
    assert _sessions(viewed, 200) < 8


def _openings(viewed: Viewed, count: int, *, warm: int) -> float:
    """Opens and closes the page this many times, a few at once; returns the MB that remain.

    Before that, it opens and closes a few others (`warm`).
    """

    async def run() -> float:
        few = asyncio.Semaphore(4)

        async def one() -> None:
            async with few:
                await _opened_and_closed(viewed.url)

        await asyncio.gather(*(one() for _ in range(warm)))  # what is imported and cached once
        before = _memory(viewed)
        await asyncio.gather(*(one() for _ in range(count)))
        return _memory(viewed) - before

    return _finished(run())


@pytest.mark.slow
def test_some_openings_of_the_page_leave_little_behind(viewed: Viewed) -> None:
    assert _openings(viewed, 8, warm=4) < 80


@pytest.mark.slow
def test_two_thousand_openings_of_the_page_leave_little_behind(viewed: Viewed) -> None:
    assert _openings(viewed, 2_000, warm=20) < 400
    _finished(_opened_and_closed(viewed.url))


def test_clients_that_do_not_read_hold_nobody_up(viewed: Viewed) -> None:
    place = urlsplit(viewed.url)
    slow = []
    for _ in range(20):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.connect((place.hostname, place.port))
        connection.sendall(b"GET /static/js/bokeh.min.js HTTP/1.1\r\nHost: localhost\r\n\r\n")
        slow.append(connection)
    _finished(_opened_and_closed(viewed.url))
    for connection in slow:
        connection.close()


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, pytest.param(10, marks=pytest.mark.slow)])
def test_sessions_whose_clients_do_not_read_hold_nobody_up_and_fill_no_memory(
    viewed: Viewed, count: int
) -> None:
    """Each requests the whole page repeatedly, and reads at most two responses."""
    asked = [json.dumps({"msgid": "1", "msgtype": "PULL-DOC-REQ"}), "{}", "{}"]

    async def run() -> float:
        opened = [await _session(viewed.url) for _ in range(count)]
        before = _memory(viewed)
        for connection in opened:
            for _ in range(50):
                for part in asked:
                    await connection.write_message(part)
        for _ in range(count // 2):
            (await _session(viewed.url)).close()
        grown = _memory(viewed) - before
        while "PULL-DOC-REPLY" not in str(await opened[0].read_message()):  # it was answered
            pass
        for connection in opened:
            connection.close()
        (await _session(viewed.url)).close()
        return grown

    assert _finished(run()) < 100 + 30 * count


# ---- what stands in between


class Proxy:
    """Forwards connections; may set other headers in each request."""

    def __init__(self, target: str, port: int, *, headers: bytes | None) -> None:
        self._target = (urlsplit(target).hostname, urlsplit(target).port)
        self._headers = headers
        self._listener = socket.create_server(("127.0.0.1", port))
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Stops accepting connections."""
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._target)
            for source, sink, change in ((client, server, True), (server, client, False)):
                threading.Thread(
                    target=self._pass_on, args=(source, sink, change), daemon=True
                ).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, change: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                if change and self._headers is not None and data[:4] == b"GET ":
                    data = re.sub(rb"\r\nHost: [^\r]*", b"\r\n" + self._headers, data, count=1)
                sink.sendall(data)
        except OSError:
            pass
        finally:
            source.close()
            sink.close()


@pytest.mark.browser
@pytest.mark.parametrize(
    ("more", "headers"),
    [
        # a tunnel: the address bar names another port of this machine
        pytest.param([], None, marks=pytest.mark.slow),
        pytest.param(
            ["--prefix", "/team", "--allow-websocket-origin", "{here}", "--use-xheaders"],
            b"Host: upstream.internal:5006\r\nX-Forwarded-For: 203.0.113.7",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["--prefix", "/team", "--allow-websocket-origin", "proxy.example"],
            b"Host: proxy.example\r\nX-Forwarded-Host: proxy.example",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_through_a_tunnel_or_a_proxy_the_page_is_whole(
    more: list[str], headers: bytes | None, root: Path, page: Any
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    here = f"127.0.0.1:{port}"
    named = [part.format(here=here) for part in more]
    if headers is not None and b"upstream" in headers:
        named += ["--allow-websocket-origin", "upstream.internal:5006"]
    if headers is not None and b"proxy.example" in headers:
        named += ["--allow-websocket-origin", here]
    viewed = Viewed(root, *named)
    proxy = Proxy(viewed.url, port, headers=headers)
    try:
        path = urlsplit(viewed.url).path
        page.goto(f"http://{here}{path}?node=head&section=inspect", timeout=PATIENCE)
        page.locator('.node[data-id="head"]').wait_for(timeout=PATIENCE)
        page.locator('tr[data-send="statistic:mean"]').click(timeout=PATIENCE)
        page.locator('tr[data-send="statistic:mean"].chosen').wait_for(timeout=PATIENCE)
    finally:
        proxy.close()
        viewed.stop()
