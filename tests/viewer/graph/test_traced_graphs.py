"""Graphs of real training runs, as the viewer draws them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import comgra_decl as comgra
from comgra_decl.viewer.graph.folding import scope_tree, visible_boxes
from comgra_decl.viewer.graph.layout import build_scene
from comgra_decl.viewer.model.graph import Graph, graph_of, loose_of
from comgra_decl.viewer.model.runview import RunView
from comgra_decl.viewer.model.selection import Selection

LAYERS = 12


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(20, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS)
        self.head = nn.Linear(16, 20)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.emb(tokens)))


class Cell(nn.Module):
    """Passes on a state, and reads running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.core = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.norm.eval()
        state = self.core(self.norm(x) + state)
        return state * 2, state


class Forked(nn.Module):
    """Two heads, each of which reads a different output of the same module."""

    def __init__(self) -> None:
        super().__init__()
        self.core = nn.LSTM(3, 3, batch_first=True)
        self.steps, self.last = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps, (last, _) = self.core(x)
        return self.steps(steps).sum() + self.last(last).sum()


@pytest.fixture
def drawn(tmp_path: Path) -> Callable[[nn.Module, Callable[[], None], list[str]], Graph]:
    """Runs two steps of a program under trace and returns the graph of the second."""

    def draw(model: nn.Module, program: Callable[[], None], capture: list[str]) -> Graph:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        spec = {"nodes": {"all": {"select": "**", "capture": capture}}, "schedule": {"first": 9}}
        with comgra.trace(spec, root=tmp_path) as session:
            for _ in range(2):
                program()
                optimizer.step()
        assert session.path is not None
        return graph_of(RunView(comgra.open_run(session.path)), Selection(step=1))

    return draw


def test_the_layers_of_a_transformer_fold_into_one_box(
    drawn: Callable[[nn.Module, Callable[[], None], list[str]], Graph],
) -> None:
    model = Transformer()

    def program() -> None:
        model(torch.randint(0, 20, (4, 8))).sum().backward()

    graph = drawn(model, program, ["output", "parameter"])
    opened = frozenset({"encoder", "encoder.layers"})
    boxes = visible_boxes(scope_tree(graph.nodes), opened, limit=10)
    folded = {box.id: len(box.scopes) for box in boxes}
    assert folded[f"encoder.layers.0..{LAYERS - 1}"] == LAYERS
    assert ("encoder.layers.0", "encoder.layers.1.self_attn", True) in graph.edges


def test_states_and_statistics_are_nodes_of_their_own(
    drawn: Callable[[nn.Module, Callable[[], None], list[str]], Graph],
) -> None:
    model, states = Cell(), [torch.zeros(4, 3)]

    def program() -> None:
        out, state = model(torch.randn(4, 3), states[-1])
        out.sum().backward()
        states.append(state.detach())

    graph = drawn(model, program, ["output", "buffer"])
    kinds = {node.name: node.kind for node in graph.nodes}
    assert kinds["norm.running_mean"] == "buffer"
    assert kinds["Cell[1] (earlier step)"] == "input"
    assert ("norm.running_mean", "norm", False) in graph.edges
    assert ("Cell[1] (earlier step)", "input", False) in graph.edges
    assert graph.parameters["Cell[1] (earlier step)"] == ("Cell", "output[1]")


def test_only_what_the_chosen_role_is_joined_with_is_marked_as_such(
    drawn: Callable[[nn.Module, Callable[[], None], list[str]], Graph],
) -> None:
    model = Forked()
    graph = drawn(model, lambda: model(torch.randn(2, 4, 3)).backward(), ["output", "parameter"])
    scene = build_scene(graph.nodes, graph.edges, expanded=frozenset())

    def loose(node: str, role: str) -> set[str]:
        found = loose_of(Selection(node=node, role=role), graph, scene)
        assert found["of"] == graph.name_of(Selection(node=node, role=role))
        return set(found["boxes"]) & {"steps", "last"}

    assert loose("core", "output[0]") == {"last"}
    assert loose("core", "output[1][0]") == {"steps"}
    assert loose("steps", "output") == loose("last", "output") == set()


def test_parameters_of_checkpoints_are_no_nodes_beside_those_of_their_modules(
    tmp_path: Path,
) -> None:
    spec = {
        "nodes": {"all": {"select": "**", "capture": ["output", "parameter"]}},
        "checkpoints": {"every": 1},
    }
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    drawn = []
    for number, each in enumerate((spec, {**spec, "checkpoints": None})):
        with comgra.trace(each, root=tmp_path / str(number), group="g") as session:
            optimizer.zero_grad()
            model(torch.randn(5, 3)).square().mean().backward()
            optimizer.step()
        assert session.path is not None
        view = RunView(comgra.open_run(session.path))
        graph = graph_of(view, Selection(step=0))
        drawn.append({node.name for node in graph.nodes})
    assert drawn[0] == drawn[1]
    assert "0.weight" in drawn[0]
