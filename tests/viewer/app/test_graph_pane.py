"""The graph within the page: its height, its folding, and the comparison of two nodes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from comgra_decl.query import open_run
from comgra_decl.viewer.dashboard import Dashboard
from comgra_decl.viewer.model.catalogue import Catalogue
from comgra_decl.viewer.model.graph import graph_of, info_of
from comgra_decl.viewer.model.numbers import number
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.selection import Selection
from comgra_decl.viewer.model.unusual import UNUSUAL, beginning, paint_of
from comgra_decl.viewer.state import SECTIONS
from tests.support.fake_run import FakeRun


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of a transformer with eight blocks."""
    run = FakeRun(tmp_path_factory.mktemp("deep") / "runs" / "group" / "deep", layers=8)
    run.write(3)
    run.close()
    return run.path.parents[1]


@pytest.fixture
def dashboard(deep: Path) -> Dashboard:
    return Dashboard(Catalogue(deep), query="?section=inspect")


def boxes(dashboard: Dashboard) -> set[str]:
    return {box["id"] for box in dashboard.screen.graph.view.scene["boxes"]}


def is_shown(dashboard: Dashboard) -> bool:
    shown: bool = dashboard.screen.graph.view.shown
    return shown


def compared(dashboard: Dashboard) -> tuple[str, bool]:
    """The second node, and whether the comparison is on the page."""
    return dashboard.state.between, bool(dashboard.screen.between.panel.visible)


def send(dashboard: Dashboard, **message: Any) -> None:
    """Sends a message as the browser does."""
    dashboard.screen.graph.view._handle_msg(message)


def test_the_graph_folds_by_the_room_that_it_has(dashboard: Dashboard) -> None:
    send(dashboard, room=[700, 100])
    few = boxes(dashboard)
    send(dashboard, room=[3400, 700])
    many = boxes(dashboard)
    assert {f"blocks.{i}" for i in range(8)} <= many
    assert len(few) < len(many)
    assert dashboard.state.expanded is None  # nothing in the address: it depends on the window
    send(dashboard, room=[700, 100])
    assert boxes(dashboard) == few


def test_what_the_user_expanded_stays_whatever_the_room(dashboard: Dashboard) -> None:
    dashboard.change(expanded=frozenset({"blocks", "blocks.3"}))
    shown = {box for box in boxes(dashboard) if box.startswith("blocks.3.")}
    assert shown
    send(dashboard, room=[600, 100])
    assert shown <= boxes(dashboard)


def test_a_step_sends_nothing_to_the_graph_but_colours(dashboard: Dashboard) -> None:
    view = dashboard.screen.graph.view
    sent: list[str] = []
    view.param.watch(lambda *events: sent.extend(e.name for e in events), list(view.param))
    dashboard.change(step=1)
    assert sent == []
    dashboard.change(colour="forward")
    assert set(sent) == {"heat", "painted", "legend"}
    sent.clear()
    dashboard.change(step=0)
    assert set(sent) <= {"heat", "painted", "legend"}


def test_sections_about_the_whole_run_have_no_graph_until_it_is_asked_for(
    dashboard: Dashboard,
) -> None:
    panel = dashboard.screen.graph.panel
    for section in ("kpis", "notes", "run", "modules"):
        dashboard.change(section=section)
        assert not is_shown(dashboard)
        assert panel.styles["height"] == "42px"
    send(dashboard, shown=True)
    assert is_shown(dashboard)
    for section in set(SECTIONS) & set(dashboard.screen.sections):
        dashboard.change(section=section)
        assert is_shown(dashboard)
    send(dashboard, shown=False)
    dashboard.change(section="inspect")
    assert not is_shown(dashboard)
    send(dashboard, height=400)
    assert is_shown(dashboard)
    assert panel.styles["height"] == "400px"
    assert "graph=400" in dashboard.screen.url.query or not dashboard.screen.ready


