"""What is drawn individually, what shares a box, and what opens what."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comgra_decl.viewer.graph.layout import (
    Box,
    GraphNode,
    Outline,
    Room,
    Scene,
    box_of,
    build_scene,
    closed,
    expansion_for,
)
from tests.viewer.graph.networks import Network, networks, transformer


def scene_of(network: Network, *expanded: str, limit: int = 60) -> Scene:
    return build_scene(network.nodes, network.edges, expanded=frozenset(expanded), limit=limit)


def ids(scene: Scene) -> list[str]:
    return [box.id for box in scene.boxes]


def box(scene: Scene, id_: str) -> Box:
    return next(box for box in scene.boxes if box.id == id_)


def test_a_closed_scope_is_one_box_that_counts_what_is_inside() -> None:
    network = transformer(3)
    scene = scene_of(network)
    assert ids(scene) == ["input", "embed", "blocks", "head", "target", "loss"]
    blocks = box(scene, "blocks")
    assert blocks.folded
    assert blocks.repeat == 1
    assert blocks.count == sum(node.name.startswith("blocks.") for node in network.nodes)
    assert not box(scene, "loss").folded
    assert box(scene, "loss").count == 1


def test_an_opened_module_shows_its_own_node_beside_what_is_inside() -> None:
    scene = scene_of(transformer(1), "blocks", "blocks.0", "blocks.0.mlp")
    inside = [id_ for id_ in ids(scene) if id_.startswith("blocks")]
    assert sorted(inside) == [
        "blocks.0",
        "blocks.0.attn",
        "blocks.0.mlp",
        "blocks.0.mlp.bias",
        "blocks.0.mlp.weight",
        "blocks.0.norm",
    ]
    assert not box(scene, "blocks.0").folded
    assert box(scene, "blocks.0").members == ("blocks.0",)
    assert [(band.id, band.label, band.level) for band in scene.bands] == [
        ("blocks.0", "blocks.0", 0),
        ("blocks.0.mlp", "mlp", 1),
    ]


def test_a_scope_that_only_wraps_another_is_skipped() -> None:
    nodes = [GraphNode(f"net.body.{name}", "computed", i) for i, name in enumerate("ab")]
    scene = build_scene(nodes, [], expanded=frozenset())
    assert ids(scene) == ["net.body"]
    scene = build_scene(nodes[:1], [], expanded=frozenset())
    assert ids(scene) == ["net.body.a"]
    assert not scene.boxes[0].folded


def test_beyond_the_limit_identical_blocks_share_one_box() -> None:
    network = transformer(12)
    assert "blocks.7" in ids(scene_of(network, "blocks", limit=60))
    scene = scene_of(network, "blocks", limit=10)
    assert ids(scene) == ["input", "embed", "blocks.0..11", "head", "target", "loss"]
    row = box(scene, "blocks.0..11")
    assert (row.repeat, row.label, row.folded) == (12, "blocks.0\u201311", True)
    assert row.members[0] == "blocks.0"
    assert row.count == len(row.members)


def test_opening_a_row_shows_its_blocks_and_closing_it_joins_them_again() -> None:
    network = transformer(12)
    scene = scene_of(network, "blocks", "blocks.0..11", limit=10)
    assert [id_ for id_ in ids(scene) if id_.startswith("blocks")] == [
        f"blocks.{i}" for i in range(12)
    ]
    assert [band.id for band in scene.bands] == ["blocks", "blocks.0..11"]
    expanded = closed("blocks.0..11", frozenset({"blocks", "blocks.0..11"}))
    assert "blocks.0..11" in ids(scene_of(network, *expanded, limit=10))


def test_an_opened_block_leaves_its_row() -> None:
    scene = scene_of(transformer(12), "blocks", "blocks.5", limit=10)
    assert {"blocks.0..4", "blocks.5.attn", "blocks.6..11"} <= set(ids(scene))


def test_only_the_longest_rows_are_joined_if_that_is_enough() -> None:
    names = [f"long.{i}.x" for i in range(9)] + [f"long.{i}.y" for i in range(9)]
    names += [f"short.{i}.{x}" for i in range(3) for x in "pq"]
    nodes = [GraphNode(name, "computed", i) for i, name in enumerate(names)]
    scene = build_scene(nodes, [], expanded=frozenset({"long", "short"}), limit=8)
    assert ids(scene) == ["long.0..8", "short.0", "short.1", "short.2"]


@pytest.mark.parametrize(
    "odd",
    [
        GraphNode("blocks.2.extra", "computed", 999),
        GraphNode("blocks.2.gate", "computed", 999, title="another shape"),
        GraphNode("blocks.2.gate", "parameter", 999),
    ],
)
def test_blocks_that_differ_never_share_a_box(odd: GraphNode) -> None:
    def block(i: int) -> list[GraphNode]:
        return [
            GraphNode(f"blocks.{i}", "computed", 10 * i + 9),
            GraphNode(f"blocks.{i}.gate", "computed", 10 * i),
        ]

    nodes = [node for i in range(5) for node in block(i) if node.name != odd.name] + [odd]
    scene = build_scene(nodes, [], expanded=frozenset({"blocks"}), limit=1)
    assert "blocks.2" in ids(scene)
    assert all(b.repeat == 1 for b in scene.boxes)


def test_only_numbered_blocks_share_a_box() -> None:
    names = [f"{scope}.{x}" for scope in ("q", "k", "v", "0", "1", "2", "3") for x in "ab"]
    names += [f"layer{i}.{x}" for i in range(9, 13) for x in "ab"]
    nodes = [GraphNode(name, "computed", i) for i, name in enumerate(names)]
    scene = build_scene(nodes, [], expanded=frozenset(), limit=1)
    assert ids(scene) == ["q", "k", "v", "0..3", "layer9..layer12"]


def test_a_title_may_name_its_node_without_making_blocks_differ() -> None:
    scene = scene_of(transformer(4), "blocks", limit=1)
    assert box(scene, "blocks.0..3").repeat == 4


LAPTOP, LARGE = Room(980, 170), Room(3300, 560)
"""The drawing area in a window of 1280 x 800 pixels, and on a screen of 3840 x 2160."""


def first_view(network: Network, room: Room) -> Scene:
    """The drawing before anyone has folded anything; fails if its labels cannot be read."""
    outline = Outline(network.nodes, network.edges)
    folding = outline.folding(room)
    scene = outline.scene(folding.expanded, room=room, limit=folding.limit)
    assert min(room.width / scene.width, room.height / scene.height) >= 0.7
    return scene


def test_the_first_view_shows_every_block_of_a_network_of_usual_depth() -> None:
    scene = first_view(transformer(12), LAPTOP)
    assert {f"blocks.{i}" for i in range(12)} <= set(ids(scene))
    assert len(scene.rows) == 2


@pytest.mark.parametrize("room", [LAPTOP, LARGE])
def test_the_first_view_joins_the_blocks_of_a_very_deep_network(room: Room) -> None:
    assert "blocks.0..199" in ids(first_view(transformer(200), room))


def test_more_of_a_network_is_shown_where_there_is_more_room() -> None:
    network = transformer(40)
    assert "blocks.0..39" in ids(first_view(network, LAPTOP))
    assert {f"blocks.{i}" for i in range(40)} <= set(ids(first_view(network, LARGE)))


def test_the_first_view_joins_no_blocks_to_make_room_for_details() -> None:
    names = [f"blocks.{i}.{x}" for i in range(14) for x in "pq"]
    names += [f"stem.{x}" for x in "ab"] + [f"stem.deep.{i}" for i in range(40)]
    nodes = [GraphNode(name, "computed", i) for i, name in enumerate(names)]
    edges = [(a, b, True) for a, b in pairwise(names)]
    shown = ids(first_view(Network(nodes, edges, frozenset()), Room(1200, 400)))
    assert {f"blocks.{i}" for i in range(14)} <= set(shown)
    assert "stem.deep" in shown


def test_a_small_network_is_shown_whole_with_its_parameters_as_marks() -> None:
    scene = first_view(transformer(1), LAPTOP)
    assert all(b.plain or not b.folded for b in scene.boxes)
    assert box(scene, "embed").marks == ("embed.weight", "embed.bias")
    assert box(scene, "blocks.0.attn").marks == ()
    assert not {b.kind for b in scene.boxes} & {"parameter"}


def test_a_taller_pane_is_wanted_only_where_it_shows_blocks_apart() -> None:
    outlines = {n: Outline(transformer(n).nodes, transformer(n).edges) for n in (1, 18, 200)}
    assert [n for n, outline in outlines.items() if outline.needs_height(980)] == [18]
    assert not outlines[18].needs_height(5000)


def test_a_flat_network_has_nothing_to_fold() -> None:
    nodes = [GraphNode(f"layer{i}", "computed", i) for i in range(90)]
    outline = Outline(nodes, [(f"layer{i}", f"layer{i + 1}", True) for i in range(89)])
    folding = outline.folding(LAPTOP)
    assert len(outline.scene(folding.expanded, room=LAPTOP, limit=folding.limit).boxes) == 90


@given(networks(), st.floats(300, 4000), st.floats(60, 2000))
def test_what_is_expanded_at_first_can_be_read(
    network: Network, width: float, height: float
) -> None:
    room = Room(width, height)
    outline = Outline(network.nodes, network.edges)
    folding = outline.folding(room)
    scene = outline.scene(folding.expanded, room=room, limit=folding.limit)
    readable = min(width / scene.width, height / scene.height) >= 0.7
    assert readable or not folding.expanded


@given(networks(), st.floats(300, 4000))
def test_twins_are_opened_together_in_the_first_view(network: Network, width: float) -> None:
    twins = [
        GraphNode(f"{twin}.{node.name}", node.kind, node.order) for twin in "xy"
        for node in network.nodes
    ]  # fmt: skip
    expanded = Outline(twins, []).folding(Room(width, 300)).expanded
    below = {twin: {s[1:] for s in expanded if s.startswith(twin)} for twin in "xy"}
    assert below["x"] == below["y"]


@given(networks())
def test_opening_for_a_node_makes_it_visible(network: Network) -> None:
    for node in network.nodes:
        expanded = expansion_for(node.name, network.expanded)
        assert network.expanded <= expanded
        scene = scene_of(network, *expanded, limit=1000)
        assert box_of(scene, node.name) == node.name
        assert scene.boxes[ids(scene).index(node.name)].members[0] == node.name


@given(networks())
def test_every_folded_box_can_be_opened_and_closed_again(network: Network) -> None:
    scene = scene_of(network, *network.expanded, limit=1000)
    for folded in (b for b in scene.boxes if b.folded):
        expanded = network.expanded | {folded.id}
        opened = scene_of(network, *expanded, limit=1000)
        assert set(ids(opened)) != set(ids(scene))
        assert folded.id in {band.id for band in opened.bands}
        again = scene_of(network, *closed(folded.id, expanded), limit=1000)
        assert folded.id in {b.id for b in again.boxes if b.folded}


def test_closing_a_scope_closes_what_is_below_but_not_its_row() -> None:
    expanded = frozenset({"b", "b.0", "b.0.attn", "b.0..9", "b.1", "b.01"})
    assert closed("b.0", expanded) == {"b", "b.0..9", "b.1", "b.01"}
    assert closed("b", expanded) == frozenset()
