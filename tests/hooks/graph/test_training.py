"""Outside the model: losses, multiple models, and state carried from step to step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.hooks.graph.drawing import Net, arrows, drawn, followed, graphs

Loop = Callable[[Callable[[], None]], None]


class Cell(nn.Module):
    """Takes a state and returns the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.c = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state = self.a(x + state)
        return self.c(state), state


def sgd(*models: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.01)


def one_step(program: Callable[[], None]) -> set[str]:
    with followed() as run:
        program()
    return graphs(run)[0]


# -- losses ------------------------------------------------------------------------------------


def test_two_backwards_are_two_losses() -> None:
    def program() -> None:
        model = Net(lambda m, x: (m.a(x), m.b(x)))
        left, right = model(torch.randn(4, 3))
        left.sum().backward()
        right.sum().backward()
        sgd(model).step()

    assert one_step(program) == arrows(
        "input -> a => Net[0] => loss, input -> b => Net[1] => loss:2"
    )


def test_a_loss_of_several_parts_has_all_their_sources() -> None:
    def program() -> None:
        model = Net(lambda m, x: (m.a(x), m.b(x)))
        left, right = model(torch.randn(4, 3))
        (left.pow(2).mean() + 0.1 * right.abs().mean()).backward()
        sgd(model).step()

    assert one_step(program) == arrows("input -> a => Net[0] => loss, input -> b => Net[1] => loss")


def test_a_loss_module_lies_between_the_model_and_the_loss() -> None:
    def program() -> None:
        model, criterion = Net(lambda m, x: m.a(x)), nn.MSELoss()
        out = model(torch.randn(4, 3))
        (criterion(out, out.detach() * 0) + criterion(out * 2, torch.zeros(4, 3))).backward()
        sgd(model).step()

    found = {edge for edge in one_step(program) if "target" not in edge}
    assert found == arrows(
        "input -> a => Net => MSELoss => loss, Net => prediction:1 => MSELoss:1 => loss"
    )


def test_accumulated_batches_are_iterations() -> None:
    def program() -> None:
        model = Net(lambda m, x: m.a(x))
        for _ in range(2):
            model(torch.randn(4, 3)).sum().backward()
        sgd(model).step()

    assert one_step(program) == arrows(
        "input -> a => Net => loss, input:1 -> a:1 => Net:1 => loss:1"
    )


# -- multiple models ---------------------------------------------------------------------------


class Second(Net):
    """Another model, so that nodes carry the names of their models."""


def test_two_models_in_a_row() -> None:
    def program() -> None:
        first, second = Net(lambda m, x: m.a(x)), Second(lambda m, x: m.b(x))
        second(first(torch.randn(4, 3)).detach().relu()).sum().backward()
        sgd(first, second).step()

    assert one_step(program) == arrows(
        "input -> Net.a => Net -> Second.b => Second => loss",
    )


def test_an_adversary_sees_what_the_generator_made() -> None:
    def program() -> None:
        generator, critic = Net(lambda m, x: m.a(x)), Second(lambda m, x: m.b(x))
        fake = generator(torch.randn(4, 3))
        (critic(fake.detach()).mean() - critic(torch.randn(4, 3)).mean()).backward()
        critic(fake).mean().backward()
        sgd(critic).step()

    assert one_step(program) == arrows(
        """input -> Net.a => Net -> Second.b => Second => loss
        input:2 -> Second.b:1 => Second:1 => loss
        Net => Second.b:2 => Second:2 => loss:2"""
    )


# -- state carried from step to step -----------------------------------------------------------


def recurrent(between: Callable[[torch.Tensor], torch.Tensor]) -> list[set[str]]:
    """Three steps that pass on a state; from the second step on, the graph must be that step's."""
    model, state = Cell(), torch.zeros(4, 3)
    optimizer = sgd(model)
    with followed() as run:
        for _ in range(12):
            out, state = model(torch.randn(4, 3), between(state))
            out.sum().backward()
            optimizer.step()
            state = between(state)
    return graphs(run)


STEP = "input -> a => c => Cell[0] => loss, input[1] -> a => Cell[1]"


