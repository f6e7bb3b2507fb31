"""Functions with which a program replaces torch's are called as often as without tracing."""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import comgra_decl as comgra
from comgra_decl.hooks import originals
from tests.support.shortened import combined, shortened

SPEC = {
    "nodes": {
        "all": {"select": "**", "capture": ["input", "output", "output_grad", "parameter_grad"]},
        "fused": {"select": {"function": "F.scaled_dot_product_attention"}},
        "softmax": {"select": {"function": "torch.softmax"}},
    },
    "schedule": {"first": 100},
}
PLACES: list[tuple[Any, str]] = [
    (F, "relu"),
    (F, "gelu"),
    (F, "linear"),
    (F, "dropout"),
    (F, "softmax"),
    (F, "layer_norm"),
    (F, "cross_entropy"),
    (F, "scaled_dot_product_attention"),
    (torch, "matmul"),
    (torch, "softmax"),
    (torch.Tensor, "softmax"),
    (torch.Tensor, "mul"),
    (torch.Tensor, "__mul__"),
    (torch.Tensor, "norm"),
    (torch.Tensor, "split"),
    (torch.Tensor, "backward"),
    (torch.autograd, "grad"),
]


class Net(nn.Module):
    """Calls each of the places once."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(F.gelu(F.relu(self.first(x)) + 0.1), 0.1, self.training)
        q = self.norm(x)[None, None]
        x = F.scaled_dot_product_attention(q, q, q)[0, 0] + F.softmax(x, 1)
        x = x + torch.softmax(x, 1) + x.softmax(1) + x.mul(0.5) + x * 0.1
        x = x + x.norm() + x.split(2, 1)[0].sum()
        answer: torch.Tensor = self.last(torch.matmul(x, torch.eye(4)))
        return answer


class Scaled:
    """Replaces a function: returns 1.5 times its result, and counts calls."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original, self.calls = original, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        result = self.original(*args, **kwargs)
        return result * 1.5 if isinstance(result, torch.Tensor) and self.calls % 2 else result

    def __get__(self, owner: Any, _: type | None = None) -> Any:
        return self if owner is None else types.MethodType(self, owner)


def as_function(scaled: Scaled) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        return scaled(*args, **kwargs)

    return function


def as_wrapper(scaled: Scaled) -> Callable[..., Any]:
    @functools.wraps(scaled.original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return scaled(*args, **kwargs)

    return wrapper


def as_mock(scaled: Scaled) -> Callable[..., Any]:
    return mock.Mock(side_effect=scaled)


def as_object(scaled: Scaled) -> Callable[..., Any]:
    return scaled


def as_torchs_decorator(scaled: Scaled) -> Callable[..., Any]:
    return torch.enable_grad()(as_function(scaled))


WAYS = [as_function, as_wrapper, as_mock, as_object, as_torchs_decorator]


def train(patch: Callable[[], Iterator[Scaled]], begin: int) -> list[Any]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen: list[Any] = []
    patching = patch()
    scaled: Scaled | None = None
    for step in range(4):
        if step == begin:
            scaled = next(patching)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(torch.ones(3, 4)), torch.tensor([0, 1, 0]))
        loss.backward()
        optimizer.step()
        (grad,) = torch.autograd.grad(model(torch.ones(3, 4)).sum(), [model.first.weight])
        calls = -1 if scaled is None else scaled.calls
        seen.append((loss.detach().clone(), grad, calls, model.last.weight.detach().clone()))
    next(patching, None)
    return seen


def _named(place: tuple[Any, str]) -> str:
    return f"{place[0].__name__}.{place[1]}"


@pytest.mark.parametrize(
    ("place", "way"),
    combined(PLACES, WAYS, rounds=1),
    ids=lambda value: _named(value) if isinstance(value, tuple) else value.__name__,
)
def test_a_function_of_the_programs_own_is_called_as_often_and_with_the_same_result(
    tmp_path: Path, place: tuple[Any, str], way: Callable[[Scaled], Callable[..., Any]]
) -> None:
    owner, name = place
    if way is as_mock and isinstance(owner, type):
        pytest.skip("a mock is no method")

    def patch() -> Iterator[Scaled]:
        original = vars(owner).get(name) or getattr(owner, name)
        known = name in vars(owner)
        scaled = Scaled(getattr(owner, name))
        setattr(owner, name, way(scaled))
        try:
            yield scaled
        finally:
            setattr(owner, name, original) if known else delattr(owner, name)

    for begin in (0, 2):
        runs: list[list[Any]] = []
        for traced in (False, True):
            trace = comgra.trace(SPEC, root=tmp_path) if traced else nullcontext()
            with trace:
                runs.append(train(patch, begin))
        for plain, seen in zip(*runs, strict=True):
            assert plain[2] == seen[2], "calls"
            for one, other in zip(plain, seen, strict=True):
                assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))


