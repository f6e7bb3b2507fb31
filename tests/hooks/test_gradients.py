"""Every recorded gradient equals `torch.autograd.grad` on the same graph, for any small network."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from comgra_decl.records import SlotKey
from tests.support.recording import Recording, recording

SPEC = {
    "nodes": {
        "all": {
            "select": "**",
            "capture": [
                "output",
                "output_grad",
                "input",
                "input_grad",
                "parameter_grad",
                "parameter_grad_raw",
            ],
            "values": True,
        }
    },
    "schedule": {"first": 1_000_000},
}


class Chain(nn.Module):
    """Calls its layers in a given order, some of them repeatedly, with shortcuts around some."""

    def __init__(self, order: list[tuple[int, bool]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3, bias=False)])
        self.order = order

    def calls(self, x: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Yields (layer, input, output) of each call; the caller continues with its result."""
        for index, shortcut in self.order:
            output = self.layers[index](x)
            yield index, x, output
            x = x + output if shortcut else output

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, shortcut in self.order:
            output = self.layers[index](x)
            x = x + output if shortcut else output
        return x


def gradient_of(loss: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor | None:
    if not (loss.requires_grad and tensor.requires_grad):
        return None
    return torch.autograd.grad(loss, tensor, retain_graph=True, allow_unused=True)[0]


def of_activations(model: Chain, data: torch.Tensor) -> dict[tuple[str, str, int], Any]:
    """Returns the gradient of each input and output, by node, role and iteration."""
    expected: dict[tuple[str, str, int], Any] = {}
    calls = dict.fromkeys(range(3), 0)
    for x in data:
        made = list(model.calls(x))
        _, last_input, last_output = made[-1]
        out = last_input + last_output if model.order[-1][1] else last_output
        loss = out.square().mean()
        for index, given_, output in made:
            for role, tensor in (("input", given_), ("output", output)):
                expected[f"layers.{index}", role, calls[index]] = gradient_of(loss, tensor)
            calls[index] += 1
    return expected


def of_parameters(model: Chain, data: torch.Tensor) -> dict[str, torch.Tensor | None]:
    """Returns the gradient of each parameter, summed over the batches."""
    losses = [model(x).square().mean() for x in data]
    expected = {}
    for name, parameter in model.named_parameters():
        shares = [gradient_of(loss, parameter) for loss in losses]
        found = [share for share in shares if share is not None]
        expected[name] = torch.stack(found).sum(0) if found else None
    return expected


@settings(max_examples=12)
@given(
    order=st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=5),
    batches=st.integers(1, 3),
    seed=st.integers(0, 100),
)
def test_gradients_are_those_of_autograd(
    order: list[tuple[int, bool]], batches: int, seed: int
) -> None:
    torch.manual_seed(seed)
    model, data = Chain(order), torch.randn(batches, 4, 3)
    activations, parameters = of_activations(model, data), of_parameters(model, data)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(SPEC) as run:
        for x in data:
            loss = model(x).square().mean()
            if loss.requires_grad:
                loss.backward()
        optimizer.step()
    assert run.faults == []
    for (node, role, iteration), expected in activations.items():
        check(run, SlotKey(node, role, iteration, "grad"), expected)
    for name, total in parameters.items():
        node, _, role = name.rpartition(".")
        for pass_ in ("grad", "grad:raw"):
            check(run, SlotKey(node, role, 0, pass_), None if total is None else total[None])


def check(run: Recording, key: SlotKey, expected: torch.Tensor | None) -> None:
    """A tensor without a gradient has no record of one, rather than zeros."""
    node, role, iteration, pass_ = key
    assert run.has(node, role, iteration=iteration, pass_=pass_) == (expected is not None)
    if expected is not None:
        value = run.value(node, role, iteration=iteration, pass_=pass_)
        np.testing.assert_allclose(value, expected.numpy(), rtol=1e-5, atol=1e-7)


class Rewriting(torch.optim.SGD):
    """Writes to the gradients as it steps, like optimizers with weight decay or centring."""

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.grad.zero_()
        return super().step(closure)


def test_gradients_are_those_that_the_optimizer_was_given() -> None:
    torch.manual_seed(0)
    torch.optim.SGD([torch.zeros(1)])  # from here on, torch also runs hooks in `super().step()`
    model = nn.Linear(3, 2)
    optimizer = Rewriting(model.parameters(), lr=0.1)
    used = []
    with recording(SPEC) as run:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(4, 3)).square().mean().backward()
            assert isinstance(model.weight.grad, torch.Tensor)
            used.append(model.weight.grad.clone().numpy())
            optimizer.step()
    assert run.faults == []
    assert len(run.steps) == 2
    for step, expected in enumerate(used):
        found = run.value("Linear", "weight", pass_="grad", step=step)[0]
        np.testing.assert_array_equal(found, expected)


def test_hooks_of_the_program_on_a_recorded_tensor_do_what_they_do_without_recording() -> None:
    def trained() -> tuple[list[torch.Tensor], torch.Tensor]:
        torch.manual_seed(0)
        first, second = nn.Linear(3, 4), nn.Linear(4, 1)
        model = nn.Sequential(first, second)
        seen: list[torch.Tensor] = []

        def hooked(_module: nn.Module, _args: Any, output: torch.Tensor) -> None:
            output.register_hook(lambda g: g * 2)
            removed = output.register_hook(lambda g: g * 1000)
            output.register_hook(lambda g: seen.append(g.clone()))
            removed.remove()

        first.register_forward_hook(hooked)
        x = torch.randn(5, 3)
        hidden = first(x)
        again = hidden.register_hook(lambda g: g + 1)  # after those of the recording
        removed = hidden.register_hook(lambda g: g * 1000)
        removed.remove()
        assert again.id != removed.id
        second(hidden).sum().backward()
        model(x).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        weight = first.weight.grad
        assert weight is not None
        return seen, weight

    plain, expected = trained()
    with recording(SPEC) as run:
        seen, weight = trained()
    assert not run.faults
    assert torch.equal(weight, expected)
    assert len(seen) == len(plain) == 2
    assert all(torch.equal(a, b) for a, b in zip(seen, plain, strict=True))
