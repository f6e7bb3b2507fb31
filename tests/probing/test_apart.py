"""A copy of a model never runs the modules of the program."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import comgra_decl as comgra
from comgra_decl.errors import ComgraError


def by_closure() -> nn.Module:
    net = nn.Sequential()
    net.first, net.norm, net.last = nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
    net.forward = lambda x: net.last(net.norm(net.first(x)))  # type: ignore[method-assign, operator]
    return net


class Referring(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(3), nn.Linear(3, 2)
        self.other = weakref.ref(self.norm)

    def forward(self, x: Tensor) -> Tensor:
        norm = self.other()
        assert norm is not None
        out: Tensor = self.last(norm(x))
        return out


MAKERS = [by_closure, Referring]


@pytest.mark.parametrize("make", MAKERS)
def test_a_call_on_a_copy_is_refused_if_it_reaches_the_program(
    make: Callable[[], nn.Module],
) -> None:
    net = make()
    calls: list[int] = []
    net.norm.register_forward_hook(lambda *_: calls.append(1))  # type: ignore[union-attr]
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with pytest.raises(ComgraError, match="the program's own"):
        comgra.look(net, torch.randn(16, 3))
    assert not calls
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())


@pytest.mark.parametrize("make", MAKERS)
def test_a_probe_is_refused_and_the_training_stays_as_it_is(
    make: Callable[[], nn.Module], tmp_path: Path
) -> None:
    def train(**spec: object) -> dict[str, Tensor]:
        torch.manual_seed(0)
        net = make()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        whole = {"nodes": {"all": {"select": "**"}}, **spec}
        with comgra.trace(whole, root=tmp_path, group="g"):
            for _ in range(4):
                optimizer.zero_grad()
                net(torch.randn(8, 3)).square().mean().backward()
                optimizer.step()
        return net.state_dict()

    plain, probed = train(), train(probes={"eyes": {"samples": {"count": 4}}})
    assert all(torch.equal(plain[name], probed[name]) for name in plain)
    assert "the program's own" in str(comgra.open_run(tmp_path / "g").report)
