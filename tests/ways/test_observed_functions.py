"""Compiled functions that call models, with `compile: observed`.

The expected result is the complete record of the same program uncompiled, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.recording import contents, recording
from tests.support.shortened import shortened
from tests.ways.models import batches
from tests.ways.proof import Outcome, Told, attached, outcome, same, seeded
from tests.ways.test_compiled import Block, Graphs
from tests.ways.test_observed import RECORDED, SPEC, STEPS, compiled, graphs

# torch's own imports for compiling raise warnings
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),
    pytest.mark.skipif(torch.__version__ < "2.13", reason="two variants cannot be kept apart"),
]


class Holder:
    """A plain object with a model and a loss."""

    def __init__(self, net: nn.Module) -> None:
        self.net, self.loss = net, nn.CrossEntropyLoss()

    def compute(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.loss(self.net(x), y)
        return loss


Computes = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Compile = Callable[[Any], Any]


def _loss(net: nn.Module, _: nn.Module) -> Computes:
    def forward_loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(net(x), y)

    return forward_loss


def _two_models(net: nn.Module, teacher: nn.Module) -> Computes:
    """Two models, one of which teaches the other."""

    def forward_loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = teacher(x)
        given = net(x)
        return F.cross_entropy(given, y) + F.mse_loss(given, wanted)

    return forward_loss


def _twice(net: nn.Module, _: nn.Module) -> Computes:
    """The second call receives the first one's result, as a keyword, in another position."""

    def forward_loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first = net(x)
        second = net(given=torch.cat((first, first), dim=1))
        return F.cross_entropy(first, y) + F.mse_loss(second, y[:, None] * 0.1)

    return forward_loss


def _method(net: nn.Module, _: nn.Module) -> Computes:
    return Holder(net).compute


