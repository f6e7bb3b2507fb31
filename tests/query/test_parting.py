"""Where two runs diverge: real pairs, compared with the tensors that plain torch computes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import comgra_decl as comgra
from comgra_decl.errors import UnknownNameError
from comgra_decl.query import Difference, Parting, Run, part, sentences

CAPTURE = ["output", "output_grad", "parameter", "parameter_grad"]
SPEC = {"nodes": {"all": {"select": "**", "capture": CAPTURE, "values": True}}, "graph": True}
STEPS = 4

Plain = list[tuple[int, str, torch.Tensor]]
"""Step, name and value of every tensor, in the order of execution."""


class Transposed(nn.Linear):
    """A port that forgets to transpose: it multiplies by the weight as stored."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


class Stored(nn.Module):
    """A correct port that stores the weight transposed."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach().T.clone())
        self.bias = nn.Parameter(linear.bias.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


class Halves(nn.Linear):
    """Sums the same products in a different order."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[1] // 2
        low = x[:, :half] @ self.weight[:, :half].T
        return x[:, half:] @ self.weight[:, half:].T + self.bias + low


class Broken(nn.Linear):
    """A layer that returns only NaN."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * math.nan


def net(kind: Callable[[nn.Linear], nn.Module] = lambda linear: linear, seed: int = 0) -> nn.Module:
    """A network of three layers; `kind` makes the middle one."""
    torch.manual_seed(seed)
    first, middle, last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 2)
    return nn.Sequential(first, nn.Tanh(), kind(middle), nn.Tanh(), last)


def as_(cls: type[nn.Linear]) -> Callable[[nn.Linear], nn.Module]:
    """Returns a function that copies a layer into one of another class."""

    def copy(linear: nn.Linear) -> nn.Module:
        made = cls(8, 8)
        made.load_state_dict(linear.state_dict())
        return made

    return copy


def shifted(linear: nn.Linear) -> nn.Module:
    """Another initialisation of one layer."""
    with torch.no_grad():
        linear.weight.add_(0.01)
    return linear


def training(model: nn.Module, *, lr: float = 0.1, data: int = 5) -> Plain:
    """Trains, and returns what plain torch hooks see."""
    seen: Plain = []
    step = 0

    def hear(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, _: object, output: torch.Tensor) -> None:
            if not list(module.children()):
                for parameter, value in module.named_parameters(recurse=False):
                    seen.append((step, f"{name} {parameter}", value.detach().clone()))
            seen.append((step, f"{name} output", output.detach().clone()))

        return hook

    hooks = [m.register_forward_hook(hear(n)) for n, m in model.named_modules() if n]
    torch.manual_seed(data)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for step in range(STEPS):  # noqa: B007 - the hooks read it
        x = torch.randn(16, 6)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    for hook in hooks:
        hook.remove()
    return seen


def first_difference(here: Plain, there: Plain) -> tuple[int, str] | None:
    """Returns step and name of the first tensors that differ by more than rounding."""
    for (step, name, one), (_, _, other) in zip(here, there, strict=True):
        if one.shape != other.shape or not torch.allclose(one, other, rtol=1e-4, atol=1e-6):
            return step, name
    return None


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, tuple[Run, Plain]]:
    """A run and its plain tensors for each kind of training."""
    root = tmp_path_factory.mktemp("parting")
    made: dict[str, Callable[[], Plain]] = {
        "base": lambda: training(net()),
        "same": lambda: training(net()),
        "seed": lambda: training(net(seed=1)),
        "rate": lambda: training(net(), lr=0.11),
        "layer": lambda: training(net(shifted)),
        "data": lambda: training(net(), data=6),
        "wrong port": lambda: training(net(as_(Transposed))),
        "right port": lambda: training(net(Stored)),
        "rounding": lambda: training(net(as_(Halves))),
    }
    return Pairs(root, made)


class Pairs(dict[str, tuple[Run, Plain]]):
    """Trains when a pair is asked for the first time."""

    def __init__(self, root: Path, made: Mapping[str, Callable[[], Plain]]) -> None:
        super().__init__()
        self._root, self._made = root, made

    def __missing__(self, name: str) -> tuple[Run, Plain]:
        spec = {**SPEC, "schedule": {"first": STEPS}}
        with comgra.trace(spec, root=self._root, group="g", name=name.replace(" ", "-")) as session:
            plain = self._made[name]()
        assert session.path is not None
        self[name] = comgra.open_run(session.path), plain
        return self[name]


@pytest.mark.parametrize("name", ["same", "rounding"])
@pytest.mark.slow
def test_runs_that_differ_at_most_by_rounding_do_not_part(
    pairs: Mapping[str, tuple[Run, Plain]], name: str
) -> None:
    found = part(pairs["base"][0], pairs[name][0])
    assert first_difference(pairs["base"][1], pairs[name][1]) is None
    assert (found.first, found.same_until, found.differences) == (None, None, ())
    assert found.steps.tolist() == list(range(STEPS))
    assert (found.drift.max() > 0) is np.True_ if name == "rounding" else not found.drift.any()
    assert not found.gradual
    assert found.settings.empty


@pytest.mark.parametrize(
    ("name", "step"),
    [
        pytest.param("seed", 0, marks=pytest.mark.slow),
        ("rate", 1),
        pytest.param("layer", 0, marks=pytest.mark.slow),
        ("wrong port", 0),
    ],
)
def test_runs_part_where_plain_torch_says(
    pairs: Mapping[str, tuple[Run, Plain]], name: str, step: int
) -> None:
    expected = first_difference(pairs["base"][1], pairs[name][1])
    found = part(pairs["base"][0], pairs[name][0])
    assert found.first is not None
    assert expected is not None
    assert (found.first.step, f"{found.first.node} {found.first.role}") == expected
    assert expected[0] == step
    assert found.same_until == (step - 1 if step else None)
    assert found.first.relative > found.first.tolerance
    assert found.differences[0] == found.first
    assert found.table["step"].eq(step).all()


def test_a_tensor_that_is_nan_in_one_run_differs(tmp_path: Path) -> None:
    runs = {}
    for name, model in (("finite", net()), ("nan", net(as_(Broken)))):
        spec = {**SPEC, "schedule": {"first": 1}, "stats": ["mean", "std"]}
        with comgra.trace(spec, root=tmp_path, name=name) as session:
            training(model)
        assert session.path is not None
        runs[name] = comgra.open_run(session.path)
    for one, other in (("finite", "nan"), ("nan", "finite")):
        found = part(runs[one], runs[other])
        assert found.first is not None
        assert (found.first.node, found.first.step) == ("2", 0)
        assert found.first.relative == math.inf
    assert part(runs["nan"], runs["nan"]).first is None


def test_other_data_is_found_at_the_input(pairs: Mapping[str, tuple[Run, Plain]]) -> None:
    found = part(pairs["base"][0], pairs["data"][0])
    assert found.first is not None
    assert (found.first.step, found.first.node) == (0, "input")


def test_a_port_that_stores_a_weight_transposed_agrees(
    pairs: Mapping[str, tuple[Run, Plain]],
) -> None:
    base, port = pairs["base"][0], pairs["right port"][0]
    values = base.slot("2", role="weight").value(0), port.slot("2", role="weight").value(0)
    assert not np.array_equal(*values)
    assert part(base, port).first is None


def test_a_reordered_tensor_is_found_by_its_values(
    pairs: Mapping[str, tuple[Run, Plain]],
) -> None:
    """All statistics of a transposed weight agree; only its values reveal it."""
    base, port = pairs["base"][0], pairs["wrong port"][0]
    weight: Any = ("2", "weight", 0, "forward")
    rows = [run.row(0).loc[weight] for run in (base, port)]
    assert rows[0].equals(rows[1])
    found = part(base, port)
    assert found.first is not None
    assert (found.first.node, found.first.role) == ("2", "output")
    assert {d.node for d in found.differences if d.pass_ == "forward"}.isdisjoint({"0", "1"})


def test_no_tolerance_finds_rounding(pairs: Mapping[str, tuple[Run, Plain]]) -> None:
    found = part(pairs["base"][0], pairs["rounding"][0], tolerance=0)
    assert found.first is not None
    assert found.first.node == "2"
    assert found.first.role == "output"
    assert 0 < found.first.relative < 1e-5


def test_names_of_a_port_are_matched(
    pairs: Mapping[str, tuple[Run, Plain]], tmp_path: Path
) -> None:
    spec = {**SPEC, "schedule": {"first": STEPS}}
    wrapped = nn.Sequential()
    wrapped.add_module("body", net(as_(Transposed)))
    with comgra.trace(spec, root=tmp_path) as session:
        training(wrapped)
    assert session.path is not None
    port = comgra.open_run(session.path)
    names = {str(i): f"body.{i}" for i in range(5)}
    found = part(pairs["base"][0], port, names=names)
    assert found.first is not None
    assert (found.first.node, found.first.role, found.first.step) == ("2", "output", 0)
    assert set(found.only_there) <= {"body", "Sequential"}


def test_runs_with_nothing_in_common_are_an_error(
    pairs: Mapping[str, tuple[Run, Plain]], tmp_path: Path
) -> None:
    with comgra.trace({**SPEC, "schedule": {"first": 1}}, root=tmp_path) as session:
        pass
    assert session.path is not None
    with pytest.raises(UnknownNameError, match="no tensor in common"):
        part(pairs["base"][0], comgra.open_run(session.path))


@pytest.mark.parametrize(
    ("drift", "gradual"), [([2e-6, 5e-6, 3e-5], True), ([0, 0, 3e-5], False), ([3e-5], False)]
)
def test_a_difference_that_grows_out_of_rounding_is_gradual(
    drift: list[float], gradual: bool
) -> None:
    steps = np.arange(len(drift))
    last = int(steps[-1])
    first = Difference("head", "output", 0, "forward", last, "mean", 1.0, 1.1, drift[-1], 1e-5)
    found = Parting(
        first, last - 1 if last else None, (first,), steps, np.array(drift), 7, (), (),
        pd.DataFrame(),
    )  # fmt: skip
    assert found.gradual is gradual
    text = " ".join(sentences(found))
    assert f"The runs diverge at step {last}, at head, output: mean 1 and 1.1" in text
    assert ("may merely have amplified rounding errors" in text) is gradual
