"""Properties that every drawing of a graph has, whatever the graph."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from dataclasses import asdict
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from comgra_decl.viewer.graph.layout import (
    Box,
    GraphNode,
    Room,
    Scene,
    box_of,
    build_scene,
    node_of,
)
from tests.viewer.graph.networks import EdgeList, Network, networks, transformer


def scene_of(network: Network, limit: int = 60) -> Scene:
    return build_scene(network.nodes, network.edges, expanded=network.expanded, limit=limit)


def reachable(edges: set[tuple[str, str]]) -> dict[str, set[str]]:
    """Returns what each vertex reaches in one step or more (Warshall's closure)."""
    reach: dict[str, set[str]] = defaultdict(set)
    for source, sink in edges:
        reach[source].add(sink)
    for middle in list(reach):
        for sources in list(reach.values()):
            if middle in sources:
                sources |= reach[middle]
    return reach


def column(box: Box) -> float:
    return round(box.x + box.w / 2, 3)


def first_order(box: Box, network: Network) -> int:
    return min(node.order for node in network.nodes if node.name in box.members)


@given(networks(), st.sampled_from([3, 60]))
def test_every_node_is_in_exactly_one_box(network: Network, limit: int) -> None:
    scene = scene_of(network, limit)
    members = [name for box in scene.boxes for name in box.members]
    assert sorted(members) == sorted(node.name for node in network.nodes)
    assert len({box.id for box in scene.boxes}) == len(scene.boxes)


@given(networks(), st.sampled_from([3, 60]))
def test_boxes_never_overlap_and_lie_inside_the_drawing(network: Network, limit: int) -> None:
    scene = scene_of(network, limit)
    for box in scene.boxes:
        assert box.x >= 0
        assert box.y >= 0
        assert box.w > 0
        assert box.h > 0
        assert box.x + box.w <= scene.width
        assert box.y + box.h <= scene.height
    for a, b in combinations(scene.boxes, 2):
        beside = a.x + a.w < b.x or b.x + b.w < a.x
        assert beside or a.y + a.h < b.y or b.y + b.h < a.y


@given(networks(), st.sampled_from([3, 60]))
def test_edges_between_boxes_are_those_between_their_nodes(network: Network, limit: int) -> None:
    scene = scene_of(network, limit)
    holder = {name: box.id for box in scene.boxes for name in box.members}
    expected: dict[tuple[str, str], bool] = {}
    for source, sink, gradient in network.edges:
        link = holder[source], holder[sink]
        if link[0] != link[1]:
            expected[link] = expected.get(link, False) or gradient
    assert {(u, v): gradient for u, v, gradient in scene.edges} == expected
    assert len(scene.edges) == len(expected)


@given(networks())
def test_folding_keeps_who_can_reach_whom(network: Network) -> None:
    scene = scene_of(network)
    holder = {name: box.id for box in scene.boxes for name in box.members}
    boxes = reachable({(u, v) for u, v, _ in scene.edges})
    for source, sinks in reachable({(u, v) for u, v, _ in network.edges}).items():
        for sink in sinks:
            assert holder[sink] in boxes[holder[source]] | {holder[source]}


@given(networks(), st.sampled_from([3, 60]))
def test_only_edges_that_close_a_cycle_go_left(network: Network, limit: int) -> None:
    scene = scene_of(network, limit)
    boxes = {box.id: box for box in scene.boxes}
    reach = reachable({(u, v) for u, v, _ in scene.edges})
    for u, v, _ in scene.edges:
        if column(boxes[u]) >= column(boxes[v]):
            assert u in reach[v], "an edge that is on no cycle goes left"
            assert first_order(boxes[v], network) <= first_order(boxes[u], network)
        else:
            assert boxes[u].x + boxes[u].w < boxes[v].x


@given(networks())
def test_a_parameter_stands_right_before_its_first_consumer(network: Network) -> None:
    sinks = {v for _, v, _ in network.edges}
    given_ = {n.name for n in network.nodes if n.kind in ("parameter", "input")} - sinks
    alone = Network(network.nodes, network.edges, network.every_scope)
    scene = scene_of(alone, limit=1000)
    numbers = {x: i for i, x in enumerate(sorted({column(box) for box in scene.boxes}))}
    place = {box.id: numbers[column(box)] for box in scene.boxes}
    for name in given_:
        consumers = [place[v] for u, v, _ in scene.edges if u == name]
        if consumers:
            assert place[name] == min(consumers) - 1


@given(networks(), st.randoms(use_true_random=False))
def test_the_same_graph_gives_the_same_picture(network: Network, chance: random.Random) -> None:
    nodes, edges = list(network.nodes), list(network.edges)
    chance.shuffle(nodes)
    chance.shuffle(edges)
    assert scene_of(Network(nodes, edges, network.expanded)) == scene_of(network)


@given(networks())
def test_bands_span_what_their_scope_computes_and_keep_apart(network: Network) -> None:
    scene = scene_of(network)
    for band in scene.bands:
        inside = [b for b in scene.boxes if b.id == band.id or b.id.startswith(f"{band.id}.")]
        assert band.x >= min(box.x for box in inside)
        assert band.x + band.w <= max(box.x + box.w for box in inside) + 1e-6
        for box in inside:
            if box.kind not in ("parameter", "buffer", "target"):
                assert band.x <= box.x
                assert box.x + box.w <= band.x + band.w + 1e-6
        assert band.id in network.expanded
    for a, b in combinations(scene.bands, 2):
        if a.level == b.level:
            assert a.x + a.w <= b.x or b.x + b.w <= a.x
        if b.id.startswith(f"{a.id}."):
            assert a.level < b.level


def test_bands_of_blocks_in_a_chain_share_one_row() -> None:
    network = transformer(6)
    opened = Network(network.nodes, network.edges, network.every_scope)
    bands = {band.id: band for band in scene_of(opened, limit=1000).bands}
    assert {bands[f"blocks.{i}"].level for i in range(6)} == {1}
    boxes = {box.id: box for box in scene_of(opened, limit=1000).boxes}
    assert bands["embed"].x == boxes["embed.weight"].x  # with room, parameters are below it too


@given(networks())
def test_a_scene_is_plain_json(network: Network) -> None:
    scene = scene_of(network)
    assert json.loads(json.dumps(scene.as_json())) == json.loads(json.dumps(asdict(scene)))


def test_nothing_at_all_is_an_empty_scene() -> None:
    scene = build_scene([], [("a", "b", True)], expanded=frozenset())
    assert scene.boxes == ()
    assert scene.edges == ()
    assert scene.bands == ()


def test_edges_of_unknown_nodes_are_ignored() -> None:
    scene = build_scene([GraphNode("a", "input", 0)], [("a", "x", True)], expanded=frozenset())
    assert [box.id for box in scene.boxes] == ["a"]
    assert scene.edges == ()


def test_a_chain_of_layers_is_drawn_straight_with_parameters_beside_it() -> None:
    network = transformer(2)
    opened = Network(network.nodes, network.edges, frozenset({"embed", "head"}))
    boxes = {box.id: box for box in scene_of(opened).boxes}
    middles = {boxes[name].y + boxes[name].h / 2 for name in ("input", "embed", "blocks", "head")}
    assert len(middles) == 1
    middle = middles.pop()
    beside = [boxes["head.weight"], boxes["head.bias"]]
    assert all(column(box) == column(boxes["blocks"]) for box in beside)
    assert sorted(box.y + box.h / 2 < middle for box in beside) == [False, True]


def test_a_node_without_any_edge_keeps_out_of_the_way() -> None:
    nodes = [GraphNode("alone", "computed", 0), GraphNode("x", "input", 1)]
    nodes += [GraphNode("layer", "computed", 2)]
    scene = build_scene(nodes, [("x", "layer", True)], expanded=frozenset())
    middles = {box.id: box.y + box.h / 2 for box in scene.boxes}
    assert middles["x"] == middles["layer"] != middles["alone"]


def test_a_recurrent_net_keeps_its_order_and_its_back_edge() -> None:
    nodes = [GraphNode(name, "computed", i) for i, name in enumerate(["cell", "gate", "out"])]
    edges = [("cell", "gate", True), ("gate", "cell", True), ("gate", "out", True)]
    scene = build_scene(nodes, edges, expanded=frozenset())
    assert [box.id for box in sorted(scene.boxes, key=column)] == ["cell", "gate", "out"]
    assert ("gate", "cell", True) in scene.edges


def test_a_loose_chain_of_parameters_stays_with_its_consumer() -> None:
    nodes = [GraphNode("x", "input", 0), GraphNode("w", "parameter", 1)]
    nodes += [GraphNode(f"layer{i}", "computed", 2 + i) for i in range(5)]
    nodes += [GraphNode("w_norm", "computed", 7), GraphNode("last", "computed", 8)]
    edges: EdgeList = [("x", "layer0", True), ("w", "w_norm", True), ("w_norm", "last", True)]
    edges += [(f"layer{i}", f"layer{i + 1}", True) for i in range(4)] + [("layer4", "last", True)]
    boxes = {box.id: column(box) for box in scene_of(Network(nodes, edges, frozenset())).boxes}
    assert boxes["w_norm"] == boxes["layer4"]
    assert boxes["w"] == boxes["layer3"]


def test_missing_ends_are_marked_unless_the_kind_explains_them() -> None:
    kinds = ["input", "parameter", "buffer", "computed", "target", "loss"]
    nodes = [GraphNode(kind, kind, i) for i, kind in enumerate(kinds)]
    scene = build_scene(nodes, [], expanded=frozenset())
    assert {box.id for box in scene.boxes if box.no_in} == {"computed", "loss"}
    assert {box.id for box in scene.boxes if box.no_out} == set(kinds) - {"loss"}
    scene = build_scene(nodes, [("computed", "loss", False)], expanded=frozenset())
    assert {box.id for box in scene.boxes if box.no_in} == {"computed"}


def test_a_node_is_found_in_its_box_and_stands_for_it() -> None:
    scene = scene_of(transformer(2))
    assert box_of(scene, "blocks.1.attn.q.weight") == "blocks"
    assert box_of(scene, "loss") == "loss"
    assert box_of(scene, "nobody") is None
    assert node_of(scene, "embed") == "embed"
    assert node_of(scene, "blocks") == "blocks.1"  # without its own node, the last computed
    assert node_of(scene, "nobody") is None


# ---- wrapping

NARROW = Room(700, 400)


def chain(length: int) -> Network:
    nodes = [GraphNode(f"layer{i}", "computed", i) for i in range(length)]
    edges: EdgeList = [(f"layer{i}", f"layer{i + 1}", True) for i in range(length - 1)]
    return Network(nodes, edges, frozenset())


def test_a_long_chain_wraps_into_rows_read_like_text() -> None:
    network = chain(24)
    scene = build_scene(network.nodes, network.edges, expanded=frozenset(), room=NARROW)
    rows = [[box.id for box in scene.boxes if box.row == row] for row in range(len(scene.rows))]
    assert len(rows) > 2
    assert [name for row in rows for name in row] == [f"layer{i}" for i in range(24)]
    for a, b in zip(scene.boxes, scene.boxes[1:], strict=False):
        assert (b.x > a.x) if a.row == b.row else (b.y > a.y + a.h)
    flat = build_scene(network.nodes, network.edges, expanded=frozenset())
    assert NARROW.zoom(scene.width, scene.height) > 2 * NARROW.zoom(flat.width, flat.height)


def test_what_fits_in_one_row_stays_in_one_row() -> None:
    network = chain(4)
    scene = build_scene(network.nodes, network.edges, expanded=frozenset(), room=NARROW)
    assert {box.row for box in scene.boxes} == {0}


def test_rows_end_where_few_edges_cross() -> None:
    network = chain(20)
    beside: EdgeList = [(f"layer{i}", f"layer{i + 2}", True) for i in range(18) if i % 5 < 3]
    scene = build_scene(network.nodes, network.edges + beside, expanded=frozenset(), room=NARROW)
    last = [max(int(b.id[5:]) for b in scene.boxes if b.row == r) for r in range(len(scene.rows))]
    assert {end % 5 for end in last[:-1]} == {4}


@given(networks(), st.floats(200, 2000), st.floats(60, 900))
def test_rows_never_overlap_and_keep_every_box(
    network: Network, width: float, height: float
) -> None:
    scene = build_scene(
        network.nodes, network.edges, expanded=network.expanded, room=Room(width, height)
    )
    for a, b in combinations(scene.boxes, 2):
        beside = a.x + a.w < b.x or b.x + b.w < a.x
        assert beside or a.y + a.h < b.y or b.y + b.h < a.y
    for box in scene.boxes:
        top, bottom = scene.rows[box.row]
        assert top - 1e-6 <= box.y
        assert box.y + box.h <= bottom + 1e-6
        assert box.y + box.h <= scene.height
        assert box.x + box.w <= scene.width
    assert all(
        above[1] < below[0] for above, below in zip(scene.rows, scene.rows[1:], strict=False)
    )
    for band in scene.bands:
        assert any(box.row == band.row for box in scene.boxes)


def test_a_scope_that_goes_on_in_the_next_row_has_a_band_in_both() -> None:
    network = transformer(6)
    opened = network.every_scope
    scene = build_scene(network.nodes, network.edges, expanded=opened, room=NARROW, limit=1000)
    rows = {band.row for band in scene.bands if band.id == "blocks"}
    assert rows == {box.row for box in scene.boxes if box.id.startswith("blocks")}
    assert len(rows) > 1
