"""The dependency graph equals the one that a person would draw from the code."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from comgra_decl.hooks.graph import provenance
from tests.support.recording import EVERYTHING, recording

NODES = {"nodes": {"all": {"select": "**", "capture": ["output", "output_grad"]}}}


class Model(nn.Module):
    """Layers a, b, c of width 3 and an injected forward pass."""

    def __init__(self, forward: Callable[[Model, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.b = nn.Linear(3, 3)
        self.c = nn.Linear(3, 3)
        self.e = nn.Embedding(3, 3)
        self._forward = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._forward(self, x)


def graph(
    forward: Callable[[Model, torch.Tensor], torch.Tensor], *, steps: int = 1
) -> set[tuple[str, str]]:
    model = Model(forward)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(NODES, schedule={"first": 100}) as run:
        for _ in range(steps):
            model(torch.randn(4, 3)).sum().backward()
            optimizer.step()
    assert run.faults == []
    return {(s, t) for s, t in run.edges() if "Model" not in (s, t) and t != "loss"}


def in_place_write(m: Model, x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(4, 3)
    out[0] = m.a(x)[0]
    return m.c(out + m.b(x))


def view_then_mutation(m: Model, x: torch.Tensor) -> torch.Tensor:
    buffer = torch.zeros(4, 3)
    view = buffer[:2]
    buffer.add_(m.a(x).detach())
    return m.b(view) if view.requires_grad else m.b(view).sum(0) + m.c(x)


@pytest.mark.parametrize(
    ("forward", "expected"),
    [
        (lambda m, x: m.b(m.a(x)), {("input", "a"), ("a", "b")}),
        (lambda m, x: m.b(x + m.a(x)), {("input", "a"), ("input", "b"), ("a", "b")}),
        (lambda m, x: m.b(F.relu(m.a(x)) * 2).clone(), {("input", "a"), ("a", "b")}),
        (lambda m, x: m.b(m.a(x).detach()), {("input", "a"), ("a", "b")}),
        (lambda m, x: m.c(m.e(m.a(x).argmax(1))), {("input", "a"), ("a", "e"), ("e", "c")}),
        (lambda m, x: m.b(torch.zeros_like(m.a(x)) + x), {("input", "a"), ("input", "b")}),
        (lambda m, x: m.b(x[m.a(x)[:, 0] > 0]), {("input", "a"), ("input", "b"), ("a", "b")}),
        (
            lambda m, x: m.c(torch.cat([m.a(x), m.b(x)])[:4]),
            {("input", "a"), ("input", "b"), ("a", "c"), ("b", "c")},
        ),
        (
            lambda m, x: m.c(torch.where(m.a(x) > 0, m.b(x), x)),
            {("input", "a"), ("input", "b"), ("input", "c"), ("a", "c"), ("b", "c")},
        ),
        (in_place_write, {("input", "a"), ("input", "b"), ("a", "c"), ("b", "c")}),
        (view_then_mutation, {("input", "a"), ("a", "b"), ("input", "c")}),
        (
            lambda m, x: F.scaled_dot_product_attention(m.a(x), m.b(x), m.c(x)),
            {("input", "a"), ("input", "b"), ("input", "c")},
        ),
    ],
)
def test_edges_between_traced_tensors(
    forward: Callable[[Model, torch.Tensor], torch.Tensor], expected: set[tuple[str, str]]
) -> None:
    assert graph(forward) - {("loss", "loss")} == expected


class Tapped(nn.Module):
    """Reads a layer's output in a hook on it, like feature extractors."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        super().__init__()
        self.before, self.tapped, self.after = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.kept: list[torch.Tensor] = []
        self.change = change
        self.tapped.register_forward_hook(self.take)

    def take(self, _module: nn.Module, _args: object, output: torch.Tensor) -> torch.Tensor | None:
        self.kept = [output * 3]
        return self.change(output)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.tapped(self.before(x))
        return torch.as_tensor(self.after(self.kept[0]))


