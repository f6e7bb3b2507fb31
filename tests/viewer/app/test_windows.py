"""The page fits every window and paper size: it folds, scrolls, and prints entire sections."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest

from tests.support.shortened import shortened
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


@pytest.mark.parametrize(
    "sections",
    shortened([("inspect", "compare"), ("overview", "values", "findings", "run")], tried=1),
)
def test_nothing_is_cut_off_in_a_narrow_window(
    sections: tuple[str, ...], opened: Callable[..., Any]
) -> None:
    page = opened("?run=pair/new&section=overview&node=embed&step=4")
    for section in sections:
        turn_to(page, section)
        assert page.evaluate("() => document.documentElement.scrollWidth") <= NARROW["width"]
        assert page.evaluate(CUT_OFF) == [], section
    page.set_viewport_size({"width": 480, "height": 800})
    for name in ("Overview", "Run"):  # every tab can still be reached
        page.get_by_role("tab", name=name, exact=True).click()
    page.locator("table.entries").wait_for()


@pytest.mark.slow
@pytest.mark.parametrize(
    "shown", shortened([("inspect", "table.stats"), ("overview", ".facts table")], tried=1)
)
def test_a_narrow_section_shows_its_table_above_its_figures(
    opened: Callable[..., Any], shown: tuple[str, str]
) -> None:
    section, table = shown
    page = opened(f"?run=pair/new&section={section}&node=embed&step=4")
    top, bottom = page.locator(table).first.evaluate(EXTENT)
    page.locator(".bk-Figure:visible").first.wait_for()
    figures = [figure.evaluate(EXTENT) for figure in page.locator(".bk-Figure:visible").all()]
    assert bottom - top > 100
    assert all(end <= top or begin >= bottom for begin, end in figures)


OVERLAPS = """() => {
  const within = (root, selector) => [...root.querySelectorAll("*")].flatMap((e) => [
    ...(e.matches(selector) ? [e] : []),
    ...(e.shadowRoot ? within(e.shadowRoot, selector) : [])]);
  const boxes = (elements) => elements.map((e) => e.getBoundingClientRect())
    .filter((box) => box.width && box.height);
  const main = document.querySelector("main");
  const figures = boxes(within(main, ".bk-Figure"));
  const choices = within(main, ".choices").filter((e) => e.getClientRects().length);
  const fields = boxes(choices.flatMap((e) => within(e.shadowRoot, "select, button, input")));
  const cut = choices.filter((e) => e.scrollHeight > e.clientHeight + 1)
    .map((e) => `choices of ${e.scrollHeight} px have ${e.clientHeight}`);
  if (!fields.length || !figures.length) return ["nothing is compared"];
  return [...cut, ...fields.flatMap((field) => figures
    .filter((f) => f.left < field.right - 1 && field.left < f.right - 1
      && f.top < field.bottom - 1 && field.top < f.bottom - 1)
    .map((f) => `a figure at ${f.top} covers a field at ${field.top}`))];
}"""


@pytest.mark.slow
@pytest.mark.parametrize("section", shortened(["explore", "runs", "compare", "values"], tried=1))
def test_figures_cover_no_choices_in_a_narrow_window(
    opened: Callable[..., Any], section: str
) -> None:
    page = opened("?run=pair/new&section=overview&node=embed&step=4")
    turn_to(page, section)
    page.locator("main .bk-Figure:visible").first.wait_for()
    assert page.locator("main .choices:visible select").count() > 0
    assert page.evaluate(OVERLAPS) == []


@pytest.mark.slow
def test_without_values_there_is_no_empty_figure(viewer: Callable[..., Any]) -> None:
    page = viewer("?run=pair/new&section=values&node=head&role=weight&step=4", ".notice.left")
    page.get_by_role("heading", name="No values recorded").wait_for()
    assert page.locator("main .bk-Figure").locator("visible=true").count() == 0


@pytest.mark.slow
def test_all_tabs_fit_a_laptop(viewer: Callable[..., Any]) -> None:
    query = "?run=pair/new&section=attention&node=embed&step=4"
    page = viewer(query, '[role="tab"]', viewport={"width": 1280, "height": 800})
    assert page.get_by_role("tab").count() >= 14  # with Attention and Views
    size = page.locator(".tabs").evaluate("e => [e.scrollWidth, e.clientWidth]")
    assert size[0] <= size[1]
    note = page.locator(".missing")
    assert note.locator("code").all_text_contents() == ["axes: [head, query, key]", "attention"]
    assert "`" not in note.inner_text()


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_large_screen_is_filled_evenly(viewer: Callable[..., Any]) -> None:
    large = {"width": 3840, "height": 2160}
    page = viewer("?run=pair/new&section=kpis&node=embed", ".bk-Figure", viewport=large)
    widths = {round(f.bounding_box()["width"]) for f in page.locator(".bk-Figure:visible").all()}
    assert max(widths) - min(widths) <= 1
    assert min(widths) > 480
    for section in ["overview", "inspect", "values", "compare"]:
        turn_to(page, section)
        assert page.evaluate(CUT_OFF) == [], section
        places = [f.bounding_box() for f in page.locator(".bk-Figure:visible").all()]
        assert all(place["width"] > 300 and place["height"] > 150 for place in places), section
        assert max(place["x"] + place["width"] for place in places) > large["width"] / 3


SCROLLED = """() => {
  const found = [];
  const walk = (root) => {
    for (const e of root.querySelectorAll("*")) {
      if (e.shadowRoot && !e.matches(".bk-Figure")) walk(e.shadowRoot);
      const { overflowY, display } = getComputedStyle(e);
      if (overflowY === "visible" || display === "none" || !e.clientHeight) continue;
      if (e.scrollHeight > e.clientHeight + 2) found.push(e.outerHTML.slice(0, 120));
    }
  };
  walk(document.querySelector("main"));
  return found;
}"""
"""Finds what is cut off below because it could only be scrolled to."""


@pytest.mark.parametrize(
    "sections", shortened([["inspect"], ["overview", "values", "compare"]], tried=1), ids=" ".join
)
@pytest.mark.slow
def test_only_the_open_section_is_printed_and_nothing_of_it_is_cut_off(
    viewer: Callable[..., Any], sections: list[str]
) -> None:
    page = viewer("?run=pair/new&section=kpis&node=embed&step=4", ".bk-Figure", viewport=NARROW)
    for section in sections:
        turn_to(page, section)
        page.emulate_media(media="print")
        page.wait_for_function("() => document.documentElement.dataset.theme === 'light'")
        page.locator(".bk-Figure").locator("visible=true").first.wait_for()
        drawn = page.locator(".bk-Figure").evaluate_all(
            "(all) => all.filter((e) => e.getBoundingClientRect().width > 0).length"
        )
        assert drawn == FIGURES[section], section
        assert page.evaluate(SCROLLED) == [], section
        page.emulate_media(media="screen")


PRINTED = """() => {
  window.dispatchEvent(new Event("beforeprint")); // no observer and no timer runs before the print
  const found = (selector, root = document) => [...root.querySelectorAll("*")].flatMap((e) => [
    ...(e.matches(selector) ? [e] : []), ...(e.shadowRoot ? found(selector, e.shadowRoot) : [])]);
  const seen = (selector) => found(selector).map((e) => e.getBoundingClientRect())
    .filter((box) => box.width && box.height);
  const right = (selector) => Math.max(...seen(selector).map((box) => box.right));
  const figure = [...Bokeh.index.query((v) => "repaint" in v)].find((v) => v.is_displayed);
  const { canvas } = figure.canvas_view.primary;
  const end = (e) => e.getBoundingClientRect().right;
  const dark = [...canvas.getContext("2d").getImageData(0, 0, canvas.width, 22).data]
    .filter((value, i, all) => i % 4 === 0 && all[i + 3] > 200 && value < 60).length;
  const result = { box: right(".node .shape"), graph: right(".tools"), tick: right(".ticks"),
    page: end(document.querySelector("main")), titles: dark,
    theme: document.documentElement.dataset.theme,
    buttons: seen(".tools button, .stepbar button, .save, .find, .grip").length,
    figure: Math.abs(end(figure.el) - end(canvas)) };
  window.dispatchEvent(new Event("afterprint"));
  return result;
}"""


@pytest.mark.parametrize(
    "width",
    [pytest.param(800, marks=pytest.mark.slow), 1280, pytest.param(1920, marks=pytest.mark.slow)],
)
def test_a_page_is_printed_as_wide_as_the_paper_from_any_window(
    viewer: Callable[..., Any], width: int
) -> None:
    page = viewer(
        "?run=pair/new&section=compare&other=pair/old&node=embed&step=4", ".bk-Figure",
        viewport={"width": width, "height": 800}, color_scheme="dark",
    )  # fmt: skip
    page.locator(".node .shape").first.wait_for()
    page.wait_for_function("() => Bokeh.documents[0].is_idle")
    printed = page.evaluate(PRINTED)
    assert printed["page"] <= 718  # A4 at 96 dots per inch, less the browser's margins
    assert printed["box"] <= printed["graph"] <= printed["page"]
    assert printed["tick"] <= printed["page"]
    assert printed["figure"] <= 1
    assert printed["buttons"] == 0
    assert printed["theme"] == "light"
    assert printed["titles"] > 5  # ink of the title on the canvas, before any frame is drawn
    page.wait_for_function(
        "() => document.documentElement.dataset.theme === 'dark' && "
        "!document.documentElement.classList.contains('paper')"
    )
    assert page.locator("main").bounding_box()["width"] > min(width, 1280) - 260


@pytest.mark.slow
def test_tables_of_a_comparison_are_printed_one_below_the_other(viewer: Callable[..., Any]) -> None:
    page = viewer(
        "?run=pair/new&section=compare&other=pair/old&node=embed&step=4", "table.ranking",
        viewport={"width": 1280, "height": 800},
    )  # fmt: skip
    page.emulate_media(media="print")
    page.locator("#side").wait_for(state="hidden")
    shown = page.locator("table.stats, table.ranking, table.settings, .bk-Figure:visible")
    boxes = sorted((one.bounding_box() for one in shown.all()), key=lambda box: box["y"])
    assert len(boxes) >= 3
    for above, below in pairwise(boxes):
        assert above["y"] + above["height"] <= below["y"] + 1


FIGURES = {"overview": 3, "inspect": 6, "values": 1, "compare": 1}


@pytest.mark.slow
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
