"""The graph in a real browser: what a click, a key or a search does."""

from __future__ import annotations

import re
import threading
from typing import Any

from comgra_decl.viewer.components.graph import GraphView
from comgra_decl.viewer.graph.layout import GraphNode, Room, build_scene
from tests.viewer.components.graphs import (
    DEEP,
    NETWORK,
    WIDE,
    Show,
    expect,
    graph,
    has,
    in_view,
    node,
    scene_of,
    settled,
)

# ---- selecting


def test_a_click_selects_a_node_and_shows_what_it_depends_on(show: Show, page: Any) -> None:
    shown = show(graph)
    node(page, "blocks.1").click()
    has(page, "blocks.1", "selected")
    has(page, "blocks.0", "before")
    has(page, "blocks.2", "after")
    expect(page.locator(".near .edge.in")).to_have_attribute("data-from", "blocks.0")
    expect(page.locator(".near .edge.out")).to_have_attribute("data-to", "blocks.2")
    shown.heard({"select": "blocks.1"})
    assert shown.component.selected == "blocks.1"


def test_what_another_role_is_joined_with_is_drawn_thinner(show: Show, page: Any) -> None:
    shown = show(graph)
    node(page, "blocks.1").click()
    has(page, "blocks.2", "after")
    shown.set(loose={"of": "blocks.1", "boxes": ["blocks.2"]})
    has(page, "blocks.2", "after loose")
    thin = node(page, "blocks.2").locator(".shape").first
    expect(thin).to_have_css("stroke-width", "1px")
    node(page, "blocks.0").click()  # of which nothing is known yet
    expect(page.locator(".loose")).to_have_count(0)


def test_the_highlight_does_not_wait_for_the_server(show: Show, page: Any) -> None:
    shown = show(graph, ready=False)
    for name in ("embed", "blocks.0", "blocks.1"):
        node(page, name).click()
        has(page, name, "selected")
    shown.heard()
    shown.set(ready=True)
    shown.heard({"select": "blocks.1"})  # the newest click only


def test_while_the_server_is_busy_only_the_newest_click_waits(show: Show, page: Any) -> None:
    free = threading.Event()
    view: list[GraphView] = []

    def slow() -> GraphView:
        view.append(graph())
        view[0].on_message(lambda message: "room" in message or free.wait(1))
        return view[0]

    shown = show(slow)
    shown.until(lambda: bool(shown.rooms))
    for name in ("embed", "blocks.0", "blocks.1", "blocks.2"):
        node(page, name).click()
    free.set()
    shown.heard({"select": "embed"}, {"select": "blocks.2"})
    has(page, "blocks.2", "selected")


def test_the_server_can_select_and_the_node_comes_into_view(show: Show, page: Any) -> None:
    shown = show(lambda: graph(WIDE))
    assert not in_view(page, node(page, "loss"))
    shown.set(selected="loss")
    has(page, "loss", "selected")
    assert in_view(page, node(page, "loss"))
    shown.heard()


def test_a_selection_outlives_a_change_of_the_scene(show: Show, page: Any) -> None:
    shown = show(graph)
    node(page, "blocks.1").click()
    shown.heard({"select": "blocks.1"})
    shown.set(scene=scene_of("blocks", "blocks.0").as_json())
    expect(node(page, "blocks.0.norm")).to_be_visible()
    has(page, "blocks.1", "selected")


def test_shift_click_walks_one_hop_further(show: Show, page: Any) -> None:
    shown = show(graph)
    node(page, "blocks.1").click()
    expect(page.locator(".node.before")).to_have_count(1)
    node(page, "blocks.1").click(modifiers=["Shift"])
    has(page, "embed", "before")
    has(page, "head", "after")
    shown.heard({"select": "blocks.1"})


def test_hovering_previews_the_edges_of_a_node(show: Show, page: Any) -> None:
    shown = show(graph)
    node(page, "blocks.1").hover()
    expect(page.locator(".hover .edge")).to_have_count(2)
    expect(page.locator(".info")).to_contain_text("blocks.1")
    shown.until(lambda: bool(shown.looks))
    assert shown.looks == ["blocks.1"]  # what a click would show can be read ahead
    page.mouse.move(5, 5)
    expect(page.locator(".hover .edge")).to_have_count(0)
    shown.heard()


