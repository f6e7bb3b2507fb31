"""The viewer answers only to its own host names, and admits only those who know the password."""

from __future__ import annotations

import hashlib
import http.client
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tornado.httputil import HTTPConnection, HTTPHeaders, HTTPServerRequest, RequestStartLine

from comgra_decl.errors import ComgraError
from comgra_decl.viewer.gate import Gate, Names, names_of
from comgra_decl.viewer.login import Passwords, Throttle
from tests.support.browser import FLAGS
from tests.viewer.app.served import Server, Viewed
from tests.viewer.conftest import PATIENCE

ROUTES = [
    "/",
    "/viewer",
    "/viewer?section=run",
    "/viewer/autoload.js?bokeh-autoload-element=1",
    "/viewer/metadata",
    "/viewer/ws",
    "/static/js/bokeh.min.js",
    "/static/extensions/panel/panel.min.js",
    "/components/panel.io.resources/Resources/css/x",
    "/favicon.ico",
    "/apple-touch-icon.png",
    "/login",
    "/logout",
    "/nothing/here",
]
PROXY = "proxy.example:8080"
WORD = "open sesame"
UPGRADE = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
}


class Answer:
    """Returns a server's response to one request."""

    def __init__(
        self, url: str, path: str, headers: dict[str, str], *, body: str | None = None
    ) -> None:
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
        connection.request("GET" if body is None else "POST", path, body, headers)
        answer = connection.getresponse()
        self.status, self.headers = answer.status, answer.headers
        self.text = "" if self.status == 101 else answer.read().decode(errors="replace")
        connection.close()


@pytest.fixture(scope="module")
def plain(root: Path) -> Iterator[Viewed]:
    """A viewer without any options."""
    viewed = Viewed(root)
    yield viewed
    viewed.stop()


@pytest.fixture(scope="module")
def closed(root: Path) -> Iterator[Viewed]:
    """A viewer with a password, behind a trusted proxy."""
    more = ["--allow-websocket-origin", PROXY, "--use-xheaders"]
    viewed = Viewed(root, *more, COMGRA_VIEW_AUTH=WORD)
    yield viewed
    viewed.stop()


# ---- names


@pytest.mark.parametrize("path", ROUTES)
def test_no_route_answers_to_a_foreign_name(plain: Viewed, path: str) -> None:
    port = urlsplit(plain.url).port
    host = f"evil.example:{port}"
    headers = {"Host": host, "Origin": f"http://{host}", "Sec-Fetch-Site": "same-origin"}
    answer = Answer(plain.url, path, headers | (UPGRADE if path.endswith("/ws") else {}))
    assert answer.status == 403
    assert f"--allow-websocket-origin {host}" in answer.text
    assert "text/plain" in answer.headers["Content-Type"]


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1", "[::1]", "LOCALHOST.", "localhost:8000"]
)
def test_it_answers_to_this_machine_also_through_a_tunnel(plain: Viewed, host: str) -> None:
    assert Answer(plain.url, "/viewer", {"Host": host}).status == 200


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://localhost:1"])
def test_no_foreign_page_reads_or_sends_anything(plain: Viewed, path: str, origin: str) -> None:
    read = Answer(plain.url, path, {"Origin": origin})
    assert "Access-Control-Allow-Origin" not in read.headers
    if "autoload" in path:
        assert read.status == 403
    assert Answer(plain.url, path, {"Origin": origin}, body="x=1").status == 403


def test_no_foreign_page_runs_the_viewer_as_its_own_script(plain: Viewed) -> None:
    path = "/viewer/autoload.js?bokeh-autoload-element=1"
    assert Answer(plain.url, path, {"Sec-Fetch-Site": "cross-site"}).status == 403


def test_a_page_that_was_named_may_embed_the_viewer(closed: Viewed) -> None:
    cookie = _cookie(closed)
    headers = {"Origin": f"http://{PROXY}", "Cookie": cookie}
    answer = Answer(closed.url, "/viewer/autoload.js?bokeh-autoload-element=1", headers)
    assert answer.status == 200
    assert answer.headers["Access-Control-Allow-Origin"] == f"http://{PROXY}"
    assert "Origin" in answer.headers["Vary"]