def in_a_closure(holder: types.SimpleNamespace) -> Callable[..., Any]:
    original = torch.autograd.backward

    def backward(*args: Any, **kwargs: Any) -> Any:
        holder.calls += 1
        return original(*args, **kwargs)

    return backward


def in_globals(holder: types.SimpleNamespace) -> Callable[..., Any]:
    variables = {"original": torch.autograd.backward, "holder": holder}
    exec(
        "def backward(*args, **kwargs):\n"
        "    holder.calls += 1\n"
        "    return original(*args, **kwargs)",
        variables,
    )
    return cast(Callable[..., Any], variables["backward"])


def in_a_partial(holder: types.SimpleNamespace) -> Callable[..., Any]:
    def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        holder.calls += 1
        return original(*args, **kwargs)

    return functools.partial(call, torch.autograd.backward)


def elsewhere(holder: types.SimpleNamespace) -> Callable[..., Any]:
    holder.original = torch.autograd.backward
    sys.modules["tests.hooks.elsewhere"] = holder  # type: ignore[assignment]

    def backward(*args: Any, **kwargs: Any) -> Any:
        module: Any = sys.modules["tests.hooks.elsewhere"]
        module.calls += 1
        return module.original(*args, **kwargs)

    return backward


@pytest.mark.parametrize(
    ("held", "frozen"),
    shortened(
        product([in_globals, elsewhere, in_a_closure, in_a_partial], [True, False]),
        tried=2,
        several=True,
    ),
)
def test_an_original_is_found_wherever_it_is_held(
    tmp_path: Path, held: Callable[[types.SimpleNamespace], Callable[..., Any]], frozen: bool
) -> None:
    """For a function that torch passes on without all of its arguments."""
    holder = types.SimpleNamespace(calls=0)
    originals._originals.clear()
    gc.unfreeze()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.autograd, "backward", held(holder))
            if frozen:
                gc.freeze()
            with comgra.trace(SPEC, root=tmp_path):
                model = nn.Linear(2, 1)
                optimizer = torch.optim.SGD(model.parameters(), 0.1)
                for step in range(3):
                    optimizer.zero_grad()
                    torch.autograd.backward([model(torch.ones(1, 2)).sum()])
                    assert model.bias.grad is not None
                    assert model.bias.grad.item() == 1.0
                    optimizer.step()
                    assert holder.calls == step + 1
    finally:
        sys.modules.pop("tests.hooks.elsewhere", None)
        gc.freeze()


@pytest.mark.slow
def test_a_frozen_original_that_nothing_holds_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(originals, "_held", lambda *_: None)
    test_an_original_is_found_wherever_it_is_held(tmp_path, in_a_closure, frozen=True)


def test_torchs_own_functions_are_not_looked_for_among_all_objects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For some functions, such as `F.max_pool2d`, another function runs."""
    monkeypatch.setattr(originals, "_held", lambda code, _: pytest.fail(str(code)))
    convolution = nn.Conv2d(1, 4, 3)
    model = nn.Sequential(convolution, nn.MaxPool2d(2), nn.AdaptiveMaxPool2d(2), nn.Flatten())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with comgra.trace(SPEC, root=tmp_path, group="g", name="r"):
        for _ in range(3):
            optimizer.zero_grad()
            answer = model(torch.ones(2, 1, 12, 12))
            first, *_ = answer.split(2, 1)
            (
                first.norm()
                + answer.detach().unique().sum()
                + F.pairwise_distance(answer, answer).sum()
                + answer.unflatten(1, (4, 4)).sum()
                + torch.cdist(answer, answer).sum()
            ).backward()
            optimizer.step()
    assert len(comgra.open_run(tmp_path / "g" / "r").steps) == 3


def test_nothing_that_is_met_on_the_way_to_an_original_is_woken() -> None:
    """A lazy proxy loads its target as soon as anything accesses its class."""
    woken: list[int] = []

    class Lazy:
        @property  # type: ignore[misc]
        def __class__(self) -> type:
            woken.append(1)
            return dict

    original, proxy = torch.autograd.backward, Lazy()

    def backward(*args: Any, **kwargs: Any) -> Any:
        return proxy, original(*args, **kwargs)

    assert originals._held(torch.autograd.backward.__code__, backward) is original
    assert woken == []
