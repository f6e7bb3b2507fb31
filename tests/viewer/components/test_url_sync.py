"""The page's address follows what is shown, and Back works."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from comgra_decl.viewer.components.urlsync import UrlSync
from tests.support.shortened import shortened
from tests.viewer.components.conftest import Shown

expect = pytest.importorskip("playwright.sync_api").expect
Show = Callable[..., Shown]


@pytest.fixture
def page(open_page: Callable[[], Any]) -> Any:
    """A page of its own, because its address and its history are what is tested."""
    return open_page()


@pytest.fixture
def show(show: Show, page: Any) -> Show:
    """Loads that page."""
    return functools.partial(show, on=page)


def ends(page: Any, query: str) -> None:
    page.wait_for_function("query => location.search === query", arg=query)


def entries(page: Any) -> int:
    return int(page.evaluate("history.length"))


@pytest.mark.slow
def test_the_address_is_told_once_at_the_start(show: Show) -> None:
    shown = show(UrlSync, query="?node=a%20b&step=7")
    shown.heard({"query": "?node=a%20b&step=7"})
    assert shown.component.query == "?node=a%20b&step=7"


def test_small_steps_replace_the_address_and_large_ones_are_history(show: Show, page: Any) -> None:
    shown = show(UrlSync, query="?node=a")
    shown.heard({"query": "?node=a"})
    start = entries(page)
    for step in range(5):
        shown.set(query=f"?node=a&step={step}", push=False)
    ends(page, "?node=a&step=4")
    assert entries(page) == start
    shown.set(query="?node=b&step=4", push=True)
    ends(page, "?node=b&step=4")
    assert entries(page) == start + 1


def test_back_and_forward_are_reported(show: Show, page: Any) -> None:
    shown = show(UrlSync, query="?node=a")
    shown.heard({"query": "?node=a"})
    shown.set(query="?node=b", push=True)
    ends(page, "?node=b")
    page.go_back()
    shown.heard({"query": "?node=a"})
    page.go_forward()
    shown.heard({"query": "?node=b"})
    shown.set(query="?node=b", push=True)
    assert page.evaluate("location.search") == "?node=b"


@pytest.mark.slow
def test_going_back_does_not_write_history_itself(show: Show, page: Any) -> None:
    shown = show(UrlSync, query="?node=a")
    shown.heard({"query": "?node=a"})
    shown.set(query="?node=b", push=True)
    ends(page, "?node=b")
    page.go_back()
    shown.heard({"query": "?node=a"})
    page.wait_for_timeout(300)  # longer than any delayed write
    page.go_forward()
    shown.heard({"query": "?node=b"})
    assert shown.component.query == "?node=b"
    assert page.evaluate("location.search") == "?node=b"


@pytest.mark.slow
def test_a_late_small_step_never_overwrites_a_newer_place(show: Show, page: Any) -> None:
    shown = show(UrlSync, query="?node=a")
    shown.heard({"query": "?node=a"})
    shown.set(query="?node=a&step=1", push=False)
    shown.set(query="?node=b&step=1", push=True)
    ends(page, "?node=b&step=1")
    page.wait_for_timeout(300)
    assert page.evaluate("location.search") == "?node=b&step=1"
    page.go_back()
    page.wait_for_function(  # whether the small step came in time or not at all
        "() => ['?node=a', '?node=a&step=1'].includes(location.search)"
    )


@pytest.mark.parametrize(
    "query", shortened(["//example.com/", "javascript:alert(1)", "#x", "/elsewhere"], tried=1)
)
def test_the_page_can_only_be_given_a_query(show: Show, page: Any, query: str) -> None:
    shown = show(UrlSync, query="?node=a")
    shown.heard({"query": "?node=a"})
    shown.set(query=query, push=True)
    shown.set(query="?node=b", push=True)
    ends(page, "?node=b")
    assert page.evaluate("location.pathname") == "/app"


@pytest.mark.slow
def test_an_empty_query_leaves_a_bare_address(show: Show, page: Any) -> None:
    shown = show(UrlSync, query="?node=a")
    shown.heard({"query": "?node=a"})
    shown.set(query="", push=False)
    ends(page, "")


@pytest.mark.parametrize("message", [{"query": 3}, {"query": "?" * 9000}, {"url": "?a"}, "?a"])
def test_messages_that_are_no_query_are_ignored(message: Any) -> None:
    sync = UrlSync()
    heard: list[Any] = []
    sync.on_message(heard.append)
    sync._handle_msg(message)
    assert (heard, sync.query) == ([], "")
