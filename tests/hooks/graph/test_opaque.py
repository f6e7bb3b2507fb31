"""Calls that hide what they do: custom backward functions, checkpoints, scripts, transforms."""

from __future__ import annotations

import warnings
from typing import Any, Protocol, cast

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.hooks.graph.drawing import OUTPUTS, Forward, Net, arrows, drawn, follow, followed

END = "c => Net => loss"


class Double(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(_ctx: Any, *grads: Any) -> Any:
        return grads[0] * 2


class InNumpy(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.tanh(x.detach().numpy()) + y.detach().numpy())

    @staticmethod
    def backward(_ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class TwoResults(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.clone(), (x > 0).float()

    @staticmethod
    def setup_context(ctx: Any, _inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(_ctx: Any, *grads: Any) -> Any:
        return grads[0]


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(3)

    @staticmethod
    def backward(_ctx: Any, *grads: Any) -> Any:
        return grads[0] * 3


class Applied(Protocol):
    """torch reports nothing about `apply`."""

    def __call__(self, *args: torch.Tensor) -> Any: ...


double: Applied = Double.apply  # stored before anything is recorded, as programs do
in_numpy: Applied = InNumpy.apply
two_results: Applied = TwoResults.apply
in_place: Applied = InPlace.apply


def fresh(function: type[torch.autograd.Function], *args: torch.Tensor) -> Any:
    """Looks `apply` up when it is called, as most programs do."""
    return cast("Any", function).apply(*args)


def scripted(function: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(function)


bounded = scripted(torch.nn.functional.hardtanh)


def not_differentiable(m: Net, x: torch.Tensor) -> torch.Tensor:
    values, mask = two_results(m.a(x))
    return m.c(mask + m.b(values))


def ensemble(m: Net, x: torch.Tensor) -> torch.Tensor:
    weights = torch.stack([m.b.weight, m.b.weight])
    both = torch.vmap(lambda w, h: h @ w, in_dims=(0, None))(weights, m.a(x))
    return m.c(both.mean(0))


def per_sample(m: Net, x: torch.Tensor) -> torch.Tensor:
    hidden = m.a(x)
    return m.c(torch.vmap(lambda row: row.sum() * row)(hidden))


def gradient_as_value(m: Net, x: torch.Tensor) -> torch.Tensor:
    slope = torch.func.grad(lambda h: h.pow(3).sum())(m.a(x))
    return m.c(slope + m.b(x))


def inner_gradient(m: Net, x: torch.Tensor) -> torch.Tensor:
    hidden = m.a(x)
    (slope,) = torch.autograd.grad(hidden.pow(3).sum(), hidden, create_graph=True)
    return m.c(slope)


def jvp(m: Net, x: torch.Tensor) -> torch.Tensor:
    return m.c(torch.func.jvp(torch.tanh, (m.a(x),), (m.b(x),))[1])


def other_weights(m: Net, x: torch.Tensor) -> torch.Tensor:
    fast = {"weight": m.b.weight * 0 + m.a(x)[:3], "bias": m.b.bias}
    return m.c(torch.func.functional_call(m.b, fast, (x,)))


def ensemble_of_layers(m: Net, x: torch.Tensor) -> torch.Tensor:
    stacked = {name: torch.stack([p, p]) for name, p in m.b.named_parameters()}
    both = torch.vmap(lambda p, h: torch.func.functional_call(m.b, p, (h,)), in_dims=(0, None))
    return m.c(both(stacked, m.a(x)).mean(0))


def per_sample_gradients(m: Net, x: torch.Tensor) -> torch.Tensor:
    def loss(bias: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        return ((row + bias) ** 2).sum()

    slopes = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(m.a(x)[0], m.b(x))
    return m.c(slopes)


def mixed_precision(m: Net, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return m.c(m.a(x)).float()


class Tagged(torch.Tensor):
    """A tensor subclass that describes itself."""


def subclass(m: Net, x: torch.Tensor) -> torch.Tensor:
    return m.c((m.a(x).as_subclass(Tagged) * 2).as_subclass(torch.Tensor))


SCENARIOS: dict[str, tuple[Forward, str]] = {
    "own backward": (lambda m, x: m.c(fresh(Double, m.a(x))), "input -> a => c"),
    "own backward, kept apply": (lambda m, x: m.c(double(m.a(x))), "input -> a => c"),
    "numpy with own backward": (
        lambda m, x: m.c(in_numpy(m.a(x), m.b(x).detach())),
        "input -> a => c, input -> b -> c",
    ),
    "result without gradient": (not_differentiable, "input -> a => b => c, a -> c"),
    "own function in place": (
        lambda m, x: m.c(in_place(m.a(x) * 1)),
        "input -> a => c",
    ),
    "checkpoint": (
        lambda m, x: m.c(checkpoint(lambda h: m.b(m.a(h)), x, use_reentrant=False)),
        "input -> a => b => c",
    ),
    "old checkpoint": (
        lambda m, x: m.c(checkpoint(lambda h: m.b(h).relu(), m.a(x), use_reentrant=True)),
        "input -> a => b => c",
    ),
    "old checkpoint with detach": (
        lambda m, x: m.c(
            checkpoint(lambda h: m.b(h.detach()) + h, m.a(x), use_reentrant=True),
        ),
        "input -> a => c, a -> b => c",
    ),
    "scripted function": (
        lambda m, x: m.c(bounded(m.a(x), -1.0, 1.0)),
        "input -> a => c",
    ),
    "vmap": (per_sample, "input -> a => c"),
    "functional gradient": (gradient_as_value, "input -> a => c, input -> b => c"),
    "gradient within the forward pass": (inner_gradient, "input -> a => c"),
    "forward mode": (jvp, "input -> a => c, input -> b => c"),
    "vmap over a layer's weights": (ensemble_of_layers, "input -> a => c"),
    "gradients of single samples": (per_sample_gradients, "input -> a => c, input -> b => c"),
    "mixed precision": (mixed_precision, "input -> a => c"),
    "a tensor subclass": (subclass, "input -> a => c"),
    "functional call": (other_weights, "input -> a => b => c, input -> b"),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch's own use
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_edges(scenario: str) -> None:
    forward, expected = SCENARIOS[scenario]
    assert follow(forward) == arrows(expected) | arrows(END)


def test_vmap_over_weights_of_the_model_itself() -> None:
    assert follow(ensemble) == arrows("input -> a => c") | arrows(END)


class WithScript(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.script = scripted(nn.Sequential(nn.Linear(3, 3), nn.Tanh()))
        self.c = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.script(self.a(x)))


@pytest.mark.parametrize("select", ["**", "a|c"])
def test_a_scripted_module_is_followed_from_outside(select: str) -> None:
    spec = OUTPUTS if select == "**" else {"nodes": {"ac": {"select": {"regex": "a|c"}}}}
    model = WithScript()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with followed(spec) as run:
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    assert run.faults == []
    whole = "input -> a => script => c => WithScript => loss"
    parts = "input -> a => c => loss"
    assert drawn(run.structures[0]) == arrows(whole if select == "**" else parts)


def test_nothing_stays_wrapped() -> None:
    from torch.autograd.function import _SingleLevelFunction

    before = torch._C.ScriptFunction.__dict__["__call__"]
    assert follow(lambda m, x: m.c(fresh(Double, m.a(x))))
    assert "apply" not in vars(_SingleLevelFunction)
    assert torch._C.ScriptFunction.__dict__["__call__"] is before