def test_edges_without_gradient_look_different(show: Show, page: Any) -> None:
    nodes = [GraphNode(name, "computed", i) for i, name in enumerate("abc")]
    scene = build_scene(nodes, [("a", "b", True), ("b", "c", False)], expanded=frozenset())
    show(lambda: graph(scene))
    node(page, "b").click()
    expect(page.locator('.near .edge[data-to="b"]')).not_to_have_class(re.compile("cut"))
    expect(page.locator('.near .edge[data-to="c"]')).to_have_class(re.compile("cut"))
    dashes = page.locator('.near .edge[data-to="c"]').evaluate(
        "edge => getComputedStyle(edge).strokeDasharray"
    )
    assert dashes != "none"


# ---- folding


def test_enter_opens_a_fold_and_backspace_closes_it(show: Show, page: Any) -> None:
    shown = show(graph)
    node(page, "blocks.1").click()
    page.keyboard.press("Enter")
    expect(node(page, "blocks.1.norm")).to_be_visible()
    has(page, "blocks.1", "selected")
    page.keyboard.press("Backspace")  # the focus is on a part of the group
    expect(node(page, "blocks.1.norm")).to_have_count(0)
    expect(node(page, "blocks.1")).to_be_focused()
    shown.heard({"select": "blocks.1"}, {"expand": "blocks.1"}, {"collapse": "blocks.1"})


def test_a_node_is_compared_without_a_mouse(show: Show, page: Any) -> None:
    shown = show(graph)
    node(page, "blocks.1").click()
    page.keyboard.press("Shift+ArrowRight")
    has(page, "blocks.1", "selected")
    page.keyboard.press("Shift+Enter")
    shown.heard({"select": "blocks.1"}, {"between": "blocks.2"})


def test_a_double_click_opens_and_the_band_above_closes(show: Show, page: Any) -> None:
    shown = show(graph)
    node(page, "blocks.0").dblclick()
    band = page.locator('.band[data-scope="blocks.0"]')
    expect(band).to_be_visible()
    band.click()
    expect(band).to_have_count(0)
    expect(node(page, "blocks.0.norm")).to_have_count(0)
    shown.heard({"select": "blocks.0"}, {"expand": "blocks.0"}, {"collapse": "blocks.0"})


def test_the_band_above_a_single_row_is_next_to_its_boxes(show: Show, page: Any) -> None:
    show(lambda: graph(height=620))
    page.locator("button", has_text="Fit").click()
    band = settled(page, page.locator('.band[data-scope="blocks"]'))
    tops = [box.bounding_box()["y"] for box in page.locator(".node").all()]
    assert 0 < min(tops) - (band["y"] + band["height"]) < 30
    frame = page.locator(".graph .stage, .stage").first.bounding_box()
    page.mouse.move(frame["x"] + 20, frame["y"] + frame["height"] - 20)
    page.mouse.down()
    page.mouse.move(frame["x"] + 20, frame["y"] + 10, steps=4)
    page.mouse.up()
    assert settled(page, page.locator('.band[data-scope="blocks"]'))["y"] >= frame["y"]


def test_what_was_opened_stays_where_it_was(show: Show, page: Any) -> None:
    show(lambda: graph(height=300))
    for _ in range(3):
        page.locator(".zoom button", has_text="+").click()
    node(page, "blocks.0").click()
    before = settled(page, node(page, "blocks.0"))
    page.keyboard.press("Enter")
    expect(node(page, "blocks.0.norm")).to_be_visible()
    after = settled(page, node(page, "blocks.0.norm"))
    assert abs(after["x"] - before["x"]) < 2


def test_a_row_of_blocks_is_stacked_and_counted(show: Show, page: Any) -> None:
    scene = build_scene(NETWORK.nodes, NETWORK.edges, expanded=frozenset({"blocks"}), limit=5)
    show(lambda: graph(scene))
    row = node(page, "blocks.0..2")
    expect(row.locator(".badge")).to_have_text("\u00d73")
    expect(row.locator(".stack")).to_have_count(2)
    expect(row).to_have_attribute("aria-label", re.compile("3 identical blocks"))
    expect(node(page, "embed").locator(".badge, .stack")).to_have_count(0)
    expect(node(page, "embed").locator(".mark")).to_have_count(2)


# ---- keyboard


