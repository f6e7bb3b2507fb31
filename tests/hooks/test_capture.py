"""A recorded step contains what plain torch computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.recording import EVERYTHING, recording


def train(model: nn.Module, *, steps: int = 1, batch: int = 4, **optim: float) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=optim.get("lr", 0.1))
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(batch, 3)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.outer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(x + torch.relu(self.inner(x)))


def test_every_output_is_recorded_as_the_module_returned_it() -> None:
    seen: dict[str, torch.Tensor] = {}
    model = Residual()
    for name, module in model.named_modules():
        module.register_forward_hook(
            lambda _m, _a, out, name=name: seen.__setitem__(name, out.detach().clone())
        )
    with recording() as run:
        train(model)
    assert run.faults == []
    for name in ("inner", "outer"):
        np.testing.assert_array_equal(run.value(name), seen[name].numpy())
        np.testing.assert_allclose(run.total(name), seen[name].double().sum(), atol=1e-5)
    np.testing.assert_array_equal(run.value("Residual"), seen[""].numpy())


def test_gradients_of_outputs_equal_those_of_autograd() -> None:
    torch.manual_seed(0)
    model, x = Residual(), torch.randn(4, 3)
    inner = model.inner(x)
    outer = model.outer(x + torch.relu(inner))
    expected = torch.autograd.grad(outer.square().mean(), [inner, outer])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording() as run:
        model(x).square().mean().backward()
        optimizer.step()
    np.testing.assert_array_equal(run.value("inner", pass_="grad"), expected[0].numpy())
    np.testing.assert_array_equal(run.value("outer", pass_="grad"), expected[1].numpy())


def test_parameters_are_those_the_forward_pass_used() -> None:
    model = Residual()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with recording() as run:
        train(model, lr=1.0)
    np.testing.assert_array_equal(run.value("inner", "weight")[0], before["inner.weight"].numpy())
    assert not torch.equal(model.inner.weight, before["inner.weight"])


def test_parameter_gradients_are_those_the_optimizer_used_after_clipping() -> None:
    torch.manual_seed(0)
    model = Residual()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording() as run:
        for _ in range(2):  # two accumulated backward passes
            (100 * model(torch.randn(4, 3)).square().mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    for name, gradient in expected.items():
        node, _, role = name.rpartition(".")
        recorded = run.value(node, role, pass_="grad")[0]
        np.testing.assert_array_equal(recorded, gradient.numpy())


def test_repeated_calls_within_a_step_are_iterations() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(5):
                x = self.cell(x)
            return x

    with recording() as run:
        train(Recurrent(), steps=2)
    assert all(run.has("cell", iteration=i, step=s) for i in range(5) for s in range(2))
    assert not run.has("cell", iteration=5, step=1)


def test_a_value_changed_in_place_afterwards_is_recorded_as_it_was() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.linear(x)
            return out.mul_(100)

    model, x = InPlace(), torch.randn(4, 3)
    expected = model.linear(x).detach()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording() as run:
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
    np.testing.assert_array_equal(run.value("linear"), expected.numpy())
    np.testing.assert_array_equal(run.value("linear", pass_="grad"), np.full((4, 3), 100.0))


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


@dataclass
class Box:
    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...]
    name: str = "box"


@pytest.mark.parametrize(
    ("wrap", "roles"),
    [
        (lambda a, b: (a, b), {"output[0]", "output[1]"}),
        (lambda a, b: {"x": a, "deep": [b]}, {"output.x", "output.deep[0]"}),
        (Pair, {"output.left", "output.right"}),
        (lambda a, b: Box(a, (b,)), {"output.logits", "output.hidden[0]"}),
    ],
)
def test_outputs_of_any_nesting_become_roles(wrap: object, roles: set[str]) -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> object:
            y = self.linear(x)
            return wrap(y, y * 2)  # type: ignore[operator]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nested = Nested()
            self.linear = self.nested.linear

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.nested(x)
            return self.linear(x)

    with recording() as run:
        train(Model())
    assert {
        key.role for key in run.slots if key.node == "nested" and key.pass_ == "forward"
    } == roles


def test_a_tied_parameter_appears_once_with_all_its_names() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 3)
            self.second = nn.Linear(3, 3)
            self.second.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x))

    with recording() as run:
        train(Tied())
    weights = [i for k, i in run.slots.items() if k.role == "weight" and k.pass_ == "forward"]
    assert [info.names for info in weights] == [("first.weight", "second.weight")]


def test_a_tensor_without_gradient_has_no_gradient_record() -> None:
    model = Residual()
    model.inner.weight.requires_grad_(False)
    with recording() as run:
        train(model)
    assert run.has("inner", "weight")
    assert not run.has("inner", "weight", pass_="grad")
    assert run.has("inner", "bias", pass_="grad")


def test_two_backwards_through_one_tensor_are_two_passes() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording() as run:
        out = model(torch.randn(4, 3))
        out.sum().backward(retain_graph=True)
        (3 * out).sum().backward()
        optimizer.step()
    np.testing.assert_array_equal(run.value("0", pass_="grad"), np.ones((4, 2)))
    np.testing.assert_array_equal(run.value("0", pass_="grad:2"), np.full((4, 2), 3.0))


def test_inputs_and_loss_are_recorded_without_being_declared() -> None:
    model, x = Residual(), torch.randn(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording() as run:
        loss = nn.MSELoss()(model(x), torch.zeros(4, 2))
        loss.backward()
        optimizer.step()
    np.testing.assert_array_equal(run.value("input", "input"), x.numpy())
    assert run.total("loss") == pytest.approx(loss.item())
    kinds = {key.node: info.kind for key, info in run.slots.items()}
    assert kinds["input"] == "input"
    assert kinds["loss"] == "loss"
    assert list(run.steps[0].kpi_tensors) == ["loss"]


def test_the_loss_is_the_one_before_the_gradient_scale() -> None:
    model = Residual()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with recording() as run:
        loss = model(torch.randn(4, 3)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert run.total("loss") == pytest.approx(loss.item())


def test_a_keyword_only_model_has_inputs_and_a_batch_size() -> None:
    class Keyword(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, *, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x)

    model = Keyword()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording() as run:
        for _ in range(2):
            model(x=torch.randn(7, 3)).sum().backward()
            optimizer.step()
    assert all(run.has("input", "input.x", step=s) for s in range(2))
    assert [step.info.batch_size for step in run.steps] == [7, 7]
    assert len(run.rows("linear")) == 7


@pytest.mark.parametrize("first", [8, 5])
def test_a_series_is_per_sample_or_over_the_whole_from_beginning_to_end(
    first: int, caplog: pytest.LogCaptureFixture
) -> None:
    """An expert that by chance sometimes receives as many rows as the batch has."""

    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor, rows: int) -> torch.Tensor:
            return torch.as_tensor(self.outer(torch.cat([self.inner(x[:rows]), x[rows:]])))

    model = Routed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = [first, 8, 3, 8, 6]
    with recording() as run:
        for number in rows:
            model(torch.randn(8, 4), number).square().sum().backward()
            optimizer.step()
    assert run.faults == []
    for pass_ in ("forward", "grad"):
        lengths = [len(run.rows("inner", pass_=pass_, step=k)) for k in range(5)]
        assert lengths == (rows if first == 8 else [1] * 5)
    assert "for example for inner" in caplog.text


def test_only_selected_modules_are_recorded() -> None:
    nodes = {"one": {"select": "inner", "capture": ["output"]}}
    with recording(EVERYTHING, nodes=nodes) as run:
        train(Residual())
    assert run.nodes() == {"inner", "input", "loss"}


def test_an_output_replaced_by_the_programs_own_hook_is_recorded_as_replaced() -> None:
    model = Residual()
    model.inner.register_forward_hook(lambda _m, _a, out: torch.zeros_like(out))
    with recording() as run:
        train(model)
    assert run.value("inner").any() == np.False_
