"""The inputs of modules, and their gradients."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from tests.support.recording import EVERYTHING, recording

INPUTS = {
    "nodes": {"all": {"select": "**", "capture": ["input", "input_grad"], "values": True}},
    "schedule": {"first": 1_000_000},
}


def test_inputs_and_their_gradients_equal_those_of_autograd() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(5, 3)
    hidden = model[0](x)
    active = torch.relu(hidden)
    expected = torch.autograd.grad(model[2](active).square().mean(), [hidden, active])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(INPUTS) as run:
        model(x).square().mean().backward()
        optimizer.step()
    assert run.faults == []
    np.testing.assert_array_equal(run.value("0", "input"), x.numpy())
    np.testing.assert_array_equal(run.value("1", "input"), hidden.detach().numpy())
    np.testing.assert_array_equal(run.value("2", "input"), active.detach().numpy())
    np.testing.assert_array_equal(run.value("1", "input", pass_="grad"), expected[0].numpy())
    np.testing.assert_array_equal(run.value("2", "input", pass_="grad"), expected[1].numpy())
    assert not run.has("0", "input", pass_="grad")  # data: nothing requires its gradient
    assert not x.requires_grad


def test_positional_and_keyword_arguments_are_roles() -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, batch_first=True)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = attention

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = torch.zeros(2, 5, dtype=torch.bool)
            return self.attention(x, 2 * x, 3 * x, key_padding_mask=mask)[0]

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(2, 5, 8)
    with recording(INPUTS) as run:
        for _ in range(2):  # the first call discovers the model
            model(x).sum().backward()
            optimizer.step()
    roles = {"input", "input[1]", "input[2]", "input.key_padding_mask"}
    assert {k.role for k in run.slots if k.node == "attention" and k.pass_ == "forward"} == roles
    for step in range(2):
        value = run.value("attention", "input[2]", step=step)
        np.testing.assert_array_equal(value, (3 * x).numpy())


def test_an_input_used_twice_has_the_sum_of_its_gradients() -> None:
    torch.manual_seed(0)
    inner = nn.Linear(3, 3)

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 3)
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            return x + self.inner(x)

    model, x = Residual(), torch.randn(4, 3)
    first = model.first(x)
    (expected,) = torch.autograd.grad((first + inner(first)).square().mean(), [first])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(INPUTS) as run:
        model(x).square().mean().backward()
        optimizer.step()
    np.testing.assert_array_equal(run.value("inner", "input", pass_="grad"), expected.numpy())


def test_an_input_that_the_programs_own_hook_replaces_is_recorded_as_replaced() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].register_forward_pre_hook(lambda _m, args: (torch.zeros_like(args[0]),))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(INPUTS) as run:
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    assert not run.value("1", "input").any()


def test_an_input_changed_in_place_by_its_module_is_recorded_as_it_came() -> None:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True)), torch.randn(4, 3)
    before = model[0](x).detach()
    gradient = (before > 0).float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(INPUTS) as run:
        model(x).sum().backward()
        optimizer.step()
    np.testing.assert_array_equal(run.value("1", "input"), before.numpy())
    np.testing.assert_array_equal(run.value("1", "input", pass_="grad"), gradient.numpy())


def test_the_gradient_of_a_model_input_is_that_of_its_own_step() -> None:
    """Full-batch training passes the same leaf in every step; its `.grad` is never cleared."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 2)), torch.randn(4, 3, requires_grad=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    with recording(EVERYTHING) as run:
        for _ in range(5):
            loss = model(x).square().mean()
            expected.append(torch.autograd.grad(loss, [x], retain_graph=True)[0])
            loss.backward()
            optimizer.step()
    for step, gradient in enumerate(expected):
        recorded = run.value("input", "input", pass_="grad", step=step)
        np.testing.assert_array_equal(recorded, gradient.numpy())
    assert not x._backward_hooks
    assert x.is_leaf
    torch.testing.assert_close(x.grad, torch.stack(expected).sum(0))


def test_a_shared_module_has_an_input_for_each_call() -> None:
    torch.manual_seed(0)
    cell = nn.Linear(3, 3)

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = cell

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                x = torch.tanh(self.cell(x))
            return x

    model, x = Recurrent(), torch.randn(4, 3)
    states = [x]
    for _ in range(3):
        states.append(torch.tanh(cell(states[-1])))
    expected = torch.autograd.grad(states[-1].sum(), states[1:3])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(INPUTS) as run:
        model(x).sum().backward()
        optimizer.step()
    for i, gradient in enumerate(expected, 1):
        value = run.value("cell", "input", iteration=i)
        np.testing.assert_array_equal(value, states[i].detach().numpy())
        value = run.value("cell", "input", iteration=i, pass_="grad")
        np.testing.assert_array_equal(value, gradient.numpy())