def test_arrow_keys_walk_along_edges_and_columns(show: Show, page: Any) -> None:
    shown = show(lambda: graph(scene_of("embed", "blocks")))
    node(page, "embed").click()
    shown.heard({"select": "embed"})
    for key, expected in [
        ("ArrowRight", "blocks.0"),
        ("ArrowLeft", "embed"),
        ("ArrowLeft", "input"),
        ("ArrowDown", "embed.weight"),
        ("ArrowRight", "embed"),
    ]:
        page.keyboard.press(key)
        has(page, expected, "selected")
        expect(node(page, expected)).to_be_focused()
        shown.heard({"select": expected})


def test_the_graph_is_one_stop_of_the_tab_key(show: Show, page: Any) -> None:
    show(graph)
    expect(page.locator('.node[tabindex="0"]')).to_have_count(1)
    node(page, "blocks.1").click()
    expect(page.locator('.node[tabindex="0"]')).to_have_attribute("data-id", "blocks.1")
    expect(node(page, "blocks.1")).to_have_attribute(
        "aria-label", re.compile(r"^blocks\.1, computed, \d+ nodes folded, 1 in, 1 out$")
    )


def test_single_keys_work_from_anywhere_but_not_while_typing(show: Show, page: Any) -> None:
    shown = show(graph)
    zoom = page.locator(".zoom button").nth(1)
    fitting = zoom.text_content()
    page.locator(".zoom button", has_text="+").click()
    expect(zoom).not_to_have_text(fitting)
    zoomed = zoom.text_content()
    page.locator("#other").click()
    page.keyboard.type("fc/")
    expect(page.locator("#other")).to_have_value("fc/")
    expect(zoom).to_have_text(zoomed)
    page.locator("#other").evaluate("input => { input.type = 'range'; }")  # takes no text
    page.locator("#other").focus()
    page.keyboard.press("f")
    expect(zoom).to_have_text(fitting)
    page.locator("#other").evaluate("input => { input.type = 'text'; input.blur(); }")
    page.keyboard.press("/")
    expect(page.locator(".find input")).to_be_focused()
    expect(page.locator(".find input")).to_have_value("")
    shown.heard()


# ---- looking around


def test_fit_brings_the_whole_graph_into_view(show: Show, page: Any) -> None:
    show(lambda: graph(WIDE))
    ends = [node(page, "input"), node(page, "loss")]
    assert not all(in_view(page, end) for end in ends)
    expect(page.locator(".minimap")).to_be_visible()
    page.locator("button", has_text="Fit").click()
    expect(page.locator(".minimap")).to_be_hidden()
    assert all(in_view(page, end) for end in ends)


def test_far_away_groups_have_names_instead_of_their_boxes(show: Show, page: Any) -> None:
    shown = show(lambda: graph(WIDE))
    label = node(page, "embed").locator(".label")
    page.locator("button", has_text="Fit").click()
    expect(page.locator("svg.far")).to_be_attached()
    expect(label).to_be_hidden()
    names = page.locator(".group .name")
    expect(names.first).to_be_visible()
    shown.until(lambda: all(room > 20 for _, room in names.evaluate_all(GROUPS)))
    found = names.evaluate_all(GROUPS)
    assert all(room > 20 for _, room in found)
    assert [name for name, _ in found if name.startswith("blocks")]
    assert page.locator(".node:not(.kind-parameter) .shape").evaluate_all(COVERED) == []
    for _ in range(6):
        page.locator(".zoom button", has_text="+").click()
    expect(page.locator("svg.far")).not_to_be_attached()
    expect(page.locator(".group")).to_have_count(0)
    expect(label).to_be_attached()


GROUPS = "names => names.map(n => [n.textContent, n.parentElement.getBoundingClientRect().width])"
"""Names of the groups, and their widths in pixels."""

COVERED = """shapes => {
  const root = shapes[0].getRootNode();
  const frames = [...root.querySelectorAll(".group")].map((g) => g.getBoundingClientRect());
  const inside = (box) => frames.some((frame) => frame.left <= box.left + 1 &&
    frame.right >= box.right - 1 && frame.top <= box.top + 1 && frame.bottom >= box.bottom - 1);
  return shapes.filter((shape) => !inside(shape.getBoundingClientRect()))
    .map((shape) => shape.parentElement.dataset.id);
}"""
"""Boxes outside of every named group."""


