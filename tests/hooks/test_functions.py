"""Function calls are recorded under the module that makes them, by any name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.hooks.layers import SOFTMAX, linear, softmaxed, stack
from tests.support.recording import recording
from tests.support.traced import roles, traced, train


@pytest.mark.parametrize("name", ["torch.softmax", "F.softmax", "torch.Tensor.softmax"])
@pytest.mark.parametrize(
    "compute",
    [
        softmaxed,
        lambda x: F.softmax(x, dim=1),
        lambda x: x.softmax(dim=1),
        lambda x: nn.Softmax(dim=1)(x),
        lambda x: torch.special.softmax(x, dim=1),
    ],
    ids=["torch", "functional", "method", "module", "special"],
)
def test_a_function_and_a_method_of_one_name_are_one_operation(
    name: str, compute: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    nodes = {"probs": {"select": {"function": name, "within": "1"}, "values": True}}
    model, x = stack(compute), torch.randn(4, 3)
    expected = torch.softmax(linear(model, 1)(model[0](x)), 1).detach().numpy()
    with recording({"nodes": nodes}) as run:
        train(model, x)
    assert run.faults == []
    np.testing.assert_array_equal(run.value("1.softmax"), expected)
    assert not run.has("1.softmax", iteration=1), "one call under several names is one call"
    assert not run.has("0.softmax"), "only within the module that was meant"


def test_a_run_holds_values_gradients_and_edges_of_calls(tmp_path: Path) -> None:
    model, x = stack(softmaxed), torch.randn(4, 3)
    first = linear(model, 0)(x).softmax(1)
    second = linear(model, 1)(first).softmax(1)
    gradients = torch.autograd.grad(second.square().sum(), [first, second])
    nodes = {"all": {"select": "**"}, **SOFTMAX}
    run = traced(tmp_path, nodes, lambda: train(model, x))
    for node, value, gradient in zip(
        ("0.softmax", "1.softmax"), (first, second), gradients, strict=True
    ):
        np.testing.assert_array_equal(run.value(node, 0), value.detach().numpy())
        np.testing.assert_array_equal(run.slot(node, of="grad").value(0), gradient.numpy())
        assert run.series(node, "mean")[0] == pytest.approx(value.mean().item())
    assert {("0.linear", "0.softmax"), ("0.softmax", "0"), ("0", "1.linear")} <= {*run.edges()}
    assert run.report["entries"]["probs"] == {
        "matched": 6,  # two layers, their linear maps, the model, and outside it
        "fired": 2,
        "written": 4,
        "never_called": [],
    }


def test_repeated_calls_in_one_module_are_iterations() -> None:
    model = stack(lambda x: x.softmax(1).softmax(1).softmax(1), depth=1)
    with recording({"nodes": SOFTMAX}, schedule={"first": 9}) as run:
        train(model, torch.randn(4, 3), steps=2)
    assert [run.has("0.softmax", iteration=i, step=1) for i in range(4)] == [True] * 3 + [False]


@pytest.mark.parametrize(
    ("name", "compute"),
    [
        ("torch.matmul", lambda x: x @ torch.ones(3, 3)),
        ("torch.add", lambda x: 1 + x),
        ("torch.einsum", lambda x: torch.einsum("ij,jk->ik", x, torch.ones(3, 3))),
        ("torch.cat", lambda x: torch.cat([x, x])),
        ("torch.linalg.norm", lambda x: torch.linalg.norm(x, dim=1)),
        ("F.normalize", lambda x: F.normalize(x)),
        ("torch.relu", lambda x: (x * 1).relu_()),
        ("torch.nn.Softmax.forward", lambda x: nn.Softmax(1)(x)),
    ],
)
def test_operators_and_functions_of_all_of_torch_can_be_selected(
    name: str, compute: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    nodes = {"calls": {"select": {"function": name, "within": "0"}}}
    with recording({"nodes": nodes}) as run:
        train(stack(compute, depth=1), torch.randn(4, 3))
    assert run.faults == []
    assert run.report["entries"]["calls"]["fired"] == 1
    assert run.has(f"0.{name.rpartition('.')[2]}")
    assert not run.has(f"0.{name.rpartition('.')[2]}", iteration=1)


def test_inputs_of_a_call_are_recorded_before_it_changes_them() -> None:
    relu = {"select": {"function": "F.relu"}, "capture": ["input", "input_grad"], "values": True}
    nodes = {"act": relu}
    model, x = stack(lambda x: F.relu(x * 1.0, inplace=True), depth=1), torch.randn(4, 3)
    before = linear(model, 0)(x).detach().numpy()
    with recording({"nodes": nodes}) as run:
        train(model, x)
    np.testing.assert_array_equal(run.value("0.relu", "input"), before)
    assert not run.has("0.relu", "output")


def test_arguments_by_position_and_name_have_roles_of_their_own() -> None:
    nodes = {"all": {"select": {"function": "torch.lerp"}, "capture": "input"}}
    model = stack(lambda x: torch.lerp(x, torch.ones(3), weight=torch.tensor(0.5)), depth=1)
    with recording({"nodes": nodes}) as run:
        train(model, torch.randn(4, 3))
    found = [key.role for key in run.slots if key.node == "0.lerp"]
    assert found == ["input", "input[1]", "input.weight"]


def test_calls_inside_nothing_go_by_the_function_alone() -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    nodes = {"loss": {"select": {"function": "F.cross_entropy"}}}
    with recording({"nodes": nodes}) as run:
        loss = F.cross_entropy(model(torch.randn(4, 3)), torch.tensor([0, 1, 2, 0]))
        loss.backward()
        optimizer.step()
    assert run.faults == []
    assert run.total("cross_entropy") == pytest.approx(loss.item())


def test_a_module_keeps_its_name_when_a_function_has_the_same() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Module()
            self.softmax = nn.Softmax(1)
            self.linear = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.softmax(self.linear(x))

    within = {"function": "torch.softmax", "within": ""}
    with recording({"nodes": {"all": {"select": "**"}, "probs": {"select": within}}}) as run:
        train(Net(), torch.randn(4, 3))
    assert {"softmax", "Net.softmax()"} <= run.nodes()


@pytest.fixture
def layers() -> Any:
    """A module of the program, with a function, a class and all kinds of methods."""
    module = ModuleType("my_layers")

    def attend(x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return x * 2, {"weights": x * 3}

    class Maths:
        @staticmethod
        def double(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @classmethod
        def triple(cls, x: torch.Tensor) -> torch.Tensor:
            return x * 3

        def halve(self, x: torch.Tensor) -> torch.Tensor:
            return x / 2

    for thing in (attend, Maths):
        thing.__module__ = "my_layers"
        setattr(module, thing.__name__, thing)
    sys.modules["my_layers"] = module
    yield module
    del sys.modules["my_layers"]


@pytest.mark.usefixtures("layers")
def test_functions_of_the_program_are_recorded_wherever_they_were_imported(layers: Any) -> None:
    user = ModuleType("my_model")
    user.shortcut = layers.attend  # type: ignore[attr-defined]  # from my_layers import attend as shortcut
    sys.modules["my_model"] = user
    before = {**vars(layers)}
    nodes = {
        "own": {"select": {"function": ["my_layers.attend", "my_layers.Maths.double"]}},
        "more": {"select": {"function": ["my_layers.Maths.triple", "my_layers.Maths.halve"]}},
    }

    def compute(x: torch.Tensor) -> torch.Tensor:
        x, _ = user.shortcut(x)
        maths = layers.Maths
        return maths.triple(maths.double(maths().halve(x)))

    try:
        with recording({"nodes": nodes}) as run:
            train(stack(compute, depth=1), torch.randn(4, 3))
    finally:
        del sys.modules["my_model"]
    assert run.faults == []
    found = {(k.node, k.role) for k in run.slots if k.node.startswith("0.")}
    assert found == {
        ("0.attend", "output[0]"),
        ("0.attend", "output[1].weights"),
        ("0.double", "output"),
        ("0.triple", "output"),
        ("0.halve", "output"),
    }
    assert vars(layers) == before, "nothing stays wrapped"
    assert user.shortcut is layers.attend


def test_a_function_that_does_not_exist_is_reported_with_near_names(tmp_path: Path) -> None:
    nodes = {
        "a": {"select": {"function": "torch.sofmax"}},
        "b": {"select": {"function": "my_unknown.layers.attend"}},
        "c": {"select": {"function": "torch.nn.Softmax"}},
        "d": {"select": {"function": "torch.erfinv", "within": "0"}},
        "e": {"select": {"function": ["numpy.ndarray.sum", "math.pi"]}},
    }
    run = traced(tmp_path, nodes, lambda: train(nn.Sequential(nn.Linear(3, 3)), torch.randn(2, 3)))
    a, b, c, d, e, f = run.report["unmatched"]
    assert a.startswith("comgra.nodes.a.select: there is no function 'torch.sofmax'")
    assert "'softmax'" in a
    assert b.startswith("comgra.nodes.b.select: there is no function 'my_unknown.layers.attend'")
    assert "is a class; to select its modules, use {class: Softmax}" in c
    assert d.startswith("comgra.nodes.d.select: 'torch.erfinv' was not called within '0'")
    assert "'numpy.ndarray' is not a Python module or class" in e
    assert f == "comgra.nodes.e.select: 'math.pi' is not a function"


class Attending(nn.Module):
    """torch's attention in a module that returns only its output."""

    def __init__(self, *, batch_first: bool = True) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(4, 2, batch_first=batch_first)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.attn(x, x, x)[0])