def _moved(net: nn.Module, _: nn.Module) -> Computes:
    """Gradients reach the model's input."""

    def forward_loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(net(x), y)

    def moving(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = inner(x.clone().requires_grad_(), y)
        return loss

    inner: Any = forward_loss
    moving.compile = lambda how: _set(how)  # type: ignore[attr-defined]

    def _set(how: Callable[[Any], Any]) -> Any:
        nonlocal inner
        inner = how(forward_loss)
        return moving

    return moving


def _restored(net: nn.Module, _: nn.Module) -> Computes:
    """Two functions, compiled separately; the model's input is the image to restore."""
    assert isinstance(net, Net)

    def encode(x: torch.Tensor) -> Any:
        return net.one(x)

    def decode(x: torch.Tensor) -> Any:
        return net.two(x)

    def restoring(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(parts[1](parts[0](x)), x[:, :3])

    def compile_both(how: Callable[[Any], Any]) -> Any:
        parts[:] = map(how, parts)
        return restoring

    parts = [encode, decode]
    restoring.compile = compile_both  # type: ignore[attr-defined]
    return restoring


def _broken(net: nn.Module, _: nn.Module) -> Computes:
    def forward_loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        given = net(x)
        torch._dynamo.graph_break()
        return F.cross_entropy(given + net(x), y)

    return forward_loss


class Net(nn.Module):
    """Also accepts its input by name."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Block(6), nn.Linear(8, 3)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.two(self.one(given))
        return result


FUNCTIONS: dict[str, Callable[[nn.Module, nn.Module], Computes]] = {
    "a model and its loss": _loss,
    "two models": _two_models,
    "a model twice": _twice,
    "a method of a plain object": _method,
    "gradients of what it is given": _moved,
    "what it is to restore": _restored,
    "a graph break": _broken,
}


def train(make: Callable[..., Computes], compile_it: Compile, seen: Any = None) -> Outcome:
    net, teacher = Net(), nn.Linear(6, 3)
    computes: Any = make(net, teacher)
    computes = getattr(computes, "compile", lambda how: how(computes))(compile_it)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    losses = []
    for x, y in batches(STEPS):
        optimizer.zero_grad()
        loss = computes(x, y)
        loss.backward()
        losses.append(loss.item())
        if seen is not None:
            seen()
        optimizer.step()
    return outcome(losses, net, optimizers=[optimizer])


@pytest.mark.parametrize("how", shortened([*FUNCTIONS][::-1], tried=2))
def test_observed_functions_record_what_they_record_uncompiled(
    how: str, shown: list[tuple[str, str]]
) -> None:
    make = FUNCTIONS[how]
    fullgraph = how != "a graph break"
    with recording({**SPEC, "compile": "eager"}) as truth:
        expected = seeded(lambda _: train(make, lambda f: f), Told(listening=False))
    compile_it = partial(torch.compile, backend="aot_eager", fullgraph=fullgraph)
    before = attached()
    with recording(SPEC) as traced:
        found = seeded(lambda _: train(make, compile_it), Told(listening=False))
    same(expected, found)
    assert attached() == before
    assert traced.faults == truth.faults == []
    assert traced.report["warnings"] == truth.report["warnings"]
    assert [step.info.step for step in traced.steps] == RECORDED
    assert any(node.endswith(("one.two", "Block.two")) for node, _ in shown)
    for number in range(len(RECORDED)):
        whole = {key: v for key, v in contents(truth, number).items() if key.node != "prediction"}
        shown_in_it = contents(traced, number)
        assert {key: v for key, v in shown_in_it.items() if key.node != "prediction"} == whole


@pytest.mark.parametrize("how", shortened(FUNCTIONS, tried=1))
def test_observed_functions_are_compiled_once_more_and_no_other_step_is_looked_at(how: str) -> None:
    make, fullgraph = FUNCTIONS[how], how != "a graph break"

    def counted(recorded: bool) -> tuple[list[int], list[dict[str, int]]]:
        torch.compiler.reset()
        counting, by_step, counts = Graphs(), [], []

        def seen() -> None:
            by_step.append(counting.compiled)
            counts.append(graphs())

        compile_it = partial(torch.compile, backend=counting, fullgraph=fullgraph)
        with recording(SPEC if recorded else {**SPEC, "compile": "eager"}) as traced:
            seeded(lambda _: train(make, compile_it, seen), Told(listening=False))
        assert traced.faults == []
        return by_step, counts

    eager, _ = counted(recorded=False)
    observed, counts = counted(recorded=True)
    once = eager[-1]
    assert observed == [0, once, *[2 * once] * (STEPS - 2)]
    assert counts[2] == counts[-1], "the compiler has looked at something again"


def test_a_forward_that_is_compiled_by_itself_runs_eagerly_and_says_why(
    shown: list[tuple[str, str]],
) -> None:
    """Nothing is called that could carry a hook."""

    def make(net: nn.Module, _: nn.Module) -> Computes:
        forward = torch.compile(net.forward, backend="aot_eager")
        return lambda x, y: F.cross_entropy(forward(x), y)

    with recording({**SPEC, "compile": "auto"}) as traced:
        seeded(lambda _: train(make, lambda f: f), Told(listening=False))
    assert traced.faults == []
    (said,) = traced.report["warnings"]
    assert "it calls model.forward()" in said
    assert shown == []
    assert {*contents(traced, 1)} == {*contents(traced, 0)}


def test_a_function_that_calls_backward_too_runs_eagerly_and_says_why(
    shown: list[tuple[str, str]],
) -> None:
    """Our hooks do not read gradients and updates within compiled code."""

    def make(net: nn.Module, _: nn.Module) -> Computes:
        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            return loss.detach().requires_grad_()

        return step

    with recording({**SPEC, "compile": "auto"}) as traced:
        seeded(lambda _: train(make, compiled), Told(listening=False))
    assert traced.faults == []
    assert "also runs backward or an optimizer" in traced.report["warnings"][0]
    assert shown == []
