"""Optimizers of all kinds, and none: bit-identical training, and correct records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

from tests.ways.models import Net, batches
from tests.ways.proof import Outcome, Told, outcome, prove

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "fused SGD": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "differentiable": lambda p: torch.optim.Adam(p, lr=0.01, differentiable=False, maximize=True),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_any_optimizer(kind: str) -> None:
    def training(told: Told) -> Outcome:
        model = Net()
        optimizer = OPTIMIZERS[kind](model.parameters())
        losses = []
        for x, y in batches(5):
            told.parameters(model, "forward")
            before = [p.detach().clone() for p in model.parameters()]
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            told.parameters(model)
            optimizer.step()
            for (name, p), old in zip(model.named_parameters(), before, strict=True):
                node, role = name.split(".")
                told(node, p.detach() - old, role, pass_="update")
                for key, value in optimizer.state[p].items():
                    if isinstance(value, torch.Tensor) and value.dim():
                        told(node, value, f"{role}.{key}")
            told.end()
            losses.append(loss.item())
        return outcome(losses, model, optimizers=[optimizer])

    prove(training)


def test_a_closure_that_is_called_many_times() -> None:
    """LBFGS: several forward and backward passes in one step, each an iteration of it."""

    def training(told: Told) -> Outcome:
        model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1))
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5)
        losses = []
        x, y = torch.randn(8, 6), torch.randn(8, 1)
        calls = 0

        def closure() -> torch.Tensor:
            nonlocal calls
            optimizer.zero_grad()
            hidden = model(x)
            told("2", hidden, iteration=calls)
            loss = F.mse_loss(hidden, y)
            loss.backward()
            calls += 1
            return loss

        for _ in range(3):
            calls = 0
            told.parameters(model, "forward")
            losses.append(optimizer.step(closure).detach().item())
            told.parameters(model)  # LBFGS ends with the gradient of its last closure
            told.end()
        return outcome(losses, model)

    prove(training)


class Filter(nn.Module):
    """Multiplies frequencies by a complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.randn(3, dtype=torch.cfloat))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.irfft(torch.fft.rfft(self.linear(x)) * self.weight, n=4)


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_complex_parameters_whose_views_do_not_tell_their_graph(search: str | None) -> None:
    """LBFGS modifies the base of views created without gradients: their `grad_fn` is unreadable."""

    def training(told: Told) -> Outcome:
        model = Filter()
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, line_search_fn=search)
        x, losses = torch.randn(8, 4), []
        calls = 0

        def closure() -> torch.Tensor:
            nonlocal calls
            optimizer.zero_grad()
            answer = model(x)
            told("Filter", answer, iteration=calls)
            loss = F.mse_loss(answer, x.flip(0))
            loss.backward()
            calls += 1
            return loss

        for _ in range(4):
            calls = 0
            losses.append(optimizer.step(closure).detach().item())
            told.end()
        return outcome(losses, model)

    prove(training)


@pytest.mark.parametrize("how", ["data", "no_grad"])
def test_updates_written_by_hand_are_steps(how: str) -> None:
    def training(told: Told) -> Outcome:
        model = Net()
        losses = []
        for x, y in batches(4):
            told.parameters(model, "forward")
            output = model(x)
            told("head", output)
            loss = F.cross_entropy(output, y)
            loss.backward()
            told.parameters(model, "grad:raw")
            told.parameters(model)
            losses.append(loss.item())
            for p in model.parameters():
                assert p.grad is not None
                if how == "data":
                    p.data -= 0.1 * p.grad
                else:
                    with torch.no_grad():
                        p.sub_(0.1 * p.grad)
                p.grad = None
            told.end()
        return outcome(losses, model)

    prove(training)


def test_updates_written_by_hand_with_a_word_for_the_end_of_a_step() -> None:
    import comgra_decl as comgra

    def training(told: Told) -> Outcome:
        model = Net()
        losses = []
        for x, y in batches(4):
            told.parameters(model, "forward")
            output = model(x)
            told("head", output)
            loss = F.cross_entropy(output, y)
            loss.backward()
            told.parameters(model, "grad:raw")
            losses.append(loss.item())
            with torch.no_grad():
                for p in model.parameters():
                    assert p.grad is not None
                    p.sub_(0.1 * p.grad)
                    p.grad = None
            comgra.step()
            told.end()
        return outcome(losses, model)

    prove(training)


