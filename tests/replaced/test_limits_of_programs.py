"""Programs that comgra cannot follow are followed here (L15 to L29)."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import comgra_decl as comgra
from comgra_decl.query import list_runs
from tests.replaced.made import ALL, EVERYTHING, Made, losses_of, mlp
from tests.support.forked import Program
from tests.support.traced import traced, train


def test_l15_an_input_is_connected_whatever_is_called_when(tmp_path: Path) -> None:
    run = traced(tmp_path, ALL, lambda: losses_of(mlp(), steps=1))
    assert ("input", "0") in run.edges()


def test_l16_a_loss_with_weights_and_a_second_net_are_part_of_the_graph(tmp_path: Path) -> None:
    class Criterion(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.scale).square().sum()

    def training() -> None:
        encoder, decoder, criterion = nn.Linear(3, 4), nn.Conv1d(1, 2, 4), Criterion()
        parameters = [p for m in (encoder, decoder, criterion) for p in m.parameters()]
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        for _ in range(2):  # until they are known to be parts of one program
            hidden = decoder(encoder(torch.randn(5, 3)).unsqueeze(1)).squeeze(2)
            criterion(hidden).backward()
            optimizer.step()
            optimizer.zero_grad()

    run = traced(tmp_path, EVERYTHING, training)
    assert {("Linear", "Conv1d"), ("Conv1d", "Criterion")} <= {*run.edges()}
    assert np.isfinite(run.slot("Criterion", role="scale", of="grad").series("mean")[1])


def test_l17_tied_weights_have_all_their_names(tmp_path: Path) -> None:
    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        return net.head(net.embed(x))

    embed, head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
    head.weight = embed.weight
    net = Made(forward, embed=embed, head=head)
    run = traced(tmp_path, EVERYTHING, lambda: train(net, torch.tensor([1, 2])))
    slots = run.slots
    weights = slots[(slots.kind == "parameter") & (slots["pass"] == "forward")]
    assert len(weights) == 1
    (module,) = [m for m in run.modules if m["path"] == "head"]
    assert module["parameters"]["weight"]["tied_to"] == "embed.weight"


def test_l17_a_module_in_two_places_is_one(tmp_path: Path) -> None:
    shared = nn.Linear(3, 3)
    twice = nn.Sequential(nn.Sequential(shared), nn.Sequential(shared))
    run = traced(
        tmp_path,
        EVERYTHING,
        lambda: train(twice, torch.ones(2, 3)),
    )
    slots = run.slots[(run.slots.kind == "computed") & (run.slots["pass"] == "forward")]
    assert slots[slots.module_class == "Linear"].iteration.tolist() == [0, 1]


def test_l18_changes_in_place_are_no_obstacle(tmp_path: Path) -> None:
    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        return F.relu_(net.linear(x.mul_(2)))

    net, x = Made(forward, linear=nn.Linear(3, 2)), torch.ones(2, 3)
    before = net.get_submodule("linear")(x * 2).detach().numpy()
    run = traced(tmp_path, ALL, lambda: train(net, x))
    np.testing.assert_array_equal(run.value("linear", 0), before)
    np.testing.assert_array_equal(x.numpy(), 2 * np.ones((2, 3)))


def test_l19_thousands_of_operations_lie_between_two_nodes(tmp_path: Path) -> None:
    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        x = net.first(x)
        for _ in range(3000):
            x = x + 1e-6
        return net.last(x)

    net = Made(forward, first=nn.Linear(3, 3), last=nn.Linear(3, 1))
    run = traced(tmp_path, ALL, lambda: train(net, torch.ones(2, 3)))
    assert ("first", "last") in run.edges()


def test_l20_two_losses_are_not_added_up(tmp_path: Path) -> None:
    def training() -> None:
        net = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        out = net(torch.ones(2, 3))
        out.sum().backward(retain_graph=True)
        (out.sum() * 10).backward()
        optimizer.step()

    run = traced(tmp_path, EVERYTHING, training)
    slots = run.slots
    passes = slots["pass"][(slots.node == "Linear") & (slots.role == "output")].tolist()
    means = [run.slot("Linear", of=p).series("mean")[0] for p in passes if p.startswith("grad")]
    assert means == [1, 10]


def test_l21_an_error_within_a_step_does_no_harm(tmp_path: Path) -> None:
    def training() -> None:
        net = mlp()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(4):
            try:
                out = net(torch.ones(2, 4))
                if step == 1:
                    net(torch.ones(2, 5))  # shapes that do not match
                out.sum().backward()
            except RuntimeError:
                continue
            optimizer.step()

    run = traced(tmp_path, ALL, training)
    assert len(run.steps) == 3
    assert run.state == "finished"


def test_l22_nothing_has_an_order_or_an_alphabet(tmp_path: Path) -> None:
    def training() -> None:
        net = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(2):
            comgra.tag("two words, and *")
            comgra.kpi("twice", 1)
            comgra.kpi("twice", 2)
            net(torch.ones(2, 3)).sum().backward()
            optimizer.step()

    run = traced(tmp_path, ALL, training)
    assert run.types == ["two words, and *"]
    kpis = run.kpis()
    assert kpis.value[kpis.name == "twice"].tolist()[-1] == 2


def test_l22_a_wrong_declaration_is_told_before_anything_is_computed(tmp_path: Path) -> None:
    with (
        pytest.raises(
            comgra.ComgraError, match=r"(?s)cnt.*did you mean 'count'.*evry.*did you mean 'every'"
        ),
        comgra.trace({"schedule": {"evry": 2}, "samples": {"cnt": 2}}, root=tmp_path),
    ):
        raise AssertionError("not reached")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_l23_compiled_models_are_recorded(tmp_path: Path, backend: str) -> None:
    model = mlp()
    run = traced(tmp_path, ALL, lambda: losses_of(torch.compile(model, backend=backend), steps=3))
    assert run.steps.tolist() == [0, 1, 2]
    assert any(node.endswith("0") for node in run.nodes)


def test_l24_buffers_are_recorded(tmp_path: Path) -> None:
    norm = nn.BatchNorm1d(3)
    buffers = {"buffers": {"select": "**", "capture": ["buffer"], "values": True}}
    run = traced(tmp_path, buffers, lambda: train(norm, torch.randn(8, 3), steps=2))
    np.testing.assert_array_equal(
        run.slot("BatchNorm1d", role="running_mean").value(0), [[0, 0, 0]]
    )
    assert (run.slot("BatchNorm1d", role="running_mean").value(1) != 0).all()


RUNNER = """
import sys
import torch
import comgra_decl as comgra

