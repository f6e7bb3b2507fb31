"""Graphs to show, and helpers to find things in them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from comgra_decl.viewer.components.graph import GraphView
from comgra_decl.viewer.graph.layout import Scene, build_scene, closed
from tests.viewer.components.conftest import Shown
from tests.viewer.graph.networks import Network, transformer

expect = pytest.importorskip("playwright.sync_api").expect
Show = Callable[..., Shown]
NETWORK = transformer(3)


def scene_of(*expanded: str, network: Network = NETWORK) -> Scene:
    return build_scene(network.nodes, network.edges, expanded=frozenset(expanded))


def graph(scene: Scene | None = None, **params: Any) -> GraphView:
    """A graph that opens and closes scopes as the dashboard does."""
    view = GraphView(scene=(scene or scene_of("blocks")).as_json(), width=1150, height=360)
    expanded = {"blocks"}

    def change(message: dict[str, str]) -> None:
        if "expand" in message:
            expanded.add(message["expand"])
        if "collapse" in message:
            expanded.intersection_update(closed(message["collapse"], frozenset(expanded)))
        if {"expand", "collapse"} & set(message):
            view.scene = scene_of(*expanded).as_json()

    if scene is None:
        view.on_message(change)
    view.param.update(**params)
    return view


def node(page: Any, id_: str) -> Any:
    return page.locator(f'.node[data-id="{id_}"]')


def has(page: Any, id_: str, name: str) -> None:
    expect(node(page, id_)).to_have_class(re.compile(rf"\b{name}\b"))


def settled(page: Any, locator: Any) -> dict[str, float]:
    """Returns where something is on screen once it has stopped moving."""
    last, same = None, 0
    for _ in range(100):
        box = locator.bounding_box()
        same = same + 1 if box == last else 0
        if box is not None and same == 3:
            return dict(box)
        last = box
        page.wait_for_timeout(40)
    pytest.fail(f"it still moves: {last}")


def in_view(page: Any, locator: Any) -> bool:
    """Whether all of something is inside the drawing area."""
    stage, box = page.locator(".stage").bounding_box(), settled(page, locator)
    return bool(
        box["x"] >= stage["x"] - 1
        and box["y"] >= stage["y"] - 1
        and box["x"] + box["width"] <= stage["x"] + stage["width"] + 1
        and box["y"] + box["height"] <= stage["y"] + stage["height"] + 1
    )


#: More than fits on a screen.
DEEP = transformer(9)
WIDE = scene_of("embed", *(f"blocks.{i}" for i in range(9)), "blocks", network=DEEP)
