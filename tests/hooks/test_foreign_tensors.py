"""TorchScript within training, and tensors of classes defined by the program."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import comgra_decl as comgra

SPEC = {
    "nodes": {
        "all": {
            "select": "**",
            "capture": ["input", "output", "output_grad", "parameter", "parameter_grad"],
            "values": True,
        }
    },
    "graph": True,
    "schedule": {"first": 100},
}


def scripted(model: nn.Module, _: Path) -> Any:
    return torch.jit.script(model)


def traced(model: nn.Module, _: Path) -> Any:
    return torch.jit.trace(model, torch.ones(2, 3))


def loaded(model: nn.Module, folder: Path) -> Any:
    torch.jit.save(torch.jit.script(model), folder / "model.pt")
    return torch.jit.load(folder / "model.pt")


def frozen(model: nn.Module, _: Path) -> Any:
    """A frozen module, which has no `training`, before the model that is trained."""
    torch.manual_seed(1)
    first = torch.jit.freeze(torch.jit.script(nn.Linear(3, 3).eval()))
    return lambda x: model(first(x))


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("make", [scripted, traced, loaded, frozen])
def test_a_training_with_torchscript_is_recorded_and_stays_the_same(
    make: Callable[[nn.Module, Path], Any], tmp_path: Path
) -> None:
    def train() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        called = make(model, tmp_path)
        trained = called if isinstance(called, nn.Module) else model
        optimizer = torch.optim.SGD(trained.parameters(), 0.1)
        losses = []
        for _ in range(6):
            optimizer.zero_grad()
            loss = called(torch.randn(4, 3)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses

    plain = train()
    with comgra.trace(SPEC, root=tmp_path, group="g") as session:
        seen = train()
    assert torch.equal(torch.stack(plain), torch.stack(seen))
    assert session.path is not None
    run = comgra.open_run(session.path)
    assert run.state == "finished"
    assert run.steps.tolist() == list(range(6))
    told = run.kpis()
    assert told[told["name"] == "loss"]["value"].tolist() == [loss.item() for loss in plain]


class Own(torch.Tensor):
    """Reports each call that it takes part in."""

    calls: list[str]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls.append(getattr(func, "__name__", str(func)))
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("graph", [True, False])
def test_a_class_of_tensors_sees_the_calls_of_the_program_alone(
    tmp_path: Path, graph: bool
) -> None:
    def train() -> list[str]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
        optimizer = torch.optim.Adam(model.parameters())
        Own.calls = []
        for _ in range(4):
            loss = model(torch.randn(4, 3).as_subclass(Own)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return Own.calls

    calls = []
    for trace in (nullcontext(), comgra.trace({**SPEC, "graph": graph}, root=tmp_path)):
        with trace:
            calls.append(train())
    assert calls[0] == calls[1]