@pytest.mark.parametrize("value", [[1], [1, 2, 3], ["a", 2], [-1, 2], [True, 2], None, [1e9, 3]])
def test_a_size_that_no_page_has_is_ignored(dashboard: Dashboard, value: object) -> None:
    before = boxes(dashboard)
    send(dashboard, room=value)
    send(dashboard, height=value)
    send(dashboard, shown=value)
    assert boxes(dashboard) == before
    assert dashboard.state.graph == ""


def test_two_nodes_are_compared_in_the_order_of_execution(dashboard: Dashboard) -> None:
    run = open_run(dashboard.catalogue.open("group/deep").run.path)
    send(dashboard, room=[3400, 700])
    here, there = "blocks.2.norm1", "blocks.4.norm2"
    dashboard.change(node=here, step=1)
    for end, source, sink in ((there, here, there), ("embed", "embed", here)):
        dashboard.change(between=end)
        html = dashboard.screen.between.view.html
        found = run.between(source, sink, step=1)
        assert f'data-between="{source} {sink}"' in html
        assert html.count('class="share"') == len(found.paths)
        assert found.count > 1
    path = dashboard.screen.graph.view.path
    assert path[0] == "embed"
    assert here in {m for b in dashboard.screen.graph.view.scene["boxes"] if b["id"] == path[-1]
                    for m in b["members"]}  # fmt: skip
    dashboard.change(expanded=frozenset({"blocks", "blocks.0", "blocks.0.attn"}))
    ways = set()
    for route in range(3):
        dashboard.change(route=route)
        ways |= {box for box in dashboard.screen.graph.view.path if box.startswith("blocks.0.attn")}
    assert len(ways) > 2  # query, key and value lead to the same output


def test_another_selection_ends_the_comparison(dashboard: Dashboard) -> None:
    send(dashboard, room=[3400, 700])
    dashboard.change(node="blocks.2", expanded=frozenset({"blocks"}))
    send(dashboard, between="blocks.4")
    assert compared(dashboard) == ("blocks.4", True)
    send(dashboard, select="blocks.5")
    assert compared(dashboard) == ("", False)
    assert dashboard.screen.graph.view.path == []


def test_nonsense_in_the_address_compares_nothing(deep: Path) -> None:
    page = Dashboard(Catalogue(deep), query="?node=embed&between=<b>nobody</b>&graph=enormous")
    assert not page.screen.between.panel.visible
    assert page.state.graph == ""


# ---- unusual samples


def test_the_graph_shows_where_a_sample_is_unusual(dashboard: Dashboard) -> None:
    dashboard.change(step=1, colour=UNUSUAL, batch="1", statistic="std", node="embed")
    view = dashboard.screen.graph.view
    run = open_run(dashboard.catalogue.open("group/deep").run.path)
    away = run.unusual(1, "std").xs(("embed", "output", 0, "forward"))
    text = (view.heat or {})["embed"]["text"].replace("\u2212", "-")
    assert float(text) == pytest.approx(away[1], rel=6e-3)
    assert (view.legend or {})["title"].startswith("sample 1 \u00b7 std")
    dashboard.change(batch="mean")
    assert (view.heat or {})["embed"]["text"].endswith(f"#{away.abs().idxmax()}")
    assert (view.legend or {})["title"].startswith("most unusual sample")


def test_an_outlier_begins_at_the_first_node_where_it_is_far_away(deep: Path) -> None:
    view = RunView(open_run(deep / "group" / "deep"))
    at = Selection(step=1, statistic="std", batch="0", node="embed", role="output")
    graph = graph_of(view, at)
    names = [node.name for node in sorted(graph.nodes, key=lambda node: node.order)]
    far = {names[3]: (0, 4.5), names[6]: (0, -9.0), names[1]: (0, 3.9)}
    assert beginning(graph, far) == names[3]
    assert beginning(graph, {}) == ""
    paint, legend = paint_of(view, at, graph, [("nothing", ())])
    assert paint == {}
    assert any(text in legend["title"] for text in ("nowhere", "outlier from", "too small"))


