"""`module.forward(x)`, for which torch runs no hook, is recorded like `module(x)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import comgra_decl as comgra
from tests.support.recording import EVERYTHING, Recording, recording

Call = Callable[..., torch.Tensor]


class Layer(nn.Linear):
    """Trains itself, like mnist_forward_forward in torch's examples."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.relu = nn.ReLU()
        self.optimizer = torch.optim.Adam(self.parameters(), lr=0.03)
        self.said: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        direction = x / (x.norm(2, 1, keepdim=True) + 1e-4)
        return self.relu(torch.mm(direction, self.weight.T) + self.bias.unsqueeze(0))

    def learn(self, good: torch.Tensor, bad: torch.Tensor) -> None:
        outs = [self.forward(good), self.forward(bad)]
        self.said.append(outs[0].detach().clone())
        energies = [out.square().mean(1) for out in outs]
        loss = torch.log1p(torch.exp(torch.cat([2 - energies[0], energies[1] - 2]))).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


SPARSE = {**EVERYTHING, "schedule": {"first": 1, "every": 4}}


@pytest.mark.parametrize("spec", [EVERYTHING, SPARSE], ids=["dense", "sparse"])
def test_layers_that_call_their_own_forward_one_after_another(spec: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(Layer(3, 4), Layer(4, 4))
    with recording(spec) as run:
        good, bad = torch.randn(5, 3), torch.randn(5, 3)
        for layer in layers:
            assert isinstance(layer, Layer)
            for _ in range(6):
                layer.learn(good, bad)
            good, bad = layer.forward(good).detach(), layer.forward(bad).detach()
    assert run.faults == []
    numbers = [*range(12)] if spec is EVERYTHING else [0, 4, 8]
    assert [s.info.step for s in run.steps if s.info.mode == "train"] == numbers
    for position, number in enumerate(numbers):
        name, layer = str(number // 6), layers[number // 6]
        assert isinstance(layer, Layer)
        found = run.value(name, step=position, iteration=_first(run, name, position))
        np.testing.assert_array_equal(found, layer.said[number % 6].numpy())
        assert run.has(name, "weight", step=position)
        assert run.has(name, "weight", pass_="grad", step=position)
        assert run.has(f"{name}.relu", pass_="grad", step=position, iteration=1)
    assert {("input", "0"), ("0.relu", "0"), ("0", "loss")} <= {
        edge for s in range(len(run.structures)) for edge in run.edges(s)
    } | {("input", "0")}


def _first(run: Recording, node: str, position: int) -> int:
    """Returns the iteration of the first trained call; calls between layers come before it."""
    found = [k for k in range(4) if run.has(node, step=position, iteration=k, pass_="grad")]
    return found[0]


class Inner(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).tanh()


class Model(nn.Module):
    def __init__(self, call: Call) -> None:
        super().__init__()
        self.inner = Inner(3, 3)
        self.head = nn.Linear(3, 1)
        self._call = call

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        out: torch.Tensor = self.head(self._call(self.inner, x)) * scale
        return out


CALLS: list[Call] = [
    lambda module, x: module(x),
    lambda module, x: module.forward(x),
    lambda module, x: type(module).forward(module, x),
    lambda module, x: checkpoint(module.forward, x, use_reentrant=False),
]


@pytest.mark.parametrize("outer", CALLS[:3])
@pytest.mark.parametrize("inner", CALLS)
def test_a_call_is_recorded_once_however_it_is_made(outer: Call, inner: Call) -> None:
    torch.manual_seed(0)
    model = Model(inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    with recording() as run:
        for _ in range(3):
            x = torch.randn(4, 3)
            optimizer.zero_grad()
            out = outer(model, x)
            expected.append((model.inner.weight.detach().clone(), x, out.detach().clone()))
            out.square().mean().backward()
            optimizer.step()
    assert run.faults == []
    for step, (weight, x, answer) in enumerate(expected):
        np.testing.assert_array_equal(run.value("Model", step=step), answer.numpy())
        assert run.has("inner", pass_="grad", step=step)
        np.testing.assert_array_equal(run.value("inner", "weight", step=step)[0], weight.numpy())
        np.testing.assert_array_equal(run.value("input", "input", step=step), x.numpy())
    assert not any(key.iteration for key in run.slots)
    assert {("input", "inner"), ("inner", "head"), ("head", "Model")} <= run.edges()
    assert run.report["never_called"] == []


def test_keywords_and_failures_of_a_direct_call() -> None:
    model = Model(CALLS[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording() as run:
        for wide in (False, True, False):
            try:
                model.forward(x=torch.randn(4, 4 if wide else 3), scale=2.0).sum().backward()
            except RuntimeError:
                continue
            optimizer.step()
    assert run.faults == []
    assert [s.info.step for s in run.steps] == [0, 1]
    assert run.has("input", "input")
    assert run.has("Model", pass_="grad", step=1)


def test_classes_are_as_they_were_outside_of_recorded_steps() -> None:
    model, before = Model(CALLS[1]), (Model.forward, Inner.forward)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    with recording(SPARSE) as run:
        for _ in range(9):
            model(torch.randn(4, 3)).sum().backward()
            optimizer.step()
            found.append((Model.forward, Inner.forward) == before)
    assert run.faults == []
    assert (Model.forward, Inner.forward) == before
    assert found == [True, True, True, False, True, True, True, False, True]


def test_a_model_that_is_traced_by_fx_in_a_recorded_step() -> None:
    """The code of `forward` is inspected, including keyword-only parameters."""
    model = Model(CALLS[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = torch.fx.symbolic_trace(model)
    with recording() as run:
        model(torch.randn(4, 3)).sum().backward()
        traced = torch.fx.symbolic_trace(model)
        optimizer.step()
        again = torch.fx.symbolic_trace(model)
    assert run.faults == []
    assert plain.code == traced.code == again.code
    x = torch.randn(4, 3)
    assert torch.equal(traced(x), model(x))


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_model_that_is_exported_or_scripted_in_a_recorded_step() -> None:
    class Plain(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(x, self.weight).tanh()

    model, x = nn.Sequential(Plain(3, 3), nn.Linear(3, 1)), torch.randn(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording() as run:
        model(x).sum().backward()
        made = [torch.jit.script(model), torch.jit.trace(model, (x,))]
        exported = torch.export.export(model, (x,)).module()
        optimizer.zero_grad()
        optimizer.step()
    assert run.faults == []
    for other in (*made, exported):
        assert torch.allclose(other(x), model(x))


def test_functions_within_a_direct_call_are_recorded() -> None:
    model = Model(CALLS[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    nodes = {"tanh": {"select": {"function": "torch.tanh", "within": "inner"}}}
    with recording({"nodes": nodes, "schedule": {"first": 9}}) as run:
        for _ in range(2):
            model.forward(torch.randn(4, 3)).sum().backward()
            optimizer.step()
    assert run.faults == []
    assert all(run.has("inner.tanh", step=k) for k in range(2))


def test_a_program_that_calls_nothing_else_is_recorded_from_its_first_step(tmp_path: Any) -> None:
    model = Model(CALLS[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with comgra.trace("debug", root=tmp_path, group="g") as session:
        for _ in range(5):
            model.forward(torch.randn(4, 3)).sum().backward()
            optimizer.step()
    assert session.path is not None
    run = comgra.open_run(session.path)
    assert [*run.steps] == [0, 1, 2, 3, 4]
    assert run.series("inner", "std").notna().all()
    assert run.slot("inner", role="weight", of="grad").series("l2").notna().all()
    assert run.report["warnings"] == []