def test_the_minimap_and_the_facts_cover_nothing(show: Show, page: Any) -> None:
    show(lambda: graph(WIDE))
    stage = page.locator(".stage").bounding_box()
    for name in (".minimap", ".foot .info", ".zoom"):
        box = page.locator(name).bounding_box()
        assert box["y"] >= stage["y"] + stage["height"] - 0.5


def test_the_drawing_area_is_told_and_again_when_it_changes(show: Show, page: Any) -> None:
    shown = show(graph)
    shown.until(lambda: bool(shown.rooms))
    width, height = shown.rooms[-1]
    stage = page.locator(".stage").bounding_box()
    assert stage["width"] - 80 < width <= stage["width"]
    assert stage["height"] - 60 < height <= stage["height"]
    page.locator(".graph").evaluate("graph => { graph.style.height = '560px'; }")
    shown.until(lambda: shown.rooms[-1][1] > height + 100)
    grown = page.locator(".stage").bounding_box()["height"]
    assert shown.rooms[-1][0] == width
    assert grown - 60 < shown.rooms[-1][1] <= grown


def test_the_graph_can_be_made_taller_and_hidden(show: Show, page: Any) -> None:
    shown = show(graph)
    grip = page.get_by_role("separator", name="Height of the graph")
    box = grip.bounding_box()
    page.mouse.move(box["x"] + 30, box["y"] + 3)
    page.mouse.down()
    page.mouse.move(box["x"] + 30, box["y"] + 83)
    page.mouse.up()
    shown.until(lambda: bool(shown.messages))
    assert abs(shown.messages.pop()["height"] - 440) <= 2
    grip.focus()
    page.keyboard.press("ArrowUp")
    shown.heard({"height": 340})
    page.get_by_role("button", name="Hide the graph").click()
    shown.heard({"shown": False})
    shown.set(shown=False)
    expect(page.locator(".stage")).to_be_hidden()
    expect(page.locator(".find input")).to_be_visible()
    page.get_by_role("button", name="Show the graph").click()
    shown.heard({"shown": True})


# ---- wrapped drawings


ROWS = build_scene(
    DEEP.nodes, DEEP.edges, expanded=frozenset({"blocks"}), room=Room(600, 500), limit=100
)


def test_edges_between_rows_cross_no_box(show: Show, page: Any) -> None:
    show(lambda: graph(ROWS, height=600))
    assert len(ROWS.rows) > 1
    last = max((b for b in ROWS.boxes if b.row == 0 and b.kind == "computed"), key=lambda b: b.x)
    node(page, last.id).click()
    crossed = page.locator(".near .edge.out").evaluate_all(CROSSED)
    assert crossed == []
    assert page.locator(".near .edge.out").count() == 1


CROSSED = """edges => edges.flatMap((edge) => {
  const boxes = [...edge.getRootNode().querySelectorAll(".node")];
  const { from, to } = edge.dataset;
  const at = edge.getScreenCTM();
  const points = Array.from({ length: 200 }, (_, i) =>
    edge.getPointAtLength((edge.getTotalLength() * i) / 199).matrixTransform(at));
  return boxes.filter((box) => {
    const b = box.querySelector(".shape").getBoundingClientRect();
    return box.dataset.id !== from && box.dataset.id !== to && points.some((p) =>
      p.x > b.left + 1 && p.x < b.right - 1 && p.y > b.top + 1 && p.y < b.bottom - 1);
  }).map((box) => box.dataset.id);
})"""
"""Boxes that the edges run through, apart from their ends."""


def test_bands_stand_above_their_row_and_the_arrow_keys_reach_the_next_row(
    show: Show, page: Any
) -> None:
    shown = show(lambda: graph(ROWS, height=600))
    bands = page.locator('.band[data-scope="blocks"]')
    rows = {box.row for box in ROWS.boxes if box.id.startswith("blocks")}
    expect(bands).to_have_count(len(rows))
    first = node(page, "blocks.0").bounding_box()
    assert bands.first.bounding_box()["y"] < first["y"]
    node(page, "blocks.0").click()
    page.keyboard.press("ArrowDown")
    below = {box.id for box in ROWS.boxes if box.row == 1}
    shown.until(lambda: bool(shown.messages) and shown.messages[-1]["select"] in below)


