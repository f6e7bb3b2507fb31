"""Parameters and small modules that are drawn as part of their neighbour."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from comgra_decl.viewer.graph.layout import Box, GraphNode, Scene, box_of, build_scene
from comgra_decl.viewer.graph.quiet import is_activation, is_quiet
from tests.viewer.graph.networks import EdgeList, Network, networks


def residual_block() -> Network:
    """Returns a block of timm's resnet: two convolutions with norms, and a parallel identity."""
    chain = [
        ("conv1", "Conv2d"), ("bn1", "BatchNorm2d"), ("drop", "Identity"), ("act1", "ReLU"),
        ("conv2", "Conv2d"), ("bn2", "BatchNorm2d"), ("act2", "ReLU"), ("pool", "AvgPool2d"),
    ]  # fmt: skip
    nodes = [GraphNode("x", "input", 0)]
    edges: EdgeList = []
    last = "x"
    for name, module in chain:
        nodes.append(GraphNode(name, "computed", len(nodes), module, module))
        edges.append((last, name, True))
        last = name
        if not is_quiet(module) and module != "AvgPool2d":
            nodes.append(GraphNode(f"{name}.weight", "parameter", len(nodes)))
            edges.append((f"{name}.weight", name, True))
    edges.append(("x", "act2", True))
    return Network(nodes, edges, frozenset())


def scene_of(network: Network, *expanded: str) -> Scene:
    return build_scene(network.nodes, network.edges, expanded=frozenset(expanded))


def box(scene: Scene, id_: str) -> Box:
    return next(box for box in scene.boxes if box.id == id_)


def test_identity_and_activation_fold_into_the_module_before_them() -> None:
    scene = scene_of(residual_block())
    assert [b.id for b in scene.boxes] == ["x", "conv1", "bn1", "conv2", "bn2", "act2", "pool"]
    assert box(scene, "bn1").label == "bn1 \u00b7 act1"
    assert set(box(scene, "bn1").members) == {"bn1", "bn1.weight", "drop", "act1"}
    assert box(scene, "bn1").members[0] == "bn1"
    assert ("bn1", "conv2", True) in scene.edges


def test_an_activation_that_joins_two_branches_stays_a_box() -> None:
    edges = scene_of(residual_block()).edges
    assert ("x", "act2", True) in edges
    assert ("bn2", "act2", True) in edges


def test_quiet_modules_and_parameters_get_boxes_when_they_are_asked_for() -> None:
    scene = scene_of(residual_block(), "bn1")
    assert {"bn1", "bn1.weight", "drop", "act1"} <= {b.id for b in scene.boxes}
    assert [band.id for band in scene.bands] == ["bn1"]
    assert box(scene, "bn1").marks == ()


def test_a_module_is_drawn_plain_with_a_mark_for_each_parameter() -> None:
    scene = scene_of(residual_block())
    assert box(scene, "conv1").plain
    assert box(scene, "conv1").folded  # so that it can be expanded
    assert box(scene, "conv1").marks == ("conv1.weight",)
    assert box(scene, "pool").marks == ()
    assert not box(scene, "pool").folded


def test_a_parameter_that_others_read_too_is_no_mark() -> None:
    nodes = [
        GraphNode("embed.weight", "parameter", 0), GraphNode("embed", "computed", 1),
        GraphNode("head", "computed", 2),
    ]  # fmt: skip
    edges = [("embed.weight", "embed", True), ("embed.weight", "head", True)]
    scene = build_scene(nodes, edges, expanded=frozenset({"embed"}))
    assert [b.id for b in scene.boxes] == ["embed.weight", "embed", "head"]
    folded = build_scene(nodes, edges, expanded=frozenset())
    assert not box(folded, "embed").plain


@given(networks(), st.sampled_from(["ReLU", "Identity", "Dropout"]))
def test_every_node_keeps_its_box_and_cycles_do_not_appear(network: Network, module: str) -> None:
    quiet = [
        GraphNode(n.name, n.kind, n.order, n.title, module if n.order % 2 else "")
        for n in network.nodes
    ]
    scene = build_scene(quiet, network.edges, expanded=network.expanded)
    members = [name for b in scene.boxes for name in b.members]
    assert sorted(members) == sorted(node.name for node in quiet)
    assert all(box_of(scene, node.name) for node in quiet)
    order = {n.name: n.order for n in quiet}
    forward = [e for e in network.edges if order[e[0]] < order[e[1]]]
    flat = [GraphNode(n.name.replace(".", "_"), n.kind, n.order, "", n.module) for n in quiet]
    kept: EdgeList = [(u.replace(".", "_"), v.replace(".", "_"), g) for u, v, g in forward]
    if len({n.name for n in flat}) == len(flat):
        _has_no_cycle(build_scene(flat, kept, expanded=frozenset()))


def _has_no_cycle(scene: Scene) -> None:
    left = {b.id for b in scene.boxes}
    while left:
        ends = {b for b in left if not any(u in left and v == b for u, v, _ in scene.edges)}
        assert ends, f"{sorted(left)} read each other"
        left -= ends


ACTIVATIONS = [nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.Hardswish]
DRAWN = [nn.Linear, nn.Conv2d, nn.LayerNorm, nn.BatchNorm2d, nn.LSTM, nn.MultiheadAttention, nn.GLU]


@pytest.mark.parametrize("module", ACTIVATIONS)
def test_activations_are_functions_of_each_value(module: type[nn.Module]) -> None:
    assert is_activation(module.__name__)
    x = torch.linspace(-3, 3, 6)
    assert torch.equal(module()(x)[2:4], module()(x[2:4]))


def test_layers_are_never_quiet() -> None:
    assert not [module for module in DRAWN if is_quiet(module.__name__)]
    assert is_quiet("Dropout1d")
    assert is_quiet("DropPath")
    assert not is_activation("Dropout")