def test_a_recorded_tensor_without_samples_to_compare_is_not_shown_as_missing(
    dashboard: Dashboard,
) -> None:
    dashboard.change(step=1, colour=UNUSUAL, batch="1", statistic="std", node="embed")
    heat = dashboard.screen.graph.view.heat or {}
    assert heat["loss"]["text"] == "\u2013"
    assert heat["loss"]["fill"]
    assert "nothing to compare" in (dashboard.screen.graph.view.legend or {})["help"]


def test_the_line_below_the_graph_counts_the_edges_that_are_drawn(dashboard: Dashboard) -> None:
    dashboard.change(node="head", step=1)
    view = dashboard.catalogue.open(dashboard.state.run)
    graph = graph_of(view, dashboard.state.selection)
    kinds = {node.name: node.kind for node in graph.nodes}
    sources = [source for source, sink, _ in graph.edges if sink == "head"]
    reads = [name for name in sources if kinds[name] not in ("parameter", "buffer")]
    assert f"{len(reads)} in" in info_of(view, dashboard.state.selection, graph)


# ---- in a browser


@pytest.mark.slow
@pytest.mark.browser
def test_the_height_of_the_graph_is_kept_in_the_address(viewer: Callable[..., Any]) -> None:
    page = viewer("?run=group/small&section=inspect&node=embed&graph=330")
    graph = page.locator(".graph")
    assert graph.bounding_box()["height"] == pytest.approx(330, abs=2)
    grip = page.locator(".grip").bounding_box()
    page.mouse.move(grip["x"] + 200, grip["y"] + 3)
    page.mouse.down()
    page.mouse.move(grip["x"] + 200, grip["y"] - 57, steps=3)
    page.mouse.up()
    page.wait_for_function("() => /graph=2[67]\\d/.test(location.search)")
    assert graph.bounding_box()["height"] == pytest.approx(270, abs=8)
    page.get_by_role("button", name="Hide the graph").click()
    page.wait_for_function("() => location.search.includes('graph=hidden')")
    page.locator(".stage").wait_for(state="hidden")
    assert graph.bounding_box()["height"] < 50


@pytest.mark.browser
def test_shift_click_shows_gains_and_paths(viewer: Callable[..., Any], view: RunView) -> None:
    page = viewer("?run=group/small&section=inspect&node=embed&step=4")
    page.locator('.node[data-id="head"]').click(modifiers=["Shift"])
    panel = page.locator(".between")
    panel.wait_for()
    found = view.run.between("embed", "head", step=4)
    gain = number(found.signal, digits=3)
    assert panel.locator('[data-fact="signal"]').inner_text() == f"signal \u00d7{gain}"
    assert panel.locator("li[data-send]").count() == len(found.paths)
    page.wait_for_function("() => location.search.includes('between=head')")
    page.locator(".node.traced").first.wait_for()
    panel.get_by_role("button", name="Close the comparison").click()
    panel.wait_for(state="hidden")
    assert page.locator(".traced").count() == 0


TOOLTIP = """() => {
  const tip = [...document.querySelectorAll("*")].find((e) => e.matches(".bk-Tooltip"));
  if (!tip) return null;
  const style = getComputedStyle(tip);
  return [style.backgroundColor, style.color];
}"""


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_tooltips_have_the_colours_of_the_theme(viewer: Callable[..., Any], scheme: str) -> None:
    page = viewer(
        "?run=group/small&section=overview&node=embed&step=4", ".bk-Figure >> visible=true",
        color_scheme=scheme,
    )  # fmt: skip
    box = page.locator(".bk-Figure >> visible=true").first.bounding_box()
    for x in (0.5, 0.52, 0.54):
        page.mouse.move(box["x"] + box["width"] * x, box["y"] + box["height"] * 0.5)
    page.wait_for_function(TOOLTIP)
    paper, ink = (
        sum(map(float, colour[4:-1].split(",")[:3])) / 3 for colour in page.evaluate(TOOLTIP)
    )
    assert (paper < 80 and ink > 160) if scheme == "dark" else (paper > 200 and ink < 100)
