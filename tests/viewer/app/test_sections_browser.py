"""Raw values, comparisons and custom views in a real browser."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.fake_run import FakeRun
from tests.viewer.app.served import VIEWS, Gallery

pytestmark = pytest.mark.browser

UNNAMED = """() => {
  const found = [];
  const walk = (root) => {
    for (const e of root.querySelectorAll("*")) {
      if (e.shadowRoot) walk(e.shadowRoot);
      const control = e.matches("select, input, button") && e.getClientRects().length;
      if (control && !(e.getAttribute("aria-label") || e.textContent.trim() || e.title)) {
        found.push(e.outerHTML.slice(0, 200));
      }
    }
  };
  walk(document);
  return found;
}"""
"""Finds elements without an accessible name."""


SELECTED_TAB = '[role="tab"][aria-selected="true"]'  # some sections hide the graph


@pytest.fixture
def opened(viewer: Callable[..., Any]) -> Callable[..., Any]:
    return partial(viewer, shown=SELECTED_TAB, viewport={"width": 1280, "height": 720})


def drawn(fake: FakeRun, step: int) -> np.ndarray:
    slot = next(s for s in fake.slots if s.key == ("embed", "output", 0, "forward"))
    return fake.tensor(slot, step)[[0, 4, 8, 12]]


def saved(page: Any, what: str) -> Path:
    with page.expect_download() as download:
        page.locator(f'button[data-value="{what}"]').click()
    return Path(download.value.path())


def test_raw_values(server: Gallery, opened: Callable[..., Any], tmp_path: Path) -> None:
    fake = server.fake
    page = opened(
        "?run=pair/new&section=values&node=embed&step=4",
        permissions=["clipboard-read", "clipboard-write"],
    )
    first = drawn(fake, 4)
    assert page.locator("table.cells td[title]").first.get_attribute("title") == str(first[0, 0, 0])
    assert page.evaluate(UNNAMED) == []
    page.locator('[data-field="sample"] select').select_option("2")
    page.wait_for_url(re.compile("batch=2"))
    page.locator('[data-step="4"] .chip', has_text="sample 2").wait_for()
    np.testing.assert_array_equal(np.load(saved(page, "npy")), first[2])
    text = saved(page, "csv").read_text().splitlines()
    np.testing.assert_array_equal(
        np.array([line.split(",")[1:] for line in text[1:]], np.float32), first[2]
    )
    page.locator('button[data-value="copy"]').click()
    page.wait_for_function(
        "async want => (await navigator.clipboard.readText()).startsWith(want)",
        arg=f"{first[2][0, 0]!s}\t{first[2][0, 1]!s}",
    )
    page.locator('[data-field="place:1"] select').select_option("x")  # transposed
    page.wait_for_url(re.compile("slice=2%2Cx%2Cy"))
    page.locator('[data-field="order"] select').select_option("high")
    page.locator("table.cells.list").wait_for()
    page.keyboard.press("Escape")
    page.locator("tr[data-send]").first.focus()
    page.keyboard.press(".")  # the step changes, everything else stays
    page.locator('[data-step="5"]').first.wait_for()
    highest = page.locator("table.list tbody tr").first.locator("td").last
    assert highest.get_attribute("title") == str(drawn(fake, 5)[2].max())
    page.wait_for_url(re.compile("step=5"))
    assert "order=high" in page.url
    page.reload()
    page.locator("table.cells.list").wait_for()
    page.locator("tr[data-send]").first.focus()
    page.keyboard.press("Enter")  # the table around it
    page.locator("table.cells:not(.list)").wait_for()
    page.wait_for_url(lambda url: "order" not in url and "slice=2%2Cx%2Cy" in url)
    page.screenshot(path=str(tmp_path / "values.png"))


@pytest.mark.slow
def test_missing_values_say_why(opened: Callable[..., Any]) -> None:
    page = opened("?run=pair/new&section=values&node=embed&step=4&pass=grad")
    page.get_by_text("The spec does not record values").wait_for()
    page.get_by_text("values: true").wait_for()


@pytest.mark.slow
def test_two_runs_and_two_steps(opened: Callable[..., Any], tmp_path: Path) -> None:
    page = opened("?run=pair/new&section=compare&node=embed&step=4")
    page.locator('[data-other="0"]').wait_for()  # the first step of the same run
    page.locator('[data-field="other"] select').select_option("pair/old")
    page.locator('[data-other="4"]').wait_for()
    page.locator("h3", has_text="Only in this run").wait_for()
    assert page.evaluate(UNNAMED) == []
    page.locator('button[data-value="paint"]').click()
    page.wait_for_url(re.compile("colour=difference"))
    page.locator('.node[data-id="embed"]', has_text="%").wait_for()
    page.locator('[data-field="axis"] button[data-value="relative"]').click()
    page.wait_for_url(re.compile("axis=relative"))
    page.locator('button[data-value="pin"]').click()
    page.wait_for_url(re.compile("other_step=4"))
    page.locator("table.ranking tr[data-send]").first.focus()
    page.keyboard.press("Enter")
    page.locator("table.ranking tr.chosen").wait_for()
    page.keyboard.press(",")
    page.locator('[data-step="3"][data-other="4"]').wait_for()
    page.wait_for_url(re.compile("step=3"))  # the address follows a moment later
    page.reload()
    page.locator('[data-step="3"][data-other="4"]').wait_for()
    page.screenshot(path=str(tmp_path / "compare.png"))


@pytest.mark.slow
def test_custom_views(server: Gallery, opened: Callable[..., Any], tmp_path: Path) -> None:
    page = opened("?run=pair/new&section=views&node=embed&step=4")
    page.get_by_text("it is embed at 4").wait_for()
    page.get_by_text("TypeError").wait_for()
    page.locator("body").press(",")
    page.get_by_text("it is embed at 3").wait_for()
    server.views.write_text(VIEWS.replace("it is", "now it is").replace(', View("Bad", len)', ""))
    page.get_by_text("now it is embed at 3").wait_for()
    assert page.get_by_text("TypeError").count() == 0
    page.screenshot(path=str(tmp_path / "views.png"))