@pytest.mark.parametrize(
    ("change", "edges"),
    [
        (lambda _: None, {("before", "tapped"), ("tapped", "after")}),
        (lambda out: out * 2, {("before", "tapped"), ("tapped", "after")}),
        (torch.zeros_like, {("tapped", "after")}),
        (lambda _: torch.ones(4, 3), {("tapped", "after")}),
    ],
    ids=["as it is", "scaled", "zeros like it", "replaced"],
)
def test_what_a_hook_takes_from_a_layer_comes_from_that_layer(
    change: Callable[[torch.Tensor], torch.Tensor | None], edges: set[tuple[str, str]]
) -> None:
    model = Tapped(change)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording() as run:
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    assert run.faults == []
    names = {"before", "tapped", "after"}
    assert {edge for edge in run.edges() if names.issuperset(edge)} == edges


def test_parameters_are_sources_of_their_module_and_the_loss_is_the_last_node() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording() as run:
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    assert run.edges() == {
        ("input", "0"),
        ("0.weight", "0"),
        ("0.bias", "0"),
        ("0", "Sequential"),
        ("Sequential", "loss"),
    }


def test_an_edge_says_whether_gradient_flows() -> None:
    model = Model(lambda m, x: m.c(m.a(x).detach() + m.b(x)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(NODES) as run:
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    found = run.structures[0]
    names = [key.node for key in found.keys]
    flows = {(names[s], names[t]): grad for s, t, grad in found.edges}
    assert flows["a", "c"] is False
    assert flows["b", "c"] is True


def test_iterations_are_nodes_of_their_own_in_the_graph() -> None:
    def recurrent(m: Model, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros(4, 3)
        for _ in range(3):
            state = m.a(state + x)
        return m.b(state)

    model = Model(recurrent)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(NODES) as run:
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    found = run.structures[0]
    named = {(found.keys[s][:3], found.keys[t][:3]) for s, t, _ in found.edges}
    assert (("a", "output", 0), ("a", "output", 1)) in named
    assert (("a", "output", 1), ("a", "output", 2)) in named
    assert (("a", "output", 2), ("b", "output", 0)) in named
    assert (("a", "output", 0), ("b", "output", 0)) not in named


def test_a_graph_is_stored_once_and_each_record_names_its_own() -> None:
    model = Model(lambda m, x: m.b(m.a(x)) if x.shape[0] == 4 else m.c(m.a(x)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(EVERYTHING) as run:
        for batch in (4, 4, 5, 5, 4, 5):
            model(torch.randn(batch, 3)).sum().backward()
            optimizer.step()
    hashes = [s.info.structure for s in run.steps]
    assert len(run.structures) == 2
    assert hashes[0] == hashes[1] == hashes[4] == run.structures[0].hash
    # The first step of a new form is recognised when it ends; the next such step is followed.
    assert hashes[3] == hashes[5] == run.structures[1].hash


def test_the_same_model_has_the_same_graph_hash() -> None:
    hashes = set()
    for _ in range(2):
        model = Model(lambda m, x: m.b(m.a(x)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with recording() as run:
            model(torch.randn(4, 3)).sum().backward()
            optimizer.step()
        hashes.add(run.structures[0].hash)
    assert len(hashes) == 1


def test_a_value_taken_out_of_torch_is_reported_as_a_cut() -> None:
    model = Model(lambda m, x: m.b(x * m.a(x).mean().item()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(NODES) as run:
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    assert run.structures[0].cuts == ["a.item()"]


def test_the_users_own_modes_survive() -> None:
    model = Model(lambda m, x: m.b(m.a(x)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(NODES, schedule={"first": 1, "every": 50}) as run:
        with torch.device("meta"):
            pass
        with torch.device("cpu"):
            model(torch.randn(4, 3)).sum().backward()
            optimizer.step()
        assert torch._C._len_torch_function_stack() == 0
    assert run.faults == []


def test_a_graph_with_too_many_edges_is_given_up_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a residual stream, each part depends on all parts before it."""
    monkeypatch.setattr(provenance, "MOST_EDGES", 40)
    layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(12)])
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)

    class Stream(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + layer(x)
            return x

    model = Stream()
    with recording(NODES, schedule={"first": 100}) as run:
        for _ in range(3):
            model(torch.randn(4, 3)).sum().backward()
            optimizer.step()
    assert run.faults == []
    assert len(run.steps) == 3
    assert all(raw.structure is None and raw.info.structure is None for raw in run.steps)
    (said,) = [text for text in run.report["warnings"] if "graph" in text]
    assert "graph: false" in said
