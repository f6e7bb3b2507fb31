"""Each of several backward passes in a step is a named pass with only its own values."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.recording import EVERYTHING, Recording, recording

RAW = {
    "nodes": {
        "all": {
            "select": "**",
            "capture": ["output", "output_grad", "parameter_grad", "parameter_grad_raw"],
            "values": True,
        }
    },
    "schedule": {"first": 1_000_000},
}


def passes(run: Recording, node: str, role: str = "output") -> set[str]:
    return {k.pass_ for k in run.slots if (k.node, k.role) == (node, role)} - {"forward"}


def test_a_later_loss_gives_its_name_to_pass_and_node() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 2)), torch.randn(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording() as run:
        for _ in range(2):
            out = model(x)
            loss_a, loss_b = out.square().mean(), out.abs().sum()
            expected = [
                torch.autograd.grad(l_, out, retain_graph=True)[0] for l_ in (loss_a, loss_b)
            ]
            loss_a.backward(retain_graph=True)
            loss_b.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert passes(run, "0") == {"grad", "grad:loss_b", "grad:autograd.grad", "grad:autograd.grad:2"}
    for pass_, gradient in zip(("grad", "grad:loss_b"), expected, strict=True):
        np.testing.assert_array_equal(run.value("0", pass_=pass_, step=1), gradient.numpy())
    assert run.total("loss", step=1) == pytest.approx(loss_a.item())
    assert run.total("loss:loss_b", step=1) == pytest.approx(loss_b.item())


def test_the_share_of_each_backward_in_a_parameter_is_its_own() -> None:
    """The contribution of a second backward is not summed with that of the first."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), torch.randn(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_a, loss_b = model(x).square().mean(), model(x).abs().sum()
    expected = {
        name: torch.autograd.grad(loss, model.get_parameter("0.weight"))[0]
        for name, loss in (("grad:loss_a", loss_a), ("grad:loss_b", loss_b))
    }
    with recording(RAW) as run:
        out = model(x)
        loss_a, loss_b = out.square().mean(), out.abs().sum()
        loss_a.backward(retain_graph=True)
        loss_b.backward()
        optimizer.step()
    assert passes(run, "0", "weight") == {"grad", "grad:raw", *expected}
    for pass_, gradient in expected.items():
        np.testing.assert_array_equal(run.value("0", "weight", pass_=pass_)[0], gradient.numpy())
    used = run.value("0", "weight", pass_="grad")[0]
    np.testing.assert_array_equal(used, (expected["grad:loss_a"] + expected["grad:loss_b"]).numpy())


def test_micro_batches_are_one_pass() -> None:
    torch.manual_seed(0)
    model, batches = nn.Sequential(nn.Linear(3, 2)), torch.randn(3, 4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    for x in batches:
        out = model(x)
        expected.append(torch.autograd.grad(out.square().mean() / 3, out)[0])
    with recording(RAW) as run:
        for x in batches:
            loss = model(x).square().mean() / 3
            loss.backward()
        optimizer.step()
    assert passes(run, "0") == {"grad"}
    assert passes(run, "0", "weight") == {"grad", "grad:raw"}
    for i, gradient in enumerate(expected):
        np.testing.assert_array_equal(run.value("0", iteration=i, pass_="grad"), gradient.numpy())
        assert run.has("loss", iteration=i)


def test_an_input_that_is_trained_has_its_gradients_in_the_iterations_it_was_given_in() -> None:
    """Two calls before each backward: both show what reached the input from them together."""
    model = nn.Linear(3, 2)
    image = torch.randn(4, 3, requires_grad=True)
    arrived: list[torch.Tensor] = []
    image.register_hook(lambda gradient: arrived.append(gradient.clone()))
    with recording() as run:
        for _ in range(3):
            (model(image) * model(image)).sum().backward()
    assert run.faults == []
    for iteration in range(6):
        found = run.value("input", "input", iteration=iteration, pass_="grad")
        np.testing.assert_array_equal(found, arrived[iteration // 2].numpy())
    assert {key.pass_ for key in run.slots} == {"forward", "grad"}


def test_phases_of_a_training_that_name_their_loss_alike_share_the_pass() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def pretrain() -> None:
        loss = model(torch.randn(4, 3)).sum()
        loss.backward()
        optimizer.step()

    def finetune() -> None:
        loss = model(torch.randn(4, 3)).square().sum()
        loss.backward()
        optimizer.step()

    with recording() as run:
        pretrain()
        finetune()
    assert passes(run, "0") == {"grad"}
    assert all(run.has("loss", step=s) for s in range(2))


def test_a_helper_that_calls_backward_does_not_hide_the_name() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def backward(loss: torch.Tensor) -> None:
        loss.backward()

    def training_step() -> None:
        loss_d = model(torch.randn(4, 3)).square().mean()
        backward(loss_d)
        loss_g = model(torch.randn(4, 3)).abs().mean()
        backward(loss_g)
        optimizer.step()

    with recording() as run:
        training_step()
    assert {key.node for key, info in run.slots.items() if info.kind == "loss"} == {
        "loss",
        "loss:loss_g",
    }
    assert run.has("0", iteration=0, pass_="grad")
    assert run.has("0", iteration=1, pass_="grad:loss_g")


def test_one_backward_of_several_losses_is_one_pass() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording() as run:
        out = model(torch.randn(4, 3))
        loss_a, loss_b = out.sum(), out.square().sum()
        torch.autograd.backward([loss_a, loss_b])
        optimizer.step()
    assert passes(run, "0") == {"grad"}
    assert run.total("loss", iteration=1) == pytest.approx(loss_b.item())


def test_a_scaled_loss_has_the_name_of_the_loss() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with recording() as run:
        out = model(torch.randn(4, 3))
        loss_a, loss_b = out.sum(), out.square().sum()
        scaler.scale(loss_a).backward(retain_graph=True)
        scaler.scale(loss_b).backward()
        scaler.step(optimizer)
        scaler.update()
    assert passes(run, "0") == {"grad", "grad:loss_b"}


def test_the_gradients_of_a_penalty_are_no_backward() -> None:
    torch.manual_seed(0)
    critic = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
    x = torch.randn(4, 3, requires_grad=True)

    def loss_of() -> torch.Tensor:
        out = critic(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.mean() + (slope.norm(dim=1) - 1).square().mean()

    expected = torch.autograd.grad(loss_of(), critic.get_parameter("0.weight"))[0]
    with recording(RAW) as run:
        loss = loss_of()
        loss.backward()
        optimizer.step()
    np.testing.assert_array_equal(run.value("0", "weight", pass_="grad")[0], expected.numpy())
    assert run.has("2", pass_="grad:autograd.grad")
    np.testing.assert_array_equal(run.value("2", pass_="grad"), np.full((4, 1), 0.25, np.float32))


def test_a_tensor_without_gradient_is_missing_and_not_zero() -> None:
    model = nn.ModuleDict({"used": nn.Linear(3, 2), "beside": nn.Linear(3, 2)})

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.parts["beside"](x)
            return self.parts["used"](x)

    whole = Model()
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    with recording(RAW) as run:
        whole(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    assert run.has("parts.beside")
    assert not run.has("parts.beside", pass_="grad")
    assert passes(run, "parts.beside", "weight") == set()
    assert run.has("parts.used", pass_="grad")


def test_looking_for_the_name_keeps_no_tensor_alive() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(EVERYTHING):
        out = model(torch.randn(4, 3))
        alive = weakref.ref(out)
        loss = out.sum()
        loss.backward()
        optimizer.step()
        del out, loss
        gc.collect()
        assert alive() is None
