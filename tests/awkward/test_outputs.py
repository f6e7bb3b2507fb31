"""Modules that return something other than a fresh tensor."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.awkward.watching import assert_recorded, both, step_of
from tests.support.recording import Recording, recording


@dataclasses.dataclass
class Found:
    hidden: list[Tensor]
    loss: Tensor | None = None
    name: str = "found"


class Pair(NamedTuple):
    mean: Tensor
    spread: Tensor


class Output(OrderedDict[str, Any]):
    """Like transformers' ModelOutput: a dict whose keys are also attributes."""


class Opaque:
    """An object whose contents cannot be inspected."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Returns(nn.Module):
    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.inner, self.make = nn.Linear(3, 2), Makes(make), make

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x)
        self.inner(out)
        return out.sum()


class Makes(nn.Module):
    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(x)


CASES: dict[str, tuple[Callable[[Tensor], Any], set[str]]] = {
    "dataclass": (lambda x: Found([x, x + 1], x.mean()), {"hidden[0]", "hidden[1]", "loss"}),
    "dataclass with none": (lambda _: Found([]), set()),
    "named tuple": (lambda x: Pair(x, x + 1), {"mean", "spread"}),
    "ordered dict": (lambda x: Output(a=x, b=(x + 1, None)), {"a", "b[0]"}),
    "nested": (lambda x: {"a": [{"b": (x,)}], "c": 3, "d": "text"}, {"a[0].b[0]"}),
    "none": (lambda _: None, set()),
    "text": (lambda _: "text", set()),
    "a number": (lambda _: 3.5, set()),
    "a class": (lambda _: Found, set()),
    "an object": (Opaque, set()),
    "a set": (lambda _: {1, 2}, set()),
    "an array": (lambda _: np.ones(3), set()),
    "a size": (lambda x: x.shape, set()),
    "a function": (lambda x: x.sum, set()),
}


def record(make: Callable[[Tensor], Any]) -> Recording:
    torch.manual_seed(0)
    model = Returns(make)
    with recording() as traced:
        step_of(model, lambda m: m(torch.randn(4, 3)))
    assert traced.faults == []
    assert traced.has("linear")
    return traced


@pytest.mark.parametrize("name", CASES)
def test_tensors_are_found_in_whatever_holds_them(name: str) -> None:
    make, roles = CASES[name]
    traced = record(make)
    found = {k.role for k in traced.slots if k.node == "inner" and k.pass_ == "forward"}
    assert found == {f"output{'' if r.startswith('[') else '.'}{r}" for r in roles}


def test_a_generator_is_not_used_up() -> None:
    taken: list[int] = []

    def make(x: Tensor) -> Iterator[Tensor]:
        for number in range(3):
            taken.append(number)
            yield x * number

    results: list[Any] = []
    model = Makes(make)
    model.register_forward_hook(lambda _m, _a, out: results.append(out))
    holder = nn.Sequential(nn.Linear(3, 2), model)
    with recording() as traced:
        holder(torch.randn(4, 3))
    assert traced.faults == []
    assert taken == []
    assert len(list(results[0])) == 3


def test_a_list_that_contains_itself_does_no_harm() -> None:
    def make(x: Tensor) -> Any:
        circle: list[Any] = [x]
        circle.append(circle)
        return circle

    traced = record(make)
    assert traced.has("inner", "output[0]")


class Hostile:
    """Raises on every access, except for those that Python itself makes."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"who asks for {name}?")

    def __bool__(self) -> bool:
        raise RuntimeError("neither true nor false")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not to be compared")

    __hash__ = None


def test_an_object_that_answers_nothing_is_left_alone() -> None:
    record(lambda x: (x, Hostile()))


class SameBack(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


def test_a_module_that_returns_its_input_is_a_node_of_its_own() -> None:
    seen, traced = both(
        lambda: nn.Sequential(nn.Linear(3, 2), SameBack(), nn.Identity(), nn.Linear(2, 1)),
        lambda m: m(torch.randn(4, 3)).sum(),
    )
    assert_recorded(seen, traced, root="Sequential")


class Changes(nn.Module):
    """Changes its layers' outputs in place after they have been returned."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act = nn.Linear(3, 4), nn.ReLU(inplace=True)
        self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out = self.act(self.first(x))
        more = self.second(out)
        more += out
        more[:, 0] = 7.0
        last = self.third(more)
        last.mul_(100.0)
        return last


def test_outputs_changed_in_place_are_recorded_as_they_were_returned() -> None:
    seen, traced = both(Changes, lambda m: m(torch.randn(4, 3)).sum())
    assert not torch.equal(seen.outputs["first", 0], seen.outputs["act", 0])
    assert_recorded(seen, traced, root="Changes", gradients=False)
    for name in ("second", "third"):
        gradient = seen.gradients[name, 0].numpy()
        np.testing.assert_array_equal(traced.value(name, pass_="grad"), gradient)


class Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.pick = nn.Linear(3, 6), Makes(lambda x: x[:, 2:4])
        self.fold, self.out = nn.Unflatten(1, (3, 2)), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        whole = self.linear(x)
        part = self.pick(whole)
        cube = self.fold(whole)
        part.mul_(2.0)
        return self.out(cube).sum() + part.sum()


def test_views_are_recorded_as_they_were_before_their_base_changed() -> None:
    seen, traced = both(Views, lambda m: m(torch.randn(4, 3)))
    assert_recorded(seen, traced, root="Views", gradients=False)