def test_the_name_of_a_proxy_is_answered_to_once_it_is_given(closed: Viewed) -> None:
    assert Answer(closed.url, "/login", {"Host": PROXY}).status == 200
    assert Answer(closed.url, "/login", {"Host": "proxy.example:9"}).status == 403
    assert Answer(closed.url, "/login", {"X-Forwarded-Host": "evil.example"}).status == 200


@pytest.mark.parametrize("protocol", ["", "bokeh", "bokeh, x.y", "bokeh, \xff", "other, e30"])
def test_a_websocket_without_a_session_is_refused_without_a_traceback(
    plain: Viewed, protocol: str
) -> None:
    headers = UPGRADE | ({"Sec-WebSocket-Protocol": protocol} if protocol else {})
    assert Answer(plain.url, "/viewer/ws", headers).status == 400


def test_an_address_does_not_make_the_server_import_a_module(plain: Viewed) -> None:
    answer = Answer(plain.url, "/components/antigravity/A/css/x", {})
    assert answer.status == 404


@pytest.mark.browser
@pytest.mark.slow
def test_a_browser_gets_nothing_under_a_rebound_name(plain: Viewed, chromium: Any) -> None:
    rules = "--host-resolver-rules=MAP evil.example 127.0.0.1"
    browser = _another(chromium, rules)
    try:
        page = browser.new_page()
        sockets: list[str] = []
        page.on("websocket", lambda socket_: sockets.append(socket_.url))
        answer = page.goto(plain.url.replace("127.0.0.1", "evil.example"), timeout=PATIENCE)
        assert answer.status == 403
        assert "--allow-websocket-origin evil.example" in page.inner_text("body")
        assert not sockets
    finally:
        browser.close()


@pytest.mark.browser
def test_panels_own_server_shows_no_run_under_a_rebound_name(root: Path, chromium: Any) -> None:
    server = Server(root)
    browser = _another(chromium, "--host-resolver-rules=MAP evil.example 127.0.0.1")
    try:
        page = browser.new_page()
        frames: list[str] = []
        page.on("websocket", lambda ws: ws.on("framereceived", lambda f: frames.append(str(f))))
        page.goto(server.url.replace("127.0.0.1", "evil.example"), timeout=PATIENCE)
        page.get_by_text("does not accept this host name").wait_for(timeout=PATIENCE)
        assert not re.search("group/small|mlp", " ".join(frames) + page.content())
    finally:
        browser.close()
        server.stop()


def _another(chromium: Any, *flags: str) -> Any:
    """Starts a separate browser with further flags."""
    from tests.support.browser import browser_path

    return chromium.browser_type.launch(executable_path=browser_path(), args=[*FLAGS, *flags])


class _Recorder:
    """An application that records the requests that reach it."""

    prefix = ""

    def __init__(self) -> None:
        self.reached: list[str] = []

    def find_handler(self, request: HTTPServerRequest) -> None:
        self.reached.append(request.host)


class _Connection(HTTPConnection):
    """A connection that nothing reads."""

    context = None


LABELS = st.from_regex(r"[a-zA-Z0-9_-]{1,12}(\.[a-zA-Z0-9_-]{1,12}){0,3}\.?", fullmatch=True)
HOSTS = st.one_of(
    LABELS,
    st.text(max_size=20),
    st.sampled_from(
        [
            "127.0.0.1.evil.example",
            "localhost.evil.example",
            "127.0.0.1@evil.example",
            "[::1].evil",
            "localhost evil.example",
            "localhost,evil.example",
            "evil.example#localhost",
            "2130706433",
        ]
    ),
)
PORTS = st.sampled_from(["", ":80", ":5006", ":x", ":", ":99999"])
OWN = re.compile(
    r"(localhost|127(\.\d+){3}|\[[0:]+1\]|\[[0:]+ffff:127(\.\d+){3}\])\.?(:\d*)?", re.IGNORECASE
)


@given(host=HOSTS, port=PORTS, path=st.text(st.characters(codec="ascii"), max_size=20))
def test_nothing_gets_past_the_gate_by_any_other_name(host: str, port: str, path: str) -> None:
    application = _Recorder()
    gate = Gate(application, Names())
    start = RequestStartLine("GET", f"/{path}", "HTTP/1.1")
    try:
        headers = HTTPHeaders({"Host": host + port})
        request = HTTPServerRequest(connection=_Connection(), start_line=start, headers=headers)
    except Exception:  # noqa: BLE001 - Tornado refuses it by itself
        return
    gate.find_handler(request)
    assert not application.reached or OWN.fullmatch(host + port)


