"""Names of graphs, declared edges and cuts: what a run reports about its structures."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import comgra_decl as comgra
from comgra_decl.query import Run
from tests.hooks.graph.drawing import OUTPUTS, Forward, Net, arrows, drawn, followed

END = "c => Net => loss"


@pytest.fixture
def traced(tmp_path: Path) -> Callable[..., Run]:
    """Trains a `Net` for some steps under `comgra_decl.trace` and opens its run."""

    def trace(forward: Forward, *, steps: int = 3) -> Run:
        model = Net(forward)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        content = {**OUTPUTS, "schedule": {"first": 1000}}
        with comgra.trace(content, root=tmp_path) as session:
            for _ in range(steps):
                model(torch.randn(4, 3)).sum().backward()
                optimizer.step()
        assert session.path is not None
        return comgra.open_run(session.path)

    return trace


def graph(run: Run, step: int | None = None) -> set[str]:
    structure = run.structure(step)
    assert structure is not None
    return drawn(structure)


# -- declared edges ----------------------------------------------------------------------------


def through_numpy(m: Net, x: torch.Tensor) -> torch.Tensor:
    hidden = m.a(x)
    back = torch.from_numpy(np.tanh(hidden.detach().numpy()))
    comgra.connect(hidden, back)
    return m.c(back)


def between_outputs(m: Net, x: torch.Tensor) -> torch.Tensor:
    first, second = m.a(x), m.b(x)
    comgra.connect([first], {"sink": second})
    return m.c(second)


def by_name(m: Net, x: torch.Tensor) -> torch.Tensor:
    comgra.connect("a", "b")
    return m.c(m.a(x) + m.b(x))


@pytest.mark.parametrize(
    ("forward", "expected"),
    [
        (through_numpy, "input -> a -> c"),
        (between_outputs, "input -> a -> b => c, input -> b"),
        (by_name, "input -> a -> b => c, input -> b, a => c"),
    ],
    ids=["through numpy", "between outputs", "by name"],
)
def test_a_stated_edge(traced: Callable[..., Run], forward: Forward, expected: str) -> None:
    assert graph(traced(forward)) == arrows(expected) | arrows(END)


def test_a_stated_edge_with_a_wrong_name_is_reported(traced: Callable[..., Run]) -> None:
    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        comgra.connect("a", "bb")
        comgra.connect("a", x)
        return m.c(m.b(m.a(x)))

    warnings = " ".join(traced(forward).report["warnings"])
    assert "the name of a node that did not run: 'bb'; did you mean 'b'?" in warnings
    assert "comgra.connect() takes two tensors or two node names" in warnings


# -- cuts --------------------------------------------------------------------------------------


def leaves_torch(m: Net, x: torch.Tensor) -> torch.Tensor:
    hidden = m.a(x)
    scale = hidden.mean().item() + sum(hidden[0].tolist())
    if (m.b(x) > 0).any():
        scale += 1
    return m.c(torch.from_numpy(hidden.detach().numpy() + np.float32(scale)))


def test_values_that_leave_torch_are_reported(traced: Callable[..., Run]) -> None:
    run = traced(leaves_torch)
    assert run.cuts() == ["a.item()", "a.tolist()", "b.__bool__()", "a.numpy()"]
    assert graph(run) == arrows("input -> a, input -> b, c => Net => loss")


def test_printing_and_logging_the_loss_cuts_nothing(traced: Callable[..., Run]) -> None:
    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        hidden = m.a(x)
        f"{hidden.detach().sum():.3f} {hidden.shape} {len(hidden)} {hidden!r}"
        return m.c(hidden)

    assert traced(forward).cuts() == []


# -- earlier steps -----------------------------------------------------------------------------


def test_a_tensor_of_an_earlier_step_is_a_node_of_its_own(traced: Callable[..., Run]) -> None:
    kept = [torch.zeros(4, 3)]

    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        hidden = m.a(x + kept[-1])
        kept.append(hidden.detach())
        return m.c(hidden)

    run = traced(forward, steps=25)
    assert run.edges(0) == [("input", "a"), ("a", "c"), ("c", "Net"), ("Net", "loss")]
    assert set(run.edges(24)) == {*run.edges(0), ("a (earlier step)", "a")}
    assert run.records["structure"][1:].nunique() == 1


# -- names -------------------------------------------------------------------------------------


def test_a_graph_is_stored_once_per_run(traced: Callable[..., Run]) -> None:
    steps = iter(range(100))

    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        return m.c(m.a(x)) if next(steps) % 2 else m.c(m.b(x))

    run = traced(forward, steps=12)
    names = run.records["structure"].tolist()
    assert len(set(names[2:])) == 2
    assert len({name for name in names if name}) == 2
    assert graph(run, 10) == arrows("input -> b => c => Net => loss")
    assert graph(run, 11) == arrows("input -> a => c => Net => loss")


PROGRAM = """
import random, sys
import torch
from tests.hooks.graph.drawing import Net, followed, PARAMETERS

waste = [object() for _ in range(int(sys.argv[1]))]  # other addresses, so other ids
model = Net(lambda m, x: m.c(m.a(x) + m.b(x) + m.e(x.argmax(1))))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with followed(PARAMETERS) as run:
    for _ in range(2):
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
print(" ".join(s.hash for s in run.structures))
"""


@pytest.mark.slow
def test_the_name_of_a_graph_is_the_same_in_every_process() -> None:
    names = {_in_a_process(seed, waste) for seed, waste in (("0", "0"), ("12345", "100001"))}
    assert len(names) == 1
    assert len(names.pop().split()) == 1


def _in_a_process(seed: str, waste: str) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, waste],
        env=environment, cwd=Path(__file__).parents[3],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    return done.stdout.strip()


def test_the_name_of_a_graph_depends_on_its_edges_and_their_gradient() -> None:
    plain = name_of(lambda m, x: m.c(m.a(x)))
    assert plain == name_of(lambda m, x: m.c(m.a(x).relu()))
    assert plain != name_of(lambda m, x: m.c(m.a(x).detach()))
    assert plain != name_of(lambda m, x: m.c(m.a(x) + x))


def name_of(forward: Forward) -> str:
    model = Net(forward)
    with followed() as run:
        model(torch.randn(4, 3)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.01).step()
    return str(run.structures[0].hash)