@pytest.mark.parametrize("batch_first", [True, False])
def test_attention_of_torch_shows_the_weights_of_each_sample_and_head(
    tmp_path: Path, batch_first: bool
) -> None:
    torch.manual_seed(0)
    model, x = Attending(batch_first=batch_first), torch.randn(3, 5, 4)
    x = x if batch_first else x.transpose(0, 1)
    x.requires_grad_()
    _, expected = model.attn(x, x, x, average_attn_weights=False)
    probs = {"select": {"function": "F.softmax"}, "batch_dim": 0, "values": True}
    nodes = {"all": {"select": "**"}, "probs": probs}
    run = traced(tmp_path, nodes, lambda: train(model, x), samples={"count": 2})
    slot = run.slot("attn.softmax")
    assert slot.value(0).shape == (2, 2, 5, 5), "two samples are recorded, with their heads"
    np.testing.assert_allclose(slot.value(0), expected.detach().numpy()[:2], rtol=1e-6)
    assert {("input", "attn.softmax"), ("attn.softmax", "attn")} <= {*run.edges()}


def test_gradients_of_torchs_attention_weights_are_those_of_each_sample_and_head(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    model, x = Attending(), torch.randn(3, 5, 4)
    query, key, value = (
        (x @ w.T).reshape(3, 5, 2, 2).transpose(1, 2)
        for w in model.attn.in_proj_weight.detach().chunk(3)
    )
    weights = torch.softmax(query @ key.transpose(2, 3) / 2**0.5, -1).requires_grad_()
    mixed = (weights @ value).transpose(1, 2).reshape(3, 5, 4)
    (mixed @ model.attn.out_proj.weight.T + model.attn.out_proj.bias).square().mean().backward()
    assert weights.grad is not None
    split = {"dim": 1, "name": "head"}
    probs = {"select": {"function": "F.softmax"}, "values": True, "split": split}
    nodes = {"all": {"select": "**"}, "probs": probs}

    def steps() -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model(x).square().mean().backward()
        optimizer.step()

    run = traced(tmp_path, nodes, steps, samples={"count": 3})
    found = run.slot("attn.softmax", of="grad").value(0)
    np.testing.assert_allclose(found, weights.grad.numpy(), rtol=1e-4, atol=1e-8)
    part = run.slot("attn.softmax", role="output.head 1", of="grad").value(0)
    np.testing.assert_array_equal(part, found[:, 1])


def test_parts_of_calls_are_roles_of_their_node(tmp_path: Path) -> None:
    nodes = {"probs": {**SOFTMAX["probs"], "split": {"dim": 1, "name": "class"}}}
    run = traced(tmp_path, nodes, lambda: train(stack(softmaxed, depth=1), torch.randn(4, 3)))
    parts = ["output", "output.class 0", "output.class 1", "output.class 2"]
    assert roles(run, "0.softmax") == parts
    assert roles(run, "0.softmax", "grad") == parts
    whole, part = (run.slot("0.softmax", role=role).value(0) for role in (parts[0], parts[2]))
    np.testing.assert_array_equal(part, whole[:, 1])


def test_a_step_that_is_chosen_by_its_type_has_its_calls_too() -> None:
    types = {"by": {"input": 0, "shape": 0}}
    schedule = {"first": 1, "every": 1000}
    model = stack(softmaxed, depth=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording({"nodes": SOFTMAX, "types": types, "schedule": schedule}) as run:
        for size in (4, 4, 5, 4, 6):
            model(torch.randn(size, 3)).sum().backward()
            optimizer.step()
    assert run.faults == []
    assert [step.info.step for step in run.steps] == [0, 2, 4]
    assert all(run.has("0.softmax", step=i) for i in range(3))


def test_calls_of_a_step_that_is_decided_about_when_its_model_is_called() -> None:
    nodes = {"probs": {"select": {"function": "torch.softmax", "within": "1"}}}
    model, x = stack(softmaxed), torch.randn(4, 3)
    spec = {
        "nodes": nodes,
        "types": {"by": {"input": 0, "shape": 0}},
        "schedule": {"first": 0, "every": 3},
    }
    with recording(spec) as run:
        for _ in range(7):
            train(model, x)
    assert run.faults == []
    assert [step.info.step for step in run.steps] == [0, 3, 6]
    assert all(run.has("1.softmax", step=number) for number in range(3))
