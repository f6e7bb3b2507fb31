"""The graph in a real browser: drawing, external input, and the file it downloads as."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from comgra_decl.viewer.graph.layout import GraphNode, Room, Scene, build_scene
from comgra_decl.viewer.graph.places import MAX_WIDTH
from comgra_decl.viewer.graph.routes import routes
from tests.support.shortened import shortened
from tests.viewer.components.graphs import (
    DEEP,
    Show,
    expect,
    graph,
    has,
    in_view,
    node,
    scene_of,
)
from tests.viewer.graph.networks import transformer

# ---- painting


def test_heat_paints_boxes_and_says_what_is_missing_or_not_finite(show: Show, page: Any) -> None:
    heat = {
        "embed": {"fill": "#440154", "text": "0.25"},
        "blocks.0": {"fill": "#fde725", "text": "nan", "hatched": True},
        "blocks.1": {"fill": "url(http://example.com/x)", "text": "1"},
    }
    legend = {"title": "grad std", "low": "0.1", "high": "9", "colors": ["#440154", "#fde725"]}
    shown = show(lambda: graph(heat=heat, legend=legend))
    look = "el => { const s = getComputedStyle(el); return [s.fill, s.display] }"
    assert node(page, "embed").locator(".shape").evaluate(look)[0] == "rgb(68, 1, 84)"
    assert node(page, "embed").locator(".label").evaluate(look)[0] == "rgb(255, 255, 255)"
    assert node(page, "blocks.0").locator(".label").evaluate(look)[0] == "rgb(16, 16, 20)"
    expect(node(page, "embed").locator(".value")).to_have_text("0.25")
    expect(node(page, "blocks.0").locator(".hatch")).to_have_count(1)
    expect(page.locator(".hatch")).to_have_count(1)
    has(page, "blocks.2", "missing")
    has(page, "blocks.1", "missing")  # what is no plain colour is not painted
    for text in ("grad std", "0.1", "9", "non-finite", "not recorded"):
        expect(page.locator(".legend")).to_contain_text(text)
    shown.set(heat=None, legend=None)
    expect(node(page, "embed").locator(".value")).to_have_text("")
    expect(page.locator(".hatch, .heated, .missing")).to_have_count(0)
    assert node(page, "embed").locator(".shape").evaluate(look)[0] != "rgb(68, 1, 84)"
    expect(page.locator(".legend")).to_contain_text("computed")


def test_a_number_stays_inside_its_box_and_beside_its_count(show: Show, page: Any) -> None:
    scene = scene_of()
    heat = {box.id: {"fill": "#440154", "text": "\u22121.234e\u221205"} for box in scene.boxes}
    show(lambda: graph(scene, heat=heat, legend=LEGEND))
    expect(page.locator(".badge").first).to_be_visible()
    expect(page.locator(".value")).to_have_count(len(scene.boxes))
    for shape, value, badge in page.locator(".node").evaluate_all(PLACES):
        assert value["left"] > shape["left"]
        assert value["right"] < shape["right"]
        if badge:
            assert badge["bottom"] - 3 < value["top"] or value["right"] < badge["left"]


PLACES = """(nodes) => nodes.map((node) => [".shape", ".value", ".badge"].map((part) =>
  node.querySelector(part)?.getBoundingClientRect().toJSON()))"""


def test_painted_edges_say_their_number_under_the_pointer(show: Show, page: Any) -> None:
    flow = [
        {"edge": ["embed", "blocks.0"], "width": 2, "color": "#2463ad", "text": "effect -0.1"},
        {"edge": ["blocks.0", "blocks.1"], "width": 9, "color": "#d1561f", "text": "effect 0.5"},
        {"edge": ["blocks.1", "blocks.2"], "width": 3, "color": "url(x)", "text": "a\x1bb"},
        {"edge": ["blocks.1", "nowhere"], "width": 3, "color": "#000000", "text": "no box"},
    ]
    legend = {"title": "effects", "low": "-0.5", "high": "0.5", "colors": ["#2463ad", "#d1561f"]}
    shown = show(lambda: graph(flow=flow, legend=legend))
    lines = page.locator(".flow path")
    expect(lines).to_have_count(3)
    look = "els => els.map((e) => [getComputedStyle(e).stroke, getComputedStyle(e).strokeWidth])"
    assert lines.evaluate_all(look) == [
        ["rgb(36, 99, 173)", "2px"],
        ["rgb(209, 86, 31)", "9px"],
        ["rgb(136, 136, 136)", "3px"],
    ]
    for text in ("effects", "-0.5", "0.5"):
        expect(page.locator(".legend")).to_contain_text(text)
    middle = """path => {
      const { x, y } = path.getPointAtLength(path.getTotalLength() / 2);
      const at = new DOMPoint(x, y).matrixTransform(path.getScreenCTM());
      return [at.x, at.y];
    }"""
    page.mouse.move(*lines.nth(1).evaluate(middle))
    expect(page.locator(".info")).to_have_text("effect 0.5")
    expect(lines.nth(1).locator("title")).to_have_text("effect 0.5")
    page.mouse.move(0, 0)
    expect(page.locator(".info")).not_to_contain_text("effect")
    shown.set(flow=[], legend=None)
    expect(lines).to_have_count(0)
    expect(page.locator(".legend")).to_contain_text("computed")


def test_painted_edges_keep_their_colours_beside_the_selected_node(show: Show, page: Any) -> None:
    flow = [{"edge": ["embed", "blocks.0"], "width": 4, "color": "#d1561f", "text": "effect 0.5"}]
    shown = show(lambda: graph(flow=flow, selected="blocks.0"))
    near = page.locator(".near path")
    strokes = "els => [...new Set(els.map((e) => getComputedStyle(e).stroke))]"
    expect(near).not_to_have_count(0)
    assert len(near.evaluate_all(strokes)) == 1  # neither of the two colours
    on_top = "e => [...e.closest('svg').querySelectorAll('.near, .flow')].at(-1).contains(e)"
    assert page.locator(".flow path").evaluate(on_top)
    shown.set(flow=[])
    expect(page.locator(".flow path")).to_have_count(0)
    assert len(near.evaluate_all(strokes)) == 2


LARGE = scene_of(*(f"blocks.{i}" for i in range(60)), "blocks", network=transformer(60))
LEGEND = {"title": "grad std", "low": "0", "high": "1", "colors": ["#440154", "#fde725"]}


def test_a_large_graph_draws_and_colours_only_what_is_on_the_stage(show: Show, page: Any) -> None:
    shown = show(lambda: graph(LARGE))
    shown.set(heat={box.id: {"fill": "#440154"} for box in LARGE.boxes}, legend=LEGEND)
    expect(page.locator(".legend")).to_contain_text("grad std")
    boxes = page.locator(".node").evaluate_all(COLOURED)
    assert 0 < len(boxes) < len(LARGE.boxes) / 2
    assert len(LARGE.boxes) > 200
    assert {tuple(box) for box in boxes} <= {(True, True), (False, False)}
    assert [True, True] in boxes
    shown.set(heat=None, legend=None)
    expect(page.locator(".legend")).to_contain_text("computed")
    page.locator(".tools button", has_text="Fit").click()
    page.wait_for_function(
        "() => [...document.querySelectorAll('*')].flatMap((e) => e.shadowRoot ?? [])"
        ".flatMap((root) => [...root.querySelectorAll('.node')]).every((n) => !n.style.display)"
    )
    expect(page.locator(".node.heated")).to_have_count(0)
    expect(page.locator(".node")).to_have_count(len(LARGE.boxes))


COLOURED = """(nodes) => nodes.map((node) =>
  [node.style.display !== "none", node.classList.contains("heated")])"""
"""Whether each box is drawn, and whether it is coloured."""


def test_keys_reach_what_is_outside_the_stage_of_a_large_graph(show: Show, page: Any) -> None:
    show(lambda: graph(LARGE, selected="input"))
    node(page, "input").focus()
    for _ in range(12):
        page.keyboard.press("ArrowRight")
    reached = page.locator(".node.selected")
    expect(reached).to_be_focused()
    assert in_view(page, reached)
    assert reached.get_attribute("data-id") not in ("input", None)


def test_the_file_of_a_large_graph_contains_what_is_outside_the_stage(
    show: Show, page: Any
) -> None:
    show(lambda: graph(LARGE))
    page.get_by_role("button", name="Save the graph").click()
    with page.expect_download() as event:
        page.get_by_role("menuitem", name="SVG").click()
    drawn = [*ET.fromstring(event.value.path().read_text()).iter()]
    assert len([element for element in drawn if element.get("data-id")]) == len(LARGE.boxes)
    assert page.locator(".node").evaluate_all("nodes => nodes.some((n) => n.style.display)")


def test_the_legend_names_the_kinds_on_screen(show: Show, page: Any) -> None:
    show(lambda: graph(scene_of("embed")))
    expect(page.locator(".legend .key")).to_have_text(
        ["input", "parameter", "computed", "target", "loss"]
    )


def test_missing_dependencies_are_dotted(show: Show, page: Any) -> None:
    nodes = [GraphNode("x", "input", 0), GraphNode("y", "computed", 1)]
    show(lambda: graph(build_scene(nodes, [], expanded=frozenset())))
    expect(node(page, "x").locator(".open")).to_have_count(1)  # feeds nothing
    expect(node(page, "y").locator(".open")).to_have_count(2)  # and is fed by nothing


NAMES = [
    "embed",
    "memory",
    "RunningSum",
    "mmmmmm",
    "WWWW",
    "pos_embed",
    "illicit",
    "\u5c42\u5c42\u5c42\u5c42",
]
FONTS = ["DejaVu Sans", "Verdana", "Liberation Sans", "sans-serif", "serif"]


@pytest.mark.parametrize("font", shortened(FONTS, tried=0))
def test_a_name_that_has_room_is_written_whole_in_every_font(
    show: Show, open_page: Callable[[], Any], font: str
) -> None:
    page = open_page()
    nodes = [GraphNode(name, "computed", i) for i, name in enumerate(NAMES)]
    nodes += [GraphNode(f"{name}.inner", "computed", 50) for name in NAMES]  # folded: with a number
    page.add_init_script(f"""document.addEventListener("DOMContentLoaded", () =>
        document.documentElement.style.setProperty("--panel-font-family", `{font}`))""")
    show(lambda: graph(build_scene(nodes, [], expanded=frozenset())), on=page)
    boxes = page.locator(".node")
    expect(boxes).to_have_count(len(NAMES))
    assert sorted(boxes.locator(".label").all_text_contents()) == sorted(NAMES)
    inside = """nodes => nodes.every(node => {
        const [box, text] = [".shape", ".label"].map(x => node.querySelector(x).getBBox());
        return text.x >= box.x && text.x + text.width <= box.x + box.width;
    })"""
    assert boxes.evaluate_all(inside)


@pytest.mark.slow
def test_a_name_that_is_a_little_too_wide_is_squeezed_and_not_cut(
    show: Show, open_page: Callable[[], Any]
) -> None:
    page = open_page()
    letter = page.evaluate("""() => {
        const measure = document.createElement("canvas").getContext("2d");
        measure.font = "500 12px monospace";
        return measure.measureText("a").width;
    }""")
    name = "a" * round(1.1 * (MAX_WIDTH - 18) / letter)
    nodes = [GraphNode(name, "computed", 0), GraphNode(name * 2, "computed", 1)]
    page.add_init_script("""document.addEventListener("DOMContentLoaded", () =>
        document.documentElement.style.setProperty("--panel-font-family", "monospace"))""")
    show(lambda: graph(build_scene(nodes, [], expanded=frozenset())), on=page)
    expect(node(page, name).locator(".label")).to_have_text(name)
    drawn = node(page, name).locator(".label").evaluate("text => text.getBBox().width")
    assert drawn <= MAX_WIDTH - 17
    expect(node(page, name * 2).locator(".label")).to_have_text(re.compile("^a+\u2026a+$"))


# ---- external input

HOSTILE = [
    "<script>window.pwned = 1</script>",
    "<img src=x onerror='window.pwned = 1'>",
    "\"]'}){{constructor}}",
    "constructor",
    "__proto__",
    "a b\u2028c \u202e d",
]


def test_names_from_a_run_are_text_and_nothing_else(show: Show, page: Any) -> None:
    nodes = [GraphNode(name, "computed", i, name) for i, name in enumerate(HOSTILE)]
    nodes += [GraphNode(f"{name}.weight", "parameter", 50 + i) for i, name in enumerate(HOSTILE)]
    nodes.append(GraphNode("odd", "kind<script>", 99))
    edges = [(a.name, b.name, True) for a, b in pairwise(nodes)]
    scene = build_scene(nodes, edges, expanded=frozenset(HOSTILE))
    heat = {box.id: {"fill": "#123456", "text": HOSTILE[0]} for box in scene.boxes}
    legend = {"title": HOSTILE[0], "low": HOSTILE[1], "high": "", "colors": [HOSTILE[1]]}
    shown = show(lambda: graph(scene, heat=heat, legend=legend, info=HOSTILE[1]))
    expect(page.locator(".node")).to_have_count(len(scene.boxes))
    drawn = page.locator(".node").evaluate_all("nodes => nodes.map(n => n.dataset.id)")
    assert sorted(drawn) == sorted(box.id for box in scene.boxes)
    for i, name in enumerate(box.id for box in scene.boxes):
        page.locator(".node").nth(i).dispatch_event("click")
        shown.heard({"select": name})
    page.locator(".find input").fill("<")
    expect(page.locator(".option").first).to_contain_text("<")
    assert page.evaluate("window.pwned === undefined")
    assert page.locator(".graph script, .graph img").count() == 0


def test_messages_that_name_nothing_on_screen_are_ignored() -> None:
    view = graph()
    heard: list[dict[str, Any]] = []
    view.on_message(heard.append)
    for message in [
        {"select": "nobody"},
        {"select": ["embed"]},
        {"select": "embed", "expand": "embed"},
        {"expand": "loss"},  # not folded
        {"collapse": "embed"},  # not open
        {"search": ""},
        {"search": "x" * 301},
        {"delete": "embed"},
        {},
        "embed",
        None,
    ]:
        view._handle_msg(message)
    assert heard == []
    assert view.ack == 11  # each is answered, otherwise the browser would wait
    view._handle_msg({"expand": "embed"})
    view._handle_msg({"collapse": "blocks"})
    assert heard == [{"expand": "embed"}, {"collapse": "blocks"}]


def test_a_failing_callback_still_answers_the_browser() -> None:
    view = graph()

    def fail(message: dict[str, Any]) -> None:
        raise RuntimeError(message)

    view.on_message(fail)
    with pytest.raises(RuntimeError):
        view._handle_msg({"select": "embed"})
    assert view.ack == 1


def test_the_graph_downloads_as_a_file_that_stands_alone(show: Show, page: Any) -> None:
    show(lambda: graph(heat={"embed": {"fill": "#440154", "text": "0.25", "hatched": True}}))
    node(page, "blocks.1").click()
    page.get_by_role("button", name="Save the graph").click()
    with page.expect_download() as event:
        page.get_by_role("menuitem", name="SVG").click()
    text = event.value.path().read_text()
    root = ET.fromstring(text)
    tag = "{http://www.w3.org/2000/svg}"
    labels = {element.text for element in root.iter(f"{tag}text")}
    assert {"input", "embed", "blocks.1", "head", "loss", "0.25"} <= labels
    assert all("class" not in element.attrib for element in root.iter())
    assert not re.search(r"var\(|color-mix|color\(|href|https?://(?!www\.w3\.org)", text)
    fills = {element.get("fill") for element in root.iter(f"{tag}rect")}
    assert "rgb(68, 1, 84)" in fills
    assert event.value.suggested_filename == "graph.svg"


ON_THE_WAY = """([d, count]) => {
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  path.setAttribute("d", d);
  const length = path.getTotalLength();
  return [...Array(count + 1).keys()].map((i) => {
    const { x, y } = path.getPointAtLength((i / count) * length);
    return [x, y];
  });
}"""
"""Returns evenly spaced points of a path."""


def away(points: np.ndarray[Any, Any], line: np.ndarray[Any, Any]) -> float:
    """Return the largest distance of points from a polyline."""
    a, b = line[:-1], line[1:]
    along = b - a
    square = np.maximum((along**2).sum(1), 1e-12)
    t = ((points[:, None] - a) * along).sum(2) / square
    nearest = a + t.clip(0, 1)[..., None] * along
    return float(np.linalg.norm(points[:, None] - nearest, axis=2).min(1).max())


@pytest.mark.parametrize(
    "scene",
    [
        build_scene(DEEP.nodes, DEEP.edges, expanded=frozenset({"blocks"}), room=Room(700, 500)),
        scene_of("blocks", "blocks.0"),
        build_scene(
            [GraphNode(name, "computed", i) for i, name in enumerate(("cell", "gate", "head"))],
            [("cell", "gate", True), ("gate", "cell", True), ("gate", "head", False)],
            expanded=frozenset(),
        ),
    ],
    ids=["wrapped into rows", "expanded", "recurrent"],
)
def test_edges_run_where_figures_without_a_browser_draw_them(
    scene: Scene, show: Show, page: Any
) -> None:
    show(lambda: graph(scene))
    ours = dict(zip(scene.edges, routes(scene), strict=True))
    compared = 0
    for css, gradient in (("path.edge:not(.cut)", True), ("path.edge.cut", False)):
        mine = [edge for edge in scene.edges if edge[2] is gradient]
        if not mine:
            continue
        path = page.locator(f".world {css}").first.get_attribute("d")
        parts = [f"M{part}" for part in path.split("M")[1:]]
        assert len(parts) == len(mine)
        for edge, part in zip(mine, parts, strict=True):
            theirs, line = np.array(page.evaluate(ON_THE_WAY, [part, 24])), ours[edge]
            # Corners are rounded in the browser, and curves have 16 segments here.
            assert away(theirs, line) < 3.5, edge
            assert away(line[[0, -1]], theirs) < 0.01, edge
            compared += 1
    assert compared == len(scene.edges) > 0
