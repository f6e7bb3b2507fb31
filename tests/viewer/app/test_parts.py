"""Pictures are sent in parts, once each; a step that the browser has is drawn without Python."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from comgra_decl.viewer.components import parts as parts_module
from comgra_decl.viewer.components.parts import Part, PartsView, joined
from comgra_decl.viewer.dashboard import Dashboard
from comgra_decl.viewer.model.catalogue import Catalogue
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.panes.pictures import PicturesPane
from tests.viewer.app.test_probe_pictures import SPEC, shown, trained


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> RunView:
    return trained(tmp_path_factory.mktemp("runs"), SPEC)


def put(view: PartsView, *parts: Part, step: int = 0, frame: str = "f") -> dict[str, Any]:
    view.show_page(parts, frame=frame, step=step, tokens=[], grids={}, picks={})
    sent: dict[str, Any] = json.loads(view.page)
    return sent


def test_cards_that_follow_each_other_share_a_box() -> None:
    page = [Part("a", "<p>1</p>"), Part("b", "<p>2</p>", True), Part("c", "<p>3</p>", True)]
    assert joined(page) == '<p>1</p><div class="cards"><p>2</p><p>3</p></div>'


def test_a_part_is_sent_once() -> None:
    view = PartsView()
    first, second, third = Part("a", "one"), Part("b", "two"), Part("b", "three")
    assert put(view, first, second)["fresh"] == {first.name: "one", second.name: "two"}
    assert put(view, first, third, step=1)["fresh"] == {third.name: "three"}
    back = put(view, first, second, step=0)
    assert back["fresh"] == {}
    assert [name for _, name, _ in back["parts"]] == [first.name, second.name]
    assert view.html == "onetwo"


def test_the_same_text_in_two_places_is_two_parts() -> None:
    assert Part("a", "same").name != Part("b", "same").name
    assert Part("a", "same").name == Part("a", "same").name


def test_what_is_sent_ahead_is_not_sent_again() -> None:
    view = PartsView()
    put(view, Part("a", "one"))
    ahead = Part("a", "two")
    view.send_ahead([ahead], frame="f", step=1)
    assert view.ahead == ""  # the browser is not ready
    view.ready = True
    view.send_ahead([ahead], frame="f", step=1)
    assert view.has([ahead])
    assert json.loads(view.ahead)["fresh"] == {ahead.name: "two"}
    assert put(view, ahead, step=1)["fresh"] == {}


def test_the_browser_forgets_the_oldest_parts_but_none_of_those_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parts_module, "_KEPT", 10)
    view = PartsView()
    old, new, large = Part("a", "x" * 6), Part("a", "y" * 6), Part("a", "z" * 20)
    assert put(view, old)["gone"] == []
    assert put(view, new)["gone"] == [old.name]
    assert put(view, large)["gone"] == [new.name]
    assert put(view, large)["gone"] == []  # larger than all that is kept, but shown
    assert put(view, old)["fresh"] == {old.name: "x" * 6}


def test_a_browser_without_the_parts_receives_all_of_them() -> None:
    view = PartsView(ready=True)
    put(view, Part("a", "one"), Part("b", "two"))
    put(view, Part("a", "one"), Part("b", "two"), step=1)
    view._handle_msg({"send": "missing"})
    sent = json.loads(view.page)
    assert sorted(sent["fresh"].values()) == ["one", "two"]
    assert sent["step"] == 1


def test_a_saved_page_contains_the_whole_section(probed: RunView, tmp_path: Path) -> None:
    pane = PicturesPane(lambda **_: None)
    for step in (4, 2, 4):
        pane.refresh(shown(probed, node="0", step=step))
    assert json.loads(pane.view.page)["fresh"] == {}
    pane.panel.save(tmp_path / "saved.html")
    saved = (tmp_path / "saved.html").read_text()
    assert saved.count("data:image/png;base64,") >= 10


def test_a_step_sends_only_the_cards_that_change(probed: RunView) -> None:
    pane = PicturesPane(lambda **_: None)
    pane.refresh(shown(probed, node="0", step=4))
    first = json.loads(pane.view.page)
    pane.refresh(shown(probed, node="0", step=2))
    second = json.loads(pane.view.page)
    before, after = ({name for _, name, _ in page["parts"]} for page in (first, second))
    assert {*second["fresh"]} == after - before
    assert after & before
    assert first["frame"] == second["frame"]
    pane.refresh(shown(probed, node="1", step=2))
    assert json.loads(pane.view.page)["frame"] != first["frame"]


def test_a_step_prepared_ahead_is_sent_ahead_and_asks_the_run_nothing(
    probed: RunView, monkeypatch: pytest.MonkeyPatch
) -> None:
    pane = PicturesPane(lambda **_: None)
    pane.view.ready = True
    pane.refresh(shown(probed, node="0", step=4))
    for work in pane.ahead(shown(probed, node="0", step=2)):
        work()
    assert json.loads(pane.view.ahead)["step"] == 2
    assert list(pane.ahead(shown(probed, node="0", step=2))) == []
    monkeypatch.setattr("comgra_decl.viewer.panes.pictures.album", None)  # cannot be called
    pane.refresh(shown(probed, node="0", step=2))
    sent = json.loads(pane.view.page)
    assert (sent["step"], sent["fresh"]) == (2, {})
    assert "at step 2" in pane.view.html


QUERY = "?section=pictures&type=probe:eyes&node=0&step=4"
STEP = """step => window.dispatchEvent(new CustomEvent("comgra-step",
  { detail: { document: Bokeh.documents[0], step } }))"""
KEEP = """() => {
  const find = (root) => [...root.querySelectorAll("*")].flatMap((e) => [e,
    ...(e.shadowRoot ? find(e.shadowRoot) : [])]);
  return find(document).filter((e) => e.matches?.(".card")).map((e) => (e.marked = true)).length;
}"""
MARKED = KEEP.replace("map((e) => (e.marked = true))", "filter((e) => e.marked)")


@pytest.mark.browser
def test_a_step_that_the_browser_has_is_drawn_without_python(
    probed: RunView, serve: Callable[..., str], page: Any
) -> None:
    from playwright.sync_api import expect

    panel: Any = pytest.importorskip("panel")
    panes: list[PicturesPane] = []

    def make() -> Any:
        pane = PicturesPane(lambda **_: None)
        panes.append(pane)
        pane.refresh(shown(probed, node="0", step=4))
        panel.state.onload(lambda: pane.view.param.update(ready=True))
        return pane.panel

    page.goto(serve(make))
    page.locator(".html:not(.unanswered)").wait_for()
    heading = page.locator("h2[data-step]")
    expect(heading).to_have_attribute("data-step", "4")
    (pane,) = panes
    for work in pane.ahead(shown(probed, node="0", step=2)):
        work()
    page.wait_for_function(
        "() => [...Bokeh.documents[0]._all_models.values()].some((m) => m.data?.ahead)"
    )
    cards = page.evaluate(KEEP)
    image = page.locator(".gallery + * img, .card img").first
    before = image.get_attribute("src")
    page.evaluate(STEP, 2)  # Python is told nothing
    expect(heading).to_have_attribute("data-step", "2")
    assert json.loads(pane.view.page)["step"] == 4
    assert image.get_attribute("src") != before
    assert 0 < page.evaluate(MARKED) < cards  # cards that are the same were not replaced
    page.evaluate(STEP, 0)  # the browser does not have it, so Python's page stays or comes
    page.evaluate(STEP, 4)
    expect(heading).to_have_attribute("data-step", "4")
    expect(image).to_have_attribute("src", before)


BELOW = KEEP.replace(
    "map((e) => (e.marked = true)).length",
    "filter((e) => e.getBoundingClientRect().top > window.innerHeight + 200)",
)
STEP_AND_LOOK = f"""step => {{
  const below = ({BELOW})();
  ({STEP})(step);
  window.below = below;
  return [below.length, below.every((card) => card.isConnected)];
}}"""


@pytest.mark.browser
def test_cards_out_of_view_are_drawn_after_those_in_view(
    probed: RunView, serve: Callable[..., str], page: Any
) -> None:
    from playwright.sync_api import expect

    panel: Any = pytest.importorskip("panel")
    panes: list[PicturesPane] = []

    def make() -> Any:
        pane = PicturesPane(lambda **_: None)
        panes.append(pane)
        pane.refresh(shown(probed, node="0", step=4))
        panel.state.onload(lambda: pane.view.param.update(ready=True))
        return pane.panel

    page.set_viewport_size({"width": 700, "height": 400})
    page.goto(serve(make))
    page.locator(".html:not(.unanswered)").wait_for()
    heading = page.locator("h2[data-step]")
    expect(heading).to_have_attribute("data-step", "4")
    panes[0]._send_ahead(shown(probed, node="0", step=2))
    page.wait_for_function(
        "() => [...Bokeh.documents[0]._all_models.values()].some((m) => m.data?.ahead)"
    )
    cards, still_there = page.evaluate(STEP_AND_LOOK, 2)
    assert cards > 1
    assert still_there
    expect(heading).to_have_attribute("data-step", "2")
    page.wait_for_function("() => window.below.some((card) => !card.isConnected)")


@pytest.mark.browser
def test_an_answer_about_an_earlier_step_does_not_replace_a_later_one(
    probed: RunView, serve: Callable[..., str], page: Any
) -> None:
    from playwright.sync_api import expect

    panel: Any = pytest.importorskip("panel")
    panes: list[PicturesPane] = []

    def make() -> Any:
        pane = PicturesPane(lambda **_: None)
        panes.append(pane)
        for step in (0, 2, 4):
            pane.refresh(shown(probed, node="0", step=step))
        panel.state.onload(lambda: pane.view.param.update(ready=True))
        return pane.panel

    page.goto(serve(make))
    page.locator(".html:not(.unanswered)").wait_for()
    (pane,) = panes
    heading = page.locator("h2[data-step]")
    pane._send_ahead(shown(probed, node="0", step=0))
    turn = json.loads(pane.view.ahead)["turn"]
    page.wait_for_function(
        """turn => [...Bokeh.documents[0]._all_models.values()]
          .some((m) => m.data?.ahead && JSON.parse(m.data.ahead).turn === turn)""",
        arg=turn,
    )
    page.evaluate(STEP, 0)
    expect(heading).to_have_attribute("data-step", "0")
    pane.refresh(shown(probed, node="0", step=2))  # the answer about a step in between
    turn = json.loads(pane.view.page)["turn"]
    page.wait_for_function(
        """turn => [...Bokeh.documents[0]._all_models.values()]
          .some((m) => m.data?.page && JSON.parse(m.data.page).turn === turn)""",
        arg=turn,
    )
    expect(heading).to_have_attribute("data-step", "0")
    pane.refresh(shown(probed, node="1", step=2))  # another node is no answer about a step
    expect(heading).to_have_attribute("data-step", "2")


@pytest.mark.browser
@pytest.mark.slow
def test_of_steps_pressed_quickly_the_last_is_drawn(
    probed: RunView, serve: Callable[..., str], page: Any
) -> None:
    from playwright.sync_api import expect

    root = Path(str(probed.run.path)).parents[1]
    panel: Any = pytest.importorskip("panel")
    dashboards: list[Dashboard] = []

    def make() -> Any:
        dashboard = Dashboard(Catalogue(root), query=QUERY)
        dashboards.append(dashboard)
        panel.state.onload(dashboard.screen.start)
        return dashboard.screen.main

    page.goto(serve(make) + QUERY)
    page.locator("h2[data-step]").wait_for()
    page.wait_for_function("!!(window.Bokeh && Bokeh.documents[0]?.is_idle)")
    heading, bar = page.locator("h2[data-step]"), page.locator(".track")
    for keys, last in ((",,", 0), ("..,.", 4), (",.,.,.,", 2)):
        for key in keys:
            page.keyboard.press(key)
        expect(bar).to_have_attribute("aria-valuenow", str(last))
        expect(heading).to_have_attribute("data-step", str(last))
        page.wait_for_function("() => Bokeh.documents[0].is_idle")
        expect(heading).to_have_attribute("data-step", str(last))
    assert dashboards[0].state.step == 2
