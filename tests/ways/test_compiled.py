"""Compiled programs: recorded steps run eagerly, all others as compiled, and nothing twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.recording import recording
from tests.support.shortened import shortened
from tests.ways.models import batches
from tests.ways.proof import FULL, Outcome, Told, attached, outcome, same, seeded, verify

SPEC = {**FULL, "schedule": {"first": 1, "every": 3}}
INDUCTOR_STEPS = 200

# torch's own imports for compiling raise warnings
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


class Block(nn.Module):
    """Two layers."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.one = nn.Linear(inputs, 8)
        self.two = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.two(torch.relu(self.one(x))))


class Graphs:
    """A backend that runs its graph unchanged, and counts compilations."""

    def __init__(self) -> None:
        self.compiled = 0

    def __call__(self, graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        self.compiled += 1
        return graph.forward


def model() -> nn.Sequential:
    return nn.Sequential(Block(6), Block(8), nn.Linear(8, 3))


def whole(backend: Any) -> tuple[Any, nn.Module]:
    net = model()
    return torch.compile(net, backend=backend), net


def fullgraph(backend: Any) -> tuple[Any, nn.Module]:
    net = model()
    return torch.compile(net, backend=backend, fullgraph=True), net


def in_place(backend: Any) -> tuple[Any, nn.Module]:
    net = model()
    net.compile(backend=backend)
    return net, net


def blocks(backend: Any) -> tuple[Any, nn.Module]:
    net = model()
    net[0].compile(backend=backend)
    net[1].compile(backend=backend)
    return net, net


def wrapped_blocks(backend: Any) -> tuple[Any, nn.Module]:
    net = model()
    net[0] = torch.compile(net[0], backend=backend)  # type: ignore[assignment]
    return net, net


WAYS = {
    "whole": whole,
    "fullgraph": fullgraph,
    "in place": in_place,
    "blocks": blocks,
    "wrapped": wrapped_blocks,
}


def train(told: Told, way: Any, backend: Any, steps: int = 8) -> Outcome:
    called, net = way(backend)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    losses = []
    for x, y in batches(steps):
        output = called(x)
        told("2", output)
        told.gradient("2", output)
        loss = F.cross_entropy(output, y)
        optimizer.zero_grad()
        loss.backward()
        told("2", net[2].weight.grad, "weight", pass_="grad")
        optimizer.step()
        told.end()
        losses.append(loss.item())
    return outcome(losses, net, optimizers=[optimizer])


@pytest.mark.parametrize(
    "way", shortened(["whole", "blocks", "in place", "fullgraph", "wrapped"], tried=3)
)
def test_compiled_code_is_recorded_and_compiled_once(way: str) -> None:
    """With a backend that leaves the arithmetic unchanged, so no bit may differ."""
    told = Told(listening=True)
    graphs, traced_graphs = Graphs(), Graphs()
    plain = seeded(lambda t: train(t, WAYS[way], graphs), told)
    before = attached()
    torch.compiler.reset()
    with recording(SPEC) as traced:
        found = seeded(lambda t: train(t, WAYS[way], traced_graphs), Told(listening=False))
    same(plain, found)
    assert traced.faults == []
    assert attached() == before
    assert [s.info.step for s in traced.steps] == [0, 3, 6]
    assert traced_graphs.compiled == graphs.compiled > 0
    told.values = {key: value for key, value in told.values.items() if key[0] % 3 == 0}
    verify(traced, told)
    assert traced.has("0.one", step=1)


def test_the_stance_of_the_program_is_put_back() -> None:
    from torch._dynamo import eval_frame

    graphs = Graphs()
    with torch.compiler.set_stance("eager_on_recompile"):
        mine = eval_frame._stance
        with recording(SPEC) as traced:
            train(Told(listening=False), whole, graphs, steps=2)
            assert eval_frame._stance == mine
    assert traced.faults == []


@pytest.mark.slow
@pytest.mark.parametrize("how", ["eager", "observed"])
def test_inductor_rounds_otherwise_and_by_how_much(how: str, record_property: Any) -> None:
    """Compiled kernels add in another order: compare how far apart the losses are."""
    plain = seeded(lambda t: train(t, whole, "inductor", INDUCTOR_STEPS), Told(listening=False))
    torch.compiler.reset()
    with recording({**SPEC, "compile": how, "graph": False}) as traced:
        found = seeded(lambda t: train(t, whole, "inductor", INDUCTOR_STEPS), Told(listening=False))
    assert traced.faults == []
    loss = max(abs(a - b) for a, b in zip(plain.losses, found.losses, strict=True))
    weights = max(
        float((a - b).abs().max())
        for (name, a), b in zip(plain.tensors.items(), found.tensors.values(), strict=True)
        if a is not None and b is not None and name.endswith(("weight", "bias"))
    )
    record_property("largest difference of a loss", loss)
    record_property("largest difference of a weight", weights)
    print(f"losses differ by at most {loss:.1e}, weights by {weights:.1e}")  # noqa: T201
    assert loss < 1e-5
    assert weights < 1e-4


def test_a_step_that_is_compiled_whole_ends_with_the_programs_word() -> None:
    """No optimizer hook runs in compiled code, so `comgra.step()` outside it ends the steps."""
    import comgra_decl as comgra

    graphs = Graphs()

    def training(_: Told) -> Outcome:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        step = torch.compile(optimizer.step, backend=graphs)
        losses = []
        for x, y in batches(4):
            loss = F.cross_entropy(net(x), y)
            optimizer.zero_grad()
            loss.backward()
            step()
            comgra.step()
            losses.append(loss.item())
        return outcome(losses, net)

    plain = seeded(training, Told(listening=False))
    torch.compiler.reset()
    with recording({**SPEC, "schedule": {"first": 100, "step": "explicit"}}) as traced:
        found = seeded(training, Told(listening=False))
    same(plain, found)
    assert traced.faults == []
    assert [s.info.step for s in traced.steps] == [0, 1, 2, 3]


def test_a_part_that_is_compiled_and_called_alone_is_not_said_to_be_uncalled() -> None:
    """The node is named after its class, because the whole that contains it is never called."""
    first, second = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    whole = nn.Sequential(first, second)
    called = torch.compile(second, backend="aot_eager")
    optimizer = torch.optim.SGD(whole.parameters(), 0.1)
    with recording({"nodes": {"all": {"select": "**"}}, "schedule": {"first": 3}}) as traced:
        for _ in range(3):
            called(first(torch.randn(2, 4))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert traced.report["warnings"] == []