@pytest.mark.parametrize(
    "between",
    [lambda s: s.detach(), lambda s: s.data, lambda s: s.detach().requires_grad_()],
    ids=["detach", "data", "leaf"],
)
def test_a_state_handed_to_the_next_step(between: Callable[[torch.Tensor], torch.Tensor]) -> None:
    found = recurrent(between)
    plain = {edge.replace("=>", "->") for edge in found[0]}
    assert plain == {edge.replace("=>", "->") for edge in arrows(STEP)}
    carried = {edge for edge in found[1] if "(earlier)" in edge}
    assert carried == arrows("Cell[1](earlier) -> input[1]")
    assert all(graph == found[1] for graph in found[1:])


def test_a_state_kept_by_the_model_itself() -> None:
    class Keeps(Net):
        state = torch.zeros(4, 3)

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.state = m.a(x + m.state.detach())
        return m.c(m.state)

    model = Keeps(forward)
    optimizer = sgd(model)
    with followed() as run:
        for _ in range(3):
            model(torch.randn(4, 3)).sum().backward()
            optimizer.step()
    found = graphs(run)
    assert found[0] == arrows("input -> a => c => Keeps => loss")
    assert found[1] == found[2] == found[0] | arrows("a(earlier) -> a")


def test_a_replay_buffer() -> None:
    kept = [torch.zeros(4, 3)]
    model = Net(lambda m, x: m.c(m.a(x)))
    optimizer = sgd(model)
    with followed() as run:
        for _ in range(3):
            out = model(kept[-1])
            kept.append(out.detach())
            out.sum().backward()
            optimizer.step()
    found = graphs(run)
    assert found[0] == arrows("input -> a => c => Net => loss")
    assert found[1] == found[2] == found[0] | arrows("Net(earlier) -> input")


def test_data_that_is_used_at_every_step_is_not_memory() -> None:
    x = torch.randn(4, 3)
    flat = nn.Flatten()  # its output shares the input's memory
    model = Net(lambda m, x: m.c(m.a(flat(x))))
    model.add_module("flat", flat)
    optimizer = sgd(model)
    with followed() as run:
        for _ in range(3):
            model(x).sum().backward()
            optimizer.step()
    assert graphs(run) == [arrows("input -> flat -> a => c => Net => loss")] * 3


def test_running_statistics_that_are_only_written_are_no_memory() -> None:
    norm = nn.BatchNorm1d(3)
    model = Net(lambda m, x: m.c(norm(m.a(x))))
    model.add_module("norm", norm)
    optimizer = sgd(model)
    with followed() as run:
        for _ in range(3):
            model(torch.randn(4, 3)).sum().backward()
            optimizer.step()
    assert graphs(run) == [arrows("input -> a => norm => c => Net => loss")] * 3
    assert len(run.structures) == 1


def test_a_gradient_penalty_is_part_of_the_loss() -> None:
    def program() -> None:
        model = Net(lambda m, x: m.c(m.a(x).tanh()))
        x = torch.randn(4, 3, requires_grad=True)
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (out.mean() + ((slope.norm(dim=1) - 1) ** 2).mean()).backward()
        sgd(model).step()

    assert one_step(program) == arrows("input => a => c => Net => loss, input => loss")


def test_forward_and_backward_within_the_optimizer() -> None:
    model, x = Net(lambda m, x: m.c(m.a(x))), torch.randn(4, 3)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).pow(2).sum()
        loss.backward()
        return loss

    with followed() as run:
        optimizer.step(closure)
    assert graphs(run)[0] == arrows(
        """input -> a => c => Net => loss
        input -> a:1 => c:1 => Net:1 => loss:1"""
    )


def test_two_roles_of_one_tensor_at_every_step() -> None:
    model = Net(lambda m, x: (h := m.a(x), h))
    optimizer = sgd(model)
    with followed() as run:
        for _ in range(3):
            sum(model(torch.randn(4, 3))).sum().backward()
            optimizer.step()
    expected = arrows("input -> a => Net[0] => loss, a => Net[1] => loss")
    assert graphs(run) == [expected] * 3


def test_a_running_target_network_is_no_memory_of_the_step() -> None:
    online, slow = Net(lambda m, x: m.a(x)), Net(lambda m, x: m.a(x))
    optimizer = sgd(online)
    with followed() as run:
        for _ in range(3):
            x = torch.randn(4, 3)
            with torch.no_grad():
                aim = slow(x)
            F.mse_loss(online(x), aim).backward()
            optimizer.step()
            with torch.no_grad():
                for p, q in zip(slow.parameters(), online.parameters(), strict=True):
                    p.lerp_(q, 0.1)
    assert run.faults == []
    assert all("(earlier)" not in edge for s in run.structures for edge in drawn(s))
