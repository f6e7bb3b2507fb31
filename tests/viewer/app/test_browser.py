"""The entire viewer in a real browser, served by `panel serve` in a separate process."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from comgra_decl.viewer.page import create_page
from tests.support.fake_run import FakeRun
from tests.viewer.app.conftest import BROKEN_FROM
from tests.viewer.app.served import Started

pytestmark = pytest.mark.browser


def shows(page: Any, *, node: str | None = None, step: int | None = None) -> None:
    """Waits until the table shows a node at a step."""
    mark = f'[data-node="{node}"]' if node else ""
    mark += f'[data-step="{step}"]' if step is not None else ""
    page.locator(f"article{mark}").wait_for()


def query(page: Any, key: str) -> str | None:
    """Returns a field of the page's address."""
    return parse_qs(urlsplit(page.url).query).get(key, [None])[0]


def find(page: Any, text: str) -> None:
    """Searches for a node by keyboard."""
    page.keyboard.press("/")
    page.keyboard.type(text)
    page.keyboard.press("Enter")


@pytest.mark.slow
def test_the_page_opens_with_everything_in_view_on_a_laptop(viewer: Callable[..., Any]) -> None:
    page = viewer("?section=inspect&node=embed", viewport={"width": 1280, "height": 720})
    shows(page, step=11)
    for node in ("input", "embed", "head", "loss"):
        assert page.locator(f'.node[data-id="{node}"]').count() == 1
    assert page.locator('.node[data-id="head"] .mark[data-mark="head.weight"]').count() == 1
    assert page.locator("canvas").count() >= 6  # six figures
    assert page.locator("table.stats tbody tr").count() == 9
    assert page.locator("table.samples tbody tr").count() == 4
    overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.evaluate(overflow) == 0
    figure = page.locator(".bk-Figure").first.bounding_box()
    assert figure["y"] + figure["height"] <= 720
    assert page.evaluate("document.documentElement.scrollHeight") <= 720


def test_clicks_and_keys_choose_a_node_a_row_and_a_step(viewer: Callable[..., Any]) -> None:
    page = viewer("?step=5&section=inspect")
    shows(page, step=5)
    page.locator('.node[data-id="head"]').click()
    shows(page, node="head", step=5)
    page.wait_for_url(re.compile("node=head"))
    find(page, "fc1")
    shows(page, node="blocks.0.mlp.fc1")
    page.locator('tr[data-send="statistic:min"]').focus()
    page.keyboard.press("Enter")
    page.locator('tr.chosen[data-send="statistic:min"]').wait_for()
    page.keyboard.press(".")
    shows(page, step=6)
    for _ in range(4):
        page.keyboard.press(",")
    shows(page, step=2)
    page.keyboard.press("Shift+>")
    shows(page, step=11)


@pytest.mark.slow
def test_a_click_on_a_finding_jumps_to_its_node_and_step(viewer: Callable[..., Any]) -> None:
    page = viewer("?section=findings&step=2&node=embed", "article.finding")
    finding = page.locator('article[data-rule="nonfinite"]')
    finding.locator("button.go").first.click()
    page.wait_for_url(re.compile(f"node=(?!embed).*step={BROKEN_FROM}"))
    page.locator('.mark[data-index="9"]').first.wait_for(state="attached")
    page.get_by_role("button", name="Show all in graph").click()
    page.locator(".legend", has_text="findings").wait_for()
    finding.locator("button.paint").first.click()
    page.wait_for_url(re.compile("colour=rule%3Anonfinite"))
    page.locator(".legend", has_text="nonfinite").wait_for()
    assert page.locator('[data-field="colour"] select').input_value() == "rule:nonfinite"
    finding.locator("button.inspect").click()
    shows(page, node=query(page, "node"), step=BROKEN_FROM)


@pytest.mark.slow
def test_the_checklist_shows_its_states_its_numbers_and_what_it_cannot_see(
    viewer: Callable[..., Any],
) -> None:
    page = viewer("?section=findings", ".health")
    finite = page.locator(".health li.red", has_text="Are all numbers finite?")
    numbers = finite.locator(".numbers")
    assert numbers.inner_text() == f"NaN or infinity in 3 of 12 records from step {BROKEN_FROM} on"
    assert numbers.bounding_box()["width"] > 50
    partly = page.locator(".health li.partly").first
    assert partly.locator(".numbers").inner_text().startswith("partly checked (1 of 2)")
    dots = {
        state: page.locator(f".health .dot.{state}").first.evaluate(
            "dot => { const s = getComputedStyle(dot); return s.background + s.border }"
        )
        for state in ("red", "green", "partly", "unchecked")
    }
    assert len(set(dots.values())) == 4
    page.locator(".caveats", has_text="leak into the inputs").wait_for()


def test_a_link_restores_the_view_back_goes_back_and_selectors_choose(
    viewer: Callable[..., Any],
) -> None:
    page = viewer("?node=cell&iteration=1&step=7&batch=2&stat=l2&scale=log&colour=forward")
    shows(page, node="cell", step=7)
    assert page.locator('[data-field="iteration"] select').input_value() == "1"
    assert page.locator('[data-field="batch"] select').input_value() == "2"
    page.locator('.node[data-id="head"]').click()
    shows(page, node="head", step=7)
    page.wait_for_url(re.compile("node=head"))
    page.keyboard.press(".")
    shows(page, node="head", step=8)
    page.wait_for_url(re.compile("step=8"))
    page.go_back()
    shows(page, node="cell", step=7)
    page.go_forward()
    shows(page, node="head", step=8)
    page.go_back()
    shows(page, node="cell", step=7)
    page.locator('[data-field="iteration"] select').select_option("2")
    page.wait_for_url(re.compile("iteration=2"))
    page.locator('[data-field="batch"] select').select_option("3")
    page.locator('tr.chosen[data-send="batch:mean"]').wait_for()
    page.locator('[data-field="statistic"] select').select_option("min")
    page.locator('tr.chosen[data-send="statistic:min"]').wait_for()
    page.locator('[data-field="colour"] select').select_option("grad")
    page.get_by_text("gradient · min", exact=True).first.wait_for()
    page.locator('[data-field="type"] select').select_option("eval")
    shows(page, node="cell", step=10)
    assert query(page, "batch") == "3"


