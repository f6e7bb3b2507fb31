"""Logging the metrics of every step changes nothing in the program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import comgra_decl as comgra
from tests.annotations.nets import Net, curve, traced


class SeesFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


class SeesDispatch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [SeesFunctions, SeesDispatch])
def test_the_modes_of_the_program_see_nothing_of_it(mode: Any, tmp_path: Path) -> None:
    def train(net: Net) -> list[str]:
        net.step()
        net.step()
        with mode() as seeing:
            net.loss().backward()
            comgra.kpi("x", torch.ones(()))
        return list(seeing.seen)

    plain = train(Net())
    schedule = {"first": 1, "every": 10**9}
    _, seen = traced(tmp_path, lambda: train(Net()), schedule=schedule)
    assert [name for name in seen if name != "ones.default"] == [
        name for name in plain if name != "ones.default"
    ]


def test_nothing_of_it_stays_behind(tmp_path: Path) -> None:
    before = torch.autograd.backward, torch.amp.GradScaler.scale
    net = Net()
    during: list[Any] = []

    def train() -> None:
        net.step()
        during.append(torch.autograd.backward)

    traced(tmp_path, train)
    assert (torch.autograd.backward, torch.amp.GradScaler.scale) == before
    assert during != [before[0]]


def test_a_fault_of_ours_never_reaches_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("comgra_decl.hooks.scalars.losses.read_number", lambda _: 1 / 0)
    net = Net()
    run, truth = traced(tmp_path, lambda: [net.step() for _ in range(5)])
    assert truth == [Net().step(), *truth[1:]]
    assert len(truth) == 5
    assert "tracing has stopped" in caplog.text
    assert run.kpis().empty


def test_a_compiled_training_is_not_compiled_again(tmp_path: Path) -> None:
    graphs: list[int] = []

    def backend(module: torch.fx.GraphModule, _inputs: Any) -> Any:
        graphs.append(1)
        return module.forward

    def train() -> list[float]:
        net = Net()
        forward = torch.compile(net.model, backend=backend)
        losses = []
        for _ in range(10):
            loss = forward(torch.randn(2, 3)).square().mean()
            loss.backward()
            net.optimizer.step()
            losses.append(loss.item())
        return losses

    plain = train()
    alone = len(graphs)
    torch._dynamo.reset()
    run, truth = traced(tmp_path, train)
    assert truth == plain
    assert curve(run)[1] == truth
    assert len(graphs) == 2 * alone
