"""Which modules are a program's models, what they are called, and which modules are not models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import prune

from tests.hooks.tiny import net, step
from tests.support.recording import recording


def test_one_model_and_a_loss_module_need_no_prefix() -> None:
    model, criterion = net(), nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording() as run:
        criterion(model(torch.randn(4, 3)), torch.zeros(4, 2)).backward()
        optimizer.step()
    assert run.nodes() == {"0", "1", "Sequential", "MSELoss", "input", "target", "loss"}


def test_what_a_loss_or_a_second_model_is_given_is_no_input() -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder, self.criterion = (
                nn.Linear(3, 3),
                nn.Linear(3, 2),
                nn.MSELoss(),
            )

    model, x = Parts(), torch.randn(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording() as run:
        out = model.decoder(model.encoder(x))
        model.criterion(out, torch.zeros(4, 2)).backward()
        optimizer.step()
    assert [key for key in run.slots if key.node == "input"] == [("input", "input", 0, "forward")]
    assert {("input", "encoder"), ("encoder", "decoder"), ("decoder", "criterion")} <= run.edges()
    assert ("criterion", "loss") in run.edges()


def test_a_transform_of_the_data_is_no_part_of_the_model() -> None:
    model, transform = net(), nn.Flatten(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording() as run:
        batch = torch.stack([transform(torch.randn(3, 1)) for _ in range(4)])
        model(batch).sum().backward()
        optimizer.step()
    assert "Flatten" not in run.nodes()
    assert "Flatten" not in {plan["node"] for plan in run.steps[0].documents["modules"]}


@pytest.mark.parametrize("built_before", [True, False])
def test_a_child_called_on_its_own_keeps_its_full_name(built_before: bool) -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

    def train(wrapper: Wrapper) -> None:
        optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
        step(wrapper.net, optimizer)

    wrapper = Wrapper() if built_before else None
    with recording() as run:
        train(wrapper or Wrapper())
    assert run.nodes() == {"net", "net.0", "net.1", "input", "loss"}


def test_modules_that_define_equality_are_told_apart_by_identity() -> None:
    class Metric(nn.Module):
        def __init__(self, *parts: Any) -> None:
            super().__init__()
            for number, part in enumerate(parts):
                self.add_module(str(number), part)

        def __hash__(self) -> int:
            return 1

        def __eq__(self, other: object) -> Any:
            return Metric(self, other)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mean()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.train_metric = Metric()
            self.val_metric = Metric()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.linear(x)
            self.train_metric(out)
            return out

    with recording() as run:
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step(model, optimizer)
    assert run.faults == []
    assert run.nodes() == {"linear", "train_metric", "Model", "input", "loss"}


class Wrapped(nn.Module):
    """Wraps a module as other libraries do, under the name that they give it."""

    def __init__(self, name: str, inner: nn.Module) -> None:
        super().__init__()
        self.name = name
        self.add_module(name, inner)
        self.add_module("_original_module", inner)

    def forward(self, x: torch.Tensor) -> Any:
        return getattr(self, self.name)(x)


@pytest.mark.parametrize("name", ["_forward_module", "_checkpoint_wrapped_module", "_orig_mod"])
@pytest.mark.parametrize("where", ["whole", "part", "both", "twice"])
def test_a_wrapper_takes_no_name_from_what_it_wraps(name: str, where: str) -> None:
    models: list[nn.Module] = []
    for _ in range(2):
        model = net()
        if where in ("part", "both"):
            model.set_submodule("0", Wrapped(name, model.get_submodule("0")))
        if where != "part":
            model = Wrapped(name, model)
        models.append(Wrapped(name, model) if where == "twice" else model)
    with recording() as run:
        for model in models:
            step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert run.faults == []
    described = [s.documents["modules"] for s in run.steps if "modules" in s.documents][-1]
    names = ["Sequential", "0", "1", "Sequential#2", "Sequential#2.0", "Sequential#2.1"]
    assert [m["node"] for m in described] == names
    assert {key.node for key in run.slots} == {*names, "input", "loss"}


@pytest.mark.parametrize("models", [1, 2])
def test_what_is_gone_for_a_while_goes_on_under_its_name(models: int) -> None:
    """Pruning replaces a weight with another parameter; a head is removed for one step."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    head = model[1]
    prefix = "Sequential." if models == 2 else ""
    other = nn.Linear(3, 1)
    with recording() as run:
        for change in range(3):
            if change == 1:
                prune.l1_unstructured(model[0], "weight", 0.5)
                del model[1]
            elif change == 2:
                prune.remove(model[0], "weight")
                model.append(head)
            if models == 1:
                step(model, torch.optim.SGD(model.parameters(), lr=0.1))
            else:
                parameters = [*model.parameters(), *other.parameters()]
                other(model(torch.randn(4, 3))).sum().backward()
                torch.optim.SGD(parameters, lr=0.1).step()
    assert run.faults == []
    nodes = {f"{prefix}0", f"{prefix}1", "Sequential", "input", "loss"}
    assert {key.node for key in run.slots} == nodes | ({"Linear"} if models == 2 else set())
    for number in range(3):
        for pass_ in ("forward", "grad"):
            there = number != 1
            assert run.has(f"{prefix}0", role="weight", pass_=pass_, step=number) == there
            assert run.has(f"{prefix}1", role="bias", pass_=pass_, step=number) == there


class Late(nn.Module):
    """Creates its parameter when called, for as many features as it receives."""

    weight: nn.Parameter | None

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("weight", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.weight is None:
            self.weight = nn.Parameter(torch.randn(x.shape[1], 2))
        return x @ self.weight


@pytest.mark.parametrize("early", [False, True])
def test_a_model_that_makes_parameters_when_it_is_called_is_traced_as_any_other(
    early: bool,
) -> None:
    with recording() as run:
        model = nn.Sequential(nn.Linear(3, 3), Late()) if early else nn.Sequential(Late())
        model(torch.randn(4, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            functional.mse_loss(model(torch.randn(4, 3)), torch.randn(4, 2)).backward()
            optimizer.step()
    late = "1" if early else "0"
    nodes = {"0", late, "Sequential", "input", "target", "loss"}
    assert run.nodes(step=1) == nodes
    for pass_ in ("forward", "grad"):
        assert run.has(late, "weight", step=1, pass_=pass_)