@pytest.mark.slow
def test_a_hostile_link_is_harmless_and_a_click_on_a_series_goes_to_its_step(
    viewer: Callable[..., Any],
) -> None:
    page = viewer("?node=<script>alert(1)</script>&step=999&section=x")
    shows(page, step=11)
    page.wait_for_url(lambda url: "script" not in url)
    assert query(page, "run") == "group/small"
    find(page, "embed")
    shows(page, node="embed", step=11)
    box = page.locator(".bk-Figure").first.bounding_box()
    page.mouse.click(box["x"] + box["width"] * 0.5, box["y"] + box["height"] * 0.5)
    page.locator('article[data-step]:not([data-step="11"])').wait_for()
    assert 3 <= int(page.locator("article").get_attribute("data-step")) <= 8


@pytest.mark.slow
def test_all_sections_are_there_in_dark_and_in_light(viewer: Callable[..., Any]) -> None:
    page = viewer("?step=11&section=inspect", color_scheme="light")  # its choice is stored there
    page.get_by_role("tab", name="Run", exact=True).click()
    page.get_by_text("max_elements").first.wait_for()
    page.locator("table.entries").wait_for()
    page.get_by_role("tab", name="KPIs").click()
    page.locator(".bk-Figure >> visible=true").first.wait_for()
    page.get_by_role("tab", name="Inspect").click()
    shows(page, step=11)
    page.wait_for_url(lambda url: "section" not in url)
    colour = "() => getComputedStyle(document.querySelector('body')).backgroundColor"
    light = page.evaluate(colour)
    page.get_by_label("Toggle theme").click()
    page.wait_for_function(f"before => ({colour})() !== before", arg=light)


@pytest.mark.slow
def test_a_click_in_the_overview_selects_tensor_and_step(viewer: Callable[..., Any]) -> None:
    page = viewer("?step=11", '[data-send="overview"][aria-selected="true"]')
    figure = page.locator(".bk-Figure >> visible=true").first
    figure.wait_for()
    box = figure.bounding_box()
    page.mouse.click(box["x"] + box["width"] * 0.6, box["y"] + box["height"] * 0.15)
    page.wait_for_url(lambda url: "step=" in url and "step=11" not in url)
    chosen = re.search(r"step=(\d+)", page.url)
    assert chosen is not None
    assert 2 <= int(chosen[1]) <= 8
    assert query(page, "section") == "overview"
    page.locator('.node[data-id="head"]').click()
    shows(page, node="head", step=int(chosen[1]))
    page.go_back()
    page.locator('[data-send="overview"][aria-selected="true"]').wait_for()


@pytest.mark.slow
def test_two_tabs_are_independent_and_a_damaged_run_says_why(viewer: Callable[..., Any]) -> None:
    one = viewer("?step=11&section=inspect")
    other = viewer("?run=group/torn&section=inspect", shown=".notice")
    other.get_by_text("This run is damaged").wait_for()
    other.locator('[data-field="run"] select').select_option("group/small")
    shows(other)
    begin = int(other.locator("article").get_attribute("data-step"))  # of the worst finding, if any
    one.bring_to_front()
    one.keyboard.press(",")
    shows(one, step=10)
    other.bring_to_front()
    shows(other, step=begin)


def test_a_page_fills_and_follows_while_training(
    serve: Callable[..., str], tmp_path: Path, page: Any
) -> None:
    page.goto(serve(lambda: create_page([str(tmp_path / "runs")])) + "?section=inspect")
    page.get_by_role("heading", name="No runs yet").wait_for()
    training = FakeRun(tmp_path / "runs" / "live", nodes=["embed", "head"], layers=1)
    page.get_by_text("live has started").wait_for()
    training.write(2, evals=False)
    shows(page, step=1)  # by itself, and it follows
    training.write(2, evals=False)
    shows(page, step=3)
    page.keyboard.press(",")
    shows(page, step=2)  # now someone is looking: nothing moves any more
    training.write(2, evals=False)
    training.close()
    page.get_by_text("finished \u00b7 6 records").wait_for()
    shows(page, step=2)
    shutil.rmtree(tmp_path / "runs" / "live")
    page.get_by_role("heading", name=re.compile("Run not found|No runs yet")).wait_for()


def test_serve_ends_cleanly_and_an_open_page_says_so(root: Path, page: Any) -> None:
    code = f"from comgra_decl.viewer.serve import serve; serve({str(root)!r})"
    started = Started(root, "-c", code)
    address = started.wait_for(r"viewer: (http://127\.0\.0\.1:\d+/viewer)\s")
    assert urlsplit(address).port
    page.goto(f"{address}?section=inspect")
    shows(page, step=11)
    assert not page.get_by_role("alert").is_visible()
    done = started.interrupt()
    assert done.returncode == 0
    assert "Traceback" not in done.stdout + done.stderr
    page.get_by_role("alert").get_by_role("button", name="reload").wait_for()