def test_parameters_that_live_outside_their_model() -> None:
    """A functional optimizer: new tensors at every step, passed in by `functional_call`."""
    import comgra_decl as comgra

    def training(told: Told) -> Outcome:
        model = Net()
        held = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
        losses = []
        for x, y in batches(4):
            output = functional_call(model, held, (x,))
            told("head", output)
            told("head", held["head.weight"], "weight")
            told.gradient("head", output, pass_="grad:autograd.grad")
            loss = F.cross_entropy(output, y)
            grads = torch.autograd.grad(loss, list(held.values()))
            held = {
                n: (p - 0.1 * g).detach().requires_grad_()
                for (n, p), g in zip(held.items(), grads, strict=True)
            }
            losses.append(loss.item())
            comgra.step()
            told.end()
        return outcome(losses, model, **held)

    prove(training)


class Generator(nn.Sequential):
    """Maps two numbers to four."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 4))


class Critic(nn.Sequential):
    """Judges four numbers."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1))


@pytest.mark.parametrize("critics", [1, 3])
def test_adversaries_with_an_optimizer_each(critics: int) -> None:
    """A generator and a critic that steps more often: one record contains all critic steps."""

    def training(told: Told) -> Outcome:
        generator, critic = Generator(), Critic()
        for_g = torch.optim.Adam(generator.parameters(), lr=0.01)
        for_c = torch.optim.RMSprop(critic.parameters(), lr=0.01)
        losses = []
        for _ in range(4):
            for number in range(critics):
                real, fake = torch.randn(8, 4), generator(torch.randn(8, 2)).detach()
                told("Generator.2", fake, iteration=number)
                on_fake, on_real = critic(fake), critic(real)
                told("Critic.2", on_fake, iteration=2 * number)
                told("Critic.2", on_real, iteration=2 * number + 1)
                loss_c = on_fake.mean() - on_real.mean()
                for_c.zero_grad()
                loss_c.backward()
                told(
                    "Critic.0", next(critic.parameters()).grad, "weight", pass_=nth("grad", number)
                )
                for_c.step()
                losses.append(loss_c.item())
            made = generator(torch.randn(8, 2))
            judged = critic(made)
            told("Generator.2", made, iteration=critics)
            told.gradient("Generator.2", made, iteration=critics, pass_="grad:loss_g")
            told("Critic.2", judged, iteration=2 * critics)
            loss_g = -judged.mean()
            for_g.zero_grad()
            loss_g.backward()
            told("Generator.0", next(generator.parameters()).grad, "weight", pass_="grad")
            for_g.step()
            told.end()
            losses.append(loss_g.item())
        return outcome(losses, generator, critic, optimizers=[for_g, for_c])

    prove(training)


def nth(name: str, number: int) -> str:
    return name if number == 0 else f"{name}:{number + 1}"


def test_two_losses_in_turn_with_one_optimizer() -> None:
    def training(told: Told) -> Outcome:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for x, y in batches(4):
            output = model(x)
            loss = F.cross_entropy(output, y)
            optimizer.zero_grad()
            loss.backward(retain_graph=True)
            shares = model.head.weight.grad.clone()  # type: ignore[union-attr]
            told("head", shares, "weight", pass_="grad:loss")
            told.gradient("head", output, pass_="grad:penalty")
            penalty = output.square().mean()
            penalty.backward()
            told("head", model.head.weight.grad, "weight", pass_="grad")
            optimizer.step()
            told.end()
            losses += [loss.item(), penalty.item()]
        return outcome(losses, model, optimizers=[optimizer])

    prove(training)


def test_a_schedule_of_learning_rates_and_a_running_average_of_the_weights() -> None:
    def training(told: Told) -> Outcome:
        model = Net()
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        rates = SWALR(optimizer, swa_lr=0.01)
        losses = []
        for x, y in batches(5):
            told.parameters(model, "forward")
            output = model(x)
            told("head", output)
            loss = F.cross_entropy(output, y)
            optimizer.zero_grad()
            loss.backward()
            told.parameters(model)
            optimizer.step()
            told.end()
            rates.step()
            average.update_parameters(model)
            average.eval()
            with torch.no_grad():
                losses += [loss.item(), F.cross_entropy(average(x), y).item()]
        return outcome(losses, model, average, optimizers=[optimizer])

    prove(training)
