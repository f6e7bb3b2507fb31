"""Random models, compiled at random places: observed steps match uncompiled ones.

A tensor's gradient depends on where the tensor is used: in the same compiled code, in another piece
of it, or in the surrounding eager code. The models here use their tensors in all of these.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.recording import Recording, recording
from tests.support.shortened import shortened
from tests.ways.proof import FULL

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),
    pytest.mark.skipif(torch.__version__ < "2.13", reason="two variants cannot be kept apart"),
]

STEPS = 3
WIDTH = 4
SPEC = {**FULL, "compile": "observed", "graph": False, "schedule": {"first": STEPS}, "rules": "off"}


def one(value: Any) -> torch.Tensor:
    """Makes one tensor of whatever a part returns."""
    if isinstance(value, torch.Tensor):
        return value
    parts = value.values() if isinstance(value, dict) else value
    return sum((one(part) for part in parts), torch.zeros(()))


class Part(nn.Module):
    """A random part: how it uses its inner parts is drawn once."""

    def __init__(self, draw: random.Random, depth: int) -> None:
        super().__init__()
        inner = KINDS if depth > 0 else ()
        self.kind = draw.choice(["plain", *inner])
        self.first = Part(draw, depth - 1) if depth > 0 else leaf(draw)
        self.second = Part(draw, depth - 1) if depth > 1 else leaf(draw)

    def forward(self, x: torch.Tensor) -> Any:
        return getattr(self, f"_{self.kind}")(x)

    def _plain(self, x: torch.Tensor) -> Any:
        return self.second(one(self.first(x)))

    def _residual(self, x: torch.Tensor) -> Any:
        return x + one(self.first(x))

    def _both(self, x: torch.Tensor) -> Any:
        hidden = one(self.first(x))
        return one(self.second(hidden)) + hidden, hidden

    def _collects(self, x: torch.Tensor) -> Any:
        hidden = one(self.first(x))
        last = one(self.second(hidden))
        return {"last": last, "hidden": [x, hidden, last]}

    def _broken(self, x: torch.Tensor) -> Any:
        hidden = one(self.first(x))
        doubled = hidden * 2
        torch._dynamo.graph_break()
        return one(self.second(doubled)) + hidden

    def _twice(self, x: torch.Tensor) -> Any:
        hidden = one(self.first(x))
        return one(self.first(hidden)) * 0.5 + hidden

    def _changes(self, x: torch.Tensor) -> Any:
        hidden = one(self.first(x)) * 1
        hidden += 1
        hidden = one(self.second(hidden)) * 1
        hidden *= 0.5
        return hidden

    def _views(self, x: torch.Tensor) -> Any:
        hidden = one(self.first(x))
        return one(self.second(hidden.view(-1, 2, 2).flatten(1))), hidden.view(-1, WIDTH)

    def _again(self, x: torch.Tensor) -> Any:
        hidden = one(checkpoint(self.first, x, use_reentrant=False))
        return one(self.second(hidden)) + hidden

    def _apart(self, x: torch.Tensor) -> Any:
        with torch.no_grad():
            shift = one(self.second(x))
        return one(self.first(x)) + shift


KINDS = (
    "residual",
    "both",
    "collects",
    "broken",
    "twice",
    "changes",
    "views",
    "apart",
    "again",
)


def leaf(draw: random.Random) -> nn.Module:
    kinds: list[Callable[[], nn.Module]] = [
        lambda: nn.Linear(WIDTH, WIDTH),
        nn.Identity,
        nn.Tanh,
        lambda: nn.Dropout(0.5).eval(),
        lambda: nn.Linear(WIDTH, WIDTH),
    ]
    return draw.choice(kinds)()


class Model(nn.Module):
    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.body = nn.ModuleList([Part(draw, 2), Part(draw, 1)])
        self.around = draw.random() < 0.5

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.embed(x)
        outputs = [hidden]
        for part in self.body:
            found = part(hidden)
            hidden = hidden + one(found) if self.around else one(found)
            outputs.append(hidden)
        return outputs


def compiled(net: nn.Module, draw: random.Random) -> Any:
    """Compiles random parts of a model, in random ways."""
    backend = draw.choice(["aot_eager", "eager"])
    way = draw.choice(["whole", "in place", "parts", "parts", "function", "forward"])
    if way == "whole":
        return torch.compile(net, backend=backend)
    if way == "in place":
        net.compile(backend=backend)
    elif way == "forward":
        net.forward = torch.compile(net.forward, backend=backend)
    elif way == "function":
        return torch.compile(lambda x: net(x), backend=backend)
    else:
        for module in [m for m in net.modules() if isinstance(m, Part)]:
            if draw.random() < 0.4:
                module.compile(backend=backend)
        assert isinstance(net, Model)
        for number, part in enumerate(net.body):
            if draw.random() < 0.4:
                net.body[number] = torch.compile(part, backend=backend)  # type: ignore[assignment]
    return net


def learn(net: nn.Module, outputs: list[Any], how: str) -> None:
    """Computes the gradients of all or some outputs, in one backward pass or two."""
    losses = [one(output).square().mean() for output in outputs]
    if how == "in part":
        losses[1:3].pop(0).backward()
        return
    loss = sum(losses, torch.zeros(()))
    if how == "twice":
        losses[1].backward(retain_graph=True)
    elif how == "asked before":
        torch.autograd.grad(loss, next(iter(net.parameters())), retain_graph=True)
    loss.backward()


def train(seed: int, *, compile_it: bool) -> Recording:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    net = Model(draw)
    given_grows, calls = draw.random() < 0.5, draw.choice([1, 1, 2])
    how = draw.choice(["once", "once", "twice", "asked before", "in part"])
    called = compiled(net, draw) if compile_it else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with recording(SPEC) as traced:
        for step in range(STEPS):
            torch.manual_seed(step)
            optimizer.zero_grad()
            x = torch.randn(2, WIDTH, requires_grad=given_grows)
            outputs = [x * x]  # which others than the model use
            for _ in range(calls):
                outputs += called(x)
            learn(net, outputs, how)
            optimizer.step()
    assert traced.faults == []
    return traced


def contents(traced: Recording, number: int) -> dict[Any, Any]:
    step = traced.steps[number]
    names = {info.id: key for key, info in traced.slots.items()}
    return {names[slot]: np.asarray(value, np.float64) for slot, value in step.values.items()}


@pytest.mark.parametrize("seed", shortened(range(20, 32), tried=1))
def test_random_models_compiled_at_random_places_are_recorded_as_they_are_uncompiled(
    seed: int,
) -> None:
    """Omissions are reported: gradients of views that a piece of code returns."""
    expected, found = train(seed, compile_it=False), train(seed, compile_it=True)
    said = found.report["warnings"]
    warned = any("does not expose everything" in line for line in said)
    assert not any("run eagerly rather" in line for line in said)
    for number in range(1, STEPS):
        there, here = contents(expected, number), contents(found, number)
        missing = there.keys() - here.keys()
        for key in (
            here.keys() - there.keys()
        ):  # the program's own zeros, and so one contribution more
            assert key.role in ("weight", "bias")
            assert key.pass_ != "grad" or not here[key].any()
            del here[key]
        assert not missing or warned
        assert {key.pass_ for key in missing} <= {"grad"}
        for key, value in here.items():
            np.testing.assert_allclose(value, there[key], rtol=1e-4, atol=1e-6, err_msg=str(key))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 1200, 20))
def test_many_random_models_are_recorded_as_they_are_uncompiled(first: int) -> None:
    for seed in range(first, first + 20):
        torch.compiler.reset()
        test_random_models_compiled_at_random_places_are_recorded_as_they_are_uncompiled(seed)
