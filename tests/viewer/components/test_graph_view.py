"""The graph in a real browser."""

from playwright.sync_api import expect
from comgra_decl.viewer.components.graph import GraphView
from comgra_decl.viewer.graph.layout import GraphNode, build_scene
import panel as pn


def test_a_click_selects(serve, page):
    made = []

    def factory():
        nodes = [GraphNode("a", "input", 0), GraphNode("b", "computed", 1)]
        view = GraphView(
            scene=build_scene(nodes, [("a", "b", True)], expanded=frozenset()).as_json(),
            width=800,
            height=300,
        )
        pn.state.onload(lambda: setattr(view, "ready", True))
        got = []
        view.on_message(got.append)
        made.append((view, got))
        return view

    page.goto(serve(factory))
    page.locator('[data-id="b"]').click()
    page.wait_for_timeout(300)
    assert made[0][1] == [{"select": "b"}]