@pytest.mark.parametrize(
    ("names", "host", "known"),
    [
        (Names("192.168.1.5"), "192.168.1.5:5006", True),
        (Names("192.168.1.5"), "192.168.1.6:5006", False),
        (Names("myhost"), "MyHost:5006", True),
        (Names("::", ()), "[fe80::1]:5006", False),
        (Names(origins=("proxy.example",)), "proxy.example", True),
        (Names(origins=("proxy.example",)), "proxy.example:443", True),
        (Names(origins=("proxy.example",)), "proxy.example:5006", False),
        (Names(origins=("proxy.example:443",)), "proxy.example", True),
        (Names(origins=("*.example:5006",)), "a.example:5006", True),
        (Names(origins=("*.example:5006",)), "a.b.example:5006", False),
        (Names(origins=("*",)), "whatever.example:5006", True),
        (Names(origins=("*",)), "", False),
    ],
)
def test_the_names_are_the_address_and_what_was_named(names: Names, host: str, known: bool) -> None:
    assert names.know(host) == known


def test_a_server_for_all_addresses_answers_to_the_one_that_was_reached() -> None:
    names = Names("0.0.0.0")
    assert names.know("192.168.1.5:5006", "192.168.1.5")
    assert not names.know("192.168.1.5:5006", "192.168.1.6")
    assert not names.know("evil.example:5006", "192.168.1.5")


def test_panels_own_command_line_names_them_as_well() -> None:
    command = "python -m panel serve viewer --address a --allow-websocket-origin=b:1 --port 3"
    more = " --allow-websocket-origin c:2 --args runs --address d"
    assert names_of((command + more).split()) == Names("a", ("b:1", "c:2"))


# ---- the password


def _login(viewed: Viewed, word: str, *, name: str = "me", **headers: str) -> Answer:
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    sent = form | {name.replace("_", "-"): value for name, value in headers.items()}
    return Answer(viewed.url, "/login", sent, body=urlencode({"username": name, "password": word}))


def _cookie(viewed: Viewed, **headers: str) -> str:
    answer = _login(viewed, WORD, **headers)
    assert answer.status == 302, answer.text
    given = answer.headers.get_all("Set-Cookie") or []
    return "; ".join(line.partition(";")[0] for line in given)


@pytest.mark.parametrize("path", [path for path in ROUTES if path != "/login"])
def test_without_the_password_no_route_says_anything(closed: Viewed, path: str) -> None:
    answer = Answer(closed.url, path, UPGRADE if path.endswith("/ws") else {})
    assert answer.status in (302, 403)
    assert len(answer.text) < 100
    forged = Answer(closed.url, path, {"Cookie": "user=me; is_guest=1"})
    assert forged.status in (302, 403)


def test_who_was_let_in_can_leave_and_a_stranger_is_shown_the_form(closed: Viewed) -> None:
    stranger = Answer(closed.url, "/logout", {})
    assert (stranger.status, stranger.headers["Location"]) == (302, "/login")
    assert "logged out" in Answer(closed.url, "/logout", {"Cookie": _cookie(closed)}).text


def test_with_the_password_it_is_as_without(closed: Viewed) -> None:
    answer = Answer(closed.url, "/viewer", {"Cookie": _cookie(closed)})
    assert answer.status == 200
    assert "token" in answer.text


@pytest.mark.parametrize("protocol", ["http", "https"])
def test_no_script_and_no_other_site_uses_the_cookies(closed: Viewed, protocol: str) -> None:
    answer = _login(closed, WORD, X_Forwarded_Proto=protocol)
    cookies = answer.headers.get_all("Set-Cookie") or []
    assert {"user", "id_token", "comgra_known"} <= {c.partition("=")[0] for c in cookies}
    for cookie in cookies:
        assert "SameSite=Lax" in cookie
        assert "HttpOnly" in cookie
        assert ("Secure" in cookie) == (protocol == "https")


