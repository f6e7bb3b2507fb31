"""The verdict, the walkthrough of the evidence and the tour, in a real browser."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from comgra_decl.viewer.page import create_page
from tests.support.fake_run import FakeRun
from tests.viewer.app.conftest import BROKEN_FROM
from tests.viewer.app.served import Gallery

pytestmark = pytest.mark.browser

NOT_AUTOMATED = "Object.defineProperty(navigator, 'webdriver', { get: () => false })"
"""Automated browsers get no tour by themselves: it would hide what other tests click."""

TOUR_SEEN = "() => localStorage.getItem('comgra_decl.tour')"


@pytest.fixture
def checked(serve: Callable[..., str], root: Path, tmp_path: Path, open_page: Any) -> Any:
    """A page with its own run, which is checked from the strip."""
    shutil.copytree(root, tmp_path / "runs")
    page = open_page(viewport={"width": 1280, "height": 800}, color_scheme="light")
    page.goto(serve(lambda: create_page([str(tmp_path / "runs")])))
    page.locator(".strip").get_by_text("Not checked").wait_for()
    page.get_by_role("button", name="Check now").click()
    page.locator(".strip.tone-error").wait_for()
    return page


def test_the_verdict_arrives_by_itself_and_show_me_walks_the_evidence(
    checked: Any, tmp_path: Path, open_page: Callable[..., Any]
) -> None:
    page = checked
    page.locator(".tabs .count.tone-error").wait_for()
    assert f"since step {BROKEN_FROM}" in page.locator(".strip .line").inner_text()
    page.get_by_role("button", name="Show me").focus()
    page.keyboard.press("Enter")
    page.locator('.walk[data-stop="0"]').wait_for()
    page.wait_for_url(re.compile(f"colour=rule%3Anonfinite.*step={BROKEN_FROM}"))
    page.locator(f'article[data-step="{BROKEN_FROM}"]').wait_for()
    assert page.locator(".told p").count() == 2
    page.get_by_role("button", name="Next", exact=True).focus()
    page.keyboard.press("Enter")
    page.locator('.walk[data-stop="1"]').wait_for()
    page.keyboard.press("Enter")  # the focus stays on the button
    page.locator('.walk[data-stop="2"]').wait_for()
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    page.get_by_role("button", name="Close").click()
    page.locator(".walk").wait_for(state="detached")
    page.wait_for_url(lambda url: "colour" not in url)
    story = tmp_path / download.value.suggested_filename
    assert story.suffix == ".html"
    download.value.save_as(story)
    reader = open_page(color_scheme="dark")  # fails if the file requests anything
    reader.set_content(story.read_text())
    assert reader.locator("li").count() >= 3
    assert reader.locator("svg path.data").first.is_visible()


@pytest.mark.slow
def test_a_finding_in_the_list_can_be_walked_too(checked: Any) -> None:
    page = checked
    page.get_by_role("tab", name="Findings").click()
    page.locator("article.finding button.start").first.click()
    page.locator('.walk[data-stop="0"]').wait_for()


@pytest.mark.slow
def test_the_strip_follows_a_training(serve: Callable[..., str], tmp_path: Path, page: Any) -> None:
    training = FakeRun(tmp_path / "runs" / "live", nodes=["embed", "head"], layers=1)
    training.write(2, evals=False)
    page.goto(serve(lambda: create_page([str(tmp_path / "runs")])))
    page.locator(".strip.tone-neutral", has_text="Not checked").wait_for()
    page.locator(".tabs", has_text="KPIs").wait_for()
    training.write(9, evals=False)
    page.get_by_text("11 records").wait_for()
    page.get_by_role("button", name="Check now").click()
    page.locator(".strip", has_text=re.compile("No findings so far|warning|hint|error")).wait_for()
    training.close()


@pytest.mark.slow
def test_a_first_visit_gets_the_tour_once_by_keyboard_and_one_click_ends_it(
    server: Gallery, open_page: Callable[..., Any]
) -> None:
    page = open_page(color_scheme="dark")
    page.add_init_script(NOT_AUTOMATED)
    page.goto(server.url)
    page.get_by_role("dialog", name="The verdict on the run").wait_for()
    assert page.evaluate("() => document.activeElement.textContent") == "Next"
    for name in ("The network", "The steps", "The sections"):
        page.keyboard.press("ArrowRight")
        page.get_by_role("dialog", name=name).wait_for()
    page.keyboard.press("Tab")
    assert page.evaluate("() => document.activeElement.textContent") == "End tour"
    page.keyboard.press("Escape")
    page.locator(".tour").wait_for(state="detached")
    assert page.evaluate(TOUR_SEEN) == "seen"
    page.reload()
    page.locator(".strip").wait_for()
    page.locator(".node").first.wait_for()
    assert page.locator(".tour").count() == 0
    page.get_by_role("button", name="Tour of the page").click()
    page.locator(".tour-card").wait_for()
    page.mouse.click(5, 500)
    page.locator(".tour").wait_for(state="detached")
