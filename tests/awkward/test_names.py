"""Modules with unusual names, attributes and classes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.awkward.watching import assert_recorded, assert_same, both, step_of, watched
from tests.support.recording import recording

NAMES = ["with space", "ünïcødé", "层", "a/b", "*", "?[x]", "0", "__class", "None", "output", "#2"]


def test_names_of_modules_may_hold_anything() -> None:
    def make() -> nn.Module:
        return nn.ModuleDict({name: nn.Linear(3, 3) for name in NAMES})

    def call(model: nn.Module) -> Tensor:
        x = torch.randn(4, 3)
        for name in NAMES:
            x = model[name](x)
        return x.sum()

    torch.manual_seed(0)
    model = make()
    with watched(model) as seen, recording() as traced:
        step_of(model, call)
    assert traced.faults == []
    assert {path for path, _ in seen.outputs} == set(NAMES)
    nodes = {key.node for key in traced.slots}
    for name in NAMES:
        node = name if name in nodes else f"Linear.{name}"
        assert_same(traced.value(node), seen.outputs[name, 0], name)


def test_a_module_dict_in_a_module_keeps_every_key() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleDict({name: nn.Linear(3, 3) for name in NAMES})

        def forward(self, x: Tensor) -> Tensor:
            for part in self.parts.values():
                x = part(x).tanh()
            return x

    seen, traced = both(Holder, lambda m: m(torch.randn(4, 3)).sum())
    assert_recorded(seen, traced, root="Holder")


def test_a_very_deep_name() -> None:
    def make() -> nn.Module:
        model: nn.Module = nn.Linear(3, 3)
        for _ in range(100):
            model = nn.Sequential(model)
        return model

    seen, traced = both(make, lambda m: m(torch.randn(4, 3)).sum())
    assert len(seen.outputs) == 101
    assert_recorded(seen, traced, root="Sequential")


class Empty(nn.Linear):
    """Is falsy, has length 0 and a constant hash, and creates attributes on access."""

    __slots__ = ("slot",)

    def __len__(self) -> int:
        return 0

    def __bool__(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return 1

    def __getattr__(self, name: str) -> Any:
        if name.startswith("made_"):
            return name
        return super().__getattr__(name)

    def __repr__(self) -> str:
        raise RuntimeError("has no description")


class NoComparison(nn.Linear):
    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not to be compared")

    def __bool__(self) -> bool:
        raise RuntimeError("neither true nor false")

    __hash__ = nn.Module.__hash__


@pytest.mark.parametrize("kind", [Empty, NoComparison])
def test_modules_that_redefine_what_python_asks_them(kind: type[nn.Linear]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = kind(3, 4), kind(4, 4), kind(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.third(self.second(self.first(x)))

    seen, traced = both(Net, lambda m: m(torch.randn(4, 3)).sum())
    assert_recorded(seen, traced, root="Net")
    assert all(traced.has(name) for name in ("first", "second", "third"))


class Chatty(nn.Module):
    """Looks up every missing attribute in the object it wraps, as many proxies do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_a_module_that_answers_for_another() -> None:
    seen, traced = both(lambda: nn.Sequential(Chatty()), lambda m: m(torch.randn(4, 3)).sum())
    assert_recorded(seen, traced, root="Sequential")


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.inner = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.first(x)))


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_a_scripted_part_is_recorded_with_its_parameters() -> None:
    torch.manual_seed(0)
    model = Scripted()
    x = torch.randn(5, 3)
    inner = model.inner(model.first(x))
    weight = dict(model.named_parameters())["inner.0.weight"]
    before = weight.detach().clone()
    with recording() as traced:
        step_of(model, lambda m: m(x).square().sum())
    assert traced.faults == []
    assert_same(traced.value("inner"), inner, "inner")
    np.testing.assert_array_equal(traced.value("inner.0", "weight")[0], before.numpy())
    assert weight.grad is not None
    got = traced.value("inner.0", "weight", pass_="grad")[0]
    np.testing.assert_array_equal(got, weight.grad.numpy())
    assert {"inner.0", "inner.1"} <= set(traced.report["never_called"])


def test_lazy_modules_are_recorded_once_they_know_their_size() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Linear(4, 2))
    with recording() as traced:
        model(torch.randn(5, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            with watched(model) as seen:
                before = model[0].weight.detach().clone()
                model(torch.randn(5, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert traced.faults == []
    assert_recorded(seen, traced, root="Sequential", step=1)
    np.testing.assert_array_equal(traced.value("0", "weight", step=1)[0], before.numpy())


class Mixture(nn.Module):
    """Four experts stored in one parameter [4, 3, 2]."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(3, 4), nn.Parameter(torch.randn(4, 3, 2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("be,ewv,bw->bv", self.router(x).softmax(-1), self.experts, x)


def test_a_mixture_in_one_parameter_can_be_taken_apart() -> None:
    nodes = {
        "experts": {
            "select": "**",
            "capture": ["parameter", "parameter_grad"],
            "values": True,
        }
    }
    torch.manual_seed(0)
    model = Mixture()
    before = model.experts.detach().clone()
    with recording(nodes=nodes) as traced:
        step_of(model, lambda m: m(torch.randn(5, 3)).square().sum())
    assert traced.faults == []
    assert_same(traced.value("Mixture", "experts"), before, "experts")
    assert model.experts.grad is not None
    gradient = traced.value("Mixture", "experts", pass_="grad")
    assert_same(gradient, model.experts.grad, "gradient")