with comgra.trace("debug", root=sys.argv[1], group="g", name="same"):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
"""


def test_l25_two_processes_with_one_name_have_two_runs(tmp_path: Path) -> None:
    for program in [Program(tmp_path, "-c", RUNNER, tmp_path) for _ in range(2)]:
        assert program.ended().returncode == 0
    runs = list_runs(tmp_path)
    assert sorted(run.name for run in runs) == ["same", "same-2"]
    assert [run.records for run in runs] == [5, 5]


def test_l26_what_is_not_finite_is_counted(tmp_path: Path) -> None:
    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        return net.root(net.linear(x))

    net = Made(forward, linear=nn.Linear(3, 2), root=nn.Identity())
    x = torch.tensor([[1.0, 1.0, 1.0], [float("nan"), 1.0, 1.0]])
    run = traced(tmp_path, ALL, lambda: train(net, x), keep={"when": ["nonfinite"], "ring": 0})
    assert run.series("root", "nonfinite", over_batch="abs_max")[0] == 2
    assert run.slot("root").samples("nonfinite")[0][0] == 0
    assert "nonfinite" in str(run.records.kept[0])


def test_l27_names_may_hold_anything(tmp_path: Path) -> None:
    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        return comgra.node(net.node__x(x), "a.b * [c] / ü")

    run = traced(
        tmp_path, ALL, lambda: train(Made(forward, node__x=nn.Linear(3, 2)), torch.ones(2, 3))
    )
    assert {"node__x", "a.b * [c] / ü"} <= {*run.nodes}
    assert run.value("a.b * [c] / ü", 0).shape == (2, 2)


class Kept(torch.autograd.Function):
    """Holds an object in the graph, to show when the graph is freed."""

    watched: list[weakref.ref[Any]] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.held = Held()
        Kept.watched.append(weakref.ref(ctx.held))
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


held: Callable[[torch.Tensor], torch.Tensor] = Kept.apply


class Held:
    """An object that a weak reference can refer to."""


def test_l28_the_graph_of_autograd_is_freed_as_early_as_without_tracing(tmp_path: Path) -> None:
    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        return net.last(held(net.first(x)))

    alive: list[bool] = []

    def training() -> None:
        net = Made(forward, first=nn.Linear(4, 3), last=nn.Linear(3, 1))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(2):
            net(torch.ones(2, 4)).sum().backward()
            gc.collect()
            alive.append(Kept.watched.pop()() is not None)
            optimizer.step()

    traced(tmp_path, EVERYTHING, training)
    assert alive == [False, False]


HASH = """
import sys
import torch
import comgra_decl as comgra

def name(root):
    torch.manual_seed(0)
    with comgra.trace("debug", root=root) as session:
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    return comgra.open_run(session.path).structure().hash
"""


@pytest.mark.slow
def test_l29_the_same_graph_has_the_same_name_in_every_process(tmp_path: Path) -> None:
    seed = "1" if sys.flags.hash_randomization else "random"  # whatever this process does not use
    other = subprocess.run(
        [sys.executable, "-c", f"{HASH}\nprint(name(sys.argv[1]))", str(tmp_path)],
        env={"PYTHONHASHSEED": seed, "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    here: dict[str, Any] = {}
    exec(HASH, here)
    assert here["name"](tmp_path) == other.stdout.strip()
