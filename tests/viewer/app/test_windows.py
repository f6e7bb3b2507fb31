"""The page fits every window and paper size: it folds, scrolls, and prints entire sections."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.viewer.app.served import turn_to

pytestmark = pytest.mark.browser

NARROW = {"width": 800, "height": 800}

CUT_OFF = """() => {
  const found = [];
  const walk = (root) => {
    for (const e of root.querySelectorAll("*")) {
      if (e.shadowRoot) walk(e.shadowRoot);
      if (!e.matches("select, input, td, .bk-Figure, .tabs")) continue;
      const box = e.getBoundingClientRect();
      if (!box.width || !box.height) continue;
      let scrolls = false;
      for (let up = e; up; up = up.assignedSlot ?? up.parentNode ?? up.host) {
        if (!(up instanceof Element)) continue;
        scrolls ||= /auto|scroll/.test(getComputedStyle(up).overflowX);
      }
      if (!scrolls && box.right > innerWidth + 1) found.push(e.outerHTML.slice(0, 120));
    }
  };
  walk(document);
  return found;
}"""
"""Finds what extends beyond the right edge and cannot be scrolled to."""

EXTENT = "e => { const box = e.getBoundingClientRect(); return [box.top, box.bottom]; }"


@pytest.fixture
def opened(viewer: Callable[..., Any]) -> Callable[..., Any]:
    return partial(viewer, shown='[role="tab"][aria-selected="true"]', viewport=NARROW)


def test_nothing_is_cut_off_in_a_narrow_window(opened: Callable[..., Any]) -> None:
    page = opened("?run=pair/new&section=overview&node=embed&step=4")
    for section in ["overview", "inspect", "values", "compare", "findings", "run"]:
        turn_to(page, section)
        assert page.evaluate("() => document.documentElement.scrollWidth") <= NARROW["width"]
        assert page.evaluate(CUT_OFF) == [], section
    page.set_viewport_size({"width": 480, "height": 800})
    for name in ("Overview", "Run"):  # every tab can still be reached
        page.get_by_role("tab", name=name, exact=True).click()
    page.locator("table.entries").wait_for()


def test_a_narrow_section_shows_its_table_above_its_figures(opened: Callable[..., Any]) -> None:
    page = opened("?run=pair/new&section=inspect&node=embed&step=4")
    for section, table in [("inspect", "table.stats"), ("overview", ".facts table")]:
        turn_to(page, section)
        top, bottom = page.locator(table).first.evaluate(EXTENT)
        figures = [figure.evaluate(EXTENT) for figure in page.locator(".bk-Figure:visible").all()]
        assert bottom - top > 100, section
        assert all(end <= top or begin >= bottom for begin, end in figures), section


def test_the_sidebar_folds_and_opens_over_the_page(opened: Callable[..., Any]) -> None:
    page = opened("?node=embed&step=4")
    side = page.locator("#side")
    side.wait_for(state="hidden")
    width = page.locator(".graph").bounding_box()["width"]
    page.get_by_role("button", name="Toggle sidebar").click()
    side.wait_for(state="visible")
    page.locator('[data-field="statistic"] select').select_option("max")
    page.locator('tr.chosen[data-send="statistic:max"]').wait_for()
    assert page.locator(".graph").bounding_box()["width"] == width
    page.mouse.click(700, 430)  # beside it
    side.wait_for(state="hidden")
    page.set_viewport_size({"width": 1280, "height": 800})
    side.wait_for(state="visible")


def test_all_of_a_section_is_printed_in_light_colours(viewer: Callable[..., Any]) -> None:
    page = viewer("?section=findings&node=embed", ".health", color_scheme="dark")
    table = page.locator("table.unchecked")
    table.wait_for()
    page.emulate_media(media="print")
    page.wait_for_function("() => document.documentElement.dataset.theme === 'light'")
    assert not page.locator("#side").is_visible()
    assert not page.get_by_role("button", name="Toggle theme").is_visible()
    height = page.evaluate("() => document.documentElement.scrollHeight")
    box = table.bounding_box()
    assert box["y"] + box["height"] <= height
    assert height > page.viewport_size["height"]
    page.emulate_media(media="screen", color_scheme="dark")
    page.wait_for_function("() => document.documentElement.dataset.theme === 'dark'")
    page.locator("#side").wait_for(state="visible")
