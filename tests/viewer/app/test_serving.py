"""Serving the viewer to others: under a prefix, behind a proxy, with a password."""

from __future__ import annotations

import http.client
import json
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from bokeh.core.types import ID
from bokeh.util.token import generate_jwt_token

from comgra_decl.errors import ComgraError
from comgra_decl.viewer.serve import Access, clean_prefix, has_display
from tests.viewer.app.served import Start

PATIENCE = 60_000  # milliseconds, on a busy machine


@pytest.mark.browser
def test_below_a_prefix_a_password_is_asked_for_and_the_page_is_whole_and_answers(
    start: Start, page: Any
) -> None:
    from playwright.sync_api import expect

    address = start("--prefix", "team/comgra/", COMGRA_VIEW_AUTH="open sesame")
    assert address.endswith("/team/comgra/viewer")
    page.goto(f"{address}?node=head&section=inspect")
    for password in ("wrong", "open sesame"):
        page.get_by_label("Name").fill("me")
        page.get_by_label("Password").fill(password)
        page.get_by_role("button", name="Log in").click()
        if password == "wrong":
            expect(page.get_by_role("alert")).to_be_visible(timeout=PATIENCE)
    expect(page.locator('.node[data-id="head"]')).to_be_visible(timeout=PATIENCE)
    page.locator('tr[data-send="statistic:mean"]').click(timeout=PATIENCE)
    expect(page.locator('tr[data-send="statistic:mean"]')).to_have_class("chosen", timeout=PATIENCE)


def test_a_page_with_a_password_gives_nothing_away_before(start: Start, tmp_path: Path) -> None:
    users = tmp_path / "users.json"
    users.write_text(json.dumps({"me": "open sesame"}))
    address = start("--basic-auth", str(users))
    with urllib.request.urlopen(address) as answer:
        text = answer.read().decode()
        assert "/login" in answer.url
    assert "Password" in text
    assert "small" not in text
    assert "cdn." not in text


@pytest.mark.parametrize("prefix", ["", "/team"])
@pytest.mark.slow
def test_the_root_leads_to_the_page_and_keeps_the_query(start: Start, prefix: str) -> None:
    address = start(*(["--prefix", prefix] if prefix else []))
    root = address.removesuffix("viewer")
    query = "?run=group/small&node=head&open=blocks"
    with urllib.request.urlopen(root + query) as answer:
        assert answer.url == address + query
    with urllib.request.urlopen(root) as answer:
        assert answer.url == address


def test_a_foreign_page_may_not_talk_to_it_unless_it_was_named(start: Start) -> None:
    def answer(address: str, origin: str) -> int:
        place = urlsplit(address)
        connection = http.client.HTTPConnection(place.netloc, timeout=30)
        headers = {
            "Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==", "Origin": origin,
            "Sec-WebSocket-Protocol": f"bokeh, {generate_jwt_token(ID('session'))}",
        }  # fmt: skip
        connection.request("GET", f"{place.path}/ws", headers=headers)
        status = connection.getresponse().status
        connection.close()
        return status

    assert answer(start(), "http://proxy.example:8080") == 403
    named = start("--allow-websocket-origin", "proxy.example:8080")
    assert answer(named, "http://proxy.example:8080") != 403
    assert answer(named, "http://other.example:8080") == 403


@pytest.mark.parametrize(
    ("access", "warns"),
    [
        (Access(), False),
        (Access("localhost"), False),
        (Access("::1"), False),
        (Access("0.0.0.0"), True),
        (Access(""), True),
        (Access("192.168.1.5"), True),
        (Access("0.0.0.0", basic_auth="open sesame"), False),
    ],
)
def test_whoever_opens_it_to_others_without_a_password_is_warned(
    access: Access, warns: bool
) -> None:
    assert ("--basic-auth" in access.warning) == warns


@pytest.mark.parametrize(
    ("given", "path"), [("", ""), ("/", ""), ("a", "/a"), ("/a/b-c/", "/a/b-c")]
)
def test_a_prefix_is_a_plain_path(given: str, path: str) -> None:
    assert clean_prefix(given) == path


@pytest.mark.parametrize("given", ["http://host/a", "../a", "a b", "a//b", "(.*)"])
def test_anything_else_is_no_prefix(given: str) -> None:
    with pytest.raises(ComgraError, match="plain path"):
        clean_prefix(given)


def test_no_browser_is_opened_where_nobody_would_see_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    assert not has_display()
    monkeypatch.setenv("WAYLAND_DISPLAY", "wayland-0")
    assert has_display()