def test_who_guesses_is_held_up_told_of_and_keeps_nobody_else_out(closed: Viewed) -> None:
    before = _cookie(closed, X_Forwarded_For="198.51.100.9")
    guesses = [_login(closed, f"guess{i}", X_Forwarded_For="198.51.100.9") for i in range(12)]
    assert [answer.status for answer in guesses] == [200] * 5 + [429] * 7
    assert "Wrong name or password" in guesses[0].text
    assert int(guesses[-1].headers["Retry-After"]) <= 10
    # the correct password, too, from there; but not from elsewhere, nor in a browser that knew it
    assert _login(closed, WORD, X_Forwarded_For="198.51.100.9").status == 429
    assert _login(closed, WORD, X_Forwarded_For="203.0.113.7").status == 302
    assert _login(closed, WORD, X_Forwarded_For="198.51.100.9", Cookie=before).status == 302
    assert closed.said.count("wrong password from 198.51.100.9") == 5
    assert "guess" not in closed.said


def test_a_throttle_limits_each_and_all_and_shuts_nobody_out() -> None:
    now = 0.0
    throttle = Throttle(lambda: now)
    right = 0
    for _ in range(3600):  # one guess per second for an hour, by one client
        if throttle.wait("a") == 0:
            throttle.failed("a")
            right += 1
        now += 1
    assert abs(right - (5 + 3600 / 10)) <= 1
    allowed = 0
    for i in range(10_000):  # as many clients at once
        if throttle.wait(f"b{i}") == 0:
            throttle.failed(f"b{i}")
            allowed += 1
    assert allowed <= 50
    assert 0 < throttle.wait("new") <= 1
    assert throttle.wait("known before", known=True) == 0
    now += 1
    assert throttle.wait("new") == 0
    now += 10
    assert throttle.wait("a") == 0


def test_a_throttle_remembers_a_limited_number_of_clients() -> None:
    now = 0.0
    throttle = Throttle(lambda: now)
    for i in range(10_050):
        throttle.failed(str(i), known=True)
    assert len(throttle._clients) <= 10_000


def test_passwords_are_one_word_or_a_file_of_them(tmp_path: Path) -> None:
    file = tmp_path / "users.json"
    file.write_text(json.dumps({"me": "caf\u00e9"}))
    assert Passwords(str(file)).right("me", "caf\u00e9")
    assert not Passwords(str(file)).right("me", "")
    assert not Passwords(str(file)).right("you", "caf\u00e9")
    assert not Passwords(str(file)).right("you", "")
    assert Passwords("word").right("anybody", "word")
    assert not Passwords("word").right("anybody", "wor")
    with pytest.raises(ComgraError, match="file not found"):
        Passwords(str(tmp_path / "typo.json"))
    for wrong in ("[]", "{", '{"me": 1}', "{}"):
        file.write_text(wrong)
        with pytest.raises(ComgraError, match="--basic-auth"):
            Passwords(str(file))


@pytest.mark.parametrize("name", ["me", "nobody", ""])
@pytest.mark.parametrize("guess", ["secret", "s", "secreu", "", "x" * 100_000, "caf\u00e9"])
def test_a_password_is_compared_in_constant_time_and_in_no_other_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, guess: str
) -> None:
    """Each guess is one comparison of two digests of equal length, whose result alone decides."""
    compared: list[tuple[bytes, bytes]] = []
    answers = iter([True, False])

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return next(answers)

    file = tmp_path / "users.json"
    file.write_text(json.dumps({"me": "secret"}))
    passwords = Passwords(str(file))
    monkeypatch.setattr("comgra_decl.viewer.login.hmac.compare_digest", compare)
    assert passwords.right(name, guess) == (name == "me")
    assert not passwords.right(name, guess)
    assert [(len(one), len(other)) for one, other in compared] == [(32, 32)] * 2
    digest = hashlib.sha256(guess.encode()).digest()
    assert all(digest in pair for pair in compared)


def test_a_client_that_says_nothing_holds_nobody_up(plain: Viewed) -> None:
    place = urlsplit(plain.url)
    silent = [socket.create_connection((place.hostname or "", place.port or 0)) for _ in range(50)]
    for connection in silent:
        connection.sendall(b"GET /viewer HTTP/1.1\r\nHost: localhost\r\nX: ")
    assert Answer(plain.url, "/viewer", {}).status == 200
    for connection in silent:
        connection.close()
