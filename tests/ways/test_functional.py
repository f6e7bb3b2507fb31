"""Training in the style of `torch.func`: the model as a function of its parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, grad_and_value, jacrev, jvp, stack_module_state, vmap
from torch.nn import functional as F

import comgra_decl as comgra
from tests.ways.models import batches
from tests.ways.proof import Outcome, Told, outcome, prove

STEPS = 4
Held = dict[str, torch.Tensor]


def net(inputs: int = 6, outputs: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))


def held_by(model: nn.Module) -> Held:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_the_gradient_of_a_function_of_the_parameters() -> None:
    """`grad_and_value`: parameters are a dictionary, an update is one line, nothing has `.grad`."""

    def training(told: Told) -> Outcome:
        model, losses = net(), []
        held = held_by(model)

        def loss_of(held: Held, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
            output = functional_call(model, held, (x,))
            return F.cross_entropy(output, y), output

        for x, y in batches(STEPS):
            told("0", held["0.weight"], "weight")
            slopes, (loss, output) = grad_and_value(loss_of, has_aux=True)(held, x, y)
            told("2", output)
            if told._listening:
                told("2", grad(F.cross_entropy)(output, y), pass_="grad:autograd.grad")
            held = {name: p - 0.1 * slopes[name] for name, p in held.items()}
            comgra.step()
            told.end()
            losses.append(loss.item())
        return outcome(losses, model, **held)

    traced = prove(training)
    assert traced.edges() >= {("0", "1"), ("1", "2"), ("0.weight", "0"), ("input", "0")}


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # jvp uses it
def test_derivatives_in_a_direction_alone() -> None:
    """Forward gradients: no backward at all."""

    def training(told: Told) -> Outcome:
        model, losses = net(), []
        held = held_by(model)
        for x, y in batches(STEPS):
            towards = {name: torch.randn_like(p) for name, p in held.items()}
            output = functional_call(model, held, (x,))
            told("2", output)
            told("2", output, iteration=1)  # within jvp
            told.end()

            def loss_of(held: Held, x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                return F.cross_entropy(functional_call(model, held, (x,)), y)

            loss, slope = jvp(loss_of, (held,), (towards,))  # type: ignore[misc]  # without aux
            held = {name: p - 0.1 * slope * towards[name] for name, p in held.items()}
            comgra.step()
            losses.append(loss.item())
        return outcome(losses, model, **held)

    prove(training)


def test_a_gradient_for_each_sample() -> None:
    """Clipped one by one, as in differential privacy: calls within vmap show only one sample."""

    def training(told: Told) -> Outcome:
        model, losses = net(), []
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

        def loss_of(held: Held, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(functional_call(model, held, (x[None],)), y[None])

        for x, y in batches(STEPS):
            held = {name: p.detach() for name, p in model.named_parameters()}
            told.parameters(model, "forward")
            slopes, of_each = vmap(grad_and_value(loss_of), (None, 0, 0))(held, x, y)
            before = held_by(model)
            for name, p in model.named_parameters():
                p.grad = slopes[name].clamp(-0.1, 0.1).mean(0)
            told.parameters(model)
            optimizer.step()
            weight = model.get_parameter("2.weight")
            told("2", weight.detach() - before["2.weight"], "weight", pass_="update")
            told("2", optimizer.state[weight]["exp_avg"], "weight.exp_avg")
            told.end()
            losses.append(of_each.mean().item())
        return outcome(losses, model, optimizers=[optimizer])

    traced = prove(training)
    assert not traced.has("2")
    assert "comgra.node(tensor, name)" in traced.report["refused"]["2 output"]


def test_an_ensemble_whose_members_are_one_tensor() -> None:
    """The inputs and outputs of vmap can be named."""

    def training(told: Told) -> Outcome:
        held, _ = stack_module_state([net() for _ in range(3)])
        form, losses = net(), []
        optimizer = torch.optim.Adam(held.values(), lr=0.01)
        for x, y in batches(STEPS):

            def member(held: Held, x: torch.Tensor = x) -> torch.Tensor:
                return functional_call(form, held, (x,))

            outputs = comgra.node(vmap(member)(held), "members")
            told("members", outputs)
            told.gradient("members", outputs)
            loss = F.cross_entropy(outputs.flatten(0, 1), y.repeat(3))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            told.end()
            losses.append(loss.item())
        return outcome(losses, form, optimizers=[optimizer], **held)

    prove(training)


def test_derivatives_of_the_model_in_the_loss() -> None:
    """A differential equation: the model is called within vmap(jacrev) and directly."""

    def training(told: Told) -> Outcome:
        model, losses = net(2, 1), []
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(STEPS):
            x = torch.randn(5, 2)
            slopes = vmap(jacrev(lambda row: model(row)[0]))(x)
            values = model(x)
            told("2", values, iteration=1)
            loss = (slopes[:, 0] - slopes[:, 1]).square().mean() + values.square().mean()
            optimizer.zero_grad()
            loss.backward()
            told.parameters(model)
            optimizer.step()
            told.end()
            losses.append(loss.item())
        return outcome(losses, model, optimizers=[optimizer])

    prove(training)