# ---- parameters and paths


def test_a_click_on_a_mark_asks_for_the_parameter(show: Show, page: Any) -> None:
    shown = show(graph)
    mark = node(page, "embed").locator('.mark[data-mark="embed.bias"]')
    expect(mark.locator("title")).to_have_text("embed.bias")
    mark.click()
    shown.heard({"search": "embed.bias"})


def test_shift_click_on_a_second_node_compares_the_two(show: Show, page: Any) -> None:
    shown = show(graph)
    node(page, "blocks.0").click()
    node(page, "blocks.2").click(modifiers=["Shift"])
    shown.heard({"select": "blocks.0"}, {"between": "blocks.2"})
    has(page, "blocks.0", "selected")
    shown.set(path=["blocks.0", "blocks.1", "blocks.2"])
    has(page, "blocks.1", "traced")
    expect(page.locator(".path .edge.traced")).to_have_count(2)
    shown.set(path=[])
    expect(page.locator(".traced")).to_have_count(0)


def test_the_wheel_zooms_where_the_pointer_is_and_a_drag_pans(show: Show, page: Any) -> None:
    shown = show(graph)
    box = settled(page, node(page, "blocks.0"))
    at = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(*at)
    page.mouse.wheel(0, -300)
    zoomed = settled(page, node(page, "blocks.0"))
    assert zoomed["width"] > box["width"] * 1.3
    assert abs(zoomed["x"] + zoomed["width"] / 2 - at[0]) < 2
    page.mouse.down()
    page.mouse.move(at[0] + 60, at[1] + 10, steps=4)
    page.mouse.up()
    moved = settled(page, node(page, "blocks.0"))
    assert abs(moved["x"] - zoomed["x"] - 60) < 2
    shown.heard()  # a drag that starts on a node selects nothing


def test_all_edges_can_be_drawn_or_not(show: Show, page: Any) -> None:
    show(graph)
    button = page.locator("button", has_text="Edges")
    expect(button).to_have_attribute("aria-pressed", "true")
    expect(page.locator(".all .edge")).to_have_count(1)
    button.click()
    expect(page.locator(".all .edge")).to_have_count(0)


def test_an_empty_scene_says_so(show: Show, page: Any) -> None:
    show(lambda: graph(build_scene([], [], expanded=frozenset())))
    expect(page.get_by_text("No graph recorded yet.")).to_be_visible()


# ---- finding


def test_finding_a_node_on_screen_selects_it(show: Show, page: Any) -> None:
    shown = show(graph)
    page.keyboard.press("/")
    page.keyboard.type("ocks.2")
    page.keyboard.press("Enter")
    has(page, "blocks.2", "selected")
    shown.heard({"select": "blocks.2"})


def test_a_node_found_from_afar_comes_near_and_can_be_walked_on_from(show: Show, page: Any) -> None:
    show(lambda: graph(WIDE))
    page.locator(".node").first.focus()
    for _ in range(5):
        page.keyboard.press("-")
    expect(page.locator("svg.far")).to_be_attached()
    page.keyboard.press("/")
    page.keyboard.type("blocks.5.mlp")
    page.keyboard.press("Enter")
    expect(page.locator("svg.far")).not_to_be_attached()
    assert in_view(page, node(page, "blocks.5.mlp"))
    expect(node(page, "blocks.5.mlp")).to_be_focused()


def test_finding_a_node_inside_a_fold_asks_the_server_for_it(show: Show, page: Any) -> None:
    shown = show(graph)
    page.locator(".find input").fill("1 attn q")
    expect(page.locator(".option").first).to_contain_text("blocks.1.attn.q")
    expect(page.locator(".option").first).to_contain_text("in blocks.1")
    page.keyboard.press("ArrowDown")
    expect(page.locator('.option[aria-selected="true"]')).to_contain_text("blocks.1.attn.q.weight")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    shown.heard({"search": "blocks.1.attn.q"})


def test_a_search_without_a_match_is_passed_on(show: Show, page: Any) -> None:
    shown = show(graph)
    page.locator(".find input").fill("flux capacitor")
    expect(page.locator(".found")).to_contain_text("no matching nodes")
    page.keyboard.press("Enter")
    shown.heard({"search": "flux capacitor"})
